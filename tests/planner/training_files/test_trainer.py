"""The Trainer's arguments, as transformers itself takes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.planner.training_files.test_reading import BASE, written
from tierplan.planner.training_files import read_training_file
from tierplan.sim.workloads.workload import WorkloadError


def of_accelerator(**kwargs: object) -> dict[str, Any]:
    return {"accelerator_config": {"gradient_accumulation_kwargs": kwargs}}


@pytest.mark.parametrize("said", [{}, {"gradient_accumulation_steps": 1}, {"gradient_accumulation_steps": 4}])
def test_micro_batches_of_a_step_are_those_of_the_accelerator_where_it_says_them(
    tmp_path: Path, said: dict[str, Any]
) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    path = written(tmp_path, {"output_dir": "x", **said, **of_accelerator(num_steps=8)})
    args = transformers.TrainingArguments(str(tmp_path), use_cpu=True, **said, **of_accelerator(num_steps=8))
    if said.get("gradient_accumulation_steps") == 4:
        with pytest.raises(ValueError, match="num_steps"):
            transformers.Trainer(torch.nn.Linear(1, 1), args)
        with pytest.raises(WorkloadError, match=r"num_steps is 8, but gradient_accumulation_steps is 4.*leave one"):
            read_training_file(path, BASE)
        return
    expected = transformers.Trainer(torch.nn.Linear(1, 1), args).args.gradient_accumulation_steps
    found = read_training_file(path, BASE)
    assert found.training.gradient_accumulation_steps == expected == 8
    assert not any("num_steps" in note for note in found.notes)


def test_the_accelerators_micro_batches_are_deepspeeds_where_that_leaves_them_open(tmp_path: Path) -> None:
    auto = {"deepspeed": {"gradient_accumulation_steps": "auto"}}
    path = written(tmp_path, {"output_dir": "x", **of_accelerator(num_steps=8), **auto})
    assert read_training_file(path, BASE).training.gradient_accumulation_steps == 8


def test_what_the_accelerator_says_may_lie_in_a_file_beside(tmp_path: Path) -> None:
    (tmp_path / "accelerator.json").write_text(json.dumps(of_accelerator(num_steps=8)["accelerator_config"]))
    path = written(tmp_path, {"output_dir": "x", "accelerator_config": "accelerator.json"})
    assert read_training_file(path, BASE).training.gradient_accumulation_steps == 8


@pytest.mark.parametrize("given", [True, ["ds.json"], '{"bf16": {"enabled": true}}'])
def test_settings_that_are_neither_a_path_nor_an_object_are_refused_as_such(tmp_path: Path, given: object) -> None:
    """It was said that there is no file 'True'."""
    path = written(tmp_path, {"output_dir": "x", "deepspeed": given})
    with pytest.raises(WorkloadError, match="where a file of settings is named; give a path, or an object"):
        read_training_file(path, BASE)
