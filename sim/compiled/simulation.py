"""Columns simulated: what ops cost, in arrays with one entry per distinct price, and the rules executed with it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tierplan.hwmodels.machine import Cost, Machine
from tierplan.sim.analysis.completion import OutOfMemory, SimulationError
from tierplan.sim.columns import ScheduleColumns, Work
from tierplan.sim.compiled.graph_columns import GraphColumns, graph_columns
from tierplan.sim.compiled.rules import TOO_LATE, Execution, Prices, execute, stuck

Row = tuple[float, ...]
"""What a work costs: seconds alone; nanoseconds of latency, waking and work; whether it is a flow, share, demands."""
KnownRows = dict[tuple[int, bool], tuple[Work, Row]]
"""By a work's identity, and whether its stream is alone: the work, and what it costs on one machine."""


def simulate_columns(columns: ScheduleColumns, machine: Machine, prices: Prices | None = None) -> Execution:
    """What happens on a machine, where `prices` are those of the same works if they are at hand.

    Raises `OutOfMemory` when the schedule cannot complete, for whatever costs; `SimulationError` for what no op can
    cost, and where the clock would go beyond `rules.TOO_LATE`.
    """
    prices = prices_on(columns, machine) if prices is None else prices._replace(op_price=columns.op_work)
    return run(columns, graph_columns(columns), prices)


def run(columns: ScheduleColumns, graph: GraphColumns, prices: Prices) -> Execution:
    """As `simulate_columns`, where the graph and the prices are at hand."""
    execution = execute(graph, prices)
    if execution.is_too_late:
        raise SimulationError(
            f"schedule {columns.labels().name!r} takes more than {TOO_LATE / 1e9:.3g} s, and nothing is simulated "
            "beyond that"
        )
    if where := stuck(graph, execution):
        raise OutOfMemory(columns, where)
    return execution


def prices_on(columns: ScheduleColumns, machine: Machine, known: KnownRows | None = None) -> Prices:
    """What the ops cost on a machine. Raises `SimulationError` for what no op can cost, as the engine does.

    `known` keeps what works cost on this machine, for schedules that share them.
    """
    is_alone = len({work.stream for work in columns.works}) == 1
    known, limits, rows = {} if known is None else known, machine.limits, list[Row]()
    for p, work in enumerate(columns.works):
        if (one := known.get((id(work), is_alone))) is None:
            cost = machine.cost(work.stream, work.amounts, is_alone=is_alone)
            times_ns = cost.latency_s * 1e9, cost.wake_s * 1e9, cost.work_s * 1e9, cost.launch_s * 1e9
            demands = (cost.demand.get(name, 0.0) for name in limits)
            one = work, (cost.alone_s, *times_ns, bool(cost.demand), cost.share, *demands)
            if not (fault := cost_fault(cost, limits)):
                known[id(work), is_alone] = one
            elif (ops := np.flatnonzero(columns.op_work == p)).size:
                raise SimulationError(f"op {columns.labels().ops[ops[0]].key!r} {fault}")
        rows.append(one[1])
    table = np.array(rows, np.float64).reshape(len(rows), 7 + len(limits)).T.copy()
    latency_ns, wake_ns, work_ns, launch_ns = np.rint(table[1:5]).astype(np.int64)
    return Prices(
        op_price=columns.op_work,
        alone_s=table[0],
        latency_ns=latency_ns,
        wake_ns=wake_ns,
        work_ns=work_ns,
        launch_ns=launch_ns,
        is_flow=table[5] > 0,
        share=table[6],
        demand=table[7:].T.copy(),
        limits=np.array(list(limits.values()), np.float64),
    )


def cost_fault(cost: Cost, limits: Mapping[str, float]) -> str:
    """Why no op can cost this; empty if it can."""
    fault = cost.fault(limits)
    if not fault and max(cost.work_s, cost.latency_s, cost.wake_s, cost.launch_s) * 1e9 > TOO_LATE:
        fault = f"takes {cost.alone_s:.3g} s, and nothing is simulated beyond {TOO_LATE / 1e9:.3g} s"
    return fault
