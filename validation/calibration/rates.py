"""Rates, latencies and contention of streams inside a training step, fitted to the measured seconds of ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log
from statistics import fmean
from typing import NamedTuple

import numpy as np

from tierplan.hwmodels.machine import Machine, Stream
from tierplan.hwmodels.names import COMPUTE, parse_stream
from tierplan.hwmodels.scaling import with_demand, with_rate_factors
from tierplan.sim.columns import unroll
from tierplan.sim.pricing import simulate_on
from tierplan.sim.schedule import Schedule
from tierplan.validation.comparison.steps import cut_predicted

COMPUTATIONS = ("forward", "backward", "recompute")
"""Kinds of op whose seconds are known from a profile."""
NUM_ROUNDS = 6
"""Rates and contention depend on each other, so they are fitted in turn."""
RATE_FACTOR_LIMIT = 10.0
DRIVE_FACTORS = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0)
"""On what reads and writes take of what they share; between two of them a step changes by a few percent."""
WORTH_A_FACTOR = 0.98
"""Less than this part of the misfit has to remain, for another factor to count."""
LEAST_WORK_FRAC = 0.05
"""Of the mean work of a stream's ops: shorter ops weigh no more than one of this length."""
NUM_FITS, LEAST_OUTLIER = 20, 0.1
"""Times that a stream is fitted again without its outliers: ops that are off by more than this part."""
CONTENTION_FACTOR_LIMIT = 6.0
LEAST_CONTENTION_FRAC = 0.002
"""Contention is fitted where it is predicted to be at least this part of computation."""


def without_compute_latency(machine: Machine) -> Machine:
    """The machine whose computations have no latency: where their seconds are measured, these contain it. Nor has any
    stream what it pays beside others: the fitted latency contains that."""
    plain = (replace(s, beside_s=0.0, wake_s=0.0) for s in machine.streams)
    streams = tuple(replace(s, latency_s=0.0) if parse_stream(s.name).is_compute else s for s in plain)
    return replace(machine, streams=streams)


def fit_drive_contention(machine: Machine, measured: Sequence[tuple[Schedule, Mapping[str, float]]]) -> float:
    """How much more reads and writes take of what they share than the machine's description says: of `DRIVE_FACTORS`
    the one with which, the rates fitted, the copies of each schedule to and from drives last as long as measured.

    A rate says how long they take in all schedules together; this, in which of them reads and writes meet.
    """

    def misfit(factor: float) -> float:
        fitted = fit_rates(machine, measured, drive_contention=factor)
        return sum(
            seconds[0] * abs(log(seconds[1] / seconds[0]))
            for schedule, op_s in measured
            for seconds in _seconds_on_drives(schedule, op_s, fitted).values()
            if min(seconds) > 0
        )

    at = DRIVE_FACTORS.index(1.0)
    best, least = 1.0, misfit(1.0) * WORTH_A_FACTOR
    for ahead in (DRIVE_FACTORS[at + 1 :], DRIVE_FACTORS[:at][::-1]):
        for factor in ahead:
            if (found := misfit(factor)) >= least:
                break
            best, least = factor, found * WORTH_A_FACTOR
        if best != 1.0:
            break
    return best


def _seconds_on_drives(
    schedule: Schedule, op_s: Mapping[str, float], machine: Machine
) -> dict[str, tuple[float, float]]:
    """By stream of the drives: seconds of its ops in a step, measured and predicted."""
    predicted_ns = cut_predicted(simulate_on(unroll(schedule, 3), machine)).ns_by_key()
    ops = {name: [op.key for op in schedule.ops if op.stream == name] for name in schedule.streams}
    return {
        name: (sum(op_s[key] for key in keys), sum(predicted_ns[key] for key in keys) / 1e9)
        for name, keys in ops.items()
        if parse_stream(name).is_drive
    }


def fit_rates(
    machine: Machine, measured: Sequence[tuple[Schedule, Mapping[str, float]]], *, drive_contention: float = 1.0
) -> Machine:
    """The machine on which simulated ops take as long as the measured ones, by key, summed over all schedules.

    Each stream gets a latency, and a factor on its rate for each kind of work. Computations keep theirs: their seconds
    are in the schedule (work `s`). What a stream takes of a shared limit stays the same fraction of the limit, except
    for two factors: `drive_contention` (see `fit_drive_contention`), and one on what all other streams take of the
    limits of computation. That is chosen such that computation loses as much time to them as was measured.
    """
    machine = with_drive_contention(machine, drive_contention)
    unrolled = [unroll(schedule, 3) for schedule, _ in measured]
    latency_s = machine.stream(COMPUTE).latency_s
    computations = [
        (op, op_s)
        for schedule, op_s in measured
        for op in schedule.ops
        if op.kind in COMPUTATIONS and len(schedule.streams) > 1
    ]
    alone_s = sum(op.work.get("s", 0.0) + latency_s for op, _ in computations)
    measured_contention_s = sum(op_s[op.key] for op, op_s in computations) - alone_s
    contention = 1.0
    for _ in range(NUM_ROUNDS):
        samples: dict[str, list[_Sample]] = {}
        predicted_contention_s = -alone_s
        for (schedule, op_s), steps in zip(measured, unrolled, strict=True):
            cut = cut_predicted(simulate_on(steps, machine))
            predicted_ns, alone_ns = cut.ns_by_key(), cut.ns_by_key("alone_ns")
            for op in schedule.ops:
                if op.kind in COMPUTATIONS and len(schedule.streams) > 1:
                    predicted_contention_s += predicted_ns[op.key] / 1e9
                kinds = [kind for kind, amount in op.work.items() if amount and kind != "s"]
                if len(kinds) == 1:
                    work_s = predicted_ns[op.key] / 1e9 - machine.stream(op.stream).latency_s
                    is_drive = parse_stream(op.stream).is_drive
                    alone = alone_ns[op.key] / max(1.0, predicted_ns[op.key]) if is_drive else 1.0
                    sample = _Sample(kinds[0], max(0.0, work_s), op_s[op.key], alone)
                    samples.setdefault(op.stream, []).append(sample)
        machine = replace(machine, streams=tuple(_fit_stream(s, samples.get(s.name, ())) for s in machine.streams))
        if predicted_contention_s > LEAST_CONTENTION_FRAC * alone_s:
            wanted = contention * (max(measured_contention_s, 0.0) / predicted_contention_s) ** 0.5
            wanted = min(CONTENTION_FACTOR_LIMIT, max(1 / CONTENTION_FACTOR_LIMIT, wanted))
            # all other streams take so many times as much of the limits of computation
            shared, factor = machine.stream(COMPUTE).takes, wanted / contention
            streams = (s if s.name == COMPUTE else with_demand(s, shared, factor) for s in machine.streams)
            machine, contention = replace(machine, streams=tuple(streams)), wanted
    return machine


def with_drive_contention(machine: Machine, factor: float) -> Machine:
    """Reads and writes taking `factor` times as much of the limits that only they share."""
    others = {limit for s in machine.streams if not parse_stream(s.name).is_drive for limit in s.takes}
    streams = (with_demand(s, s.takes.keys() - others, factor) for s in machine.streams)
    return replace(machine, streams=tuple(streams))


class _Sample(NamedTuple):
    """One op of a stream."""

    kind: str
    """Of work."""
    predicted_s: float
    """Without latency."""
    measured_s: float
    alone: float
    """Part of its time that it would take alone. Where a drive reads and writes at the same time, a short op queues
    behind a long one, which no rate says."""


def _fit_stream(stream: Stream, samples: Sequence[_Sample]) -> Stream:
    """The stream with the latency, and the factors on its rates, under which its ops take as long as measured.

    Weighted least squares of `latency + sum over kinds of slower[kind] * predicted`, nothing negative. Weights are one
    over the predicted seconds, so that totals per stream are reproduced and short ops determine the latency; ops that
    met others, and outliers (a drive's ops that took ten times as long once), weigh less.
    """
    from scipy.optimize import nnls  # which all that ask for a machine would import

    kinds = sorted({op.kind for op in samples if op.predicted_s > 0})
    if not kinds:
        return stream
    mean_s = fmean(op.predicted_s for op in samples)
    weights = np.array([op.alone * (op.predicted_s + LEAST_WORK_FRAC * mean_s) ** -0.5 for op in samples])
    by_kind = np.array([[op.predicted_s if op.kind == kind else 0.0 for kind in kinds] for op in samples])
    columns = np.hstack([np.full((len(samples), 1), 0.0 if stream.name == COMPUTE else 1.0), by_kind])
    measured_s, trust = np.array([op.measured_s for op in samples]), np.ones(len(samples))
    for _ in range(NUM_FITS):
        weighed = weights * trust**0.5
        found, _ = nnls(columns * weighed[:, None], measured_s * weighed)
        fitted_s = np.maximum(columns @ found, 1e-9)
        off = np.abs(measured_s / fitted_s - 1.0) + 1e-9
        trust = np.minimum(1.0, max(LEAST_OUTLIER, 1.5 * float(np.median(off))) / off)
    latency_s, *slower = found
    factors = {
        kind: min(RATE_FACTOR_LIMIT, max(1 / RATE_FACTOR_LIMIT, 1 / factor))
        for kind, factor in zip(kinds, slower, strict=True)
        if factor > 0
    }
    fitted = with_rate_factors(stream, factors)
    return fitted if stream.name == COMPUTE else replace(fitted, latency_s=float(latency_s))
