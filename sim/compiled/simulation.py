"""Columns simulated: what ops cost, in arrays with one entry per distinct price, and the rules executed with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tierplan.hwmodels.costs import Cost
from tierplan.hwmodels.machine import Machine
from tierplan.sim.analysis.completion import OutOfMemory, SimulationError
from tierplan.sim.columns import Int32, ScheduleColumns
from tierplan.sim.compiled.graph_columns import GraphColumns, graph_columns
from tierplan.sim.compiled.rules import TOO_LATE, Execution, Prices, execute, stuck


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


def prices_on(columns: ScheduleColumns, machine: Machine) -> Prices:
    """What the ops cost on a machine. Raises `SimulationError` for what no op can cost, as the engine does."""
    is_alone = len({work.stream for work in columns.works}) == 1
    costs = [machine.cost(work.stream, work.amounts, is_alone=is_alone) for work in columns.works]
    return _prices(columns.op_work, costs, machine.limits, lambda i: columns.labels().ops[i].key)


def prices_by_key(columns: ScheduleColumns, costs: Mapping[str, Cost], limits: Mapping[str, float]) -> Prices:
    """The prices of ops whose costs are given by key, as `engine.simulate` takes them."""
    keys = [op.key for op in columns.labels().ops]
    if missing := [key for key in keys if key not in costs]:
        raise SimulationError(f"op {missing[0]!r} has no cost; price all ops of the schedule")
    distinct = {id(cost): cost for cost in map(costs.__getitem__, keys)}
    place = {one: k for k, one in enumerate(distinct)}
    op_price = np.array([place[id(costs[key])] for key in keys], np.int32)
    return _prices(op_price, list(distinct.values()), limits, keys.__getitem__)


def _prices(
    op_price: Int32, costs: Sequence[Cost], limits: Mapping[str, float], key_of: Callable[[int], str]
) -> Prices:
    """`key_of(i)` names op i in errors."""
    work_ns = np.array([cost.work_s for cost in costs]) * 1e9
    latency_ns = np.array([cost.latency_s for cost in costs]) * 1e9
    wake_ns = np.array([cost.wake_s for cost in costs]) * 1e9
    for p, cost in enumerate(costs):
        fault = cost.fault(limits)
        if not fault and max(work_ns[p], latency_ns[p], wake_ns[p]) > TOO_LATE:
            fault = f"takes {cost.alone_s:.3g} s, and nothing is simulated beyond {TOO_LATE / 1e9:.3g} s"
        if fault and (ops := np.flatnonzero(op_price == p)).size:
            raise SimulationError(f"op {key_of(int(ops[0]))!r} {fault}")
    return Prices(
        op_price=op_price,
        alone_s=np.array([cost.alone_s for cost in costs]),
        latency_ns=np.rint(latency_ns).astype(np.int64),
        wake_ns=np.rint(wake_ns).astype(np.int64),
        work_ns=np.rint(work_ns).astype(np.int64),
        is_flow=np.array([bool(cost.demand) for cost in costs], np.bool_),
        share=np.array([cost.share for cost in costs], np.float64),
        demand=np.array([[cost.demand.get(name, 0.0) for name in limits] for cost in costs], np.float64).reshape(
            len(costs), len(limits)
        ),
        limits=np.array(list(limits.values()), np.float64),
    )
