"""A schedule in numbers: what each op waits for, needs and frees. All that the four rules fix before time starts.

The engine, the timing-free execution, the fast evaluator and the explanation all begin here, so that the rules are read
from a schedule in one place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tierplan.sim.schedule import Schedule

__all__ = ["Graph", "Request", "graph_of"]


class Request(NamedTuple):
    """An op's need of memory in one tier."""

    op: int
    size_bytes: int
    buffers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Ops, tiers and buffers are numbered by their place in the schedule; a list holds one entry per op unless said."""

    schedule: Schedule
    streams: list[list[int]]
    """Per stream, in order of first use: its ops (rule 1)."""
    inputs: list[Sequence[int]]
    """Ops that must have ended (rule 2): writers of what is read, `after`, and the other readers of what is reused."""
    followers: list[Sequence[int]]
    """Ops that have this one among their inputs."""
    requests: list[list[Request]]
    """Per tier: what is to be granted there, in list order (rule 3)."""
    needs: list[Sequence[int]]
    """Tiers in which the op has a request."""
    counts_down: list[Sequence[int]]
    """Buffers of which this op is one of `num_readers`; when the last has ended, the buffer is freed (rule 4)."""
    frees: list[Sequence[int]]
    """Buffers without readers, freed when this op, their writer, ends."""
    takes_over: list[Sequence[tuple[int, int]]]
    """(old, new) buffers where this op writes the new over the old."""
    num_readers: list[int]
    """Per buffer: readers that must end before it is freed; 0 where it is never freed, or by its writer."""
    size_bytes: list[int]
    """Per buffer."""
    tier_of: list[int]
    """Per buffer."""
    initial: list[int]
    """Buffers held before the first op. An initial buffer that nobody reads and that becomes nothing is never held."""
    capacity_bytes: list[int]
    """Per tier."""


def graph_of(schedule: Schedule) -> Graph:
    """The graph of a schedule, which is taken to be valid (`schedule.validate`)."""
    buffers, ops = schedule.buffers, schedule.ops
    tier_index = {t.name: i for i, t in enumerate(schedule.tiers)}
    index = {b.name: i for i, b in enumerate(buffers)}
    tier_of = [tier_index[b.tier] for b in buffers]
    size_bytes = [b.size_bytes for b in buffers]
    is_freed = [b.becomes is None for b in buffers]
    reuses = {}
    for b, buffer in enumerate(buffers):
        if buffer.reuses is not None:
            reuses[b] = index[buffer.reuses]
            is_freed[reuses[b]] = False  # its bytes live on in the buffer that reuses it
    number = {op.key: i for i, op in enumerate(ops)}
    writer: dict[int, int] = {}
    readers: list[list[int]] = [[] for _ in buffers]
    streams: dict[str, list[int]] = {}
    requests: list[list[Request]] = [[] for _ in schedule.tiers]
    # Most entries are empty: one shared () for them is quick, and nothing for the garbage collector to walk.
    inputs: list[Sequence[int]] = [()] * len(ops)
    needs: list[Sequence[int]] = [()] * len(ops)
    counts_down: list[Sequence[int]] = [()] * len(ops)
    takes_over: list[Sequence[tuple[int, int]]] = [()] * len(ops)
    frees: list[Sequence[int]] = [()] * len(ops)
    for i, op in enumerate(ops):
        streams.setdefault(op.stream, []).append(i)
        waits_for = {number[key] for key in op.after} if op.after else set()
        if op.reads:
            read = [index[name] for name in op.reads]
            for b in read:
                readers[b].append(i)
                if b in writer:
                    waits_for.add(writer[b])
            counts_down[i] = tuple([b for b in read if is_freed[b]])
        wanted: dict[int, list[int]] = {}
        for name in op.writes:
            b = index[name]
            writer[b] = i
            if b in reuses:
                waits_for.update(readers[reuses[b]])
                takes_over[i] = (*takes_over[i], (reuses[b], b))
            elif size_bytes[b] > 0:
                wanted.setdefault(tier_of[b], []).append(b)
        if wanted:
            needs[i] = tuple(wanted)
            for tier, fresh in wanted.items():
                requests[tier].append(Request(i, sum([size_bytes[b] for b in fresh]), tuple(fresh)))
        waits_for.discard(i)
        inputs[i] = tuple(waits_for)
    num_readers = [len(found) if freed else 0 for found, freed in zip(readers, is_freed, strict=True)]
    for b, i in writer.items():
        if is_freed[b] and not readers[b]:
            frees[i] = (*frees[i], b)
    return Graph(
        schedule=schedule,
        streams=list(streams.values()),
        inputs=inputs,
        followers=_turned(inputs),
        requests=requests,
        needs=needs,
        counts_down=counts_down,
        frees=frees,
        takes_over=takes_over,
        num_readers=num_readers,
        size_bytes=size_bytes,
        tier_of=tier_of,
        initial=[b for b, x in enumerate(buffers) if x.initial and (readers[b] or not is_freed[b])],
        capacity_bytes=[t.capacity_bytes for t in schedule.tiers],
    )


def _turned(inputs: list[Sequence[int]]) -> list[Sequence[int]]:
    """Followers from inputs."""
    followers: list[list[int] | None] = [None] * len(inputs)
    for i, waits_for in enumerate(inputs):
        for j in waits_for:
            found = followers[j]
            if found is None:
                followers[j] = [i]
            else:
                found.append(i)
    return [() if found is None else found for found in followers]
