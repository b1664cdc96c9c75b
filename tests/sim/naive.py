"""The four rules executed in the plainest way, as a witness for the engine: rescan everything after each event.

Written from the text of the rules alone; it shares no code with `tierplan.sim`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tierplan.sim.schedule import Buffer, Op, Schedule


def readers_of(schedule: Schedule) -> dict[str, list[str]]:
    """Keys of the ops that read each buffer, in list order."""
    readers: dict[str, list[str]] = {b.name: [] for b in schedule.buffers}
    for op in schedule.ops:
        for name in op.reads:
            readers[name].append(op.key)
    return readers


def writers_of(schedule: Schedule) -> dict[str, str]:
    """Key of the op that writes each buffer; initial buffers are absent."""
    return {name: op.key for op in schedule.ops for name in op.writes}


def initial_bytes(schedule: Schedule) -> dict[str, int]:
    """Bytes that each tier holds before the step."""
    initial = [b for b in schedule.buffers if b.initial]
    return {t.name: sum(t.held_bytes(b.size_bytes) for b in initial if b.tier == t.name) for t in schedule.tiers}


@dataclass
class State:
    """Which ops have been granted memory, have started and have ended, and what each tier holds."""

    schedule: Schedule
    granted: set[tuple[str, str]] = field(default_factory=set)
    """(op, tier) pairs."""
    started: list[str] = field(default_factory=list)
    ended: set[str] = field(default_factory=set)
    grants: dict[str, list[str]] = field(default_factory=dict)
    """Per tier, the order of grants."""

    def inputs_complete(self, op: Op) -> bool:
        schedule = self.schedule
        writers, readers, buffers = writers_of(schedule), readers_of(schedule), schedule.buffers_by_name()
        wanted = set(op.after) | {writers[name] for name in op.reads if name in writers}
        for name in op.writes:
            over = buffers[name].reuses
            if over is not None:
                wanted |= set(readers[over]) - {op.key}
        return wanted <= self.ended

    def is_next_on_stream(self, op: Op) -> bool:
        for other in self.schedule.ops:
            if other.stream == op.stream and other.key not in self.ended:
                return other.key == op.key
        return False

    def wanted_bytes(self, op: Op, tier: str) -> int:
        buffers = self.schedule.buffers_by_name()
        fresh = (buffers[n] for n in op.writes if buffers[n].tier == tier and buffers[n].reuses is None)
        return sum(self.size_in_tier(b) for b in fresh)

    def size_in_tier(self, b: Buffer) -> int:
        rounding = next(t.rounding for t in self.schedule.tiers if t.name == b.tier)
        if rounding == "page":
            return (b.size_bytes + 4095) // 4096 * 4096
        if rounding == "power-of-two" and b.size_bytes:
            return next(2**k for k in range(64) if 2**k >= b.size_bytes)
        return b.size_bytes

    def held_bytes(self, tier: str) -> int:
        """What the tier holds: every buffer that exists now and whose bytes no other has taken over."""
        schedule = self.schedule
        writers, readers = writers_of(schedule), readers_of(schedule)
        reused_by = {b.reuses: b.name for b in schedule.buffers if b.reuses is not None}
        total = 0
        for b in schedule.buffers:
            if b.tier != tier or b.reuses is not None:
                continue  # counted with the buffer whose bytes it took over
            if not b.initial and (writers[b.name], tier) not in self.granted:
                continue
            last = b.name
            while last in reused_by:
                last = reused_by[last]
            if schedule.buffers_by_name()[last].becomes is None:
                enders = readers[last] or [writers[last]]
                if set(enders) <= self.ended:
                    continue
            total += self.size_in_tier(b)
        return total

    def settle(self) -> None:
        """Grants and starts all that the rules allow now."""
        progress = True
        while progress:
            progress = False
            for tier in self.schedule.tiers:
                for op in self.schedule.ops:
                    wanted = self.wanted_bytes(op, tier.name)
                    if wanted == 0 or (op.key, tier.name) in self.granted:
                        continue
                    fits = self.held_bytes(tier.name) + wanted <= tier.capacity_bytes
                    if not (self.is_next_on_stream(op) and self.inputs_complete(op) and fits):
                        break  # rule 3: nobody behind it in the list
                    self.granted.add((op.key, tier.name))
                    self.grants.setdefault(tier.name, []).append(op.key)
                    progress = True
            for op in self.schedule.ops:
                if op.key in self.started or not self.is_next_on_stream(op) or not self.inputs_complete(op):
                    continue
                needs = [t.name for t in self.schedule.tiers if self.wanted_bytes(op, t.name) > 0]
                if all((op.key, t) in self.granted for t in needs):
                    self.started.append(op.key)
                    progress = True

    @property
    def running(self) -> list[str]:
        return [key for key in self.started if key not in self.ended]


def fits_before(schedule: Schedule) -> bool:
    state = State(schedule)
    return all(state.held_bytes(t.name) <= t.capacity_bytes for t in schedule.tiers)


def execute_in_random_order(schedule: Schedule, seed: int) -> State:
    """Any running op may end next. Asserts that no tier ever holds more than its capacity."""
    draw = random.Random(seed)
    state = State(schedule)
    if not fits_before(schedule):
        return state
    state.settle()
    while state.running:
        state.ended.add(draw.choice(state.running))
        state.settle()
        for t in schedule.tiers:
            assert state.held_bytes(t.name) <= t.capacity_bytes
    return state


def execute_in_time(schedule: Schedule, seconds: dict[str, float]) -> dict[str, tuple[float, float]] | None:
    """(start, end) by op when each takes so long and nothing is shared; None when it does not complete."""
    state = State(schedule)
    if not fits_before(schedule):
        return None
    now, starts, times = 0.0, {}, {}
    state.settle()
    while True:
        for key in state.started:
            starts.setdefault(key, now)
        if not state.running:
            break
        now = min(starts[key] + seconds[key] for key in state.running)
        for key in list(state.running):
            if starts[key] + seconds[key] == now:
                state.ended.add(key)
                times[key] = (starts[key], now)
        state.settle()
    return times if len(times) == len(schedule.ops) else None
