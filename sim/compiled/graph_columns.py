"""A schedule in numbers: what each op waits for, what it needs and what it frees. Nothing here depends on time.

Ops, tiers and buffers are numbered by their place in the schedule. One compiled function derives the arrays, which both
engines execute; their witness (`tests/sim/naive.py`) executes the schedule's own records.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tierplan.sim.columns import Bool, Int32, Int64, Lists, ScheduleColumns
from tierplan.sim.compiled.compiler import compiled
from tierplan.sim.schedule import MOST_BYTES, ScheduleError


class GraphColumns(NamedTuple):
    """Per op unless said."""

    stream: Int32
    """Its stream. Streams are numbered in order of first use."""
    first_on_stream: Int32
    """Per stream: its first op (rule 1)."""
    next_on_stream: Int32
    """The op behind it on its stream; -1 for the last."""
    num_inputs: Int32
    """How many ops must have ended (rule 2): writers of what is read, `after`, other readers of what is reused."""
    followers: Lists
    """Ops that have this one among their inputs."""
    requests: Int32
    """Its requests for memory are numbered from `requests[i]` to `requests[i + 1]`: at most one per tier."""
    request_op: Int32
    """Per request."""
    request_tier: Int32
    """Per request."""
    request_bytes: Int64
    """Per request."""
    request_next: Int32
    """Per request: the next one in the same tier, in list order (rule 3); -1 for the last."""
    first_request: Int32
    """Per tier; -1 for none."""
    is_freed: Bool
    """Per buffer: whether it is freed when its last reader ends (its writer, if it has none). The others outlive the
    step, or their bytes live on in a buffer that takes them over."""
    frees: Lists
    """Buffers that are freed when as many ops have ended that have them here as there are `users`: when this one ends,
    those that it writes and nobody reads first, then those that it reads."""
    users: Int32
    """Per buffer."""
    buffer_tier: Int32
    """Per buffer."""
    held_bytes: Int64
    """Per buffer: what it holds in its tier."""
    initial_bytes: Int64
    """Per tier: what it holds before the first op."""
    capacity_bytes: Int64
    """Per tier."""


def graph_columns(columns: ScheduleColumns) -> GraphColumns:
    """The graph of a schedule, which is taken to be valid.

    Raises `ScheduleError` where bytes are beyond all reason, rather than count them wrongly.
    """
    if (sum_bytes := float(np.sum(columns.buffer_bytes, dtype=np.float64))) > MOST_BYTES:
        raise ScheduleError(
            f"schedule {columns.labels().name!r} has buffers of {sum_bytes:.3g} bytes in all; more than "
            f"{MOST_BYTES:.3g} are not counted: make the model or the batch smaller"
        )
    held_bytes = columns.buffer_bytes
    for t, tier in enumerate(columns.tiers):
        if tier.rounding != "exact":
            held_bytes = np.where(columns.buffer_tier == t, tier.held_bytes(columns.buffer_bytes), held_bytes)
    streams = {name: s for s, name in enumerate(dict.fromkeys(work.stream for work in columns.works))}
    return _graph(
        np.array([streams[work.stream] for work in columns.works], np.int32)[columns.op_work],
        len(streams),
        columns.reads,
        columns.writes,
        columns.after,
        columns.buffer_tier,
        held_bytes,
        columns.buffer_initial,
        columns.buffer_reuses,
        columns.buffer_becomes,
        np.array([min(t.capacity_bytes, 2 * MOST_BYTES) for t in columns.tiers], np.int64),
    )


@compiled
def _graph(
    op_stream: Int32,
    num_streams: int,
    reads: Lists,
    writes: Lists,
    after: Lists,
    buffer_tier: Int32,
    held_bytes: Int64,
    initial: Bool,
    reuses: Int32,
    becomes: Int32,
    capacity_bytes: Int64,
) -> GraphColumns:
    num_ops, num_buffers, num_tiers = len(op_stream), len(buffer_tier), len(capacity_bytes)

    # Streams, in order of first use.
    number = np.full(num_streams, -1, np.int32)
    first_on_stream = np.empty(num_streams, np.int32)
    last_on_stream = np.empty(num_streams, np.int32)
    stream = np.empty(num_ops, np.int32)
    next_on_stream = np.full(num_ops, -1, np.int32)
    num_used = 0
    for i in range(num_ops):
        s = number[op_stream[i]]
        if s < 0:
            s = number[op_stream[i]] = num_used
            first_on_stream[s] = i
            num_used += 1
        else:
            next_on_stream[last_on_stream[s]] = i
        last_on_stream[s] = i
        stream[i] = s

    # Buffers: who writes and reads them, whether they are freed.
    is_freed = becomes < 0
    for b in range(num_buffers):
        if reuses[b] >= 0:
            is_freed[reuses[b]] = False
    num_readers = np.zeros(num_buffers, np.int32)
    for b in reads.items:
        num_readers[b] += 1
    initial_bytes = np.zeros(num_tiers, np.int64)
    for b in range(num_buffers):
        if initial[b]:
            initial_bytes[buffer_tier[b]] += held_bytes[b]
    writer = np.full(num_buffers, -1, np.int32)
    reader_begins = np.zeros(num_buffers + 1, np.int32)
    reader_begins[1:] = np.cumsum(num_readers)
    readers = np.empty(len(reads.items), np.int32)
    num_readers_so_far = np.zeros(num_buffers, np.int32)

    # Inputs, each once, and requests, in one walk over the list.
    room = len(reads.items) + len(after.items)
    for b in range(num_buffers):
        if reuses[b] >= 0:
            room += num_readers[reuses[b]]
    inputs = np.empty(room, np.int32)
    num_inputs = np.zeros(num_ops, np.int32)
    num_followers = np.zeros(num_ops, np.int32)
    seen = np.full(num_ops, -1, np.int32)  # the last op that has this one among its inputs
    end = 0
    requests = np.zeros(num_ops + 1, np.int32)
    request_op = np.empty(len(writes.items), np.int32)
    request_tier = np.empty(len(writes.items), np.int32)
    request_bytes = np.empty(len(writes.items), np.int64)
    request_next = np.full(len(writes.items), -1, np.int32)
    first_request = np.full(num_tiers, -1, np.int32)
    last_request = np.full(num_tiers, -1, np.int32)
    num_requests = 0
    for i in range(num_ops):
        begin = end
        seen[i] = i  # an op does not wait for itself
        for k in range(after.begins[i], after.begins[i + 1]):
            j = after.items[k]
            if seen[j] != i:
                seen[j] = i
                inputs[end] = j
                end += 1
        for k in range(reads.begins[i], reads.begins[i + 1]):
            b = reads.items[k]
            readers[reader_begins[b] + num_readers_so_far[b]] = i
            num_readers_so_far[b] += 1
            j = writer[b]
            if j >= 0 and seen[j] != i:
                seen[j] = i
                inputs[end] = j
                end += 1
        first_of_op = num_requests
        for k in range(writes.begins[i], writes.begins[i + 1]):
            b = writes.items[k]
            writer[b] = i
            old = reuses[b]
            if old >= 0:
                for at in range(reader_begins[old], reader_begins[old] + num_readers_so_far[old]):
                    j = readers[at]
                    if seen[j] != i:
                        seen[j] = i
                        inputs[end] = j
                        end += 1
            elif held_bytes[b] > 0:
                t = buffer_tier[b]
                r = last_request[t]
                if r >= first_of_op:
                    request_bytes[r] += held_bytes[b]
                else:
                    if r < 0:
                        first_request[t] = num_requests
                    else:
                        request_next[r] = num_requests
                    last_request[t] = num_requests
                    request_op[num_requests] = i
                    request_tier[num_requests] = t
                    request_bytes[num_requests] = held_bytes[b]
                    num_requests += 1
        requests[i + 1] = num_requests
        num_inputs[i] = end - begin
        for k in range(begin, end):
            num_followers[inputs[k]] += 1

    # What may be freed when an op ends.
    free_begins, users = np.zeros(num_ops + 1, np.int32), np.maximum(num_readers, 1)
    freed, num_freed = np.empty(len(reads.items) + len(writes.items), np.int32), 0
    for i in range(num_ops):
        for lists, wants_readers in ((writes, False), (reads, True)):
            for k in range(lists.begins[i], lists.begins[i + 1]):
                b = lists.items[k]
                if is_freed[b] and (num_readers[b] > 0) == wants_readers:
                    freed[num_freed] = b
                    num_freed += 1
        free_begins[i + 1] = num_freed

    # Followers from inputs.
    follower_begins = np.zeros(num_ops + 1, np.int32)
    follower_begins[1:] = np.cumsum(num_followers)
    followers = np.empty(end, np.int32)
    place = follower_begins[:-1].copy()
    k = 0
    for i in range(num_ops):
        for _ in range(num_inputs[i]):
            j = inputs[k]
            followers[place[j]] = i
            place[j] += 1
            k += 1
    return GraphColumns(
        stream,
        first_on_stream[:num_used],
        next_on_stream,
        num_inputs,
        Lists(follower_begins, followers),
        requests,
        request_op[:num_requests],
        request_tier[:num_requests],
        request_bytes[:num_requests],
        request_next[:num_requests],
        first_request,
        is_freed,
        Lists(free_begins, freed[:num_freed]),
        users,
        buffer_tier,
        held_bytes,
        initial_bytes,
        capacity_bytes,
    )
