"""A campaign's page for the documentation: what came out, one row per run, made from artifacts alone."""

from __future__ import annotations

from collections.abc import Sequence

from tierplan.hwmodels.names import DEVICE
from tierplan.sim.output.text import format_bytes, format_error, format_frac, format_s
from tierplan.validation.campaign.spec import Artifact, summarise

__all__ = ["campaign_markdown", "summary_lines"]


COLUMNS = (
    "model", "plan", "device", "host", "predicted", "90 % interval", "measured", "error", "peaks", "bytes",
    "main difference",
)  # fmt: skip


def summary_lines(artifacts: Sequence[Artifact]) -> list[str]:
    """The summary as lines of plain text."""
    found = summarise(artifacts)
    lines = [
        f"{found.answered} of {found.asked} runs answered",
        f"step time: median error {found.median_error_frac * 100:.1f} %, nine in ten within "
        f"{found.p90_error_frac * 100:.1f} %, mean signed error {format_error(found.mean_signed_error_frac)}",
        f"within 10 %: {format_frac(found.within_10_frac)} of the runs asked",
        "predicted before anything of the run was executed, from the small model's turn right before it: median error "
        f"{found.median_first_error_frac * 100:.1f} %",
        f"bytes per stream: exact in {found.bytes_exact} of {found.answered}",
        f"peak bytes per tier: the worst is {format_error(found.worst_peak_error_frac)}",
    ]
    if found.interval_coverage_frac is not None:
        lines.append(f"90 % intervals hold {format_frac(found.interval_coverage_frac)} of the measured steps")
    for model, tau in found.tau.items():
        apart = found.tau_apart.get(model)
        among = "no two measured apart" if apart is None else f"{apart:+.2f} among pairs measured apart"
        lines.append(f"ranking of plans, Kendall's tau {tau:+.2f} ({among}): {model}")
    if found.not_run:
        lines.append(f"not run: {len(found.not_run)} ({'; '.join(found.not_run)})")
    return lines


def campaign_markdown(artifacts: Sequence[Artifact]) -> str:
    """The whole page. Errors are predicted / measured - 1."""
    parts = [
        "# Predicted and then run",
        "",
        "This page is generated: `tierplan validate --table ARTIFACTS -o docs/campaign.md`. Do not edit it.",
        "",
        "Every row was predicted, and executed by the runtime on the same machine. Before each group of rows the",
        "machine was measured, and a model of three blocks, which no row has, was trained under six plans: its",
        "parts' times, latencies and rates of streams inside a step, what they lose to each other, and the hand-over",
        "from op to op come from there. All that was known before a row ran, but for one number: how slow the machine",
        "is while it runs. Each row ran in pieces, in turns with the other rows of its group where the campaign says",
        "so, and right before a piece the small model ran with everything in memory. A row's prediction is for the",
        "median of what that says, over the pieces of all rows that took turns with it. Intervals are as wide as",
        "predictions of the small model's plans were off, each made from the other plans alone. Nothing was fitted to",
        "the rows. Rows without an answer and rows that were not run count against the figures. An error is",
        "`predicted / measured - 1`: below zero, the run was slower than predicted.",
        "",
    ]
    parts += [f"- {line}" for line in summary_lines(artifacts)]
    parts += [
        "",
        "Two plans of a model are measured apart when their step times differ by more than twice the standard error of",
        "the difference, from the scatter of the steps.",
    ]
    for machine in dict.fromkeys(a.machine for a in artifacts):
        runs = [a for a in artifacts if a.machine == machine]
        dates = sorted({a.when[:10] for a in runs})
        versions = ", ".join(f"{name} {version}" for name, version in sorted(runs[0].versions.items()))
        parts += ["", f"## {machine}", "", f"Run on {' and '.join(dates)} with {versions}.", ""]
        for group in dict.fromkeys(a.group for a in runs):
            parts += _group([a for a in runs if a.group == group])
    return "\n".join(parts) + "\n"


def _group(runs: Sequence[Artifact]) -> list[str]:
    first = runs[0].asked
    lines = [
        f"### {runs[0].group}: batch {first.get('batch')}, {first.get('seq')} tokens, {first.get('dtype')}",
        "",
        f"| {' | '.join(COLUMNS)} |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|---|---|",
    ]
    for a in runs:
        cells = [a.model, _plan(a)]
        if not a.answered:
            cells += ["–"] * 8 + [f"no answer: {a.why_not}"]
        else:
            interval = "–" if a.interval_s is None else f"{format_s(a.interval_s[0])} to {format_s(a.interval_s[1])}"
            cells += [
                format_bytes(a.capacity_bytes.get(DEVICE, 0)),
                format_bytes(a.capacity_bytes.get("host", 0)),
                format_s(a.predicted_step_s),
                interval,
                format_s(a.measured_step_s),
                format_error(a.error_frac),
                format_error(a.worst_peak_error_frac),
                "exact" if a.bytes_exact else "differ",
                _cause(a),
            ]
        lines.append("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |")
    return [*lines, ""]


def _plan(a: Artifact) -> str:
    extra = ""
    if a.asked.get("accumulation", 1) > 1:
        extra += f", {a.asked['accumulation']} micro-batches"
    if a.asked.get("max_grad_norm") is not None:
        extra += ", clipping"
    return f"{a.asked.get('policy', '')}{extra} ({a.asked.get('device')} / {a.asked.get('host')})"


def _cause(a: Artifact) -> str:
    if not a.causes:
        return ""
    name, seconds = max(a.causes, key=lambda cause: abs(cause[1]))
    return f"{name} {format_s(seconds, signed=True)}"
