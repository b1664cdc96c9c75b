"""The published part of docs/validation.md, and its pictures, from the reports of `reproduce`.

The part stands between two marker lines, so that the rest of the page is somebody's prose and stays as it is.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from math import log
from pathlib import Path
from statistics import median

from tierplan.sim.output.text import columns, markdown_table
from tierplan.validation.comparison.compare import ninth_decile
from tierplan.validation.published.reproduce import Report, Row, is_step_time

BEGIN = "<!-- published figures: written by `tierplan reproduce --write`, do not edit -->"
END = "<!-- end of published figures -->"
FIGURES = "figures"
MARKS = {"calibrate": ("s", "#999999"), "check": ("o", "#0072B2")}
MOST_LISTED = 30
"""Points of a picture, each with its number and name."""
LINE_INCHES = 0.17
"""Of the list of points beside their picture, which is as high as the list."""


def summary_text(report: Report) -> str:
    """One line: coverage, errors of step times, order."""
    answered, asked = report.coverage
    parts = [f"{report.system}: {answered} of {asked} check rows answered"]
    told = {name: _per_cent(figure) for name, figure in report.figures.items()}
    if told:
        parts.append(f"step times: mean error {told['mean_abs_error']}, largest {told['max_abs_error']}")
    if report.kendall_tau is not None:
        parts.append(f"Kendall tau of their order {report.kendall_tau:.2f}")
    if report.rankings and told:
        parts.append(f"median {told['median_abs_error']}, nine in ten within {told['ninth_decile']}")
        parts += [f"Kendall tau by speed on {name} {tau:.2f}" for name, tau in report.rankings.items()]
    elif spread := _spread(report):
        parts.append(spread)
    return "; ".join(parts)


def _spread(report: Report) -> str:
    """Of a system with peaks of memory: what half of the rows and nine in ten do not exceed."""
    of = {"step times": report.abs_errors, "peaks of memory": report.peak_errors}
    if not all(of.values()):
        return ""
    half, most = ({name: _per_cent(told(errors)) for name, errors in of.items()} for told in (median, ninth_decile))
    return "; ".join(
        f"{name} of {len(of[name])} rows: median error {half[name]}, nine in ten within {most[name]}" for name in of
    )


def table_text(report: Report) -> str:
    """The rows for a terminal."""
    rows = [("role", "quantity", "published", "predicted", "error", "row")]
    for row in report.rows:
        label = f"{row.label} (no answer: {row.why_not})" if row.why_not else row.label
        rows.append((row.role, row.quantity, _published(row), _number(row.predicted), _error(row), label))
    return "\n".join(columns(rows, right=(2, 3, 4)))


def markdown(reports: Sequence[Report]) -> str:
    """All reports as one part of a page."""
    head = ("system", "check rows answered", "step times: mean error", "largest error", "order (Kendall tau)")
    lines = markdown_table(head, [_summary_cells(report) for report in reports])
    for report in reports:
        lines += ["", f"### {report.system}", "", f"Source: {report.source}.", ""]
        lines += [f"{spread[0].upper()}{spread[1:]}.", ""] if (spread := _spread(report)) else []
        if report.constants:
            lines += ["Calibrated constants, the same for all rows of the machine:", ""]
            lines += [f"- `{constant}`" for constant in report.constants] + [""]
        if any(is_step_time(row) and row.value for row in report.rows):
            shows = f"predicted over published step times of {report.system}, with lines at 20 %"
            lines += [f"![{shows}]({FIGURES}/reproduce-{report.system}.png)", ""]
        last = "critical path by stream (s)" if any(row.path for row in report.rows) else "why not"
        of_rows = ("role", "quantity", "row", "published", "predicted", "error", last)
        lines += markdown_table(of_rows, [_row_cells(row) for row in report.rows], right=(3, 4, 5))
        notes = dict.fromkeys(f"{row.quantity}: {row.note}" for row in report.rows if row.note)
        lines += ["", *(f"- {note}" for note in notes)]
    return "\n".join(lines)


def _summary_cells(report: Report) -> tuple[str, ...]:
    answered, asked = report.coverage
    errors = [_per_cent(report.figures[name]) for name in ("mean_abs_error", "max_abs_error") if report.figures]
    tau = report.kendall_tau
    return (report.system, f"{answered} of {asked}", *(errors or ("-", "-")), "-" if tau is None else f"{tau:.2f}")


def _row_cells(row: Row) -> tuple[str, ...]:
    why = f"no answer: {row.why_not}" if row.why_not else row.path
    return (row.role, row.quantity, row.label, _published(row), _number(row.predicted), _error(row), why)


def _published(row: Row) -> str:
    if row.low is None or row.high is None:
        return "-"
    return _number(row.low) if row.low == row.high else f"{_number(row.low)} to {_number(row.high)}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _per_cent(part: float) -> str:
    return f"{100 * part:.1f} %"


def _error(row: Row) -> str:
    if row.error is None:
        return "-"
    return f"{100 * row.error:+.1f} %" if row.error else "0.0 %"


def plot(report: Report, path: str | os.PathLike[str]) -> None:
    """Writes predicted over published step times, with lines at 20 %; nothing where the system has none.

    Points are numbered and listed: all of them, or of many those beyond the lines.
    """
    rows = [row for row in report.rows if is_step_time(row) and row.value and row.predicted]
    if not rows:
        return
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    shown = sorted((row for row in rows if row.role in MARKS), key=lambda row: row.value or 0.0)
    about = ""
    if len(shown) > MOST_LISTED:
        shown, about = [row for row in shown if abs(row.error or 0.0) > 0.2], ", beyond which points are numbered"
    words = [row.label.split(", ") for row in shown]
    names = [", ".join(word for word in own if any(word not in other for other in words)) for own in words]
    listed = "\n".join(textwrap.fill(f"{k}  {name}", 44, subsequent_indent="    ") for k, name in enumerate(names, 1))
    height = max(5.0, LINE_INCHES * (listed.count("\n") + 3))
    figure = Figure(figsize=(9, height), layout="constrained")
    axes, list_of_points = figure.subplots(1, 2, width_ratios=(2, 1))
    values = [seconds or 0.0 for row in rows for seconds in (row.value, row.predicted)]
    low, high = 0.7 * min(values), 1.4 * max(values)
    axes.plot([low, high], [low, high], color="black", linewidth=1, label="equal")
    for factor in (0.8, 1.2):
        axes.plot([low, high], [factor * low, factor * high], color="black", linewidth=0.6, linestyle=":")
    for order, (role, (mark, colour)) in enumerate(MARKS.items()):  # the few of the first role lie above the others
        points = [(row.value, row.predicted) for row in rows if row.role == role]
        if points:
            axes.scatter(*zip(*points, strict=True), marker=mark, color=colour, label=role, zorder=4 - order)
    numbered: list[tuple[float, float]] = []
    # away from the others: beyond the lines, or below and above in turns
    ways = [(k, row, (row.error or 0.0) < 0 if about else k % 2 == 1) for k, row in enumerate(shown, 1)]
    # below from the left, above from the right: so the numbers of neighbours stand in their order
    for k, row, below in sorted(ways, key=lambda way: way[0] if way[2] else -way[0]):
        at, (right, up) = (row.value or 0.0, row.predicted or 0.0), (8, -9) if below else (-8, 9)
        near = [
            m for m in numbered if max(abs(log(a / b)) for a, b in zip(at, m, strict=True)) < 0.02 * log(high / low)
        ]
        place = right + (10 if below else -10) * len(near), up
        numbered.append(at)
        axes.annotate(str(k), at, xytext=place, textcoords="offset points", ha="center", va="center", fontsize=8)
    list_of_points.axis("off")
    list_of_points.text(0, 1, listed, va="top", fontsize=8, transform=list_of_points.transAxes)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axes.set(xlabel="published step time (s)", ylabel="predicted step time (s)")
    axes.set_title(f"{report.system}: step times, dotted lines at 20 %{about}", fontsize=10)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    axes.legend()
    figure.savefig(path, dpi=120)


def update_page(reports: Sequence[Report], page: str | os.PathLike[str]) -> None:
    """Replaces the published part of a page, and writes its pictures beside it.

    Raises `ValueError` where the page lacks the marker lines.
    """
    target = Path(page)
    text = target.read_text(encoding="utf-8") if target.exists() else f"# Validation\n\n{BEGIN}\n{END}\n"
    if BEGIN not in text or END not in text:
        raise ValueError(f"{target} has no lines {BEGIN!r} and {END!r}; add both where the published figures belong")
    before, rest = text.split(BEGIN, 1)
    after = rest.split(END, 1)[1]
    figures = target.parent / FIGURES
    figures.mkdir(parents=True, exist_ok=True)
    for report in reports:
        plot(report, figures / f"reproduce-{report.system}.png")
    target.write_text(f"{before}{BEGIN}\n\n{markdown(reports)}\n\n{END}{after}", encoding="utf-8")
