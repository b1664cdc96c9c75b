"""The readiness order in the plainest way, as a witness for the compiled one: a heap and sets, and numpy's slices."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import chain

import numpy as np

from tests.sim.graph_witness import graph_by_records
from tierplan.hwmodels.machine import Cost
from tierplan.sim.schedule import Schedule


def ordered(schedule: Schedule, costs: Mapping[str, Cost], overtaking: Collection[str] = ()) -> Schedule:
    """The same ops, listed in the order of their starts when memory goes to whoever is ready.

    On streams that are `overtaking`, also the stream goes to the first that is ready.

    A schedule that does not complete even one op at a time is returned as it is: then memory is too small for its
    order, and simulating it says where.
    """
    ordering = Ordering(schedule, costs, overtaking)
    return replace(schedule, ops=tuple(schedule.ops[i] for i in ordering.starts())) if ordering.is_safe else schedule


class Ordering:
    """The first simulation. Ops, tiers and buffers are numbered as in `Graph`."""

    def __init__(self, schedule: Schedule, costs: Mapping[str, Cost], overtaking: Collection[str]) -> None:
        self.overtaking = [name in overtaking for name in schedule.streams]
        self.graph = graph = graph_by_records(schedule)
        self.num_ops = len(schedule.ops)
        self.seconds = [costs[op.key].alone_s for op in schedule.ops]
        self.needs: list[dict[int, int]] = [{} for _ in schedule.ops]  # tier -> bytes
        for t, requests in enumerate(graph.requests):
            for i, size_bytes, _ in requests:
                self.needs[i][t] = size_bytes
        self.missing = [len(inputs) for inputs in graph.inputs]
        self.readers_left = list(graph.num_readers)
        self.freed_at = [-1] * len(graph.size_bytes)  # list position of the last op that keeps the buffer
        for i, keeps in enumerate(zip(graph.counts_down, graph.frees, strict=True)):
            for b in chain(*keeps):
                self.freed_at[b] = i
        self.used = [0] * len(graph.capacity_bytes)
        for b in graph.initial:
            self.used[graph.tier_of[b]] += graph.size_bytes[b]
        self.slack = self._serial_slack()

    def _serial_slack(self) -> list[np.ndarray]:
        """Per tier and list position: what stays free at that op when ops run one by one in list order."""
        graph, used, left = self.graph, list(self.used), list(self.readers_left)
        slack = [np.zeros(self.num_ops, dtype=np.int64) for _ in used]
        for i in range(self.num_ops):
            for t, need in self.needs[i].items():
                used[t] += need
            for t, capacity_bytes in enumerate(graph.capacity_bytes):
                slack[t][i] = capacity_bytes - used[t]
            for b in self._end(i, left):
                used[graph.tier_of[b]] -= graph.size_bytes[b]
        return slack

    def _end(self, i: int, readers_left: list[int]) -> list[int]:
        """The buffers that op i frees when it ends, with `readers_left` brought up to date."""
        freed = list(self.graph.frees[i])
        for b in self.graph.counts_down[i]:
            readers_left[b] -= 1
            if readers_left[b] == 0:
                freed.append(b)
        return freed

    @property
    def is_safe(self) -> bool:
        return all(bool((s >= 0).all()) for s in self.slack)

    def starts(self) -> list[int]:
        """Ops in order of start. Assumes `is_safe`."""
        graph = self.graph
        left = [list(ops) for ops in graph.streams]
        idle = set(range(len(graph.streams)))
        started = [False] * self.num_ops
        running: list[tuple[float, int, int]] = []
        order: list[int] = []
        now, frontier = 0.0, 0
        while len(order) < self.num_ops:
            ready = []
            for s in sorted(idle):
                able = [i for i in (left[s] if self.overtaking[s] else left[s][:1]) if self.missing[i] == 0]
                ready += [(i, s) for i in able[:1]]
            ready.sort()
            blocked: set[int] = set()
            progress = False
            for i, stream in ready:
                if not self._fits(i, frontier, blocked):
                    blocked.update(self.needs[i])
                    continue
                for t, need in self.needs[i].items():
                    self.used[t] += need
                    self.slack[t][frontier:i] -= need
                started[i] = progress = True
                order.append(i)
                left[stream].remove(i)
                idle.discard(stream)
                heapq.heappush(running, (now + self.seconds[i], i, stream))
                while frontier < self.num_ops and started[frontier]:
                    frontier += 1
            if progress:
                continue
            assert running, "the safe sequence was lost"
            now, i, stream = heapq.heappop(running)
            idle.add(stream)
            for b in self._end(i, self.readers_left):
                self.used[graph.tier_of[b]] -= graph.size_bytes[b]
                self.slack[graph.tier_of[b]][frontier : self.freed_at[b] + 1] += graph.size_bytes[b]
            for j in graph.followers[i]:
                self.missing[j] -= 1
        return order

    def _fits(self, i: int, frontier: int, blocked: set[int]) -> bool:
        """Whether op i may have its memory now, all ops before `frontier` having started."""
        for t, need in self.needs[i].items():
            if t in blocked or self.used[t] + need > self.graph.capacity_bytes[t]:
                return False
            if i > frontier and int(self.slack[t][frontier:i].min()) < need:
                return False
        return True
