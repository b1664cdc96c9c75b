"""The engine on cases solved by hand: links, pipelines, overlap, memory, shared limits, refusals."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Mapping

import pytest
import simpy

from tests.sim.test_schedule import buffer, op
from tests.sim.test_schedule import schedule as schedule_of
from tests.toys import toy_machine, toy_workload, uniform_plan
from tierplan.hwmodels.machine import KERNELS, Cost, Machine, Rate, SharedLimit, Stream, TierSpec
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.sim.analysis.completion import OutOfMemory, SimulationError
from tierplan.sim.engine import simulate
from tierplan.sim.pricing import simulate_on
from tierplan.sim.schedule import Buffer, Op, Schedule, Tier, validate
from tierplan.sim.trace import Trace


def run(
    buffers: list[Buffer],
    ops: list[Op],
    seconds: Mapping[str, float] | float = 1.0,
    *,
    capacity_bytes: int = 10**6,
    demand: Mapping[str, Mapping[str, float]] | None = None,
    share: Mapping[str, float] | None = None,
    limits: Mapping[str, float] | None = None,
) -> Trace:
    schedule = validate(schedule_of(buffers, ops, Tier(name="host", capacity_bytes=capacity_bytes)))
    costs = {
        o.key: Cost(
            0.0,
            seconds if isinstance(seconds, float) else seconds[o.key],
            (demand or {}).get(o.key, {}),
            (share or {}).get(o.key, 1.0),
        )
        for o in ops
    }
    return simulate(schedule, costs, limits=limits)


def log(trace: Trace) -> list[tuple[str, float, float]]:
    return [(s.key, s.start_ns / 1e9, s.end_ns / 1e9) for s in trace.spans]


# ---- without sharing ----


def test_one_link_takes_bytes_over_bandwidth_and_a_latency_each() -> None:
    machine = Machine(
        name="m",
        tiers=(TierSpec(name="host", kind="host", capacity_bytes=10**9),),
        streams=(Stream(name="s", rates={"bytes": Rate.constant(2e9)}, latency_s=1e-3),),
    )
    ops = [op(f"c{i}", work={"bytes": 1e9}) for i in range(4)]
    schedule = Schedule(name="x", tiers=(Tier(name="host", capacity_bytes=0),), buffers=(), ops=tuple(ops))
    assert simulate_on(schedule, machine).duration_ns == 4 * (1_000_000 + 500_000_000)


def test_a_fixed_overhead_per_op_is_work_in_seconds() -> None:
    """A pinned allocation of 3 ms per tensor, before the copy on its stream."""
    machine = Machine(
        name="m",
        tiers=(TierSpec(name="host", kind="host", capacity_bytes=10**9),),
        streams=(Stream(name="s", rates={"bytes": Rate.constant(2e9)}),),
    )
    copy = op("copy", work={"bytes": 1e9, "s": 0.003})
    schedule = Schedule(name="x", tiers=(), buffers=(), ops=(copy,))
    assert simulate_on(schedule, machine).duration_ns == 503_000_000


def test_rates_depend_on_the_amount() -> None:
    curve = Rate(((1e6, 1e9), (1e8, 4e9)))
    machine = Machine(name="m", tiers=(), streams=(Stream(name="s", rates={"bytes": curve}),))
    small = Schedule(name="x", tiers=(), buffers=(), ops=(op("o", work={"bytes": 1e6}),))
    large = Schedule(name="x", tiers=(), buffers=(), ops=(op("o", work={"bytes": 1e8}),))
    middle = Schedule(name="x", tiers=(), buffers=(), ops=(op("o", work={"bytes": 1e7}),))
    assert simulate_on(small, machine).duration_s == 1e-3
    assert simulate_on(large, machine).duration_s == 25e-3
    assert simulate_on(middle, machine).duration_s == pytest.approx(5e-3)  # halfway on log-log paper: 2 GB/s


def test_a_thread_wakes_up_where_its_stream_stood_still() -> None:
    """`b` waits for `a` on the other stream, and wakes its thread; `c` and `d` find theirs free or working."""
    rates = {"s": Rate.constant(1.0)}
    streams = (
        Stream(name="s", rates=rates, beside_s=0.125, wake_s=0.25),
        Stream(name="t", rates=rates, latency_s=0.5, wake_s=0.25),
    )
    machine = Machine(name="m", tiers=(), streams=streams)
    a, b = op("a", work={"s": 1.0}), op("b", work={"s": 1.0}, stream="t", after=("a",))
    c, d = op("c", work={"s": 1.0}), op("d", work={"s": 1.0}, stream="t")
    trace = simulate_on(validate(Schedule(name="x", tiers=(), buffers=(), ops=(a, c, b, d))), machine)
    assert sorted(log(trace)) == [("a", 0.0, 1.125), ("b", 1.125, 2.875), ("c", 1.125, 2.25), ("d", 2.875, 4.375)]
    assert all(span.alone_ns == span.duration_ns for span in trace.spans)
    alone = simulate_on(Schedule(name="x", tiers=(), buffers=(), ops=(a, c)), machine)
    assert log(alone) == [("a", 0.0, 1.0), ("c", 1.0, 2.0)], "nothing is beside them"


def test_kernels_are_launched_while_their_stream_waits() -> None:
    """`b` waits two seconds for `a`: of its three seconds of launches one is left, less than its work. `c` takes its
    own, which begin when `b` ends."""
    rates = {"s": Rate.constant(1.0)}
    streams = (Stream(name="s", rates=rates), Stream(name="t", rates=rates, launch_s=1.0))
    machine = Machine(name="m", tiers=(), streams=streams)
    a, b = op("a", work={"s": 2.0}), op("b", work={"s": 1.5, KERNELS: 3}, stream="t", after=("a",))
    c = op("c", work={"s": 1.0, KERNELS: 3}, stream="t")
    trace = simulate_on(validate(Schedule(name="x", tiers=(), buffers=(), ops=(a, b, c))), machine)
    assert sorted(log(trace)) == [("a", 0.0, 2.0), ("b", 2.0, 3.5), ("c", 3.5, 6.5)]
    assert all(span.alone_ns == span.duration_ns for span in trace.spans)


@pytest.mark.parametrize("stage_s", [(1.0, 2.0, 3.0), (3.0, 1.0, 2.0), (2.0, 2.0, 2.0), (0.0, 1.0, 0.5)])
def test_a_pipeline_fills_and_then_goes_at_the_pace_of_its_slowest_stage(stage_s: tuple[float, ...]) -> None:
    n = 7
    buffers, ops, seconds = [], [], {}
    # Listed by waves, since all stages here take memory from one tier, which grants in list order.
    for item, stage in sorted(((i, s) for i in range(n) for s in range(len(stage_s))), key=lambda x: (sum(x), x)):
        name = f"b{item}.{stage}"
        buffers.append(buffer(name))
        reads = f"b{item}.{stage - 1}" if stage else ""
        ops.append(op(f"o{item}.{stage}", reads, name, stream=f"stage{stage}"))
        seconds[f"o{item}.{stage}"] = stage_s[stage]
    assert run(buffers, ops, seconds).duration_s == sum(stage_s) + (n - 1) * max(stage_s)


@pytest.mark.parametrize("num_slots", [1, 2, 3])
def test_slots_of_memory_are_the_prefetch_window(num_slots: int) -> None:
    """A link fills slots that compute empties. One slot: no overlap. Two or more: the slower of both."""
    n, load_s, compute_s = 6, 2.0, 3.0
    buffers = [buffer(f"p{i}") for i in range(n)]
    ops = []
    for i in range(n):
        ops += [op(f"load{i}", writes=f"p{i}", stream="link"), op(f"compute{i}", reads=f"p{i}", stream="gpu")]
    seconds = {o.key: load_s if o.stream == "link" else compute_s for o in ops}
    trace = run(buffers, ops, seconds, capacity_bytes=4 * num_slots)
    expected = n * (load_s + compute_s) if num_slots == 1 else load_s + n * max(load_s, compute_s)
    assert trace.duration_s == expected
    assert trace.peak_bytes == {"host": 4 * num_slots}
    waited = {s.key: s.waited_memory_ns / 1e9 for s in trace.spans}
    assert waited["load1"] == (compute_s if num_slots == 1 else 0.0)
    assert waited["load3"] == {1: 3.0, 2: 1.0, 3: 0.0}[num_slots]


def test_rule_3_an_op_listed_early_holds_back_those_behind_it() -> None:
    buffers = [buffer("x"), buffer("late"), buffer("soon")]
    ops = [
        op("make", writes="x", stream="a"),
        op("late", "x", "late", stream="b"),
        op("soon", writes="soon", stream="c"),
    ]
    trace = run(buffers, ops, {"make": 5.0, "late": 1.0, "soon": 1.0})
    assert log(trace) == [("make", 0.0, 5.0), ("late", 5.0, 6.0), ("soon", 5.0, 6.0)]
    span = trace.by_key()["soon"]
    assert (span.waited_input_ns, span.waited_memory_ns) == (0, 5 * 10**9)


def test_a_stream_waits_for_its_turn_then_for_inputs_then_for_memory() -> None:
    buffers = [buffer("room"), buffer("x"), buffer("y")]
    ops = [
        op("hold", writes="room", stream="a"),
        op("use", reads="room", stream="a"),
        op("make", writes="x", stream="b"),
        op("before", stream="c"),
        op("last", "x", "y", stream="c"),
    ]
    seconds = {"hold": 1.0, "use": 5.0, "make": 3.0, "before": 2.0, "last": 1.0}
    last = run(buffers, ops, seconds, capacity_bytes=8).by_key()["last"]
    assert [ns // 10**9 for ns in (last.free_ns, last.ready_ns, last.start_ns, last.end_ns)] == [2, 3, 6, 7]
    assert (last.waited_input_ns, last.waited_memory_ns) == (10**9, 3 * 10**9)


def test_a_transient_is_held_while_its_op_runs() -> None:
    buffers = [buffer("work1", size_bytes=6), buffer("work2", size_bytes=6)]
    ops = [op("one", writes="work1", stream="a"), op("two", writes="work2", stream="b")]
    trace = run(buffers, ops, capacity_bytes=10)
    assert log(trace) == [("one", 0.0, 1.0), ("two", 1.0, 2.0)]
    assert [(e.time_ns // 10**9, e.delta_bytes) for e in trace.memory] == [(0, 6), (1, -6), (1, 6), (2, -6)]


def test_an_update_in_place_needs_no_memory_and_waits_for_the_other_readers() -> None:
    buffers = [
        buffer("w", initial=True, size_bytes=10, kind="params"),
        buffer("w2", content="w", size_bytes=10, reuses="w", becomes="w", kind="params"),
    ]
    ops = [op("use", reads="w", stream="gpu"), op("update", "w", "w2", stream="cpu")]
    trace = run(buffers, ops, {"use": 3.0, "update": 1.0}, capacity_bytes=10)
    assert log(trace) == [("use", 0.0, 3.0), ("update", 3.0, 4.0)]
    assert trace.peak_bytes == {"host": 10}
    assert [e.delta_bytes for e in trace.memory] == [10]


def test_bytes_change_their_kind_when_they_are_taken_over() -> None:
    buffers = [buffer("g", kind="grads"), buffer("s", kind="states", reuses="g")]
    trace = run(buffers, [op("make", writes="g"), op("turn", "g", "s"), op("use", reads="s")])
    events = [(e.time_ns // 10**9, e.kind, e.delta_bytes) for e in trace.memory]
    assert events == [(0, "grads", 4), (2, "grads", -4), (2, "states", 4), (3, "states", -4)]


def test_an_empty_schedule_has_an_empty_trace() -> None:
    trace = run([], [])
    assert (trace.duration_ns, trace.spans, trace.memory) == (0, (), ())


def test_an_op_is_one_simpy_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most two are allowed; counted on a lowered plan, without shared limits."""
    workload = toy_workload(12, gradient_accumulation_steps=2)
    machine = toy_machine()
    choice = UnitPlan(params="host", grads="host", states="nvme", acts=("nvme", "host", "recompute", "keep"))
    schedule = lower(uniform_plan(workload, choice), workload, machine)
    count, step = 0, simpy.Environment.step

    def counting(self: simpy.Environment) -> None:
        nonlocal count
        step(self)
        count += 1

    monkeypatch.setattr(simpy.Environment, "step", counting)
    simulate_on(schedule, machine)
    assert count == len(schedule.ops)


def test_the_collector_is_as_it_was() -> None:
    for was_enabled in (False, True):
        (gc.enable if was_enabled else gc.disable)()
        try:
            run([], [op("o")])
            assert gc.isenabled() == was_enabled
            with pytest.raises(OutOfMemory):
                run([buffer("a")], [op("o", writes="a")], capacity_bytes=1)
            assert gc.isenabled() == was_enabled
        finally:
            gc.enable()


# ---- shared limits, solved by hand ----


def two_flows(**more: object) -> Trace:
    ops = [op("a", stream="a"), op("b", stream="b")]
    return run([], ops, **more)  # type: ignore[arg-type]


def test_two_equal_flows_through_one_link_take_twice_as_long() -> None:
    trace = two_flows(seconds=1.0, demand={"a": {"bus": 1.0}, "b": {"bus": 1.0}}, limits={"bus": 1.0})
    assert log(trace) == [("a", 0.0, 2.0), ("b", 0.0, 2.0)]
    assert {s.alone_ns for s in trace.spans} == {10**9}


def test_the_longer_flow_goes_on_alone() -> None:
    """Both at half speed until a has done 1 s of work at t = 2; b has 2 s left and full speed."""
    trace = two_flows(seconds={"a": 1.0, "b": 3.0}, demand={"a": {"bus": 1.0}, "b": {"bus": 1.0}}, limits={"bus": 1.0})
    assert log(trace) == [("a", 0.0, 2.0), ("b", 0.0, 4.0)]


def test_a_flow_that_starts_later_slows_the_first_from_then_on() -> None:
    """First runs alone for 1 s of its 2 s; then both at half speed; the second, of 0.5 s, ends at 2; first at 2.5."""
    ops = [op("first", stream="a"), op("wait", stream="b"), op("second", stream="b")]
    trace = run(
        [],
        ops,
        {"first": 2.0, "wait": 1.0, "second": 0.5},
        demand={"first": {"bus": 1.0}, "second": {"bus": 1.0}},
        limits={"bus": 1.0},
    )
    assert log(trace) == [("first", 0.0, 2.5), ("wait", 0.0, 1.0), ("second", 1.0, 2.0)]


def test_a_drive_that_reads_and_writes() -> None:
    """r/6 + w/3 <= 1 (GB/s): 6 GB and 3 GB take 1 s each alone, both at half speed together."""
    machine = Machine(
        name="m",
        tiers=(),
        streams=(
            Stream(name="nvme.read", rates={"bytes": Rate.constant(6e9)}, takes={"drive": {"bytes": 1 / 6e9}}),
            Stream(name="nvme.write", rates={"bytes": Rate.constant(3e9)}, takes={"drive": {"bytes": 1 / 3e9}}),
        ),
        shared_limits=(SharedLimit(name="drive", limit=1.0),),
    )
    ops = (
        op("read", stream="nvme.read", work={"bytes": 6e9}),
        op("write", stream="nvme.write", work={"bytes": 3e9}),
    )
    trace = simulate_on(Schedule(name="x", tiers=(), buffers=(), ops=ops), machine)
    assert log(trace) == [("read", 0.0, 2.0), ("write", 0.0, 2.0)]


def test_max_min_over_two_limits() -> None:
    """The classic: flow ab crosses both links, a and b one each, and link B has half the room of A.

    All rise together to 0.25, where link B is full; a then takes what is left of link A.
    """
    ops = [op("ab", stream="1"), op("a", stream="2"), op("b", stream="3")]
    demand = {"ab": {"A": 1.0, "B": 1.0}, "a": {"A": 1.0}, "b": {"B": 1.0}}
    seconds = {"ab": 1.0, "a": 3.0, "b": 1.0}
    trace = run([], ops, seconds, demand=demand, limits={"A": 1.0, "B": 0.5})
    # ab and b at 0.25 end at 4; a at 0.75 has then done 3 s of work: it ends at 4 as well.
    assert log(trace) == [("ab", 0.0, 4.0), ("a", 0.0, 4.0), ("b", 0.0, 4.0)]


def test_weights_divide_unfairly() -> None:
    """A read that starves a write: 3 to 1."""
    trace = two_flows(
        seconds=3.0, demand={"a": {"bus": 1.0}, "b": {"bus": 1.0}}, share={"a": 3.0, "b": 1.0}, limits={"bus": 1.0}
    )
    # a: 3 s at 0.75 = 4 s; b has then done 1 s, and does 2 s more alone.
    assert log(trace) == [("a", 0.0, 4.0), ("b", 0.0, 6.0)]


def test_speeds_belong_to_flows_in_whatever_order_they_begin() -> None:
    """The same two prices together again, the other one first: each goes as quickly as before."""
    light, heavy = Cost(0.0, 1.0, {"bus": 1.0}, 1.0), Cost(0.0, 1.0, {"bus": 1.0}, 3.0)
    ops = [
        op("light1", stream="a"),
        op("heavy1", stream="b"),
        op("heavy2", stream="b", after=("light1",)),
        op("light2", stream="a", after=("heavy1",)),
    ]
    schedule = validate(Schedule(name="x", tiers=(), buffers=(), ops=tuple(ops)))
    costs = {o.key: light if o.key.startswith("light") else heavy for o in ops}
    ends = {key: end for key, _, end in log(simulate(schedule, costs, limits={"bus": 1.0}))}
    assert ends == pytest.approx({"heavy1": 4 / 3, "light1": 2.0, "heavy2": 2 + 4 / 3, "light2": 4.0}, abs=1e-8)


def test_a_limit_that_does_not_bind_changes_nothing() -> None:
    trace = two_flows(seconds={"a": 1.0, "b": 2.0}, demand={"a": {"bus": 0.4}, "b": {"bus": 0.6}}, limits={"bus": 1.0})
    assert log(trace) == [("a", 0.0, 1.0), ("b", 0.0, 2.0)]


def test_who_takes_nothing_of_a_limit_need_not_know_it() -> None:
    demand = {"a": {"bus": 0.0}, "b": {"bus": 0.0, "link": 1.0}}
    ops = [op("a", stream="a"), op("b", stream="b")]
    assert log(run([], ops, demand=demand, limits={"link": 0.5})) == [("a", 0.0, 1.0), ("b", 0.0, 2.0)]


def test_latency_is_not_slowed() -> None:
    schedule = Schedule(name="x", tiers=(), buffers=(), ops=(op("a", stream="a"), op("b", stream="b")))
    costs = {key: Cost(0.5, 1.0, {"bus": 1.0}) for key in "ab"}
    assert log(simulate(schedule, costs, limits={"bus": 1.0})) == [("a", 0.0, 2.5), ("b", 0.0, 2.5)]


@pytest.mark.parametrize("num_flows", [3, 8, 30])
def test_n_flows_of_different_length_share_as_processors_do(num_flows: int) -> None:
    """Processor sharing of lengths 1, ..., n that begin together: the k-th ends at sum over i <= k of (n - i + 1)."""
    ops = [op(f"o{k}", stream=f"s{k}") for k in range(1, num_flows + 1)]
    trace = run(
        [],
        ops,
        {f"o{k}": float(k) for k in range(1, num_flows + 1)},
        demand={o.key: {"cpu": 1.0} for o in ops},
        limits={"cpu": 1.0},
    )
    ends = {s.key: s.end_ns / 1e9 for s in trace.spans}
    for k in range(1, num_flows + 1):
        assert ends[f"o{k}"] == pytest.approx(sum(num_flows - i + 1 for i in range(1, k + 1)), abs=1e-7)


def test_a_single_server_queue_of_constant_service() -> None:
    """Arrivals every 1.0 s in pairs, service 0.4 s: the first of a pair waits 0, the second 0.4 (D/D/1 in batches)."""
    buffers, ops, seconds = [], [], {}
    for k in range(5):
        buffers.append(buffer(f"t{k}"))
        ops.append(op(f"tick{k}", writes=f"t{k}", stream="clock"))
        ops += [op(f"serve{k}.{i}", reads=f"t{k}", stream="server") for i in range(2)]
        seconds |= {f"tick{k}": 1.0, f"serve{k}.0": 0.4, f"serve{k}.1": 0.4}
    spans = run(buffers, ops, seconds).by_key()
    for k in range(5):
        waits = [spans[f"serve{k}.{i}"].start_ns / 1e9 - (k + 1) for i in range(2)]
        assert waits == pytest.approx([0.0, 0.4])


# ---- refusals ----


def test_out_of_memory_names_op_tier_bytes_holders_and_what_would_do() -> None:
    buffers = [buffer("a", size_bytes=6), buffer("b", size_bytes=3), buffer("c", size_bytes=7)]
    ops = [op("one", writes="a"), op("two", writes="b"), op("three", "a b", "c")]
    with pytest.raises(OutOfMemory) as caught:
        run(buffers, ops, capacity_bytes=12)
    error = caught.value
    assert (error.op, error.tier, error.wanted_bytes, error.free_bytes) == ("three", "host", 7, 3)
    assert error.holders == (("a", 6), ("b", 3))
    assert error.needed_bytes == 16
    assert str(error) == (
        "op 'three' wants 7 bytes in tier 'host', but 3 of 12 are free and nothing that still runs will free more; "
        "held by a 6 B, b 3 B. This schedule completes with 16 bytes there or more; or choose a plan that keeps less "
        "there"
    )
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_what_is_there_before_the_step_must_fit() -> None:
    with pytest.raises(OutOfMemory) as caught:
        run([buffer("w", initial=True, size_bytes=8, becomes="w")], [op("o", reads="w")], capacity_bytes=7)
    error = caught.value
    assert (error.op, error.wanted_bytes, error.capacity_bytes) == (None, 8, 7)
    assert str(error) == (
        "before its first op, the step holds 8 bytes in tier 'host', which has 7; held by w 8 B. This schedule "
        "completes with 8 bytes there or more; or choose a plan that keeps less there"
    )
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_what_ops_add_to_that_is_told_from_it() -> None:
    buffers = [buffer("w", initial=True, size_bytes=8, becomes="w"), buffer("x", size_bytes=3)]
    with pytest.raises(OutOfMemory) as caught:
        run(buffers, [op("o", reads="w", writes="x")], capacity_bytes=7)
    assert str(caught.value) == (
        "before its first op, the step holds 8 bytes in tier 'host', which has 7; held by w 8 B. With what its ops "
        "add, this schedule completes with 11 bytes there or more; or choose a plan that keeps less there"
    )


def test_a_tier_that_has_granted_is_not_the_one_that_is_short() -> None:
    """The op takes 3 of 4 bytes in one tier, the last ones asked for there; it is the other that lacks them."""
    buffers = (buffer("a", tier="one", size_bytes=3), buffer("b", tier="two", size_bytes=5))
    tiers = (Tier(name="one", capacity_bytes=4), Tier(name="two", capacity_bytes=4))
    schedule = validate(Schedule(name="x", tiers=tiers, buffers=buffers, ops=(op("o", writes="a b"),)))
    with pytest.raises(OutOfMemory) as caught:
        simulate(schedule, {"o": Cost(0.0, 1.0)})
    assert (caught.value.tier, caught.value.wanted_bytes, caught.value.free_bytes) == ("two", 5, 4)
    assert caught.value.needed_bytes == 5


def test_when_two_tiers_are_short_it_says_so() -> None:
    buffers = (buffer("a", tier="one", size_bytes=5), buffer("b", tier="two", size_bytes=5))
    tiers = (Tier(name="one", capacity_bytes=4), Tier(name="two", capacity_bytes=4))
    schedule = validate(Schedule(name="x", tiers=tiers, buffers=buffers, ops=(op("o", writes="a b"),)))
    with pytest.raises(OutOfMemory, match="No capacity of 'one' alone helps: 'two' is too small as well"):
        simulate(schedule, {"o": Cost(0.0, 1.0)})


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        (None, "op 'o' has no cost"),
        (Cost(0.0, float("inf")), "op 'o' costs work_s = inf"),
        (Cost(0.0, float("nan")), "op 'o' costs work_s = nan"),
        (Cost(0.0, 1e300), r"op 'o' takes 1e\+300 s, and nothing is simulated beyond 2.31e\+09 s"),
        (Cost(-1.0, 0.0), "op 'o' costs latency_s = -1.0"),
        (Cost(0.0, 1.0, {"bus": 2.0}), "takes 2 per second of shared limit 'bus', which is unknown"),
        (Cost(0.0, 1.0, {"dram": 2.0}), "shared limit 'dram', which is 0.0; it would never end"),
        (Cost(0.0, 1.0, {"dram": float("nan")}), "takes nan per second of shared limit 'dram'; it must be finite"),
        (Cost(0.0, 1.0, {"dram": -1.0}), "takes -1 per second of shared limit 'dram'; it must be finite"),
        (Cost(0.0, 1.0, {}, 0.0), "op 'o' has a share of 0.0"),
    ],
)
def test_costs_that_make_no_sense_are_refused(cost: Cost | None, message: str) -> None:
    schedule = Schedule(name="x", tiers=(), buffers=(), ops=(op("o"),))
    with pytest.raises(SimulationError, match=message):
        simulate(schedule, {} if cost is None else {"o": cost}, limits={"dram": 0.0})
