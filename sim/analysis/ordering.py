"""A better list order from a first simulation: ops in the order in which they could start.

By rule 3, an op that is listed too early holds back the grants behind it. In this simulation every stream keeps its own
order, but a tier grants memory to any op that is ready. The order of starts then becomes the list order. Executed by
the four rules with the same durations, no op starts later than here (by induction over the list): nothing is lost.

Granting memory to any ready op could fill a tier with data that is needed late. So an op may overtake others in a tier
only if those still fit afterwards when they are executed one by one in the given list order. Then that order always
remains possible. This is the banker's algorithm with the list order as the safe sequence.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import HOST, parse_stream
from tierplan.sim.analysis.completion import OutOfMemory
from tierplan.sim.columns import Float64, ScheduleColumns
from tierplan.sim.compiled.graph_columns import GraphColumns, graph_columns
from tierplan.sim.compiled.readiness import ready_order
from tierplan.sim.compiled.rules import Prices
from tierplan.sim.compiled.simulation import prices_on, run


def refine_columns(
    columns: ScheduleColumns,
    machine: Machine,
    *,
    prices: Prices | None = None,
    overtakes: bool = False,
) -> ScheduleColumns:
    """The same ops in the order in which they become ready, where links, drives, DRAM and cores are shared.

    The first order takes each op to be alone. A simulation of it shows how much ops slow each other down, and they are
    put in order once more. What does not fit keeps its first order: simulating it says where.
    `prices` are those of `columns`, if they are at hand.
    """
    *_, (refined, _) = refinements(columns, machine, graph_columns(columns), prices, overtakes=overtakes)
    return refined


def refinements(
    columns: ScheduleColumns, machine: Machine, graph: GraphColumns, prices: Prices | None = None, *, overtakes: bool
) -> Iterator[tuple[ScheduleColumns, float]]:
    """The first order of `refine_columns` and then the second, if there is one; with each the seconds that the step
    takes by itself, as long as all is as this order assumes."""
    prices = prices or prices_on(columns, machine)
    columns, end_s = order_by_readiness(columns, prices.alone_s[prices.op_price], graph, overtakes=overtakes)
    yield columns, end_s
    if not machine.shared_limits:
        return
    graph = graph_columns(columns)
    try:
        execution = run(columns, graph, prices._replace(op_price=columns.op_work))
    except OutOfMemory:
        return
    yield order_by_readiness(columns, (execution.end_ns - execution.start_ns) / 1e9, graph, overtakes=overtakes)


def order_by_readiness(
    columns: ScheduleColumns, seconds: Float64, graph: GraphColumns | None = None, *, overtakes: bool = False
) -> tuple[ScheduleColumns, float]:
    """The same ops, listed in the order of their starts when memory goes to any ready op; op i takes `seconds[i]`. And
    when the last one ends.

    With `overtakes`, links to the host, drives and the host's cores also take the first of their ops that is ready, so
    that none waits behind one whose inputs are late.

    A schedule that does not complete even one op at a time is returned as it is: then memory is too small for its
    order, and simulating it says where.
    """
    graph = graph or graph_columns(columns)
    streams = (parse_stream(columns.works[columns.op_work[i]].stream) for i in graph.first_on_stream)
    able = [overtakes and (s.is_host_link or s.is_drive or s.tier == HOST) for s in streams]
    order, end_s = ready_order(graph, seconds, np.array(able))
    return (columns.reordered(order) if len(order) else columns), end_s
