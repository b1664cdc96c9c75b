"""What every op of a schedule costs on a machine."""

from __future__ import annotations

from tierplan.hwmodels.machine import Cost, Machine
from tierplan.sim.engine import simulate
from tierplan.sim.schedule import Schedule
from tierplan.sim.trace import Trace


def price(schedule: Schedule, machine: Machine) -> dict[str, Cost]:
    """The cost of each op, by key. Ops of equal work on one stream are priced once."""
    known: dict[tuple[object, ...], Cost] = {}
    costs, is_alone = {}, len(schedule.streams) == 1
    for op in schedule.ops:
        signature = (op.stream, *op.work.items())
        if signature not in known:
            known[signature] = machine.cost(op.stream, op.work, is_alone=is_alone)
        costs[op.key] = known[signature]
    return costs


def simulate_on(schedule: Schedule, machine: Machine) -> Trace:
    """The predicted trace of `schedule` on `machine`. Raises what `engine.simulate` raises."""
    return simulate(schedule, price(schedule, machine), limits=machine.limits)
