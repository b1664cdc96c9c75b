"""The makespan of a schedule without simulating it: one pass over the list, for loops over many costs.

Every order is fixed by the rules, so as long as memory never runs short and nothing is shared, a start is a maximum of
earlier ends, and the list order is an order in which they can be computed: a longest path. The order of grants (rule 3)
is part of it. Then the result is the engine's to the last nanosecond; elsewhere it is a lower bound, because waiting
for memory and sharing a limit only delay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tests.sim.graph_witness import Graph, graph_by_records
from tierplan.hwmodels.machine import Cost
from tierplan.sim.schedule import Schedule

__all__ = ["Evaluation", "Evaluator"]

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The result for one set of costs."""

    makespan_ns: int
    """The engine's makespan where `is_exact`, otherwise at most that."""
    is_exact: bool
    """No op shares a limit, and no tier would run short at these times."""
    end_ns: Sequence[int]
    """When each op ends, in list order; not delayed by sharing or by lack of memory."""


class Evaluator:
    """A schedule prepared for many evaluations with different costs."""

    def __init__(self, schedule: Schedule) -> None:
        self.graph = graph_by_records(schedule)
        self._stream_of = [0] * len(self.graph.inputs)
        for s, ops in enumerate(self.graph.streams):
            for i in ops:
                self._stream_of[i] = s
        self._rows = list(zip(self._stream_of, self._needed_inputs(), self.graph.needs, strict=True))
        self._buffers = _Lifetimes(self.graph)

    def evaluate(self, costs: Mapping[str, Cost], limits: Mapping[str, float] | None = None) -> Evaluation:
        """The makespan with these costs, by key; `limits` (units per second) tighten the bound where they bind."""
        by_op = [costs[op.key] for op in self.graph.schedule.ops]
        granted_ns, end_ns = self._pass([_alone_ns(cost) for cost in by_op])
        bound_ns, is_shared = _busiest_limit_ns(by_op, limits or {})
        makespan_ns = max(end_ns, default=0)
        return Evaluation(
            makespan_ns=max(makespan_ns, bound_ns),
            is_exact=not is_shared and self._buffers.fit(granted_ns, end_ns),
            end_ns=end_ns,
        )

    def makespans_ns(self, durations_ns: Int64) -> Int64:
        """Makespans for many sets of durations at once: one row per set, one column per op in list order.

        Lower bounds as `evaluate` gives them, without regard to shared limits.
        """
        columns = np.ascontiguousarray(durations_ns.T)
        num_ops, num_sets = columns.shape
        if num_ops != len(self._rows):
            raise ValueError(f"durations have {num_ops} columns; the schedule has {len(self._rows)} ops")
        end = np.zeros((num_ops, num_sets), dtype=np.int64)
        free = np.zeros((len(self.graph.streams), num_sets), dtype=np.int64)
        grant = np.zeros((len(self.graph.requests), num_sets), dtype=np.int64)
        for i, (stream, inputs, tiers) in enumerate(self._rows):
            start = free[stream]
            for j in inputs:
                start = np.maximum(start, end[j])
            eligible = start
            for tier in tiers:
                grant[tier] = np.maximum(grant[tier], eligible)
                start = np.maximum(start, grant[tier])
            end[i] = free[stream] = start + columns[i]
        makespans: Int64 = end.max(axis=0, initial=0)
        return makespans

    def _pass(self, durations_ns: Sequence[int]) -> tuple[list[list[int]], list[int]]:
        """When each request was granted, by tier, and when each op ended."""
        end = [0] * len(self._rows)
        free = [0] * len(self.graph.streams)
        latest = [0] * len(self.graph.requests)  # by tier, the last grant
        granted: list[list[int]] = [[] for _ in latest]
        for i, (stream, inputs, tiers) in enumerate(self._rows):
            start = free[stream]
            for j in inputs:
                if end[j] > start:
                    start = end[j]
            eligible = start
            for tier in tiers:
                if eligible > latest[tier]:
                    latest[tier] = eligible
                elif latest[tier] > start:
                    start = latest[tier]
                granted[tier].append(latest[tier])
            end[i] = free[stream] = start + durations_ns[i]
        return granted, end

    def _needed_inputs(self) -> list[Sequence[int]]:
        """Inputs that no other constraint implies: by rule 1, waiting for an op is waiting for all before it there."""
        num_streams = len(self.graph.streams)
        waited_for = [[-1] * num_streams for _ in range(num_streams)]  # by stream, the latest op of each other stream
        needed: list[Sequence[int]] = []
        for i, inputs in enumerate(self.graph.inputs):
            seen = waited_for[self._stream_of[i]]
            seen[self._stream_of[i]] = i
            latest: dict[int, int] = {}
            for j in inputs:
                s = self._stream_of[j]
                latest[s] = max(latest.get(s, -1), j)
            kept = [j for s, j in latest.items() if j > seen[s]]
            for j in kept:
                seen[self._stream_of[j]] = j
            needed.append(tuple(kept))
        return needed


class _Lifetimes:
    """When bytes come and go, from the times of grants and ends: whether any tier would ever run short."""

    def __init__(self, graph: Graph) -> None:
        self._capacity_bytes = graph.capacity_bytes
        self._tiers = []
        ender: list[list[int]] = [[] for _ in graph.size_bytes]
        for i, buffers in enumerate(graph.counts_down):
            for b in buffers:
                ender[b].append(i)
        for i, frees in enumerate(graph.frees):
            for b in frees:
                ender[b].append(i)
        for t, requests in enumerate(graph.requests):
            wanted = np.array([size for _, size, _ in requests], dtype=np.int64)
            freed = [b for b, ends in enumerate(ender) if ends and graph.tier_of[b] == t and graph.size_bytes[b] > 0]
            enders = np.array([i for b in freed for i in ender[b]], dtype=np.int64)
            first = np.cumsum([0, *(len(ender[b]) for b in freed[:-1])], dtype=np.int64)
            sizes = np.array([graph.size_bytes[b] for b in freed], dtype=np.int64)
            before = sum(graph.size_bytes[b] for b in graph.initial if graph.tier_of[b] == t)
            # If all that is ever wanted fits at once, no times need to be looked at.
            always = before + int(wanted.sum()) <= graph.capacity_bytes[t]
            self._tiers.append((before, wanted, enders, first, sizes, always))

    def fit(self, granted_ns: list[list[int]], end_ns: list[int]) -> bool:
        """Whether no request had to wait. Bytes given back in the same nanosecond do not count as there in time."""
        ends = np.array(end_ns, dtype=np.int64)
        for t, (before, wanted, enders, first, sizes, always) in enumerate(self._tiers):
            if always:
                continue
            if before > self._capacity_bytes[t]:
                return False
            freed_ns = np.maximum.reduceat(ends[enders], first) if len(enders) else np.zeros(0, dtype=np.int64)
            order = np.argsort(freed_ns)
            back = np.concatenate([[0], np.cumsum(sizes[order])])
            held = before + np.cumsum(wanted) - back[np.searchsorted(freed_ns[order], granted_ns[t], side="left")]
            if held.max(initial=0) > self._capacity_bytes[t]:
                return False
        return True


def _busiest_limit_ns(costs: Sequence[Cost], limits: Mapping[str, float]) -> tuple[int, bool]:
    """The time that the most loaded shared limit needs for all that is taken from it, and whether any is taken."""
    load: dict[str, float] = {}
    num_shared = 0
    for cost in costs:
        if cost.demand:
            num_shared += 1
            for name, need in cost.demand.items():
                load[name] = load.get(name, 0.0) + need * cost.work_s
    busiest_s = max((amount / limits[name] for name, amount in load.items() if limits.get(name, 0.0) > 0), default=0.0)
    # The engine rounds each op's work and end to whole nanoseconds.
    return max(0, int(busiest_s * 1e9) - num_shared), num_shared > 0


def _alone_ns(cost: Cost) -> int:
    """Nanoseconds that an op takes when nothing else runs."""
    return max(round(cost.latency_s * 1e9) + round(cost.work_s * 1e9), round(cost.launch_s * 1e9))
