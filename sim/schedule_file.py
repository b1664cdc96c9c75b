"""The schedule as a file: the one thing that planner, simulator and runtime hand to each other.

JSON of a version, described by `schedule.schema.json` beside this module. Every field is there in every record, with no
defaults, so a file never quietly means another plan than its writer's: a field that is unknown, missing or of the wrong
type is an error that says where it is.

    ScheduleFileError(ScheduleError)   a file that is not a schedule; names the path, the place in it and the op
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import NoReturn, get_args

from tierplan.hwmodels.machine import Rounding
from tierplan.sim.schedule import Buffer, Op, Schedule, ScheduleError, Tier, validate
from tierplan.sim.step import Action, SavedTensorSpec, Semantics, StepSpec, UnitSpec
from tierplan.sim.trace import write_atomically
from tierplan.sim.workloads.workload import DType, Training, WorkloadError

__all__ = ["FORMAT", "VERSION", "ScheduleFileError", "json_schema", "load_schedule", "save_schedule"]

FORMAT = "tierplan-schedule"
VERSION = 2


class ScheduleFileError(ScheduleError):
    """A file that is not a schedule. The message names the path, the place in the file and the op or buffer."""


def save_schedule(schedule: Schedule, path: str | os.PathLike[str]) -> None:
    """Writes the schedule, one record per line, replacing the file in one step.

    Raises `ScheduleError` when the schedule breaks the language, and `ScheduleFileError` when `meta` is not JSON.
    """
    validate(schedule)
    try:
        meta = _dump(dict(schedule.meta))
    except (TypeError, ValueError) as error:
        raise ScheduleFileError(
            f"schedule {schedule.name!r} cannot be written: meta holds something that JSON has not ({error}); "
            "use text, finite numbers, true, false, null, lists and objects with text keys"
        ) from error
    lines = [
        f'{{"format":{_dump(FORMAT)},"version":{VERSION},"name":{_dump(schedule.name)},',
        f'"step":{_dump(None if schedule.step is None else asdict(schedule.step))},',
        f'"meta":{meta},',
        f'"tiers":[\n{_lines(schedule.tiers, _TIER)}],',
        f'"buffers":[\n{_lines(schedule.buffers, _BUFFER)}],',
        f'"ops":[\n{_lines(schedule.ops, _OP)}]}}\n',
    ]
    write_atomically(path, "\n".join(lines))


def load_schedule(path: str | os.PathLike[str]) -> Schedule:
    """The schedule in the file, checked by `validate`.

    Raises `OSError` when the file cannot be read, `ScheduleFileError` when it is not a schedule of this version, and
    `ScheduleError` when it is one that breaks a rule of the language.
    """
    text = Path(path).read_bytes()
    try:
        record = json.loads(text.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
        return _schedule(record)
    except ScheduleFileError as error:
        raise ScheduleFileError(f"{path}: {error}") from None
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:  # what the parser says
        raise ScheduleFileError(f"{path} is not JSON ({error}); write schedules with save_schedule") from None


def json_schema() -> dict[str, object]:
    """The JSON Schema (draft 2020-12) of the file, for other tools."""
    text = resources.files("tierplan.sim").joinpath("schedule.schema.json").read_text(encoding="utf-8")
    schema: dict[str, object] = json.loads(text)
    return schema


# ---- one table per record: field name -> check, which returns the value or says what it should be ----


class _Wrong(Exception):
    """Carries what was expected."""


def _text(value: object) -> object:
    if not isinstance(value, str):
        raise _Wrong("text")
    return value


def _text_or_null(value: object) -> object:
    return None if value is None else _text(value)


def _whole(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise _Wrong("a whole number of 0 or more")
    return value


def _truth(value: object) -> object:
    if not isinstance(value, bool):
        raise _Wrong("true or false")
    return value


def _texts(value: object) -> object:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise _Wrong("a list of text")
    return tuple(value)


def _amounts(value: object) -> object:
    if not isinstance(value, dict) or not all(_is_amount(item) for item in value.values()):
        raise _Wrong("an object of finite numbers of 0 or more")
    return value


def _is_amount(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _records(value: object) -> object:
    if not isinstance(value, list):
        raise _Wrong("a list")
    return value


def _object(value: object) -> object:
    if not isinstance(value, dict):
        raise _Wrong("an object")
    return value


def _object_or_null(value: object) -> object:
    return None if value is None else _object(value)


def _one_of(*words: str) -> Callable[[object], object]:
    def check(value: object) -> object:
        if value not in words:
            raise _Wrong(f"one of {', '.join(words)}")
        return value

    return check


def _norm(value: object) -> object:
    if value is not None and not _is_amount(value):
        raise _Wrong("a finite number above 0, or null")
    return value


_Table = Mapping[str, Callable[[object], object]]

_TIER: _Table = {"name": _text, "capacity_bytes": _whole, "rounding": _one_of(*get_args(Rounding))}
_BUFFER: _Table = {
    "name": _text,
    "tier": _text,
    "size_bytes": _whole,
    "content": _text,
    "kind": _text,
    "initial": _truth,
    "reuses": _text_or_null,
    "becomes": _text_or_null,
}
_OP: _Table = {
    "key": _text,
    "stream": _text,
    "kind": _text,
    "unit": _text,
    "micro_batch": _whole,
    "work": _amounts,
    "reads": _texts,
    "writes": _texts,
    "after": _texts,
}
_TRAINING: _Table = {
    "per_device_train_batch_size": _whole,
    "gradient_accumulation_steps": _whole,
    "sequence_length": _whole,
    "dtype": _one_of(*get_args(DType)),
    "master_weights": _truth,
    "optimizer": _one_of("adamw", "sgd"),
    "attention": _one_of("flash", "plain"),
    "max_grad_norm": _norm,
    "backend": _one_of("cpu", "cuda"),
}
_SAVED: _Table = {"size_bytes": _whole, "action": _one_of(*get_args(Action))}
_UNIT: _Table = {"name": _text, "num_parameters": _whole, "saved": _records, "late_update": _truth}
_STEP: _Table = {"training": _object, "semantics": _one_of(*get_args(Semantics)), "units": _records}
_SCHEDULE: _Table = {
    "format": _text,
    "version": _whole,
    "name": _text,
    "step": _object_or_null,
    "meta": _object,
    "tiers": _records,
    "buffers": _records,
    "ops": _records,
}


def _schedule(record: object) -> Schedule:
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise ScheduleFileError(f'not a schedule: the file must be an object with "format": "{FORMAT}"')
    if record.get("version") != VERSION:
        raise ScheduleFileError(
            f"the file has version {record.get('version')!r}, this reader takes {VERSION}; make the schedule again, "
            "or read it with the tierplan that wrote it"
        )
    fields = _checked(record, _SCHEDULE, "the schedule")
    tiers = [Tier(**known) for known in _each(fields["tiers"], _TIER, "tiers", "name")]
    buffers = [Buffer(**known) for known in _each(fields["buffers"], _BUFFER, "buffers", "name")]
    ops = [Op(**known) for known in _each(fields["ops"], _OP, "ops", "key")]
    return validate(
        Schedule(
            name=fields["name"],
            tiers=tuple(tiers),
            buffers=tuple(buffers),
            ops=tuple(ops),
            step=None if fields["step"] is None else _step(fields["step"]),
            meta=fields["meta"],
        )
    )


def _step(record: object) -> StepSpec:
    step = _checked(record, _STEP, "step")
    try:
        training = Training(**_checked(step["training"], _TRAINING, "step.training"))
    except WorkloadError as error:
        raise ScheduleFileError(f"step.training: {error}") from None
    units = []
    for position, unit in enumerate(_each(step["units"], _UNIT, "step.units", "name")):
        where = f"step.units[{position}].saved"
        saved = [SavedTensorSpec(**known) for known in _each(unit["saved"], _SAVED, where, "action")]
        units.append(UnitSpec(**{**unit, "saved": tuple(saved)}))
    return StepSpec(training=training, semantics=step["semantics"], units=tuple(units))


def _each(items: list[object], table: _Table, where: str, name: str) -> Iterator[dict]:  # type: ignore[type-arg]
    for position, item in enumerate(items):
        label = item.get(name) if isinstance(item, dict) else None
        yield _checked(item, table, f"{where}[{position}] ({label!r})")


def _checked(item: object, table: _Table, where: str) -> dict:  # type: ignore[type-arg]
    if not isinstance(item, dict):
        raise ScheduleFileError(f"{where} is {_short(item)}; it must be an object with {', '.join(table)}")
    if unknown := [field for field in item if field not in table]:
        raise ScheduleFileError(f"{where} has an unknown field {unknown[0]!r}; the fields are {', '.join(table)}")
    if missing := [field for field in table if field not in item]:
        raise ScheduleFileError(f"{where} lacks the field {missing[0]!r}; every field must be there")
    checked = {}
    for field, check in table.items():
        try:
            checked[field] = check(item[field])
        except _Wrong as wrong:
            raise ScheduleFileError(f"{where}: {field} is {_short(item[field])}; it must be {wrong}") from None
    return checked


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ScheduleFileError(f"field {twice!r} is there twice in {_short(record)}; give it once")
    return record


def _no_constant(name: str) -> NoReturn:
    raise ScheduleFileError(f"the number {name} is not JSON; amounts are finite")


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _lines(items: tuple[Tier, ...] | tuple[Buffer, ...] | tuple[Op, ...], table: _Table) -> str:
    return ",\n".join(_dump({field: getattr(item, field) for field in table}) for item in items)


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_plain)


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{_short(value)} is of type {type(value).__name__}")
