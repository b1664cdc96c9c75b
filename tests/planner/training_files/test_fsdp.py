"""What the Trainer, accelerate and LLaMA-Factory say of FSDP."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.planner.training_files.test_reading import BASE, written
from tierplan.planner.training_files import read_training_file
from tierplan.sim.workloads.workload import WorkloadError


@pytest.mark.parametrize(
    ("said", "policy", "reshard"),
    [
        ({}, "fsdp", "on"),
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, "fsdp", "on"),
        ({"fsdp_sharding_strategy": 1}, "fsdp", "on"),
        ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, "fsdp", "off"),
        ({"fsdp_sharding_strategy": 2}, "fsdp", "off"),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD"}, "fsdp", "on"),
        ({"fsdp_sharding_strategy": "HYBRID_SHARD_ZERO2"}, "fsdp", "off"),
        ({"fsdp_sharding_strategy": "NO_SHARD"}, "ddp", None),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": True}, "fsdp", "on"),
        ({"fsdp_version": 2, "fsdp_reshard_after_forward": False}, "fsdp", "off"),
        ({"fsdp_version": 1, "fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, "fsdp", "off"),
        ({"fsdp_offload_params": True}, "fsdp-offload", None),
    ],
)
def test_fsdp_keeps_or_frees_parameters_as_the_file_says(
    tmp_path: Path, said: dict[str, object], policy: str, reshard: str | None
) -> None:
    """The same in accelerate's words and in the Trainer's, whose keys have no prefix."""
    of_trainer = {key.removeprefix("fsdp_").replace("offload_params", "cpu_offload"): said[key] for key in said}
    for content in ({"distributed_type": "FSDP", "fsdp_config": said},
                    {"output_dir": "x", "fsdp": True, "fsdp_config": of_trainer}):  # fmt: skip
        found = read_training_file(written(tmp_path, content), BASE)
        assert (found.policy, found.options.get("reshard"), found.options["reduces"]) == (policy, reshard, "last")
        assert not any("FULL_SHARD" in note for note in found.notes)


@pytest.mark.parametrize(
    ("fsdp", "policy", "reshard"),
    [
        ("full_shard auto_wrap", "fsdp", "on"),
        (["shard_grad_op", "auto_wrap"], "fsdp", "off"),
        ("full_shard offload", "fsdp-offload", None),
        ("no_shard", "ddp", None),
    ],
)
def test_older_words_of_the_trainers_fsdp(tmp_path: Path, fsdp: object, policy: str, reshard: str | None) -> None:
    found = read_training_file(written(tmp_path, {"output_dir": "x", "fsdp": fsdp}), BASE)
    assert (found.policy, found.options.get("reshard")) == (policy, reshard)


@pytest.mark.parametrize(
    ("content", "checkpointing"),
    [
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_activation_checkpointing": True}}, "on"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_activation_checkpointing": "false"}}, "off"),
        ({"distributed_type": "FSDP"}, "off"),
        ({"output_dir": "x", "fsdp": True, "fsdp_config": {"activation_checkpointing": "true"}}, "on"),
        ({"output_dir": "x", "fsdp": "full_shard", "gradient_checkpointing": True}, "on"),
        ({"output_dir": "x", "fsdp": "full_shard", "activation_checkpointing": True}, "on"),
        ({"output_dir": "x", "fsdp": "full_shard offload", "gradient_checkpointing": False}, "off"),
        ({"output_dir": "x", "fsdp": "full_shard"}, "off"),
    ],
)
def test_fsdp_recomputes_where_a_file_says_so_and_names_what_it_assumes(
    tmp_path: Path, content: dict[str, object], checkpointing: str
) -> None:
    found = read_training_file(written(tmp_path, content), BASE)
    assert found.options["checkpointing"] == checkpointing
    assert any("set in the model, if at all" in n for n in found.notes) == (content == {"distributed_type": "FSDP"})


def test_offloaded_parameters_that_stay_after_forward_are_said_to_be_simulated_otherwise(tmp_path: Path) -> None:
    content = {"output_dir": "x", "fsdp": "shard_grad_op offload"}
    (note,) = (note for note in read_training_file(written(tmp_path, content), BASE).notes if "FSDP" in note)
    assert "SHARD_GRAD_OP" in note
    assert "simulated as FULL_SHARD" in note


@pytest.mark.parametrize("other", ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", True, False])
@pytest.mark.parametrize("unsharded", ["NO_SHARD", 3])
def test_no_sharding_and_sharding_contradict_each_other(tmp_path: Path, unsharded: object, other: object) -> None:
    """NO_SHARD is another policy, and neither of the two that shard."""
    both = {"fsdp_sharding_strategy": unsharded, "fsdp_reshard_after_forward": other}
    for content in ({"distributed_type": "FSDP", "fsdp_config": both},
                    {"output_dir": "x", "fsdp": True, "fsdp_config": both}):  # fmt: skip
        with pytest.raises(WorkloadError, match="which contradict each other; leave one of them out"):
            read_training_file(written(tmp_path, content), BASE)
    agreeing = {"fsdp_sharding_strategy": unsharded, "fsdp_reshard_after_forward": "no_shard"}
    found = read_training_file(written(tmp_path, {"distributed_type": "FSDP", "fsdp_config": agreeing}), BASE)
    assert found.policy == "ddp"


def test_the_trainers_older_words_do_not_outvote_a_strategy_that_contradicts_them(tmp_path: Path) -> None:
    content = {"output_dir": "x", "fsdp": "full_shard", "fsdp_config": {"sharding_strategy": "NO_SHARD"}}
    with pytest.raises(WorkloadError, match="which contradict each other"):
        read_training_file(written(tmp_path, content), BASE)
