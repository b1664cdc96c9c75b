"""The plan as a file: a schedule file whose `meta` also says what was decided, for what, and how good it is.

So everything that reads schedules reads plans, `tierplan run` included. `load_plan` adds the strictness: every field
of the record must be there and nothing else, the file must be as it was written, and model and machine, where they are
given, must be those that the plan was made for. Errors:

    PlanFileError(PlanError)   a file that is no plan, was changed, or belongs to another model or machine
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.values.records import RecordError, decode
from tierplan.planner.plan import KINDS, Plan
from tierplan.planner.plan_rules import PlanError
from tierplan.planner.results import PlanResult
from tierplan.sim.digest import PLAN_KEY, SEAL_KEY, changed_text, digest, is_as_written, sealed
from tierplan.sim.schedule import Schedule
from tierplan.sim.schedule_file import load_schedule, save_schedule
from tierplan.sim.workloads.workload import Workload

VERSION = 4
MACHINE_KEY = "machine_record"
"""Where in `meta` of any schedule the machine stands that it was made for."""


class PlanFileError(PlanError):
    """A file that is no plan, was changed, or belongs to another model or machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """What stands in `meta`."""

    version: int
    plan: Mapping[str, object]
    model_sha256: str
    machine_sha256: str
    solver: Mapping[str, object]
    prediction: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """What a plan file holds."""

    plan: Plan
    schedule: Schedule
    solver: Mapping[str, object]
    """`name`, `status`, `gap`, `lower_bound_s`, `seed`."""
    prediction: Mapping[str, object]
    """`step_s`, `interval_s` (low and high, of 90 %) and `basis`, what they rest on."""


def save_plan(result: PlanResult, workload: Workload, machine: Machine, path: str | os.PathLike[str]) -> None:
    """Writes plan and schedule as one schedule file, replacing it in one step."""
    record = {
        "version": VERSION,
        "plan": {"kind": result.plan.kind, **asdict(result.plan)},
        "model_sha256": digest(workload),
        "machine_sha256": digest(machine),
        "solver": {
            "name": result.solver,
            **{name: getattr(result, name) for name in ("status", "gap", "lower_bound_s", "seed")},
        },
        "prediction": {name: getattr(result.prediction, name) for name in ("step_s", "interval_s", "basis")},
    }
    meta = {**result.schedule.meta, **machine_meta(machine), PLAN_KEY: record}
    save_schedule(sealed(replace(result.schedule, meta=meta)), path)


def machine_meta(machine: Machine) -> dict[str, object]:
    """The machine for a schedule's `meta`: whoever compares a run with its prediction needs no other."""
    return {MACHINE_KEY: asdict(replace(machine, description={}))}


def machine_of_plan(schedule: Schedule) -> Machine | None:
    """The machine that a schedule was made for, where it says which."""
    record = schedule.meta.get(MACHINE_KEY)
    try:
        return None if record is None else decode(Machine, record, "the plan's machine")
    except RecordError as error:
        raise PlanFileError(f"{error}; plan again") from None


def load_plan(
    path: str | os.PathLike[str], *, workload: Workload | None = None, machine: Machine | None = None
) -> PlanFile:
    """The plan in the file.

    Raises `PlanFileError` when a field is missing, unknown or of the wrong kind, when the file is not as it was
    written, or when `workload` or `machine` are given and are not those of the plan; `ScheduleError` when it is not a
    schedule file at all.
    """
    schedule = load_schedule(path)
    if PLAN_KEY not in schedule.meta:
        raise PlanFileError(f"{path} is a schedule without a plan; write plans with `tierplan plan -o`")
    try:
        record = decode(_Record, schedule.meta[PLAN_KEY], "the plan's record")
        if record.version != VERSION:
            raise RecordError(f"has plan version {record.version!r}, this reader takes {VERSION}")
        kind = KINDS.get(str(record.plan.get("kind")))
        if kind is None:
            raise RecordError(f"the plan's kind is {record.plan.get('kind')!r}; it must be {' or '.join(KINDS)}")
        plan = decode(kind, {name: value for name, value in record.plan.items() if name != "kind"}, "the plan")
    except RecordError as error:
        raise PlanFileError(f"{path}: {error}; plan again") from None
    if not is_as_written(schedule):
        raise PlanFileError(changed_text(path))
    meta = {name: value for name, value in schedule.meta.items() if name not in (PLAN_KEY, SEAL_KEY)}
    schedule = replace(schedule, meta=meta)
    for name, thing, sha256 in (("model", workload, record.model_sha256), ("machine", machine, record.machine_sha256)):
        if thing is not None and digest(thing) != sha256:
            raise PlanFileError(
                f"{path} was made for another {name} than {thing.name!r}, or with other settings; plan again for this"
            )
    return PlanFile(plan=plan, schedule=schedule, solver=record.solver, prediction=record.prediction)
