"""Statistics of a campaign's artifacts (errors, coverage of intervals, ranking of plans), and its page.

The page is made from artifacts alone: the summary, and a row per run.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from math import hypot, isnan
from statistics import median

from scipy.stats import kendalltau

from tierplan.hwmodels.names import DEVICE, HOST
from tierplan.sim.output.text import format_bytes, format_error, format_frac, format_s, markdown_table
from tierplan.validation.campaign.artifact import Artifact
from tierplan.validation.campaign.spec import CampaignError
from tierplan.validation.comparison.compare import ninth_decile


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
        raise CampaignError(
            f"none of {len(artifacts)} runs has an answer: {artifacts[0].why_not}"
            if artifacts
            else "there is no run to summarise; run the campaign first"
        )
    errors = sorted(abs(a.error_frac) for a in answered)
    covered = [a.in_interval for a in answered if a.in_interval is not None]
    missing_runs = _missing_runs(artifacts)
    num_runs = len(artifacts) + len(missing_runs)
    return Summary(
        num_runs=num_runs,
        num_answered=len(answered),
        missing_runs=missing_runs,
        median_error_frac=median(errors),
        p90_error_frac=ninth_decile(errors),
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


def _tau(runs: Sequence[Artifact]) -> float | None:
    """None where all plans are predicted, or measured, to be as quick as each other: they have no order."""
    tau = float(kendalltau([a.predicted_step_s for a in runs], [a.measured_step_s for a in runs]).statistic)
    return None if isnan(tau) else tau


def _tau_distinct(runs: Sequence[Artifact]) -> float | None:
    """None where no two plans differ by more than noise."""
    signs: list[int] = []
    for a, b in itertools.combinations(runs, 2):
        difference = a.measured_step_s - b.measured_step_s
        if abs(difference) > 2.0 * hypot(a.noise_s, b.noise_s):
            told = difference * (a.predicted_step_s - b.predicted_step_s)
            signs.append((told > 0) - (told < 0))  # of plans that are predicted to be as quick, neither is said to be
    return sum(signs) / len(signs) if signs else None


COLUMNS = (
    "plan", "device", "host", "predicted", "90 % interval", "measured", "error", "peaks", "bytes",
    "main difference, measured - predicted",
)  # fmt: skip


def summary_lines(artifacts: Sequence[Artifact]) -> list[str]:
    """The summary as lines of plain text."""
    summary = summarise(artifacts)
    lines = [
        f"{summary.num_answered} of {summary.num_runs} runs answered",
        f"step time: median error {summary.median_error_frac * 100:.1f} %, nine in ten within "
        f"{summary.p90_error_frac * 100:.1f} %, mean signed error {format_error(summary.mean_signed_error_frac)}",
        f"within 10 %: {format_frac(summary.within_10_frac)} of all runs",
        "predicted before any step of the run was executed, for the slowdown right before it: median error "
        f"{summary.median_first_error_frac * 100:.1f} %",
        f"bytes per stream: exact in {summary.num_bytes_exact} of {summary.num_answered}",
        f"peak bytes per tier: the worst is {format_error(summary.worst_peak_error_frac)}",
    ]
    if summary.interval_coverage_frac is not None:
        lines.append(f"90 % intervals hold {format_frac(summary.interval_coverage_frac)} of the measured steps")
    if summary.tau:
        distinct = f"; among distinct pairs {_range(summary.tau_distinct)}" if summary.tau_distinct else ""
        of_models = f"{len(summary.tau)} model{'s' * (len(summary.tau) > 1)}"
        lines.append(f"order of plans, Kendall's tau of {of_models}: {_range(summary.tau)}{distinct}")
    if summary.missing_runs:
        lines.append(f"not run: {len(summary.missing_runs)} ({'; '.join(summary.missing_runs)})")
    return lines


def _range(tau: Mapping[str, float]) -> str:
    low, high = (f"{found:+.2f}" for found in (min(tau.values()), max(tau.values())))
    return low if low == high else f"{low} to {high}"


def campaign_markdown(artifacts: Sequence[Artifact]) -> str:
    """The whole page. Errors are predicted / measured - 1."""
    parts = [files("tierplan.validation.campaign").joinpath("head.md").read_text(encoding="utf-8")]
    parts += [f"- {line}" for line in summary_lines(artifacts)]
    parts += [
        "",
        "Two plans of a model are distinct when their measured step times differ by more than twice the standard error",
        "of the difference, from the scatter of the steps.",
        "",
        "`device` and `host` are the budgets of memory. The brackets say how they were chosen: `roomy` leaves no op",
        "waiting for memory, `tight` is 2 % more than the least with which the plan completes, `middle` half-way; the",
        "planner's are fractions of what plain training takes on the device.",
    ]
    for machine in dict.fromkeys(a.machine for a in artifacts):
        runs = [a for a in artifacts if a.machine == machine]
        dates = sorted({a.when[:10] for a in runs})
        versions = ", ".join(f"{name} {version}" for name, version in sorted(runs[0].versions.items()))
        parts += ["", f"## {machine}", "", f"Run on {' and '.join(dates)} with {versions}.", ""]
        for group in dict.fromkeys((a.group, a.model) for a in runs):
            parts += _group([a for a in runs if (a.group, a.model) == group])
    return "\n".join(parts) + "\n"


def _group(runs: Sequence[Artifact]) -> list[str]:
    first = runs[0].settings
    trained = f"{runs[0].model}; batch {first.get('batch')}, {first.get('seq')} tokens, {first.get('dtype')}."
    table = markdown_table(COLUMNS, [_cells(a) for a in runs], right=range(1, 8))
    return [f"### {runs[0].group}", "", trained, "", *table, ""]


def _cells(a: Artifact) -> list[str]:
    if not a.answered:
        return [_plan(a), *["–"] * 8, f"no answer: {a.why_not}"]
    return [
        _plan(a),
        format_bytes(a.capacity_bytes.get(DEVICE, 0)),
        format_bytes(a.capacity_bytes.get(HOST, 0)),
        format_s(a.predicted_step_s),
        "–" if a.interval_s is None else f"{format_s(a.interval_s[0])} to {format_s(a.interval_s[1])}",
        format_s(a.measured_step_s),
        format_error(a.error_frac),
        format_error(a.worst_peak_error_frac),
        "exact" if a.bytes_exact else "differ",
        _cause(a),
    ]


def _plan(a: Artifact) -> str:
    accumulation = a.settings.get("accumulation", 1)
    extra = f", {accumulation} micro-batches" if accumulation > 1 else ""
    extra += "" if a.settings.get("max_grad_norm") is None else ", clipping"
    return f"{a.settings.get('policy', '')}{extra} ({a.settings.get('device')} / {a.settings.get('host')})"


def _cause(a: Artifact) -> str:
    if not a.causes:
        return ""
    name, seconds = max(a.causes, key=lambda cause: abs(cause[1]))
    return f"{name} {format_s(seconds, signed=True)}"
