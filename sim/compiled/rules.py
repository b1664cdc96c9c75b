"""The four rules over arrays, compiled: the same times as `tierplan.sim.engine` to the nanosecond.

One op's life: its stream reaches it (rule 1), what it waits for has ended (rule 2: it is *eligible*), each tier grants
its request in list order (rule 3), it starts, works, and ends; bytes come back when the last reader of a buffer ends
(rule 4). Ops that take of shared limits are flows, whose speeds are divided anew when one begins or ends
(`tierplan.sim.sharing`).

What happens in the same nanosecond happens in SimPy's order: events fire in the order in which they were set up.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tierplan.sim.columns import Bool, Float64, Int32, Int64
from tierplan.sim.compiled.compiler import compiled
from tierplan.sim.compiled.graph_columns import GraphColumns

TOO_LATE = 1 << 61
"""Nanoseconds (73 years) beyond which no clock goes: sums of two still fit into 64 bits."""

MOST_KNOWN = 1 << 14
"""Sets of flows whose speeds are remembered, in long schedules."""


class Prices(NamedTuple):
    """What ops cost. `op_price` is per op, all else per distinct price."""

    op_price: Int32
    """Its place in the other arrays."""
    alone_s: Float64
    """Seconds with nothing beside it."""
    latency_ns: Int64
    wake_ns: Int64
    """What latency is longer by where the stream stood still until an input was complete."""
    work_ns: Int64
    launch_ns: Int64
    """From the moment that the stream is free; the op does not end before that."""
    is_flow: Bool
    """Whether it takes of shared limits."""
    share: Float64
    """Weight under contention."""
    demand: Float64
    """Per price and shared limit: units per second at full speed."""
    limits: Float64
    """Per shared limit: units per second."""


class Execution(NamedTuple):
    """What happened, or how far it went. Per op unless said."""

    free_ns: Int64
    """Its stream reached it; -1 where it never did."""
    ready_ns: Int64
    """All that it waits for had ended."""
    start_ns: Int64
    """-1 where it never did."""
    end_ns: Int64
    """-1 where it never did."""
    peak_bytes: Int64
    """Per tier."""
    used_bytes: Int64
    """Per tier, at the end."""
    next_request: Int32
    """Per tier: the request that was not granted; -1 where all were."""
    is_too_late: bool
    """The clock would have gone beyond `TOO_LATE`; the execution was left there."""


class Stuck(NamedTuple):
    """What memory is short for: the first op in the list that does not end waits for it, and nothing will free more."""

    op: int
    """-1 where already what is there before the step does not fit."""
    tier: int
    wanted_bytes: int
    """By the op, or by all that is there before the step."""
    free_bytes: int
    """For the op, or the whole capacity for what is there before the step."""


def stuck(graph: GraphColumns, execution: Execution) -> Stuck | None:
    """Where an execution stuck; None if it came to its end."""
    over = np.flatnonzero(graph.initial_bytes > graph.capacity_bytes)
    if over.size:
        tier = int(over[0])
        return Stuck(-1, tier, int(graph.initial_bytes[tier]), int(graph.capacity_bytes[tier]))
    left = np.flatnonzero(execution.end_ns < 0)
    if not left.size:
        return None
    # All ops before it have ended, so it is next on its stream, its inputs are complete, and it is next for memory.
    op = int(left[0])
    for r in range(graph.requests[op], graph.requests[op + 1]):
        tier, wanted_bytes = int(graph.request_tier[r]), int(graph.request_bytes[r])
        free_bytes = int(graph.capacity_bytes[tier] - execution.used_bytes[tier])
        if execution.next_request[tier] == r and wanted_bytes > free_bytes:
            return Stuck(op, tier, wanted_bytes, free_bytes)
    raise AssertionError(f"op {op} of the list never ran though no tier is short; was the schedule validated?")


def no_time(num_ops: int) -> Prices:
    """Prices of 0. Whether a schedule completes does not depend on how long its ops take."""
    nothing = np.zeros(1, np.int64)
    return Prices(
        op_price=np.zeros(num_ops, np.int32),
        alone_s=np.zeros(1),
        latency_ns=nothing,
        wake_ns=nothing,
        work_ns=nothing,
        launch_ns=nothing,
        is_flow=np.zeros(1, np.bool_),
        share=np.ones(1),
        demand=np.zeros((1, 0)),
        limits=np.zeros(0),
    )


@compiled
def _takes(demand: Float64) -> tuple[Int32, Int32, Float64]:
    """Of each price the limits of which it takes, and how much: mostly two or three of many. The first array says where
    in the others those of each price begin."""
    (num_prices, num_limits), num = demand.shape, 0
    begins = np.zeros(num_prices + 1, np.int32)
    limit_of, amount = np.empty(demand.size, np.int32), np.empty(demand.size)
    for p in range(num_prices):
        for limit in range(num_limits):
            if demand[p, limit] > 0:
                limit_of[num], amount[num] = limit, demand[p, limit]
                num += 1
        begins[p + 1] = num
    return begins, limit_of[:num], amount[:num]


@compiled
def _divide(
    prices_of: Int32,
    share: Float64,
    takes: tuple[Int32, Int32, Float64],
    limits: Float64,
    speeds: Float64,
    left: Float64,
    pulls: Float64,
    grows: Bool,
) -> None:
    """Max-min fair speeds of the flows that run together, as `sharing.max_min_speeds`, in the same order of sums.

    `prices_of` has the price of each flow; `speeds` is the result; `left`, `pulls` and `grows` are room to work in.
    `pulls` are what the growing flows take of each limit for each unit by which their level rises.
    """
    begins, limit_of, amount = takes
    num, num_limits, num_growing = len(prices_of), len(limits), 0
    left[:] = limits
    for k in range(num):
        p = prices_of[k]
        speeds[k], grows[k] = 0.0, True
        for t in range(begins[p], begins[p + 1]):
            if limits[limit_of[t]] <= 0:
                grows[k] = False
        num_growing += grows[k]
    while num_growing > 0:
        level = np.inf
        pulls[:] = 0.0
        for k in range(num):
            if grows[k]:
                p = prices_of[k]
                level = min(level, (1.0 - speeds[k]) / share[p])
                for t in range(begins[p], begins[p + 1]):
                    pulls[limit_of[t]] += amount[t] * share[p]
        for limit in range(num_limits):
            if pulls[limit] > 0:
                level = min(level, left[limit] / pulls[limit])
        for limit in range(num_limits):
            left[limit] -= level * pulls[limit]
        for k in range(num):
            if grows[k]:
                p = prices_of[k]
                speeds[k] += level * share[p]
                stops = speeds[k] >= 1.0 - 1e-12
                for t in range(begins[p], begins[p + 1]):
                    if left[limit_of[t]] <= 1e-12 * limits[limit_of[t]]:
                        stops = True
                if stops:
                    grows[k] = False
                    num_growing -= 1
    for k in range(num):
        if speeds[k] > 1.0 - 1e-12:
            speeds[k] = 1.0


@compiled
def _advance(num: int, elapsed_ns: int, left_ns: Float64, speeds: Float64) -> None:
    """All flows have worked for so long."""
    if elapsed_ns:
        for k in range(num):
            left_ns[k] -= elapsed_ns * speeds[k]


@compiled
def _set_up(event_ns: Int64, event: Int64, num: int, at_ns: int, what: int) -> int:
    """Puts one more event among so many, which lie latest first; how many there are then. What was set up before it for
    the same time comes before it."""
    k = num
    while k > 0 and event_ns[k - 1] <= at_ns:
        event_ns[k], event[k] = event_ns[k - 1], event[k - 1]
        k -= 1
    event_ns[k], event[k] = at_ns, what
    return num + 1


@compiled
def execute(graph: GraphColumns, prices: Prices) -> Execution:
    """Executes a schedule as far as it goes. Where not all ops have ended, memory is short."""
    # Taken apart here: numba counts references whenever a field is taken.
    first_on_stream, next_on_stream, num_inputs = graph.first_on_stream, graph.next_on_stream, graph.num_inputs
    follower_begins, follower = graph.followers
    requests, request_op, request_tier = graph.requests, graph.request_op, graph.request_tier
    request_bytes, request_next = graph.request_bytes, graph.request_next
    free_begins, freed = graph.frees
    buffer_tier, held_bytes, capacity_bytes = graph.buffer_tier, graph.held_bytes, graph.capacity_bytes
    op_price, _, latency_ns, wake_ns, work_ns, launch_ns, is_flow, share, demand, limits = prices
    num_ops, num_tiers, num_streams = len(op_price), len(capacity_bytes), len(first_on_stream)

    free_ns, ready_ns = np.full(num_ops, -1, np.int64), np.zeros(num_ops, np.int64)
    start_ns, end_ns = np.full(num_ops, -1, np.int64), np.full(num_ops, -1, np.int64)
    used_bytes, peak_bytes = graph.initial_bytes.copy(), graph.initial_bytes.copy()
    next_request, is_short = graph.first_request.copy(), np.zeros(num_tiers, np.bool_)
    waiting_for, users_left, grants_left = num_inputs.copy(), graph.users.copy(), requests[1:] - requests[:-1]
    is_eligible = np.zeros(num_ops, np.bool_)

    # What is due now, first things first: tiers that may grant, ops that have become eligible, ops that have ended,
    # ops that may start. Each in the order in which it came to be due.
    granting, num_granting, num_granted = np.empty(num_tiers, np.int32), 0, 0
    asking, num_asking, num_asked = np.empty(num_ops, np.int32), 0, 0
    ending, num_ending, num_ended = np.empty(num_streams, np.int32), 0, 0
    starting, num_starting, num_started = np.empty(num_ops, np.int32), 0, 0

    # What is to come, latest first; at most one event and one timer by op. Op i ends: i; its latency ends: num_ops + i;
    # flows' timer: -1
    event_ns, event, num_events = np.empty(2 * num_ops, np.int64), np.empty(2 * num_ops, np.int64), 0
    now_ns, is_too_late = 0, False

    # Flows, in the order in which they began: at most one per stream. One timer counts, for the earliest end.
    flows, flow_price, num_flows = np.empty(num_streams, np.int32), np.empty(num_streams, np.int32), 0
    left_ns, speeds = np.empty(num_streams), np.empty(num_streams)
    left, pulls, grows = np.empty(len(limits)), np.empty(len(limits)), np.empty(num_streams, np.bool_)
    takes = _takes(demand)
    num_known = 64  # a power of 2
    while num_known < min(num_ops, MOST_KNOWN):
        num_known *= 2
    known_num, known_price = np.zeros(num_known, np.int32), np.empty((num_known, num_streams), np.int32)
    known_speeds = np.empty((num_known, num_streams))
    since_ns, next_end_ns, timer_ns = 0, -1, -1
    are_ending = False  # flows that begin because of flows' ends are divided among once, behind all of these

    if (used_bytes <= capacity_bytes).all():
        for i in first_on_stream:
            free_ns[i] = 0
            if waiting_for[i] == 0:
                asking[num_asking] = i
                num_asking += 1
    while True:
        begins, is_divided = -1, False

        if num_granted < num_granting:  # rule 3: in list order, as far as the next op is eligible and fits
            tier = granting[num_granted]
            num_granted += 1
            r = next_request[tier]
            while r >= 0 and is_eligible[request_op[r]]:
                if used_bytes[tier] + request_bytes[r] > capacity_bytes[tier]:
                    is_short[tier] = True
                    break
                used_bytes[tier] += request_bytes[r]
                peak_bytes[tier] = max(peak_bytes[tier], used_bytes[tier])
                i = request_op[r]
                grants_left[i] -= 1
                if grants_left[i] == 0:
                    starting[num_starting] = i
                    num_starting += 1
                r = request_next[r]
            next_request[tier] = r

        elif num_asked < num_asking:  # rules 1 and 2 let the op start once it has been granted its memory
            i = asking[num_asked]
            num_asked += 1
            is_eligible[i] = True
            num_granting = num_granted = 0
            for r in range(requests[i], requests[i + 1]):
                granting[num_granting] = request_tier[r]
                num_granting += 1
            if num_granting == 0:
                starting[num_starting] = i
                num_starting += 1

        elif num_ended < num_ending:  # rule 4: bytes come back; followers and the stream go on
            i = ending[num_ended]
            num_ended += 1
            end_ns[i] = now_ns
            num_granting = num_granted = 0
            for k in range(free_begins[i], free_begins[i + 1]):
                b = freed[k]
                users_left[b] -= 1
                if users_left[b] == 0:
                    tier = buffer_tier[b]
                    used_bytes[tier] -= held_bytes[b]
                    if is_short[tier]:
                        is_short[tier] = False
                        granting[num_granting] = tier
                        num_granting += 1
            for k in range(follower_begins[i], follower_begins[i + 1]):
                j = follower[k]
                waiting_for[j] -= 1
                if waiting_for[j] == 0:
                    ready_ns[j] = now_ns
                    if free_ns[j] >= 0:
                        asking[num_asking] = j
                        num_asking += 1
            j = next_on_stream[i]
            if j >= 0:
                free_ns[j] = now_ns
                if waiting_for[j] == 0:
                    asking[num_asking] = j
                    num_asking += 1

        elif num_started < num_starting:
            i = starting[num_started]
            num_started += 1
            start_ns[i] = now_ns
            p = op_price[i]
            duration_ns = latency_ns[p] + (wake_ns[p] if ready_ns[i] > free_ns[i] else 0)
            duration_ns = max(duration_ns, launch_ns[p] - work_ns[p] - (now_ns - free_ns[i]))
            if is_flow[p] and duration_ns == 0:
                begins = i
            else:
                duration_ns += 0 if is_flow[p] else work_ns[p]
                what = num_ops + i if is_flow[p] else i
                num_events = _set_up(event_ns, event, num_events, now_ns + duration_ns, what)

        elif are_ending:
            are_ending, is_divided = False, num_flows > 0

        elif num_events == 0:
            break

        else:
            num_events -= 1
            now_ns, what = event_ns[num_events], event[num_events]
            num_ending = num_ended = 0
            if now_ns > TOO_LATE:
                is_too_late = True
                break
            if what >= num_ops:
                begins = what - num_ops
            elif what >= 0:
                ending[0], num_ending = what, 1
            elif now_ns == timer_ns and next_end_ns > timer_ns:  # flows that began since have slowed the others
                timer_ns = next_end_ns
                num_events = _set_up(event_ns, event, num_events, timer_ns, -1)
            elif now_ns == timer_ns:  # otherwise an earlier end has replaced this timer
                timer_ns, are_ending = -1, True
                _advance(num_flows, now_ns - since_ns, left_ns, speeds)
                since_ns = now_ns
                num_left = 0
                for k in range(num_flows):
                    if left_ns[k] <= 1e-3:
                        ending[num_ending] = flows[k]
                        num_ending += 1
                    else:
                        flows[num_left], flow_price[num_left], left_ns[num_left] = flows[k], flow_price[k], left_ns[k]
                        num_left += 1
                num_flows = num_left

        if begins >= 0:
            _advance(num_flows, now_ns - since_ns, left_ns, speeds)
            since_ns = now_ns
            p = op_price[begins]
            flows[num_flows], flow_price[num_flows], left_ns[num_flows] = begins, p, work_ns[p]
            num_flows += 1
            is_divided = not are_ending
        if is_divided:
            slot = num_flows  # from 0, price 0 and another one would be where that one alone is
            for k in range(num_flows):
                slot = (31 * slot + flow_price[k]) & (num_known - 1)
            is_known = known_num[slot] == num_flows
            for k in range(num_flows):
                is_known = is_known and known_price[slot, k] == flow_price[k]
            if not is_known:
                known_num[slot] = num_flows
                known_price[slot, :num_flows] = flow_price[:num_flows]
                _divide(known_price[slot, :num_flows], share, takes, limits, known_speeds[slot], left, pulls, grows)
            soonest_ns = np.inf
            for k in range(num_flows):
                speeds[k] = known_speeds[slot, k]
            for k in range(num_flows):
                soonest_ns = min(soonest_ns, left_ns[k] / speeds[k])
            if soonest_ns > TOO_LATE:
                is_too_late = True
                break
            next_end_ns = now_ns + max(0, math.ceil(soonest_ns - 1e-3))  # whole ns, but for float dust
            if timer_ns < 0 or next_end_ns < timer_ns:
                timer_ns = next_end_ns
                num_events = _set_up(event_ns, event, num_events, timer_ns, -1)
    return Execution(free_ns, ready_ns, start_ns, end_ns, peak_bytes, used_bytes, next_request, is_too_late)
