"""Numbers as people read them: times, sizes and rates with units, signed errors."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence
from io import StringIO
from math import floor, isfinite, log10
from shutil import get_terminal_size

from tierplan.hwmodels.names import NUMBER


def format_s(seconds: float, *, signed: bool = False) -> str:
    """Seconds to three digits: `1.24 s`, `83.1 ms`, `4 min 10 s`, `2.5 h`."""
    sign = ("+" if seconds > 0 else "") if signed else ""
    size = abs(seconds)
    for unit, scale in (("years", 31_557_600.0), ("days", 86_400.0), ("h", 3_600.0)):
        if size >= 2 * scale:
            return f"{sign}{digits(seconds / scale)} {unit}"
    if size >= 120:
        return f"{sign}{int(seconds) // 60} min {int(seconds) % 60} s" if seconds > 0 else f"{round(seconds)} s"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if size * scale >= 0.9995:
            return f"{sign}{digits(seconds * scale)} {unit}"
    return "0 s" if size < 1e-9 else f"{sign}{digits(seconds * 1e9)} ns"


BINARY_UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def format_bytes(size_bytes: float) -> str:
    """Bytes in binary units to three digits: `1.21 GiB`."""
    for unit, scale in BINARY_UNITS:
        if abs(size_bytes) >= scale * 0.9995:
            return f"{digits(size_bytes / scale)} {unit}"
    return f"{size_bytes:.0f} B"


def format_count(number: float) -> str:
    """A large number to three digits: `24.9 M`, `13 B` (10^9), `350`."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= scale * 0.9995:
            return f"{digits(number / scale)} {unit}"
    return digits(number)


def format_frac(frac: float) -> str:
    """A part of the whole: `84 %`."""
    return f"{frac * 100:.0f} %"


def format_error(frac: float | None) -> str:
    """A signed relative error: `+2.1 %`; a dash where there is none."""
    if frac is None:
        return "–"
    return "0 %" if frac == 0 else f"{frac * 100:+.1f} %"


def in_short(reason: str) -> str:
    """Why something does not fit, for a table: sizes to three digits, and without the list of what holds the memory.

    A size is followed by its unit, or by what says that it is one like those before.
    """
    text = re.sub(r"; held by [^.]*(?=\.)", "", reason)
    sizes = r"\d{1,3}(?:,\d{3}){2,}(?!,\d)(?: bytes| B|(?= of \d| are free| too |[;),]|\.(?: |$)|$))"
    return re.sub(sizes, lambda match: format_bytes(float(re.sub(r"[^\d]", "", match[0]))), text)


def columns(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """Rows as aligned lines for 80 columns, or a terminal's width; long cells go on below. In a terminal that is too
    narrow for that, whole rows go on below.

    The columns `right` are aligned at the right. Rows may end early; a column with nothing but a head is left out.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    heads, *body = rows = [[*row, *[""] * (max(map(len, rows)) - len(row))] for row in rows] or [[]]
    shown = [i for i in range(len(heads)) if len(body) < 2 or i == 0 or any(row[i] for row in body)]
    widths = {i: max(len(row[i]) for row in rows) for i in shown}
    wraps = {i for i in shown if i not in right and widths[i] > (SHORT if i == shown[-1] else LONG)}
    words = {i: max(len(word) for row in rows for word in (row[i].split() or [""])) for i in wraps}
    least = sum(max(SHORT, min(words[i], LONG)) if i in wraps else width for i, width in widths.items())
    least += 2 * len(shown) - 2
    if least > (room := _room() - 2):
        pad = {i: min(SHORT, width) if i in wraps else width for i, width in widths.items()}
        cells = ([row[i].rjust(pad[i]) if i in right else row[i].ljust(pad[i]) for i in shown] for row in rows)
        return [f"  {line}" for row in cells for line in _folded("  ".join(row), max(20, room))]
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    for i in shown:
        table.add_column(no_wrap=i not in wraps, justify="right" if i in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[i]) for i in shown))
    console = Console(width=room, color_system=None, file=StringIO())
    with console.capture() as lines:
        console.print(table)
    return [f"  {line}".rstrip() for line in lines.get().splitlines()]


def alike_rows(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Rows as they are, but those that differ in nothing but a device's number in the first cell as one: `gpu*`."""
    alike: dict[str, list[tuple[str, ...]]] = {}
    for row in rows:
        alike.setdefault(NUMBER.sub("*", row[0]), []).append(row)
    shown: list[tuple[str, ...]] = []
    for name, several in alike.items():
        is_one = len(several) > 1 and len({row[1:] for row in several}) == 1
        shown += [(name, *several[0][1:])] if is_one else several
    return shown


SHORT, LONG = 15, 24
"""Cells up to this length stay on one line: of the last column, and of others."""


def _room() -> int:
    """Columns of the terminal that the standard output is; 80 of a pipe or a file."""
    return get_terminal_size().columns if sys.stdout.isatty() else 80


def wrapped(text: str, width: int = 80, *, of: int = 80) -> list[str]:
    """A paragraph as lines of so many columns, those after the first indented; a number keeps its per cent sign.

    `width` is meant for a page of 80 columns: where a terminal has fewer than `of`, lines are as many shorter.
    """
    width = max(20, width - max(0, of - _room()))
    return _folded(text, width)


def _folded(text: str, width: int) -> list[str]:
    lines = textwrap.wrap(text.replace(" %", "\xa0%"), width, subsequent_indent="  ", break_on_hyphens=False)
    return [line.replace("\xa0%", " %") for line in lines]


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """A table for a page in Markdown, as lines; the columns `right` are aligned at the right."""
    rule = "|".join("--:" if i in right else "---" for i in range(len(head)))
    cells = [[cell.replace("|", "/").replace("\n", " ") for cell in row] for row in rows]
    return [f"| {' | '.join(head)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in cells)]


def digits(number: float) -> str:
    """Three significant digits, no exponent below a million."""
    if number == 0 or not isfinite(number):
        return "0" if number == 0 else str(number)
    places = max(0, 2 - floor(log10(abs(number) * (1 + 1e-12))))
    text = f"{number:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
