"""Statistics of a campaign's artifacts: errors, coverage of intervals, ranking of plans."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from statistics import median

from scipy.stats import kendalltau

from tierplan.validation.campaign.artifact import Artifact
from tierplan.validation.campaign.spec import CampaignError


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How true the predictions were. Errors are of the step time unless they say otherwise."""

    num_runs: int
    """Runs of the campaign, on each machine that has any."""
    num_answered: int
    missing_runs: tuple[str, ...]
    """Runs of the campaign without an artifact."""
    median_error_frac: float
    """Of absolute errors."""
    p90_error_frac: float
    """Nine in ten absolute errors are at most this."""
    mean_signed_error_frac: float
    within_10_frac: float
    """Of all runs."""
    median_first_error_frac: float
    """As `median_error_frac`, for predictions made before any step of the run was executed."""
    num_bytes_exact: int
    """Runs in which every stream moved exactly the bytes predicted."""
    worst_peak_error_frac: float
    """Signed; of any tier of any run."""
    interval_coverage_frac: float | None
    tau: Mapping[str, float]
    """Kendall's tau of predicted and measured step times, by model with three plans or more."""
    tau_distinct: Mapping[str, float]
    """The same over pairs of plans whose measured times differ by more than twice the standard error."""


def summarise(artifacts: Sequence[Artifact]) -> Summary:
    """The summary of all artifacts. Raises `CampaignError` where none is answered.

    Runs without an answer count, and so do runs of the campaign that left no artifact.
    """
    answered = [a for a in artifacts if a.answered]
    if not answered:
        raise CampaignError("there is no answered run to summarise; run the campaign first")
    errors = sorted(abs(a.error_frac) for a in answered)
    covered = [a.in_interval for a in answered if a.in_interval is not None]
    missing_runs = _missing_runs(artifacts)
    num_runs = len(artifacts) + len(missing_runs)
    return Summary(
        num_runs=num_runs,
        num_answered=len(answered),
        missing_runs=missing_runs,
        median_error_frac=median(errors),
        p90_error_frac=errors[max(0, -(-9 * len(errors) // 10) - 1)],
        mean_signed_error_frac=sum(a.error_frac for a in answered) / len(answered),
        within_10_frac=sum(e <= 0.10 for e in errors) / num_runs,
        median_first_error_frac=median(abs(a.first_error_frac) for a in answered),
        num_bytes_exact=sum(a.bytes_exact for a in answered),
        worst_peak_error_frac=max((a.worst_peak_error_frac for a in answered), key=abs),
        interval_coverage_frac=sum(covered) / len(covered) if covered else None,
        tau=_by_model(answered, _tau),
        tau_distinct=_by_model(answered, _tau_distinct),
    )


def _missing_runs(artifacts: Sequence[Artifact]) -> tuple[str, ...]:
    missing = []
    for machine, campaign in dict.fromkeys((a.machine, a.campaign) for a in artifacts):
        present = [a for a in artifacts if (a.machine, a.campaign) == (machine, campaign)]
        names = {f"{a.group}/{a.run}" for a in present}
        wanted = dict.fromkeys(name for a in present for name in a.campaign_runs)
        missing += [f"{machine}: {name}" for name in wanted if name not in names]
    return tuple(missing)


def _by_model(artifacts: Iterable[Artifact], measure: Callable[[Sequence[Artifact]], float | None]) -> dict[str, float]:
    by_model: dict[str, list[Artifact]] = {}
    for a in artifacts:
        by_model.setdefault(f"{a.machine}: {a.group}, {a.model}", []).append(a)
    taus = {model: measure(runs) for model, runs in by_model.items() if len(runs) >= 3}
    return {model: tau for model, tau in taus.items() if tau is not None}


def _tau(runs: Sequence[Artifact]) -> float:
    return float(kendalltau([a.predicted_step_s for a in runs], [a.measured_step_s for a in runs]).statistic)


def _tau_distinct(runs: Sequence[Artifact]) -> float | None:
    """None where no two plans differ by more than noise."""
    signs = []
    for a, b in itertools.combinations(runs, 2):
        difference = a.measured_step_s - b.measured_step_s
        if abs(difference) > 2.0 * hypot(a.noise_s, b.noise_s):
            signs.append(1.0 if difference * (a.predicted_step_s - b.predicted_step_s) > 0 else -1.0)
    return sum(signs) / len(signs) if signs else None
