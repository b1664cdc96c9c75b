"""What every op of a schedule costs on a machine."""

from __future__ import annotations

from dataclasses import replace

from tierplan.hwmodels.machine import Cost, Machine
from tierplan.sim.columns import Works
from tierplan.sim.engine import simulate
from tierplan.sim.schedule import Schedule
from tierplan.sim.trace import Trace


def price(schedule: Schedule, machine: Machine) -> dict[str, Cost]:
    """The cost of each op, by key. Ops of equal work on one stream are priced once."""
    works, is_alone = Works(), len(schedule.streams) == 1
    numbers = {op.key: works.number(op.stream, op.work) for op in schedule.ops}
    costs = [machine.cost(work.stream, work.amounts, is_alone=is_alone) for work in works.listed]
    return {key: costs[number] for key, number in numbers.items()}


def on_machine(schedule: Schedule, machine: Machine) -> Schedule:
    """The schedule with no more memory in a tier than the machine has: it may have been made for another one."""
    has = {t.name: t.capacity_bytes for t in machine.tiers}
    least = (min(t.capacity_bytes, has.get(t.name, t.capacity_bytes)) for t in schedule.tiers)
    tiers = tuple(replace(t, capacity_bytes=size) for t, size in zip(schedule.tiers, least, strict=True))
    return replace(schedule, tiers=tiers)


def simulate_on(schedule: Schedule, machine: Machine) -> Trace:
    """The predicted trace of `schedule` on `machine`, with the memory that both have. Raises what `engine.simulate`
    raises."""
    return simulate(on_machine(schedule, machine), price(schedule, machine), limits=machine.limits)
