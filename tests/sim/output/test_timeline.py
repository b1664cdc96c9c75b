"""The timeline to zoom into: its figures are the trace's, and a real browser draws every op, however narrow."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest

from tests.browser import Tab, browser
from tests.sim.output.test_perfetto import STEADY
from tierplan.sim.contents import split_step
from tierplan.sim.output.drawn import Excerpt
from tierplan.sim.output.text import format_bytes
from tierplan.sim.output.timeline import timeline, timeline_record
from tierplan.sim.trace import Span, Trace
from tierplan.validation.report.page import write_page

TRACE = STEADY.trace
NARROW = Trace(
    name="narrow",
    spans=tuple(Span(f"fwd/L{k}/mb0", "gpu0.compute", 10**7 * k, 0, 10**7 * k, 10**7 * k + 1) for k in range(100)),
    memory=(),
    capacity_bytes={},
    peak_bytes={},
)
"""A hundred ops of a nanosecond each, ten milliseconds apart."""


def test_every_op_of_the_excerpt_is_there_with_what_it_waited_for() -> None:
    begin_s, end_s = STEADY.window_s
    record = timeline_record({"": Excerpt(TRACE, begin_s, end_s)}, STEADY.schedule)
    begin_ns, end_ns = round(begin_s * 1e9), round(end_s * 1e9)
    for lane in record["lanes"]:
        (row,) = lane["rows"]
        found = [
            (record["ops"][op][0], begin_ns + start, duration, waited_input, waited_memory)
            for op, start, duration, _, waited_input, waited_memory, _ in zip(*row["columns"], strict=True)
        ]
        assert found == [
            (split_step(s.key).key, s.start_ns, s.duration_ns, s.waited_input_ns, s.waited_memory_ns)
            for s in TRACE.spans
            if s.stream == lane["stream"] and s.free_ns < end_ns and s.end_ns >= begin_ns
        ]


def test_what_tiers_hold_adds_up_to_the_peak() -> None:
    record = timeline_record({"": Excerpt(TRACE, 0.0, TRACE.duration_s)})
    assert {tier["name"] for tier in record["tiers"]} == {name for name, peak in TRACE.peak_bytes.items() if peak}
    for tier in record["tiers"]:
        (row,) = tier["rows"]
        totals = [sum(held) for held in zip(*(accumulate(changes) for changes in row["kinds"].values()), strict=True)]
        assert max(totals) == TRACE.peak_bytes[tier["name"]]


def test_the_page_says_what_its_colours_mean() -> None:
    page = timeline({"": Excerpt(TRACE, 0.0, TRACE.duration_s)}, "one step")
    record = timeline_record({"": Excerpt(TRACE, 0.0, TRACE.duration_s)})
    assert {pale for _, _, pale, *_ in record["ops"]} == {0.62, 1.0}
    assert "Ops of one unit of the model are in full colour, those of the next one pale." in page


def pixels(tab: Tab, row: int, below: int = 0) -> list[tuple[int, ...]]:
    """Red, green, blue and opacity of each pixel along a row of bars, or so far below its middle."""
    top = 22 + 18 + row * (15 + 7) + 7 + below
    data = f"[...document.querySelector('canvas').getContext('2d').getImageData(0, {top}, innerWidth, 1).data]"
    values = tab.run(data)
    return [tuple(values[k : k + 4]) for k in range(0, len(values), 4)]


def painted(tab: Tab, row: int) -> list[bool]:
    """Of each pixel along a row of bars: whether something is drawn there."""
    return [opacity > 0 for *_, opacity in pixels(tab, row)]


def test_ops_of_a_nanosecond_are_drawn_and_pointed_at(tmp_path: Path) -> None:
    """At 1280 and 400 pixels a hundred of them in a second; zoomed in by the wheel, one of them fills the lane."""
    excerpt = Excerpt(NARROW, 0.0, 1.0)
    write_page(tmp_path / "page.html", "x", [timeline({"predicted": excerpt, "measured": excerpt}, "x", focus=True)])
    with browser(tmp_path / "profile") as tab:
        for width in (1280, 400):
            tab.open(tmp_path / "page.html", width)
            assert tab.run("document.documentElement.scrollWidth") <= width
            assert tab.run("performance.getEntriesByType('resource').length") == 0
            left, top, wide = tab.run(
                "(b => [b.x, b.y, b.width])(document.querySelector('canvas').getBoundingClientRect())"
            )
            for row in (0, 1):
                drawn = painted(tab, row)
                assert all(any(drawn[max(0, x - 1) : x + 2]) for x in (round(wide * k / 100) for k in range(100)))
                assert sum(drawn) < 0.8 * wide
            tab.ask("Input.dispatchMouseEvent", type="mouseMoved", x=left + wide * 0.3, y=top + 45)
            assert tab.run("document.querySelector('.tip').textContent").startswith("fwd/L30/mb0 (predicted)")
            for _ in range(35):
                mouse = {"x": left + wide * 0.3, "y": top + 45, "deltaX": 0, "deltaY": -150}
                tab.ask("Input.dispatchMouseEvent", type="mouseWheel", **mouse)
            tab.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
            assert 0 < sum(painted(tab, 0)) <= wide / 100 + 2, "100 ns are shown, the op is one of them"


def test_ops_narrower_than_a_pixel_keep_the_colours_of_the_legend(tmp_path: Path) -> None:
    """Two thousand of two kinds in turns, side by side: each pixel has the colour of one, not a third between them."""
    kinds = ("fwd", "bwd")
    edges = [10**9 * k // 2000 for k in range(2001)]
    spans = tuple(
        Span(f"{kinds[k % 2]}/L{k // 2}/mb0", "gpu0.compute", edges[k], 0, edges[k], edges[k + 1]) for k in range(2000)
    )
    excerpt = Excerpt(replace(NARROW, spans=spans), 0.0, 1.0)
    write_page(tmp_path / "page.html", "x", [timeline({"": excerpt}, "x")])
    record = timeline_record({"": excerpt})
    legal = {
        tuple(round(255 - pale * (255 - int(record["colours"][what][i : i + 2], 16))) for i in (1, 3, 5))
        for _, what, pale, *_ in record["ops"]
    }
    with browser(tmp_path / "profile") as tab:
        for width in (1280, 400):
            tab.open(tmp_path / "page.html", width)
            shown = pixels(tab, 0)
            wide = tab.run("document.querySelector('canvas').width")
            assert len(legal) == 4, "even and odd blocks of two kinds"
            assert sum(pixel[:3] in legal for pixel in shown[:wide]) >= wide - 2, "all but the line at the end"
            assert legal <= {pixel[:3] for pixel in shown}


def test_what_a_lane_waits_for_at_the_end_of_the_step_is_drawn(tmp_path: Path) -> None:
    """As far as the step goes: of two traces, the shorter one has nothing drawn behind its end."""
    first, second, third = (10**8 * k for k in (5, 9, 10))
    op = Span("fwd/L0/mb0", "gpu0.compute", 0, 0, 0, first)
    spans = (op, op._replace(key="fwd/L2/mb0", free_ns=first, ready_ns=second, start_ns=third, end_ns=3 * third))
    trace = replace(NARROW, spans=spans)
    step, both = Excerpt(trace, 0.0, 0.8), Excerpt(trace, 0.0, 3.0)
    write_page(tmp_path / "page.html", "x", [timeline({"predicted": step, "measured": both}, "x")])
    with browser(tmp_path / "profile") as tab:
        tab.open(tmp_path / "page.html", 1280)
        wide = tab.run("document.querySelector('canvas').width")
        waits = [x for x, pixel in enumerate(pixels(tab, 0, below=9)[:wide]) if pixel[:3] == (0xC9, 0xCE, 0xD6)]
        assert [min(waits), max(waits)] == pytest.approx([wide * 0.5 / 3, wide * 0.8 / 3], abs=2)
        bars = [x for x, pixel in enumerate(pixels(tab, 0)[:wide]) if pixel[:3] == (0x00, 0x72, 0xB2)]
        assert max(bars) <= wide * 0.5 / 3 + 2


@pytest.mark.parametrize("width", [1280, 400])
def test_the_keyboard_tells_every_op_of_a_lane(width: int, tmp_path: Path) -> None:
    """N goes through all of them, L to the next lane; the text has the times and the bytes of the trace."""
    step = replace(
        STEADY.schedule,
        ops=tuple(replace(op, key=split_step(op.key).key) for op in STEADY.schedule.ops if op.key.startswith("s0/")),
    )
    page = timeline({"": Excerpt(TRACE, *STEADY.window_s)}, "x", schedule=step)
    record = timeline_record({"": Excerpt(TRACE, *STEADY.window_s)}, step)
    write_page(tmp_path / "page.html", "x", [page])
    with browser(tmp_path / "profile") as tab:
        tab.open(tmp_path / "page.html", width)
        tab.run("document.querySelector('canvas').focus()")
        tab.press("+", 187)
        for number, lane in enumerate(record["lanes"][:2]):
            if number:
                tab.press("l", 76)
            columns = zip(*lane["rows"][0]["columns"], strict=True)
            keys = [record["ops"][op][0] for op, start, *_ in columns if start < record["length_ns"][0]]
            for _ in keys:
                tab.press("p", 80)
            told = []
            for _ in keys:
                told.append(tab.run("document.querySelector('.tip').textContent"))
                tab.press("n", 78)
            assert [text.split("\n")[0] for text in told] == keys
        moved = next(op for op in step.ops if op.stream == "gpu0.h2d")
        assert any(f"{format_bytes(moved.work['bytes'])} moved" in text for text in told)
