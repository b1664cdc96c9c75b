"""The simulator: SimPy executes a schedule by the four rules and returns the trace.

Streams run their ops in list order (rule 1). An op is *eligible* when its stream has reached it and all that it waits
for has ended (rule 2). Each tier grants memory to eligible ops strictly in list order (rule 3), and takes bytes back
when the last reader of a buffer ends (rule 4). An op is one SimPy timeout. An op that uses a shared limit is a flow
instead; the speeds of all flows change whenever a flow begins or ends (`tierplan.sim.sharing`).

This module knows nothing of transformers, optimizers or systems. Times are integer nanoseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import starmap
from operator import itemgetter, truediv

import numpy as np
import simpy

from tierplan.hwmodels.machine import Cost
from tierplan.sim.analysis.completion import SimulationError, check_memory
from tierplan.sim.columns import Lists, collector_paused, columns_of, rows_of
from tierplan.sim.compiled.graph_columns import graph_columns
from tierplan.sim.compiled.simulation import cost_fault
from tierplan.sim.schedule import Schedule
from tierplan.sim.sharing import max_min_speeds
from tierplan.sim.trace import MemoryEvent, Span, Trace


def simulate(schedule: Schedule, costs: Mapping[str, Cost], *, limits: Mapping[str, float] | None = None) -> Trace:
    """The trace of `schedule` when its ops cost `costs` (by key) and share `limits` (units per second, by name).

    The schedule is taken to be valid (`schedule.validate`).

    Raises `OutOfMemory` when the schedule cannot complete, for whatever costs; `SimulationError` when a cost is
    missing, negative, not finite or of decades, or takes of a limit that is unknown or 0.
    """
    with collector_paused():
        return _Run(schedule, costs, limits or {}).trace()


class _Run:
    """One execution. Ops, tiers and buffers are numbered as in the schedule; `_x[i]` is a fact about op i."""

    def __init__(self, schedule: Schedule, costs: Mapping[str, Cost], limits: Mapping[str, float]) -> None:
        self.env = simpy.Environment()
        self._schedule, self._columns = schedule, (columns := columns_of(schedule))
        self._graph = graph = graph_columns(columns)
        self._costs = _checked(schedule, costs, limits)
        self._flows = _Flows(self.env, limits, self._end)
        num_ops, num_tiers = len(schedule.ops), len(schedule.tiers)
        # Lists, since numbers are looked at one by one.
        self._next_on_stream, self._followers = graph.next_on_stream.tolist(), rows_of(graph.followers)
        self._needs = rows_of(Lists(graph.requests, graph.request_tier))  # tiers in which the op has a request
        self._request_op, self._request_next = graph.request_op.tolist(), graph.request_next.tolist()
        self._request_bytes = graph.request_bytes.tolist()
        self._writes, self._frees = rows_of(columns.writes), rows_of(graph.frees)
        self._tier_of, self._reuses = graph.buffer_tier.tolist(), columns.buffer_reuses.tolist()
        self._held_bytes = graph.held_bytes.tolist()
        self._capacity_bytes = [t.capacity_bytes for t in schedule.tiers]
        self._waiting_for = graph.num_inputs.tolist()
        self._grants_left = [len(tiers) for tiers in self._needs]
        self._eligible = [False] * num_ops
        self._users_left = graph.users.tolist()
        self._used_bytes: list[int] = graph.initial_bytes.tolist()
        self._peak_bytes = list(self._used_bytes)
        self._next_request = graph.first_request.tolist()
        self._is_short = [False] * num_tiers  # the next request is eligible and does not fit
        self._free_ns = [-1] * num_ops
        self._ready_ns = [0] * num_ops
        self._start_ns = [-1] * num_ops
        self._end_ns = [-1] * num_ops
        self._alone_ns = [-1] * num_ops
        self._changes: list[tuple[int, int, int]] = []  # time_ns, buffer, bytes

    # ---- the four rules ----

    def _reach(self, i: int, now: int) -> None:
        """Op i is next on its stream."""
        self._free_ns[i] = now
        if self._waiting_for[i] == 0:
            self._ask(i, now)

    def _ask(self, i: int, now: int) -> None:
        """Op i is eligible: it starts when it has been granted its memory."""
        self._eligible[i] = True
        if not self._grants_left[i]:
            self._start(i, now)
        for tier in self._needs[i]:
            self._grant(tier, now)

    def _grant(self, tier: int, now: int) -> None:
        """Grants memory of one tier in list order, as far as the next op is eligible and fits."""
        while (r := self._next_request[tier]) >= 0:
            i = self._request_op[r]
            if not self._eligible[i]:
                return
            used_bytes = self._used_bytes[tier] + self._request_bytes[r]
            if used_bytes > self._capacity_bytes[tier]:
                self._is_short[tier] = True
                return
            self._next_request[tier] = self._request_next[r]
            self._used_bytes[tier] = used_bytes
            if used_bytes > self._peak_bytes[tier]:
                self._peak_bytes[tier] = used_bytes
            for b in self._writes[i]:
                if self._tier_of[b] == tier and self._reuses[b] < 0 and self._held_bytes[b]:
                    self._changes.append((now, b, self._held_bytes[b]))
            self._grants_left[i] -= 1
            if self._grants_left[i] == 0:
                self._start(i, now)

    def _start(self, i: int, now: int) -> None:
        self._start_ns[i] = now
        cost = self._costs[i]
        wake_ns = round(cost.wake_s * 1e9) if cost.wake_s and self._ready_ns[i] > self._free_ns[i] else 0
        work_ns = round(cost.work_s * 1e9)
        launched_ns = round(cost.launch_s * 1e9) - work_ns - (now - self._free_ns[i])
        latency_ns = max(round(cost.latency_s * 1e9) + wake_ns, launched_ns)
        self._alone_ns[i] = latency_ns + work_ns
        if not cost.demand:
            self.env.timeout(self._alone_ns[i], i).callbacks.append(self._on_end)
        elif latency_ns:
            self.env.timeout(latency_ns, i).callbacks.append(self._on_latency_over)
        else:
            self._flows.begin(i, cost)

    def _on_latency_over(self, event: simpy.Event) -> None:
        self._flows.begin(event.value, self._costs[event.value])

    def _on_end(self, event: simpy.Event) -> None:
        self._end(event.value, self.env.now)

    def _end(self, i: int, now: int) -> None:
        """Op i has ended: bytes come back, followers and the stream go on."""
        self._end_ns[i] = now
        for new in self._writes[i]:
            old, size_bytes = self._reuses[new], self._held_bytes[new]
            if old >= 0 and self._schedule.buffers[old].kind != self._schedule.buffers[new].kind:
                self._changes += ((now, old, -size_bytes), (now, new, size_bytes))
        freed = []
        for b in self._frees[i]:
            self._users_left[b] -= 1
            if self._users_left[b] == 0:
                freed.append(b)
                self._used_bytes[self._tier_of[b]] -= self._held_bytes[b]
                self._changes.append((now, b, -self._held_bytes[b]))
        for b in freed:
            if self._is_short[self._tier_of[b]]:
                self._is_short[self._tier_of[b]] = False
                self._grant(self._tier_of[b], now)
        for j in self._followers[i]:
            self._waiting_for[j] -= 1
            if self._waiting_for[j] == 0:
                self._ready_ns[j] = now
                if self._free_ns[j] >= 0:
                    self._ask(j, now)
        if self._next_on_stream[i] >= 0:
            self._reach(self._next_on_stream[i], now)

    # ---- before and after ----

    def trace(self) -> Trace:
        for b in np.flatnonzero(self._columns.buffer_initial).tolist():
            self._changes.append((0, b, self._held_bytes[b]))
        if any(used > capacity for used, capacity in zip(self._used_bytes, self._capacity_bytes, strict=True)):
            check_memory(self._columns, self._graph)
        for i in self._graph.first_on_stream.tolist():
            self._reach(i, 0)
        self.env.run()
        del self._flows  # it refers back here: without the cycle, everything is released at once
        if -1 in self._end_ns:
            check_memory(self._columns, self._graph)
            raise AssertionError("this engine found too little memory, the other one did not")
        schedule = self._schedule
        tiers, listed = [t.name for t in schedule.tiers], schedule.ops
        times = (self._free_ns, self._ready_ns, self._start_ns, self._end_ns, self._alone_ns)
        rows = zip([op.key for op in listed], [op.stream for op in listed], *times, strict=True)
        where = [(b.tier, b.kind) for b in schedule.buffers]
        return Trace(
            name=schedule.name,
            spans=tuple(sorted(starmap(Span, rows), key=itemgetter(Span._fields.index("start_ns")))),
            memory=tuple([MemoryEvent(t, *where[b], delta_bytes) for t, b, delta_bytes in self._changes]),
            capacity_bytes=dict(zip(tiers, self._capacity_bytes, strict=True)),
            peak_bytes=dict(zip(tiers, self._peak_bytes, strict=True)),
            meta=schedule.meta,
        )


def _checked(schedule: Schedule, costs: Mapping[str, Cost], limits: Mapping[str, float]) -> list[Cost]:
    """The cost of each op, in list order. Ops that share a `Cost` are checked once."""
    sound: set[int] = set()
    checked = []
    for op in schedule.ops:
        cost = costs.get(op.key)
        if cost is None:
            raise SimulationError(f"op {op.key!r} has no cost; price all ops of the schedule")
        if id(cost) not in sound and (fault := cost_fault(cost, limits)):
            raise SimulationError(f"op {op.key!r} {fault}")
        sound.add(id(cost))
        checked.append(cost)
    return checked


class _Flows:
    """The ops that share limits, each with its remaining work. One timer is pending, for the earliest end."""

    def __init__(self, env: simpy.Environment, limits: Mapping[str, float], end: Callable[[int, int], None]) -> None:
        self._env = env
        self._limits = limits
        self._end = end
        self._ops: list[int] = []
        self._costs: list[Cost] = []
        self._left_ns: list[float] = []  # at full speed
        self._speeds: list[float] = []
        self._since_ns = 0
        self._next_end_ns = -1
        self._timer_ns = -1  # when the pending timer fires, at the next end or before it; -1 for none
        self._is_ending = False
        self._known: dict[tuple[int, ...], list[float]] = {}  # speeds by the costs that run together

    def begin(self, i: int, cost: Cost) -> None:
        """Op i begins its work. At its end, whenever that is, `end` is called with i and the time."""
        self._advance()
        self._ops.append(i)
        self._costs.append(cost)
        self._left_ns.append(float(round(cost.work_s * 1e9)))
        if not self._is_ending:
            self._divide()

    def _advance(self) -> None:
        elapsed_ns = self._env.now - self._since_ns
        self._since_ns = self._env.now
        if elapsed_ns:
            self._left_ns = [left - elapsed_ns * v for left, v in zip(self._left_ns, self._speeds, strict=True)]

    def _divide(self) -> None:
        together = tuple(map(id, self._costs))
        if together not in self._known:
            self._known[together] = max_min_speeds(
                [c.demand for c in self._costs], [c.share for c in self._costs], self._limits
            )
        self._speeds = self._known[together]
        soonest_ns = min(map(truediv, self._left_ns, self._speeds))
        self._next_end_ns = self._env.now + max(0, math.ceil(soonest_ns - 1e-3))  # whole ns, but for float dust
        if self._timer_ns < 0 or self._next_end_ns < self._timer_ns:
            self._set_timer()

    def _set_timer(self) -> None:
        self._timer_ns = self._next_end_ns
        self._env.timeout(self._timer_ns - self._env.now, self._timer_ns).callbacks.append(self._on_timer)

    def _on_timer(self, timer: simpy.Event) -> None:
        if timer.value != self._timer_ns:
            return  # an earlier end replaced this timer
        if self._next_end_ns > self._timer_ns:
            self._set_timer()  # flows that began since have slowed the others
            return
        self._timer_ns = -1
        self._advance()
        places = [k for k, left in enumerate(self._left_ns) if left <= 1e-3]
        ended = [self._ops[k] for k in places]
        for k in reversed(places):
            del self._ops[k], self._costs[k], self._left_ns[k]
        self._is_ending = True  # flows that begin because of these ends are divided among once, below
        for i in ended:
            self._end(i, self._env.now)
        self._is_ending = False
        self._speeds = []
        if self._ops:
            self._divide()
