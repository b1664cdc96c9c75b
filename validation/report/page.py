"""One self-contained HTML page: no external file, readable on a phone, on a screen and on paper."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from tierplan.sim.trace import write_atomically

STYLE = files("tierplan.validation.report").joinpath("page.css").read_text(encoding="utf-8")


def write_page(path: str | os.PathLike[str], title: str, sections: Iterable[str]) -> None:
    """Writes the whole document, replacing the file atomically; `sections` are HTML."""
    body = "\n".join(sections)
    write_atomically(
        path,
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<title>{escape(title)}</title>\n<link rel="icon" href="data:,">\n<style>\n{STYLE}</style>\n</head>\n<body>\n'
        f"<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n",
    )


def section(heading: str, *parts: str) -> str:
    """A headed section of HTML parts."""
    return f"<h2>{escape(heading)}</h2>\n" + "\n".join(parts)


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of plain text; `kind` is `lead`, `soft` or nothing."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def cards(items: Sequence[tuple[str, str, str]]) -> str:
    """Key figures: (label, figure, remark)."""
    cells = (
        f'<div class="card"><span>{escape(label)}</span><b>{_breakable(figure)}</b><span>{escape(remark)}</span></div>'
        for label, figure, remark in items
    )
    return f'<div class="cards">{"".join(cells)}</div>'


def _breakable(figure: str) -> str:
    """The text, which may be broken behind a dot in a name (`gpu0.compute`) rather than within a word."""
    return re.sub(r"(?<=[a-z0-9]\.)(?=[a-z])", "<wbr>", escape(figure))


def facts(items: Iterable[tuple[str, str]]) -> str:
    """Names and values, one below the other."""
    return "<dl>" + "".join(f"<dt>{escape(k)}</dt><dd>{escape(v)}</dd>" for k, v in items) + "</dl>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, num_left: int = 1) -> str:
    """A table of text; the first `num_left` columns are aligned left. Cells that begin with `<td` are taken as HTML."""

    def cell(i: int, text: str, tag: str) -> str:
        if text.startswith("<td"):
            return text
        return f'<{tag} class="left">{escape(text)}</{tag}>' if 0 < i < num_left else f"<{tag}>{escape(text)}</{tag}>"

    head = "".join(cell(i, c, "th") for i, c in enumerate(columns))
    body = "".join("<tr>" + "".join(cell(i, c, "td") for i, c in enumerate(row)) + "</tr>\n" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>'


def bars(values: Sequence[float], *, more_is_better: bool = False) -> list[str]:
    """Table cells with a bar each, on a common scale, to the right of zero where there is more and to the left else."""
    low, high = min(0.0, *values, 0.0), max(0.0, *values, 0.0)
    width = (high - low) or 1.0
    zero = -low / width * 100
    cells = []
    for value in values:
        x, w = (zero, value / width * 100) if value >= 0 else (zero + value / width * 100, -value / width * 100)
        colour = "#0b5cad" if (value > 0) is more_is_better else "#a33a00"
        cells.append(
            '<td class="bar"><svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
            f'<rect x="{x:.2f}" y="1" width="{max(w, 0):.2f}" height="8" fill="{colour}"/>'
            f'<rect x="{zero:.2f}" y="0" width="0.5" height="10" fill="#59636e"/></svg></td>'
        )
    return cells
