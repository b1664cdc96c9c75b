"""Pictures of a comparison as inline SVG, drawn by `tierplan.sim.output.plots`.

All of a page's pictures share one time axis: a typical step of each trace, both beginning at zero.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from html import escape

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tierplan.sim.output.drawn import TRACE_COLOURS, Excerpt
from tierplan.sim.trace import Trace
from tierplan.validation.comparison.steps import cut_predicted, cut_steps

SVG_STYLE = {"svg.fonttype": "none", "svg.hashsalt": "tierplan", "font.family": "sans-serif"}
"""Text stays text, and the same figure gives the same SVG."""
NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}


def typical_steps(predicted: Trace, measured: Trace, warmup_steps: int) -> dict[str, Excerpt]:
    """Of each trace, the step whose duration is nearest to the median."""
    cut = {"predicted": cut_predicted(predicted, warmup_steps), "measured": cut_steps(measured, warmup_steps)}
    windows = {name: (steps.begin_ns[steps.typical], steps.end_ns[steps.typical]) for name, steps in cut.items()}
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
