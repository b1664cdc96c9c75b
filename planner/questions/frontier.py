"""The step time against device memory: every point is planned again, not read from a derivative."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.scaling import with_capacity
from tierplan.planner.infeasible import InfeasiblePlan
from tierplan.planner.planning import plan
from tierplan.sim.output.text import format_s
from tierplan.sim.workloads.workload import Workload

GIB = 2**30
FRONTIER_FRACS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """One device memory on the frontier."""

    device_bytes: int
    step_s: float | None
    """None where nothing fits."""
    lower_bound_s: float | None


def frontier(
    workload: Workload, machine: Machine, *, fracs: Sequence[float] = FRONTIER_FRACS, **settings: Any
) -> list[FrontierPoint]:
    """Step time and bound at fractions and multiples of the device's memory, from little to much.

    A plan for less memory also runs with more, so the step time never rises along the frontier. `settings` are those of
    `plan`: semantics, seed, limits.
    """
    points: list[FrontierPoint] = []
    best: float | None = None
    for frac in sorted(fracs):
        capacity_bytes = {t.name: int(t.capacity_bytes * frac) for t in machine.tiers if t.kind == "device"}
        size = next(iter(capacity_bytes.values()))
        try:
            result = plan(workload, with_capacity(machine, capacity_bytes), **settings)
        except InfeasiblePlan:
            points.append(FrontierPoint(device_bytes=size, step_s=best, lower_bound_s=None))
            continue
        best = result.step_s if best is None else min(best, result.step_s)
        points.append(FrontierPoint(device_bytes=size, step_s=best, lower_bound_s=min(result.lower_bound_s, best)))
    return points


def plot_frontier(
    points: Sequence[FrontierPoint], path: str | os.PathLike[str], workload: Workload, machine: Machine
) -> None:
    """Writes the frontier as a picture."""
    from matplotlib.figure import Figure

    from tierplan.sim.output.plots import round_ticks, save_figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    planned = [(p.device_bytes / GIB, p.step_s) for p in points if p.step_s is not None]
    bounded = [(p.device_bytes / GIB, p.lower_bound_s) for p in points if p.lower_bound_s is not None]
    axes.plot([x for x, _ in planned], [y for _, y in planned], "o-", drawstyle="steps-post", label="planned")
    written_s = 0.0
    for x, step_s in planned:
        if abs(step_s - written_s) > 0.02 * step_s:
            axes.annotate(format_s(step_s), (x, step_s), xytext=(0, 6), textcoords="offset points", fontsize="small")
            written_s = step_s
    axes.plot([x for x, _ in bounded], [y for _, y in bounded], "--", label="lower bound")
    for k, p in enumerate(p for p in points if p.step_s is None):
        axes.axvline(p.device_bytes / GIB, color="0.8", linewidth=1, label="" if k else "does not fit")
    now = next(t.capacity_bytes for t in machine.tiers if t.kind == "device") / GIB
    axes.axvline(now, color="tab:green", linewidth=1, label="this machine")
    axes.set(
        xlabel="device memory (GiB)",
        ylabel="step time (s)",
        title=f"{workload.name} on {machine.name}: step time against device memory",
        ylim=(0, 1.1 * max((step_s for _, step_s in planned), default=1.0)),
    )
    round_ticks(axes)
    axes.legend()
    save_figure(figure, path, dpi=120)
