"""Times of computations inside a training step over their times in the profile, and what follows for a workload."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.workload import Workload
from tierplan.validation.calibration.measurements import PlanMeasurement
from tierplan.validation.calibration.plans import FULL_RECOMPUTE, IN_MEMORY, ON_NVME, PARTIAL_RECOMPUTE

RECOMPUTE, PARTIAL = "recompute", "partial"
"""Recomputation of a whole block, and of some of its saved tensors. The latter runs other kernels."""


def compute_factors(measurements: Mapping[str, PlanMeasurement]) -> dict[str, float]:
    """By kind of computation: its seconds inside a step over those in the profile.

    Forward and backward are taken from the plan in memory, where nothing runs beside them. Recomputation is compared
    with forward in the same plan, since the two meet the same slowdown and contention there.
    """

    def slower(name: str, kind: str) -> float:
        ops = [op for op in measurements[name].schedule.ops if op.kind == kind]
        profiled_s = sum(op.work.get("s", 0.0) for op in ops)
        measured_s = sum(measurements[name].op_s[op.key] for op in ops)
        return measured_s / profiled_s if profiled_s and measured_s else 1.0

    factors = {kind: slower(IN_MEMORY, kind) for kind in ("forward", "backward")}
    sources = {
        RECOMPUTE: (FULL_RECOMPUTE, ON_NVME, PARTIAL_RECOMPUTE),
        PARTIAL: (PARTIAL_RECOMPUTE, FULL_RECOMPUTE, ON_NVME),
    }
    for kind, names in sources.items():
        name = next(name for name in names if name in measurements)
        factors[kind] = factors["forward"] * slower(name, "recompute") / slower(name, "forward")
    return factors


def schedule_with_factors(name: str, schedule: Schedule, factors: Mapping[str, float]) -> Schedule:
    """The schedule of the calibration plan `name` with the seconds that its computations take inside a step."""
    if name == PARTIAL_RECOMPUTE:
        factors = {**factors, RECOMPUTE: factors[PARTIAL]}
    ops = [replace(op, work=_scaled(op.work, factors.get(op.kind, 1.0))) for op in schedule.ops]
    return replace(schedule, ops=tuple(ops))


def workload_with_factors(workload: Workload, factors: Mapping[str, float]) -> Workload:
    """The profiled workload with the seconds that its computations take inside a step."""
    units = tuple(
        replace(
            u,
            forward=_scaled(u.forward, factors["forward"]),
            backward=_scaled(u.backward, factors["backward"]),
            recompute=None if u.recompute is None else _scaled(u.recompute, factors[RECOMPUTE]),
            saved=tuple(replace(t, recompute=_scaled(t.recompute, factors[PARTIAL])) for t in u.saved),
        )
        for u in workload.units
    )
    return replace(workload, units=units)


def _scaled(work: Mapping[str, float], factor: float) -> dict[str, float]:
    return {kind: amount * factor if kind == "s" else amount for kind, amount in work.items()}
