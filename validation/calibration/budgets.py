"""Memory budgets for a plan, from roomy to tight: the capacities at which its schedule completes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.scaling import with_capacity
from tierplan.planner.lowering.unitwise import lower
from tierplan.planner.plan import Plan
from tierplan.sim.analysis.steady import SteadyState, steady_state
from tierplan.sim.engine import OutOfMemory
from tierplan.sim.schedule import Schedule, ScheduleError
from tierplan.sim.workloads.workload import Workload

__all__ = ["AMPLE_BYTES", "ROOM", "capacity_for", "fitting", "peak_bytes", "with_room"]

ROOM = 1.02
"""What a budget holds beyond what was found to do, as a factor."""
PRECISION = 0.01
MAX_RAISES = 40
AMPLE_BYTES = 1 << 50
"""A capacity that is never in the way."""


def with_room(schedule: Schedule, peak_bytes: Mapping[str, int], room: float = ROOM) -> Schedule:
    """The schedule with tiers of no more than `room` times what it holds at its peak; those not named stay."""
    tiers = [
        replace(t, capacity_bytes=min(t.capacity_bytes, ceil(peak_bytes[t.name] * room))) if t.name in peak_bytes else t
        for t in schedule.tiers
    ]
    return replace(schedule, tiers=tuple(tiers))


def capacity_for(level: str, tier: str, plan: Plan, workload: Workload, machine: Machine) -> int:
    """Bytes of `tier` that make the plan's budget `roomy`, `middle` or `tight`; other tiers are as in `machine`.

    Roomy is what the plan holds when the tier is not in its way; tight is the least with which its schedule completes
    (to 1 %, found by bisection); middle lies between. All have 2 % to spare. Raises `OutOfMemory` where the other
    tiers are too small.
    """
    peak = peak_bytes(tier, plan, workload, machine)
    if level == "roomy":
        return ceil(peak * ROOM)
    least = _least(lambda size: _completes(tier, plan, workload, with_capacity(machine, {tier: size})), peak)
    if level == "tight":
        return ceil(least * ROOM)
    if level == "middle":
        return ceil((least + peak) / 2 * ROOM)
    raise ValueError(f"level is {level!r}; choose roomy, middle or tight")


def fitting(plan: Plan, workload: Workload, machine: Machine) -> tuple[Machine, Schedule, SteadyState]:
    """The plan's schedule, simulated on the machine, with capacities raised as far as it takes to complete.

    The order of a schedule depends on all capacities together, so one that was found to do for one tier may fall
    short, by a little, when another tier's is set. Raises `OutOfMemory` when that does not help.
    """
    for _ in range(MAX_RAISES):
        try:
            schedule = lower(plan, workload, machine)
            return machine, schedule, steady_state(schedule, machine)
        except OutOfMemory as error:
            # None: another tier is short as well, so this one is raised a little and the other is found next.
            needed = error.needed_bytes or error.capacity_bytes + error.wanted_bytes
            machine = with_capacity(machine, {error.tier: ceil(needed * ROOM)})
    schedule = lower(plan, workload, machine)
    return machine, schedule, steady_state(schedule, machine)


def peak_bytes(tier: str, plan: Plan, workload: Workload, machine: Machine) -> int:
    """The most that the plan's schedule holds in `tier`, step after step, on `machine`."""
    _, _, steady = fitting(plan, workload, machine)
    return steady.trace.peak_bytes[tier]


def _completes(tier: str, plan: Plan, workload: Workload, machine: Machine) -> bool:
    """Whether the capacity of `tier` does; other tiers are raised as far as it takes."""
    capacity = machine.tier(tier).capacity_bytes
    try:
        raised, _, _ = fitting(plan, workload, machine)
    except (OutOfMemory, ScheduleError):
        return False
    return raised.tier(tier).capacity_bytes == capacity


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
