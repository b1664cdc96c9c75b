"""Keys of training files that are not simulated are named, and of files as their tools write them there are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.planner.training_files.test_reading import BASE, written
from tierplan.planner.training_files import read_training_file


def unaccounted_in(path: Path) -> list[str]:
    """The keys that the answer names as not taken into account."""
    found = [note for note in read_training_file(path, BASE).notes if note.startswith("not taken into account: ")]
    return [key for note in found for key in note.partition(": ")[2].split(", ")]


DEEPSPEED = {"train_micro_batch_size_per_gpu": 1}
TRAINER = {"output_dir": "x"}
ACCELERATED = {"distributed_type": "MULTI_GPU"}


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (DEEPSPEED | {"zero_optimisation": {"stage": 3}}, ["zero_optimisation.stage"]),
        (DEEPSPEED | {"zero_optimization": {"stage": 3, "offload_optimzer": {"device": "cpu"}}},
         ["zero_optimization.offload_optimzer.device"]),
        (DEEPSPEED | {"zero_optimization": {"stage": 3, "sub_group_size": 1e8, "stage3_max_live_parameters": 1e9}},
         ["zero_optimization.sub_group_size"]),
        (DEEPSPEED | {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "buffer_count": 20}}},
         ["zero_optimization.offload_optimizer.buffer_count"]),
        (DEEPSPEED | {"bf16": {"enabled": True, "bf16_optimizer_states": True}}, ["bf16.bf16_optimizer_states"]),
        (DEEPSPEED | {"flops_profiler": {"enabled": False, "detailed": True}}, []),
        (DEEPSPEED | {"comms_logger": {"enabled": False, "verbose": False}}, []),
        (DEEPSPEED | {"comms_logger": {"enabled": True}}, ["comms_logger.enabled"]),  # it waits for each collective
        (TRAINER | {"full_determinism": True}, ["full_determinism"]),  # it waits for each kernel
        (TRAINER | {"group_by_length": True}, ["group_by_length"]),  # steps are of other lengths
        (TRAINER | {"train_sampling_strategy": "group_by_length"}, ["train_sampling_strategy"]),
        (TRAINER | {"train_sampling_strategy": "batch_rebalance"}, ["train_sampling_strategy"]),
        (TRAINER | {"group_by_length": False, "train_sampling_strategy": "sequential"}, []),
        (DEEPSPEED | {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}, []),
        (TRAINER | {"torch_compile_mode": "max-autotune", "max_sequence_length": 4096},
         ["max_sequence_length", "torch_compile_mode"]),
        (TRAINER | {"accelerator_config": {"split_batches": True}}, ["accelerator_config.split_batches"]),
        (TRAINER | {"gradient_checkpointing_kwargs": {"use_reentrant": False, "every_n_layers": 2}},
         ["gradient_checkpointing_kwargs.every_n_layers"]),
        (TRAINER | {"deepspeed": {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1}}},
         ["zero_optimization.reduce_bucket_size"]),
        (TRAINER | {"fsdp": True, "fsdp_config": "fsdp.json"}, ["fsdp_config.auto_wrap_policy"]),
        (ACCELERATED | {"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "default"}}, []),
        (ACCELERATED | {"dynamo_config": {"dynamo_use_dynamic": True, "foo": 1}}, ["dynamo_config.foo"]),
        (ACCELERATED | {"dynamo_config": {"dynamo_backend": "EAGER", "dynamo_mode": "max-autotune"}},
         ["dynamo_config.dynamo_backend", "dynamo_config.dynamo_mode"]),
        (ACCELERATED | {"dynamo_config": {"dynamo_backend": "NO"}, "downcast_bf16": "no"}, []),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_backward_prefetch": "NO_PREFETCH"}},
         ["fsdp_config.fsdp_backward_prefetch"]),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_cpu_ram_efficient_loading": True}}, []),
        ({"distributed_type": "FSDP", "num_processes": 2, "parallelism_config": {
            f"parallelism_config_{key}_size": size
            for key, size in {"dp_replicate": 1, "dp_shard": 2, "tp": 1, "cp": 1, "sp": 1}.items()
        }}, []),
        ({"distributed_type": "FSDP", "parallelism_config": {"parallelism_config_dp_replicate_size": 2}},
         ["parallelism_config.parallelism_config_dp_replicate_size"]),
        (DEEPSPEED | {"tensor_parallel": {"autotp_size": 1}, "sequence_parallel_size": 1}, []),
        (ACCELERATED | {"fp8_config": {"backend": "TE"}}, ["fp8_config.backend"]),
    ],
)  # fmt: skip
def test_a_key_that_is_not_simulated_is_named_be_it_misspelt(
    tmp_path: Path, content: dict[str, object], named: list[str]
) -> None:
    (tmp_path / "fsdp.json").write_text(json.dumps({"auto_wrap_policy": "NO_WRAP"}))
    assert unaccounted_in(written(tmp_path, content)) == named


@pytest.mark.parametrize("kwargs", ["gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"])
def test_in_a_section_that_is_known_a_key_that_is_not_is_named(tmp_path: Path, kwargs: str) -> None:
    deepspeed = {"optimizer": {"foo": 1, "params": {"lr": 1e-5, "foo": 1}}}
    of_accelerator = {"foo": 1, "gradient_accumulation_kwargs": {"foo": 1}}
    content = {kwargs: {"foo": 1}, "accelerator_config": of_accelerator, "liger_kernel_config": {"foo": True}}
    assert unaccounted_in(written(tmp_path, DEEPSPEED | deepspeed)) == ["optimizer.foo", "optimizer.params.foo"]
    sections = ("accelerator_config", "accelerator_config.gradient_accumulation_kwargs", kwargs, "liger_kernel_config")
    assert unaccounted_in(written(tmp_path, TRAINER | content)) == sorted(f"{section}.foo" for section in sections)
    unchanged = {"debug": False, "early_stop": True, "use_reentrant": True, "determinism_check": "default"}
    assert unaccounted_in(written(tmp_path, TRAINER | {kwargs: unchanged})) == []


@pytest.mark.parametrize(
    ("kind", "params", "named"),
    [
        ("Adam", {"betas": [0.9, 0.95], "eps": 1e-8, "bias_correction": True, "adam_w_mode": False}, []),
        ("AdamW", {"lr": "auto", "weight_decay": 0.1, "torch_adam": True, "amsgrad": False}, []),
        ("AdamW", {"amsgrad": True}, ["optimizer.params.amsgrad"]),  # a third moment
        ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0, "nesterov": True}, []),
        ("Muon", {"muon_lr": 1e-3, "adam_lr": 1e-4, "momentum": 0.9}, []),
        ("Lion", {"betas": [0.9, 0.99], "set_grad_none": True}, []),
    ],
)
def test_of_an_optimizers_numbers_those_that_cost_nothing_are_not_named(
    tmp_path: Path, kind: str, params: dict[str, object], named: list[str]
) -> None:
    content = DEEPSPEED | {"optimizer": {"type": kind, "params": params}}
    assert unaccounted_in(written(tmp_path, content)) == named
    assert unaccounted_in(written(tmp_path, TRAINER | {"deepspeed": content})) == named


def test_a_file_of_the_trainers_defaults_has_nothing_to_name(tmp_path: Path) -> None:
    """As transformers itself writes them, whatever its release has."""
    transformers = pytest.importorskip("transformers")
    written(
        tmp_path, transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True).to_dict() | {"use_cpu": False}
    )
    assert unaccounted_in(tmp_path / "ds.json") == []


def test_a_file_of_accelerates_defaults_has_nothing_to_name(tmp_path: Path) -> None:
    default = pytest.importorskip("accelerate.commands.config.default")
    default.write_basic_config(mixed_precision="no", save_location=str(tmp_path / "of_accelerate.yaml"))
    assert set(unaccounted_in(tmp_path / "of_accelerate.yaml")) <= {"use_cpu"}
