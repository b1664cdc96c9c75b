"""The whole loop against brute force: every placement and action of small chains, each simulated.

`benchmarks/planner/bruteforce.py` does the same for 200 instances.
"""

from __future__ import annotations

import itertools

import pytest

from tests.planner.instances import brute_force_instance
from tierplan.hwmodels.machine import Machine
from tierplan.planner.infeasible import InfeasiblePlan
from tierplan.planner.lowering import lower
from tierplan.planner.milp.amounts import Problem, problem
from tierplan.planner.milp.modes import MODES
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.planner.planning import plan
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.candidates import PlanSimulator
from tierplan.planner.search.local.moves import WINDOWS, with_windows
from tierplan.sim.pricing import price
from tierplan.sim.workloads.workload import Workload

WITH_ALL_WINDOWS = 30
"""Of the quickest plans, so many are also simulated with all prefetch windows."""


def all_plans(workload: Workload, machine: Machine) -> list[UnitwisePlan]:
    """One action per unit's saved tensors, any placement, late updates or not."""
    p = problem(workload, machine, semantics="in-backward")
    choices = [_choices(p, u) for u in range(len(p.units))]
    return [UnitwisePlan(policy="all", units=units) for units in itertools.product(*choices)]


def _choices(p: Problem, u: int) -> list[UnitPlan]:
    found = []
    for k, action in itertools.product(p.modes(u), ("keep", "recompute", "host", "nvme")):
        mode = MODES[k]
        if not p.has_nvme and action == "nvme":
            continue
        places = {name: getattr(mode, name) for name in ("params", "states", "grads", "update")}
        for late in (False, True) if mode.updated != "device" else (False,):
            found.append(UnitPlan(**places, acts=action, late_update=late))
    return found


def best_of_all(workload: Workload, machine: Machine) -> float | None:
    """The shortest step over all plans, and all windows for the quickest; None where nothing fits.

    A plan whose busiest stream alone takes as long as the best so far need not be simulated.
    """
    simulate_plan = PlanSimulator(workload, machine, Budget(1e9))
    best = float("inf")
    quick: list[tuple[float, int, UnitwisePlan]] = []
    ranked = sorted(
        (busiest_s(made, workload, machine), i, made) for i, made in enumerate(all_plans(workload, machine))
    )
    for least_s, i, made in ranked:
        if least_s >= best:
            break
        tried = simulate_plan(made)
        if tried.step_s is not None:
            quick.append((tried.step_s, i, made))
            best = min(best, tried.step_s)
    for _, _, made in sorted(quick)[:WITH_ALL_WINDOWS]:
        for windows in WINDOWS:
            again = simulate_plan(with_windows(made, windows))
            if again.step_s is not None:
                best = min(best, again.step_s)
    return None if best == float("inf") else best


def busiest_s(made: UnitwisePlan, workload: Workload, machine: Machine) -> float:
    """Seconds of the stream that has most to do: no step is shorter."""
    schedule = lower(made, workload, machine, refine=False)
    costs = price(schedule, machine)
    busy: dict[str, float] = {}
    for op in schedule.ops:
        busy[op.stream] = busy.get(op.stream, 0.0) + costs[op.key].alone_s
    return max(busy.values())


def is_trivial(workload: Workload, machine: Machine) -> bool:
    """Whether everything may stay on the device."""
    kept = UnitwisePlan(policy="all", units=(UnitPlan(),) * len(workload.units))
    return PlanSimulator(workload, machine, Budget(1e9))(kept).fits


def check(number: int) -> None:
    _, workload, machine = brute_force_instance(number)
    best = best_of_all(workload, machine)
    try:
        result = plan(workload, machine, time_limit_s=20)
    except InfeasiblePlan:
        assert best is None
        return
    assert best is None or result.step_s <= best * 1.01, f"instance {number}: {result.step_s} against {best}"
    assert result.lower_bound_s <= result.step_s


@pytest.mark.parametrize("number", [0, 1, 2, 182, 205])  # the last two want a late update on the device
def test_the_loop_finds_the_best_plan(number):
    check(number)


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(3, 10))
def test_the_loop_finds_the_best_plan_of_larger_instances(number):
    check(number)


def test_most_instances_are_not_trivial():
    """Otherwise agreement would say nothing."""
    trivial = [number for number in range(40) if is_trivial(*brute_force_instance(number)[1:])]
    assert len(trivial) < 10
