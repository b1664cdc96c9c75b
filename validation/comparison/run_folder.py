"""Reads what `tierplan plan` and `tierplan run` leave behind, for the comparison."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from math import nan
from pathlib import Path

from tierplan.hwmodels import load_machine
from tierplan.hwmodels.machine import Machine
from tierplan.planner.plan_file import PlanFileError, load_plan, machine_of_plan
from tierplan.sim.digest import PLAN_KEY, changed_text, digest, is_as_written
from tierplan.sim.schedule import Schedule
from tierplan.sim.schedule_file import load_schedule
from tierplan.sim.trace import Trace


class RunFolderError(ValueError):
    """A folder that is not that of a run; says what is missing."""


def load_run(folder: str | os.PathLike[str]) -> tuple[Trace, tuple[float, ...]]:
    """The trace and the losses of a run's folder. Raises `RunFolderError`, or `TraceError` for a broken trace."""
    path = Path(folder)
    if not (path / "trace.json").is_file():
        raise RunFolderError(f"{path} has no trace.json; give the folder that `tierplan run --out` wrote")
    losses = []
    metrics = path / "metrics.jsonl"
    if metrics.is_file():
        text = metrics.read_text(encoding="utf-8", errors="replace")
        *lines, _ = text.split("\n")  # what has no end was cut off by a crash
        for number, line in enumerate(lines, 1):
            try:
                loss = json.loads(line)["loss"]
                losses.append(nan if loss is None else float(loss))  # JSON has no numbers that are not finite
            except (ValueError, KeyError, TypeError) as error:
                raise RunFolderError(f"{metrics}, line {number}, is no record of a step: {line[:60]!r}") from error
    trace = Trace.load(path / "trace.json")
    return replace(trace, name=str(path / "trace.json")), tuple(losses)  # as errors call it


def read_schedule(
    path: str | os.PathLike[str], machine_name: str | None, overrides: Sequence[str] = (), *, any_machine: bool = False
) -> tuple[Schedule, Machine]:
    """The schedule of a plan or schedule file, and the machine that it was made for, which the file holds.

    A machine that is named takes its place. One that the file was not made for raises `PlanFileError`, if the file says
    which it was made for, unless `any_machine` will do; so does a file that was changed after it was written.
    """
    schedule = load_schedule(path)
    if not is_as_written(schedule):
        raise PlanFileError(changed_text(path))
    own = machine_of_plan(schedule)
    if machine_name is None and not overrides:
        if own is None:
            raise PlanFileError(f"{path} does not say which machine it was made for; give it with --machine")
        if PLAN_KEY in schedule.meta:
            load_plan(path)
        return schedule, own
    machine = load_machine(machine_name or "here", overrides)
    made_for = schedule.meta.get("machine_sha256")
    if any_machine:
        return schedule, machine
    if PLAN_KEY in schedule.meta:
        load_plan(path, machine=machine)
    elif made_for is not None and made_for != digest(machine):
        raise PlanFileError(
            f"{path} was made for another machine than {machine.name!r}, or with other settings; give that one, or "
            "none: the plan's own is in the file"
        )
    return schedule, machine
