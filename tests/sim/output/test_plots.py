"""The pictures draw what the trace says: bars where the ops were, stacks up to the holdings, parts that add up."""

from __future__ import annotations

from itertools import pairwise

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.collections import PolyCollection

from tests.sim.output.test_perfetto import STEADY
from tierplan.sim.output.plots import COLOURS, plot_memory, plot_step_time, plot_timeline
from tierplan.sim.trace import Trace

mpl.use("Agg")
TRACE = STEADY.trace


def labels(ax: plt.Axes) -> list[str]:
    legend = ax.get_legend()
    return [text.get_text() for text in legend.get_texts()] if legend else []


def test_the_timeline_has_a_bar_for_each_op_on_its_lane() -> None:
    figure = plot_timeline(TRACE)
    (ax,) = figure.axes
    streams = [label.get_text() for label in ax.get_yticklabels()]
    assert streams == ["gpu0.compute", "gpu0.h2d", "gpu0.d2h", "nvme.read", "nvme.write", "host.adam"]
    drawn: dict[str, list[tuple[float, float]]] = {stream: [] for stream in streams}
    for collection in ax.collections:
        assert isinstance(collection, PolyCollection)
        for path in collection.get_paths():
            box = path.get_extents()
            if box.height > 0.5:  # a bar, not a line that says what was waited for
                drawn[streams[round((box.y0 + box.y1) / 2)]].append((box.x0, box.x1))
    in_ms = 1.0 if ax.get_xlabel() == "time (s)" else 1e3
    for stream in streams:
        expected = sorted((s.start_ns / 1e9 * in_ms, s.end_ns / 1e9 * in_ms) for s in TRACE.spans if s.stream == stream)
        assert np.array(sorted(drawn[stream])) == pytest.approx(np.array(expected))
    assert {"forward", "backward", "acts", "waits for input"} <= set(labels(ax))


def test_the_memory_picture_reaches_the_holdings_and_names_the_peak() -> None:
    figure = plot_memory(TRACE)
    assert [ax.get_title(loc="left").split(":")[0] for ax in figure.axes] == ["gpu0", "host", "nvme"]
    sizes = {"MiB": 2**20, "GiB": 2**30}
    for ax, tier in zip(figure.axes, ("gpu0", "host", "nvme"), strict=True):
        top = max(line.get_ydata().max() for line in ax.lines if len(line.get_ydata()) > 2)
        # The exact peak may lie within one moment, between a grant and an end in the same nanosecond.
        assert top * sizes[ax.get_ylabel()] <= TRACE.peak_bytes[tier] * (1 + 1e-9)
        assert top * sizes[ax.get_ylabel()] >= 0.8 * TRACE.peak_bytes[tier]
        assert f"peak {TRACE.peak_bytes[tier] / sizes[ax.get_ylabel()]:.3g} {ax.get_ylabel()}" in ax.get_title(
            loc="left"
        )


def test_the_parts_of_a_step_are_as_long_as_the_step() -> None:
    figure = plot_step_time(TRACE, window_s=STEADY.window_s)
    (ax,) = figure.axes
    whole = ax.get_xlim()[1]
    for lane in range(len(ax.get_yticks())):
        bars = [bar for bar in ax.patches if bar.get_y() < lane < bar.get_y() + bar.get_height()]
        assert sum(bar.get_width() for bar in bars) == pytest.approx(whole)


def test_time_counts_from_the_beginning_of_the_window() -> None:
    begin_s, end_s = STEADY.window_s
    assert begin_s > 0
    for ax in (
        plot_timeline(TRACE, window_s=(begin_s, end_s)).axes[0],
        plot_memory(TRACE, window_s=(begin_s, end_s)).axes[0],
    ):
        in_ms = 1.0 if "(s)" in ax.figure.axes[-1].get_xlabel() else 1e3
        assert ax.get_xlim() == pytest.approx((0, (end_s - begin_s) * in_ms))
    whole, later = plot_timeline(TRACE).axes[0], plot_timeline(TRACE, window_s=(begin_s, end_s)).axes[0]

    def last(ax: plt.Axes) -> float:
        scale = 1.0 if ax.get_xlabel() == "time (s)" else 1e-3
        return max(p.get_extents().x1 for c in ax.collections for p in c.get_paths()) * scale  # type: ignore[no-any-return]

    spans = [s for s in TRACE.spans if s.free_ns <= end_s * 1e9 and s.end_ns >= begin_s * 1e9]
    assert last(whole) == pytest.approx(max(s.end_ns for s in TRACE.spans) / 1e9)
    assert last(later) == pytest.approx(max(s.end_ns for s in spans) / 1e9 - begin_s)


def test_they_draw_into_given_axes_and_leave_no_figure_open() -> None:
    figure, axes = plt.subplots(3, 1)
    assert plot_timeline(TRACE, ax=axes[0], window_s=STEADY.window_s) is figure
    assert plot_step_time(TRACE, ax=axes[1]) is figure
    assert plot_memory(TRACE, tiers=["host"], axes=[axes[2]]) is figure
    plt.close(figure)
    plot_timeline(TRACE)
    assert plt.get_fignums() == []


def test_colours_are_distinct_in_grey_or_differ_in_place() -> None:
    """What is drawn on one lane differs in lightness too: forward, recompute, backward; params, grads, acts."""

    def lightness(name: str) -> float:
        r, g, b = mpl.colors.to_rgb(COLOURS[name])
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    for together in (("forward", "recompute", "backward"), ("params", "grads", "acts")):
        values = sorted(map(lightness, together))
        assert all(b - a > 0.04 for a, b in pairwise(values))


def test_an_empty_trace_is_refused_where_there_is_nothing_to_draw() -> None:
    empty = Trace(name="none", spans=(), memory=(), capacity_bytes={"m": 5}, peak_bytes={"m": 0})
    with pytest.raises(ValueError, match="no tier of trace 'none' ever holds anything"):
        plot_memory(empty)
    for plot in (plot_timeline, plot_step_time):
        with pytest.raises(ValueError, match="trace 'none' has no ops"):
            plot(empty)
