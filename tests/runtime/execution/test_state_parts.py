"""Optimizer states that travel in parts: the numbers are those of plain training, bit for bit, also after a stop."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.models import make_batches, make_model, observed_workload, resume_as_plainly
from tests.runtime.test_trainer import CPU, check, machine
from tests.toys import uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import GradientsByLink, UnitPlan, UnitwisePlan
from tierplan.runtime.execution.values import states_of
from tierplan.runtime.optim.adam import OptimizerSettings
from tierplan.runtime.optim.states import layout_of
from tierplan.sim.contents import States, part_ranges
from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")

PARTS = 3


def split(workload: Workload, choice: UnitPlan, **settings: Any) -> UnitwisePlan:
    """A plan with states in parts, and embed in more of them."""
    plan = uniform_plan(workload, choice, **settings)
    units = [
        replace(unit, state_shards=PARTS + (k == 0), late_update=choice.late_update)
        for k, unit in enumerate(plan.units)
    ]
    return replace(plan, units=tuple(units))


def num_updates(schedule: Schedule, unit: str) -> int:
    return sum(op.kind == "update" and op.unit == unit for op in schedule.ops)


def test_states_cut_into_parts_join_to_the_whole() -> None:
    num_parameters = 10_007
    whole = torch.arange(3 * num_parameters, dtype=torch.float32).view(torch.uint8)
    layout = layout_of("adamw", [(num_parameters,)], "bf16", is_block=True, has_master=True)
    ranges = part_ranges(num_parameters, 4)
    parts = [layout.cut(whole, part) for part in ranges]
    assert torch.equal(layout.join(parts, ranges), whole)
    assert parts[1].view(torch.float32)[:2].tolist() == [3072, 3073]
    states = [States("L1", k, 12) for k in reversed(range(12))]
    assert states_of("L1", ["states/L11", *states, "params/L1"]) == states[::-1]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("clip", "semantics"), [(None, "in-backward"), (0.5, "exact-clip"), (None, "delayed-1")])
@pytest.mark.parametrize("params", ["device", "host", "nvme"])
def test_numbers_of_plain_training(dtype: str, clip: float | None, semantics: str, params: str, tmp_path: Path) -> None:
    training = replace(CPU, dtype=dtype, max_grad_norm=clip, gradient_accumulation_steps=2)  # type: ignore[arg-type]
    model = make_model("gpt2", num_blocks=2, dtype=dtype)
    choice = UnitPlan(params=params, grads="host", states="nvme")  # type: ignore[arg-type]
    schedule = check(model, training, partial(split, choice=choice, semantics=semantics), tmp_path)
    assert num_updates(schedule, "L0") == PARTS


@pytest.mark.parametrize(
    "settings",
    [
        {"order": "vertical", "prefetch_states_units": 2},
        {"strict_windows": True, "updates_in_flight": 1, "write_back": "awaited"},
        {"write_back": "delayed", "by_link": GradientsByLink()},
    ],
)
def test_with_gradients_on_nvme_and_every_way_home(settings: dict[str, Any], tmp_path: Path) -> None:
    training = replace(CPU, dtype="bf16", gradient_accumulation_steps=2)
    model = make_model("llama", num_blocks=2, dtype="bf16")
    choice = UnitPlan(params="nvme", grads="nvme", states="nvme")
    check(model, training, partial(split, choice=choice, **settings), tmp_path)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_late_updates(optimizer: str, clip: float | None, tmp_path: Path) -> None:
    """SGD has a master copy for its states, in bf16."""
    training = replace(CPU, dtype="bf16", optimizer=optimizer, max_grad_norm=clip)  # type: ignore[arg-type]
    model = make_model("gpt2", num_blocks=2, dtype="bf16")
    choice = UnitPlan(params="nvme", grads="host", states="nvme", late_update=True)
    semantics = "exact-clip" if clip else "in-backward"
    check(model, training, partial(split, choice=choice, semantics=semantics), tmp_path)


@pytest.mark.parametrize(
    ("clip", "semantics", "late"),
    [
        *((None, "in-backward", late) for late in ("none", "some", "all")),
        *((0.5, "exact-clip", late) for late in ("none", "some", "all")),
        (None, "delayed-1", "none"),  # where all wait for the next step as it is
    ],
)
def test_states_are_written_when_all_are_read(late: str, clip: float | None, semantics: str, tmp_path: Path) -> None:
    """Those of the last units that are updated: of late updates, the ones that end in forward."""
    training = replace(CPU, dtype="bf16", max_grad_norm=clip, gradient_accumulation_steps=2)
    model = make_model("gpt2", num_blocks=3, dtype="bf16")
    choice = UnitPlan(params="device", grads="host", states="nvme")

    def planned(workload: Workload) -> UnitwisePlan:
        plan = split(workload, choice, semantics=semantics, late_writes=2)
        is_late = {"none": (), "some": ("L1", "L2"), "all": [unit.name for unit in workload.units]}[late]
        names = [unit.name for unit in workload.units]
        units = [replace(unit, late_update=n in is_late) for n, unit in zip(names, plan.units, strict=True)]
        return replace(plan, units=tuple(units))

    schedule = check(model, training, planned, tmp_path)
    written = {op.key: op for op in schedule.ops if op.key.startswith("write_states/")}
    is_forward = semantics != "in-backward" or late != "none"
    last = ["L1", "L2"] if late == "some" else ["L2", "head"] if is_forward else ["L0", "embed"]
    read_last = {"L2": "L2/2of3", "head": "head", "embed": "embed/2of3"}[last[-1]]
    for op in written.values():
        assert op.after == ((f"read_states/{read_last}",) if op.unit in last else ()), op.key
    assert {op.unit for op in written.values()} == {unit.name for unit in schedule.step.units}


def test_an_optimizer_without_states_updates_each_part_once(tmp_path: Path) -> None:
    choice = UnitPlan(params="host", grads="host", states="nvme")
    check(make_model("gpt2", num_blocks=2), replace(CPU, optimizer="sgd"), partial(split, choice=choice), tmp_path)


@pytest.mark.parametrize("then", [PARTS, 1, 2])
def test_a_run_resumes_with_states_in_any_number_of_parts(then: int, tmp_path: Path) -> None:
    model = make_model("gpt2", dtype="bf16")
    workload = observed_workload(model, make_batches(1)[0], replace(CPU, dtype="bf16"))
    plan = split(workload, UnitPlan(params="host", grads="host", states="nvme", late_update=True))
    other = replace(plan, units=tuple(replace(unit, state_shards=then) for unit in plan.units))
    schedule, then_on = (lower(one, workload, machine()) for one in (plan, other))
    resume_as_plainly(schedule, then_on, model, make_batches(6), tmp_path, optimizer=OptimizerSettings(lr=1e-2))
