"""The step time against device memory: every point is the best plan for a machine with so much, as `tierplan plan` says
it, in any division of the same sequences and on as many of its GPUs as is quickest."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tierplan.hwmodels import load_description
from tierplan.hwmodels.description import find_key
from tierplan.hwmodels.names import DEVICE
from tierplan.planner.infeasible import InfeasiblePlan
from tierplan.sim.output.text import format_s
from tierplan.studies.evaluate import BestPlan, bounded_plan
from tierplan.studies.study import Point

GIB = 2**30
FRONTIER_FRACS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """One device memory on the frontier."""

    device_bytes: int
    step_s: float | None
    """For as many tokens as the answer's step has; None where nothing fits."""
    lower_bound_s: float | None


def frontier(point: Point, best: BestPlan, *, fracs: Sequence[float] = FRONTIER_FRACS) -> list[FrontierPoint]:
    """Step time and bound at fractions and multiples of the device's memory, from little to much, where `best` is the
    answer for all of it.

    A plan for less memory also runs with more, so the step time never rises along the frontier. Memory that no GPU has
    is left out.
    """
    points: list[FrontierPoint] = []
    least_s: float | None = None
    capacity_bytes = best.machine.tier(DEVICE).capacity_bytes
    reserve_bytes = int(load_description(point.machine, point.settings).number("gpu.reserve") or 0)
    for frac in sorted(fracs):
        size = int(capacity_bytes * frac)
        if size + reserve_bytes > find_key("gpu.capacity").most:
            break
        changed = replace(point, overrides={**point.overrides, "gpu.capacity": size + reserve_bytes})
        try:
            there = best if frac == 1 else bounded_plan(changed, known=best.known if frac > 1 else None)
        except InfeasiblePlan:
            points.append(FrontierPoint(device_bytes=size, step_s=least_s, lower_bound_s=None))
            continue
        result = there.result
        same_work = best.result.prediction.tokens / result.prediction.tokens
        step_s, bound_s = same_work * result.step_s, same_work * result.lower_bound_s
        least_s = step_s if least_s is None else min(least_s, step_s)
        points.append(FrontierPoint(device_bytes=size, step_s=least_s, lower_bound_s=min(bound_s, least_s)))
    return points


def quicker_with_less(points: Sequence[FrontierPoint], best: BestPlan) -> str:
    """That a search with less memory came upon a quicker plan than the answer, where one did; else nothing."""
    step_s, capacity_bytes = best.result.step_s, best.machine.tier(DEVICE).capacity_bytes
    least_s = min((p.step_s for p in points if p.step_s and p.device_bytes <= capacity_bytes), default=step_s)
    if least_s >= step_s:
        return ""
    return (
        f"the picture has a plan for less device memory whose step takes {format_s(least_s)}, and which runs with all "
        f"of it: the search for this answer, of {format_s(step_s)}, was too short (--time-limit)"
    )


def plot_frontier(points: Sequence[FrontierPoint], path: str | os.PathLike[str], best: BestPlan) -> None:
    """Writes the frontier as a picture."""
    from matplotlib.figure import Figure

    from tierplan.sim.output.plots import round_ticks, save_figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.margins(x=0.1)  # what is written at the last point is beside it
    own_gib = best.machine.tier(DEVICE).capacity_bytes / GIB
    planned = [(p.device_bytes / GIB, p.step_s) for p in points if p.step_s is not None]
    bounded = [(p.device_bytes / GIB, p.lower_bound_s) for p in points if p.lower_bound_s is not None]
    axes.plot([x for x, _ in planned], [y for _, y in planned], "o-", drawstyle="steps-post", label="planned")
    written_s = 0.0
    for x, step_s in planned:
        if abs(step_s - written_s) > 0.02 * step_s or x == own_gib:
            # aslant, so that neighbours do not write over each other
            axes.annotate(
                format_s(step_s), (x, step_s), xytext=(0, 5), textcoords="offset points", fontsize="small", rotation=30
            )
            written_s = step_s
    axes.plot([x for x, _ in bounded], [y for _, y in bounded], "--", label="lower bound")
    for k, p in enumerate(p for p in points if p.step_s is None):
        axes.axvline(p.device_bytes / GIB, color="0.8", linewidth=1, label="" if k else "does not fit")
    axes.axvline(own_gib, color="tab:green", linewidth=1, label="this machine")
    axes.set(
        xlabel="device memory (GiB)",
        ylabel=f"time of {best.result.prediction.tokens:,} tokens, a step (s)",
        title=f"{best.workload.name} on {best.machine.name}: step time against device memory",
        ylim=(0, 1.15 * max((step_s for _, step_s in planned), default=1.0)),
    )
    round_ticks(axes)
    axes.legend()
    save_figure(figure, path, dpi=120)
