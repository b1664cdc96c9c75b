"""Numbers as people read them: times, sizes and rates with units, signed errors."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from math import floor, isfinite, log10


def format_s(seconds: float, *, signed: bool = False) -> str:
    """Seconds to three digits: `1.24 s`, `83.1 ms`, `4 min 10 s`, `2.5 h`."""
    sign = ("+" if seconds > 0 else "") if signed else ""
    size = abs(seconds)
    if size >= 2 * 31_557_600:
        return f"{sign}{_digits(seconds / 31_557_600)} years"
    if size >= 172_800:
        return f"{sign}{_digits(seconds / 86_400)} days"
    if size >= 7_200:
        return f"{sign}{_digits(seconds / 3_600)} h"
    if size >= 120:
        return f"{sign}{int(seconds) // 60} min {int(seconds) % 60} s" if seconds > 0 else f"{round(seconds)} s"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if size * scale >= 0.9995:
            return f"{sign}{_digits(seconds * scale)} {unit}"
    return "0 s" if size < 1e-9 else f"{sign}{_digits(seconds * 1e9)} ns"


def format_bytes(size_bytes: float, *, signed: bool = False) -> str:
    """Bytes in binary units to three digits: `1.21 GiB`."""
    sign = ("+" if size_bytes > 0 else "") if signed else ""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size_bytes) >= scale * 0.9995:
            return f"{sign}{_digits(size_bytes / scale)} {unit}"
    return f"{sign}{size_bytes:.0f} B"


def format_count(number: float) -> str:
    """A large number to three digits: `24.9 M`, `13 B` (10^9), `350`."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= scale * 0.9995:
            return f"{_digits(number / scale)} {unit}"
    return _digits(number)


def format_frac(frac: float) -> str:
    """A part of the whole: `84 %`."""
    return f"{frac * 100:.0f} %"


def format_error(frac: float | None) -> str:
    """A signed relative error: `+2.1 %`; a dash where there is none."""
    if frac is None:
        return "–"
    return "0 %" if frac == 0 else f"{frac * 100:+.1f} %"


def in_short(reason: str, size: Callable[[float], str] = format_bytes) -> str:
    """Why something does not fit, for a table: sizes to three digits, and without the list of what holds the memory."""
    text = re.sub(r"; held by [^.]*(?=\.)", "", reason)
    return re.sub(
        r"\d{1,3}(?:,\d{3}){2,}(?: bytes| B)?", lambda match: size(float(re.sub(r"[^\d]", "", match[0]))), text
    )


def columns(rows: Sequence[Sequence[str]], *, width: int = 80) -> list[str]:
    """Rows as aligned lines; the last column's text goes on below where it does not fit into `width`."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    indent = 2 + sum(w + 2 for w in widths)
    lines = []
    for row in rows:
        head = "  " + "".join(f"{cell:{w}}  " for cell, w in zip(row[:-1], widths, strict=True))
        parts = textwrap.wrap(row[-1], max(24, width - indent)) or [""]
        lines += [(head + parts[0]).rstrip(), *(" " * indent + part for part in parts[1:])]
    return lines


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """A table for a page in Markdown, as lines; the columns `right` are aligned at the right."""
    rule = "|".join("--:" if i in right else "---" for i in range(len(head)))
    cells = [[cell.replace("|", "/").replace("\n", " ") for cell in row] for row in rows]
    return [f"| {' | '.join(head)} |", f"|{rule}|", *(f"| {' | '.join(row)} |" for row in cells)]


def _digits(number: float) -> str:
    """Three significant digits, no exponent below a million."""
    if number == 0 or not isfinite(number):
        return "0" if number == 0 else str(number)
    places = max(0, 2 - floor(log10(abs(number) * (1 + 1e-12))))
    text = f"{number:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
