"""The report of a comparison: one page with both timelines, memory over time, and tables. Self-contained HTML.

All of a page's pictures share one time axis: a typical step of each trace, both beginning at zero.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tierplan.sim.output.drawn import TRACE_COLOURS, Excerpt
from tierplan.sim.output.text import format_bytes, format_error, format_frac, format_s
from tierplan.sim.output.timeline import timeline
from tierplan.sim.schedule import Schedule
from tierplan.sim.trace import Trace
from tierplan.validation.comparison.compare import Comparison, Pair, StreamComparison
from tierplan.validation.comparison.steps import cut_predicted, cut_steps
from tierplan.validation.report.page import bars, cards, facts, paragraph, section, table, write_page


def write_report(
    path: str | os.PathLike[str],
    comparison: Comparison,
    predicted: Trace,
    measured: Trace,
    *,
    title: str = "Predicted and measured",
    about: Mapping[str, str] | None = None,
    losses: Sequence[float] = (),
    reference_losses: Sequence[float] = (),
    notes: Sequence[str] = (),
    schedule: Schedule | None = None,
) -> None:
    """Writes the page to `path`: the comparison of the two traces, of which a typical step is drawn.

    Parameters
    ----------
    about
        Facts to show beside the figures: model, machine, plan, date; in this order.
    losses, reference_losses
        Loss by step of the run, and of plain training in memory; no section without them.
    notes
        Sentences that a reader must know, shown below the verdict: data-sheet numbers, fall-backs.
    schedule
        One step, for the bytes of ops.
    """
    steps = typical_steps(predicted, measured, comparison.warmup_steps)
    sections = [
        paragraph(verdict(comparison), "lead"),
        *(paragraph(note, "soft") for note in notes),
        _key_figures(comparison),
        facts((about or {}).items()),
        _timelines(steps, schedule),
        _causes(comparison),
        _streams(comparison),
        _kinds(comparison),
        _memory(comparison),
        _bytes(comparison),
    ]
    if losses:
        sections.append(_losses(losses, reference_losses))
    sections.append(_reading(comparison))
    write_page(path, title, sections)


def verdict(comparison: Comparison) -> str:
    """The comparison in two sentences."""
    step = comparison.step_s
    assert step.measured is not None
    text = (
        f"A step was predicted to take {format_s(step.predicted)} and took {format_s(step.measured)}: an error of "
        f"{format_error(comparison.step_error_frac)}."
    )
    difference = step.measured - step.predicted
    same_way = [c for c in comparison.attribution if c.seconds * difference > 0]
    if abs(comparison.step_error_frac) >= 0.01 and same_way:
        largest = max(same_way, key=lambda c: abs(c.seconds))
        what = f"{largest.kind} on {largest.stream}" if largest.stream else largest.kind
        text += f" The largest part of the difference, {format_s(largest.seconds, signed=True)}, is {what}."
    return text


def _key_figures(comparison: Comparison) -> str:
    step, busiest = comparison.step_s, comparison.deciding_stream
    assert step.measured is not None
    interval = ""
    if comparison.interval_s is not None:
        interval = f"90 % between {format_s(comparison.interval_s[0])} and {format_s(comparison.interval_s[1])}"
    steady = comparison.measured_steps_s[comparison.warmup_steps :]
    scatter = f"median of {len(steady)}; {format_s(min(steady))} to {format_s(max(steady))}"
    worked_frac = busiest.measured.busy_s / busiest.measured.total_s if busiest.measured.total_s else 0.0
    items = [
        ("Step, predicted", format_s(step.predicted), interval),
        ("Step, measured", format_s(step.measured), "one step" if len(steady) == 1 else scatter),
        ("Error", format_error(comparison.step_error_frac), "predicted / measured − 1"),
        ("Busiest stream", busiest.stream, f"worked {format_frac(worked_frac)} of the steps"),
    ]
    for tier in comparison.tiers:
        peak = tier.peak_bytes
        if peak.predicted and peak.measured is not None:
            items.append(
                (f"Peak in {tier.tier}", format_bytes(peak.measured), f"predicted {format_bytes(peak.predicted)}")
            )
    return cards(items)


def _timelines(steps: Mapping[str, Excerpt], schedule: Schedule | None) -> str:
    return section(
        "One step, by stream",
        paragraph(
            "Of each stream's two lanes, the upper one is predicted and the lower one measured. A black mark ends the "
            "step. At the right: how much of this step the stream worked. Below: what the tiers held.",
            "soft",
        ),
        timeline(steps, "ops by stream and bytes by tier over one step: predicted, measured", schedule=schedule),
    )


def _causes(comparison: Comparison) -> str:
    def with_bars(columns: Sequence[str], rows: Sequence[tuple[tuple[str, ...], float]]) -> str:
        cells = zip(rows, bars([seconds for _, seconds in rows]), strict=True)
        shown = [(*names, format_s(seconds, signed=True), bar) for (names, seconds), bar in cells]
        return table((*columns, "seconds", ""), shown, num_left=len(columns))

    busiest = comparison.deciding_stream
    return section(
        "Where the difference comes from",
        paragraph(
            "Measured minus predicted. By ops: what the simulated step gains when it is given the measured durations "
            "of these ops, one row after the other; ops that are not on the critical path gain nothing."
        ),
        with_bars(("ops", "stream"), [((c.kind, c.stream), c.seconds) for c in comparison.attribution]),
        paragraph(f"By cause, on the busiest stream, {busiest.stream}:"),
        with_bars(("cause",), [((name,), seconds) for name, seconds in busiest.causes.items()]),
    )


def _cells(pair: Pair, show: Callable[[float], str]) -> tuple[str, str, str]:
    """Predicted, measured, error."""
    return show(pair.predicted), "–" if pair.measured is None else show(pair.measured), format_error(pair.error_frac)


def _streams(comparison: Comparison) -> str:
    def row(s: StreamComparison) -> tuple[str, ...]:
        waits = [(getattr(s.predicted, part), getattr(s.measured, part)) for part in ("input_s", "memory_s", "idle_s")]
        return (s.stream, *_cells(s.busy_s, format_s), *(f"{format_s(p)} / {format_s(m)}" for p, m in waits))

    return section(
        "Streams",
        paragraph(
            "Busy is the median of the steps; the last three columns, their mean, show predicted / measured.", "soft"
        ),
        table(
            ("stream", "busy, predicted", "busy, measured", "error", "waits for input", "for memory", "overhead"),
            map(row, comparison.streams),
        ),
    )


def _kinds(comparison: Comparison) -> str:
    rows = [
        (
            f"{k.kind} on {k.stream}",
            f"{k.num_ops}",
            *_cells(k.seconds, format_s),
            *(format_s(seconds, signed=True) for seconds in (k.rate_s, k.overhead_s, k.contention_s)),
        )
        for k in comparison.kinds
    ]
    return section(
        "Kinds of op",
        paragraph("Mean of the steps; the last three columns split measured minus predicted.", "soft"),
        table(("kind", "ops", "predicted", "measured", "error", "rate", "overhead", "contention"), rows),
    )


def _memory(comparison: Comparison) -> str:
    used = [t for t in comparison.tiers if t.peak_bytes.predicted or t.peak_bytes.measured]
    rows = [(t.tier, *_cells(t.peak_bytes, format_bytes), format_bytes(t.capacity_bytes)) for t in used]
    return section(
        "Memory",
        table(("tier", "peak, predicted", "measured", "error", "capacity"), rows),
    )


def _bytes(comparison: Comparison) -> str:
    if not comparison.moved_bytes:
        return ""
    agree = "They agree exactly." if comparison.bytes_agree else "They do not all agree."
    if all(pair.measured is None for pair in comparison.moved_bytes.values()):
        agree = "The run did not count them."

    def row(stream: str, pair: Pair) -> tuple[str, ...]:
        difference = None if pair.measured is None else f"{pair.measured - pair.predicted:+,.0f}".replace("+0", "0")
        return stream, *_cells(pair, lambda moved: f"{moved:,.0f}")[:2], difference or "–"

    rows = [row(stream, pair) for stream, pair in comparison.moved_bytes.items()]
    return section(
        "Bytes moved per step", paragraph(agree), table(("stream", "predicted", "measured", "difference"), rows)
    )


def _losses(losses: Sequence[float], reference: Sequence[float]) -> str:
    text = f"The loss went from {losses[0]:.4f} to {losses[-1]:.4f} in {len(losses)} steps."
    if reference:
        if list(losses) == list(reference):
            text += " Plain training in memory gave the same losses, bit for bit."
        else:
            worst = max(abs(a - b) for a, b in zip(losses, reference, strict=False))
            text += f" Plain training in memory gave losses that differ by at most {worst:.2e}."
    picture = inline_svg(plot_losses(losses, reference), "loss by step") if len(losses) > 1 else ""
    return section("Losses", paragraph(text), picture)


def _reading(comparison: Comparison) -> str:
    return section(
        "How to read this",
        facts(
            [
                ("error", "predicted / measured − 1: below zero, the run took longer or more than was predicted"),
                (
                    "step",
                    f"from the end of one step's last op to the next; the first {comparison.warmup_steps} left out",
                ),
                ("rate", "the ops themselves ran faster or slower than the machine's description says"),
                ("contention", "they lost more or less to ops that ran at the same time"),
                ("overhead", "a fixed time per op, or between ops, that the simulation does not have"),
                ("waiting for input", "the stream stood idle because what the op reads was not complete"),
                ("waiting for memory", "inputs were complete, but the tier had no room for what the op writes"),
                ("variation", "single steps or ops that were slower than the typical one"),
            ]
        ),
    )


SVG_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "tierplan", "font.family": "sans-serif"}
"""Text stays text, and the same figure gives the same SVG."""
NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}


def typical_steps(predicted: Trace, measured: Trace, warmup_steps: int) -> dict[str, Excerpt]:
    """Of each trace, the step whose duration is nearest to the median."""
    cut = {"predicted": cut_predicted(predicted, warmup_steps), "measured": cut_steps(measured, warmup_steps)}
    windows = {name: steps.windows_ns[steps.typical] for name, steps in cut.items()}
    traces = {"predicted": predicted, "measured": measured}
    return {name: Excerpt(traces[name], begin / 1e9, end / 1e9) for name, (begin, end) in windows.items()}


def inline_svg(figure: Figure, label: str) -> str:
    """The figure as an SVG element for a page; `label` says what it shows to those who cannot see it."""
    text = io.StringIO()
    with mpl.rc_context(SVG_STYLE):
        figure.savefig(text, format="svg", metadata=NO_METADATA)
    _, _, svg = text.getvalue().partition("<svg")
    attributes, _, content = svg.partition(">")
    box = re.search(r'viewBox="[^"]*"', attributes)
    assert box is not None
    referenced = set(re.findall(r"#(\w+)", content))
    content = re.sub(r' id="(\w+)"', lambda match: match[0] if match[1] in referenced else "", content)
    content = re.sub(r"\d+\.\d{3,}", lambda match: f"{float(match[0]):.2f}", content)  # hundredths of a point
    content = content.replace("xlink:href", "href").replace("\n", " ")
    svg = f'<svg class="plot" role="img" aria-label="{escape(label)}" {box[0]}>{content}'
    return f'<div class="scroll">{svg}</div>'


def plot_losses(losses: Sequence[float], reference: Sequence[float]) -> Figure:
    """The loss by step, as a line; that of the reference run as dots, so that equal curves are both seen."""
    figure = Figure(figsize=(9, 2.2), layout="constrained")
    ax = figure.subplots()
    if reference:
        steps = range(1, len(reference) + 1)
        ax.plot(steps, reference, "o", color=TRACE_COLOURS[0], alpha=0.45, markersize=7, label="plainly in memory")
    ax.plot(range(1, len(losses) + 1), losses, color=TRACE_COLOURS[1], label="with the plan")
    ax.set(xlabel="step", ylabel="loss")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, fontsize="small")
    return figure
