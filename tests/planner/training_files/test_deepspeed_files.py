"""Files of DeepSpeed alone, as it reads them itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.planner.training_files.test_reading import BASE, written
from tierplan.planner.training_files import read_training_file
from tierplan.sim.workloads.workload import WorkloadError


def test_deepspeeds_file_alone_may_have_its_old_name_of_bf16_or_leave_both_open(tmp_path: Path) -> None:
    zero, fp32 = {"zero_optimization": {"stage": 2}}, replace(BASE, dtype="fp32")
    old = read_training_file(written(tmp_path, zero | {"bfloat16": {"enabled": True}}), fp32)
    assert old.training.dtype == "bf16"
    assert old.notes == read_training_file(written(tmp_path, zero | {"bf16": {"enabled": True}}), fp32).notes
    auto = {"enabled": "auto"}
    left_open = read_training_file(written(tmp_path, zero | {"bf16": auto, "fp16": auto}), BASE)
    assert left_open.training.dtype == "bf16"
    assert any("bf16 and fp16 are auto" in note and "taken as bf16" in note for note in left_open.notes)


def test_a_file_with_comments_says_that_only_deepspeed_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 2}} // ours')
    with pytest.raises(WorkloadError, match=r"not JSON .*take out comments"):
        read_training_file(path, BASE)
