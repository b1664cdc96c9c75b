"""The pictures draw what the trace says: bars where the ops were, stacks up to the holdings, parts that add up."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection

from tests.sim.output.test_perfetto import STEADY
from tierplan import Training, load_machine, load_workload
from tierplan.planner.prediction import predict
from tierplan.sim.analysis.explain import stream_times
from tierplan.sim.output.drawn import COLOURS, Excerpt, what_of
from tierplan.sim.output.plots import (
    plot_memory,
    plot_step_time,
    plot_timeline,
    plot_timelines,
    save_figure,
)
from tierplan.sim.output.text import format_bytes
from tierplan.sim.trace import Span, Trace

mpl.use("Agg")
TRACE = STEADY.trace


def labels(ax: plt.Axes) -> list[str]:
    legend = ax.get_legend()
    return [text.get_text() for text in legend.get_texts()] if legend else []


def assert_drawn(bars: list[tuple[float, float]], ops: list[tuple[float, float]]) -> None:
    """Every op lies in bars that touch, and bars are no longer than their ops: but for gaps that nobody could see."""
    unseen = 1e-3 * max(end for _, end in ops)
    stretches: list[list[float]] = []
    for a, b in sorted(bars):
        if stretches and a <= stretches[-1][1] + unseen:
            stretches[-1][1] = max(stretches[-1][1], b)
        else:
            stretches.append([a, b])
    for start, end in ops:
        assert any(a - 1e-6 <= start and end <= b + unseen for a, b in stretches)
    assert sum(b - a for a, b in bars) == pytest.approx(sum(b - a for a, b in ops), rel=0.02)


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
        assert_drawn(drawn[stream], expected)
    assert {"forward", "backward", "acts", "waits for input"} <= set(labels(ax))
    busy = {stream: f"busy {100 * seconds / TRACE.duration_s:.0f} %" for stream, seconds in TRACE.busy_s().items()}
    assert [text.get_text() for text in ax.texts] == [busy[stream] for stream in streams]


def later(trace: Trace, delay_ns: int) -> Trace:
    """The same ops, all of them later."""
    spans = [
        s._replace(free_ns=s.free_ns + delay_ns, ready_ns=s.ready_ns + delay_ns, start_ns=s.start_ns + delay_ns,
                   end_ns=s.end_ns + delay_ns)
        for s in trace.spans
    ]  # fmt: skip
    return replace(trace, spans=tuple(spans))


def test_two_timelines_share_an_axis_and_have_a_lane_each() -> None:
    """The second trace is 1 s late and its excerpt begins 1 s later, so both look alike, one below the other."""
    first = Excerpt(TRACE, 0.0, TRACE.duration_s)
    second = Excerpt(later(TRACE, 10**9), 1.0, 1.0 + 0.5 * TRACE.duration_s)
    (ax,) = plot_timelines({"predicted": first, "measured": second}).axes
    in_ms = 1.0 if ax.get_xlabel() == "time (s)" else 1e3
    assert ax.get_xlim() == pytest.approx((0, first.length_s * in_ms))
    streams = [label.get_text() for label in ax.get_yticklabels()]
    drawn: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for collection in ax.collections:
        for path in collection.get_paths():
            box = path.get_extents()
            if box.height > 0.25:
                centre = (box.y0 + box.y1) / 2
                which = "upper" if centre < round(centre) else "lower"
                drawn.setdefault((streams[round(centre)], which), []).append((box.x0 / in_ms, box.x1 / in_ms))
    half_s = 0.5 * TRACE.duration_s
    for stream in streams:
        spans = sorted((s.start_ns / 1e9, s.end_ns / 1e9) for s in TRACE.spans if s.stream == stream)
        assert_drawn(drawn[stream, "upper"], spans)
        in_second = [(a, min(b, half_s)) for a, b in spans if a < half_s]
        assert_drawn([box for box in drawn[stream, "lower"] if box[1] > box[0]], in_second)
    texts = [text.get_text() for text in ax.texts]
    assert len(texts) == 2 * len(streams)
    assert texts[0].startswith("predicted ")


def test_bars_that_nobody_could_tell_apart_are_one() -> None:
    spans = [Span(f"fwd/L0/{k}", "gpu0.compute", 10 * k, 10 * k, 10 * k, 10 * k + 9) for k in range(100_000)]
    trace = Trace(name="many", spans=tuple(spans), memory=(), capacity_bytes={}, peak_bytes={})
    (ax,) = plot_timeline(trace).axes
    bars = [path.get_extents() for collection in ax.collections for path in collection.get_paths()]
    assert len(bars) < 5_000
    assert sum(bar.width for bar in bars) == pytest.approx(ax.get_xlim()[1], rel=0.02)


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

    assert last(whole) == pytest.approx(max(s.end_ns for s in TRACE.spans) / 1e9)
    assert last(later) == pytest.approx(end_s - begin_s), "cut off at the end of the window"


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


@pytest.mark.parametrize("window_s", [(1.0, 0.0), (5000.0, 6000.0), (-2.0, -1.0)])
def test_a_window_outside_of_the_trace_is_refused(window_s: tuple[float, float]) -> None:
    """Streams had zeros there, and pictures were empty, without a word."""
    plots = (
        partial(stream_times, TRACE, window_s),
        *(partial(f, TRACE, window_s=window_s) for f in (plot_timeline, plot_memory, plot_step_time)),
    )
    for plot in plots:
        with pytest.raises(ValueError, match=r"the window is from .* s; trace .* is from 0 to"):
            plot()


def test_a_tier_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"has no tier 'gpu1'; it has gpu0, host, nvme"):
        plot_memory(TRACE, tiers=["gpu1"])


def test_an_op_that_is_narrower_than_a_pixel_is_seen() -> None:
    """One op of a tenth of a pixel on a lane of its own is seen at a glance, whatever its colour."""
    second, short = 10**9, 10**5
    spans = (
        Span(key="fwd/L0/mb0", stream="gpu0.compute", free_ns=0, ready_ns=0, start_ns=0, end_ns=second),
        *(
            Span(key=f"update/L{k}", stream="host.adam", free_ns=at, ready_ns=at, start_ns=at, end_ns=at + short)
            for k, at in enumerate(range(second // 8, second, second // 8))
        ),
    )
    row = pixels_of_lane(spans, 1, dpi=72)
    assert (row.min(axis=1) < 215).sum() >= 7


def test_ops_narrower_than_a_pixel_have_the_share_of_their_time() -> None:
    """A thousand turns of recompute and of backward, which takes twice as long: neither covers the other."""
    spans = []
    for turn in range(1000):
        at = 3 * turn
        for verb, begin, end in (("recompute", at, at + 1), ("bwd", at + 1, at + 3)):
            times = {"free_ns": begin, "ready_ns": begin, "start_ns": begin, "end_ns": end}
            spans.append(Span(key=f"{verb}/L{turn // 50}/mb{turn % 50}", stream="gpu0.compute", **times))
    row = pixels_of_lane(tuple(spans), 0, dpi=100)
    bluer = (row[:, 2] > row[:, 0]).mean()
    assert 0.25 < bluer < 0.45


def test_of_ops_in_one_pixel_the_longest_is_seen() -> None:
    """Thirty blocks that are made again and go backward in less than a pixel, with long waits between them."""
    spans = []
    for block in range(30):
        at = 10**8 * block
        for verb, begin, end in (("recompute", at, at + 10**5), ("bwd", at + 10**5, at + 3 * 10**5)):
            spans.append(Span(f"{verb}/L{2 * block}/mb0", "gpu0.compute", begin, begin, begin, end))
    row = pixels_of_lane(tuple(spans), 0, dpi=150)
    seen = row[row.min(axis=1) < 215]
    assert len(seen) >= 28
    assert (seen[:, 0] > seen[:, 2]).all(), "the colour of backward"


def pixels_of_lane(spans: tuple[Span, ...], lane: int, dpi: int) -> np.ndarray:
    """The middle row of pixels of a stream's lane, red, green and blue."""
    figure = plot_timeline(replace(TRACE, spans=spans, memory=()))
    figure.set_dpi(dpi)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3].astype(int)
    axes = figure.axes[0]
    height = int(pixels.shape[0] - axes.transData.transform((0, lane))[1])
    return pixels[height, int(axes.bbox.x0) + 3 : int(axes.bbox.x1) - 3]


def test_what_a_tier_could_hold_is_drawn_and_ticks_are_round() -> None:
    """The capacity of each tier is a line with its figure, also where the peak is far below it."""
    for ax, tier in zip(plot_memory(TRACE).axes, ("gpu0", "host", "nvme"), strict=True):
        capacity, (low, high) = TRACE.capacity_bytes[tier], ax.get_ylim()
        (line,) = (line for line in ax.lines if len(line.get_ydata()) == 2)
        (text,) = ax.texts
        assert text.get_text().startswith(f"capacity {format_bytes(capacity)}")
        near = capacity <= 2.5 * TRACE.peak_bytes[tier]
        assert (low < line.get_ydata()[0] < high) if near else "x the peak" in text.get_text()
        steps = {float(f"{tick:.6e}".split("e")[0]) for tick in np.diff(ax.get_yticks())}
        assert steps <= {1.0, 2.0, 5.0}


def test_a_picture_is_written_into_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    figure = plt.figure()
    for name in ("a.png", "a.SVG", "a.pdf"):
        save_figure(figure, path := tmp_path / name / "deep" / name)
        assert path.stat().st_size > 0
    assert b"<svg" in (tmp_path / "a.SVG/deep/a.SVG").read_bytes()
    plt.close(figure)


@pytest.mark.parametrize("policy", ["zero-3", "zero-2", "ddp", "fsdp", "megatron-tp", "megatron-pp", "harmony-dp"])
def test_what_devices_exchange_is_drawn_as_what_it_is(policy: str) -> None:
    """The kind of the buffers that an op reads or writes is the name of its colour: none of them is `other`."""
    training = Training(per_device_train_batch_size=2, gradient_accumulation_steps=2)
    machine = load_machine("roundpipe-8x4090", ["gpu.count=2"])
    schedule = predict(policy, load_workload("gpt2", training), machine).schedule
    assert schedule is not None
    kinds = {buffer.name: buffer.kind for buffer in schedule.buffers}
    exchanged = [op for op in schedule.ops if op.stream.endswith(".collective")]
    assert exchanged
    for op in exchanged:
        held = {kinds[name] for name in (*op.reads, *op.writes)} - {"work"}
        drawn = what_of(Span(op.key, op.stream, 0, 0, 0, 1))
        assert {drawn} == held or (op.kind == "all_reduce" and not held and drawn == "acts"), op.key


@pytest.mark.parametrize("policy", ["harmony", "harmony-pp", "roundpipe", "mobius", "zero-infinity", "fuyou"])
def test_what_is_moved_is_drawn_as_what_it_is(policy: str) -> None:
    """Every op that moves bytes has the colour of the buffers that it reads: stashed inputs are activations."""
    machine = load_machine("desktop-4090", ["gpu.count=2"])
    schedule = predict(policy, load_workload("gpt2", Training(gradient_accumulation_steps=4)), machine).schedule
    assert schedule is not None
    kinds = {buffer.name: buffer.kind for buffer in schedule.buffers}
    moved = [op for op in schedule.ops if "bytes" in op.work and op.kind in ("copy", "send")]
    assert moved
    for op in moved:
        assert what_of(Span(op.key, op.stream, 0, 0, 0, 1)) == kinds[op.reads[0]], op.key
