"""A workload on a machine with sliders: what would other memories and other rates give?"""

from __future__ import annotations

import io
from typing import Any

from tierplan.hwmodels.extras import words_of_missing
from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.scaling import own_limits, with_capacity, with_faster
from tierplan.planner.infeasible import InfeasiblePlan
from tierplan.planner.plan_rules import PLANNER
from tierplan.planner.planning import plan
from tierplan.planner.policies import POLICIES
from tierplan.planner.prediction import Prediction, predict
from tierplan.sim.output.text import format_bytes
from tierplan.sim.workloads.workload import Workload
from tierplan.studies.slow_step.setups import part_of

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


def explore(workload: Workload, machine: Machine, *, time_limit_s: float = 0.4) -> Any:
    """Controls for a notebook: who decides, how large memories are, how fast parts are; below, what comes of it.

    The planner searches for `time_limit_s` only, so that the answer follows the hand; `tp.plan` searches for longer.
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
        prediction = _predict(method.value, workload, changed, time_limit_s)
        figures.value = prediction._repr_html_()
        picture.value = _drawn(prediction)

    controls = [method, *(control for _, control in memories), *parts.values()]
    for control in controls:
        control.observe(show, names="value")
    show()
    wrap = widgets.Layout(flex_flow="row wrap")
    return widgets.VBox([widgets.Box(controls, layout=wrap), figures, picture])


def _predict(policy: str, workload: Workload, machine: Machine, time_limit_s: float) -> Prediction:
    if policy != PLANNER:
        return predict(policy, workload, machine)
    try:
        return plan(workload, machine, time_limit_s=time_limit_s).prediction
    except InfeasiblePlan as error:
        return Prediction(policy=PLANNER, model=workload.name, machine=machine.name, plan=None, reason=error.what)


def _drawn(prediction: Prediction) -> bytes:
    """The timeline of one step as a PNG; nothing where it does not fit."""
    from tierplan.sim.output.plots import plot_timeline

    png = io.BytesIO()
    if prediction.steady is not None:
        figure = plot_timeline(prediction.steady.trace, window_s=prediction.steady.window_s)
        figure.savefig(png, format="png", dpi=90)
    return png.getvalue()
