"""A workload on a machine with sliders: what would other memories and other rates give?"""

from __future__ import annotations

import io
from html import escape
from typing import Any

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.scaling import own_limits, with_capacity, with_faster
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
from tierplan.studies.slow_step.setups import part_of

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


def explore(workload: Workload, machine: Machine, *, time_limit_s: float | None = QUICK_TODAY_S) -> Any:
    """Controls for a notebook: who decides, how large memories are, how fast parts are; below, what comes of it.

    For each change the planner does the work that `time_limit_s` usually buys, on any computer the same: by default
    the short search with which `tierplan advise --quick` begins, with None the whole one of `tierplan plan`.
    """
    try:
        import ipywidgets as widgets
    except ImportError as error:
        raise RuntimeError(words_of_missing(error, "explore")) from error

    def slider(name: str, labels: list[str]) -> Any:
        options = list(zip(labels, FACTORS, strict=True))
        return widgets.SelectionSlider(options=options, value=1.0, description=name, continuous_update=False)

    method = widgets.Dropdown(options=[PLANNER, *POLICIES], description="method")
    # GPUs have one for all: no plan is made for unequal ones
    alike = {kind: [t for t in machine.tiers if t.kind == kind] for kind in ("device", "host")}
    memories = [
        (tiers, slider(tiers[0].name, [format_bytes(factor * tiers[0].capacity_bytes) for factor in FACTORS]))
        for tiers in alike.values()
        if tiers
    ]
    parts = {
        name: slider(name, [f"{factor:g} x" for factor in FACTORS])
        for name in dict.fromkeys(part_of(stream.name) for stream in machine.streams)
    }
    figures, picture = widgets.HTML(), widgets.Image(format="png")

    def show(_: object = None) -> None:
        capacity = {t.name: int(control.value * t.capacity_bytes) for tiers, control in memories for t in tiers}
        changed = with_capacity(machine, capacity)
        for name, control in parts.items():
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
