"""The what-if page: a grid of answers, in one file that a browser opens from disk and that asks no network.

The grid is a study, and each answer is what `tierplan plan` or `tierplan simulate` says of its point; the page names
that command. Texts are made here, in the words of the other commands; `what_if.js` chooses and draws.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from itertools import accumulate
from operator import mul
from typing import Any

from tierplan.hwmodels import load_description, load_machine
from tierplan.hwmodels.build import GPU_FORMS
from tierplan.hwmodels.machine import MachineError
from tierplan.hwmodels.names import NVME_WRITE
from tierplan.planner.plan_rules import PLANNER
from tierplan.planner.questions.endurance import life_text, years_text
from tierplan.planner.search.budget import DEFAULT_OPS, OPS_PER_S
from tierplan.sim.analysis.explain import Sensitivity
from tierplan.sim.output.text import digits, format_bytes, format_count, format_s, in_short
from tierplan.studies.advise import QUICKER_FRAC
from tierplan.studies.answer import limit_rows, limited_text, limits_note, question_text
from tierplan.studies.evaluate import machine_of, predict_point, training_of
from tierplan.studies.purchases import (
    FORMS,
    GIB,
    SOON_S,
    TOKENS,
    PriceList,
    check_rent,
    costs_of,
    energy_assumptions,
    gpus_for,
    price_assumptions,
    priced,
)
from tierplan.studies.study import Point, Study
from tierplan.studies.sweep import Row, sweep
from tierplan.validation.report.page import write_page

LABELS: Mapping[str, str] = {
    "model": "Model",
    "policy": "Method",
    "gpu.part": "GPU",
    "gpu.count": "Number of GPUs",
    "host.capacity": "DRAM",
    "nvme.drives": "Drives",
    "sequences": "Sequences per step",
}
"""The controls in their order, by key of a point or of its machine."""
MODELS = ("llama-3.1-8b", "qwen3-14b")
POLICIES = (PLANNER, "zero-infinity", "zero-offload", "fuyou")
SEQUENCES = (16, 4)
NUM_LIMITS = 8


def grid_of(
    machine: str = "desktop-4090",
    named: Mapping[str, Sequence[object]] | None = None,
    *,
    settings: Mapping[str, object] | None = None,
    overrides: Mapping[str, object] | None = None,
    planner_s: float | None = None,
    most: int | None = None,
) -> Study:
    """The points that a page needs; refuses what no machine can be.

    `named` are the values by key of `LABELS`. What is left empty is what the machine has, with `overrides` at every
    point, and at `most` so many values of what shops sell for it. `settings` say how all of them train, by field of
    `Point`.
    """
    named = {key: list(dict.fromkeys((named or {}).get(key, ()))) for key in LABELS}
    given = {key: [value] for key, value in (overrides or {}).items()}
    if twice := [key for key in LABELS if named[key] and key in given]:
        raise MachineError(
            f"{twice[0]} is set for all points, and values of it are to be chosen; leave one of them out"
        )
    own = load_description(machine, [f"{key}={value}" for key, value in (overrides or {}).items()])
    case = str(own.quantity("host.form").value)  # type: ignore[union-attr]  # it has a default
    form = FORMS[case]
    if named["gpu.part"] and not GPU_FORMS[case]:
        raise MachineError(f"the GPU of {own.name!r} is no card to be changed; leave out --gpu, or name a desktop")
    part, count = own.quantity("gpu.part"), int(own.number("gpu.count") or 1)
    capacity, own_drives = own.number("host.capacity") or 0.0, int(own.number("nvme.drives") or 0)
    cards = [name for name, gpu in gpus_for(case).items() if gpu.number("gpu.peak_bf16")]
    sold = [f"{gib} GiB" for gib in form.dram_gib if gib * GIB > 1.1 * capacity][:2]
    offered: dict[str, list[object]] = {
        "gpu.part": _first(part.value, cards) if part and cards else [],
        "gpu.count": _first(count, [1]),
        "host.capacity": _first(int(capacity), sold),
        "nvme.drives": _first(own_drives, [n for n in (2, 4) if n <= form.drives]) if own_drives else [],
    }
    if own.number("host.rent"):
        offered = {key: values[:1] for key, values in offered.items()}
    axes = {key: list(named[key]) or given.get(key) or default[:most] for key, default in offered.items()}
    scenario: dict[str, Sequence[object]] = {
        "model": named["model"] or MODELS[: most and 1],
        "machine": [machine],
        "policy": named["policy"] or POLICIES[:most],
        "sequences": named["sequences"] or SEQUENCES[:most],
        **{name: [value] for name, value in (settings or {}).items()},
    }
    if planner_s is not None:
        scenario["planner_s"] = [planner_s]
    changes = {**given, **{key: values for key, values in axes.items() if values}}
    study = Study(name="what-if", scenario=scenario, overrides=changes)
    study.check_names()
    priced(Point(model="", machine=machine, overrides=overrides or {}), PriceList())
    for changed in {tuple(p.settings) for p in study.points()}:
        load_machine(machine, changed)
        check_rent(load_description(machine, changed), own)
    return study


def page_point(point: Point) -> dict[str, object]:
    """What `tierplan simulate --json` says of a point."""
    return predict_point(point).record()


def write_what_if(
    path: str | os.PathLike[str],
    study: Study,
    *,
    keep_in: str | os.PathLike[str] | None = None,
    tokens: float = TOKENS,
    num_workers: int | None = None,
    progress: bool = False,
) -> list[Row]:
    """Computes what is missing of the grid, keeps it in a folder, and writes the page; the answers, as rows."""
    prices, points = PriceList(), list(study.points())
    rows = sweep(points, page_point, out_dir=keep_in, num_workers=num_workers, progress=progress)
    shown = [shown_row(point, row, prices, tokens) for point, row in zip(points, rows, strict=True)]
    machine = load_description(points[0].machine, points[0].settings)
    data = {
        "axes": _axes(study),
        "rows": shown,
        "job": f"{format_count(tokens)} tokens",
        "quicker_frac": QUICKER_FRAC,
    }
    embedded = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    style, script = (files("tierplan.studies").joinpath(f"what_if.{end}").read_text("utf-8") for end in ("css", "js"))
    rent_usd_per_hour = machine.number("host.rent")
    money = (
        f"Rented at {rent_usd_per_hour:g} USD an hour, with its electricity and drives."
        if rent_usd_per_hour
        else f"Electricity at {prices.electricity_usd_per_kwh:g} USD per kWh, machines written off over "
        f"{prices.years:g} years, DRAM as shops sell it, at {prices.dram_usd_per_gib:g} USD per GiB more or less than "
        "the machine has."
    )
    planner_s, short = points[0].planner_s, ""
    if planner_s is not None and planner_s * OPS_PER_S < DEFAULT_OPS:
        short = f"The planner had at most {planner_s:g} s for each: with more it finds quicker plans. "
    settings = " ".join(points[0].words[2:])  # behind the sequence's length
    years = points[0].drive_lifetime_years
    lasting = "" if years is None else f"Plans that wear drives out in less than {years_text(years)} are left out. "
    about = (
        f"{machine.summary or machine.name}; {points[0].seq} tokens a sequence{settings and f', {settings}'}. "
        f"{len(points):,} answers, all computed "
        "beforehand: nothing is asked of a network. "
        f"{lasting}{short}{money} Assumed: {'; '.join(energy_assumptions(machine, prices))}."
    )
    body = (
        f"<style>{style}</style>\n"
        '<noscript><p class="lead">This page needs JavaScript, to choose among the answers in it.</p></noscript>\n'
        f'<p class="soft">{escape(about)}</p>\n<div id="page"><form id="controls" aria-label="What if"></form>'
        '<main id="answer" aria-live="polite"></main></div>\n'
        f'<script type="application/json" id="grid">{embedded}</script>\n<script>\n{script}</script>'
    )
    write_page(path, f"What if: training on {machine.name}", [body])
    return rows


def shown_row(point: Point, row: Row, prices: PriceList, tokens: float) -> dict[str, Any]:
    """A point's answer as the page shows it: figures to choose and draw by, and texts."""
    if not row.get("fits"):
        reason = str(row.get("error") or row["why_not"])
        return {"fits": False, "why": in_short(reason), "command": _command(point, row)}
    description = priced(point, prices)
    costs = costs_of(row, description, prices, tokens)
    texts = costs.texts
    if costs.machine_usd is not None:
        texts["machine"] = "; ".join([texts["machine"], *price_assumptions(description)])
    limits = [Sensitivity(**limit) for limit in row["limits"]]
    life_s = costs.drive_life_s
    life = life_text(life_s, row["bytes"].get(NVME_WRITE, 0))
    memory = [
        (tier, peak, capacity := row["capacity_bytes"][tier], f"{format_bytes(peak)} of {format_bytes(capacity)}")
        for tier, peak in row["peak_bytes"].items()
        if peak > 0
    ]
    wear = [] if costs.wear_frac is None else [("wear", f"{digits(100 * costs.wear_frac)} % of the drives' endurance")]
    other = row["other_numbers"] and f"not the numbers of plain training: {row['other_numbers']}"
    return {
        "fits": True,
        "step_s": row["step_s"],
        "tokens_per_s": row["tokens_per_s"],
        "price_usd": costs.machine_price_usd,
        "step": format_s(row["step_s"]),
        "how": question_text(point, row, training_of(point, machine_of(point)).dtype),
        "limited_by": row["limited_by"],
        "limited": limited_text(limits),
        "limits_note": limits_note(limits, "is another choice here"),
        "limits": limit_rows(limits)[1 : NUM_LIMITS + 1],
        "memory": memory,
        "lasts": life and ("not known" if life_s is None else format_s(life_s)),
        "life": life,
        "alarm": life_s is not None and life_s < SOON_S,
        "note": ". ".join(filter(None, (row["devices_note"], other))),
        "costs": [
            ("time", format_s(costs.seconds)),
            *texts.items(),
            ("energy", f"{digits(costs.energy_kwh)} kWh"),
            *wear,
        ],
        "command": _command(point, row),
    }


def _first(own: object, others: Iterable[object]) -> list[object]:
    return list(dict.fromkeys((own, *others)))


def _axes(study: Study) -> list[dict[str, object]]:
    """The controls: the texts of their values, and how far apart neighbours are among the rows."""
    values = {**study.scenario, **study.overrides}
    sizes = [len(v) for v in values.values()]
    strides = dict(zip(values, [*accumulate(reversed(sizes[1:]), mul, initial=1)][::-1], strict=True))
    return [
        {"key": key, "label": label, "stride": strides[key], "texts": [_text(key, v) for v in values[key]]}
        for key, label in LABELS.items()
        if key in values
    ]


def _text(key: str, value: object) -> str:
    return format_bytes(value) if key == "host.capacity" and isinstance(value, int) else str(value)


def _command(point: Point, row: Row) -> str:
    """What says the same in a terminal."""
    asked, years = ["--model", point.model, "--machine", point.machine], point.drive_lifetime_years
    asked += [] if years is None else ["--drive-lifetime-years", f"{years:g}"]
    if point.policy == PLANNER:
        words = ["plan", *asked, "--sequences", str(point.sequences)]
        words += [] if point.planner_s is None else ["--time-limit", f"{point.planner_s:g}"]
    elif row.get("micro_batch") and years is None:
        words = ["simulate", "--policy", point.policy, *asked, "--batch", str(row["micro_batch"])]
        words += ["--accumulation", str(row["accumulation"])]
    else:
        words = ["compare-policies", "--policies", point.policy, *asked, "--sequences", str(point.sequences)]
    words = ["tierplan", *words, *point.words]
    return shlex.join([*words, *(word for setting in point.settings for word in ("--set", setting))])
