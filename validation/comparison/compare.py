"""Predicted against measured: signed errors, and where they come from.

`compare` takes the schedule that both executors ran and the two traces. An error is `predicted / measured - 1`: above
zero, the prediction was too slow or too large. A stream's step is made of five parts that add up to it exactly:

    busy              ops ran; of that, `contention`: how much longer they took than alone
    waiting (input)   the next op's inputs were not complete
    waiting (memory)  its memory was not granted
    overhead          the stream was free, inputs and memory were there, and the op had not begun

The difference between predicted and measured is attributed in two ways. `StreamComparison.causes` splits it on one
stream by kind of cause; `Comparison.attribution` asks the simulator what the step would have taken, had it known the
measured durations of one group of ops after the other (`tierplan.validation.comparison.causes`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, inf
from statistics import fmean

import numpy as np

from tierplan.hwmodels.names import on_first_device
from tierplan.hwmodels.values.shown import Shown
from tierplan.sim.analysis.explain import StreamTime
from tierplan.sim.schedule import Schedule
from tierplan.sim.trace import Trace
from tierplan.validation.comparison.causes import (
    Contribution,
    attribute,
    mean_stream_times,
    overlap_ns,
    split_difference,
)
from tierplan.validation.comparison.same_plan import check_same_plan
from tierplan.validation.comparison.steps import Steps, cut_predicted, cut_steps


@dataclass(frozen=True, slots=True)
class Pair:
    """One figure, predicted and measured. `measured` is None where the run did not count it."""

    predicted: float
    measured: float | None

    @property
    def error_frac(self) -> float | None:
        """`predicted / measured - 1`; None where that has no value."""
        if self.measured is None:
            return None
        if self.measured == 0:
            return 0.0 if self.predicted == 0 else None
        return self.predicted / self.measured - 1.0


def ninth_decile(errors: Sequence[float]) -> float:
    """Of sorted errors, the one that nine in ten do not exceed."""
    return errors[ceil(0.9 * len(errors)) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class KindComparison:
    """All ops of one kind on one stream, per step; what their measured time exceeds the predicted one by, split."""

    stream: str
    kind: str
    num_ops: int
    predicted_s: float
    measured_s: float
    rate_s: float
    """Because the work went at another rate than predicted."""
    overhead_s: float
    """Because each op took a fixed time more, whatever its size."""
    contention_s: float
    """Because more, or less, was lost to ops that ran beside it."""
    variation_s: float
    """What steps slower than the median add, and what the split does not explain."""

    @property
    def seconds(self) -> Pair:
        return Pair(self.predicted_s, self.measured_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamComparison:
    """One stream's step, predicted and measured."""

    stream: str
    predicted: StreamTime
    measured: StreamTime
    """Both are means of the steps."""
    busy_s: Pair
    """Medians of the steps, as the step time is."""
    causes: Mapping[str, float]
    """Seconds, measured minus predicted, by cause; they add up to the difference of the two steps on this stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierComparison:
    """The highest holding of one tier."""

    tier: str
    capacity_bytes: int
    peak_bytes: Pair


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Shown):
    """What was predicted, what was measured, and where the difference comes from."""

    name: str
    step_s: Pair
    measured_steps_s: tuple[float, ...]
    """All measured steps in order, warm-up first."""
    warmup_steps: int
    """How many of them are left out of every figure."""
    interval_s: tuple[float, float] | None
    """The predicted 90 % interval of the step time, where one was predicted."""
    streams: tuple[StreamComparison, ...]
    kinds: tuple[KindComparison, ...]
    tiers: tuple[TierComparison, ...]
    moved_bytes: Mapping[str, Pair]
    """Bytes per step by stream."""
    attribution: tuple[Contribution, ...]
    """Seconds of the step, measured minus predicted, by group of ops; they add up to the difference."""
    slowdown: float | None = None
    """Of the run: seconds of the reference work over those in the calibration; None where either was not timed."""
    step_s_at_slowdown: float | None = None
    """The prediction for a machine that is as slow as it was in the run."""

    @property
    def step_error_frac(self) -> float:
        """Signed error of the predicted step time: below zero, the run was slower than predicted."""
        error = self.step_s.error_frac
        assert error is not None, "a measured step takes time"
        return error

    @property
    def normalised_error_frac(self) -> float | None:
        """The error of the prediction for the run's slowdown: what is left of it was predicted wrongly."""
        if self.step_s_at_slowdown is None:
            return None
        return Pair(self.step_s_at_slowdown, self.step_s.measured).error_frac

    @property
    def in_interval(self) -> bool | None:
        """Whether the measured step lies in the predicted interval; None where none was predicted."""
        if self.interval_s is None or self.step_s.measured is None:
            return None
        return self.interval_s[0] <= self.step_s.measured <= self.interval_s[1]

    @property
    def deciding_stream(self) -> StreamComparison:
        """The stream that was busiest in the run: its parts explain the step best."""
        return max(self.streams, key=lambda s: s.measured.busy_s)

    @property
    def bytes_agree(self) -> bool:
        """Whether every stream moved exactly the bytes that were predicted. False where a count is missing."""
        return all(pair.predicted == pair.measured for pair in self.moved_bytes.values())

    def record(self) -> dict[str, object]:
        """The comparison as JSON values."""
        shown = ("step_error_frac", "normalised_error_frac", "in_interval", "bytes_agree")
        return {**asdict(self), **{name: getattr(self, name) for name in shown}}

    def rows(self) -> list[dict[str, object]]:
        """Seconds of each kind of op on each stream, predicted and measured."""
        return [asdict(kind) for kind in self.kinds]

    def __repr__(self) -> str:
        """One line: the whole is the report."""
        p = self.step_s
        return (
            f"<Comparison {self.name}: {p.predicted:.4g} s predicted, {p.measured:.4g} s measured, "
            f"{self.step_error_frac:+.1%}>"
        )


def compare(
    schedule: Schedule,
    predicted: Trace,
    measured: Trace,
    *,
    predicted_step_s: float | None = None,
    interval_s: tuple[float, float] | None = None,
    warmup_steps: int | None = None,
    skipped_steps: Collection[int] = (),
) -> Comparison:
    """The comparison of two traces of `schedule`, each of one step or several (keys `s<step>/<key>`).

    The measured one says what moved in its `meta["bytes_per_step"]`, if the run counted it.

    Parameters
    ----------
    predicted_step_s
        The step time in steady state, where the simulator has counted it; else the median of the predicted steps.
    interval_s
        The predicted 90 % interval of the step time.
    warmup_steps
        Steps at the beginning of both traces that are left out of every figure. If not given, two, as long as one step
        remains.
    skipped_steps
        Numbers of more measured steps that are left out of every figure: the first after each pause of a run in turns.

    Raises `ValueError` when a trace is of another plan than the schedule: its `meta` says so, or it lacks ops of the
    schedule, or has others. And for steps that it has not, warm-up that leaves none, or a time that none takes.
    """
    times_s = {"predicted_step_s": (predicted_step_s,), "interval_s": interval_s or ()}
    for name, values in times_s.items():
        if wrong := [s for s in values if s is not None and not 0 < s < inf]:
            raise ValueError(f"{name} has {wrong[0]} s; give a finite number of seconds above 0")
    steps_p, steps_m = cut_predicted(predicted, warmup_steps), cut_steps(measured, warmup_steps, skipped_steps)
    for trace, steps in ((predicted, steps_p), (measured, steps_m)):
        check_same_plan(schedule, trace)
        _check_same_ops(schedule, trace, steps)
    kinds = _compare_kinds(schedule, steps_p, steps_m)
    step_s = Pair(steps_p.step_s if predicted_step_s is None else predicted_step_s, steps_m.step_s)
    durations = steps_m.durations_s
    return Comparison(
        name=schedule.name,
        step_s=step_s,
        measured_steps_s=tuple(durations[k] for k in sorted(durations)),
        warmup_steps=min(steps_m.steady) - min(durations),
        interval_s=interval_s,
        streams=_compare_streams(schedule, steps_p, steps_m, kinds),
        kinds=kinds,
        tiers=tuple(
            TierComparison(
                tier=t.name,
                capacity_bytes=t.capacity_bytes,
                peak_bytes=Pair(predicted.peak_bytes.get(t.name, 0), measured.peak_bytes.get(t.name)),
            )
            for t in schedule.tiers
        ),
        moved_bytes=_moved_bytes(schedule, measured.meta.get("bytes_per_step")),
        attribution=attribute(schedule, steps_p.ns_by_key(), steps_m.ns_by_key(), step_s.predicted, steps_m.step_s),
    )


def _moved_bytes(schedule: Schedule, counted: object) -> dict[str, Pair]:
    """Per step by stream, also of those that moved some though the schedule does nothing there."""
    if not isinstance(counted, Mapping):
        return {stream: Pair(moved, None) for stream, moved in schedule.bytes_moved().items()}
    elsewhere = (stream for stream, moved in counted.items() if moved and stream not in schedule.streams)
    predicted = schedule.bytes_moved() | dict.fromkeys(elsewhere, 0)
    return {stream: Pair(moved, counted.get(stream, 0)) for stream, moved in predicted.items()}


def _check_same_ops(schedule: Schedule, trace: Trace, steps: Steps) -> None:
    """Ops of every step are the schedule's and on its streams; of a steady step, none is missing."""
    streams = {op.key: on_first_device(op.stream) for op in schedule.ops}  # devices may take each other's part by turns
    for k, spans in steps.spans.items():
        missing, foreign = sorted({*streams} - {*spans}) if k in steps.steady else [], sorted({*spans} - {*streams})
        elsewhere = [s for key, s in spans.items() if key in streams and on_first_device(s.stream) != streams[key]]
        if missing:
            what = f"lacks op {missing[0]!r}"
        elif foreign:
            what = f"has op {foreign[0]!r}, which the schedule has not"
        elif elsewhere:
            what = f"has op {elsewhere[0].key!r} on stream {elsewhere[0].stream!r}, not on the schedule's,"
        else:
            continue
        raise ValueError(
            f"trace {trace.name!r} {what} in step {k} ({len(missing)} missing, {len(foreign)} foreign); "
            f"compare traces of the schedule that made them (here {schedule.name!r})"
        )
    if foreign_tiers := sorted({*trace.peak_bytes} - {tier.name for tier in schedule.tiers}):
        raise ValueError(
            f"trace {trace.name!r} has bytes in tier {foreign_tiers[0]!r}, which the schedule has not; "
            f"compare traces of the schedule that made them (here {schedule.name!r})"
        )
    if steps.step_s == 0:
        raise ValueError(f"trace {trace.name!r} has steps that take no time; every step takes some")


# ---- kinds of op ----


def _compare_kinds(schedule: Schedule, steps_p: Steps, steps_m: Steps) -> tuple[KindComparison, ...]:
    groups: dict[tuple[str, str], list[str]] = {}
    for op in schedule.ops:
        groups.setdefault((op.stream, op.kind), []).append(op.key)
    duration_p, alone_p, duration_m = steps_p.ns_by_key(), steps_p.ns_by_key("alone_ns"), steps_m.ns_by_key()
    overlap_p, overlap_m = overlap_ns(steps_p), overlap_ns(steps_m)
    mean_m = steps_m.ns_by_key(over_steps=fmean)
    kinds = []
    for (stream, kind), keys in groups.items():
        predicted = np.array([duration_p[k] for k in keys])
        alone = np.array([alone_p[k] if alone_p[k] >= 0 else duration_p[k] for k in keys])
        middle = np.array([duration_m[k] for k in keys])
        beside = [name for name in schedule.streams if name != stream]
        overlaps = [
            np.array([[by_key[k].get(b, 0.0) for b in beside] for k in keys]) for by_key in (overlap_p, overlap_m)
        ]
        rate, overhead, contention = split_difference(predicted, alone, middle, *overlaps)
        total_p, total_m = float(predicted.sum()), float(sum(mean_m[k] for k in keys))
        kinds.append(
            KindComparison(
                stream=stream,
                kind=kind,
                num_ops=len(keys),
                predicted_s=total_p / 1e9,
                measured_s=total_m / 1e9,
                rate_s=rate / 1e9,
                overhead_s=overhead / 1e9,
                contention_s=contention / 1e9,
                variation_s=(total_m - total_p - rate - overhead - contention) / 1e9,
            )
        )
    return tuple(kinds)


# ---- streams ----


def _compare_streams(
    schedule: Schedule, steps_p: Steps, steps_m: Steps, kinds: Sequence[KindComparison]
) -> tuple[StreamComparison, ...]:
    times_p, times_m = mean_stream_times(steps_p), mean_stream_times(steps_m)
    busy_p, busy_m = steps_p.busy_s, steps_m.busy_s
    streams = []
    for stream in schedule.streams:
        p, m = times_p[stream], times_m[stream]
        here = [k for k in kinds if k.stream == stream]
        causes = {
            "rate": sum(k.rate_s for k in here),
            "contention": sum(k.contention_s for k in here),
            "overhead": m.idle_s - p.idle_s + sum(k.overhead_s for k in here),
            "waiting for input": m.input_s - p.input_s,
            "waiting for memory": m.memory_s - p.memory_s,
        }
        causes["variation"] = m.total_s - p.total_s - sum(causes.values())
        busy_s = Pair(busy_p[stream], busy_m[stream])
        streams.append(StreamComparison(stream=stream, predicted=p, measured=m, busy_s=busy_s, causes=causes))
    return tuple(streams)
