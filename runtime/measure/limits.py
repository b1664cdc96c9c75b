"""Which shared limits explain how much streams slow each other down: a fit of the engine's own rule of sharing.

Measured: the speed of each stream (fraction of what it reaches alone) while two or more run. Model: weighted max-min
fairness (`tierplan.sim.sharing`) under linear limits in fractions of full speed. Fitted by least squares (scipy) with
the priors below, which decide where the measurement cannot tell; the uncertainty comes from fits to resampled rounds.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import exp, inf, log, sqrt

import numpy as np
from scipy.optimize import least_squares

from tierplan.sim.sharing import max_min_speeds


@dataclass(frozen=True, slots=True)
class Mix:
    """Streams that ran together, with their speeds by round."""

    streams: tuple[str, ...]
    rounds: tuple[tuple[float, ...], ...]

    def medians(self) -> tuple[float, ...]:
        return tuple(statistics.median(column) for column in zip(*self.rounds, strict=True))


@dataclass(frozen=True, slots=True)
class LimitPrior:
    """A limit that may exist: what each stream is thought to take of it at full speed, and how sure that is."""

    name: str
    takes: Mapping[str, float]
    """Streams that take from it, with the likely share of the limit (1: the stream alone fills it)."""
    sigma: float
    """Of the logarithm of a weight; 0 fixes the weights."""
    limit: float = 1.0
    limit_sigma: float = 0.0
    """Of the logarithm of the limit; 0 fixes it."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Limits, weights under contention, and how well they tell the measured speeds."""

    limits: Mapping[str, float]
    takes: Mapping[str, Mapping[str, float]]
    """Limit -> stream -> part of the limit at full speed."""
    shares: Mapping[str, float]
    limit_spread: Mapping[str, float] = field(default_factory=dict)
    """Relative standard deviation of each limit, over fits to resampled rounds."""
    worst_error: float = 0.0
    """Largest difference between a predicted and a measured speed among the mixes fitted."""

    def speeds(self, streams: Sequence[str]) -> list[float]:
        """Predicted speeds of these streams while all of them run."""
        demands = [{name: by_stream[s] for name, by_stream in self.takes.items() if s in by_stream} for s in streams]
        return max_min_speeds(demands, [self.shares.get(s, 1.0) for s in streams], self.limits)

    def errors(self, mixes: Sequence[Mix], measured: Sequence[Sequence[float]]) -> list[float]:
        """Predicted less measured speeds of all streams of these mixes; none is measured above full speed."""
        return [
            p - min(1.0, m)
            for mix, speeds in zip(mixes, measured, strict=True)
            for p, m in zip(self.speeds(mix.streams), speeds, strict=True)
        ]


SHARE_SIGMA = 0.7
LEAST_RESAMPLES = 4
SPEED_SIGMA = 0.05


def fit_limits(mixes: Sequence[Mix], priors: Sequence[LimitPrior], *, resamples: int = 12, until_s: float = inf) -> Fit:
    """The limits that explain the speeds of these mixes best. How sure they are is found from `resamples`, or from
    `LEAST_RESAMPLES` and what fits in until the clock (`time.monotonic`) shows `until_s`."""
    streams = sorted({s for c in mixes for s in c.streams})
    medians = [c.medians() for c in mixes]
    fit = _fit(mixes, medians, priors, streams)
    tries: dict[str, list[float]] = {name: [] for name in fit.limits}
    rng = random.Random(0)
    for k in range(resamples):
        if k >= LEAST_RESAMPLES and time.monotonic() > until_s:
            break
        drawn = [
            tuple(statistics.median(rng.choices(col, k=len(col))) for col in zip(*c.rounds, strict=True)) for c in mixes
        ]
        resampled = _fit(mixes, drawn, priors, streams)
        for name in tries:
            tries[name].append(_strength(resampled, name))
    spread = {}
    for name, values in tries.items():
        centre = _strength(fit, name)
        spread[name] = sqrt(statistics.fmean((v / centre - 1) ** 2 for v in values)) if values else 1.0
    worst_error = max(map(abs, fit.errors(mixes, medians)), default=0.0)
    return replace(fit, limit_spread=spread, worst_error=worst_error)


def _strength(fit: Fit, limit: str) -> float:
    """How many of its streams could run at full speed, on average: a limit's size in one number."""
    takes = fit.takes[limit]
    return fit.limits[limit] * len(takes) / sum(takes.values())


def _fit(
    mixes: Sequence[Mix],
    measured: Sequence[Sequence[float]],
    priors: Sequence[LimitPrior],
    streams: Sequence[str],
) -> Fit:
    slots = [(p, s) for p in priors if p.sigma > 0 for s in p.takes]
    free_limits = [p for p in priors if p.limit_sigma > 0]

    def unpack(x: np.ndarray) -> Fit:
        takes = {p.name: dict(p.takes) for p in priors}
        limits = {p.name: p.limit for p in priors}
        for value, (prior, stream) in zip(x, slots, strict=False):
            takes[prior.name][stream] = prior.takes[stream] * exp(prior.sigma * value)
        for value, prior in zip(x[len(slots) :], free_limits, strict=False):
            limits[prior.name] = prior.limit * exp(prior.limit_sigma * value)
        shares = {s: exp(SHARE_SIGMA * v) for v, s in zip(x[len(slots) + len(free_limits) :], streams, strict=True)}
        # a stream alone reaches full speed, by definition
        for name, by_stream in takes.items():
            takes[name] = {s: min(w, limits[name]) for s, w in by_stream.items()}
        return Fit(limits, takes, shares)

    def residuals(x: np.ndarray) -> np.ndarray:
        return np.array([*(error / SPEED_SIGMA for error in unpack(x).errors(mixes, measured)), *x])

    size = len(slots) + len(free_limits) + len(streams)
    solutions = (
        least_squares(residuals, np.full(size, start), diff_step=1e-3, max_nfev=40) for start in (0.0, -0.5, 0.5)
    )
    fit = unpack(min(solutions, key=lambda solution: solution.cost).x)
    middle = exp(statistics.fmean(log(v) for v in fit.shares.values()))
    return replace(fit, shares={s: v / middle for s, v in fit.shares.items()})
