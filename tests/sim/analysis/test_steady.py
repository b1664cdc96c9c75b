"""Steady state against schedules whose period is known in closed form, and against a long run."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

from tests.sim.test_schedule import buffer, op
from tests.sim.test_schedule import schedule as schedule_of
from tests.toys import MIB, toy_machine, toy_workload, uniform_plan
from tierplan.hwmodels.machine import Machine, Rate, SharedLimit, Stream, TierSpec
from tierplan.hwmodels.scaling import with_capacity
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.planner.policies import POLICIES, decide
from tierplan.sim.analysis.completion import OutOfMemory
from tierplan.sim.analysis.explain import busy_fracs, sensitivities
from tierplan.sim.analysis.steady import SteadyState, _repetition
from tierplan.sim.analysis.steady import steady_state as steady_of
from tierplan.sim.analysis.variation import vary
from tierplan.sim.columns import columns_of, unroll
from tierplan.sim.contents import split_step
from tierplan.sim.pricing import simulate_on
from tierplan.sim.schedule import Buffer, Op, Schedule, ScheduleError, Tier, validate


def machine(*streams: str, limit: float | None = None) -> Machine:
    """Streams that take work in seconds and, with `limit`, load one shared limit with 1 per second of work."""
    takes = {"shared": {"s": 1.0}} if limit is not None else {}
    return Machine(
        name="clocks",
        tiers=(TierSpec(name="host", kind="host", capacity_bytes=100),),
        streams=tuple(Stream(name=s, rates={"s": Rate.constant(1.0)}, takes=takes) for s in streams),
        shared_limits=(SharedLimit(name="shared", limit=limit),) if limit is not None else (),
    )


def loop(compute_s: float, update_s: float) -> Schedule:
    """Compute reads the weights and makes gradients; the update reads them and writes the weights in place."""
    weights, gradients = buffer("w", kind="params", initial=True), buffer("g", kind="grads")
    new = buffer("w'", content="w", kind="params", reuses="w", becomes="w")
    compute = op("compute", "w", "g", stream="gpu", kind="forward", work={"s": compute_s})
    update = op("update", "w g", "w'", stream="cpu", kind="update", work={"s": update_s})
    return validate(schedule_of([weights, gradients, new], [compute, update]))


def steady_state(schedule: Schedule, target: Machine) -> SteadyState:
    """As the compiled engine has it; that SimPy says the same of the steps is asserted wherever this is called."""
    steady = steady_of(schedule, target)
    assert steady == steady_of(columns_of(schedule), target)
    ends_ns = dict.fromkeys(range(steady.num_steps), 0)
    for span in steady.trace.spans:
        step = split_step(span.key).step
        assert step is not None
        ends_ns[step] = max(ends_ns[step], span.end_ns)
    assert tuple(ns / 1e9 for ns in ends_ns.values()) == steady.step_ends_s
    assert steady.trace.peak_bytes == steady.peak_bytes
    return steady


def test_a_loop_without_overlap_takes_the_sum() -> None:
    steady = steady_state(loop(3.0, 2.0), machine("gpu", "cpu"))
    assert steady.period_s == 5.0
    assert steady.warmup_s == 0.0
    assert steady.cycle_steps == 1
    assert steady.trace.duration_s == steady.num_steps * 5.0


def two_stages(first_s: float, second_s: float, capacity_bytes: int = 100) -> Schedule:
    """A pipeline of two stages that keeps nothing from step to step: fill, then the slower stage."""
    first = op("first", writes="x", stream="gpu", work={"s": first_s})
    second = op("second", "x", stream="cpu", work={"s": second_s})
    return schedule_of([buffer("x", size_bytes=1)], [first, second], Tier(name="host", capacity_bytes=capacity_bytes))


def test_work_overlaps_across_the_step_boundary() -> None:
    steady = steady_state(two_stages(2.0, 3.0, capacity_bytes=2), machine("gpu", "cpu"))
    assert steady.period_s == 3.0
    assert steady.warmup_s == 2.0  # n steps take 2 + 3 n
    assert steady.trace.duration_s == 2.0 + 3.0 * steady.num_steps


def test_memory_for_one_step_forbids_the_overlap() -> None:
    assert steady_state(two_stages(2.0, 3.0, capacity_bytes=1), machine("gpu", "cpu")).period_s == 5.0


def test_a_shared_limit_is_felt_in_the_period_but_not_in_the_last_step() -> None:
    """Two streams of 2 s each through a limit that serves one at a time: 4 s per step, however they are shared."""
    schedule = two_stages(2.0, 2.0, capacity_bytes=2)
    steady = steady_state(schedule, machine("gpu", "cpu", limit=1.0))
    assert steady.period_s == pytest.approx(4.0, abs=1e-6)


def test_a_cycle_of_two_steps() -> None:
    """A delayed update: step t needs the weights of step t-2, so two steps share each wait."""
    buffers = [
        *(buffer(name, content="w", kind="params", initial=True) for name in ("w0", "w1")),
        buffer("w1.keep", content="w", kind="params", reuses="w1", becomes="w0"),
        buffer("w2", content="w", kind="params", becomes="w1"),
        buffer("g", kind="grads"),
    ]
    ops = [
        op("compute", "w0", "g", stream="gpu", work={"s": 1.0}),
        op("keep", "w1", "w1.keep", stream="link", work={"s": 0.0}),
        op("update", "g", "w2", stream="cpu", work={"s": 2.0}),
        op("home", "w2", stream="far", work={"s": 2.0}),
    ]
    schedule = validate(schedule_of(buffers, ops))
    steady = steady_state(schedule, machine("gpu", "cpu", "link", "far"))
    assert steady.is_periodic
    long = simulate_on(unroll(schedule, 40), machine("gpu", "cpu", "link", "far"))
    assert steady.warmup_s + 40 * steady.period_s == pytest.approx(long.duration_s, rel=1e-3)


def test_two_steps_alike_inside_are_no_cycle_where_those_before_them_are_not() -> None:
    """With room for two of what is made, steps take 10 and 12 s in turns; the third is as the second inside."""
    ops = [
        op("make", "", "x", stream="a", work={"s": 10.0}),
        op("use", "x", "y", stream="b", work={"s": 10.0}),
        op("end", "x y", "", stream="c", work={"s": 2.0}),
    ]
    buffers = [buffer("x", size_bytes=1), buffer("y", size_bytes=0)]
    schedule = validate(schedule_of(buffers, ops, Tier(name="host", capacity_bytes=2)))
    target = machine("a", "b", "c", limit=100.0)
    steady = steady_state(schedule, target)
    ends_s = [s.end_ns / 1e9 for s in simulate_on(unroll(schedule, 20), target).spans if s.key.endswith("end")]
    assert [b - a for a, b in pairwise(ends_s)][:6] == [10.0, 12.0] * 3
    assert (ends_s[16] - ends_s[6]) / 10 == steady.period_s == 11.0
    assert (steady.cycle_steps, steady.num_steps) == (2, 8)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("semantics", ["in-backward", "exact-clip"])
def test_a_long_run_takes_as_long_as_was_said(shared: bool, semantics: str) -> None:
    training = {"max_grad_norm": 1.0} if semantics == "exact-clip" else {}
    workload = toy_workload(gradient_accumulation_steps=2, **training)
    target = toy_machine(shared=shared)
    choice = UnitPlan(params="host", grads="host", states="nvme", acts=("nvme", "host", "recompute", "keep"))
    schedule = lower(uniform_plan(workload, choice, semantics=semantics), workload, target)
    steady = steady_state(schedule, target)
    assert steady.is_periodic
    num_steps = 12
    long = simulate_on(unroll(schedule, num_steps), target)
    predicted = steady.warmup_s + num_steps * steady.period_s
    # Under shared limits the last step has them to itself, so the sum may be off by a part of one step.
    assert predicted == pytest.approx(long.duration_s, rel=0.03 if shared else 1e-4)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy(policy: str, shared: bool) -> None:
    workload, target = toy_workload(), toy_machine(shared=shared, host_bytes=200 * MIB)
    schedule = lower(decide(policy, workload, toy_machine(shared=shared)), workload, target)
    with suppress(OutOfMemory):
        assert steady_state(schedule, target).is_periodic


def test_what_has_no_successor_cannot_be_repeated() -> None:
    schedule = schedule_of([buffer("w", initial=True)], [op("a", "w", stream="gpu")])
    with pytest.raises(ScheduleError, match="'w' has no buffer that becomes it"):
        steady_state(schedule, machine("gpu"))


def test_a_schedule_without_ops_is_refused() -> None:
    with pytest.raises(ValueError, match="schedule 'none' has no ops"):
        steady_state(schedule_of([], [], name="none"), machine("gpu"))


def test_streams_that_drift_apart_are_said_not_to_repeat() -> None:
    """Nothing couples them, so the quicker runs ahead for ever: the step time is the slower one's, found as a mean."""
    ops = [op("slow", stream="gpu", work={"s": 3.0}), op("quick", stream="cpu", work={"s": 2.0})]
    schedule = schedule_of([], ops)
    steady = steady_state(schedule, machine("gpu", "cpu"))
    assert not steady.is_periodic
    assert steady.num_steps == 16
    assert steady.period_s == 3.0
    assert steady.window_s[1] <= steady.trace.duration_s


def pipeline(devices: int, packs: int, batches: int, first_pack: int = 0) -> list[Op]:
    """Packs of a second per micro-batch that go round the devices, from the one of the first pack on."""
    return [
        op(f"{k}/{m}", f"x{k}/{m}" if k else "", f"x{k + 1}/{m}", stream=f"gpu{(first_pack + k) % devices}.compute",
           work={"s": 1.0})
        for k in range(packs) for m in range(batches)
    ]  # fmt: skip


def written_by(ops: list[Op]) -> list[Buffer]:
    return [buffer(op.writes[0], tier=op.stream.split(".")[0], size_bytes=1, content="x") for op in ops]


def gpus(num: int) -> list[Tier]:
    return [Tier(name=f"gpu{d}", capacity_bytes=100) for d in range(num)]


def going_round(devices: int, packs: int, batches: int, *, goes_on: bool = True) -> Schedule:
    ops, following = pipeline(devices, packs, batches), tuple((d + packs) % devices for d in range(devices))
    next_devices = following if goes_on else ()
    return validate(schedule_of(written_by(ops), ops, *gpus(devices), next_devices=next_devices))


def devices_of(num: int) -> Machine:
    streams = [Stream(name=f"gpu{d}.compute", rates={"s": Rate.constant(1.0)}) for d in range(num)]
    tiers = [TierSpec(name=f"gpu{d}", kind="device", capacity_bytes=100) for d in range(num)]
    return Machine(name="alike", tiers=tuple(tiers), streams=tuple(streams))


@pytest.mark.parametrize(
    ("devices", "packs", "batches"), [(2, 3, 2), (2, 3, 5), (3, 4, 3), (3, 5, 4), (4, 6, 7), (8, 14, 10), (4, 8, 5)]
)
def test_steps_that_go_on_where_the_last_ended_fill_no_pipeline_anew(devices: int, packs: int, batches: int) -> None:
    """With a micro-batch for each device, all devices are always at work: packs * batches / devices seconds."""
    target = devices_of(devices)
    steady = steady_state(going_round(devices, packs, batches), target)
    assert steady.is_periodic
    assert steady.period_s == pytest.approx(packs * batches / devices, abs=1e-9)
    from_the_first = steady_state(going_round(devices, packs, batches, goes_on=False), target)
    assert from_the_first.period_s >= -(-packs // devices) * batches, "what the first device has to do"
    assert steady.period_s < from_the_first.period_s or packs % devices == 0
    fracs = busy_fracs(columns_of(going_round(devices, packs, batches)), target, steady.period_s)
    assert fracs == pytest.approx(dict.fromkeys((f"gpu{d}.compute" for d in range(devices)), 1.0))


def test_steps_that_go_round_unlike_devices_repeat_when_they_are_around() -> None:
    """A pack takes twice as long on the last device, so steps differ by where they begin: three in a cycle."""
    target, schedule = devices_of(3), going_round(3, 4, 3)
    slow = replace(target.streams[2], rates={"s": Rate.constant(0.5)})
    target = replace(target, streams=(*target.streams[:2], slow))
    steady = steady_state(schedule, target)
    assert steady.cycle_steps == 3
    assert len({round(b - a, 6) for a, b in pairwise(steady.step_ends_s)}) > 1
    assert steady.period_s == pytest.approx(step_of_long_runs_s(schedule, target))


def step_of_long_runs_s(schedule: Schedule, target: Machine) -> float:
    long, longer = (simulate_on(unroll(schedule, num_steps), target).duration_s for num_steps in (60, 120))
    return (longer - long) / 60


def test_devices_that_drift_apart_are_no_steps_that_repeat() -> None:
    """One op a step, on a slow and a quick device in turns: the quick one runs ahead, and repeats by itself."""
    ops = [op("a", stream="gpu0.compute", work={"s": 10.0})]
    schedule = schedule_of([], ops, *gpus(2), next_devices=(1, 0))
    target = devices_of(2)
    steady = steady_state(schedule, target)
    assert steady.is_periodic
    assert steady.period_s == 5.0
    quick = replace(target.streams[1], rates={"s": Rate.constant(10.0)})
    steady = steady_state(schedule, replace(target, streams=(target.streams[0], quick)))
    assert not steady.is_periodic
    assert steady.period_s == 5.0
    assert steady.window_s[0] < steady.window_s[1]


@pytest.mark.parametrize("limit", [None, 1.5])
@pytest.mark.parametrize("seed", range(12))
def test_a_long_run_of_steps_that_go_round_takes_as_long_as_was_said(seed: int, limit: float | None) -> None:
    """Ops of some seconds on three unlike devices, each after some of those before it."""
    rng, ops = np.random.default_rng(seed), list[Op]()
    for i in range(int(rng.integers(2, 9))):
        after = tuple(earlier.key for earlier in ops if rng.random() < 0.4)
        stream, work = f"gpu{rng.integers(3)}.compute", {"s": float(rng.integers(1, 5))}
        ops.append(op(f"o{i}", stream=stream, work=work, after=after))
    schedule = schedule_of([], ops, *gpus(3), next_devices=[(1, 2, 0), (1, 0, 2)][seed % 2])
    takes = {"shared": {"s": 1.0}} if limit is not None else {}
    streams = [
        replace(s, rates={"s": Rate.constant(float(rng.integers(1, 3)))}, takes=takes) for s in devices_of(3).streams
    ]
    shared = () if limit is None else (SharedLimit(name="shared", limit=limit),)
    target = replace(devices_of(3), streams=tuple(streams), shared_limits=shared)
    steady = steady_state(schedule, target)
    if (
        steady.is_periodic or limit is None
    ):  # of devices that drift apart, one leaves the limit to the others at the end
        rel = 1e-5 if steady.is_periodic else 0.02
        assert steady.period_s == pytest.approx(step_of_long_runs_s(schedule, target), rel=rel)


def test_steps_that_go_on_are_one_long_pipeline() -> None:
    """Written out by hand: the packs of three steps in one row, on one device after the other."""
    steps = [
        replace(op, key=f"s{k}/{op.key}", reads=tuple(f"s{k}/{b}" for b in op.reads), writes=(f"s{k}/{op.writes[0]}",))
        for k in range(3) for op in pipeline(3, 4, 3, first_pack=4 * k)
    ]  # fmt: skip
    one = going_round(3, 4, 3)
    long = validate(schedule_of(written_by(steps), steps, *one.tiers))
    unrolled = unroll(one, 3)
    assert unrolled.ops == long.ops
    assert {(b.name, b.tier) for b in unrolled.buffers} == {(b.name, b.tier) for b in long.buffers}
    assert simulate_on(unrolled, devices_of(3)).spans == simulate_on(long, devices_of(3)).spans
    assert unroll(unroll(one, 2), 2).ops[-1].stream == unroll(one, 4).ops[-1].stream


def test_the_compiled_engine_gives_the_spans_of_the_trace() -> None:
    workload, of = toy_workload(4), toy_machine(shared=True)
    steady = steady_of(lower(decide("zero-infinity", workload, of), workload, of), of)
    by_key = steady.trace.by_key()
    assert [span.key for span in steady.spans] == [op.key for op in steady.schedule.ops]
    assert all(by_key[span.key]._replace(alone_ns=-1) == span for span in steady.spans)


def test_steps_that_do_not_repeat_are_averaged_over_whole_rounds() -> None:
    """They are short and long in turns, and no two are alike inside: an odd number of them would favour one kind."""
    num_steps, rng = 16, np.random.default_rng(1)
    gaps_ns = np.where(np.arange(num_steps) % 2, 1_000_000, 3_000_000)
    ends_ns = np.cumsum(gaps_ns)
    inside_ns = rng.integers(100_000, 900_000, num_steps)
    start_ns, end_ns = ends_ns - inside_ns, ends_ns
    for around in (1, 2, 4):
        found = _repetition((start_ns, end_ns), num_steps, around, around, toy_machine())
        assert found["cycle_steps"] == 0
        assert found["period_s"] == pytest.approx(0.002)


def test_the_machine_that_is_asked_about_has_no_more_memory_than_it_has() -> None:
    workload, asked = toy_workload(2), toy_machine()
    schedule = lower(uniform_plan(workload, UnitPlan()), workload, asked)
    peak = steady_of(schedule, asked).peak_bytes["gpu0"]
    enough, small = (with_capacity(asked, {"gpu0": size}) for size in (peak, peak // 4))
    assert simulate_on(schedule, enough).capacity_bytes["gpu0"] == peak
    assert steady_of(schedule, enough).period_s == steady_of(schedule, asked).period_s
    for look in (simulate_on, steady_of, sensitivities, partial(vary, ops=0.1)):
        with pytest.raises(OutOfMemory, match=f"in tier 'gpu0', which has {peak // 4:,}"):
            look(schedule, small)
