"""What predictions of a campaign are made from: the outcome of a calibration run.

It knows nothing of the configurations that are to be predicted. How far predictions from it are off is tested on its
own plans: each plan's step is predicted from the turns of the other plans alone (`Calibration.checks`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import exp, log, sqrt
from statistics import fmean, median

from scipy.stats import t as student

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.scaling import with_capacity
from tierplan.sim.analysis.steady import SteadyState, steady_state
from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.workload import Workload
from tierplan.validation.calibration.dispatch import DispatchLatency, mean_dispatch_latency, simulate_with_dispatch
from tierplan.validation.calibration.factors import compute_factors, schedule_with_factors, workload_with_factors
from tierplan.validation.calibration.measurements import PlanMeasurement
from tierplan.validation.calibration.plans import IN_MEMORY
from tierplan.validation.calibration.rates import fit_rates

LEAST_SPREAD = 0.03
"""Relative, of a prediction: a handful of checks does not show that predictions are better than that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a calibration run gave."""

    workload: Workload
    """The calibration model, with the seconds of its computations inside a step."""
    machine: Machine
    """With the rates of its streams inside a step. Computations have no latency: it is in their seconds."""
    dispatch: Mapping[str, DispatchLatency]
    """By stream, where several streams work."""
    dispatch_alone: Mapping[str, DispatchLatency]
    """By stream, where nothing runs beside computation, so that no thread waits for a core."""
    in_memory_step_s: float
    """Predicted seconds per step of the calibration model with everything in memory, at a slowdown of 1."""
    checks: Mapping[str, float]
    """By plan: its step as predicted from the other plans' turns, over the measured one."""
    slowdowns: tuple[float, ...]
    """Of all turns in memory: seconds per step over their median."""

    def step_s(self, schedule: Schedule, machine: Machine, slowdown: float = 1.0) -> float:
        """Predicted seconds per step; `machine` is this calibration's, with other capacities."""
        return self.steady(schedule, machine, slowdown).period_s

    def steady(self, schedule: Schedule, machine: Machine, slowdown: float = 1.0) -> SteadyState:
        """The whole steady state of which `step_s` is the period."""
        dispatch = self.dispatch if len(schedule.streams) > 1 else self.dispatch_alone
        simulate = partial(simulate_with_dispatch, dispatch=dispatch, slowdown=slowdown)
        return steady_state(schedule, machine, simulate=simulate)

    def record(self) -> dict[str, object]:
        """The calibration as JSON values."""
        return {
            "units": {u.name: {"forward": u.forward, "backward": u.backward, "recompute": u.recompute,
                               "saved_tensors": [t.recompute.get("s", 0.0) for t in u.saved]}
                      for u in (self.workload.units[0], self.workload.units[1], self.workload.units[-1])},
            "rates": {f"{s.name} {kind}": list(rate.points) for s in self.machine.streams
                      for kind, rate in s.rates.items()},
            "dispatch_latency_s": {stream: list(latency) for stream, latency in self.dispatch.items()},
            "dispatch_latency_alone_s": {stream: list(latency) for stream, latency in self.dispatch_alone.items()},
            "in_memory_step_s": self.in_memory_step_s,
            "checks": dict(self.checks),
            "slowdowns": list(self.slowdowns),
        }  # fmt: skip


def calibrate(
    workload: Workload, machine: Machine, measurements: Mapping[str, PlanMeasurement], slowdowns: tuple[float, ...] = ()
) -> Calibration:
    """Fits a calibration to the measurements of all plans, and checks it on each plan.

    Parameters
    ----------
    workload
        The calibration model as it was profiled.
    machine
        As it was measured, without latency of computations.
    measurements
        By name of the plan; `plans.IN_MEMORY` must be there.
    slowdowns
        Of all turns in memory, for the record.
    """
    calibration, _ = _fit(workload, machine, measurements)
    checks = {}
    for name, checked in measurements.items():
        if name == IN_MEMORY:
            continue
        others = {other: m for other, m in measurements.items() if other != name}
        without, factors = _fit(workload, machine, others)
        schedule = schedule_with_factors(name, checked.schedule, factors)
        capacities = _with_capacities_of(schedule, without.machine)
        predicted_s = [
            without.step_s(schedule, capacities, turn.before_s / without.in_memory_step_s) for turn in checked.turns
        ]
        checks[name] = median(predicted_s) / checked.step_s
    return replace(calibration, checks=checks, slowdowns=slowdowns)


def _fit(
    workload: Workload, machine: Machine, measurements: Mapping[str, PlanMeasurement]
) -> tuple[Calibration, dict[str, float]]:
    """The calibration without checks, and the factors of computations."""
    factors = compute_factors(measurements)
    schedules = {name: schedule_with_factors(name, m.schedule, factors) for name, m in measurements.items()}
    fitted = fit_rates(machine, [(schedules[name], m.op_s) for name, m in measurements.items()])
    several = [m.dispatch for m in measurements.values() if len(m.schedule.streams) > 1]
    alone = [m.dispatch for m in measurements.values() if len(m.schedule.streams) == 1]
    calibration = Calibration(
        workload=workload_with_factors(workload, factors),
        machine=fitted,
        dispatch=mean_dispatch_latency(several),
        dispatch_alone=mean_dispatch_latency(alone),
        in_memory_step_s=1.0,
        checks={},
        slowdowns=(),
    )
    in_memory = schedules[IN_MEMORY]
    step_s = calibration.step_s(in_memory, _with_capacities_of(in_memory, fitted))
    return replace(calibration, in_memory_step_s=step_s), factors


def _with_capacities_of(schedule: Schedule, machine: Machine) -> Machine:
    return with_capacity(machine, {t.name: t.capacity_bytes for t in schedule.tiers})


def interval_half_width(checks: Sequence[float]) -> float:
    """Half the width of the 90 % interval, as a logarithm, when predictions were off by the factors `checks`."""
    spread = sqrt(fmean(log(x) ** 2 for x in checks)) if checks else LEAST_SPREAD
    return float(student.ppf(0.95, max(2, len(checks)))) * max(spread, LEAST_SPREAD)


def interval_around(predicted_s: float, half_width: float) -> tuple[float, float]:
    """From `exp(-half_width)` to `exp(half_width)` times the prediction."""
    return predicted_s * exp(-half_width), predicted_s * exp(half_width)
