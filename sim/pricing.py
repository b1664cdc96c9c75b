"""What every op of a schedule costs on a machine."""

from __future__ import annotations

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


def simulate_on(schedule: Schedule, machine: Machine) -> Trace:
    """The predicted trace of `schedule` on `machine`. Raises what `engine.simulate` raises."""
    return simulate(schedule, price(schedule, machine), limits=machine.limits)
