"""Another derivation of the graph, op by op from the schedule's own records: the witness of the compiled one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

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


def graph_by_records(schedule: Schedule) -> Graph:
    """The graph of a schedule, which is taken to be valid (`schedule.validate`)."""
    buffers, ops = schedule.buffers, schedule.ops
    tier_index = {t.name: i for i, t in enumerate(schedule.tiers)}
    index = {b.name: i for i, b in enumerate(buffers)}
    tier_of = [tier_index[b.tier] for b in buffers]
    size_bytes = [schedule.tiers[t].held_bytes(b.size_bytes) for b, t in zip(buffers, tier_of, strict=True)]
    is_freed = [b.becomes is None for b in buffers]
    reuses = {b: index[buffer.reuses] for b, buffer in enumerate(buffers) if buffer.reuses is not None}
    readers_of_reused: dict[int, list[int]] = {old: [] for old in reuses.values()}
    for old in readers_of_reused:
        is_freed[old] = False  # its bytes live on in the buffer that reuses it
    number = {op.key: i for i, op in enumerate(ops)}
    writer = [-1] * len(buffers)
    num_reads = [0] * len(buffers)
    streams: defaultdict[str, list[int]] = defaultdict(list)
    requests: list[list[Request]] = [[] for _ in schedule.tiers]
    # Most entries are empty: one shared () for them is quick, and nothing for the garbage collector to walk.
    inputs: list[Sequence[int]] = [()] * len(ops)
    needs: list[Sequence[int]] = [()] * len(ops)
    counts_down: list[Sequence[int]] = [()] * len(ops)
    takes_over: list[Sequence[tuple[int, int]]] = [()] * len(ops)
    frees: list[Sequence[int]] = [()] * len(ops)
    for i, op in enumerate(ops):
        streams[op.stream].append(i)
        waits_for = {number[key] for key in op.after} if op.after else set()
        if op.reads:
            read = [index[name] for name in op.reads]
            for b in read:
                num_reads[b] += 1
                waits_for.add(writer[b])
                if b in readers_of_reused:
                    readers_of_reused[b].append(i)
            counts_down[i] = tuple([b for b in read if is_freed[b]])
        if op.writes:
            wanted: dict[int, tuple[int, ...]] = {}
            for name in op.writes:
                b = index[name]
                writer[b] = i
                if b in reuses:
                    waits_for.update(readers_of_reused[reuses[b]])
                    takes_over[i] = (*takes_over[i], (reuses[b], b))
                elif size_bytes[b] > 0:
                    wanted[tier_of[b]] = (*wanted.get(tier_of[b], ()), b)
            needs[i] = tuple(wanted)
            for tier, fresh in wanted.items():
                requests[tier].append((i, sum([size_bytes[b] for b in fresh]), fresh))
        if waits_for:
            waits_for.discard(i)
            waits_for.discard(-1)  # initial buffers have no writer
            inputs[i] = tuple(waits_for)
    num_readers = [num if freed else 0 for num, freed in zip(num_reads, is_freed, strict=True)]
    for b, i in enumerate(writer):
        if i >= 0 and is_freed[b] and num_reads[b] == 0:
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
        initial=[b for b, x in enumerate(buffers) if x.initial and (num_reads[b] or not is_freed[b])],
        capacity_bytes=[t.capacity_bytes for t in schedule.tiers],
    )


def _turned(inputs: list[Sequence[int]]) -> list[Sequence[int]]:
    """Followers from inputs."""
    followers: list[list[int] | None] = [None] * len(inputs)
    for i, waits_for in enumerate(inputs):
        for j in waits_for:
            listed = followers[j]
            if listed is None:
                followers[j] = [i]
            else:
                listed.append(i)
    return [() if listed is None else listed for listed in followers]
