"""Memory budgets for a plan, from roomy to tight: the capacities at which its schedule completes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.scaling import with_capacity
from tierplan.planner.lowering import lower
from tierplan.planner.plan import Plan
from tierplan.sim.analysis.completion import OutOfMemory
from tierplan.sim.analysis.steady import SteadyState, steady_state
from tierplan.sim.schedule import Schedule, ScheduleError
from tierplan.sim.workloads.workload import Workload

ROOM = 1.02
"""A budget over the least capacity that suffices."""
PRECISION = 0.01
"""Of the least capacity, relative."""
MAX_RAISES = 40


def with_room(schedule: Schedule, peak_bytes: Mapping[str, int], room: float = ROOM) -> Schedule:
    """The schedule with the capacity of each tier in `peak_bytes` lowered to `room` times that peak."""
    tiers = [
        replace(t, capacity_bytes=min(t.capacity_bytes, ceil(peak_bytes[t.name] * room))) if t.name in peak_bytes else t
        for t in schedule.tiers
    ]
    return replace(schedule, tiers=tuple(tiers))


def capacity_for(level: str, tier: str, plan: Plan, workload: Workload, machine: Machine) -> int:
    """The capacity of `tier`, in bytes, that makes the plan's budget `roomy`, `middle` or `tight`.

    Roomy is what the plan holds when no op waits for memory in the tier. Tight is the least with which its schedule
    completes, to 1 %, found by bisection. Middle lies half-way. All have 2 % to spare.

    Other tiers have the machine's capacities. Raises `OutOfMemory` where these are too small.
    """
    peak = peak_bytes(tier, plan, workload, machine)
    if level == "roomy":
        return ceil(peak * ROOM)
    least, most = 0, peak
    while most - least > PRECISION * most:
        middle = (least + most) // 2
        least, most = (least, middle) if _completes(tier, middle, plan, workload, machine) else (middle, most)
    if level == "tight":
        return ceil(most * ROOM)
    if level == "middle":
        return ceil((most + peak) / 2 * ROOM)
    raise ValueError(f"level is {level!r}; choose roomy, middle or tight")


def raise_capacities(plan: Plan, workload: Workload, machine: Machine) -> tuple[Machine, Schedule, SteadyState]:
    """The machine with capacities raised until the plan's schedule completes, that schedule, and its steady state.

    The order of a schedule depends on all capacities together. So a capacity that sufficed for one tier may fall short
    by a little when another tier's capacity is set. Raises `OutOfMemory` when raising does not help.
    """
    for _ in range(MAX_RAISES):
        try:
            schedule = lower(plan, workload, machine)
            return machine, schedule, steady_state(schedule, machine)
        except OutOfMemory as error:
            # None: another tier is short as well. This one is raised a little, and the other is met next.
            needed = error.needed_bytes or error.capacity_bytes + error.wanted_bytes
            machine = with_capacity(machine, {error.tier: ceil(needed * ROOM)})
    schedule = lower(plan, workload, machine)
    return machine, schedule, steady_state(schedule, machine)


def peak_bytes(tier: str, plan: Plan, workload: Workload, machine: Machine) -> int:
    """The most that the plan's schedule holds in `tier` in steady state on `machine`."""
    _, _, steady = raise_capacities(plan, workload, machine)
    return steady.peak_bytes[tier]


def _completes(tier: str, capacity_bytes: int, plan: Plan, workload: Workload, machine: Machine) -> bool:
    """Whether the schedule completes with this capacity of `tier`, other tiers being raised as needed."""
    try:
        raised, _, _ = raise_capacities(plan, workload, with_capacity(machine, {tier: capacity_bytes}))
    except (OutOfMemory, ScheduleError):
        return False
    return raised.tier(tier).capacity_bytes == capacity_bytes
