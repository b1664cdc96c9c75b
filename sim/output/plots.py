"""Pictures of a trace with matplotlib: what ran when, what the tiers held, where the time went.

Each function takes a trace and, if wanted, an Axes to draw into, and returns the Figure: in a notebook, as the last
line of a cell, that shows it. Nothing is written and no pyplot state is left behind. The colours are those of Okabe and
Ito, told apart with any common form of colour blindness; place or hatch repeats what matters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tierplan.hwmodels.names import display_order
from tierplan.sim.analysis.explain import stream_times
from tierplan.sim.contents import parse_key, split_step
from tierplan.sim.trace import Span, Trace

__all__ = ["plot_memory", "plot_step_time", "plot_timeline"]

Window = tuple[float, float] | None

COLOURS = {
    "forward": "#0072b2",
    "recompute": "#56b4e9",
    "backward": "#d55e00",
    "update": "#cc79a7",
    "params": "#009e73",
    "grads": "#e69f00",
    "states": "#cc79a7",
    "acts": "#f0e442",
    "other": "#999999",
}
"""By what an op does on a computing stream, and by what it moves on the others."""
VERBS = {"fwd": "forward", "bwd": "backward"}
MOVED = {"params": "params", "grads": "grads", "states": "states", "acts": "acts", "x": "acts"}
INK, WAIT_MEMORY, WAIT_INPUT, SLOWED = "#1b1f24", "#1b1f24", "#c9ced6", "#882255"


def plot_timeline(trace: Trace, *, window_s: Window = None, ax: Axes | None = None) -> Figure:
    """Every op as a bar on the lane of its stream, coloured by what it does or moves.

    Successive units of the model alternate between full and paler colour, so that 96 layers can be told apart. Below a
    lane, a thin line shows what an idle stream waited for; above it, how much of an op was due to shared limits. Time
    counts from the beginning of the window.
    """
    streams = _streams(trace)
    fig, ax = _axes(ax, height=1.4 + 0.55 * len(streams))
    begin_s, end_s = window_s or (0.0, trace.duration_s)
    unit, per_s = _time_unit(end_s - begin_s)
    bars: dict[tuple[int, str, float], list[tuple[float, float]]] = {}
    waits: dict[tuple[int, str], list[tuple[float, float]]] = {}
    slowed: dict[int, list[tuple[float, float]]] = {}
    used = set()
    for span in trace.spans:
        if span.end_ns < begin_s * 1e9 or span.free_ns > end_s * 1e9:
            continue
        lane = streams.index(span.stream)
        colour = _what(span)
        used.add(colour)
        bar = _bar(span.start_ns, span.end_ns, per_s, begin_s)
        bars.setdefault((lane, colour, _paleness(span)), []).append(bar)
        ready_ns = max(span.free_ns, span.ready_ns)
        if ready_ns > span.free_ns:
            waits.setdefault((lane, WAIT_INPUT), []).append(_bar(span.free_ns, ready_ns, per_s, begin_s))
        if span.waited_memory_ns:
            bar = _bar(ready_ns, ready_ns + span.waited_memory_ns, per_s, begin_s)
            waits.setdefault((lane, WAIT_MEMORY), []).append(bar)
        if 0 <= span.alone_ns < span.duration_ns:
            slowed.setdefault(lane, []).append(
                _bar(span.end_ns - (span.duration_ns - span.alone_ns), span.end_ns, per_s, begin_s)
            )
    for (lane, colour, alpha), found in sorted(bars.items()):
        ax.broken_barh(found, (lane - 0.32, 0.64), facecolors=COLOURS[colour], alpha=alpha, linewidth=0)
    for (lane, colour), found in sorted(waits.items()):
        ax.broken_barh(found, (lane + 0.37, 0.08), facecolors=colour, linewidth=0)
    for lane, found in sorted(slowed.items()):
        ax.broken_barh(found, (lane - 0.45, 0.08), facecolors=SLOWED, linewidth=0)
    for boundary_s in _step_ends(trace):
        if begin_s < boundary_s < end_s:
            ax.axvline((boundary_s - begin_s) * per_s, color=INK, linewidth=0.8, linestyle=":")
    ax.set_yticks(range(len(streams)), streams)
    ax.set_ylim(len(streams) - 0.5, -0.5)
    ax.set_xlim(0, (end_s - begin_s) * per_s)
    ax.set_xlabel(f"time ({unit})")
    labels: dict[str, list[str]] = {}  # updates and the states that they need share a colour
    for name in [name for name in COLOURS if name in used]:
        labels.setdefault(COLOURS[name], []).append(name)
    handles = [Patch(facecolor=colour, label=", ".join(names)) for colour, names in labels.items()]
    handles += [
        Patch(facecolor=colour, label=label)
        for colour, label, is_there in (
            (WAIT_INPUT, "waits for input", any(c == WAIT_INPUT for _, c in waits)),
            (WAIT_MEMORY, "waits for memory", any(c == WAIT_MEMORY for _, c in waits)),
            (SLOWED, "added by sharing (above)", bool(slowed)),
        )
        if is_there
    ]
    _finish(ax, handles)
    return fig


def plot_memory(
    trace: Trace, *, tiers: Sequence[str] | None = None, window_s: Window = None, axes: Sequence[Axes] | None = None
) -> Figure:
    """Bytes held in each tier by kind over time, stacked, against the capacity, with the exact peak named.

    `tiers` are those that ever hold something, unless given; `axes` holds one Axes per tier. Where the capacity is far
    above the peak it is named rather than drawn, so that the holdings stay readable.
    """
    shown = list(tiers or [t for t in trace.capacity_bytes if trace.peak_bytes[t] > 0])
    if not shown:
        raise ValueError(f"no tier of trace {trace.name!r} ever holds anything; there is nothing to draw")
    if axes is None:
        fig, grid = plt.subplots(
            len(shown), 1, sharex=True, squeeze=False, figsize=(9, 0.6 + 1.9 * len(shown)), layout="constrained"
        )
        plt.close(fig)
        axes = list(grid[:, 0])
    begin_s, end_s = window_s or (0.0, trace.duration_s)
    unit, per_s = _time_unit(end_s - begin_s)
    for tier, ax in zip(shown, axes, strict=True):
        times_s, held = _levels(trace, tier)
        size_unit, size = _size_unit(trace.peak_bytes[tier])
        bottom = [0.0] * len(times_s)
        outline = min(1.0, 100 / max(len(times_s), 1))  # thousands of changes would paint everything black
        handles = []
        for kind, levels in held.items():
            top = [b + level / size for b, level in zip(bottom, levels, strict=True)]
            colour = COLOURS.get(kind, COLOURS["other"])
            hatch = "////" if kind not in COLOURS else None
            x = [(t - begin_s) * per_s for t in times_s]
            ax.fill_between(x, bottom, top, step="post", facecolor=colour, edgecolor="white", hatch=hatch, linewidth=0)
            ax.plot(x, top, drawstyle="steps-post", color=INK, linewidth=0.3, alpha=outline)
            handles.append(Patch(facecolor=colour, edgecolor="white", hatch=hatch, label=kind))
            bottom = top
        capacity, peak = trace.capacity_bytes[tier] / size, trace.peak_bytes[tier] / size
        if capacity <= 2.5 * peak:
            ax.axhline(capacity, color=INK, linewidth=1.2, linestyle="--")
            ax.set_ylim(0, capacity * 1.12)
            ax.annotate(
                f"capacity {capacity:.3g} {size_unit}",
                (0, capacity),
                xytext=(4, 3),
                textcoords="offset points",
                fontsize="small",
            )
        else:
            ax.set_ylim(0, peak * 1.25)
        ax.set_title(
            f"{tier}: peak {peak:.3g} {size_unit} of {_sized(trace.capacity_bytes[tier])}",
            fontsize="medium",
            loc="left",
        )
        ax.set_ylabel(size_unit)
        ax.set_xlim(0, (end_s - begin_s) * per_s)
        _finish(ax, handles[::-1])
    axes[-1].set_xlabel(f"time ({unit})")
    figure = axes[0].figure
    assert isinstance(figure, Figure)
    return figure


def plot_step_time(trace: Trace, *, window_s: Window = None, ax: Axes | None = None) -> Figure:
    """Where the time went: for each stream, work, what sharing added, and what it waited for.

    `window_s` is best one steady cycle (`SteadyState.window_s`): then every bar is as long as the step.
    """
    times = stream_times(trace, window_s)
    streams = _streams(trace)
    fig, ax = _axes(ax, height=1.2 + 0.45 * len(streams))
    begin_s, end_s = window_s or (0.0, trace.duration_s)
    unit, per_s = _time_unit(end_s - begin_s)
    parts = (
        ("at work", "alone_s", "#0072b2", None),
        ("added by sharing", "slowed_s", SLOWED, "///"),
        ("waits for input", "input_s", WAIT_INPUT, None),
        ("waits for memory", "memory_s", INK, None),
        ("has done all", "done_s", "#ffffff", "..."),
    )
    left = [0.0] * len(streams)
    handles = []
    for label, field, colour, hatch in parts:
        widths = [getattr(times[stream], field) * per_s for stream in streams]
        if not any(widths):
            continue
        ax.barh(range(len(streams)), widths, left=left, height=0.66, color=colour, hatch=hatch, edgecolor="#ffffff")
        handles.append(Patch(facecolor=colour, hatch=hatch, edgecolor="#8a919c" if colour == "#ffffff" else "white"))
        handles[-1].set_label(label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for lane, stream in enumerate(streams):
        busy_s = times[stream].busy_s
        frac = busy_s / (end_s - begin_s) if end_s > begin_s else 0.0
        ax.annotate(
            f"busy {busy_s * per_s:.3g} {unit}, {frac:.0%}",
            (1, lane),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize="small",
        )
    ax.set_yticks(range(len(streams)), streams)
    ax.set_ylim(len(streams) - 0.5, -0.5)
    ax.set_xlim(0, (end_s - begin_s) * per_s)
    ax.set_xlabel(f"time ({unit})")
    _finish(ax, handles)
    return fig


# ---- parts ----


def _axes(ax: Axes | None, *, height: float) -> tuple[Figure, Axes]:
    if ax is not None:
        figure = ax.figure
        assert isinstance(figure, Figure)
        return figure, ax
    fig, ax = plt.subplots(figsize=(10, height), layout="constrained")
    plt.close(fig)  # a notebook shows the returned figure; left open, it would show it twice
    return fig, ax


def _finish(ax: Axes, handles: list[Patch]) -> None:
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


def _streams(trace: Trace) -> list[str]:
    """Computing first, then links, drives and the host; by name among equals."""
    found = {s.stream for s in trace.spans}
    if not found:
        raise ValueError(f"trace {trace.name!r} has no ops; there is nothing to draw")
    return sorted(found, key=display_order)


def _what(span: Span) -> str:
    """What an op does or moves, as a name in COLOURS, from its key (docs/design.md, Kinds of op)."""
    op = parse_key(span.key)
    if not op.moved and (name := VERBS.get(op.verb, op.verb)) in COLOURS:
        return name
    return MOVED.get(op.moved, "other")


def _paleness(span: Span) -> float:
    """Alternates from one unit of the model to the next."""
    digits = re.sub(r"\D", "", "".join(parse_key(span.key).where[:1]))
    return 0.62 if digits and int(digits) % 2 else 1.0


def _bar(start_ns: float, end_ns: float, per_s: float, begin_s: float) -> tuple[float, float]:
    return (start_ns / 1e9 - begin_s) * per_s, (end_ns - start_ns) / 1e9 * per_s


def _step_ends(trace: Trace) -> Iterable[float]:
    """When each step of a trace of several steps ended, in seconds."""
    ends: dict[int, int] = {}
    for span in trace.spans:
        step = split_step(span.key).step
        if step is not None:
            ends[step] = max(ends.get(step, 0), span.end_ns)
    return [end_ns / 1e9 for end_ns in ends.values()]


def _levels(trace: Trace, tier: str) -> tuple[list[float], dict[str, list[int]]]:
    """Times in seconds, and the bytes held by each kind from then on; the kinds with least change first."""
    events = [e for e in trace.memory if e.tier == tier]
    changes: dict[str, int] = {}
    for e in events:
        changes[e.kind] = changes.get(e.kind, 0) + (e.time_ns > 0)
    held = dict.fromkeys(sorted(changes, key=lambda kind: (changes[kind], kind)), 0)
    times_ns: list[int] = []
    levels: dict[str, list[int]] = {kind: [] for kind in held}
    for k, e in enumerate(events):
        held[e.kind] += e.delta_bytes
        if k + 1 == len(events) or events[k + 1].time_ns != e.time_ns:
            times_ns.append(e.time_ns)
            for kind, level in held.items():
                levels[kind].append(level)
    times_ns.append(trace.duration_ns)
    for kind in held:
        levels[kind].append(held[kind])
    return [t / 1e9 for t in times_ns], levels


def _time_unit(length_s: float) -> tuple[str, float]:
    return ("s", 1.0) if length_s >= 2 else ("ms", 1e3) if length_s >= 2e-3 else ("µs", 1e6)


def _size_unit(size_bytes: float) -> tuple[str, float]:
    for name, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size_bytes >= size:
            return name, float(size)
    return "B", 1.0


def _sized(size_bytes: float) -> str:
    unit, size = _size_unit(size_bytes)
    return f"{size_bytes / size:.3g} {unit}"
