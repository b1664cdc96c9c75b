"""Budgets: every level completes, tight is nearly the least, and less than it does not do."""

from __future__ import annotations

import pytest

from tests.toys import MIB, toy_machine, toy_workload, uniform_plan
from tierplan.hwmodels.scaling import with_capacity
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.sim.analysis.completion import OutOfMemory
from tierplan.sim.analysis.steady import steady_state
from tierplan.validation.calibration.budgets import capacity_for

WORKLOAD = toy_workload(6)
PLAN = uniform_plan(WORKLOAD, UnitPlan(params="host", grads="host", states="host"), prefetch_params_units=4)
MACHINE = toy_machine()


@pytest.fixture(scope="module")
def sizes() -> dict[str, int]:
    return {level: capacity_for(level, "gpu0", PLAN, WORKLOAD, MACHINE) for level in ("tight", "middle", "roomy")}


def step_s(size: int) -> float:
    machine = with_capacity(MACHINE, {"gpu0": size})
    return steady_state(lower(PLAN, WORKLOAD, machine), machine).period_s


def test_levels_are_ordered_and_complete(sizes: dict[str, int]) -> None:
    assert sizes["tight"] < sizes["middle"] < sizes["roomy"]
    times = [step_s(size) for size in sizes.values()]
    assert times == sorted(times, reverse=True)


def test_less_than_tight_does_not_do(sizes: dict[str, int]) -> None:
    with pytest.raises(OutOfMemory):
        step_s(int(sizes["tight"] * 0.96))


def test_roomy_is_as_quick_as_without_a_limit(sizes: dict[str, int]) -> None:
    assert step_s(sizes["roomy"]) == pytest.approx(step_s(10_000 * MIB), rel=1e-6)


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ValueError, match="choose roomy, middle or tight"):
        capacity_for("vast", "gpu0", PLAN, WORKLOAD, MACHINE)
