"""DeepSpeed configurations and Trainer arguments become training settings and a policy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.toys import toy_machine, toy_workload
from tierplan.planner.policies import decide
from tierplan.planner.training_files import read_training_file
from tierplan.planner.training_files.deepspeed import PER_GPU
from tierplan.sim.workloads.workload import Training, WorkloadError

BASE = Training(sequence_length=512, per_device_train_batch_size=3)

KEPT = {"checkpoints": "device"}


def written(folder: Path, content: object) -> Path:
    path = folder / "ds.json"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("zero", "policy", "options"),
    [
        ({}, "in-memory", {}),
        ({"stage": 1, "overlap_comm": True}, "zero-1", {"checkpointing": "off", "overlap": "on"}),
        ({"stage": 2}, "zero-2", {"checkpointing": "off"}),
        ({"stage": 2, "offload_optimizer": {"device": "cpu"}}, "zero-offload", {"checkpointing": "off"}),
        (
            {"stage": 2, "offload_optimizer": {"device": "none", "pin_memory": True}, "round_robin_gradients": True},
            "zero-2",
            {"checkpointing": "off"},
        ),
        ({"stage": 3}, "zero-infinity", {"params": "device", "optimizer": "device", **KEPT}),
        (
            {"stage": 3, "offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "cpu"}},
            "zero-infinity",
            {"params": "host", "optimizer": "nvme", **KEPT},
        ),
        (
            {"stage": 3, "offload_optimizer": {"device": "nvme", "pipeline_read": True, "pin_memory": False}},
            "zero-infinity",
            {"params": "device", "optimizer": "nvme", "pipeline": "on", "pin_memory": "off", **KEPT},
        ),
        (
            {"stage": 3, "offload_optimizer": {"device": "cpu", "pipeline_write": False, "pin_memory": True}},
            "zero-infinity",
            {"params": "device", "optimizer": "host", "pipeline": "off", "pin_memory": "on", **KEPT},
        ),
    ],
)
def test_the_policy_of_a_deepspeed_configuration(
    tmp_path: Path, zero: dict[str, object], policy: str, options: dict[str, str]
) -> None:
    found = read_training_file(written(tmp_path, {"zero_optimization": zero, "bf16": {"enabled": True}}), BASE)
    assert (found.policy, found.options) == (policy, options)
    assert decide(found.policy, toy_workload(), toy_machine(), found.options), "no option that does nothing"


def test_settings_come_from_the_file_and_auto_from_the_base(tmp_path: Path) -> None:
    content = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "fp16": {"enabled": True},
        "optimizer": {"type": "FusedAdam"},
        "train_batch_size": 48,
        "flops_profiler": {"enabled": True},
    }
    found = read_training_file(written(tmp_path, content), BASE)
    t = found.training
    assert (t.per_device_train_batch_size, t.gradient_accumulation_steps, t.dtype) == (3, 4, "fp16")
    assert (t.max_grad_norm, t.optimizer, t.sequence_length) == (0.5, "adamw", 512)
    assert any("flops_profiler" in note for note in found.notes)
    assert found.devices == 4
    assert read_training_file(written(tmp_path, {**content, "train_batch_size": 12}), BASE).devices == 1
    assert read_training_file(written(tmp_path, {**content, "train_batch_size": "auto"}), BASE).devices is None


@pytest.mark.parametrize(
    ("says", "devices", "batch", "accumulation", "filled_in"),
    [
        ({"train_micro_batch_size_per_gpu": 4}, 1, 4, 6, "gradient_accumulation_steps 6"),
        ({"train_micro_batch_size_per_gpu": 4}, 2, 4, 3, "gradient_accumulation_steps 3"),
        ({"gradient_accumulation_steps": 3}, 2, 4, 3, "train_micro_batch_size_per_gpu 4"),
        ({}, 2, 12, 1, "train_micro_batch_size_per_gpu 12, gradient_accumulation_steps 1"),
    ],
)
def test_of_three_batch_sizes_the_one_left_out_is_what_deepspeed_makes_it(
    tmp_path: Path, says: dict[str, int], devices: int, batch: int, accumulation: int, filled_in: str
) -> None:
    """`_set_batch_related_parameters` of DeepSpeed 0.19's `runtime/config.py`."""
    found = read_training_file(written(tmp_path, {"train_batch_size": 24, **says}), BASE, devices=devices)
    t = found.training
    assert (t.per_device_train_batch_size, t.gradient_accumulation_steps) == (batch, accumulation)
    assert not found.left_open
    gpus = "1 GPU" if devices == 1 else f"{devices} GPUs"
    assert f"train_batch_size 24 on {gpus} makes {filled_in}, as in DeepSpeed" in found.notes


@pytest.mark.parametrize(
    ("says", "base", "devices", "batch", "accumulation"),
    [
        (("auto", "auto"), (1, 1), 1, 1, 64),
        (("auto", "auto"), (1, 1), 4, 1, 16),
        (("auto", "auto"), (8, 1), 2, 8, 4),
        (("auto", "auto"), (1, 8), 2, 4, 8),
        (("auto", 4), (1, 1), 2, 8, 4),
        ((4, "auto"), (1, 1), 2, 4, 8),
    ],
)
def test_auto_leaves_the_division_of_a_batch_open(
    tmp_path: Path, says: tuple[object, object], base: tuple[int, int], devices: int, batch: int, accumulation: int
) -> None:
    content = {"train_batch_size": 64, **dict(zip(PER_GPU, says, strict=True))}
    given = Training(per_device_train_batch_size=base[0], gradient_accumulation_steps=base[1])
    found = read_training_file(written(tmp_path, content), given, devices=devices)
    t = found.training
    assert (t.per_device_train_batch_size, t.gradient_accumulation_steps, found.devices) == (
        batch,
        accumulation,
        devices,
    )


def test_accelerate_says_how_many_gpus_share_deepspeeds_batch(tmp_path: Path) -> None:
    written(tmp_path, {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2})
    text = "distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config: {deepspeed_config_file: ds.json}"
    (tmp_path / "c.yaml").write_text(text)
    found = read_training_file(tmp_path / "c.yaml", BASE)
    assert (found.training.gradient_accumulation_steps, found.devices) == (3, 4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "one JSON object"),
        ({"zero_optimization": {"stage": 4}}, "stage is 4"),
        ({"zero_optimization": {"stage": True}}, "stage is True"),
        ({"zero_optimization": {"stage": 2.0}}, "stage is 2.0"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "needs .*stage 1, 2 or 3, but it is 0"),
        ({"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}}, "offload_param needs .*stage 3"),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme"}}}, "nvme needs .*stage 3"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "offload_param without offload_opt"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "tape"}}}, "'tape'; it must be cpu, nvme"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": ["cpu"]}}}, r"is \['cpu'\]; it must be cpu"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer.type is 'Lamb'"),
        ({"train_micro_batch_size_per_gpu": 0}, "train_micro_batch_size_per_gpu is 0"),
        ({"gradient_clipping": -1}, "gradient_clipping is -1"),
        ({"gradient_clipping": float("nan")}, "NaN is not JSON"),
        ({"bf16": {"enabled": "on"}}, "enabled is 'on'; it must be true or false"),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "bf16 and fp16 are both enabled"),
        ({"train_batch_size": "many"}, "train_batch_size is 'many'; it must be a whole number"),
        (
            {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1},
            "train_batch_size is 8, .* is 3; give train_micro_batch_size_per_gpu and",
        ),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 3}, "8 sequences are not whole .* of 3 on 1 GPU"),
        ({"train_batch_size": 8, "gradient_accumulation_steps": 16}, "8 sequences are not whole .* in 16 .* on 1 GPU"),
    ],
)
def test_deepspeed_errors(tmp_path: Path, content: object, message: str) -> None:
    content = {"zero_optimization": {}, **content} if isinstance(content, dict) else content
    with pytest.raises(WorkloadError, match=message):
        read_training_file(written(tmp_path, content), BASE)


def test_what_changes_a_step_and_no_policy_has_is_named(tmp_path: Path) -> None:
    zero = {"stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 8, "overlap_comm": True}
    offload = {"device": "cpu", "ratio": 0.3}
    content = {"zero_optimization": {**zero, "offload_optimizer": offload}, "activation_checkpointing": {}}
    (note,) = (note for note in read_training_file(written(tmp_path, content), BASE).notes if "not taken" in note)
    keys = ("offload_optimizer.ratio", "zero_hpz_partition_size", "zero_quantized_weights")
    assert note == "not taken into account: " + ", ".join(f"zero_optimization.{key}" for key in keys)


@pytest.mark.parametrize(("on_cpu", "place"), [(True, "host"), (False, "device"), (None, "device")])
def test_checkpoints_lie_where_the_file_says(tmp_path: Path, on_cpu: bool | None, place: str) -> None:
    content = {"zero_optimization": {"stage": 3}, "activation_checkpointing": {"cpu_checkpointing": on_cpu}}
    found = read_training_file(written(tmp_path, content), BASE)
    assert found.options.get("checkpoints") == place
    assert not any("not taken into account" in note for note in found.notes)


@pytest.mark.parametrize("section", [{}, {"activation_checkpointing": {"cpu_checkpointing": True}}])
@pytest.mark.parametrize(
    ("stage", "offload", "on", "off"),
    [
        (0, "none", ("full-recompute", {}), ("in-memory", {})),
        (2, "none", ("zero-2", {"checkpointing": "on"}), ("zero-2", {"checkpointing": "off"})),
        (2, "cpu", ("zero-offload", {"checkpointing": "on"}), ("zero-offload", {"checkpointing": "off"})),
        (3, "cpu", ("zero-infinity", {"checkpoints": "device"}), ("zero-infinity", {"checkpoints": "none"})),
    ],
)
def test_the_trainer_alone_says_what_is_recomputed(
    tmp_path: Path, section: dict[str, object], stage: int, offload: str, on: object, off: object
) -> None:
    """It calls PyTorch's checkpointing, and never looks at a section of DeepSpeed's."""
    deepspeed = {"zero_optimization": {"stage": stage, "offload_optimizer": {"device": offload}}, **section}
    for said, expected in (({"gradient_checkpointing": True}, on), ({"activation_checkpointing": True}, on),
                           ({"gradient_checkpointing": False}, off), ({}, off)):  # fmt: skip
        found = read_training_file(written(tmp_path, {"output_dir": "x", "deepspeed": deepspeed, **said}), BASE)
        options = {key: value for key, value in found.options.items() if key.startswith("checkpoint")}
        assert (found.policy, options) == expected
        assert any("decides" in note for note in found.notes) == bool(section)


@pytest.mark.parametrize(("said", "policy"), [({}, "full-recompute"),
                                              ({"disable_gradient_checkpointing": True}, "in-memory")])  # fmt: skip
def test_llama_factory_recomputes_unless_told_not_to(tmp_path: Path, said: dict[str, object], policy: str) -> None:
    content = {"output_dir": "x", "finetuning_type": "full", **said}
    found = read_training_file(written(tmp_path, content), BASE)
    assert found.policy == policy
    assert not any("disable_gradient_checkpointing" in note for note in found.notes)


@pytest.mark.parametrize("key", ["cutoff_len", "max_length", "max_seq_length"])
def test_how_long_sequences_are_at_most_is_read(tmp_path: Path, key: str) -> None:
    found = read_training_file(written(tmp_path, {"output_dir": "x", key: 4096}), BASE)
    assert found.longest == 4096
    assert not any("not taken into account" in note for note in found.notes)
    assert read_training_file(written(tmp_path, {"output_dir": "x"}), BASE).longest is None


@pytest.mark.parametrize(
    ("optim", "optimizer"),
    [("paged_adamw_8bit", "adamw:states=8bit"), ("paged_adamw_32bit", "adamw"), ("paged_lion_8bit", "lion:states=8bit"),
     ("paged_lion_32bit", "lion")],
)  # fmt: skip
def test_paged_states_are_said_to_stay_where_they_are(tmp_path: Path, optim: str, optimizer: str) -> None:
    found = read_training_file(written(tmp_path, {"output_dir": "x", "optim": optim}), BASE)
    assert (found.training.optimizer, any("not paged" in note for note in found.notes)) == (optimizer, True)
    offloaded = read_training_file(written(tmp_path, {"optim": optim, "fsdp": "full_shard offload"}), BASE)
    assert (offloaded.policy, [n for n in offloaded.notes if "on the GPU" in n]) == ("fsdp-offload", [])


@pytest.mark.parametrize(("stage", "assumed"), [(0, "nothing"), (2, "nothing"), (3, "each block")])
def test_what_is_recomputed_is_assumed_by_name_where_no_file_says_it(tmp_path: Path, stage: int, assumed: str) -> None:
    found = read_training_file(written(tmp_path, {"zero_optimization": {"stage": stage}}), BASE)
    assert any(f"if at all; {assumed} is made again" in note for note in found.notes)


@pytest.mark.parametrize(("stage", "assumed"), [(0, "nothing"), (1, "nothing"), (3, "each block")])
def test_a_section_with_everything_off_says_nothing_of_what_is_recomputed(
    tmp_path: Path, stage: int, assumed: str
) -> None:
    """The one of DeepSpeed's documentation: it sets up calls that the model has to make."""
    off = dict.fromkeys(("partition_activations", "cpu_checkpointing", "profile"), False) | {"number_checkpoints": None}
    zero = {"zero_optimization": {"stage": stage}}
    found, plain = (
        read_training_file(written(tmp_path, zero | more), BASE) for more in ({"activation_checkpointing": off}, {})
    )
    assert (found.policy, found.options) == (plain.policy, plain.options)
    assert any(f"if at all; {assumed} is made again" in note for note in found.notes)


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2, "stage": 3}}')
    with pytest.raises(WorkloadError, match="'stage' is there twice"):
        read_training_file(tmp_path / "ds.json", BASE)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="there is no file"):
        read_training_file(tmp_path / "none.json", BASE)


def test_trainer_arguments(tmp_path: Path) -> None:
    content = {"per_device_train_batch_size": 2, "gradient_checkpointing": True, "max_grad_norm": 0.0, "fp16": True}
    found = read_training_file(written(tmp_path, content), BASE)
    t = found.training
    assert (t.per_device_train_batch_size, t.max_grad_norm, t.dtype, t.autocast) == (2, None, "fp32", "fp16")
    assert found.policy == "full-recompute"
    assert read_training_file(written(tmp_path, {"output_dir": "x"}), BASE).training.max_grad_norm == 1.0  # its default


@pytest.mark.parametrize(
    ("said", "deepspeed", "dtype"),
    [
        ({"bf16": True}, {"gradient_clipping": 1.0}, "bf16"),  # accelerate adds the section
        ({"fp16": "true"}, {"zero_optimization": {"stage": 3}}, "fp16"),
        ({}, {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, "fp32"),  # auto is the Trainer's, which is off
        ({}, {"bf16": {"enabled": True}}, "bf16"),
        ({"bf16": True}, {"bf16": {"enabled": "auto"}}, "bf16"),
        ({"bf16": True}, {"bfloat16": {"enabled": True}}, "bf16"),  # the old name, which DeepSpeed still reads
        ({}, {"bfloat16": {"enabled": True}}, "bf16"),
    ],
)
def test_mixed_precision_is_deepspeeds_where_its_file_leaves_it_open(
    tmp_path: Path, said: dict[str, object], deepspeed: dict[str, object], dtype: str
) -> None:
    found = read_training_file(written(tmp_path, {"output_dir": "x", "deepspeed": deepspeed, **said}), BASE)
    assert found.training.dtype == dtype
    if said in ({"bf16": True}, {}):
        (tmp_path / "other.json").write_text(json.dumps(deepspeed))
        content = {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16" if said else "no",
                   "deepspeed_config": {"deepspeed_config_file": "other.json"}}  # fmt: skip
        assert read_training_file(written(tmp_path, content), BASE).training.dtype == dtype


@pytest.mark.parametrize("frame", [{"output_dir": "x"}, {"distributed_type": "MULTI_GPU"}])
def test_what_precision_is_taken_for_is_named(tmp_path: Path, frame: dict[str, object]) -> None:
    on = {"bf16": True} if "output_dir" in frame else {"mixed_precision": "bf16"}
    cast = read_training_file(written(tmp_path, frame | on), replace(BASE, master_weights=False))
    assert (cast.training.dtype, cast.training.autocast, cast.training.has_master) == ("fp32", "bf16", False)
    assert any("autocast of a model in fp32" in note for note in cast.notes)
    adapted = read_training_file(written(tmp_path, frame | on), replace(BASE, lora="r=8"))
    assert (adapted.training.dtype, adapted.training.dtype_of_trained, adapted.training.autocast) == (
        "bf16",
        "fp32",
        "bf16",
    )
    assert any("fp32 adapters on a frozen model, which is not said and taken as bf16" in n for n in adapted.notes)
    coded = read_training_file(written(tmp_path, frame | on), replace(BASE, lora="r=8", base="nf4"))
    assert (coded.training.dtype, coded.training.autocast) == ("bf16", "")
    assert any("in nf4: simulated without autocast" in note for note in coded.notes)
    plain = read_training_file(written(tmp_path, frame), BASE)  # as `Trainer` itself, which makes no copy
    assert (plain.training.dtype, plain.training.has_master) == ("bf16", False)
    assert any("taken as bf16, without an fp32 copy" in note for note in plain.notes)


def test_deepspeeds_optimizer_runs_and_the_trainers_is_said_not_to(tmp_path: Path) -> None:
    content = {"output_dir": "x", "optim": "adamw_torch", "deepspeed": {"optimizer": {"type": "Lion"}}}
    found = read_training_file(written(tmp_path, content), BASE)
    assert found.training.optimizer == "lion"
    assert any("Lion runs, not optim adamw_torch" in note for note in found.notes)


def test_what_deepspeed_leaves_open_comes_from_the_trainers_arguments(tmp_path: Path) -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    (tmp_path / "zero.json").write_text(
        json.dumps({"zero_optimization": zero, "fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"},
                    "train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"})
    )  # fmt: skip
    content = {"per_device_train_batch_size": 5, "fp16": True, "gradient_checkpointing": True, "deepspeed": "zero.json"}
    found = read_training_file(written(tmp_path, content), BASE)
    t = found.training
    assert (t.per_device_train_batch_size, t.dtype, t.max_grad_norm) == (5, "fp16", 1.0)
    assert (found.policy, found.options) == ("zero-offload", {"checkpointing": "on"})
    assert found.says["zero_optimization.offload_optimizer.device"] == "cpu"


ACCELERATE = """
compute_environment: LOCAL_MACHINE
distributed_type: DEEPSPEED
mixed_precision: bf16
num_machines: 1
deepspeed_config:
  zero_stage: 3
  offload_optimizer_device: nvme
  offload_optimizer_nvme_path: /mnt/fast
  offload_param_device: cpu
  gradient_accumulation_steps: 4
"""


def test_accelerate(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(ACCELERATE)
    found = read_training_file(path, BASE)
    assert (found.policy, found.options) == ("zero-infinity", {"params": "host", "optimizer": "nvme", **KEPT})
    assert (found.training.dtype, found.training.gradient_accumulation_steps, found.devices) == ("bf16", 4, None)
    path.write_text(ACCELERATE.replace("bf16", "no"))
    assert read_training_file(path, BASE).training.dtype == "fp32"
    assert not any("not taken into account" in note for note in read_training_file(path, BASE).notes)
    path.write_text(ACCELERATE + "num_processes: 2\n")
    assert read_training_file(path, BASE).devices == 2
    path.write_text("distributed_type: NO\n")
    assert read_training_file(path, BASE).devices == 1
    path.write_text("distributed_type: NO\nnum_processes: 8\n")  # as TRL's single_gpu.yaml has it
    assert (found := read_training_file(path, BASE)).devices == 1
    assert any("num_processes 8 is not used" in note for note in found.notes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1", "is not YAML"),
        ("- 1", "one JSON object"),
        ("", "holds nothing"),
        ("a: 1", "no configuration of DeepSpeed"),
        ("per_device_train_batch_size: 1\nfinetuning_type: full\nstage: dpo", "has stage: 'dpo'; only supervised"),
        ("output_dir: x\nbeta: 0.1\nloss_type: [sigmoid]", "has beta: 0.1; only supervised"),
        ("output_dir: x\nbeta: 0.0\nnum_generations: 8", "has num_generations: 8; only supervised"),
        ("base_model: m\nmicro_batch_size: 2\ngradient_checkpointing: true", "is Axolotl's, .*: --batch 2 --policy f"),
        ("output_dir: o\nmodel: {_component_: torchtune.x}\nbatch_size: 2", "is torchtune's, .*: --batch 2, and"),
        ("train: {micro_batch_size: 4}\ndata: {class_path: litgpt.data.Alpaca2k}", "is LitGPT's, .*: --batch 4, and"),
        ("max_seq_len: 512\ndevice_train_microbatch_size: auto\noutput_dir: o", "is LLM Foundry's, .*: --seq 512, and"),
        ("a: &a\n  b: *a", "is not YAML"),
        ("output_dir: x\nfsdp: {full_shard: true}", "fsdp is .*; give true, or words"),
        ("distributed_type: NO\nnum_machines: 4", "num_machines is 4"),
        ("distributed_type: NO\nmixed_precision: fp8", "mixed_precision is 'fp8'"),
        ("distributed_type: FSDP\nparallelism_config: {parallelism_config_cp_size: 2}", "cp_size is 2, .*; make it 1"),
        ("distributed_type: FSDP\nparallelism_config: {parallelism_config_tp_size: 4}", "tp_size is 4, .*; make it 1"),
        ("distributed_type: FSDP\nparallelism_config: {parallelism_config_sp_size: 2}", "sp_size is 2, .*; make it 1"),
        ("zero_optimization: {}\ntensor_parallel: {autotp_size: 4}", "autotp_size is 4, .*; make it 1"),
        ("output_dir: x\ndeepspeed: {tensor_parallel: {autotp_size: 2}}", "autotp_size is 2, .*; make it 1"),
        ("zero_optimization: {}\nsequence_parallel_size: 2", "sequence_parallel_size is 2, .*; make it 1"),
        (
            "distributed_type: DEEPSPEED\nnum_processes: 4\ndeepspeed_config: {deepspeed_config_file: of_two.json}",
            "num_processes is 4, but DeepSpeed's train_batch_size 6, of which one GPU's is 3 is of 2 GPUs",
        ),
        ("distributed_type: MEGATRON_LM", "distributed_type is 'MEGATRON_LM'"),
        ("per_device_train_batch_size: 1\nfinetuning_type: lora", "finetuning_type: 'lora'"),
        ("per_device_train_batch_size: 1\nload_in_4bit: true", "load_in_4bit: True"),
        ("output_dir: x\nbf16: yes\nfp16: yes", "bf16 and fp16 are both enabled"),
        ("output_dir: x\nbf16: maybe", "bf16 is 'maybe'; it must be true or false"),
        ("output_dir: x\nmax_grad_norm: '1.0'", "max_grad_norm is '1.0'; it must be a number"),
        ("output_dir: x\ndeepspeed: of_two.json\nfsdp: full_shard", "both deepspeed and fsdp"),
        ("per_device_train_batch_size: 2\ndeepspeed: of_two.json", "is 2, but DeepSpeed's train_micro_.* is 3"),
        ("max_grad_norm: 2\noutput_dir: x\ndeepspeed: {gradient_clipping: 1}", "is 2, but DeepSpeed's grad.* is 1"),
        ("bf16: yes\noutput_dir: x\ndeepspeed: {fp16: {enabled: yes}}", "asks for bf16, .*fp16.enabled is True"),
        ("bf16: no\noutput_dir: x\ndeepspeed: {bf16: {enabled: yes}}", "bf16 is False, .*bf16.enabled is True"),
        (
            "distributed_type: DEEPSPEED\nmixed_precision: bf16\ndeepspeed_config: {deepspeed_config_file: fp16.json}",
            "asks for bf16, but DeepSpeed's fp16.enabled is True",
        ),
        (
            "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: fp16.json, zero_stage: 3}",
            "has zero_stage beside deepspeed_config_file, which accelerate refuses",
        ),
        ("optim: lomo", "optim is 'lomo'"),
        ("optim: sgd\ndeepspeed: none.json", "there is no file"),
        ("output_dir: x\nfsdp: half_shard", "fsdp has 'half_shard'; it may have full_shard"),
        ("output_dir: x\nfsdp: true\nfsdp_config: none.json", "there is no file"),
        ("output_dir: x\nfsdp: no_shard offload", "a whole model in host memory for every GPU"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: HALF}", "is 'HALF'; give true, false, or one"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_offload_params: maybe}", "offload_params is 'maybe'"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_reshard_after_forward: 0}", "is 0; give true, false"),
        (
            "output_dir: x\nfsdp: true\ngradient_checkpointing: true\nfsdp_config: {activation_checkpointing: true}",
            "are both on",
        ),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: FULL_SHARD, fsdp_reshard_after_forward: no}",
            "contradict each other",
        ),
    ],
)
def test_what_no_configuration_may_say(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    of_two = {"train_batch_size": 6, "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1}
    (tmp_path / "of_two.json").write_text(json.dumps(of_two))
    (tmp_path / "fp16.json").write_text(json.dumps({"fp16": {"enabled": True}}))
    with pytest.raises(WorkloadError, match=message):
        read_training_file(tmp_path / "c.yaml", BASE)


def test_supervised_stages_of_llama_factory_are_read(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("per_device_train_batch_size: 2\nfinetuning_type: full\nstage: sft\n")
    found = read_training_file(tmp_path / "c.yaml", BASE)
    assert found.training.per_device_train_batch_size == 2
    assert not any("not taken into account" in note for note in found.notes)


@pytest.mark.parametrize("word", ["false", "False", False])
def test_a_switch_may_be_a_word(tmp_path: Path, word: object) -> None:
    zero = {"stage": 3, "overlap_comm": word, "cpu_offload_params": "true",
            "offload_optimizer": {"device": "nvme", "pin_memory": word, "pipeline_read": word}}  # fmt: skip
    found = read_training_file(written(tmp_path, {"zero_optimization": zero}), BASE)
    assert found.options == {
        "params": "host", "optimizer": "nvme", "pipeline": "off", "pin_memory": "off", "prefetch": "0",
        "overlap": "off", **KEPT,
    }  # fmt: skip
    assert found.says["zero_optimization.offload_optimizer.pin_memory"] is False


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"distributed_type": "MULTI_GPU", "deepspeed_config": {"zero_stage": 3}}, "deepspeed_config is not used"),
        ({"distributed_type": "DEEPSPEED", "fsdp_config": {"fsdp_offload_params": True}}, "fsdp_config is not used"),
        ({"output_dir": "x", "fsdp_config": {"cpu_offload": True}}, "fsdp_config is not used: fsdp is not on"),
        ({"output_dir": "x", "fsdp": "", "fsdp_config": {"min_num_params": 0, "xla": False}}, None),
    ],
)
def test_a_section_that_is_not_used_is_named(tmp_path: Path, content: dict[str, object], message: str | None) -> None:
    notes = [note for note in read_training_file(written(tmp_path, content), BASE).notes if "is not used" in note]
    assert [message in note for note in notes] == [True] * (message is not None)  # type: ignore[operator]


def test_prefetching_and_old_names_are_taken_into_account(tmp_path: Path) -> None:
    off = {"zero_optimization": {"stage": 3, "overlap_comm": False}}
    assert read_training_file(written(tmp_path, off), BASE).options["prefetch"] == "0"
    old = {"zero_optimization": {"stage": 2, "cpu_offload": True}}
    assert read_training_file(written(tmp_path, old), BASE).policy == "zero-offload"


@pytest.mark.parametrize(("own", "expected"), [(None, "bf16"), ("fp32", "fp32")])
def test_deepspeed_casts_adapters_with_their_model(tmp_path: Path, own: str | None, expected: str) -> None:
    path = written(tmp_path, {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}})
    found = read_training_file(path, replace(BASE, lora="r=4", trained_dtype=own)).training
    assert (found.dtype, found.trained_dtype) == ("bf16", expected)
    assert read_training_file(path, BASE).training.trained_dtype is None
