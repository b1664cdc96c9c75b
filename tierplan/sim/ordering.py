"""A better list order from a first simulation: ops in the order in which they could start.

By rule 3 an op that is listed too early holds back the grants behind it. Here every stream keeps its own order, but a
tier serves whoever is ready, and the order of starts is then frozen as the list order. Executed by the four rules with
the same durations, no op starts later than it did here (by induction over the list), so nothing is lost by freezing.

Serving whoever is ready could run a tier full of things that are wanted late. So an op may overtake others in a tier
only if those still fit afterwards when executed one by one in the given list order; that order then always remains as
a way to the end. This is the banker's rule with the list order as the safe sequence.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from tierplan.hwmodels.costs import Cost
from tierplan.sim.schedule import Schedule

__all__ = ["order_by_readiness"]


def order_by_readiness(schedule: Schedule, costs: Mapping[str, Cost]) -> Schedule:
    """The same ops, listed in the order of their starts when memory goes to whoever is ready.

    A schedule that does not complete even one op at a time is returned as it is: then memory is too small for its
    order, and simulating it says where.
    """
    ordering = _Ordering(schedule, costs)
    return replace(schedule, ops=tuple(schedule.ops[i] for i in ordering.starts())) if ordering.is_safe else schedule


class _Ordering:
    def __init__(self, schedule: Schedule, costs: Mapping[str, Cost]) -> None:
        ops, buffers = schedule.ops, schedule.buffers
        self.n = len(ops)
        self.seconds = [costs[op.key].alone_s for op in ops]
        index = {b.name: i for i, b in enumerate(buffers)}
        tiers = {t.name: i for i, t in enumerate(schedule.tiers)}
        self.capacity = [t.capacity_bytes for t in schedule.tiers]
        self.needs: list[dict[int, int]] = [{} for _ in ops]
        self.tier = [tiers[b.tier] for b in buffers]
        self.size = [schedule.tiers[t].held_bytes(b.size_bytes) for b, t in zip(buffers, self.tier, strict=True)]
        reused = {b.reuses for b in buffers}
        freed = [b.becomes is None and b.name not in reused for b in buffers]
        self.reads = [[index[name] for name in op.reads if freed[index[name]]] for op in ops]
        self.dead = [[index[name] for name in op.writes if freed[index[name]]] for op in ops]
        self.readers_left = [0] * len(buffers)
        self.missing = [0] * self.n
        self.followers: list[list[int]] = [[] for _ in ops]
        self.streams: dict[str, list[int]] = {}
        number = {op.key: i for i, op in enumerate(ops)}
        writer: dict[str, int] = {}
        readers: dict[str, list[int]] = {}
        for i, op in enumerate(ops):
            self.streams.setdefault(op.stream, []).append(i)
            inputs = {writer[name] for name in op.reads if name in writer} | {number[key] for key in op.after}
            for name in op.reads:
                readers.setdefault(name, []).append(i)
                self.readers_left[index[name]] += 1
            for name in op.writes:
                writer[name] = i
                buffer = buffers[index[name]]
                if buffer.reuses is not None:
                    inputs.update(readers[buffer.reuses])
                else:
                    t = tiers[buffer.tier]
                    self.needs[i][t] = self.needs[i].get(t, 0) + self.size[index[name]]
            inputs.discard(i)
            self.missing[i] = len(inputs)
            for j in inputs:
                self.followers[j].append(i)
        self.last_use = [-1] * len(buffers)  # list position of the last op that reads a buffer, or else writes it
        for i, op in enumerate(ops):
            for name in (*op.reads, *op.writes):
                self.last_use[index[name]] = i
        self.used = [0] * len(self.capacity)
        for i, b in enumerate(buffers):
            if b.initial and (self.readers_left[i] or not freed[i]):
                self.used[self.tier[i]] += self.size[i]
        self.slack = self._serial_slack()

    def _serial_slack(self) -> list[np.ndarray]:
        """Per tier and list position: what stays free at that op when ops run one by one in list order."""
        used, left = list(self.used), list(self.readers_left)
        slack = [np.zeros(self.n, dtype=np.int64) for _ in self.capacity]
        for i in range(self.n):
            for t, need in self.needs[i].items():
                used[t] += need
            for t, cap in enumerate(self.capacity):
                slack[t][i] = cap - used[t]
            for b in self._end(i, left):
                used[self.tier[b]] -= self.size[b]
        return slack

    def _end(self, i: int, readers_left: list[int]) -> list[int]:
        """The buffers that op i frees when it ends, with `readers_left` brought up to date."""
        freed = []
        for b in self.reads[i]:
            readers_left[b] -= 1
            if readers_left[b] == 0:
                freed.append(b)
        freed += [b for b in self.dead[i] if readers_left[b] == 0]
        return freed

    @property
    def is_safe(self) -> bool:
        return all(bool((s >= 0).all()) for s in self.slack)

    def starts(self) -> list[int]:
        """Ops in order of start. Assumes `is_safe`."""
        heads = {stream: 0 for stream in self.streams}
        idle = set(self.streams)
        started = [False] * self.n
        running: list[tuple[float, int, str]] = []
        order: list[int] = []
        now, frontier = 0.0, 0
        while len(order) < self.n:
            ready = sorted(
                (self.streams[s][heads[s]], s)
                for s in idle
                if heads[s] < len(self.streams[s]) and self.missing[self.streams[s][heads[s]]] == 0
            )
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
                heads[stream] += 1
                idle.discard(stream)
                heapq.heappush(running, (now + self.seconds[i], i, stream))
                while frontier < self.n and started[frontier]:
                    frontier += 1
            if progress:
                continue
            assert running or len(order) == self.n, "the safe sequence was lost"
            now, i, stream = heapq.heappop(running)
            idle.add(stream)
            for b in self._end(i, self.readers_left):
                self.used[self.tier[b]] -= self.size[b]
                self.slack[self.tier[b]][frontier : self.last_use[b] + 1] += self.size[b]
            for j in self.followers[i]:
                self.missing[j] -= 1
        return order

    def _fits(self, i: int, frontier: int, blocked: set[int]) -> bool:
        for t, need in self.needs[i].items():
            if need == 0:
                continue
            if t in blocked or self.used[t] + need > self.capacity[t]:
                return False
            if i > frontier and int(self.slack[t][frontier:i].min()) < need:
                return False
        return True
