"""Advice for people: as lines of text, and as a page."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tierplan.hwmodels.names import NVME_WRITE
from tierplan.planner.questions.endurance import life_text, years_text
from tierplan.sim.analysis.explain import Sensitivity
from tierplan.sim.output.text import (
    alike_rows,
    columns,
    digits,
    format_bytes,
    format_count,
    format_frac,
    format_s,
    in_short,
    wrapped,
)
from tierplan.studies.advise import QUICKER_FRAC, Advice, Change
from tierplan.studies.answer import (
    batch_text,
    division_of,
    limit_rows,
    limited_text,
    limits_note,
    policy_rows,
    question_text,
)
from tierplan.studies.evaluate import QUICK
from tierplan.studies.purchases import SOON_S
from tierplan.validation.report.page import bars, cards, facts, paragraph, section, table, write_page

CHANGE_COLUMNS = ("what to buy", "USD", "tokens/s", "gain", "per 1000", "then limited by")


def advice_lines(advice: Advice) -> list[str]:
    """The advice as lines for a terminal."""
    lines = [
        *wrapped(_title(advice)),
        "",
        *wrapped(_answer(advice)),
        *(line for text in _alarms(advice) for line in wrapped(text)),
    ]
    if figures := _figures(advice):
        lines += ["", *columns(figures)]
    if advice.fits:
        lines += ["", *columns(limit_rows(_limits(advice)), right=(1, 2)), *wrapped(_limits_note(advice))]
        lines += ["", *columns(_policy_rows(advice), right=(1, 2))]
    lines += ["", *change_lines(advice), ""]
    return lines + [line for text in advice.assumptions for line in wrapped(f"Assumed: {text}.")]


def change_lines(advice: Advice) -> list[str]:
    """What could be bought, as a table."""
    left_out = [line for text in _left_out(advice) for line in wrapped(text)]
    if not advice.changes:
        return [*wrapped(_nothing_helps(advice)), *left_out]
    return [*columns([CHANGE_COLUMNS, *_rows(advice)], right=(1, 2, 3, 4)), *left_out]


def _left_out(advice: Advice) -> list[str]:
    """Purchases that were not planned, and why."""
    without = [f"No answer for {what}: {in_short(why)}." for what, why in advice.no_answer.items()]
    if advice.no_gain and advice.changes:  # else all of them gain nothing, and that is said
        no_room = "does not spare drives, or fit" if advice.answer.get("wears_drives") else "does not make it fit"
        gained = f"gains less than {format_frac(QUICKER_FRAC)}" if advice.fits else no_room
        without.insert(0, f"Planned, and {gained}: {', '.join(advice.no_gain)}.")
    if not advice.left_out:
        return without
    now = float(advice.answer.get("tokens_per_s") or 0.0)

    def said(most: float) -> str:
        gain = f"{most / now * 100 - 100:+.0f} %" if now else f"{most:,.0f} tokens/s"
        return f"{gain} at most" if most else "does not fit"

    better = {what for what, most in advice.left_out.items() if most > now}
    why = "by bounds others give more for their price, or more in all"
    if not advice.fits:
        better, why = {*advice.left_out}, "by bounds they do not fit, or something of the kind that costs no more runs"
    texts = []
    for reason, some in ((why, better), ("by bounds they gain nothing", advice.left_out.keys() - better)):
        named = ", ".join(f"{what} ({said(most)})" for what, most in advice.left_out.items() if what in some)
        texts += [f"Not planned, since {reason}: {named}."] if named else []
    return [*texts, *without]


def write_advice(path: str | os.PathLike[str], advice: Advice) -> None:
    """Writes the advice as one self-contained page."""
    parts = [paragraph(_answer(advice), "lead"), *(paragraph(text, "lead") for text in _alarms(advice))]
    if advice.fits:
        systems = _policy_rows(advice)
        end = len(systems) - (systems[-1][1] == "-")  # what does not run is a list that would stretch the table
        missing = (paragraph(f"{row[0]}: {row[-1]}.") for row in systems[end:])
        answer, costs = advice.answer, advice.costs
        assert costs is not None
        per_s = answer["model_flops_per_s"]  # none where seconds are known alone
        flops = f"{digits(per_s / 1e12)} TFLOP/s of the model" if per_s else ""
        figures = [
            ("Step", format_s(answer["step_s"]), question_text(advice.point, answer, answer["dtype"])),
            ("Speed", f"{answer['tokens_per_s']:,.0f} tokens/s", flops),
            ("Limited by", str(answer["limited_by"]), limited_text(_limits(advice)).partition(": ")[2]),
            (f"{format_count(costs.tokens)} tokens", format_s(costs.seconds), costs.texts["cost"]),
        ]
        parts += [
            cards(figures),
            section("Figures", facts(_figures(advice))),
            section("What limits", _html(limit_rows(_limits(advice))), paragraph(_limits_note(advice))),
            section("Published systems, for the same work", _html(systems[:end]), *missing),
        ]
    else:
        parts.append(section("Figures", facts(_figures(advice))))
    if advice.changes:
        gains = bars([(c.gain_frac or 0.0) for c in advice.changes], more_is_better=True)
        end = CHANGE_COLUMNS.index("gain") + 1  # each bar stands behind its figure
        rows = [(*row[:end], bar, *row[end:]) for row, bar in zip(_rows(advice), gains, strict=True)]
        heads = (*CHANGE_COLUMNS[:end], "", *CHANGE_COLUMNS[end:])
        parts.append(section("What would help, most per price first", table(heads, rows)))
    else:
        parts.append(section("What would help", paragraph(_nothing_helps(advice))))
    parts += [paragraph(text) for text in _left_out(advice)]
    parts.append(section("Assumed", facts((str(i), text) for i, text in enumerate(advice.assumptions, 1))))
    write_page(path, _title(advice), parts)


def _title(advice: Advice) -> str:
    return f"Training {advice.point.model} on {advice.answer.get('where', advice.machine)}"


def _answer(advice: Advice) -> str:
    answer = advice.answer
    if not advice.fits:
        no = "No plan was found" if answer["may_fit"] else "No: it does not fit"
        if answer["wears_drives"]:
            no = f"No: the drives do not last {years_text(advice.point.drive_lifetime_years or 0)}"
        if not advice.changes:
            return f"{no}, nor with any of {advice.num_tried} single purchases. {_why(advice)}"
        cheapest = min(advice.changes, key=lambda c: c.bought.price_usd).bought
        return f"{no}. The cheapest with which it runs is {cheapest.what}. {_why(advice)}"
    least = "at least " if advice.point.policy == QUICK else ""
    asked = question_text(advice.point, answer, answer["dtype"])
    return (
        f"Yes: {least}{answer['tokens_per_s']:,.0f} tokens/s, {format_s(answer['step_s'])} per step ({asked}). "
        f"Limited by {limited_text(_limits(advice))}."
    )


def _why(advice: Advice) -> str:
    text = in_short(str(advice.answer["reason"]))
    return text[:1].upper() + text[1:] + "."


def _alarms(advice: Advice) -> list[str]:
    """What is grave enough for the first lines: GPUs that are not used, a search cut off, drives that do not last."""
    alarms = [note] if (note := advice.answer.get("devices_note")) else []
    if advice.point.policy == QUICK and advice.answer.get("status") == "time-limit":
        bound = format_s(advice.answer["lower_bound_s"])
        alarms.append(
            "The clock ended this short search before its work was done: a plan may be far quicker (the bound is "
            f"{bound}), and then purchases gain far less than it says below. Leave out --quick, or ask again when the "
            "computer is less busy."
        )
    costs = advice.costs
    if costs is None or costs.drive_life_s is None or costs.drive_life_s > SOON_S:
        return alarms
    job = format_count(costs.tokens)
    return [
        *alarms,
        f"The drives are worn out after {format_s(costs.drive_life_s)} of this training: it writes "
        f"{format_bytes(advice.answer['bytes'][NVME_WRITE])} in each step, and {job} tokens take "
        f"{digits(100 * (costs.wear_frac or 0))} % of their rated endurance. --drive-lifetime-years Y plans for drives "
        "that last.",
    ]


def _figures(advice: Advice) -> list[tuple[str, str]]:
    figures = []
    costs, answer = advice.costs, advice.answer
    if costs is not None:
        money, *parts = costs.texts.items()
        spent = ", ".join(f"{name} {text.removesuffix(' USD')}" for name, text in parts)
        held = alike_rows((tier, format_bytes(size)) for tier, size in answer["peak_bytes"].items() if size)
        peaks = ", ".join(map(" ".join, held))
        step_tokens = answer["tokens_per_s"] * answer["step_s"]
        least = f" (one step, of {step_tokens:,.0f})" if costs.tokens < step_tokens * (1 - 1e-9) else ""
        job = f"{format_s(costs.seconds)}{least}, {digits(costs.energy_kwh)} kWh"
        figures += [
            ("parameters", format_count(answer["num_parameters"])),
            (f"{format_count(costs.tokens)} tokens", job),
            ("  cost", f"{money[1]}: {spent}"),
            *_rent(advice),
            ("peak memory", peaks),
        ]
        if life := life_text(costs.drive_life_s, answer["bytes"].get(NVME_WRITE, 0)):
            figures.append(("drives last", life))
    elif advice.rented is not None:
        figures += [(f"{format_count(advice.rented.tokens)} tokens", "not on this machine"), *_rent(advice)]
    if advice.largest_model:
        larger = "; none larger was found, and no bound excludes one" if advice.larger_model_may_fit else ""
        figures.append(("largest model", f"{advice.largest_model}, one sequence at a time{larger}"))
    if advice.fits:
        figures += [("" if k else "numbers", text) for k, text in enumerate(answer["numbers"])]
        figures.append(("rates", str(answer["basis"])))
    return figures


def _rent(advice: Advice) -> list[tuple[str, str]]:
    """The job on a machine by the hour, and what the best purchase is in such hours."""
    rented = advice.rented
    if rented is None:
        return []
    by_hour = f"{rented.machine}, {rented.usd_per_hour:g} USD/h"
    usd = f"{rented.usd:,.{2 if rented.usd < 100 else 0}f}"  # cents where they matter
    rows = [("  or rented", f"{usd} USD, {format_s(rented.seconds)} ({by_hour})")]
    for change in advice.changes[:1]:
        hours = f"costs as much as {change.bought.price_usd / rented.usd_per_hour:,.0f} h of that"
        rows.append(("  or bought", f"{change.bought.what} {hours}"))
    return rows


def _limits(advice: Advice) -> list[Sensitivity]:
    return [Sensitivity(**limit) for limit in advice.answer["limits"]]


def _limits_note(advice: Advice) -> str:
    return limits_note(_limits(advice), "what there is to buy, below, is planned for")


def _policy_rows(advice: Advice) -> list[Sequence[str]]:
    """A header, the plan, and the published systems for the same work, quickest first."""
    answer = advice.answer
    rows: list[Sequence[str]] = [
        ("system, same work", "batch", "step", "takes"),
        ("this plan", batch_text(*division_of(answer, advice.point.seq)), format_s(answer["step_s"]), "1.00 x"),
    ]
    policies = answer["policies"]
    rows += policy_rows(policies, answer["step_s"])
    missing = [name for name in policies if not policies[name]["same_work_s"]]
    return [*rows, ("does not run", "-", "-", ", ".join(missing))] if missing else rows


def _nothing_helps(advice: Advice) -> str:
    if not advice.num_tried:
        return "Nothing that is sold for this machine is known here."
    return f"None of {advice.num_tried} single purchases makes this quicker, or possible."


def _cells(change: Change, *, wears_drives: bool = False) -> tuple[str, ...]:
    """A row of what to buy; where nothing is trained today since it `wears_drives`, all fits already."""
    answer = change.answer
    possible = "drives last" if wears_drives else "makes it fit"
    gain = possible if change.gain_frac is None else f"{change.gain_frac * 100:+.0f} %"
    per = "" if change.gain_per_1000_usd is None else f"{change.gain_per_1000_usd:+.0f} %"
    speed = f"{answer['tokens_per_s']:,.0f}"
    return (change.bought.what, f"{change.bought.price_usd:,.0f}", speed, gain, per, str(answer["limited_by"]))


def _rows(advice: Advice) -> list[tuple[str, ...]]:
    return [_cells(change, wears_drives=bool(advice.answer.get("wears_drives"))) for change in advice.changes]


def _html(rows: Sequence[Sequence[str]]) -> str:
    return table(rows[0], rows[1:])
