"""Memory budgets for a plan, from roomy to tight: the capacities at which its schedule completes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil

from tierplan.hwmodels.machine import Machine
from tierplan.planner.lowering import lower
from tierplan.planner.plan import Plan
from tierplan.sim.engine import OutOfMemory
from tierplan.sim.schedule import ScheduleError
from tierplan.sim.steady import steady_state
from tierplan.sim.workload import Workload

__all__ = ["capacity_for", "with_capacity"]

ROOM = 1.02
"""What a budget holds beyond what was found to do, as a factor."""
PRECISION = 0.01


def with_capacity(machine: Machine, capacity_bytes: Mapping[str, int]) -> Machine:
    """The machine with other capacities, by tier."""
    tiers = tuple(replace(t, capacity_bytes=capacity_bytes.get(t.name, t.capacity_bytes)) for t in machine.tiers)
    return replace(machine, tiers=tiers)


def capacity_for(level: str, tier: str, plan: Plan, workload: Workload, machine: Machine) -> int:
    """Bytes of `tier` that make the plan's budget `roomy`, `middle` or `tight`; other tiers are as in `machine`.

    Roomy is what the plan holds when the tier is not in its way; tight is the least with which its schedule completes
    (to 1 %, found by bisection); middle lies between. All have 2 % to spare. Raises `OutOfMemory` where the other
    tiers are too small.
    """
    peak = _peak(tier, plan, workload, machine)
    if level == "roomy":
        return ceil(peak * ROOM)
    least = _least(lambda size: _completes(plan, workload, with_capacity(machine, {tier: size})), peak)
    if level == "tight":
        return ceil(least * ROOM)
    if level == "middle":
        return ceil((least + peak) / 2 * ROOM)
    raise ValueError(f"level is {level!r}; choose roomy, middle or tight")


def _peak(tier: str, plan: Plan, workload: Workload, machine: Machine) -> int:
    return steady_state(lower(plan, workload, machine), machine).trace.peak_bytes[tier]


def _completes(plan: Plan, workload: Workload, machine: Machine) -> bool:
    try:
        steady_state(lower(plan, workload, machine), machine)
    except (OutOfMemory, ScheduleError):
        return False
    return True


def _least(does: Callable[[int], bool], enough: int) -> int:
    """The least size that does, to within `PRECISION`, between 0 and one that is known to be enough."""
    low, high = 0, enough
    while high - low > PRECISION * high:
        middle = (low + high) // 2
        if does(middle):
            high = middle
        else:
            low = middle
    return high
