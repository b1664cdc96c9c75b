"""Advice for people: as lines of text, and as a page."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tierplan.sim.output.text import format_bytes, format_count, format_frac, format_s, in_short
from tierplan.studies.advise import SECONDS_PER_YEAR, Advice, Change
from tierplan.studies.sweep import Row
from tierplan.validation.report.page import bars, cards, facts, paragraph, section, table, write_page

__all__ = ["advice_lines", "write_advice"]

CHANGE_COLUMNS = ("change", "price", "tokens/s", "gain", "gain per 1000 USD", "policy", "batch")


def advice_lines(advice: Advice) -> list[str]:
    """The advice as lines for a terminal."""
    lines = [_title(advice), "", _answer(advice), ""]
    if not advice.fits:
        lines += [f"  {policy:<16} {in_short(why)}" for policy, why in advice.why_not.items()]
    for name, value in _figures(advice):
        lines.append(f"  {name:<26} {value}")
    if advice.fits:
        lines += ["", "By policy, each at its best batch", *_columns(_policy_rows(advice))]
    if advice.changes:
        columns = _change_columns(advice)
        rows = [CHANGE_COLUMNS, *map(_cells, advice.changes)]
        lines += ["", _changes_title(advice), *_columns([row[:columns] for row in rows])]
    lines += ["", *(f"Assumed: {text}." for text in advice.assumptions)]
    return lines


def write_advice(path: str | os.PathLike[str], advice: Advice) -> None:
    """Writes the advice as one self-contained page."""
    parts = [paragraph(_answer(advice), "lead")]
    if advice.fits:
        best = advice.best
        parts += [
            cards(
                [
                    ("Step", format_s(best["step_s"]), f"{best['policy']}, batch {best['batch']}"),
                    ("Speed", f"{format_count(best['tokens_per_s'])} tokens/s", _flops(best)),
                    ("Limited by", str(best["bound_by"]), _busy(best, most=3)),
                    ("One billion tokens", _days(advice), f"{advice.usd_per_billion_tokens:,.0f} USD"),
                ]
            ),
            section("Figures", facts(_figures(advice))),
            section("By policy, each at its best batch", _html_table(_policy_rows(advice))),
        ]
    else:
        parts += [
            section("Why not", facts((policy, in_short(why)) for policy, why in advice.why_not.items())),
            section("Figures", facts(_figures(advice))),
        ]
    if advice.changes:
        gains = _turned(bars([(c.gain_frac or 0.0) for c in advice.changes]))
        columns = _change_columns(advice)
        has_gains = any(c.gain_frac is not None for c in advice.changes)
        rows = [
            (*_cells(c)[:columns], *((bar,) if has_gains else ())) for c, bar in zip(advice.changes, gains, strict=True)
        ]
        heads = (*CHANGE_COLUMNS[:columns], *(("",) if has_gains else ()))
        parts.append(section(_changes_title(advice), table(heads, rows)))
    parts.append(section("Assumed", facts((str(i), text) for i, text in enumerate(advice.assumptions, 1))))
    write_page(path, _title(advice), parts)


def _change_columns(advice: Advice) -> int:
    """How many columns of a change say something: where none makes it fit, there is neither speed nor gain."""
    return len(CHANGE_COLUMNS) if any(c.fits for c in advice.changes) else 3


def _changes_title(advice: Advice) -> str:
    if any(c.fits for c in advice.changes):
        return "What would help, most per price first"
    return "Changes that were tried"


def _title(advice: Advice) -> str:
    return f"Training {advice.model} on {advice.machine}"


def _answer(advice: Advice) -> str:
    if not advice.fits:
        able = [c for c in advice.changes if c.fits]
        if not able:
            return "No: it does not fit under any policy, nor with any single change below."
        cheapest = min(able, key=lambda c: c.price_usd)
        return f"No: it does not fit. The cheapest change that makes it fit is {cheapest.what}."
    best = advice.best
    return (
        f"Yes: {format_count(best['tokens_per_s'])} tokens/s with {best['policy']} at batch {best['batch']}, "
        f"{format_s(best['step_s'])} per step of {best['batch']} x {advice.seq} tokens; limited by {best['bound_by']}."
    )


def _figures(advice: Advice) -> list[tuple[str, str]]:
    figures = []
    if advice.fits:
        best = advice.best
        figures += [
            ("parameters", format_count(best["num_parameters"])),
            ("busy, of the step", _busy(best)),
            ("peak bytes", ", ".join(f"{t} {format_bytes(b)}" for t, b in _prefixed(best, "peak_bytes."))),
            ("one billion tokens", f"{_days(advice)} and {advice.usd_per_billion_tokens:,.0f} USD"),
        ]
        if advice.written_bytes_per_step:
            years = advice.drive_life_years
            life = "not known" if years is None else f"{format_s(years * SECONDS_PER_YEAR)} of training"
            figures.append(("drives live", f"{life}; {format_bytes(advice.written_bytes_per_step)} written per step"))
    figures.append(("largest model that fits", advice.largest_model or "none of the named ones"))
    return figures


def _days(advice: Advice) -> str:
    assert advice.days_per_billion_tokens is not None
    return format_s(advice.days_per_billion_tokens * 86_400)


def _flops(row: Row) -> str:
    return f"{format_count(row['model_flops_per_s'])} model FLOP/s"


def _busy(row: Row, most: int | None = None) -> str:
    parts = sorted(_prefixed(row, "utilization."), key=lambda item: -item[1])[:most]
    return ", ".join(f"{name} {format_frac(part)}" for name, part in parts)


def _prefixed(row: Row, prefix: str) -> list[tuple[str, float]]:
    return [(k.removeprefix(prefix), v) for k, v in row.items() if k.startswith(prefix)]


def _policy_rows(advice: Advice) -> list[Sequence[str]]:
    """A header and, per policy, its fastest scenario."""
    rows: list[Sequence[str]] = [("policy", "batch", "step", "tokens/s", "limited by")]
    for policy in dict.fromkeys(str(row["policy"]) for row in advice.rows):
        its_rows = [row for row in advice.rows if row["policy"] == policy]
        fitting = [row for row in its_rows if row.get("fits")]
        if fitting:
            best = max(fitting, key=lambda row: float(row["tokens_per_s"]))
            speed = format_count(best["tokens_per_s"])
            rows.append((policy, str(best["batch"]), format_s(best["step_s"]), speed, best["bound_by"]))
        else:
            rows.append((policy, "-", "-", "-", "does not fit"))
    return rows


def _cells(change: Change) -> tuple[str, ...]:
    price = f"{change.price_usd:,.0f} USD"
    if not change.fits:
        return (change.what, price, "does not fit", "", "", "", "")
    gain = "makes it fit" if change.gain_frac is None else f"{change.gain_frac * 100:+.0f} %"
    per = "" if change.gain_per_1000_usd is None else f"{change.gain_per_1000_usd:+.0f} %"
    return (change.what, price, format_count(change.tokens_per_s), gain, per, change.policy, str(change.batch))


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    return table(rows[0], rows[1:])


def _turned(cells: Sequence[str]) -> list[str]:
    """Here more is better: a gain in the colour of gains."""
    swap = {"#a33a00": "#0b5cad", "#0b5cad": "#a33a00"}
    return [next((cell.replace(a, b) for a, b in swap.items() if a in cell), cell) for cell in cells]
