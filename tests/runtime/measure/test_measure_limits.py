"""The fit of shared limits recovers limits that are known, and tells mixes that were not fitted."""

from __future__ import annotations

import itertools
import random

import pytest

from tierplan.runtime.measure.limits import LimitPrior, Mix, fit_limits
from tierplan.sim.sharing import max_min_speeds

TRUE_TAKES = {
    "cores": {"gpu0.compute": 1.0, "host.adam": 0.6, "gpu0.h2d": 0.5},
    "nvme": {"nvme.read": 1.0, "nvme.write": 1.0},
}
TRUE_LIMITS = {"cores": 1.0, "nvme": 1.15}
TRUE_SHARES = {"nvme.read": 2.0, "nvme.write": 0.5}
PRIORS = (
    LimitPrior("cores", {"gpu0.compute": 1.0, "host.adam": 0.5, "gpu0.h2d": 0.5}, 0.5),
    LimitPrior("nvme", {"nvme.read": 1.0, "nvme.write": 1.0}, 0.0, 1.2, 0.4),
)
STREAMS = ("gpu0.compute", "host.adam", "gpu0.h2d", "nvme.read", "nvme.write")


def true_speeds(streams: tuple[str, ...]) -> list[float]:
    demands = [{n: t[s] for n, t in TRUE_TAKES.items() if s in t} for s in streams]
    return max_min_speeds(demands, [TRUE_SHARES.get(s, 1.0) for s in streams], TRUE_LIMITS)


def mixes(noise: float, rounds: int = 5) -> list[Mix]:
    rng = random.Random(7)
    found = []
    for pair in itertools.combinations(STREAMS, 2):
        truth = true_speeds(pair)
        rows = tuple(tuple(min(1.0, v * (1 + rng.gauss(0, noise))) for v in truth) for _ in range(rounds))
        found.append(Mix(pair, rows))
    return found


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_a_known_machine_is_recovered(noise: float) -> None:
    fit = fit_limits(mixes(noise), PRIORS, resamples=4)
    assert fit.limits["nvme"] == pytest.approx(1.15, rel=0.08)
    assert fit.shares["nvme.read"] / fit.shares["nvme.write"] > 1.5
    assert fit.worst_error < 0.06 + 2 * noise


def test_mixes_that_were_not_fitted_are_told_within_a_tenth() -> None:
    fit = fit_limits(mixes(0.02), PRIORS, resamples=2)
    for mix in itertools.combinations(STREAMS, 3):
        for predicted, true in zip(fit.speeds(mix), true_speeds(mix), strict=True):
            assert predicted == pytest.approx(true, abs=0.1), mix


def test_streams_that_do_not_disturb_each_other_get_no_limit_that_binds() -> None:
    streams = ("nvme.read", "nvme.write")
    free = [Mix(streams, ((1.0, 1.0),) * 3)]
    fit = fit_limits(free, (LimitPrior("nvme", dict.fromkeys(streams, 1.0), 0.0, 1.2, 0.4),), resamples=2)
    assert fit.limits["nvme"] > 1.9


def test_noise_makes_the_uncertainty_larger() -> None:
    quiet, noisy = (fit_limits(mixes(n), PRIORS, resamples=8) for n in (0.01, 0.15))
    assert noisy.limit_spread["nvme"] > quiet.limit_spread["nvme"]


def test_a_stream_alone_is_never_slowed() -> None:
    fit = fit_limits(mixes(0.1), PRIORS, resamples=2)
    for stream in STREAMS:
        assert fit.speeds([stream]) == [1.0]
