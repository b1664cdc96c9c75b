"""The comparison finds what was changed: traces of the engine, the "measured" one with known perturbations."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.validation.toy import RATES, toy_costs, toy_schedule, toy_trace
from tierplan.hwmodels.machine import Cost
from tierplan.sim.columns import unroll
from tierplan.sim.contents import split_step
from tierplan.sim.engine import simulate
from tierplan.sim.trace import Span, Trace
from tierplan.validation.comparison.compare import Comparison, Pair, compare
from tierplan.validation.comparison.steps import cut_steps

SCHEDULE = toy_schedule()
PREDICTED = toy_trace(SCHEDULE)


def as_measured(trace: Trace) -> Trace:
    """Without what only the simulator knows."""
    return replace(trace, spans=tuple(s._replace(alone_ns=-1) for s in trace.spans))


def slower(stream: str, factor: float) -> Comparison:
    rates = {**RATES, stream: RATES[stream] / factor}
    return compare(SCHEDULE, PREDICTED, as_measured(toy_trace(SCHEDULE, rates=rates)))


def test_equal_traces_have_no_difference() -> None:
    counted = replace(as_measured(PREDICTED), meta={"bytes_per_step": SCHEDULE.bytes_moved()})
    same = compare(SCHEDULE, PREDICTED, counted)
    assert same.step_error_frac == 0
    assert same.bytes_agree
    assert [t.peak_bytes.error_frac for t in same.tiers] == [0, 0, 0]
    for stream in same.streams:
        for part in ("busy_s", "input_s", "memory_s", "idle_s"):
            assert getattr(stream.predicted, part) == getattr(stream.measured, part)
        assert all(abs(seconds) < 1e-9 for seconds in stream.causes.values())
    assert all(abs(c.seconds) < 1e-9 for c in same.attribution)


def test_errors_are_signed() -> None:
    assert Pair(90, 100).error_frac == pytest.approx(-0.1)
    assert Pair(110, 100).error_frac == pytest.approx(0.1)
    assert Pair(1, None).error_frac is None
    assert Pair(0, 0).error_frac == 0
    assert Pair(1, 0).error_frac is None
    assert slower("nvme.read", 1.5).step_error_frac < -0.05


def test_step_time_is_the_median_after_warm_up() -> None:
    def spans(ends: list[int]) -> tuple[Span, ...]:
        begins = [0, *ends[:-1]]
        return tuple(
            Span(f"s{k}/op", "gpu0.compute", a, a, a, b) for k, (a, b) in enumerate(zip(begins, ends, strict=True))
        )

    trace = Trace(name="t", spans=spans([900, 1700, 1800, 1903, 2001]), memory=(), capacity_bytes={}, peak_bytes={})
    steps = cut_steps(trace, warmup_steps=2)
    assert steps.steady == (2, 3, 4)
    assert steps.step_s == pytest.approx(100e-9)
    assert steps.typical == 2
    assert cut_steps(trace).steady == steps.steady
    one = replace(trace, spans=trace.spans[:1])
    assert cut_steps(one).steady == (0,), "where nobody says how many, one is left"


def test_keys_without_a_step_are_one_step() -> None:
    one = toy_trace(SCHEDULE, 1)
    bare = replace(one, spans=tuple(s._replace(key=split_step(s.key).key) for s in one.spans))
    assert compare(SCHEDULE, bare, one).step_error_frac == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"warmup_steps": -1}, "warmup_steps is -1; give 0 or more"),
        ({"warmup_steps": 4}, "4 steps of warm-up leave nothing to compare: trace .* has 4 steps; give 3 or less"),
        ({"skipped_steps": [77]}, r"skipped_steps has 77, but trace .* has steps 0 to 3; give others"),
        ({"predicted_step_s": -1.0}, r"predicted_step_s has -1.0 s; give a finite number of seconds above 0"),
        ({"interval_s": (1.0, math.inf)}, r"interval_s has inf s; give a finite number of seconds above 0"),
    ],
)
def test_steps_and_times_that_there_are_not_are_refused(more: dict[str, Any], message: str) -> None:
    trace = toy_trace(SCHEDULE, 4)
    with pytest.raises(ValueError, match=message):
        compare(SCHEDULE, trace, trace, **more)


def test_parts_of_every_stream_add_up_to_the_step() -> None:
    """In steady state each stream's parts are the step time, and the causes are the difference of the two."""
    found = slower("nvme.write", 1.3)
    for stream in found.streams:
        assert stream.predicted.total_s == pytest.approx(found.step_s.predicted, rel=0.05), stream.stream
        difference = stream.measured.total_s - stream.predicted.total_s
        assert sum(stream.causes.values()) == pytest.approx(difference, abs=1e-9)
    for kind in found.kinds:
        parts = kind.rate_s + kind.overhead_s + kind.contention_s + kind.variation_s
        assert parts == pytest.approx(kind.measured_s - kind.predicted_s, abs=1e-9)
    difference = found.step_s.measured - found.step_s.predicted
    assert sum(c.seconds for c in found.attribution) == pytest.approx(difference, abs=1e-9)


def test_no_stream_is_busy_for_longer_than_a_step() -> None:
    """One slow step of four: the step was their median, beside which streams were busy for their mean."""
    trace = toy_trace(SCHEDULE, 6)
    late = [s._replace(end_ns=10 * s.end_ns) if s.end_ns == trace.duration_ns else s for s in trace.spans]
    found = compare(SCHEDULE, toy_trace(SCHEDULE, 6), replace(trace, spans=tuple(late)))
    assert max(s.busy_s.measured or 0.0 for s in found.streams) <= (found.step_s.measured or 0.0)


@pytest.mark.parametrize("stream", ["gpu0.compute", "host.adam"])
def test_a_slower_rate_is_named_rate(stream: str) -> None:
    found = slower(stream, 1.5)
    causes = next(s.causes for s in found.streams if s.stream == stream)
    busy = next(s.busy_s for s in found.streams if s.stream == stream)
    assert causes["rate"] == pytest.approx(busy.measured - busy.predicted, rel=0.02)
    assert causes["rate"] == pytest.approx(0.5 * busy.predicted, rel=0.02)


def test_a_fixed_time_per_op_is_named_overhead() -> None:
    """40 ms more for each parameter copy, whatever its size: sizes differ threefold, so a rate cannot explain it."""
    schedule = toy_schedule(8, gpu_bytes=2000 * 2**20)

    def change(key: str, cost: Cost) -> Cost:
        return replace(cost, latency_s=0.04) if "fetch_params" in key else cost

    found = compare(schedule, toy_trace(schedule), as_measured(toy_trace(schedule, change=change)))
    fetches = next(k for k in found.kinds if k.stream == "gpu0.h2d")
    assert fetches.num_ops == 16
    assert fetches.overhead_s == pytest.approx(16 * 0.04, rel=0.02)
    assert fetches.rate_s == pytest.approx(0, abs=0.005)


def test_contention_that_was_not_predicted_is_named_contention() -> None:
    """The drive is predicted to read and write at once at full speed; it shares its time; some ops meet."""
    schedule = toy_schedule(8, gpu_bytes=2000 * 2**20)
    rates = {**RATES, "nvme.read": 20e9, "nvme.write": 10e9}
    repeated = unroll(schedule, 8)
    free = simulate(repeated, toy_costs(repeated, rates), limits={"drive": 10.0})
    found = compare(schedule, free, as_measured(toy_trace(schedule, rates=rates)))
    read = next(k for k in found.kinds if k.stream == "nvme.read")
    assert read.measured_s > 1.1 * read.predicted_s
    assert read.contention_s > 0.7 * (read.measured_s - read.predicted_s)


def test_a_late_input_is_named_waiting_for_input() -> None:
    found = slower("nvme.read", 2.0)
    adam = next(s for s in found.streams if s.stream == "host.adam")
    difference = found.step_s.measured - found.step_s.predicted
    assert adam.causes["waiting for input"] == pytest.approx(difference, rel=0.1)
    assert adam.causes["rate"] == pytest.approx(0, abs=1e-6)


def test_a_full_tier_is_named_waiting_for_memory() -> None:
    """The same schedule, run where other ops hold memory longer: the copies wait for room, not for inputs."""
    tight = toy_schedule(6, gpu_bytes=330 * 2**20)
    found = compare(tight, toy_trace(tight), as_measured(toy_trace(tight, rates={**RATES, "gpu0.compute": 4e11})))
    h2d = next(s for s in found.streams if s.stream == "gpu0.h2d")
    assert h2d.causes["waiting for memory"] > 0.1


def test_attribution_blames_the_op_that_decides_the_step() -> None:
    found = slower("nvme.read", 1.5)
    difference = found.step_s.measured - found.step_s.predicted
    largest = max(found.attribution, key=lambda c: abs(c.seconds))
    assert largest.stream in ("nvme.read", "nvme.write")  # the slower read also holds the shared drive longer
    drive = sum(c.seconds for c in found.attribution if c.stream.startswith("nvme."))
    assert drive == pytest.approx(difference, rel=0.15)


def test_a_slower_op_off_the_critical_path_contributes_nothing() -> None:
    found = slower("gpu0.d2h", 1.3)
    copies = next(c for c in found.attribution if c.stream == "gpu0.d2h")
    assert copies.seconds == pytest.approx(0, abs=0.002)
    assert next(s.busy_s for s in found.streams if s.stream == "gpu0.d2h").error_frac == pytest.approx(1 / 1.3 - 1)


def test_noise_is_not_mistaken_for_a_cause() -> None:
    """3 % random noise on every op: the attributed seconds stay of the order of the noise."""
    draw = random.Random(7)

    def noise(key: str, cost: Cost) -> Cost:
        return replace(cost, work_s=cost.work_s * draw.lognormvariate(0, 0.03))

    found = compare(SCHEDULE, PREDICTED, as_measured(toy_trace(SCHEDULE, 9, change=noise)))
    assert abs(found.step_error_frac) < 0.03
    assert len(found.measured_steps_s) == 9
    for kind in found.kinds:
        assert abs(kind.measured_s - kind.predicted_s) < 0.06 * kind.predicted_s


def test_a_trace_of_another_schedule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lacks op '.*L4.*' in step 2 .*compare traces of the schedule"):
        compare(toy_schedule(5), PREDICTED, PREDICTED)
    with pytest.raises(ValueError, match="which the schedule has not"):
        compare(toy_schedule(3), PREDICTED, PREDICTED)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s._replace(stream="gpu0.d2h"),
            "has op 's0/.*' on stream 'gpu0.d2h', not on the schedule's, in step 0",
        ),
        (
            lambda s: s._replace(key="s0/foo") if s.key.startswith("s0/fwd/L1") else s,
            "has op 'foo', .* in step 0",
        ),
        (lambda s: s._replace(start_ns=0, end_ns=0), "has steps that take no time; every step takes some"),
    ],
)
def test_a_trace_whose_ops_were_edited_is_refused(change: Callable[[Span], Span], message: str) -> None:
    """In a warm-up step too; and steps that take no time are none."""
    edited = replace(PREDICTED, spans=tuple(map(change, PREDICTED.spans)))
    with pytest.raises(ValueError, match=f"trace .* {message}"):
        compare(SCHEDULE, PREDICTED, edited)


def test_bytes_in_a_tier_that_the_schedule_has_not_are_refused() -> None:
    edited = replace(PREDICTED, peak_bytes={**PREDICTED.peak_bytes, "foo": 1})
    with pytest.raises(ValueError, match="has bytes in tier 'foo', which the schedule has not"):
        compare(SCHEDULE, PREDICTED, edited)


def test_record_is_json_and_says_what_was_not_counted() -> None:
    found = compare(SCHEDULE, PREDICTED, as_measured(PREDICTED))
    assert not found.bytes_agree  # nobody counted
    record = json.loads(json.dumps(found.record()))
    assert record["step_error_frac"] == 0
    assert record["moved_bytes"]["nvme.read"] == {"predicted": SCHEDULE.bytes_moved()["nvme.read"], "measured": None}
    counted = replace(PREDICTED, meta={"bytes_per_step": SCHEDULE.bytes_moved()})
    assert compare(SCHEDULE, PREDICTED, counted).bytes_agree
    elsewhere = {**SCHEDULE.bytes_moved(), "gpu0.p2p.gpu1": 5.0, "gpu1.h2d": 0.0}
    found = compare(SCHEDULE, PREDICTED, replace(PREDICTED, meta={"bytes_per_step": elsewhere}))
    assert not found.bytes_agree
    assert found.moved_bytes["gpu0.p2p.gpu1"] == Pair(0, 5.0)
    assert "gpu1.h2d" not in found.moved_bytes
