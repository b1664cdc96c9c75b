"""The executor obeys the four rules: it grants and completes exactly what the simulator does, whatever its timing."""

from __future__ import annotations

import _thread
import random
import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.naive import initial_bytes, writers_of
from tests.toys import MIB, toy_machine, toy_workload, uniform_plan
from tierplan.hwmodels.machine import Cost
from tierplan.hwmodels.names import COMPUTE, H2D, HOST_ADAM
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.execution.executor import TRACED_OPS, TRACED_STEPS, Executor, traced_steps
from tierplan.runtime.execution.fake_device import FakeCuda
from tierplan.runtime.execution.instances import Call, ExecutionError, Instance
from tierplan.runtime.execution.rules import Rules, TierFullError
from tierplan.sim.analysis.completion import OutOfMemory
from tierplan.sim.columns import unroll
from tierplan.sim.engine import simulate
from tierplan.sim.schedule import Buffer, Op, Schedule, ScheduleError, Tier, validate
from tierplan.sim.trace import MemoryEvent, Trace, peaks


def grants(memory: tuple[MemoryEvent, ...]) -> dict[str, list[int]]:
    """Bytes that each tier has granted, in order."""
    found: dict[str, list[int]] = {}
    for event in memory:
        if event.delta_bytes > 0:
            found.setdefault(event.tier, []).append(event.delta_bytes)
    return found


def check_against_simulator(schedule: Schedule, num_steps: int, executor: Executor) -> None:
    unrolled = unroll(schedule, num_steps)
    predicted = simulate(unrolled, {op.key: Cost(0.0, 1.0) for op in unrolled.ops})
    measured = executor.trace()
    assert set(measured.by_key()) == {op.key for op in unrolled.ops}
    assert grants(measured.memory) == grants(predicted.memory)
    left = Counter()
    for trace, sign in ((predicted, 1), (measured, -1)):
        for event in trace.memory:
            left[event.tier, event.kind] += sign * event.delta_bytes
    assert not any(left.values())
    check_rules(unrolled, measured)


def check_rules(schedule: Schedule, trace: Trace) -> None:
    """The rules as they can be seen in a trace: order on streams, inputs before starts, no tier beyond its capacity."""
    spans = trace.by_key()
    writers = writers_of(schedule)
    for stream in schedule.streams:
        ops = [op.key for op in schedule.ops if op.stream == stream]
        for before, after in pairwise(ops):
            assert spans[before].end_ns <= spans[after].free_ns
    for op in schedule.ops:
        span = spans[op.key]
        assert span.free_ns <= span.start_ns <= span.end_ns
        for name in op.reads:
            if name in writers:
                assert spans[writers[name]].end_ns <= span.ready_ns <= span.start_ns
    for tier, peak in peaks(trace.memory, trace.capacity_bytes).items():
        assert peak == trace.peak_bytes[tier] <= trace.capacity_bytes[tier]


def test_an_op_starts_when_its_thread_is_awake(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between grant and start lies the system's scheduler: that is no work of the op, so its own thread says when."""
    said_by: dict[int, str] = {}
    heard: set[str] = set()
    now_ns = Rules.now_ns

    def spied(self: Rules) -> int:
        time_ns = now_ns(self)
        said_by[time_ns] = threading.current_thread().name
        heard.add(said_by[time_ns])
        return time_ns

    def body(call: Call) -> None:
        while call.op.key == "read" and "tierplan gpu0.compute" not in heard:
            time.sleep(0.001)  # until the other op's thread is there, on however busy a computer
        time.sleep(0.01)

    monkeypatch.setattr(Rules, "now_ns", spied)
    read = Op(key="read", stream="nvme.read", kind="x", writes=("x",))
    use = Op(key="use", stream="gpu0.compute", kind="x", reads=("x",))
    x = Buffer(name="x", tier="host", size_bytes=1, content="x", kind="x")
    tier = Tier(name="host", capacity_bytes=1)
    schedule = validate(Schedule(name="two", tiers=(tier,), buffers=(x,), ops=(read, use)))
    executor = Executor(schedule, body)
    executor.run(1)
    spans = executor.trace().by_key()
    assert spans["s0/use"].ready_ns > spans["s0/use"].free_ns, "it waited for its input"
    for span in spans.values():
        assert said_by[span.start_ns] == f"tierplan {span.stream}", span.key


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Random ops on three streams, with initial buffers, in-place updates and buffers that outlive the step."""
    buffers: dict[str, Buffer] = {}
    live: list[str] = []
    for k in range(draw(st.integers(0, 3))):
        name = f"i{k}"
        tier = draw(st.sampled_from(["fast", "slow"]))
        size = draw(st.integers(1, 4))
        buffers[name] = Buffer(name=name, tier=tier, size_bytes=size, content=name, kind="x", initial=True)
        live.append(name)
    home = {name: name for name in live}  # initial buffer -> what plays its part
    ops = []
    for i in range(draw(st.integers(1, 9))):
        reads = draw(st.lists(st.sampled_from(live), unique=True, max_size=3)) if live else []
        writes = []
        for k in range(draw(st.integers(0, 2))):
            name = f"b{i}.{k}"
            old = draw(st.sampled_from(reads)) if reads and draw(st.booleans()) else None
            if old is not None and old in live:
                buffers[name] = replace(buffers[old], name=name, initial=False, reuses=old)
                live.remove(old)
                home.update({first: name for first, now in home.items() if now == old})
            else:
                tier, size = draw(st.sampled_from(["fast", "slow"])), draw(st.integers(0, 4))
                buffers[name] = Buffer(name=name, tier=tier, size_bytes=size, content=name, kind="x")
            live.append(name)
            writes.append(name)
        stream = draw(st.sampled_from(["a", "b", "c"]))
        ops.append(Op(key=f"op{i}", stream=stream, kind="x", reads=tuple(reads), writes=tuple(writes)))
    for first, now in home.items():
        buffers[now] = replace(buffers[now], becomes=first)
    empty = [
        Tier(name=t, capacity_bytes=0, rounding=draw(st.sampled_from(("exact", "power-of-two"))))
        for t in ("fast", "slow")
    ]
    need = {
        t.name: sum(t.held_bytes(b.size_bytes) for b in buffers.values() if b.initial and b.tier == t.name)
        for t in empty
    }
    tiers = tuple(replace(t, capacity_bytes=need[t.name] + draw(st.integers(2, 10))) for t in empty)
    return validate(Schedule(name="random", tiers=tiers, buffers=tuple(buffers.values()), ops=tuple(ops)))


@settings(max_examples=150, deadline=None)
@given(schedules(), st.integers(1, 4), st.integers(0, 10**6), st.sets(st.sampled_from(["a", "b", "c"])))
def test_it_grants_and_completes_what_the_simulator_does(
    schedule: Schedule, num_steps: int, seed: int, quick: set[str]
) -> None:
    """Whoever does the ops of streams that are quick at times, or always."""
    rng = random.Random(seed)
    pauses = [rng.choice([0.0, 0.0, 0.0005]) for _ in range(50)]
    is_moody = rng.random() < 0.5
    executor = Executor(
        schedule,
        lambda call: time.sleep(rng.choice(pauses)),
        is_quick=lambda op: op.stream in quick and (not is_moody or rng.random() < 0.5),
    )
    unrolled = unroll(schedule, num_steps)
    try:
        simulate(unrolled, {op.key: Cost(0.0, 1.0) for op in unrolled.ops})
    except OutOfMemory:
        with pytest.raises(TierFullError, match="nothing that still runs will free more"):
            executor.run(num_steps)
        return
    executor.run(num_steps)
    check_against_simulator(schedule, num_steps, executor)


@settings(max_examples=60, deadline=None)
@given(schedules(), st.integers(1, 3), st.integers(0, 10**6))
def test_a_device_that_runs_ahead_does_what_the_simulator_does_within_its_memory(
    schedule: Schedule, num_steps: int, seed: int
) -> None:
    """Two streams are the device's. What its ops hold is counted when they run there, and not when they are issued."""
    names = {"a": COMPUTE, "b": H2D, "c": HOST_ADAM}
    schedule = replace(schedule, ops=tuple(replace(op, stream=names[op.stream]) for op in schedule.ops))
    device, rng, lock = FakeCuda(seed, lateness_s=0.0002), random.Random(seed), threading.Lock()
    done: list[tuple[Call, list[Instance]]] = []

    def body(call: Call) -> None:
        fresh = [x for x in call.writes if x.over is None]

        def work() -> None:
            with lock:
                done.append((call, fresh))

        time.sleep(rng.choice([0.0, 0.0, 0.0003]))
        device.put(call.op.stream, work)

    def on_grant(op: Op, instance: Instance, size_bytes: int) -> None:
        instance.outside_bytes = size_bytes  # so that its stream may have it again at once

    executor = Executor(schedule, body, on_grant=on_grant, device=device)
    unrolled = unroll(schedule, num_steps)
    try:
        simulate(unrolled, {op.key: Cost(0.0, 1.0) for op in unrolled.ops})
    except OutOfMemory:
        with pytest.raises(TierFullError, match="nothing that still runs will free more"):
            executor.run(num_steps)
        return
    executor.run(num_steps)
    check_against_simulator(schedule, num_steps, executor)
    assert len(done) == len(unrolled.ops)
    held_bytes = executor.ledger.held_bytes
    used = initial_bytes(schedule)
    last = {id(x): k for k, (call, _) in enumerate(done) for x in (*call.reads, *call.writes)}
    outlives = {id(x) for x in executor.carried.values()}
    for k, (call, fresh) in enumerate(done):
        for x in fresh:
            used[x.buffer.tier] += held_bytes[x.buffer.name]
            assert used[x.buffer.tier] <= executor.ledger.capacity_bytes[x.buffer.tier]
        for x in {id(x): x for x in (*call.reads, *call.writes)}.values():
            if last[id(x)] == k and id(x) not in outlives and not x.is_reused:
                used[x.buffer.tier] -= held_bytes[x.buffer.name]


@settings(max_examples=60, deadline=None)
@given(schedules(), st.integers(1, 3), st.integers(1, 3))
def test_two_runs_are_one_longer_run(schedule: Schedule, first: int, second: int) -> None:
    """Bytes held at the end, and everything granted, do not depend on where the run was cut."""
    whole, cut = Executor(schedule, lambda call: None), Executor(schedule, lambda call: None)
    try:
        whole.run(first + second)
    except TierFullError:
        return
    cut.run(first)
    cut.run(second)
    assert grants(whole.trace().memory) == grants(cut.trace().memory)
    assert sorted(x.buffer.name for x in whole.ledger.held) == sorted(x.buffer.name for x in cut.ledger.held)


@pytest.mark.parametrize(("params", "states", "acts"), list(product(("device", "nvme"), ("host", "nvme"), ("nvme",))))
@pytest.mark.parametrize("order", ["horizontal", "vertical"])
@pytest.mark.parametrize("semantics", ["in-backward", "exact-clip", "delayed-1"])
def test_lowered_plans(params: str, states: str, acts: str, order: str, semantics: str) -> None:
    training = {"gradient_accumulation_steps": 2, "max_grad_norm": 1.0 if semantics == "exact-clip" else None}
    workload = toy_workload(3, **training)
    choice = UnitPlan(params=params, grads="host", states=states, acts=acts, input="host")  # type: ignore[arg-type]
    machine = toy_machine(device_bytes=150 * MIB)
    schedule = lower(uniform_plan(workload, choice, order=order, semantics=semantics), workload, machine)
    executor = Executor(schedule, lambda call: None)
    executor.run(3)
    check_against_simulator(schedule, 3, executor)


def chain(capacity_bytes: int = 10) -> Schedule:
    """`make` writes 6 bytes that `use` reads; a counter is updated in place and outlives the step."""
    buffers = (
        Buffer(name="count", tier="t", size_bytes=1, content="count", kind="x", initial=True),
        Buffer(name="made", tier="t", size_bytes=6, content="made", kind="x"),
        Buffer(name="count1", tier="t", size_bytes=1, content="count", kind="x", reuses="count", becomes="count"),
    )
    ops = (
        Op(key="make", stream="a", kind="x", writes=("made",)),
        Op(key="use", stream="b", kind="x", reads=("count", "made"), writes=("count1",)),
    )
    tiers = (Tier(name="t", capacity_bytes=capacity_bytes),)
    return validate(Schedule(name="chain", tiers=tiers, buffers=buffers, ops=ops))


def counting(call: Call) -> None:
    if call.op.key == "use":
        over = call.writes[0].over
        assert over is call.reads[0]
        call.writes[0].value = over.value + 1  # type: ignore[operator]


def test_a_buffer_that_changes_its_name_twice_is_not_written_over_before_its_readers_of_two_steps_ago_have_ended() -> (
    None
):
    buffers = (
        Buffer(name="newest", tier="t", size_bytes=1, content="x", kind="x", becomes="new"),
        Buffer(name="new", tier="t", size_bytes=1, content="x", kind="x", initial=True, becomes="old"),
        Buffer(name="old", tier="t", size_bytes=1, content="x", kind="x", initial=True),
        Buffer(name="over", tier="t", size_bytes=1, content="x", kind="x", reuses="old"),
    )
    ops = (
        Op(key="make", stream="a", kind="x", writes=("newest",)),
        Op(key="write over", stream="a", kind="x", reads=("old",), writes=("over",)),
        Op(key="read", stream="b", kind="x", reads=("newest",)),
    )
    tiers = (Tier(name="t", capacity_bytes=8),)
    schedule = validate(Schedule(name="three names", tiers=tiers, buffers=buffers, ops=ops))

    def body(call: Call) -> None:
        if call.op.key == "read":
            time.sleep(0.02)

    executor = Executor(schedule, body)
    executor.run(3)
    spans = executor.trace().by_key()
    assert spans["s2/write over"].start_ns >= spans["s0/read"].end_ns
    check_against_simulator(schedule, 3, executor)


def test_values_are_carried_from_step_to_step_and_run_to_run() -> None:
    executor = Executor(chain(), counting)
    executor.carried["count"].value = 100
    executor.run(5)
    executor.run(2)
    assert executor.carried["count"].value == 107
    assert executor.num_steps_done == 7
    assert set(executor.trace().by_key()) == {f"s{s}/{key}" for s in range(7) for key in ("make", "use")}


def test_freed_instances_are_released_before_their_bytes_are_granted_again() -> None:
    out: set[str] = set()

    def body(call: Call) -> None:
        for instance in call.writes:
            if instance.over is None:
                assert instance.buffer.name not in out, "granted twice"
                out.add(instance.buffer.name)

    executor = Executor(chain(7), body, release=lambda instance: out.remove(instance.buffer.name))
    executor.run(20)
    assert out == set()


def test_too_small_a_tier_names_op_and_holders() -> None:
    executor = Executor(chain(6), lambda call: None)
    with pytest.raises(TierFullError, match=r"'make' of step 0 wants 6 bytes in tier 't', but 5 of 6 .* count 1 B"):
        executor.run(3)
    with pytest.raises(ExecutionError, match="cannot go on"):
        executor.run(1)


def workers() -> set[threading.Thread]:
    return {t for t in threading.enumerate() if t.name.startswith("tierplan ")}


def test_an_error_in_a_body_ends_the_run_and_names_the_op() -> None:
    before = workers()

    def body(call: Call) -> None:
        if call.op.key == "use" and call.step == 2:
            raise OSError("the drive is gone")

    executor = Executor(chain(), body)
    with pytest.raises(OSError, match="the drive is gone") as caught:
        executor.run(5)
    assert caught.value.__notes__ == ["in op 'use' of step 2"]
    assert not workers() - before


def test_ctrl_c_ends_all_workers() -> None:
    """The signal comes while the main thread waits: Python loses one that hits a weak reference's callback."""

    before = workers()

    def body(call: Call) -> None:
        time.sleep(0.001)
        if call.op.key == "use" and call.step == 20:
            _thread.interrupt_main()

    with pytest.raises(KeyboardInterrupt):
        Executor(chain(), body).run(10**6)
    assert not workers() - before


def test_the_end_of_a_step_is_told_in_order_without_holding_up_the_workers() -> None:
    """In the thread that called `run`, which may ask for the trace; meanwhile the steps behind it go on."""
    told: list[int] = []
    were_ahead = threading.Event()

    def body(call: Call) -> None:
        if call.op.key == "use" and call.step == 3:
            were_ahead.set()

    def on_step_end(step: int, time_ns: int) -> None:
        assert threading.current_thread() is threading.main_thread()
        span = executor.trace().by_key()[f"s{step}/use"]
        assert span.end_ns == time_ns
        if step == 0:
            assert were_ahead.wait(30), "steps wait for what is told of the one before them"
        told.append(step)

    executor = Executor(chain(), body, on_step_end=on_step_end)
    executor.run(6)
    executor.run(2)
    assert told == list(range(8))


def test_an_error_at_the_end_of_a_step_ends_the_run_as_it_is() -> None:
    before = workers()

    def on_step_end(step: int, time_ns: int) -> None:
        if step == 2:
            raise LookupError("no room for metrics")

    executor = Executor(chain(), lambda call: time.sleep(0.001), on_step_end=on_step_end)
    with pytest.raises(LookupError, match="no room for metrics"):
        executor.run(10**6)
    assert executor.num_steps_done < 10**6
    assert not workers() - before
    with pytest.raises(ExecutionError, match="cannot go on"):
        executor.run(1)


def test_stopping_early_completes_the_steps_that_were_begun() -> None:
    executor: Executor

    def body(call: Call) -> None:
        counting(call)
        time.sleep(0.002)
        if call.step == 3 and call.op.key == "use":
            executor.request_stop()

    executor = Executor(chain(), body)
    executor.carried["count"].value = 0
    executor.run(1000)
    done = executor.num_steps_done
    assert 4 <= done < 500
    assert executor.carried["count"].value == done
    executor.run(3)
    assert executor.carried["count"].value == done + 3


def test_a_buffer_that_nothing_carries_over_is_an_error_for_two_steps() -> None:
    buffers = (Buffer(name="once", tier="t", size_bytes=1, content="once", kind="x", initial=True),)
    ops = (Op(key="use", stream="a", kind="x", reads=("once",)),)
    schedule = Schedule(name="s", tiers=(Tier(name="t", capacity_bytes=1),), buffers=buffers, ops=ops)
    with pytest.raises(ScheduleError, match="a second step would lack it"):
        Executor(schedule, lambda call: None).run(2)
    executor = Executor(schedule, lambda call: None)
    executor.run(1)
    with pytest.raises(ScheduleError, match="a second step would lack it"):
        executor.run(1)


def test_trace_steps_bounds_what_is_recorded() -> None:
    executor = Executor(chain(), lambda call: None, trace_steps=2)
    executor.run(50)
    trace = executor.trace()
    assert len(trace.spans) == 4
    assert len(trace.memory) < 20
    assert trace.peak_bytes == {"t": 7}


def test_a_trace_of_short_steps_covers_more_of_them() -> None:
    """Twenty steps of two ops are over before a machine has shown how quick it is."""
    long = Schedule(
        name="long", tiers=(), buffers=(), ops=tuple(Op(key=f"{k}", stream="a", kind="x") for k in range(5_000))
    )
    assert (traced_steps(chain()), traced_steps(long)) == (TRACED_OPS // len(chain().ops), TRACED_STEPS)


def test_release_sees_the_value() -> None:
    seen: list[object] = []

    def body(call: Call) -> None:
        if call.op.key == "make":
            call.writes[0].value = call.step

    def release(instance: Instance) -> None:
        seen.append(instance.value)

    Executor(chain(), body, release=release).run(3)
    assert seen == [0, 1, 2]


def test_bytes_that_are_taken_over_change_their_kind_as_in_the_simulator() -> None:
    buffers = (
        Buffer(name="w", tier="t", size_bytes=5, content="w", kind="params", initial=True),
        Buffer(name="g", tier="t", size_bytes=5, content="g", kind="grads", reuses="w"),
        Buffer(name="w2", tier="t", size_bytes=5, content="w", kind="params", reuses="g", becomes="w"),
    )
    ops = (
        Op(key="a", stream="s", kind="x", reads=("w",), writes=("g",)),
        Op(key="b", stream="s", kind="x", reads=("g",), writes=("w2",)),
    )
    schedule = validate(Schedule(name="kinds", tiers=(Tier(name="t", capacity_bytes=5),), buffers=buffers, ops=ops))
    executor = Executor(schedule, lambda call: None)
    executor.run(1)
    found = [(e.kind, e.delta_bytes) for e in executor.trace().memory]
    simulated = simulate(schedule, {op.key: Cost(0.0, 1.0) for op in ops})
    assert found == [(e.kind, e.delta_bytes) for e in simulated.memory]
    assert found == [("params", 5), ("params", -5), ("grads", 5), ("grads", -5), ("params", 5)]
