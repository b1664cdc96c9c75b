"""Pictures of a comparison as inline SVG. Text stands beside them in HTML, so that it keeps its size at any width.

All of a page's pictures share one time axis: a typical step of each trace, both beginning at zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from tierplan.sim.contents import split_step
from tierplan.sim.output.text import format_bytes, format_frac, format_s
from tierplan.sim.trace import Span, Trace
from tierplan.validation.comparison.steps import Steps

__all__ = ["Window", "legend", "losses_picture", "memory_picture", "timeline", "typical_window"]

COLOURS: Mapping[str, str] = {
    "forward": "#0072b2",
    "recompute": "#56b4e9",
    "backward": "#d55e00",
    "copy": "#009e73",
    "update": "#cc79a7",
    "accumulate": "#e69f00",
    "norm": "#7f7f7f",
}
"""By kind of op; told apart with any common form of colour blindness (Okabe and Ito)."""
OTHER = "#333333"
WIDTH = 10_000
PREDICTED, MEASURED = "#0b5cad", "#d55e00"


@dataclass(frozen=True, slots=True)
class Window:
    """A part of a trace: what is drawn."""

    trace: Trace
    begin_ns: int
    end_ns: int

    @property
    def length_ns(self) -> int:
        return self.end_ns - self.begin_ns


def typical_window(trace: Trace, steps: Steps) -> Window:
    """The step that is nearest to the median."""
    return Window(trace, steps.begin_ns[steps.typical], steps.end_ns[steps.typical])


def legend(kinds: Sequence[str]) -> str:
    """The colours of the kinds of op."""
    items = (f'<span><i style="background:{COLOURS.get(k, OTHER)}"></i>{escape(k)}</span>' for k in kinds)
    return f'<div class="legend">{"".join(items)}</div>'


def timeline(
    streams: Sequence[str], kinds: Mapping[str, str], predicted: Window, measured: Window, busy: Mapping[str, str]
) -> str:
    """Both windows by stream: the upper lane is predicted, the lower one measured. `kinds` by op key without step."""
    length = max(predicted.length_ns, measured.length_ns, 1)
    rows = []
    for stream in streams:
        lanes = []
        for y, window in ((1, predicted), (17, measured)):
            spans = [s for s in window.trace.spans if s.stream == stream]
            lanes.append(_lane(spans, kinds, window, length, y))
        ends = "".join(
            f'<rect x="{WIDTH * w.length_ns / length - 6:.0f}" y="{y - 1}" width="6" height="16" fill="#1b1f24"/>'
            for y, w in ((1, predicted), (17, measured))
        )
        rows.append(
            f'<div class="row"><div class="name">{escape(stream)}<br>'
            f"<small>{escape(busy.get(stream, ''))}</small></div>"
            f'<div class="plot"><svg viewBox="0 0 {WIDTH} 32" preserveAspectRatio="none" height="38" role="img" '
            f'aria-label="{escape(stream)}: predicted above, measured below">{"".join(lanes)}{ends}</svg></div></div>'
        )
    return "".join(rows) + f'<div class="row"><div class="name"></div>{_axis(length)}</div>'


def _lane(spans: Sequence[Span], kinds: Mapping[str, str], window: Window, length_ns: int, y: int) -> str:
    """Rectangles of one lane. Neighbours of one kind that a screen could not tell apart are drawn as one."""
    scale = WIDTH / length_ns
    boxes: list[tuple[float, float, str, str, int]] = []  # x, end, kind, tooltip, number of ops
    for span in sorted(spans, key=lambda s: s.start_ns):
        begin, end = max(span.start_ns, window.begin_ns), min(span.end_ns, window.end_ns)
        if end <= begin:
            continue
        key = split_step(span.key).key
        kind = kinds.get(key, "")
        x, x_end = (begin - window.begin_ns) * scale, (end - window.begin_ns) * scale
        if boxes:
            x_before, end_before, kind_before, _, n = boxes[-1]
            if kind == kind_before and x - end_before < 4 and (x_end - x < 8 or end_before - x_before < 8):
                boxes[-1] = (x_before, x_end, kind, f"{n + 1} ops: {kind}", n + 1)
                continue
        boxes.append((x, x_end, kind, f"{key}: {format_s(span.duration_ns / 1e9)}", 1))
    return "".join(
        f'<rect x="{x:.0f}" y="{y}" width="{max(x_end - x - 2, 3):.0f}" height="14" fill="{COLOURS.get(kind, OTHER)}">'
        f"<title>{escape(tip)}</title></rect>"
        for x, x_end, kind, tip, _ in boxes
    )


def _axis(length_ns: int) -> str:
    ticks = (f'<span style="left:{25 * i}%">{format_s(length_ns / 1e9 * i / 4)}</span>' for i in range(5))
    return f'<div class="axis">{"".join(ticks)}</div>'


def memory_picture(tier: str, capacity_bytes: int, predicted: Window, measured: Window) -> str:
    """Bytes held in one tier over the step, both traces, with the capacity where it is near."""
    length = max(predicted.length_ns, measured.length_ns, 1)
    levels = [_levels(w, tier) for w in (predicted, measured)]
    highest = max((held for points in levels for _, held in points), default=0)
    if highest == 0:
        return ""
    shows_capacity = capacity_bytes <= 2 * highest
    top = max(highest, capacity_bytes if shows_capacity else 0) * 1.08
    lines = []
    for points, colour, dash in ((levels[0], PREDICTED, "5 3"), (levels[1], MEASURED, "")):
        path = " ".join(f"{WIDTH * t / length:.0f},{100 - 100 * held / top:.2f}" for t, held in points)
        lines.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6" stroke-dasharray="{dash}" '
            'vector-effect="non-scaling-stroke"/>'
        )
    if shows_capacity:
        y = 100 - 100 * capacity_bytes / top
        lines.append(
            f'<line x1="0" x2="{WIDTH}" y1="{y:.2f}" y2="{y:.2f}" stroke="#1b1f24" stroke-dasharray="1 3" '
            'vector-effect="non-scaling-stroke"/>'
        )
    part = f"{format_frac(highest / capacity_bytes)} of {format_bytes(capacity_bytes)}" if capacity_bytes else ""
    return (
        f'<div class="row"><div class="name">{escape(tier)}<br><small>at most {format_bytes(highest)}<br>{part}</small>'
        f'</div><div class="plot"><svg viewBox="0 0 {WIDTH} 100" preserveAspectRatio="none" height="110" role="img" '
        f'aria-label="bytes held in {escape(tier)} over the step">{"".join(lines)}</svg></div></div>'
    )


def memory_legend() -> str:
    """What the lines of `memory_picture` mean, and its time axis is the timeline's."""
    return (
        f'<div class="legend"><span><i style="border-top:3px dashed {PREDICTED};height:.3rem"></i>predicted</span>'
        f'<span><i style="border-top:3px solid {MEASURED};height:.3rem"></i>measured</span>'
        '<span><i style="border-top:2px dotted #1b1f24;height:.3rem"></i>capacity</span></div>'
    )


def _levels(window: Window, tier: str) -> list[tuple[int, int]]:
    """(nanoseconds since the window began, bytes held), as corners of a staircase."""
    held = 0
    corners: list[tuple[int, int]] = []
    for event in sorted(window.trace.memory, key=lambda e: e.time_ns):
        if event.tier != tier:
            continue
        if event.time_ns > window.end_ns:
            break
        now = event.time_ns - window.begin_ns
        if now > 0:
            if not corners:
                corners.append((0, held))
            corners.append((now, held))
        held += event.delta_bytes
        if now > 0:
            corners.append((now, held))
    if not corners:
        corners.append((0, held))
    corners.append((window.length_ns, held))
    return corners


def losses_picture(losses: Sequence[float], reference: Sequence[float]) -> str:
    """The loss by step; the reference run as circles, so that equal curves are both seen."""
    values = [*losses, *reference]
    if len(losses) < 2:
        return ""
    low, high = min(values), max(values)
    height = (high - low) or 1.0

    def at(i: int, value: float) -> tuple[float, float]:
        return 300 + (WIDTH - 600) * i / (len(losses) - 1), 8 + 84 * (high - value) / height

    line = " ".join("{:.0f},{:.2f}".format(*at(i, v)) for i, v in enumerate(losses))
    marks = "".join(_round_mark(*at(i, v)) for i, v in enumerate(reference[: len(losses)]))
    legend_text = (
        f'<div class="legend"><span><i style="border-top:3px solid {MEASURED};height:.3rem"></i>with the plan</span>'
        + (
            f'<span><i style="background:{PREDICTED};opacity:.45;border-radius:50%"></i>plainly in memory</span>'
            if marks
            else ""
        )
        + "</div>"
    )
    return (
        f'{legend_text}<div class="row"><div class="name">loss<br>'
        f"<small>{losses[0]:.3f} at first<br>{losses[-1]:.3f} at last</small></div>"
        f'<div class="plot"><svg viewBox="0 0 {WIDTH} 100" preserveAspectRatio="none" height="130" role="img" '
        f'aria-label="loss by step">{marks}<polyline points="{line}" fill="none" stroke="{MEASURED}" '
        'stroke-width="2" vector-effect="non-scaling-stroke"/></svg></div></div>'
        '<div class="row"><div class="name"></div><div class="axis"><span style="left:0%">step 1</span>'
        f'<span style="left:100%">step {len(losses)}</span></div></div>'
    )


def _round_mark(x: float, y: float) -> str:
    """A dot that stays round when the picture is stretched: a line without length, with round ends."""
    return (
        f'<line x1="{x:.0f}" x2="{x:.0f}" y1="{y:.2f}" y2="{y:.2f}" stroke="{PREDICTED}" stroke-width="9" '
        'stroke-linecap="round" stroke-opacity="0.45" vector-effect="non-scaling-stroke"/>'
    )
