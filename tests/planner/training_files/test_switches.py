"""DeepSpeed's switches: every one is read as true or false, left to the policy, or refused by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.planner.training_files.test_reading import BASE, written
from tierplan.planner.training_files import read_training_file
from tierplan.sim.workloads.workload import WorkloadError

SWITCHES = {
    "overlap_comm": (3, {}),
    "round_robin_gradients": (2, {"device": "cpu"}),
    "pin_memory": (3, {"device": "nvme"}),
    "pipeline_read": (3, {"device": "nvme"}),
    "pipeline_write": (3, {"device": "nvme"}),
}


def of_switch(name: str, value: object) -> dict[str, object]:
    """DeepSpeed's configuration that says this of a switch."""
    stage, offload = SWITCHES[name]
    of_offload = {name: value} if name.startswith("pi") else {}
    of_zero = {} if of_offload else {name: value}
    return {"zero_optimization": {"stage": stage, "offload_optimizer": {**offload, **of_offload}, **of_zero}}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_in_words_is_that_switch_and_any_other_value_is_refused(tmp_path: Path, name: str) -> None:
    def options(value: object) -> object:
        return read_training_file(written(tmp_path, of_switch(name, value)), BASE).options

    assert options("TRUE") == options(True) != options(False) == options("FALSE")
    assert options(None) == options("auto") == options("none"), "nothing is said"
    assert options(None) not in (options(True), options(False))
    for value in (0, 1, "no", "yes", [], 0.5):
        with pytest.raises(WorkloadError, match=re.escape(f"{name} is {value!r}; it must be true or false")):
            options(value)


def test_switches_that_explain_a_slow_step_are_refused_where_they_are_neither(tmp_path: Path) -> None:
    def says(content: dict[str, object]) -> Mapping[str, object]:
        return read_training_file(written(tmp_path, {"zero_optimization": {"stage": 3}, **content}), BASE).says

    assert says({"zero_force_ds_cpu_optimizer": "FALSE"})["zero_force_ds_cpu_optimizer"] is False
    offloads = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu", "pin_memory": 0}}
    for name, content in {
        "zero_force_ds_cpu_optimizer": {"zero_force_ds_cpu_optimizer": 0},
        "torch_adam": {"optimizer": {"type": "Adam", "params": {"torch_adam": 1}}},
        "pin_memory": {"zero_optimization": {"stage": 3, **offloads}},
    }.items():
        with pytest.raises(WorkloadError, match=f"{name} is [01]; it must be true or false"):
            says(content)
