"""The schedule as a file: the one thing that planner, simulator and runtime hand to each other.

JSON of a version. Every field is there in every record, with no defaults, so a file never quietly means another plan
than its writer's: a field that is unknown, missing or of the wrong type is an error that says where it is.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, fields
from typing import Any

from tierplan.hwmodels.values.records import load_record, parse_json, plain, schema_of
from tierplan.sim.schedule import Buffer, Op, Schedule, ScheduleError, Tier, validate
from tierplan.sim.trace import write_atomically

FORMAT = "tierplan-schedule"
VERSION = 3


class ScheduleFileError(ScheduleError):
    """A file that is not a schedule. The message names the path, the place in the file and the op or buffer."""


def save_schedule(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Writes the schedule, one record per line, replacing the file in one step.

    Raises `ScheduleError` when the schedule breaks the language, and `ScheduleFileError` when it is not JSON.
    """
    validate(schedule)
    try:
        lines = [
            f'{{"format":{_dump(FORMAT)},"version":{VERSION},"name":{_dump(schedule.name)},',
            f'"next_devices":{_dump(schedule.next_devices)},',
            f'"step":{_dump(None if schedule.step is None else asdict(schedule.step))},',
            f'"meta":{_dump(dict(schedule.meta))},',
            f'"tiers":[\n{_lines(schedule.tiers)}],',
            f'"buffers":[\n{_lines(schedule.buffers)}],',
            f'"ops":[\n{_lines(schedule.ops)}]}}\n',
        ]
        text = "\n".join(lines).encode()
        parse_json(text)  # keys of `meta` that are one in JSON
    except (TypeError, ValueError) as error:
        raise ScheduleFileError(
            f"schedule {schedule.name!r} cannot be written: it holds something that JSON has not ({error}); use text, "
            "finite numbers, true, false, null, lists and objects with text keys"
        ) from error
    write_atomically(path, text)


def load_schedule(path: str | os.PathLike[str]) -> Schedule:
    """The schedule in the file, checked by `validate`.

    Raises `OSError` when the file cannot be read, `ScheduleFileError` when it is not a schedule of this version, and
    `ScheduleError` when it is one that breaks a rule of the language.
    """
    made_by = "a schedule as save_schedule writes it"
    schedule = load_record(Schedule, path, format=FORMAT, version=VERSION, made_by=made_by, error=ScheduleFileError)
    try:
        return validate(schedule)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of the file, for other tools."""
    return schema_of(Schedule, format=FORMAT, version=VERSION)


def _lines(items: tuple[Tier, ...] | tuple[Buffer, ...] | tuple[Op, ...]) -> str:
    names = [field.name for field in fields(items[0])] if items else []
    return ",\n".join(_dump({name: getattr(item, name) for name in names}) for item in items)


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=plain)
