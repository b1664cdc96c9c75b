"""What more of something would be worth: every answer is planned again, not read from a derivative.

worths(workload, machine_with, ...)    one more GB, drive, a faster link, ...: step time and what it saves
frontier(workload, machine, ...)       step time against device memory
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tierplan.hwmodels.machine import Machine, MachineError
from tierplan.hwmodels.names import HOST_ADAM, NVME_READ, NVME_WRITE, compute, d2h, h2d
from tierplan.hwmodels.scaling import private_limits, with_capacity, with_faster
from tierplan.planner.plan import PlanError, Semantics
from tierplan.planner.planning import plan
from tierplan.sim.workloads.workload import Workload

__all__ = ["FrontierPoint", "Worth", "changes", "frontier", "plot_frontier", "worths"]

GB = 1e9
FRONTIER_FRACS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """What one change of the machine does to the planned step."""

    change: str
    step_s: float
    saves_s: float
    """Seconds per step; below 0 would be a search that found less on a better machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontierPoint:
    """One device memory on the frontier."""

    device_bytes: int
    step_s: float | None
    """None where nothing fits."""
    lower_bound_s: float | None


def changes(machine: Machine) -> list[tuple[str, Callable[[Machine], Machine]]]:
    """Changes that can be made to any machine: what they are called, and how."""

    def more(kind: str, gb: float) -> Callable[[Machine], Machine]:
        def change(m: Machine) -> Machine:
            more_bytes = {t.name: t.capacity_bytes + int(gb * GB) for t in m.tiers if t.kind == kind}
            return with_capacity(m, more_bytes)

        return change

    def faster(names: Sequence[str], factor: float) -> Callable[[Machine], Machine]:
        return partial(with_faster, names={*names, *private_limits(machine, names)}, factor=factor)

    kinds = {t.kind for t in machine.tiers}
    devices = range(machine.num_devices)
    options = [("device memory +8 GB", more("device", 8.0))]
    if "host" in kinds:
        options.append(("host memory +64 GB", more("host", 64.0)))
        options.append(("link to the device x 1.25", faster([link(d) for d in devices for link in (h2d, d2h)], 1.25)))
        options.append(("host Adam x 1.25", faster([HOST_ADAM], 1.25)))
    if "nvme" in kinds:
        options.append(("drives x 1.25", faster([NVME_READ, NVME_WRITE], 1.25)))
    options.append(("device compute x 1.25", faster([compute(d) for d in devices], 1.25)))
    return options


def worths(
    workload: Workload,
    machine_with: Callable[[Sequence[str]], Machine],
    *,
    time_limit_s: float = 10.0,
    semantics: Semantics | None = None,
    drive_lifetime_years: float | None = None,
) -> list[Worth]:
    """What changes are worth, most first. `machine_with(overrides)` gives the machine with settings changed.

    Settings that the machine does not have (a machine without drives, say) are left out.
    """
    machine = machine_with(())
    again = partial(
        plan, workload, time_limit_s=time_limit_s, semantics=semantics, drive_lifetime_years=drive_lifetime_years
    )
    base = again(machine)
    tried: list[tuple[str, Machine]] = [(name, change(machine)) for name, change in changes(machine)]
    drives = _drives(machine)
    if drives:
        with contextlib.suppress(MachineError, ValueError):
            tried.append(("one more drive", machine_with([f"nvme.drives={drives + 1}"])))
    answers = []
    for name, changed in tried:
        try:
            result = again(changed, policies=())
        except PlanError:
            continue
        step_s = min(result.step_s, base.step_s)  # the plan for less also runs on more
        answers.append(Worth(change=name, step_s=step_s, saves_s=base.step_s - step_s))
    return sorted(answers, key=lambda w: (-w.saves_s, w.change))


def _drives(machine: Machine) -> int:
    drives = machine.description.get("nvme.drives")
    return int(drives["value"]) if isinstance(drives, Mapping) else 0


def frontier(
    workload: Workload,
    machine: Machine,
    *,
    fracs: Sequence[float] = FRONTIER_FRACS,
    time_limit_s: float = 5.0,
    drive_lifetime_years: float | None = None,
) -> list[FrontierPoint]:
    """Step time and bound at fractions and multiples of the device's memory, from little to much.

    A plan for less memory also runs with more, so the step time never rises along the frontier.
    """
    points: list[FrontierPoint] = []
    best: float | None = None
    for frac in sorted(fracs):
        tiers = [
            replace(t, capacity_bytes=int(t.capacity_bytes * frac)) if t.kind == "device" else t for t in machine.tiers
        ]
        size = next(t.capacity_bytes for t in tiers if t.kind == "device")
        try:
            result = plan(
                workload,
                replace(machine, tiers=tuple(tiers)),
                time_limit_s=time_limit_s,
                policies=(),
                drive_lifetime_years=drive_lifetime_years,
            )
        except PlanError:
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

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    planned = [(p.device_bytes / GB, p.step_s) for p in points if p.step_s is not None]
    bounded = [(p.device_bytes / GB, p.lower_bound_s) for p in points if p.lower_bound_s is not None]
    axes.plot([x for x, _ in planned], [y for _, y in planned], "o-", label="planned")
    axes.plot([x for x, _ in bounded], [y for _, y in bounded], "--", label="lower bound")
    for k, p in enumerate(p for p in points if p.step_s is None):
        axes.axvline(p.device_bytes / GB, color="0.8", linewidth=1, label="" if k else "does not fit")
    now = next(t.capacity_bytes for t in machine.tiers if t.kind == "device") / GB
    axes.axvline(now, color="tab:green", linewidth=1, label="this machine")
    axes.set(
        xlabel="device memory (GB)",
        ylabel="step time (s)",
        title=f"{workload.name} on {machine.name}: step time against device memory",
        ylim=(0, None),
    )
    axes.legend()
    figure.savefig(path, dpi=120)
