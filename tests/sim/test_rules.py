"""The four rules on random schedules and durations, against a plain witness (`naive.py`) and against themselves."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.sim.naive import execute_in_random_order, execute_in_time
from tests.sim.random_schedules import LIMITS, cost_lists, costs, costs_in_turn, durations, schedules
from tierplan.hwmodels.machine import Cost
from tierplan.sim.analysis.completion import OutOfMemory, completes, smallest_capacity_bytes
from tierplan.sim.columns import unroll
from tierplan.sim.engine import simulate
from tierplan.sim.schedule import Schedule, ScheduleError
from tierplan.sim.trace import Trace, peaks

seconds_lists = st.lists(durations, min_size=14, max_size=14)
"""Whole seconds, so that many ops end at the same moment; 0 is among them."""


def trace_or_none(schedule: Schedule, prices: dict[str, Cost]) -> Trace | None:
    try:
        return simulate(schedule, prices)
    except OutOfMemory:
        return None


@settings(max_examples=100, deadline=None)
@given(schedules(), st.integers(0, 10**6), st.integers(0, 10**6))
def test_completion_and_order_of_grants_do_not_depend_on_timing(schedule: Schedule, one: int, two: int) -> None:
    first, second = execute_in_random_order(schedule, one), execute_in_random_order(schedule, two)
    assert first.ended == second.ended
    assert first.grants == second.grants
    assert (len(first.ended) == len(schedule.ops)) == completes(schedule)


@settings(max_examples=100, deadline=None)
@given(schedules(), seconds_lists)
def test_the_engine_does_what_the_witness_does(schedule: Schedule, seconds: list[float]) -> None:
    prices = costs(schedule, seconds)
    trace = trace_or_none(schedule, prices)
    expected = execute_in_time(schedule, {key: cost.work_s for key, cost in prices.items()})
    got = None if trace is None else {s.key: (s.start_ns / 1e9, s.end_ns / 1e9) for s in trace.spans}
    assert got == expected
    assert (trace is None) == (not completes(schedule)), "whatever the durations are"


@settings(max_examples=120, deadline=None)
@given(schedules(), seconds_lists)
def test_memory_is_conserved_and_within_capacity(schedule: Schedule, seconds: list[float]) -> None:
    trace = trace_or_none(schedule, costs(schedule, seconds))
    assume(trace is not None)
    assert trace is not None
    held: dict[str, dict[str, int]] = {t.name: {} for t in schedule.tiers}
    for event in trace.memory:
        kinds = held[event.tier]
        kinds[event.kind] = kinds.get(event.kind, 0) + event.delta_bytes
        assert kinds[event.kind] >= 0
        assert sum(kinds.values()) <= trace.capacity_bytes[event.tier]
    assert trace.peak_bytes == peaks(trace.memory, held)
    assert [e.time_ns for e in trace.memory] == sorted(e.time_ns for e in trace.memory)
    for t in schedule.tiers:
        kept = [b for b in schedule.buffers if b.tier == t.name and b.becomes is not None]
        stays = sum(t.held_bytes(b.size_bytes) for b in kept)
        assert sum(held[t.name].values()) == stays


@settings(max_examples=100, deadline=None)
@given(schedules(), seconds_lists)
def test_the_makespan_is_at_least_every_streams_busy_time(schedule: Schedule, seconds: list[float]) -> None:
    prices = costs(schedule, seconds)
    trace = trace_or_none(schedule, prices)
    assume(trace is not None)
    assert trace is not None
    for stream, busy_s in trace.busy_s().items():
        assert busy_s == sum(prices[op.key].work_s for op in schedule.ops if op.stream == stream)
        assert trace.duration_s >= busy_s
    for span in trace.spans:
        idle_ns = span.start_ns - span.free_ns
        assert idle_ns == span.waited_input_ns + span.waited_memory_ns
        assert min(idle_ns, span.waited_input_ns, span.waited_memory_ns) >= 0


@settings(max_examples=100, deadline=None)
@given(schedules(), cost_lists)
def test_the_makespan_is_at_least_what_every_limit_needs_for_all_that_is_taken_of_it(
    schedule: Schedule, choices: list[Cost]
) -> None:
    prices = costs_in_turn(schedule, choices)
    try:
        trace = simulate(schedule, prices, limits=LIMITS)
    except OutOfMemory:
        return
    for name, per_s in LIMITS.items():
        taken = sum(cost.demand.get(name, 0.0) * cost.work_s for cost in prices.values())
        assert trace.duration_ns >= taken / per_s * 1e9 * (1 - 1e-9) - 2 * len(prices), "work and ends are whole ns"


@settings(max_examples=100, deadline=None)
@given(schedules(roomy=True), seconds_lists, st.lists(st.sampled_from([0.25, 0.5, 1.0]), min_size=14, max_size=14))
def test_shorter_ops_never_slow_a_schedule_without_memory_waits(
    schedule: Schedule, seconds: list[float], factors: list[float]
) -> None:
    """Rule 3 still orders the grants here; only room is never short."""
    slow = simulate(schedule, costs(schedule, seconds)).by_key()
    fast = simulate(schedule, costs(schedule, [s * f for s, f in zip(seconds, factors, strict=True)])).by_key()
    assert all(fast[key].end_ns <= slow[key].end_ns for key in slow)


@settings(max_examples=100, deadline=None)
@given(schedules(), seconds_lists)
def test_names_do_not_matter(schedule: Schedule, seconds: list[float]) -> None:
    new = {op.key: f"{len(schedule.ops) - i}-renamed" for i, op in enumerate(schedule.ops)}
    renamed = replace(
        schedule,
        ops=tuple(replace(op, key=new[op.key], after=tuple(new[key] for key in op.after)) for op in schedule.ops),
    )
    one, two = trace_or_none(schedule, costs(schedule, seconds)), trace_or_none(renamed, costs(renamed, seconds))
    assert (one is None) == (two is None)
    if one is not None and two is not None:
        assert tuple(s._replace(key=new[s.key]) for s in one.spans) == two.spans
        assert one.memory == two.memory


@settings(max_examples=100, deadline=None)
@given(schedules(), seconds_lists)
def test_the_same_input_gives_the_same_trace(schedule: Schedule, seconds: list[float]) -> None:
    assert trace_or_none(schedule, costs(schedule, seconds)) == trace_or_none(schedule, costs(schedule, seconds))


@settings(max_examples=100, deadline=None)
@given(schedules(), st.integers(1, 3), seconds_lists)
def test_unrolled_schedules_are_valid_and_obey_the_rules(schedule: Schedule, n: int, seconds: list[float]) -> None:
    try:
        unrolled = unroll(schedule, n)
    except ScheduleError:
        assert n > 1
        initial = {b.name for b in schedule.buffers if b.initial}
        assert initial - {b.becomes for b in schedule.buffers}
        return
    expected = execute_in_time(unrolled, {op.key: seconds[i % 14] for i, op in enumerate(unrolled.ops)})
    trace = trace_or_none(unrolled, costs(unrolled, seconds))
    got = None if trace is None else {s.key: (s.start_ns / 1e9, s.end_ns / 1e9) for s in trace.spans}
    assert got == expected
    if n == 1 and trace is not None:
        assert trace.memory == simulate(schedule, costs(schedule, seconds)).memory


@settings(max_examples=60, deadline=None)
@given(schedules(), st.sampled_from(["fast", "slow"]))
def test_the_smallest_capacity_is_the_smallest(schedule: Schedule, tier: str) -> None:
    def with_capacity(size_bytes: int) -> Schedule:
        tiers = [replace(t, capacity_bytes=size_bytes) if t.name == tier else t for t in schedule.tiers]
        return replace(schedule, tiers=tuple(tiers))

    needed = smallest_capacity_bytes(schedule, tier)
    works = [
        size for size in range(60) if len(execute_in_random_order(with_capacity(size), 0).ended) == len(schedule.ops)
    ]
    assert needed == (min(works) if works else None)
    assert works == list(range(works[0], 60)) if works else True, "more memory never lets fewer ops end"


@settings(max_examples=100, deadline=None)
@given(schedules())
def test_running_out_of_memory_is_explained(schedule: Schedule) -> None:
    assume(not completes(schedule))
    error = None
    try:
        simulate(schedule, costs(schedule, [1.0]))
    except OutOfMemory as caught:
        error = caught
    assert error is not None
    held_bytes = sum(size for _, size in error.holders)
    if error.op is not None:
        assert error.wanted_bytes > error.free_bytes
        assert held_bytes == error.capacity_bytes - error.free_bytes
        state = execute_in_random_order(schedule, 1)
        assert held_bytes == state.held_bytes(error.tier)
        first = next(op.key for op in schedule.ops if op.key not in state.ended)
        assert error.op == first
    else:
        assert held_bytes == error.wanted_bytes > error.capacity_bytes
    assert error.needed_bytes is None or error.needed_bytes > error.capacity_bytes
