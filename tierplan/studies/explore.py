"""A workload on a machine with sliders: what would other memories and other rates give?"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from html import escape
from typing import Any

from tierplan.hwmodels.machine import Machine, Rate, Stream
from tierplan.hwmodels.names import HOST, NVME, NVME_LIMIT, parse_stream
from tierplan.hwmodels.scaling import own_limits, with_capacity, with_demand, with_faster
from tierplan.hwmodels.values.extras import words_of_missing
from tierplan.planner.infeasible import InfeasiblePlan
from tierplan.planner.plan_rules import PLANNER
from tierplan.planner.planning import plan
from tierplan.planner.policies import POLICIES
from tierplan.planner.prediction import Prediction, predict
from tierplan.sim.output.text import format_bytes, wrapped
from tierplan.sim.workloads.workload import Workload
from tierplan.studies.advise import QUICK_TODAY_S
from tierplan.studies.answer import answer_lines, prediction_text, step_text
from tierplan.studies.evaluate import BestPlan
from tierplan.studies.purchases import FORMS, GIB
from tierplan.studies.slow_step.setups import DRIVES, part_of

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
OF_ALL_DRIVES = {"nvme.slot", "nvme.array_read", "nvme.array_write"}
"""Keys of rates that more drives do not raise in proportion."""


def explore(workload: Workload, machine: Machine, *, time_limit_s: float | None = QUICK_TODAY_S) -> Any:
    """Controls for a notebook: who decides, how large memories are, how fast parts are; below, what comes of it.

    For each change the planner does the work that `time_limit_s` usually buys, on any computer the same: by default
    the short search with which `tierplan advise --quick` begins, with None the whole one of `tierplan plan`.
    """
    try:
        import ipywidgets as widgets
    except ImportError as error:
        raise RuntimeError(words_of_missing(error, "explore")) from error

    def slider(name: str, options: Mapping[str, float], own: float = 1.0) -> Any:
        chosen = [*options.items()]
        return widgets.SelectionSlider(options=chosen, value=own, description=name, continuous_update=False)

    method = widgets.Dropdown(options=[PLANNER, *POLICIES], description="method")
    sold = sold_for(machine)
    # GPUs have one for all: no plan is made for unequal ones
    alike = {kind: [t for t in machine.tiers if t.kind == kind] for kind in ("device", "host")}
    memories = []
    for kind, (tier, *more) in ((kind, tiers) for kind, tiers in alike.items() if tiers):
        sizes = {format_bytes(factor * tier.capacity_bytes): factor for factor in FACTORS}
        sizes = sold["host.capacity"] if kind == "host" and sold else sizes
        memories.append(([tier, *more], slider(tier.name, sizes)))
    parts = {
        name: slider(name, sold["nvme.drives"] if name == DRIVES and sold else {f"{x:g} x": x for x in FACTORS})
        for name in dict.fromkeys(part_of(stream.name) for stream in machine.streams)
    }
    figures, picture = widgets.HTML(), widgets.Image(format="png")

    def show(_: object = None) -> None:
        capacity = {t.name: int(control.value * t.capacity_bytes) for tiers, control in memories for t in tiers}
        changed = with_capacity(machine, capacity)
        for name, control in parts.items():
            if name == DRIVES and sold:
                changed = _with_drives(changed, control.value)
                continue
            streams = {s.name for s in machine.streams if part_of(s.name) == name}
            changed = with_faster(changed, streams | own_limits(machine, streams), control.value)
        lines, prediction = _answer(method.value, workload, changed, time_limit_s)
        figures.value = f"<pre>{escape(lines)}</pre>"
        picture.value = _drawn(prediction)

    controls = [method, *(control for _, control in memories), *parts.values()]
    for control in controls:
        control.observe(show, names="value")
    show()
    wrap = widgets.Layout(flex_flow="row wrap")
    return widgets.VBox([widgets.Box(controls, layout=wrap), figures, picture])


def sold_for(machine: Machine) -> dict[str, dict[str, float]]:
    """DRAM and drives that `tierplan advise` knows for the case, with what the machine has, as multiples of that by
    what they are; nothing where nobody says of which form it is, or what its drives are together."""
    said = {k: v["value"] for k, v in machine.description.items() if isinstance(v, Mapping) and "value" in v}
    if "host.form" not in said or not said.get("nvme.drives") or said.keys() & OF_ALL_DRIVES:
        return {}
    form, own_drives, usable = FORMS[said["host.form"]], said["nvme.drives"], machine.tier(HOST).capacity_bytes
    kept = said["host.capacity"] - usable
    own_gib = form.own_gib(said["host.capacity"])
    sizes: dict[float, tuple[str, float]] = {}
    sizes |= {gib: (f"{gib} GiB", (gib * GIB - kept) / usable) for gib in form.dram_gib if gib != own_gib}
    sizes[own_gib] = (f"{format_bytes(said['host.capacity'])}, as it is", 1.0)
    counts = sorted({*range(1, min(form.drives, 4) + 1), form.drives, int(own_drives)})
    return {
        "host.capacity": dict(sizes[gib] for gib in sorted(sizes)),
        "nvme.drives": {f"{number}": number / own_drives for number in counts},
    }


def _with_drives(machine: Machine, factor: float) -> Machine:
    """The machine with so many times its drives: each does its part of an op, and they are worn together."""
    if factor == 1:
        return machine
    said = {key: value for key, value in machine.description.items() if key in ("limits", "nvme.drives")}
    listed: Any = [NVME_LIMIT, *said.get("limits", {})]  # type: ignore[misc]  # in fractions of full speed

    def of_all(stream: Stream) -> Stream:
        if not parse_stream(stream.name).is_drive:
            return stream
        rates = {k: Rate(tuple((a * factor, x * factor) for a, x in r.points)) for k, r in stream.rates.items()}
        return with_demand(replace(stream, rates=rates), listed, 1 / factor)

    drives: Any = said["nvme.drives"]
    described = {**machine.description, "nvme.drives": {**drives, "value": factor * drives["value"]}}
    more = replace(machine, streams=tuple(map(of_all, machine.streams)), description=described)
    return with_capacity(more, {NVME: round(factor * machine.tier(NVME).capacity_bytes)})


def _answer(policy: str, workload: Workload, machine: Machine, time_limit_s: float | None) -> tuple[str, Prediction]:
    """What `tierplan simulate` and `tierplan plan` print of it, and how short the planner's search was."""
    if policy != PLANNER:
        prediction = predict(policy, workload, machine)
        return prediction_text(prediction), prediction
    try:
        result = plan(workload, machine, time_limit_s=time_limit_s, by_clock=False)
    except InfeasiblePlan as error:
        no = Prediction(policy=PLANNER, model=workload.name, machine=machine.name, plan=None, reason=error.what)
        return prediction_text(no), no
    p, notes = result.prediction, list[str]()
    if time_limit_s is not None and result.status != "within-gap":
        ended = ", and the clock ended it before its work was done" * (result.status == "time-limit")
        notes.append(
            f"At least {p.tokens_per_s:,.0f} tokens/s: the search was short{ended}. The whole one mostly finds a "
            "quicker plan: tp.plan(workload, machine), or tp.explore(workload, machine, time_limit_s=None)."
        )
    if machine.num_devices > 1:
        notes.append(f"The plan is for all {machine.num_devices} GPUs; fewer were not tried.")
    has = step_text(
        p.micro_batch, p.accumulation, result.plan.num_batches, p.devices, workload.training.sequence_length
    )
    heads = [f"{PLANNER}: {p.model} on {p.where}", has, *notes]
    best = BestPlan(workload=workload, machine=machine, result=result)
    return "\n".join([*(line for head in heads for line in wrapped(head)), *answer_lines(best)]), p


def _drawn(prediction: Prediction) -> bytes:
    """The timeline of one step as a PNG; nothing where it does not fit."""
    from tierplan.sim.output.plots import plot_timeline

    png = io.BytesIO()
    if prediction.steady is not None:
        figure = plot_timeline(prediction.steady.trace, window_s=prediction.steady.window_s)
        figure.savefig(png, format="png", dpi=90)
    return png.getvalue()
