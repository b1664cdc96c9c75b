"""The list order of a schedule: its ops in the order in which a first simulation finds them ready."""

from __future__ import annotations

from tierplan.hwmodels.machine import Machine
from tierplan.sim.analysis.completion import OutOfMemory
from tierplan.sim.analysis.ordering import order_by_readiness
from tierplan.sim.columns import ScheduleColumns
from tierplan.sim.compiled.simulation import prices_on, simulate_columns


def refine_columns(columns: ScheduleColumns, machine: Machine, *, num_devices: int) -> ScheduleColumns:
    """The same ops in the order in which they become ready; several devices contend for links, drives and cores.

    The first order takes each op to be alone. With several devices a simulation of it shows how much ops slow each
    other down, and they are put in order once more. What does not fit keeps its first order: simulating it says where.
    """
    prices = prices_on(columns, machine)
    columns = order_by_readiness(columns, prices.alone_s[prices.op_price])
    if num_devices == 1:
        return columns
    try:
        execution = simulate_columns(columns, machine)
    except OutOfMemory:
        return columns
    return order_by_readiness(columns, (execution.end_ns - execution.start_ns) / 1e9)
