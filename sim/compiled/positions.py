"""The list order of ops that are wanted at given moments, compiled."""

from __future__ import annotations

import heapq

import numpy as np

from tierplan.sim.columns import Int64
from tierplan.sim.compiled.compiler import compiled
from tierplan.sim.compiled.graph_columns import GraphColumns


@compiled
def consistent_order(wanted: Int64, graph: GraphColumns) -> Int64:
    """Ops as they are `wanted`, each behind those that it waits for.

    All that may come is known at any time, and the first of it in the wanted order comes.
    """
    (begins, followers), missing = graph.followers, graph.num_inputs.copy()
    num_ops = len(wanted)
    place = np.empty(num_ops, np.int64)
    for k in range(num_ops):
        place[wanted[k]] = k
    ready = [place[i] for i in range(num_ops) if missing[i] == 0]
    heapq.heapify(ready)
    order = np.empty(num_ops, np.int64)
    for num in range(num_ops):
        i = order[num] = wanted[heapq.heappop(ready)]
        for k in range(begins[i], begins[i + 1]):
            j = followers[k]
            missing[j] -= 1
            if missing[j] == 0:
                heapq.heappush(ready, place[j])
    return order
