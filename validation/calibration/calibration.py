"""The outcome of a calibration run: what a machine does inside a training step, over what its description says.

It knows nothing of the configurations that are to be predicted. How far predictions from it are off is tested on its
own plans: each plan's step is predicted from the turns of the other plans alone (`Calibration.checks`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from math import exp, hypot, log, sqrt
from statistics import median
from typing import get_args, get_type_hints

from tierplan.hwmodels.machine import Machine, PredictionBasis, Stream
from tierplan.hwmodels.names import COMPUTE, compute, on_first_device, parse_stream
from tierplan.hwmodels.scaling import with_ample_memory, with_capacity, with_demand, with_rate_factors
from tierplan.hwmodels.values.records import Count, NotNegative, Positive, Whole, load_record, shown
from tierplan.sim.analysis.explain import stream_times
from tierplan.sim.analysis.steady import steady_state
from tierplan.sim.digest import digest
from tierplan.sim.output.text import columns, format_error, format_s
from tierplan.sim.schedule import Schedule
from tierplan.sim.trace import write_atomically
from tierplan.sim.workloads.models import SIZES
from tierplan.sim.workloads.workload import Training, Unit, Workload, first_alike
from tierplan.validation.calibration.dispatch import DispatchLatency, mean_dispatch_latency, slowdown_in, steady_at
from tierplan.validation.calibration.measurements import (
    PARTIAL,
    RECOMPUTE,
    Factors,
    PlanMeasurement,
    compute_factors,
    schedule_with_factors,
    with_typical_stretch,
)
from tierplan.validation.calibration.plans import IN_MEMORY
from tierplan.validation.calibration.rates import (
    fit_drive_contention,
    fit_rates,
    with_drive_contention,
    without_compute_latency,
)

FORMAT, VERSION = "tierplan-calibration", 6
PRIOR_SPREAD, NUM_PRIOR = 0.04, 30
"""Of predictions from calibrations, and how many checks that weighs as much as: checks say little of how far off a
calibration's predictions are. Learnt from 48 rows of four models, in a quiet hour and beside another job: 0.03 to 0.04
that weigh as much as 20 to 100 checks make their errors likeliest."""
LEAST_FRAC = 0.01
"""Of a unit's forward: added to every modelled time that a measured one is divided by, since some are 0."""


class CalibrationError(ValueError):
    """A file that is no calibration, or one that does not suit what is asked; says which, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFit:
    """Seconds of a unit's computations inside a step over what the machine's description says of them."""

    forward: Positive
    backward: NotNegative
    recompute: NotNegative
    saved: tuple[NotNegative, ...]
    """By saved tensor."""
    spread: NotNegative


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFit:
    """A stream inside a step over what the machine's description says of it."""

    latency_s: NotNegative
    beside_s: NotNegative
    wake_s: NotNegative
    rates: Mapping[str, Positive]
    """Factors by kind of work."""
    demand: NotNegative
    """Factor on what it takes of the limits of computation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a calibration run gave, and what it was of."""

    model: str
    """The model that is to be predicted."""
    config: Mapping[str, object]
    """Of the calibration model."""
    training: Training
    units: Mapping[str, UnitFit]
    """By kind of unit."""
    streams: Mapping[str, StreamFit]
    drive_contention: Positive
    """Factor on what reads and writes take of limits that drives alone share."""
    in_memory_step_s: Positive
    """Predicted seconds per step of the calibration model with everything in memory, at a slowdown of 1."""
    measured_step_s: Mapping[str, Positive]
    """By plan, at the typical slowdown."""
    checks: Mapping[str, Positive] = field(default_factory=dict)
    """By plan: its step as predicted from the other plans' turns, over the measured one."""
    slowdowns: tuple[Positive, ...] = ()
    """Of all turns: seconds per step over the plan's median."""
    reference_s: tuple[NotNegative, NotNegative] = (0.0, 0.0)
    """Of the reference work of `tierplan.runtime.measure`: where no other stream works, and beside others."""
    stretch: tuple[Mapping[str, Positive], Mapping[str, Positive]] = ({}, {})
    """By stream: seconds of ops over those in which they had a core, typically; alone, and beside other streams."""
    machine: str = ""
    machine_sha256: str = ""
    """Of the machine as it was described, whatever its capacities."""
    num_threads: Whole = 0
    num_ranks: Count = 1
    """Processes that trained side by side on one CPU, of which this is one."""
    versions: Mapping[str, str] = field(default_factory=dict)
    when: str = ""

    @property
    def half_width(self) -> float:
        """Of the 90 % interval of a prediction, as a logarithm: by the checks, and by how slowdowns scattered."""
        checked = interval_half_width(tuple(self.checks.values()))
        return hypot(checked, scatter_half_width(self.slowdowns, len(self.measured_step_s)))

    def on(self, machine: Machine, basis: str = "calibrated here", half_width: float | None = None) -> Machine:
        """The machine as it is inside a step, all devices like the first. Computations have no latency: their seconds
        contain it."""
        streams = []
        for s in with_drive_contention(without_compute_latency(machine), self.drive_contention).streams:
            name = parse_stream(s.name)
            if fit := self.streams.get(on_first_device(s.name)):
                s = with_rate_factors(s, fit.rates)
                if not name.is_compute:
                    s = with_demand(s, machine.stream(compute(name.device or 0)).takes, fit.demand)
                s = replace(s, latency_s=fit.latency_s, beside_s=fit.beside_s, wake_s=fit.wake_s)
            streams.append(s)
        width = self.half_width if half_width is None else half_width
        rests_on = PredictionBasis(basis, width, self.reference_s, self.num_threads, self.stretch)
        return replace(machine, streams=tuple(streams), basis=rests_on)

    def timed(self, workload: Workload, machine: Machine) -> Workload:
        """The workload with the seconds of its computations inside a step; `machine` is as it was described.

        They are exact for units like those of the calibration model, and carried over in proportion to others.
        """
        firsts = first_alike(workload.units)
        timed = {k: _timed(workload.units[k], self.units[workload.units[k].kind], machine) for k in set(firsts)}
        units = [replace(timed[k], name=unit.name) for k, unit in zip(firsts, workload.units, strict=True)]
        return replace(workload, units=tuple(units))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the calibration, replacing the file atomically."""
        write_atomically(path, json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Calibration:
        """Reads what `save` wrote. Raises `CalibrationError`."""
        made_by = "a calibration as `tierplan calibrate` writes it"
        found = load_record(cls, path, format=FORMAT, version=VERSION, made_by=made_by, error=CalibrationError)
        if wrong := found._contradiction():
            raise CalibrationError(f"{path} is not {made_by}: {wrong}")
        return found

    def _contradiction(self) -> str:
        """What no calibration run gives, though each value alone may be; empty where there is nothing of the kind."""
        kinds = get_args(get_type_hints(Unit)["kind"])
        if {*self.units} != {*kinds}:
            return f"units has {shown(sorted(self.units))}; it must have {', '.join(kinds)}, and no others"
        for kind, unit in self.units.items():
            if not (unit.backward or self.training.lora or self.training.freeze):
                return f"units[{kind!r}].backward is 0; where all is trained, it must be above 0"
            if any(unit.saved) and not unit.recompute:
                return f"units[{kind!r}].recompute is 0; where saved tensors take time, it must be above 0"
        (depths,) = (names for names in SIZES if "n_layer" in names)
        for name in depths:
            if (depth := self.config.get(name)) is not None and (type(depth) is not int or depth < 1):
                return f"config.{name} is {shown(depth)}; it must be a whole number >= 1"
        if unknown := sorted({*self.checks} - {*self.measured_step_s}):
            return (
                f"checks has plan {unknown[0]!r}; it must be one of measured_step_s: {shown([*self.measured_step_s])}"
            )
        if not 0 < len(self.measured_step_s) <= len(self.slowdowns):
            return (
                f"measured_step_s has {len(self.measured_step_s)} plans and slowdowns {len(self.slowdowns)} turns; "
                "there must be a plan, and a turn or more of each"
            )
        return ""


def machine_sha256(machine: Machine) -> str:
    """The fingerprint of a machine's streams and limits, whatever its capacities and its name."""
    return digest(replace(machine, name="", tiers=()))


def calibrate(
    modelled: Workload,
    profiled: Workload,
    machine: Machine,
    measurements: Mapping[str, PlanMeasurement],
) -> Calibration:
    """Fits a calibration to the measurements of all plans (`measurement_of`) by name, and checks it on each plan.

    The calibration model's workload is `modelled` before and `profiled` after its units were timed; the machine is as
    it was described.
    """
    measurements, typical = with_typical_stretch(measurements)
    calibration, _ = _fit(modelled, profiled, machine, measurements)
    checks = {}
    for name, checked in measurements.items():
        if name == IN_MEMORY:
            continue
        others = {other: m for other, m in measurements.items() if other != name}
        without, factors = _fit(modelled, profiled, machine, others, calibration.drive_contention)
        schedule = schedule_with_factors(name, checked.schedule, profiled, factors)
        fitted = _with_capacities_of(schedule, without.on(machine))
        # as long as its threads waited for cores in its own turns
        steady = steady_state(schedule, fitted)
        waited = slowdown_in(1.0, typical, checked.stretch, stream_times(steady.trace, steady.window_s))
        checks[name] = steady_at(schedule, fitted, waited).period_s / checked.step_s
    measured_s = {name: m.step_s for name, m in measurements.items()}
    slowdowns = tuple(s / m.step_s for m in measurements.values() for s in m.turns_s)
    return replace(calibration, checks=checks, slowdowns=slowdowns, measured_step_s=measured_s, stretch=typical)


def _fit(
    modelled: Workload,
    profiled: Workload,
    machine: Machine,
    measurements: Mapping[str, PlanMeasurement],
    drive_contention: float | None = None,
) -> tuple[Calibration, Factors]:
    """The calibration without checks, and the factors of computations; `drive_contention` if it is known."""
    factors = compute_factors(profiled, measurements)
    schedules = {name: schedule_with_factors(name, m.schedule, profiled, factors) for name, m in measurements.items()}
    described = with_ample_memory(without_compute_latency(machine))
    measured = [(schedules[name], m.op_s) for name, m in measurements.items()]
    if drive_contention is None:
        drive_contention = fit_drive_contention(described, measured)
    fitted = fit_rates(described, measured, drive_contention=drive_contention)
    beside = mean_dispatch_latency([m.dispatch for m in measurements.values() if m.is_beside])
    alone = mean_dispatch_latency([m.dispatch for m in measurements.values() if not m.is_beside])
    units: dict[str, UnitFit] = {}
    for unit, timed in zip(modelled.units, profiled.units, strict=True):
        if unit.kind not in units:
            units[unit.kind] = _unit_fit(unit, timed, factors, described)
    calibration = Calibration(
        model=modelled.name,
        config=modelled.config,
        training=modelled.training,
        units=units,
        streams={
            s.name: _stream_fit(s, described, fitted, beside.get(s.name), alone.get(s.name)) for s in described.streams
        },
        drive_contention=drive_contention,
        in_memory_step_s=1.0,
        measured_step_s={},
    )
    in_memory = schedules[IN_MEMORY]
    step_s = steady_state(in_memory, _with_capacities_of(in_memory, calibration.on(machine))).period_s
    return replace(calibration, in_memory_step_s=step_s), factors


def _stream_fit(
    stream: Stream, described: Machine, fitted: Machine, beside: DispatchLatency | None, alone: DispatchLatency | None
) -> StreamFit:
    now, shared = fitted.stream(stream.name), described.stream(COMPUTE).takes
    rates = {kind: now.rates[kind].points[0][1] / rate.points[0][1] for kind, rate in stream.rates.items()}
    demands = [
        now.takes[limit][kind] * rates.get(kind, 1.0) / weight
        for limit in shared
        for kind, weight in stream.takes.get(limit, {}).items()
        if weight
    ]
    several = beside or DispatchLatency()
    alone_s = several.after_op_s if alone is None else min(alone.after_op_s, several.after_op_s or alone.after_op_s)
    return StreamFit(
        latency_s=now.latency_s + alone_s,
        beside_s=max(0.0, several.after_op_s - alone_s),
        wake_s=max(0.0, several.after_input_s - several.after_op_s),
        rates=rates,
        demand=1.0 if stream.name == COMPUTE or not demands else demands[0],
    )


def _unit_fit(unit: Unit, profiled: Unit, factors: Factors, described: Machine) -> UnitFit:
    again = (RECOMPUTE, profiled.recompute) if profiled.recompute else ("forward", profiled.forward)
    timed = [("forward", profiled.forward), ("backward", profiled.backward), again]
    timed += [(PARTIAL, t.recompute) for t in profiled.saved]
    forward, backward, recompute, *saved = (
        work.get("s", 0.0) * factors[kind, unit.kind] / modelled_s
        for (kind, work), modelled_s in zip(timed, _modelled_s(unit, described), strict=True)
    )
    return UnitFit(forward=forward, backward=backward, recompute=recompute, saved=tuple(saved), spread=profiled.spread)


def _modelled_s(unit: Unit, machine: Machine) -> list[float]:
    """Seconds by the machine's description of forward, backward, recomputation and each saved tensor's; none is 0."""
    forward_s = machine.cost(COMPUTE, unit.forward).work_s or 1e-6
    others = (unit.backward, unit.recompute or unit.forward, *(t.recompute for t in unit.saved))
    return [forward_s, *(machine.cost(COMPUTE, work).work_s + LEAST_FRAC * forward_s for work in others)]


def _timed(unit: Unit, fit: UnitFit, machine: Machine) -> Unit:
    forward_s, backward_s, recompute_s, *saved_s = _modelled_s(unit, machine)
    factors = fit.saved if len(fit.saved) == len(unit.saved) else (fit.recompute,) * len(unit.saved)
    saved = zip(unit.saved, factors, saved_s, strict=True)
    return replace(
        unit,
        forward={"s": fit.forward * forward_s},
        backward={"s": fit.backward * backward_s},
        recompute={"s": fit.recompute * recompute_s} if unit.saved else None,
        saved=tuple(replace(t, recompute={"s": factor * s}) for t, factor, s in saved),
        common=(),
        spread=fit.spread,
    )


def _with_capacities_of(schedule: Schedule, machine: Machine) -> Machine:
    return with_capacity(machine, {t.name: t.capacity_bytes for t in schedule.tiers})


def calibration_lines(calibration: Calibration) -> list[str]:
    """What was found, for people."""
    low, high = exp(-calibration.half_width) - 1, exp(calibration.half_width) - 1
    rows = [("plan", "measured step", "predicted from the others")]
    for name, measured_s in calibration.measured_step_s.items():
        check = calibration.checks.get(name)
        rows.append((name, format_s(measured_s), "" if check is None else format_error(check - 1.0)))
    slowest, quickest = max(calibration.slowdowns), min(calibration.slowdowns)
    return [
        *columns(rows, right=(1, 2)),
        f"steps of one plan took {quickest:.2f} to {slowest:.2f} times their median",
        f"90 % interval of a prediction: {100 * low:+.0f} % to {100 * high:+.0f} %",
    ]


def interval_half_width(checks: Sequence[float]) -> float:
    """Half the width of the 90 % interval, as a logarithm, when predictions were off by the factors `checks`.

    By their median, as it is of normal errors: a plan without a like among the others says what extrapolating costs,
    and no user's plan is without a like among all of them. (By their mean square, all of 24 steps lay within.)
    """
    spread = 1.4826 * median(abs(log(x)) for x in checks) if checks else 0.0
    num = len(checks) + NUM_PRIOR
    return _quantile(num) * sqrt((len(checks) * spread**2 + NUM_PRIOR * PRIOR_SPREAD**2) / num)


def scatter_half_width(slowdowns: Sequence[float], num_plans: int) -> float:
    """Half the width of the 90 % interval of one more turn, as a logarithm, by the turns of `num_plans` plans.

    Each plan's turns are over their own median, so each plan costs one of them: two turns of a plan scatter around
    their middle by less than they would around the truth, and say little of how far the next one is off. By the median
    difference of any two turns, as it is of normal ones (Shamos): one turn in which the machine paused says little.
    """
    num, num_free = len(slowdowns), len(slowdowns) - num_plans
    if num_free < 1:
        return 0.0
    spread = median(abs(log(a / b)) for a, b in combinations(slowdowns, 2)) / 0.9539
    return _quantile(num_free) * spread * sqrt(num / num_free * (1 + num_plans / num))


def _quantile(num_free: int) -> float:
    """Of Student's distribution: nineteen in twenty are less."""
    from scipy.special import stdtrit  # which all that ask for a machine would import

    return float(stdtrit(num_free, 0.95))
