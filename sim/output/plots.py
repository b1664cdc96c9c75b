"""Pictures of traces with matplotlib: what ran when, what the tiers held, where the time went.

A picture shows one trace, or several below each other on one axis of time (predicted and measured). Each function
returns the Figure: in a notebook, as the last line of a cell, that shows it. Nothing is written and no pyplot state is
left behind. Place or hatch repeats what colours say.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import AutoLocator, MaxNLocator

from tierplan.sim.analysis.explain import stream_times, window_in
from tierplan.sim.output.drawn import (
    COLOURS,
    INK,
    INPUT,
    MEMORY,
    SHARING,
    WAITS,
    Excerpt,
    capacity_line,
    levels_of,
    paleness,
    step_ends,
    streams_of,
    what_of,
)
from tierplan.sim.output.text import BINARY_UNITS, format_bytes, format_frac
from tierplan.sim.trace import Trace, write_atomically

Colour = tuple[str, float]
"""What an op does or moves, and how pale it is drawn."""
NARROW_FRAC = 4e-4
"""Of the picture's width: bars of one colour that are closer than that, and as narrow, are drawn as one."""
PIXEL_FRAC, RUN_FRAC = 1e-3, 6e-3
"""Of the picture's width: bars narrower than the first, in runs as long as the second, are drawn colour by colour."""


def plot_timeline(trace: Trace, *, window_s: tuple[float, float] | None = None, ax: Axes | None = None) -> Figure:
    """Every op as a bar on the lane of its stream, coloured by what it does or moves.

    Beside a lane stands how busy it is. Successive units of the model alternate between full and paler colour, so that
    96 layers can be told apart. Below a lane, a thin line shows what an idle stream waited for; above it, how much of
    an op was due to shared limits. Time counts from the beginning of the window.
    """
    return plot_timelines({"": Excerpt(trace, *window_in(trace, window_s))}, ax=ax)


def plot_timelines(excerpts: Mapping[str, Excerpt], *, ax: Axes | None = None) -> Figure:
    """`plot_timeline` for several traces: each stream has a lane for each of them, in order, from top to bottom.

    All begin at zero. At the right stand the names of the traces, and how busy the stream was in each.
    """
    streams = streams_of([excerpt.trace for excerpt in excerpts.values()])
    num_lanes = len(excerpts)
    ax = ax or _new_axes(1, (10, 1.4 + (0.35 + 0.2 * num_lanes) * len(streams)))[0]
    length_s = max(excerpt.length_s for excerpt in excerpts.values())
    unit, per_s = _time_unit(length_s)
    seen: set[str] = set()
    for lane, (name, excerpt) in enumerate(excerpts.items()):
        height = 0.9 / num_lanes
        centres = {stream: i + height * (lane - (num_lanes - 1) / 2) for i, stream in enumerate(streams)}
        seen |= _draw_ops(ax, excerpt, centres, height, per_s, length_s)
        _name_lanes(ax, name, excerpt, centres, height, per_s)
    _lanes(ax, streams, length_s * per_s, unit)
    labels: dict[str, list[str]] = {}  # updates and the states that they need share a colour
    for name in [name for name in COLOURS if name in seen]:
        labels.setdefault(COLOURS[name], []).append(name)
    handles = [Patch(facecolor=colour, label=", ".join(names)) for colour, names in labels.items()]
    handles += [Patch(facecolor=colour, label=what) for what, colour in WAITS.items() if what in seen]
    _finish(ax, handles)
    return _figure_of(ax)


def _draw_ops(
    ax: Axes, excerpt: Excerpt, centres: Mapping[str, float], height: float, per_s: float, length_s: float
) -> set[str]:
    """Draws the ops of one trace, each on the lane around its stream's centre; the names of what was drawn."""
    trace, begin_s, end_s = excerpt
    lanes: dict[str, list[tuple[float, float, Colour]]] = {}
    marks: dict[tuple[str, str], list[tuple[float, float]]] = {}

    def box(start_ns: float, end_ns: float) -> tuple[float, float]:
        """Start and width in the picture's unit, as far as it lies in the excerpt."""
        start, end = max(start_ns / 1e9, begin_s), min(end_ns / 1e9, end_s)
        return (start - begin_s) * per_s, max(0.0, end - start) * per_s

    for span in trace.spans:
        if span.end_ns <= begin_s * 1e9 or span.free_ns >= end_s * 1e9:
            continue
        colour = what_of(span), paleness(span)
        lanes.setdefault(span.stream, []).append((*box(span.start_ns, span.end_ns), colour))
        ready_ns = max(span.free_ns, span.ready_ns)
        if ready_ns > span.free_ns:
            marks.setdefault((span.stream, INPUT), []).append(box(span.free_ns, ready_ns))
        if span.waited_memory_ns:
            marks.setdefault((span.stream, MEMORY), []).append(box(ready_ns, ready_ns + span.waited_memory_ns))
        if 0 <= span.alone_ns < span.duration_ns:
            slow_ns = span.duration_ns - span.alone_ns
            marks.setdefault((span.stream, SHARING), []).append(box(span.end_ns - slow_ns, span.end_ns))
    narrow = NARROW_FRAC * length_s * per_s
    for stream, lane in sorted(lanes.items()):
        place = (centres[stream] - 0.355 * height, 0.71 * height)
        for (what, alpha), boxes in sorted(_shared_out(lane, length_s * per_s).items()):
            rgb = tuple(1 - alpha * (1 - part) for part in to_rgb(COLOURS[what]))
            # an edge and no snapping: else what is narrower than a pixel fades, or is rounded away
            ax.broken_barh(_merged(boxes, narrow), place, color=rgb, linewidth=0.4).set_snap(False)
    for (stream, what), boxes in sorted(marks.items()):
        place = (centres[stream] + (-0.5 if what == SHARING else 0.41) * height, 0.09 * height)
        ax.broken_barh(_merged(boxes, narrow), place, facecolors=WAITS[what], linewidth=0).set_snap(False)
    for boundary_s in step_ends(trace):
        if begin_s < boundary_s < end_s:
            ax.axvline((boundary_s - begin_s) * per_s, color=INK, linewidth=0.8, linestyle=":")
    return {what for lane in lanes.values() for *_, (what, _) in lane} | {what for _, what in marks}


def _name_lanes(
    ax: Axes, name: str, excerpt: Excerpt, centres: Mapping[str, float], height: float, per_s: float
) -> None:
    """Writes at the right which trace a lane belongs to and how busy it was; marks the end of the excerpt."""
    times = stream_times(excerpt.trace, (excerpt.begin_s, excerpt.end_s))
    for stream, centre in centres.items():
        busy_frac = times[stream].busy_s / excerpt.length_s if stream in times and excerpt.length_s else 0.0
        _beside(ax, centre, f"{name} busy {format_frac(busy_frac)}".strip())
        end = excerpt.length_s * per_s
        ax.plot([end, end], [centre - 0.45 * height, centre + 0.45 * height], color=INK, linewidth=1.5, clip_on=False)


def _shared_out(lane: Iterable[tuple[float, float, Colour]], length: float) -> dict[Colour, list[tuple[float, float]]]:
    """A lane's boxes by colour. In a run of boxes narrower than a pixel, each colour has its time in one box; a run
    that is itself no wider has the colour that takes most of it.

    Were they drawn where they are, the colour drawn last would cover the others.
    """
    runs: list[list[tuple[float, float, Colour]]] = []
    end = float("-inf")
    for start, width, colour in sorted(lane):
        if width <= 0:
            continue  # outside the excerpt
        near = start - end < NARROW_FRAC * length and start + width - runs[-1][0][0] <= RUN_FRAC * length
        if near and max(width, runs[-1][-1][1]) < PIXEL_FRAC * length:
            runs[-1].append((start, width, colour))
        else:
            runs.append([(start, width, colour)])
        end = start + width
    shared: dict[Colour, list[tuple[float, float]]] = {}
    for run in runs:
        total: dict[Colour, float] = {}
        for _, width, colour in run:
            total[colour] = total.get(colour, 0.0) + width
        if len(total) > 1 and run[-1][0] + run[-1][1] - run[0][0] < PIXEL_FRAC * length:
            total = {max(total, key=lambda colour: total[colour]): sum(total.values())}
        elif len(total) == 1 or len(total) == len(run):  # no colour comes back
            for start, width, colour in run:
                shared.setdefault(colour, []).append((start, width))
            continue
        at = run[0][0]
        for colour, width in total.items():
            shared.setdefault(colour, []).append((at, width))
            at += width
    return shared


def _merged(boxes: list[tuple[float, float]], narrow: float) -> list[tuple[float, float]]:
    """Boxes (start, width) in order; neighbours too narrow to be told apart become one."""
    merged: list[tuple[float, float]] = []
    for start, width in sorted(boxes):
        if merged:
            start_before, width_before = merged[-1]
            gap = start - start_before - width_before
            if 0 <= gap < narrow and min(width, width_before) < narrow:
                merged[-1] = (start_before, start + width - start_before)
                continue
        merged.append((start, width))
    return merged


def plot_memory(
    trace: Trace,
    *,
    tiers: Sequence[str] | None = None,
    window_s: tuple[float, float] | None = None,
    axes: Sequence[Axes] | None = None,
) -> Figure:
    """Bytes held in each tier by kind over time, stacked, against the capacity, with the exact peak named.

    Where the capacity is far above the peak, a dotted line says how far, so that the holdings stay readable.

    Parameters
    ----------
    tiers
        Those that ever hold something, unless given.
    window_s
        Begin and end of what is drawn; the whole trace, unless given.
    axes
        One per tier; those of a new figure, unless given.
    """
    shown = list(tiers or [t for t in trace.capacity_bytes if trace.peak_bytes[t] > 0])
    if unknown := [tier for tier in shown if tier not in trace.capacity_bytes]:
        raise ValueError(f"trace {trace.name!r} has no tier {unknown[0]!r}; it has {', '.join(trace.capacity_bytes)}")
    if not shown:
        raise ValueError(f"no tier of trace {trace.name!r} ever holds anything; there is nothing to draw")
    axes = axes or _new_axes(len(shown), (9, 0.6 + 1.9 * len(shown)))
    begin_s, end_s = window_in(trace, window_s)
    unit, per_s = _time_unit(end_s - begin_s)
    for tier, ax in zip(shown, axes, strict=True):
        times_s, held = levels_of(trace, tier)
        size_unit, size = _size_unit(trace.peak_bytes[tier])
        x, bottom = (times_s - begin_s) * per_s, np.zeros(len(times_s))
        outline = min(1.0, 100 / max(len(times_s), 1))  # thousands of changes would paint everything black
        handles = []
        for kind, levels in held.items():
            top = bottom + levels / size
            colour = COLOURS.get(kind, COLOURS["other"])
            hatch = "////" if kind not in COLOURS else None
            ax.fill_between(x, bottom, top, step="post", facecolor=colour, edgecolor="white", hatch=hatch, linewidth=0)
            ax.plot(x, top, drawstyle="steps-post", color=INK, linewidth=0.3, alpha=outline)
            handles.append(Patch(facecolor=colour, edgecolor="white", hatch=hatch, label=kind))
            bottom = top
        peak = trace.peak_bytes[tier] / size
        line, text = capacity_line(trace.capacity_bytes[tier], trace.peak_bytes[tier])
        is_far, line = line < trace.capacity_bytes[tier], line / size
        ax.axhline(line, color=INK, linewidth=1.2, linestyle=":" if is_far else "--")
        ax.set_ylim(0, 1.12 * line)
        ax.annotate(text, (0, line), xytext=(4, 3), textcoords="offset points", fontsize="small")
        title = f"{tier}: peak {peak:.3g} {size_unit} of {format_bytes(trace.capacity_bytes[tier])}"
        ax.set_title(title, fontsize="medium", loc="left")
        ax.set(ylabel=size_unit, xlim=(0, (end_s - begin_s) * per_s))
        _finish(ax, handles[::-1])
    axes[-1].set_xlabel(f"time ({unit})")
    return _figure_of(axes[0])


def plot_step_time(trace: Trace, *, window_s: tuple[float, float] | None = None, ax: Axes | None = None) -> Figure:
    """Where the time went: for each stream, work, what sharing added, and what it waited for.

    `window_s` is best one steady cycle (`SteadyState.window_s`): then every bar is as long as the step.
    """
    times = stream_times(trace, window_s)
    streams = streams_of([trace])
    ax = ax or _new_axes(1, (10, 1.2 + 0.45 * len(streams)))[0]
    begin_s, end_s = window_in(trace, window_s)
    unit, per_s = _time_unit(end_s - begin_s)
    parts = (
        ("at work", "alone_s", "#0072b2", None),
        ("added by sharing", "slowed_s", WAITS[SHARING], "///"),
        ("waits for input", "input_s", WAITS[INPUT], None),
        ("waits for memory", "memory_s", WAITS[MEMORY], None),
        ("idle", "idle_s", "#ffffff", "..."),
    )
    left = np.zeros(len(streams))
    handles = []
    for label, field, colour, hatch in parts:
        widths = np.array([getattr(times[stream], field) * per_s for stream in streams])
        if not widths.any():
            continue
        ax.barh(range(len(streams)), widths, left=left, height=0.66, color=colour, hatch=hatch, edgecolor="#ffffff")
        edge = "#8a919c" if colour == "#ffffff" else "white"
        handles.append(Patch(facecolor=colour, hatch=hatch, edgecolor=edge, label=label))
        left += widths
    for lane, stream in enumerate(streams):
        busy_s = times[stream].busy_s
        frac = busy_s / (end_s - begin_s) if end_s > begin_s else 0.0
        _beside(ax, lane, f"busy {busy_s * per_s:.3g} {unit}, {format_frac(frac)}")
    _lanes(ax, streams, (end_s - begin_s) * per_s, unit)
    _finish(ax, handles)
    return _figure_of(ax)


# ---- parts ----


def _new_axes(num: int, size: tuple[float, float]) -> list[Axes]:
    """So many Axes below each other, with one axis of time."""
    fig, grid = plt.subplots(num, 1, sharex=True, squeeze=False, figsize=size, layout="constrained")
    plt.close(fig)  # a notebook shows the returned figure; left open, it would show it twice
    return list(grid[:, 0])


def _figure_of(ax: Axes) -> Figure:
    assert isinstance(ax.figure, Figure), "drawn into a part of a figure"
    return ax.figure


def _lanes(ax: Axes, streams: Sequence[str], length: float, unit: str) -> None:
    """One lane per stream from top to bottom, and the axis of time."""
    ax.set_yticks(range(len(streams)), streams)
    ax.set(ylim=(len(streams) - 0.5, -0.5), xlim=(0, length), xlabel=f"time ({unit})")


def _beside(ax: Axes, lane: float, text: str) -> None:
    """Writes at the right of a lane."""
    ax.annotate(
        text, (1, lane), xycoords=("axes fraction", "data"), xytext=(6, 0), textcoords="offset points",
        va="center", fontsize="small",
    )  # fmt: skip


def save_figure(figure: Figure, path: str | os.PathLike[str], *, dpi: int = 150) -> None:
    """Writes the picture in the format that its name says, in a folder that need not be there yet; all or nothing."""
    content = BytesIO()
    figure.savefig(content, format=Path(path).suffix[1:].lower(), dpi=dpi)
    write_atomically(path, content.getvalue())


def round_ticks(ax: Axes) -> None:
    """Ticks at 1, 2 or 5 times a power of ten, where nothing else was chosen."""
    for axis in (ax.xaxis, ax.yaxis):
        if isinstance(axis.get_major_locator(), AutoLocator):
            axis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10]))


def _finish(ax: Axes, handles: Sequence[Artist]) -> None:
    round_ticks(ax)
    ax.spines[["top", "right"]].set_visible(False)
    if handles:
        ax.legend(
            handles=handles,
            loc="lower left",
            bbox_to_anchor=(0, 1.0) if not ax.get_title(loc="left") else (0.28, 1.0),
            ncols=min(len(handles), 6),
            frameon=False,
            fontsize="small",
            handlelength=1.2,
            columnspacing=1.2,
            borderaxespad=0.2,
        )


def _time_unit(length_s: float) -> tuple[str, float]:
    return ("s", 1.0) if length_s >= 2 else ("ms", 1e3) if length_s >= 2e-3 else ("µs", 1e6)


def _size_unit(size_bytes: float) -> tuple[str, float]:
    return next(((name, float(size)) for name, size in BINARY_UNITS if size_bytes >= size), ("B", 1.0))
