"""Whether a schedule completes, without time: and where it sticks if it does not.

By the four rules the set of ops that end does not depend on durations (docs/design.md says why). So executing the ops
in any order that the rules allow answers the question for the simulator and for the hardware alike.

    SimulationError(RuntimeError)   the schedule could not be executed to its end
    └── OutOfMemory                 an op waits for memory that nothing will free; names op, tier, bytes and holders
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tierplan.sim.graph import Graph, graph_of
from tierplan.sim.schedule import Schedule

__all__ = ["OutOfMemory", "SimulationError", "completes", "out_of_memory", "smallest_capacity_bytes"]


class SimulationError(RuntimeError):
    """The schedule could not be simulated to its end."""


@dataclass(eq=False)
class OutOfMemory(SimulationError):
    """An op waits for memory that nothing will free: with this order, the tier is too small."""

    schedule: Schedule = field(repr=False)
    op: str | None
    """The op that waits in vain; None where already what is there before the step does not fit."""
    tier: str
    wanted_bytes: int
    """By the op, or by all that is there before the step."""
    free_bytes: int
    """For the op, or the whole capacity for what is there before the step."""
    capacity_bytes: int
    holders: tuple[tuple[str, int], ...]
    """Buffers held in the tier, by name and bytes, largest first."""

    @cached_property
    def needed_bytes(self) -> int | None:
        """Smallest capacity of the tier at which the schedule completes, the other tiers as they are; None if none is.

        Found when it is first asked for, by executing the schedule some tens of times.
        """
        return smallest_capacity_bytes(self.schedule, self.tier)

    @property
    def what(self) -> str:
        """What does not fit where, without who holds the memory and what would do."""
        if self.op is None:
            return (
                f"what is there before the step takes {self.wanted_bytes:,} bytes in tier {self.tier!r}, which has "
                f"{self.capacity_bytes:,}"
            )
        return (
            f"op {self.op!r} wants {self.wanted_bytes:,} bytes in tier {self.tier!r}, but {self.free_bytes:,} of "
            f"{self.capacity_bytes:,} are free and nothing that still runs will free more"
        )

    def __str__(self) -> str:
        held = ", ".join(f"{name} {size:,} B" for name, size in self.holders[:5])
        if len(self.holders) > 5:
            held += f" and {len(self.holders) - 5} more"
        if self.needed_bytes is None:
            remedy = f"No capacity of {self.tier!r} alone helps: another tier is too small as well"
        else:
            remedy = f"This schedule completes with {self.needed_bytes:,} bytes there or more"
        return f"{self.what}; held by {held or 'nothing'}. {remedy}; or choose a plan that keeps less there"

    def __reduce__(self) -> tuple[object, ...]:  # an exception's own way to be pickled passes no keyword arguments
        return _restore, (
            self.schedule,
            self.op,
            self.tier,
            self.wanted_bytes,
            self.free_bytes,
            self.capacity_bytes,
            self.holders,
        )


def _restore(*fields: object) -> OutOfMemory:
    return OutOfMemory(*fields)  # type: ignore[arg-type]


def completes(schedule: Schedule) -> bool:
    """Whether the schedule completes, for whatever durations."""
    graph = graph_of(schedule)
    return _Execution(graph, graph.capacity_bytes).completes


def smallest_capacity_bytes(schedule: Schedule, tier: str) -> int | None:
    """Smallest capacity of `tier` at which the schedule completes, the other tiers as they are; None if none is.

    More memory in a tier never lets fewer ops end, so a binary search finds it to the byte.
    """
    graph = graph_of(schedule)
    t = [x.name for x in schedule.tiers].index(tier)
    capacity = list(graph.capacity_bytes)
    low = sum(graph.size_bytes[b] for b in graph.initial if graph.tier_of[b] == t)
    high = low + sum(size for _, size, _ in graph.requests[t])

    def enough(size_bytes: int) -> bool:
        capacity[t] = size_bytes
        return _Execution(graph, capacity).completes

    if not enough(high):
        return None
    while low < high:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + 1
    return high


def out_of_memory(graph: Graph) -> OutOfMemory:
    """What is wrong with a schedule that does not complete."""
    return _Execution(graph, graph.capacity_bytes).diagnosis()


class _Execution:
    """All ops that can end have ended: the state in which every execution stops, however long its ops take."""

    def __init__(self, graph: Graph, capacity_bytes: Sequence[int]) -> None:
        self.graph = graph
        self.capacity_bytes = capacity_bytes
        self.used_bytes = [0] * len(capacity_bytes)
        for b in graph.initial:
            self.used_bytes[graph.tier_of[b]] += graph.size_bytes[b]
        self.fits = all(used <= capacity for used, capacity in zip(self.used_bytes, capacity_bytes, strict=True))
        self.waiting_for = [len(inputs) for inputs in graph.inputs]
        self.readers_left = list(graph.num_readers)
        self.grants_left = [len(needs) for needs in graph.needs]
        self.next_grant = [0] * len(capacity_bytes)
        self.at = [0] * len(graph.streams)
        self.eligible = [False] * len(graph.inputs)
        self.ended = [False] * len(graph.inputs)
        if self.fits:
            self._run()

    @property
    def completes(self) -> bool:
        return self.fits and all(self.ended)

    def _run(self) -> None:
        graph = self.graph
        stream_of = [0] * len(graph.inputs)
        for s, ops in enumerate(graph.streams):
            for i in ops:
                stream_of[i] = s
        self._startable = deque[int]()
        for ops in graph.streams:
            self._reach(ops[0])
        while self._startable:
            i = self._startable.popleft()
            self._end(i)
            s = stream_of[i]
            self.at[s] += 1
            if self.at[s] < len(graph.streams[s]):
                self._reach(graph.streams[s][self.at[s]])

    def _reach(self, i: int) -> None:
        """Op i is next on its stream."""
        if self.waiting_for[i] == 0:
            self._ask(i)

    def _ask(self, i: int) -> None:
        self.eligible[i] = True
        if not self.graph.needs[i]:
            self._startable.append(i)
        for tier in self.graph.needs[i]:
            self._grant(tier)

    def _grant(self, tier: int) -> None:
        requests = self.graph.requests[tier]
        while self.next_grant[tier] < len(requests):
            i, size_bytes, _ = requests[self.next_grant[tier]]
            if not self.eligible[i] or self.used_bytes[tier] + size_bytes > self.capacity_bytes[tier]:
                return
            self.next_grant[tier] += 1
            self.used_bytes[tier] += size_bytes
            self.grants_left[i] -= 1
            if self.grants_left[i] == 0:
                self._startable.append(i)

    def _end(self, i: int) -> None:
        graph = self.graph
        self.ended[i] = True
        freed = list(graph.frees[i])
        for b in graph.counts_down[i]:
            self.readers_left[b] -= 1
            if self.readers_left[b] == 0:
                freed.append(b)
        for b in freed:
            self.used_bytes[graph.tier_of[b]] -= graph.size_bytes[b]
        for b in freed:
            self._grant(graph.tier_of[b])
        for j in graph.followers[i]:
            self.waiting_for[j] -= 1
            if self.waiting_for[j] == 0 and self._is_next(j):
                self._ask(j)

    def _is_next(self, i: int) -> bool:
        return any(at < len(ops) and ops[at] == i for at, ops in zip(self.at, self.graph.streams, strict=True))

    # ---- what is wrong ----

    def diagnosis(self) -> OutOfMemory:
        """What the first op in the list that does not end is waiting for.

        All ops before it have ended, so it is next on its stream, its inputs are complete, and it is next for memory.
        """
        graph = self.graph
        if not self.fits:
            t = next(t for t, used in enumerate(self.used_bytes) if used > self.capacity_bytes[t])
            return self._short_of(t, None, self.used_bytes[t], self.capacity_bytes[t], graph.initial)
        i = self.ended.index(False)
        for t in graph.needs[i]:
            if self.next_grant[t] == len(graph.requests[t]):
                continue  # all are granted
            op, wanted_bytes, _ = graph.requests[t][self.next_grant[t]]
            free_bytes = self.capacity_bytes[t] - self.used_bytes[t]
            if op == i and wanted_bytes > free_bytes:
                return self._short_of(t, graph.schedule.ops[i].key, wanted_bytes, free_bytes, self._held())
        raise AssertionError(f"op {graph.schedule.ops[i].key!r} never ran though no tier is short; was it validated?")

    def _short_of(self, t: int, op: str | None, wanted_bytes: int, free_bytes: int, held: Sequence[int]) -> OutOfMemory:
        graph = self.graph
        tier = graph.schedule.tiers[t]
        holders = [(graph.schedule.buffers[b].name, graph.size_bytes[b]) for b in held if graph.tier_of[b] == t]
        return OutOfMemory(
            graph.schedule,
            op,
            tier.name,
            wanted_bytes,
            free_bytes,
            tier.capacity_bytes,
            tuple(sorted((h for h in holders if h[1] > 0), key=lambda h: (-h[1], h[0]))),
        )

    def _held(self) -> list[int]:
        """Buffers that hold bytes now."""
        graph = self.graph
        held = set(graph.initial)
        for t, requests in enumerate(graph.requests):
            for _, _, buffers in requests[: self.next_grant[t]]:
                held.update(buffers)
        for i, ended in enumerate(self.ended):
            if ended:
                for old, new in graph.takes_over[i]:
                    held.discard(old)
                    held.add(new)
        for i, ended in enumerate(self.ended):
            if ended:
                held.difference_update(graph.frees[i])
                held.difference_update(b for b in graph.counts_down[i] if self.readers_left[b] == 0)
        return sorted(held)
