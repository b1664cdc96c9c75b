"""One plan's turns as figures: seconds by op without waits for a core, how long these waits were, dispatch latency;
and times of computations inside a training step over their times in the profile, with what follows for a workload.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median

from tierplan.sim.schedule import Schedule
from tierplan.sim.trace import Trace
from tierplan.sim.workloads.workload import Workload
from tierplan.validation.calibration.dispatch import DispatchLatency, measure_dispatch_latency, middle
from tierplan.validation.calibration.plans import FULL_RECOMPUTE, ON_NVME, PARTIAL_RECOMPUTE
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


RECOMPUTE, PARTIAL = "recompute", "partial"
"""Recomputation of a whole block, and of some of its saved tensors. The latter runs other kernels."""
BLOCK = "block"

Factors = Mapping[tuple[str, str], float]
"""By kind of computation and of unit. The head's error would be every block's, were they one: a model that is predicted
has more blocks than the one that was timed, and no more heads."""


def compute_factors(profiled: Workload, measurements: Mapping[str, PlanMeasurement]) -> dict[tuple[str, str], float]:
    """Seconds of computations inside a step over those in the profile.

    Forward and backward are taken from all plans where nothing runs beside them: the same work takes 12 % more or less
    from one turn to the next, so that three times the turns count. Recomputation is compared with the same blocks'
    forward in the same plan, since the two meet the same slowdown and contention there.
    """
    kinds: dict[str, str] = {unit.name: unit.kind for unit in profiled.units}
    alone = [name for name, measured in measurements.items() if not measured.is_beside]

    def slower(names: Sequence[str], kind: str, of: str) -> float:
        timed = [
            (op.work.get("s", 0.0), measurements[name].op_s[op.key])
            for name in names
            for op in measurements[name].schedule.ops
            if op.kind == kind and kinds.get(op.unit) == of
        ]
        profiled_s, measured_s = (sum(seconds) for seconds in zip(*timed, strict=True)) if timed else (0.0, 0.0)
        return measured_s / profiled_s if profiled_s and measured_s else 1.0

    factors = {(kind, of): slower(alone, kind, of) for kind in ("forward", "backward") for of in kinds.values()}
    sources = {
        RECOMPUTE: (FULL_RECOMPUTE, ON_NVME, PARTIAL_RECOMPUTE),
        PARTIAL: (PARTIAL_RECOMPUTE, FULL_RECOMPUTE, ON_NVME),
    }
    for kind, names in sources.items():
        name = next(name for name in names if name in measurements)
        over_forward = slower([name], "recompute", BLOCK) / slower([name], "forward", BLOCK)
        factors |= {(kind, of): factors["forward", of] * over_forward for of in kinds.values()}
    return factors


def schedule_with_factors(name: str, schedule: Schedule, profiled: Workload, factors: Factors) -> Schedule:
    """The schedule of the calibration plan `name` with the seconds that its computations take inside a step."""
    kinds: dict[str, str] = {unit.name: unit.kind for unit in profiled.units}
    if name == PARTIAL_RECOMPUTE:
        factors = {**factors, **{(RECOMPUTE, of): factors[PARTIAL, of] for of in kinds.values()}}
    ops = []
    for op in schedule.ops:
        factor = factors.get((op.kind, kinds.get(op.unit, "")), 1.0)
        ops.append(replace(op, work={k: amount * factor if k == "s" else amount for k, amount in op.work.items()}))
    return replace(schedule, ops=tuple(ops))
