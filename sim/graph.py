"""A schedule in numbers: what each op waits for, what it needs and what it frees. Nothing here depends on time.

The lists that the SimPy engine and the explanation work on, from the arrays of `tierplan.sim.compiled.graph_columns`,
which derives them from the schedule. A test has another derivation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tierplan.sim.columns import Lists, columns_of
from tierplan.sim.compiled.graph_columns import graph_columns
from tierplan.sim.schedule import Schedule

Request = tuple[int, int, tuple[int, ...]]
"""An op's need of memory in one tier: the op, the bytes, and the buffers that they are for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """Ops, tiers and buffers are numbered by their place in the schedule. Lists have one entry per op, unless noted."""

    schedule: Schedule
    streams: list[list[int]]
    """Per stream, in order of first use: its ops (rule 1)."""
    inputs: Sequence[Sequence[int]]
    """Ops that must have ended (rule 2): writers of what is read, `after`, and the other readers of what is reused."""
    followers: Sequence[Sequence[int]]
    """Ops that have this one among their inputs."""
    requests: list[list[Request]]
    """Per tier: what is to be granted there, in list order (rule 3)."""
    needs: Sequence[Sequence[int]]
    """Tiers in which the op has a request."""
    counts_down: Sequence[Sequence[int]]
    """Buffers of which this op is one of `num_readers`; when the last has ended, the buffer is freed (rule 4)."""
    frees: Sequence[Sequence[int]]
    """Buffers without readers, freed when this op, their writer, ends."""
    takes_over: Sequence[Sequence[tuple[int, int]]]
    """(old, new) buffers where this op writes the new over the old."""
    num_readers: list[int]
    """Per buffer: readers that must end before it is freed; 0 where it is never freed, or by its writer."""
    size_bytes: list[int]
    """Per buffer: what it holds in its tier."""
    tier_of: list[int]
    """Per buffer."""
    initial: list[int]
    """Buffers held before the first op. An initial buffer that nobody reads and that becomes nothing is never held."""
    capacity_bytes: list[int]
    """Per tier."""


def graph_of(schedule: Schedule) -> Graph:
    """The graph of a schedule, which is taken to be valid (`schedule.validate`)."""
    columns = columns_of(schedule)
    graph = graph_columns(columns)
    size_bytes, tier_of, is_freed = graph.held_bytes.tolist(), graph.buffer_tier.tolist(), graph.is_freed.tolist()
    num_readers, reuses = graph.num_readers.tolist(), columns.buffer_reuses.tolist()
    reads, writes, followers = map(_rows, (graph.reads, graph.writes, graph.followers))
    streams: list[list[int]] = [[] for _ in graph.first_on_stream]
    inputs: list[list[int]] = [[] for _ in schedule.ops]
    for i, stream in enumerate(graph.stream.tolist()):
        streams[stream].append(i)
        for j in followers[i]:
            inputs[j].append(i)
    requests: list[list[Request]] = [[] for _ in schedule.tiers]
    needs: list[tuple[int, ...]] = [()] * len(schedule.ops)
    asked = (graph.request_op.tolist(), graph.request_tier.tolist(), graph.request_bytes.tolist())
    for i, tier, wanted_bytes in zip(*asked, strict=True):
        fresh = tuple([b for b in writes[i] if tier_of[b] == tier and reuses[b] < 0 and size_bytes[b] > 0])
        requests[tier].append((i, wanted_bytes, fresh))
        needs[i] = (*needs[i], tier)
    return Graph(
        schedule=schedule,
        streams=streams,
        inputs=inputs,
        followers=followers,
        requests=requests,
        needs=needs,
        counts_down=[[b for b in row if is_freed[b]] for row in reads],
        frees=[sorted(b for b in row if is_freed[b] and not num_readers[b]) for row in writes],
        takes_over=[[(reuses[b], b) for b in row if reuses[b] >= 0] for row in writes],
        num_readers=[num if freed else 0 for num, freed in zip(num_readers, is_freed, strict=True)],
        size_bytes=size_bytes,
        tier_of=tier_of,
        initial=[b for b, x in enumerate(schedule.buffers) if x.initial and (num_readers[b] or not is_freed[b])],
        capacity_bytes=[t.capacity_bytes for t in schedule.tiers],
    )


def _rows(lists: Lists) -> list[list[int]]:
    items = lists.items.tolist()
    return [items[begin:end] for begin, end in pairwise(lists.begins.tolist())]
