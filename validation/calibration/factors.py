"""Times of computations inside a training step over their times in the profile, and what follows for a workload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.workload import Workload
from tierplan.validation.calibration.measurements import PlanMeasurement
from tierplan.validation.calibration.plans import FULL_RECOMPUTE, ON_NVME, PARTIAL_RECOMPUTE

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
    ops = [
        replace(op, work=_scaled(op.work, factors.get((op.kind, kinds.get(op.unit, "")), 1.0))) for op in schedule.ops
    ]
    return replace(schedule, ops=tuple(ops))


def workload_with_factors(workload: Workload, factors: Factors) -> Workload:
    """The profiled workload with the seconds that its computations take inside a step."""
    units = tuple(
        replace(
            u,
            forward=_scaled(u.forward, factors["forward", u.kind]),
            backward=_scaled(u.backward, factors["backward", u.kind]),
            recompute=None if u.recompute is None else _scaled(u.recompute, factors[RECOMPUTE, u.kind]),
            saved=tuple(replace(t, recompute=_scaled(t.recompute, factors[PARTIAL, u.kind])) for t in u.saved),
        )
        for u in workload.units
    )
    return replace(workload, units=units)


def _scaled(work: Mapping[str, float], factor: float) -> dict[str, float]:
    return {kind: amount * factor if kind == "s" else amount for kind, amount in work.items()}
