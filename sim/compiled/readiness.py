"""Orders of a schedule's ops, compiled: as they are wanted at given moments, or as they could start.

The latter is the first simulation of `tierplan.sim.analysis.ordering`, which has the rule by which memory is granted.
Every stream keeps its order, or (`overtakes`) runs the first of its ops that is ready.
"""

from __future__ import annotations

import numpy as np

from tierplan.sim.columns import Bool, Float64, Int32, Int64
from tierplan.sim.compiled.compiler import compiled
from tierplan.sim.compiled.graph_columns import GraphColumns

MUCH_BYTES = np.int64(1 << 62)
"""More than any tier has."""


@compiled
def _slack(graph: GraphColumns) -> Int64:
    """Per tier and list position: what stays free at that op when ops run one by one in list order."""
    requests, request_tier, request_bytes = graph.requests, graph.request_tier, graph.request_bytes
    free_begins, freed = graph.frees
    buffer_tier, held_bytes = graph.buffer_tier, graph.held_bytes
    num_ops, num_tiers = len(graph.stream), len(graph.capacity_bytes)
    free_bytes = graph.capacity_bytes - graph.initial_bytes
    users_left = graph.users.copy()
    slack = np.empty((num_tiers, num_ops), np.int64)
    for i in range(num_ops):
        for r in range(requests[i], requests[i + 1]):
            free_bytes[request_tier[r]] -= request_bytes[r]
        slack[:, i] = free_bytes
        for k in range(free_begins[i], free_begins[i + 1]):
            b = freed[k]
            users_left[b] -= 1
            if users_left[b] == 0:
                free_bytes[buffer_tier[b]] += held_bytes[b]
    return slack


def least_free(graph: GraphColumns) -> Int64:
    """Per tier: the least that is ever free when ops run one by one in list order; negative where they do not fit."""
    before = graph.capacity_bytes - graph.initial_bytes
    least: Int64 = np.column_stack([before, _slack(graph)]).min(axis=1)
    return least


@compiled
def _least(part_bytes: Int64) -> np.int64:
    """The least of some positions, or very much of none. Without a branch in the loop, several are compared at once."""
    least_bytes = MUCH_BYTES
    for k in range(len(part_bytes)):
        least_bytes = min(least_bytes, part_bytes[k])
    return least_bytes


@compiled
def _raise(part_bytes: Int64, more_bytes: int) -> None:
    for k in range(len(part_bytes)):
        part_bytes[k] += more_bytes


@compiled
def ready_order(graph: GraphColumns, seconds: Float64, overtakes: Bool) -> tuple[Int32, float]:
    """Ops in order of start, when op i takes `seconds[i]`, and when the last one ends; none where not even one op at a
    time fits into memory.

    `overtakes` is by stream.
    """
    slack = _slack(graph)
    if slack.size > 0 and slack.min() < 0:
        return np.empty(0, np.int32), np.inf
    # Taken apart here: numba counts references whenever a field is taken.
    stream, next_on_stream = graph.stream, graph.next_on_stream
    follower_begins, follower = graph.followers
    requests, request_tier, request_bytes = graph.requests, graph.request_tier, graph.request_bytes
    free_begins, freed = graph.frees
    buffer_tier, held_bytes, capacity_bytes = graph.buffer_tier, graph.held_bytes, graph.capacity_bytes
    num_ops, num_tiers, num_streams = len(stream), len(capacity_bytes), len(graph.first_on_stream)

    used_bytes, users_left, waiting_for = graph.initial_bytes.copy(), graph.users.copy(), graph.num_inputs.copy()
    wanted_bytes = used_bytes.copy()
    for r in range(len(request_tier)):
        wanted_bytes[request_tier[r]] += request_bytes[r]
    can_be_short = wanted_bytes > capacity_bytes  # the other tiers hold everything at once
    freed_at = np.full(len(buffer_tier), -1, np.int32)  # list position of the last op that keeps the buffer
    for i in range(num_ops):
        for k in range(free_begins[i], free_begins[i + 1]):
            freed_at[freed[k]] = i

    order, num_started, frontier = np.empty(num_ops, np.int32), 0, 0
    is_started, is_blocked = np.zeros(num_ops, np.bool_), np.empty(num_tiers, np.bool_)
    # By stream: the op that comes next, or where it overtakes the first that is ready; how many are ready.
    following, num_ready = graph.first_on_stream.copy(), np.zeros(num_streams, np.int64)
    is_idle = np.ones(num_streams, np.bool_)
    candidates = np.empty(num_streams, np.int32)  # next ops of idle streams, in list order
    for i in range(num_ops):
        if waiting_for[i] == 0:
            s = stream[i]
            if overtakes[s] and num_ready[s] == 0:
                following[s] = i
            num_ready[s] += 1
    running, num_running = np.empty(num_streams, np.int32), 0
    until_s, now_s, end_s = np.empty(num_ops), 0.0, 0.0
    while num_started < num_ops:
        # All that is ready and fits starts, in list order; what does not fit keeps its tiers from those behind it.
        is_blocked[:] = False
        num_candidates = 0
        for s in range(num_streams):
            if is_idle[s] and num_ready[s] > 0 and waiting_for[following[s]] == 0:
                at = num_candidates
                while at > 0 and candidates[at - 1] > following[s]:
                    candidates[at] = candidates[at - 1]
                    at -= 1
                candidates[at] = following[s]
                num_candidates += 1
        has_started = is_short = False
        for at in range(num_candidates):
            i = candidates[at]
            fits = True
            for r in range(requests[i], requests[i + 1]):
                tier = request_tier[r]
                fits = fits and not is_blocked[tier]
                if fits and can_be_short[tier]:
                    fits = used_bytes[tier] + request_bytes[r] <= capacity_bytes[tier]
                    fits = fits and _least(slack[tier, frontier:i]) >= request_bytes[r]
            if not fits:
                is_short = True
                for r in range(requests[i], requests[i + 1]):
                    is_blocked[request_tier[r]] = True
                continue
            has_started = True
            for r in range(requests[i], requests[i + 1]):
                tier = request_tier[r]
                used_bytes[tier] += request_bytes[r]
                if can_be_short[tier]:
                    _raise(slack[tier, frontier:i], -request_bytes[r])
            s = stream[i]
            is_started[i], is_idle[s], following[s] = True, False, next_on_stream[i]
            num_ready[s] -= 1
            while overtakes[s] and num_ready[s] > 0 and (is_started[following[s]] or waiting_for[following[s]] > 0):
                following[s] = next_on_stream[following[s]]
            order[num_started] = i
            num_started += 1
            until_s[i] = now_s + seconds[i]
            end_s = max(end_s, until_s[i])
            running[num_running] = i
            num_running += 1
            while frontier < num_ops and is_started[frontier]:
                frontier += 1
        if has_started and is_short:
            continue

        # Nothing more starts now: the op that ends first ends; the one listed first, if at the same time.
        first = 0
        for k in range(1, num_running):
            i, j = running[k], running[first]
            if until_s[i] < until_s[j] or (until_s[i] == until_s[j] and i < j):
                first = k
        i = running[first]
        num_running -= 1
        running[first] = running[num_running]
        now_s = until_s[i]
        for k in range(free_begins[i], free_begins[i + 1]):
            b = freed[k]
            users_left[b] -= 1
            if users_left[b] == 0:
                tier = buffer_tier[b]
                used_bytes[tier] -= held_bytes[b]
                if can_be_short[tier]:
                    _raise(slack[tier, frontier : freed_at[b] + 1], held_bytes[b])
        for k in range(follower_begins[i], follower_begins[i + 1]):
            j = follower[k]
            waiting_for[j] -= 1
            if waiting_for[j] == 0:
                s = stream[j]
                if overtakes[s] and (num_ready[s] == 0 or j < following[s]):
                    following[s] = j
                num_ready[s] += 1
        is_idle[stream[i]] = True
    return order, end_s


@compiled
def consistent_order(wanted: Int64, graph: GraphColumns) -> Int32:
    """Ops as they are `wanted`, each behind those that it waits for: again and again the first that may come."""
    (begins, followers), missing = graph.followers, graph.num_inputs.copy()
    num_ops = len(wanted)
    place = np.empty(num_ops, np.int64)
    for k in range(num_ops):
        place[wanted[k]] = k
    before, after = np.arange(-1, num_ops), np.arange(1, num_ops + 2)  # by place, among those that are left
    order, num, at = np.empty(num_ops, np.int32), 0, 0
    while num < num_ops:
        i, following = wanted[at], after[at]
        if missing[i] == 0:
            order[num] = i
            num += 1
            after[before[at]], before[following] = following, before[at]
            for k in range(begins[i], begins[i + 1]):
                j = followers[k]
                missing[j] -= 1
                if missing[j] == 0:
                    following = min(following, place[j])
        at = following
    return order
