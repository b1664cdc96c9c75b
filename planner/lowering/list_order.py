"""The list order of a schedule: its ops in the order in which a first simulation finds them ready."""

from __future__ import annotations

from tierplan.hwmodels.costs import Cost
from tierplan.hwmodels.machine import Machine
from tierplan.sim.analysis.completion import OutOfMemory
from tierplan.sim.analysis.ordering import order_by_readiness
from tierplan.sim.engine import simulate
from tierplan.sim.pricing import price
from tierplan.sim.schedule import Schedule

__all__ = ["refine_order"]


def refine_order(schedule: Schedule, machine: Machine, *, num_devices: int) -> Schedule:
    """The same ops in the order in which they become ready; several devices contend for links, drives and cores."""
    if num_devices > 1:
        return _order_under_contention(schedule, machine)
    return order_by_readiness(schedule, price(schedule, machine))


def _order_under_contention(schedule: Schedule, machine: Machine) -> Schedule:
    """Ready with the durations that ops have beside each other.

    The first order takes each op to be alone; a simulation of it shows how much others slow it down. One that does
    not fit is returned in the first order: simulating it says where.
    """
    costs = price(schedule, machine)
    schedule = order_by_readiness(schedule, costs)
    try:
        spans = simulate(schedule, costs, limits=machine.limits).spans
    except OutOfMemory:
        return schedule
    slowed = {span.key: Cost(0.0, span.duration_ns / 1e9) for span in spans}
    return order_by_readiness(schedule, slowed)
