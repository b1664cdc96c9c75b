"""The report is one complete page: well-formed, self-contained, with the figures of the comparison in it."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.browser import browser
from tests.validation.toy import RATES, toy_schedule, toy_trace
from tierplan.sim.output.text import format_bytes, format_count, format_error, format_s, in_short
from tierplan.validation.comparison.compare import compare
from tierplan.validation.report.page import bars, cards, paragraph, table, write_page
from tierplan.validation.report.report import verdict, write_report

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
VOID = {"meta", "link", "br", "wbr"}


class Outline(HTMLParser):
    """Text and tags of a page; fails on tags that do not nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    schedule = toy_schedule(6)
    predicted = toy_trace(schedule)
    measured = toy_trace(schedule, 6, rates={**RATES, "nvme.read": 1.5e9})
    measured = replace(measured, meta={"bytes_per_step": schedule.bytes_moved()})
    path = tmp_path_factory.mktemp("report") / "report.html"
    comparison = compare(schedule, predicted, measured, interval_s=(1.0, 2.0))
    write_report(
        path,
        comparison,
        predicted,
        measured,
        title="A <toy> & more",
        about={"model": "toy"},
        losses=[3.0, 2.5, 2.25],
        reference_losses=[3.0, 2.5, 2.25],
    )
    return path


def test_page_is_well_formed_and_complete(report: Path) -> None:
    outline = Outline()
    html = report.read_text(encoding="utf-8")
    outline.feed(html)
    assert outline.open == []
    assert "A <toy> & more" in outline.text
    for wanted in ("gpu0.compute", "nvme.read", "They agree exactly", "bit for bit", "90 % between 1 s and 2 s"):
        assert wanted in outline.text, wanted
    assert outline.count["svg"] >= 3
    assert outline.count["table"] >= 5


def test_page_needs_no_other_file(report: Path) -> None:
    html = report.read_text(encoding="utf-8")
    assert not re.search(r"""(?:src|href)=["'](?!data:|#)""", html)
    assert not re.search(r"url\((?!#)", html)
    assert "http" not in html


def test_pictures_are_labelled_and_refer_only_to_themselves(report: Path) -> None:
    html = report.read_text(encoding="utf-8")
    labels = re.findall(r'<svg class="plot" role="img" aria-label="([^"]+)"', html)
    assert [label.partition(" ")[0] for label in labels] == ["loss"]
    ids = set(re.findall(r' id="(\w+)"', html))
    assert set(re.findall(r"url\(#(\w+)\)", html)) | set(re.findall(r'href="#(\w+)"', html)) == ids
    assert "step</text>" in html, "text stays text"


def test_verdict_names_the_largest_part() -> None:
    schedule = toy_schedule()
    comparison = compare(schedule, toy_trace(schedule), toy_trace(schedule, rates={**RATES, "nvme.write": 0.5e9}))
    assert re.fullmatch(
        r"A step was predicted to take [\d.]+ m?s and took [\d.]+ m?s: an error of -\d+\.\d %\. "
        r"The largest part of the difference, \+[\d.]+ m?s, is copy on nvme\.write\.",
        verdict(comparison),
    )
    exact = compare(schedule, toy_trace(schedule), toy_trace(schedule))
    assert verdict(exact).endswith("an error of 0 %.")


def test_text_is_escaped_and_table_cells_may_be_pictures(tmp_path: Path) -> None:
    sections = [paragraph("a < b"), table(["x", ""], [("<b>", bars([1.0, -1.0])[0])])]
    write_page(tmp_path / "page.html", "<t>", sections)
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    outline = Outline()
    outline.feed(html)
    assert outline.open == []
    assert "a < b" in outline.text
    assert "b" not in outline.count
    assert "svg" in outline.count


def test_bars_share_a_scale_and_a_zero() -> None:
    gain, loss, nothing = (
        re.findall(r'<rect x="([\d.]+)" y="1" width="([\d.]+)"', b)[0] for b in bars([3.0, -1.0, 0.0])
    )
    assert gain == ("25.00", "75.00")
    assert loss == ("0.00", "25.00")
    assert nothing == ("25.00", "0.00")


def test_a_reason_in_short_keeps_sizes_and_drops_the_holders() -> None:
    reason = (
        "op 'fwd/L0' wants 2,147,483,648 bytes in tier 'gpu0', but 1,073,741,824 of 8,589,934,592 are free and nothing "
        "that still runs will free more; held by s0/states/L0@gpu0#0 5,242,880 B and 39 more. This schedule completes "
        "with 9,663,676,416 bytes there or more"
    )
    assert in_short(reason) == (
        "op 'fwd/L0' wants 2 GiB in tier 'gpu0', but 1 GiB of 8 GiB are free and nothing that still runs will free more"
        ". This schedule completes with 9 GiB there or more"
    )
    assert in_short("1,024 tokens of 10,000,000 bytes") == "1,024 tokens of 9.54 MiB"
    assert in_short("has 2,147,483,648 bytes and 1,073,741,824; use less") == "has 2 GiB and 1 GiB; use less"
    other = "87,400,000,000 times what the drives may take; 1,000,000 sequences; at most 1,000,000 turns are simulated"
    assert in_short(other) == other, "no sizes"


def test_a_name_on_a_card_breaks_behind_its_dot() -> None:
    assert "gpu0.<wbr>compute" in cards([("Busiest", "gpu0.compute", "")])
    assert "1.5 s" in cards([("Step", "1.5 s", "")])


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (format_s(1.2345), "1.23 s"),
        (format_s(0.0831), "83.1 ms"),
        (format_s(-0.0831, signed=True), "-83.1 ms"),
        (format_s(0.5, signed=True), "+500 ms"),
        (format_s(250), "4 min 10 s"),
        (format_s(9_000), "2.5 h"),
        (format_s(864_000), "10 days"),
        (format_s(0), "0 s"),
        (format_s(0.9996), "1 s"),
        (format_bytes(0), "0 B"),
        (format_bytes(1536), "1.5 KiB"),
        (format_bytes(3 * 2**30), "3 GiB"),
        (format_count(24_900_000), "24.9 M"),
        (format_count(13e9), "13 B"),
        (format_count(350), "350"),
        (format_error(0.0213), "+2.1 %"),
        (format_error(-0.1), "-10.0 %"),
        (format_error(None), "–"),
    ],
)
def test_numbers_are_written_for_people(text: str, wanted: str) -> None:
    assert text == wanted


@pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium on the PATH")
@pytest.mark.parametrize("width", [1280, 400])
def test_page_fits_its_window(report: Path, tmp_path: Path, width: int) -> None:
    """In a real browser: the page is no wider than the window, every picture has an area, nothing fails to load."""
    probe = """<script>onload = () => {
        const f = document.querySelector('iframe').contentDocument, e = f.documentElement;
        const pictures = [...f.querySelectorAll('svg')];
        const empty = pictures.filter(s => s.getBoundingClientRect().height < 5).length;
        document.title = [e.scrollWidth, e.clientWidth, pictures.length, empty].join(' ') }</script>"""
    frame = tmp_path / "frame.html"
    frame.write_text(
        f"<body>{probe}<iframe src='{report.as_uri()}' style='border:0;width:{width}px;height:900px'></iframe>"
    )
    assert CHROMIUM is not None
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --allow-file-access-from-files --virtual-time-budget=4000"
    )
    shown = subprocess.run(
        [CHROMIUM, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", frame.as_uri()],
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    ).stdout
    found = re.search(r"<title>(\d+) (\d+) (\d+) (\d+)</title>", shown)
    assert found, shown[-500:]
    scroll_width, client_width, num_pictures, num_empty = map(int, found.groups())
    assert scroll_width <= client_width
    assert num_pictures >= 8
    assert num_empty == 0


def test_tables_show_their_last_column_on_a_phone(tmp_path: Path) -> None:
    """Of long remarks and of bars between figures, nothing pushes what stands behind them out of sight."""
    systems = table(
        ("system", "batch", "step", "takes"), [("roundpipe-sync", "2 x 8 per GPU", "6.94 s", "1.24 x (other numbers)")]
    )
    gains = [("4 x rtx-3090", "749", "23,946", "+718 %", bar, "+240 %", "gpu*") for bar in bars([7.18])]
    bought = table(("what", "USD", "tokens/s", "gain", "", "per 1000", "limit"), gains)
    write_page(tmp_path / "page.html", "x", [systems, bought])
    with browser(tmp_path / "profile") as tab:
        tab.open(tmp_path / "page.html", 400)
        hidden = "[...document.querySelectorAll('.scroll')].map(e => e.scrollWidth - e.clientWidth)"
        assert tab.run(hidden) == [0, 0]
        tab.open(tmp_path / "page.html", 1280)
        assert tab.run("document.querySelector('.bar').getBoundingClientRect().width") > 100
