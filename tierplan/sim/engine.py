"""The simulator: SimPy executes a schedule by the four rules and returns the trace.

One SimPy process per stream walks its ops in list order (rule 1). An op is *eligible* when its stream has reached it
and all that it waits for has ended (rule 2). Each tier grants memory to eligible ops strictly in list order (rule 3), and
takes bytes back when a buffer's last reader ends (rule 4). Ops that use a shared limit run as flows whose speeds are
divided anew whenever a flow starts or ends (`tierplan.sim.sharing`).

This module knows nothing of transformers, optimizers or systems. Times are integer nanoseconds. Errors:

    SimulationError(RuntimeError)
    └── OutOfMemory     the schedule cannot complete: names the op, the tier, the bytes wanted and free, and the holders
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import simpy

from tierplan.hwmodels.costs import Cost
from tierplan.sim.schedule import Schedule
from tierplan.sim.sharing import max_min_speeds
from tierplan.sim.trace import MemoryEvent, Span, Trace

__all__ = ["OutOfMemory", "SimulationError", "simulate"]


class SimulationError(RuntimeError):
    """The schedule could not be simulated to its end."""


@dataclass
class OutOfMemory(SimulationError):
    """An op waits for memory that nothing will free: with this order, the tier is too small."""

    op: str
    tier: str
    wanted_bytes: int
    free_bytes: int
    capacity_bytes: int
    holders: tuple[tuple[str, int], ...]
    """Largest buffers held in the tier, by name and bytes, largest first."""

    def __str__(self) -> str:
        held = ", ".join(f"{name} {size:,} B" for name, size in self.holders[:5])
        return (
            f"op {self.op!r} wants {self.wanted_bytes:,} bytes in tier {self.tier!r}, but {self.free_bytes:,} of "
            f"{self.capacity_bytes:,} are free and nothing that still runs will free more; held by {held or 'nothing'}. "
            f"Raise the capacity of {self.tier!r}, or choose a plan that keeps less there"
        )


def simulate(schedule: Schedule, costs: Mapping[str, Cost], *, limits: Mapping[str, float] | None = None) -> Trace:
    """The trace of `schedule` when its ops cost `costs` (by key) and share `limits` (units per second, by name).

    Raises `OutOfMemory` when the schedule cannot complete. The schedule is taken to be valid (`schedule.validate`).
    """
    return _Run(schedule, costs, limits or {}).trace()


class _Run:
    """One execution. Ops, tiers and buffers are numbered; `_x[i]` is a fact about op i."""

    def __init__(self, schedule: Schedule, costs: Mapping[str, Cost], limits: Mapping[str, float]) -> None:
        self.env = simpy.Environment()
        self.schedule = schedule
        self.flows = _Flows(self.env, limits)
        self._costs = [costs[op.key] for op in schedule.ops]
        self._number_tiers_and_buffers()
        self._number_ops()

    def _number_tiers_and_buffers(self) -> None:
        schedule = self.schedule
        tier_index = {t.name: i for i, t in enumerate(schedule.tiers)}
        self._capacity = [t.capacity_bytes for t in schedule.tiers]
        self._used = [0] * len(schedule.tiers)
        self._peak = [0] * len(schedule.tiers)
        self._buffer_index = {b.name: i for i, b in enumerate(schedule.buffers)}
        self._tier_of = [tier_index[b.tier] for b in schedule.buffers]
        self._readers_left = [0] * len(schedule.buffers)
        reused = {b.reuses for b in schedule.buffers}
        self._is_freed = [b.becomes is None and b.name not in reused for b in schedule.buffers]
        self._held = [False] * len(schedule.buffers)
        self._memory: list[tuple[int, int, int]] = []  # time_ns, buffer, +1 or -1

    def _number_ops(self) -> None:
        """Dependencies, memory needs and the order of grants, all fixed before time starts."""
        schedule, index = self.schedule, self._buffer_index
        number = {op.key: i for i, op in enumerate(schedule.ops)}
        n = len(schedule.ops)
        self._reads = [[index[name] for name in op.reads] for op in schedule.ops]
        self._writes = [[index[name] for name in op.writes] for op in schedule.ops]
        self._waiting_for = [0] * n  # inputs that have not ended
        self._followers: list[list[int]] = [[] for _ in range(n)]
        self._needs: list[dict[int, int]] = [{} for _ in range(n)]  # bytes to be granted, by tier
        self._grant_order: list[list[int]] = [[] for _ in schedule.tiers]
        writer = [-1] * len(index)
        readers: list[list[int]] = [[] for _ in index]
        streams: dict[str, list[int]] = {}
        for i, op in enumerate(schedule.ops):
            streams.setdefault(op.stream, []).append(i)
            inputs = {writer[b] for b in self._reads[i] if writer[b] >= 0}
            inputs.update(number[key] for key in op.after)
            for b in self._reads[i]:
                readers[b].append(i)
                self._readers_left[b] += 1
            for b in self._writes[i]:
                writer[b] = i
                buffer = schedule.buffers[b]
                if buffer.reuses is not None:
                    inputs.update(readers[index[buffer.reuses]])
                elif buffer.size_bytes > 0:
                    tier = self._tier_of[b]
                    self._needs[i][tier] = self._needs[i].get(tier, 0) + buffer.size_bytes
            inputs.discard(i)
            self._waiting_for[i] = len(inputs)
            for j in inputs:
                self._followers[j].append(i)
            for tier in self._needs[i]:
                self._grant_order[tier].append(i)
        self._streams = streams
        self._grants_left = [len(needs) for needs in self._needs]
        self._next_grant = [0] * len(schedule.tiers)
        self._eligible = [False] * n
        self._reached = [False] * n
        self._go: list[simpy.Event | None] = [None] * n
        self._free_ns = [0] * n
        self._ready_ns = [0] * n
        self._start_ns = [-1] * n
        self._end_ns = [-1] * n

    # ---- the four rules ----

    def _stream(self, ops: Sequence[int]) -> Generator[simpy.Event, None, None]:
        env = self.env
        for i in ops:
            self._reached[i] = True
            self._free_ns[i] = env.now
            if self._waiting_for[i] == 0:
                self._make_eligible(i)
            if self._start_ns[i] < 0:
                self._go[i] = env.event()
                yield self._go[i]
            cost = self._costs[i]
            if cost.demand:
                if latency_ns := round(cost.latency_s * 1e9):
                    yield env.timeout(latency_ns)
                yield self.flows.run(cost)
            else:
                yield env.timeout(alone_ns(cost))
            self._end(i)

    def _make_eligible(self, i: int) -> None:
        self._eligible[i] = True
        if self._grants_left[i] == 0:
            self._start(i)
        else:
            for tier in self._needs[i]:
                self._grant(tier)

    def _grant(self, tier: int) -> None:
        """Grants memory of one tier in list order, as far as the next op is eligible and fits."""
        order, at = self._grant_order[tier], self._next_grant[tier]
        while at < len(order):
            i = order[at]
            needed = self._needs[i][tier]
            if not self._eligible[i] or self._used[tier] + needed > self._capacity[tier]:
                break
            at += 1
            self._next_grant[tier] = at
            self._hold(i, tier)
            self._grants_left[i] -= 1
            if self._grants_left[i] == 0:
                self._start(i)

    def _hold(self, i: int, tier: int) -> None:
        for b in self._writes[i]:
            if self._tier_of[b] == tier and self.schedule.buffers[b].reuses is None:
                self._held[b] = True
                self._used[tier] += self.schedule.buffers[b].size_bytes
                self._memory.append((self.env.now, b, 1))
        self._peak[tier] = max(self._peak[tier], self._used[tier])

    def _start(self, i: int) -> None:
        self._start_ns[i] = self.env.now
        go = self._go[i]
        if go is not None:
            go.succeed()

    def _end(self, i: int) -> None:
        self._end_ns[i] = self.env.now
        freed = set()
        for b in self._reads[i]:
            self._readers_left[b] -= 1
            if self._readers_left[b] == 0 and self._is_freed[b]:
                freed.add(self._free(b))
        for b in self._writes[i]:
            reuses = self.schedule.buffers[b].reuses
            if reuses is not None:
                self._held[self._buffer_index[reuses]] = False
                self._held[b] = True
            if self._readers_left[b] == 0 and self._is_freed[b]:
                freed.add(self._free(b))
        for j in self._followers[i]:
            self._waiting_for[j] -= 1
            if self._waiting_for[j] == 0:
                self._ready_ns[j] = self.env.now
                if self._reached[j]:
                    self._make_eligible(j)
        for tier in sorted(freed):
            self._grant(tier)

    def _free(self, b: int) -> int:
        tier = self._tier_of[b]
        self._held[b] = False
        self._used[tier] -= self.schedule.buffers[b].size_bytes
        self._memory.append((self.env.now, b, -1))
        return tier

    # ---- before and after ----

    def trace(self) -> Trace:
        schedule = self.schedule
        for b, buffer in enumerate(schedule.buffers):
            if buffer.initial and (self._readers_left[b] > 0 or not self._is_freed[b]):
                tier = self._tier_of[b]
                self._held[b] = True
                self._used[tier] += buffer.size_bytes
                self._memory.append((0, b, 1))
                self._peak[tier] = max(self._peak[tier], self._used[tier])
        self._check_initial()
        for ops in self._streams.values():
            self.env.process(self._stream(ops))
        self.env.run()
        if any(end < 0 for end in self._end_ns):
            raise self._out_of_memory()
        spans = [
            Span(
                op.key, op.stream, self._free_ns[i], self._ready_ns[i], self._start_ns[i], self._end_ns[i], alone_ns(c)
            )
            for i, (op, c) in enumerate(zip(schedule.ops, self._costs, strict=True))
        ]
        buffers = schedule.buffers
        return Trace(
            name=schedule.name,
            spans=tuple(sorted(spans, key=lambda s: s.start_ns)),
            memory=tuple(
                MemoryEvent(t, buffers[b].tier, buffers[b].kind, sign * buffers[b].size_bytes)
                for t, b, sign in self._memory
            ),
            capacity_bytes={t.name: t.capacity_bytes for t in schedule.tiers},
            peak_bytes={t.name: self._peak[k] for k, t in enumerate(schedule.tiers)},
            meta=schedule.meta,
        )

    def _check_initial(self) -> None:
        for k, tier in enumerate(self.schedule.tiers):
            if self._used[k] > tier.capacity_bytes:
                initial = [(b.name, b.size_bytes) for b in self.schedule.buffers if b.initial and b.tier == tier.name]
                raise OutOfMemory(
                    op="(before the step)",
                    tier=tier.name,
                    wanted_bytes=self._used[k],
                    free_bytes=tier.capacity_bytes,
                    capacity_bytes=tier.capacity_bytes,
                    holders=tuple(sorted(initial, key=lambda h: (-h[1], h[0]))),
                )

    def _out_of_memory(self) -> OutOfMemory:
        schedule = self.schedule
        for k, tier in enumerate(schedule.tiers):
            if self._next_grant[k] == len(self._grant_order[k]):
                continue
            i = self._grant_order[k][self._next_grant[k]]
            if self._eligible[i]:
                held = [(b.name, b.size_bytes) for j, b in enumerate(schedule.buffers) if self._held[j]]
                held = [
                    (name, size) for name, size in held if schedule.buffers[self._buffer_index[name]].tier == tier.name
                ]
                return OutOfMemory(
                    op=schedule.ops[i].key,
                    tier=tier.name,
                    wanted_bytes=self._needs[i][k],
                    free_bytes=self._capacity[k] - self._used[k],
                    capacity_bytes=self._capacity[k],
                    holders=tuple(sorted(held, key=lambda h: (-h[1], h[0]))),
                )
        stuck = next(op.key for op, end in zip(schedule.ops, self._end_ns, strict=True) if end < 0)
        raise AssertionError(f"op {stuck!r} never ran although no tier is short; the schedule was not validated")


def alone_ns(cost: Cost) -> int:
    """Nanoseconds that an op takes with nothing beside it."""
    return round(cost.latency_s * 1e9) + round(cost.work_s * 1e9)


class _Flows:
    """The ops that share limits, each with what is left of its work; one live timer for the earliest end."""

    def __init__(self, env: simpy.Environment, limits: Mapping[str, float]) -> None:
        self._env = env
        self._limits = limits
        self._done: list[simpy.Event] = []
        self._left_ns: list[float] = []  # at full speed
        self._costs: list[Cost] = []
        self._speeds: list[float] = []
        self._since_ns = 0
        self._timer_ns = -1  # when the live timer fires; -1 for none

    def run(self, cost: Cost) -> simpy.Event:
        """An event that fires when the op's work is done, however it is shared until then."""
        done = self._env.event()
        self._advance()
        self._done.append(done)
        self._left_ns.append(float(round(cost.work_s * 1e9)))
        self._costs.append(cost)
        self._divide()
        return done

    def _advance(self) -> None:
        elapsed = self._env.now - self._since_ns
        self._since_ns = self._env.now
        if elapsed:
            self._left_ns = [left - elapsed * speed for left, speed in zip(self._left_ns, self._speeds, strict=True)]

    def _divide(self) -> None:
        self._speeds = max_min_speeds([c.demand for c in self._costs], [c.share for c in self._costs], self._limits)
        soonest = min(
            (left / speed for left, speed in zip(self._left_ns, self._speeds, strict=True) if speed > 0), default=None
        )
        if soonest is None:
            return
        end_ns = self._env.now + max(0, -int(-(soonest - 1e-3) // 1))  # rounded up to whole ns, but for float dust
        if self._timer_ns < 0 or end_ns < self._timer_ns:
            self._timer_ns = end_ns
            timer = self._env.timeout(end_ns - self._env.now, value=end_ns)
            timer.callbacks.append(self._on_timer)

    def _on_timer(self, timer: simpy.Event) -> None:
        if timer.value != self._timer_ns:
            return  # an earlier end replaced this timer
        self._timer_ns = -1
        self._advance()
        ended = [i for i, left in enumerate(self._left_ns) if left <= 1e-3]
        for i in ended:
            self._done[i].succeed()
        for i in reversed(ended):
            del self._done[i], self._left_ns[i], self._costs[i], self._speeds[i]
        if self._done:
            self._divide()
