"""One plan's turns as figures: seconds by op without waits for a core, how long these waits were, dispatch latency."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from tierplan.sim.schedule import Schedule
from tierplan.sim.trace import Trace
from tierplan.validation.calibration.dispatch import DispatchLatency, measure_dispatch_latency, middle
from tierplan.validation.comparison.steps import Steps, cut_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMeasurement:
    """What one plan's turns showed."""

    schedule: Schedule
    turns_s: tuple[float, ...]
    """Seconds per step of each turn."""
    op_s: Mapping[str, float]
    """Seconds of each op, by key; without waits for a core until `with_typical_stretch`."""
    dispatch: Mapping[str, DispatchLatency]
    stretch: Mapping[str, float] = field(default_factory=dict)
    """By stream, as `Steps.stretch`."""

    @property
    def is_beside(self) -> bool:
        """Whether computation runs beside other streams."""
        return len(self.schedule.streams) > 1

    @property
    def step_s(self) -> float:
        """Median over the turns."""
        return median(self.turns_s)


def measurement_of(
    schedule: Schedule, trace: Trace, skipped_steps: Collection[int], turns_s: Sequence[float]
) -> PlanMeasurement:
    """The measurement of a plan, from the trace of all its turns; `skipped_steps` of it are not counted.

    Means of ops add up to what a stream took; medians would leave the late ones out.
    """
    steps = middle_half(cut_steps(trace, 0, skipped_steps))
    worked_ns = {op.key: [steps.spans[k][op.key].worked_ns for k in steps.steady] for op in schedule.ops}
    return PlanMeasurement(
        schedule=schedule,
        turns_s=tuple(turns_s),
        op_s={key: fmean(ns) / 1e9 for key, ns in worked_ns.items()},
        dispatch=measure_dispatch_latency(steps),
        stretch=steps.stretch,
    )


def with_typical_stretch(
    measured: Mapping[str, PlanMeasurement],
) -> tuple[dict[str, PlanMeasurement], tuple[dict[str, float], dict[str, float]]]:
    """The measurements with seconds of ops as they are where cores are as busy as they typically were, and how much
    longer that makes the ops of each stream: the mean over the plans of one stream, and over those of several, so that
    only work tells them apart. A stream alone has a core almost always, and hardly waits."""
    alone, beside = (
        _mean_stretch([m for m in measured.values() if m.is_beside is several]) for several in (False, True)
    )
    stretched = {}
    for name, m in measured.items():
        typical = beside if m.is_beside else alone
        op_s = {op.key: m.op_s[op.key] * typical.get(op.stream, 1.0) for op in m.schedule.ops}
        stretched[name] = replace(m, op_s=op_s)
    return stretched, (alone, beside)


def _mean_stretch(measured: Sequence[PlanMeasurement]) -> dict[str, float]:
    streams = dict.fromkeys(stream for m in measured for stream in m.stretch)
    return {name: fmean(m.stretch[name] for m in measured if name in m.stretch) for name in streams}


def middle_half(steps: Steps) -> Steps:
    """Only the middle half of the steady steps, by their duration: without outliers."""
    return replace(steps, steady=tuple(sorted(middle(sorted(steps.steady, key=steps.durations_s.__getitem__)))))
