"""Reads what `tierplan plan` and `tierplan run` leave behind, for the comparison.

RunFolderError(ValueError)   a folder that is not that of a run; says what is missing
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from tierplan.hwmodels.machine import Machine
from tierplan.planner.plan_file import KEY, PlanFileError, load_plan
from tierplan.sim.digest import digest
from tierplan.sim.schedule import Schedule
from tierplan.sim.schedule_file import load_schedule
from tierplan.sim.trace import Trace


class RunFolderError(ValueError):
    """A folder that is no run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFolder:
    """What a run left."""

    trace: Trace
    losses: tuple[float, ...]


def load_run(folder: str | os.PathLike[str]) -> RunFolder:
    """The trace and the losses of a run's folder. Raises `RunFolderError`, or `TraceError` for a broken trace."""
    path = Path(folder)
    if not (path / "trace.json").is_file():
        raise RunFolderError(f"{path} has no trace.json; give the folder that `tierplan run --out` wrote")
    losses = []
    metrics = path / "metrics.jsonl"
    if metrics.is_file():
        for number, line in enumerate(metrics.read_text(encoding="utf-8").splitlines(), 1):
            try:
                losses.append(float(json.loads(line)["loss"]))
            except (ValueError, KeyError, TypeError) as error:
                raise RunFolderError(f"{metrics}, line {number}, is no record of a step: {line[:60]!r}") from error
    return RunFolder(trace=Trace.load(path / "trace.json"), losses=tuple(losses))


def read_schedule(path: str | os.PathLike[str], machine: Machine | None) -> tuple[Schedule, tuple[float, float] | None]:
    """The schedule of a plan or schedule file, and the predicted 90 % interval of its step if the plan has one.

    Where `machine` is given, a file for another one raises `PlanFileError`, if the file says which it was made for.
    """
    schedule = load_schedule(path)
    if KEY not in schedule.meta:
        made_for = schedule.meta.get("machine_sha256")
        if machine is not None and made_for is not None and made_for != digest(machine):
            raise PlanFileError(
                f"{path} was made for another machine than {machine.name!r}, or with other settings; give that one"
            )
        return schedule, None
    plan = load_plan(path, machine=machine)
    interval = plan.prediction.get("interval_s")
    if isinstance(interval, list | tuple) and len(interval) == 2:
        return plan.schedule, (float(interval[0]), float(interval[1]))
    return plan.schedule, None
