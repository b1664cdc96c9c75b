"""Columns simulated: what ops cost, in arrays with one entry per distinct price, and the rules executed with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tierplan.hwmodels.machine import Cost, Machine
from tierplan.sim.analysis.completion import OutOfMemory, SimulationError
from tierplan.sim.columns import Int32, ScheduleColumns, Work
from tierplan.sim.compiled.graph_columns import GraphColumns, graph_columns
from tierplan.sim.compiled.rules import TOO_LATE, Execution, Prices, execute, stuck

Row = tuple[float, ...]
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
            one = work, _row(cost, limits)
            if fault := _fault(cost, limits):
                _refuse(columns.op_work, p, fault, lambda i: columns.labels().ops[i].key)
            else:
                known[id(work), is_alone] = one
        rows.append(one[1])
    return _prices(columns.op_work, rows, limits)


def prices_by_key(columns: ScheduleColumns, costs: Mapping[str, Cost], limits: Mapping[str, float]) -> Prices:
    """The prices of ops whose costs are given by key, as `engine.simulate` takes them."""
    keys = [op.key for op in columns.labels().ops]
    if missing := [key for key in keys if key not in costs]:
        raise SimulationError(f"op {missing[0]!r} has no cost; price all ops of the schedule")
    distinct = {id(cost): cost for cost in map(costs.__getitem__, keys)}
    place = {one: k for k, one in enumerate(distinct)}
    op_price = np.array([place[id(costs[key])] for key in keys], np.int32)
    for p, cost in enumerate(distinct.values()):
        if fault := _fault(cost, limits):
            _refuse(op_price, p, fault, keys.__getitem__)
    return _prices(op_price, [_row(cost, limits) for cost in distinct.values()], limits)


def _row(cost: Cost, limits: Mapping[str, float]) -> Row:
    """Seconds alone; nanoseconds of latency, waking and work; whether it is a flow, its share, and its demands."""
    times_ns = cost.latency_s * 1e9, cost.wake_s * 1e9, cost.work_s * 1e9
    return (cost.alone_s, *times_ns, bool(cost.demand), cost.share, *(cost.demand.get(name, 0.0) for name in limits))


def _fault(cost: Cost, limits: Mapping[str, float]) -> str:
    """Why no op can cost this; empty if it can."""
    fault = cost.fault(limits)
    if not fault and max(cost.work_s, cost.latency_s, cost.wake_s) * 1e9 > TOO_LATE:
        fault = f"takes {cost.alone_s:.3g} s, and nothing is simulated beyond {TOO_LATE / 1e9:.3g} s"
    return fault


def _refuse(op_price: Int32, price: int, fault: str, key_of: Callable[[int], str]) -> None:
    """Raises `SimulationError` where an op has this price; `key_of(i)` names op i."""
    if (ops := np.flatnonzero(op_price == price)).size:
        raise SimulationError(f"op {key_of(int(ops[0]))!r} {fault}")


def _prices(op_price: Int32, rows: Sequence[Row], limits: Mapping[str, float]) -> Prices:
    table = np.array(rows, np.float64).reshape(len(rows), 6 + len(limits)).T.copy()
    times_ns = np.rint(table[1:4]).astype(np.int64)
    return Prices(
        op_price=op_price,
        alone_s=table[0],
        latency_ns=times_ns[0],
        wake_ns=times_ns[1],
        work_ns=times_ns[2],
        is_flow=table[4] > 0,
        share=table[5],
        demand=table[6:].T.copy(),
        limits=np.array(list(limits.values()), np.float64),
    )
