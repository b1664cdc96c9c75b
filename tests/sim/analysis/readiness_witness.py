"""The readiness order in the plainest way, as a witness for the compiled one: a heap and sets, and numpy's slices."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np

from tierplan.hwmodels.machine import Cost
from tierplan.sim.columns import columns_of, rows_of
from tierplan.sim.compiled.graph_columns import graph_columns
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
    """The first simulation. Ops, tiers and buffers are numbered as in `GraphColumns`."""

    def __init__(self, schedule: Schedule, costs: Mapping[str, Cost], overtaking: Collection[str]) -> None:
        self.overtaking = [name in overtaking for name in schedule.streams]
        self.graph = graph = graph_columns(columns_of(schedule))
        self.followers, self.frees = rows_of(graph.followers), rows_of(graph.frees)
        self.num_ops = len(schedule.ops)
        self.seconds = [costs[op.key].alone_s for op in schedule.ops]
        self.needs: list[dict[int, int]] = [{} for _ in schedule.ops]  # tier -> bytes
        for i, tier, size_bytes in zip(graph.request_op, graph.request_tier, graph.request_bytes, strict=True):
            self.needs[i][int(tier)] = int(size_bytes)
        self.missing, self.users_left, self.used = (
            graph.num_inputs.copy(),
            graph.users.copy(),
            graph.initial_bytes.copy(),
        )
        self.freed_at = {b: i for i, row in enumerate(self.frees) for b in row}
        """By buffer, the list position of the last op that keeps it."""
        self.slack = self._serial_slack()

    def _serial_slack(self) -> list[np.ndarray]:
        """Per tier and list position: what stays free at that op when ops run one by one in list order."""
        used, left, slack = self.used.copy(), self.users_left.copy(), []
        for i in range(self.num_ops):
            for t, need in self.needs[i].items():
                used[t] += need
            slack.append(self.graph.capacity_bytes - used)
            for b in self._end(i, left):
                used[self.graph.buffer_tier[b]] -= self.graph.held_bytes[b]
        return list(np.array(slack).T)

    def _end(self, i: int, users_left: np.ndarray) -> list[int]:
        """The buffers that op i frees when it ends, with `users_left` brought up to date."""
        users_left[self.frees[i]] -= 1
        return [b for b in self.frees[i] if users_left[b] == 0]

    @property
    def is_safe(self) -> bool:
        return all(bool((s >= 0).all()) for s in self.slack)

    def starts(self) -> list[int]:
        """Ops in order of start. Assumes `is_safe`."""
        graph = self.graph
        left = [np.flatnonzero(graph.stream == s).tolist() for s in range(len(graph.first_on_stream))]
        idle = set(range(len(left)))
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
            for b in self._end(i, self.users_left):
                self.used[graph.buffer_tier[b]] -= graph.held_bytes[b]
                self.slack[graph.buffer_tier[b]][frontier : self.freed_at[b] + 1] += graph.held_bytes[b]
            self.missing[self.followers[i]] -= 1
        return order

    def _fits(self, i: int, frontier: int, blocked: set[int]) -> bool:
        """Whether op i may have its memory now, all ops before `frontier` having started."""
        for t, need in self.needs[i].items():
            if t in blocked or self.used[t] + need > self.graph.capacity_bytes[t]:
                return False
            if i > frontier and int(self.slack[t][frontier:i].min()) < need:
                return False
        return True
