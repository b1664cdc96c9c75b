"""One plan's turns as figures: seconds by op at the machine's typical speed, and dispatch latency."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import NamedTuple

from tierplan.sim.schedule import Schedule
from tierplan.sim.trace import Trace
from tierplan.validation.calibration.dispatch import DispatchLatency, measure_dispatch_latency, slowdown_of
from tierplan.validation.comparison.steps import Steps, cut_steps


class MeasuredTurn(NamedTuple):
    """One turn of a plan."""

    steps: tuple[int, ...]
    """Numbers of its counted steps."""
    step_s: float
    before_s: float
    """Seconds per step of the turn before it, in which everything was in memory."""
    after_s: float
    """The same for the turn after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMeasurement:
    """What one plan's turns showed."""

    schedule: Schedule
    turns: tuple[MeasuredTurn, ...]
    op_s: Mapping[str, float]
    """Seconds of each op, by key, at the machine's typical speed."""
    dispatch: Mapping[str, DispatchLatency]

    @property
    def step_s(self) -> float:
        """Median over the turns."""
        return median(turn.step_s for turn in self.turns)


def measurement_of(
    schedule: Schedule,
    trace: Trace,
    skipped_steps: Collection[int],
    turns: Sequence[MeasuredTurn],
    typical_s: float,
    is_in_memory: bool,
) -> PlanMeasurement:
    """The measurement of a plan.

    Parameters
    ----------
    schedule, trace
        One step of the plan, and the trace of all its turns.
    skipped_steps
        Steps of the trace that are not counted.
    typical_s
        Median seconds per step of all turns in which everything was in memory.
    is_in_memory
        Whether this is that plan itself. Its slowdowns are its own durations, so these do not tell its outliers.
    """
    slowdowns = {step: (turn.before_s + turn.after_s) / 2 / typical_s for turn in turns for step in turn.steps}
    steps = middle_half(cut_steps(trace, 0, skipped_steps), {} if is_in_memory else slowdowns)
    return PlanMeasurement(
        schedule=schedule,
        turns=tuple(turns),
        op_s=_mean_op_s(schedule, steps, slowdowns),
        dispatch=measure_dispatch_latency(steps),
    )


def middle_half(steps: Steps, slowdowns: Mapping[int, float]) -> Steps:
    """Only the middle half of the steady steps, by their duration over their slowdown: without outliers."""
    durations_s = steps.durations_s
    ordered = sorted(steps.steady, key=lambda k: durations_s[k] / slowdowns.get(k, 1.0))
    num_outer = len(ordered) // 4
    return replace(steps, steady=tuple(sorted(ordered[num_outer : len(ordered) - num_outer])))


def _mean_op_s(schedule: Schedule, steps: Steps, slowdowns: Mapping[int, float]) -> dict[str, float]:
    """Mean seconds of each op. Means add up to what a stream took; medians would leave the late ones out."""
    return {
        op.key: fmean(steps.spans[k][op.key].duration_ns / slowdown_of(op.stream, slowdowns[k]) for k in steps.steady)
        / 1e9
        for op in schedule.ops
    }
