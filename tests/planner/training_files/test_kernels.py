"""Kernels that a training file asks for: Liger's, and what a compiler makes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.planner.training_files.test_reading import BASE, written
from tierplan.planner.training_files import read_training_file


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"use_liger_kernel": True}, ("fused", 8, False)),
        ({"use_liger_kernel": True, "liger_kernel_config": {"rope": False}}, ("fused", 8, False)),
        ({"use_liger_kernel": True, "liger_kernel_config": {"fused_linear_cross_entropy": False}}, ("plain", 1, False)),
        ({"use_liger_kernel": True,
          "liger_kernel_config": {"fused_linear_cross_entropy": False, "cross_entropy": True}}, ("fused", 1, False)),
        ({"torch_compile": True, "deepspeed": {"bf16": {"enabled": True}}}, ("fused", 1, True)),
        ({"torch_compile": True, "bf16": True}, ("fused", 1, False)),
        ({"torch_compile_backend": "inductor"}, ("fused", 1, True)),  # the Trainer compiles then, too
        ({"torch_compile_mode": "default"}, ("fused", 1, True)),
        ({"torch_compile": False, "use_liger_kernel": "false"}, ("plain", 1, False)),
    ],
)  # fmt: skip
def test_kernels_of_liger_and_of_a_compiler_are_read(
    tmp_path: Path, said: dict[str, object], expected: tuple[str, int, bool]
) -> None:
    found = read_training_file(written(tmp_path, {"output_dir": "x", **said}), BASE)
    t = found.training
    assert (t.loss, t.loss_chunks, t.torch_compile) == expected
    assert any("in 8 chunks" in note for note in found.notes) == (t.loss_chunks == 8)
    assert any("blocks are simulated as they are without it" in note for note in found.notes) == ("bf16" in said)
    assert not any("not taken into account" in note for note in found.notes)
    assert (found.plain is None) == (expected == ("plain", 1, False))
    if (plain := found.plain) is not None:
        assert (plain.training.loss, plain.training.loss_chunks, plain.training.torch_compile) == ("plain", 1, False)
        assert (plain.left_open, plain.says) == (found.left_open, found.says)
    padded = read_training_file(written(tmp_path, {"output_dir": "x", **said}), replace(BASE, padded=True))
    assert not padded.training.torch_compile, "blocks are described without a mask"


def test_a_compiler_that_fuses_nothing_leaves_blocks_as_they_are(tmp_path: Path) -> None:
    found = read_training_file(written(tmp_path, {"output_dir": "x", "torch_compile_backend": "eager"}), BASE)
    assert (found.training.loss, found.training.torch_compile) == ("plain", False)
    assert any("not taken into account: torch_compile_backend" in note for note in found.notes)


@pytest.mark.parametrize("section", [{"dynamo_config": {"dynamo_backend": "INDUCTOR"}}, {"dynamo_backend": "inductor"}])
def test_what_accelerate_compiles_is_read(tmp_path: Path, section: dict[str, object]) -> None:
    of_two = {"distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 2, "fsdp_config": {}}
    found = read_training_file(written(tmp_path, {**of_two, **section}), BASE)
    assert (found.training.loss, found.training.torch_compile, found.devices) == ("fused", True, 2)
    assert found.plain is not None
    assert (found.plain.training.loss, found.plain.training.torch_compile, found.plain.devices) == ("plain", False, 2)
    alone = {"distributed_type": "NO", "mixed_precision": "bf16", "num_processes": 1}
    under_autocast = read_training_file(written(tmp_path, {**alone, **section}), BASE)
    assert not under_autocast.training.torch_compile
    assert any("dynamo_backend: under autocast" in note for note in under_autocast.notes)
