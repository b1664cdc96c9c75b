"""Records in files, read strictly by msgspec: every field of its type, and no field that the class does not have."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, reduce
from math import inf
from numbers import Integral, Real
from operator import or_
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NoReturn,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
import numpy as np

Whole = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]
LARGEST = sys.float_info.max
"""What is finite is not above that."""
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=LARGEST)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=LARGEST)]
Amount = Annotated[int, msgspec.Meta(ge=0)] | NotNegative
"""A number of 0 or more, which stays whole where it is written so."""
T = TypeVar("T")


class RecordError(ValueError):
    """A record that is not what its class says: `ops[3] ('fwd/L0'): micro_batch is 0.5; it must be a whole number`."""


def load_record(
    kind: type[T],
    path: str | os.PathLike[str],
    *,
    format: str,
    version: int,
    made_by: str,
    error: type[ValueError],
    complete: bool = True,
) -> T:
    """The record in a JSON file whose fields `format` and `version` are these.

    Raises `OSError` when the file cannot be read, and `error` with the path where it is no such file.

    Parameters
    ----------
    made_by
        What the file is and what writes it, for errors: `a trace as Trace.save writes it`.
    complete
        As of `decode`.
    """
    text = Path(path).read_bytes()
    try:
        data = parse_json(text)
        head = data if isinstance(data, dict) else {}
        its_format, its_version = head.pop("format", None), head.pop("version", None)
        if (its_format, its_version) != (format, version):
            raise RecordError(
                f"it has format {its_format!r} version {its_version!r}; this reader takes {format!r} version {version}"
            )
        return decode(kind, data, complete=complete)
    except RecordError as wrong:
        raise error(f"{path} is not {made_by}: {wrong}") from None


def parse_json(text: bytes) -> Any:
    """The value that a text in JSON stands for. Raises `RecordError`, also for what the rules of JSON leave open."""
    try:
        hooks: Any = {"object_pairs_hook": _no_duplicates, "parse_constant": _no_constant, "parse_float": _finite}
        return json.loads(text.decode("utf-8-sig"), **hooks)
    except RecordError:
        raise
    except (ValueError, RecursionError) as error:
        raise RecordError(f"it is not JSON ({error})") from None


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RecordError(f"field {twice!r} is there twice in {shown(record)}; give it once")
    return record


def _no_constant(name: str) -> NoReturn:
    raise RecordError(f"the number {name} is not JSON; amounts are finite")


def _finite(digits: str) -> float:
    if (number := float(digits)) in (inf, -inf):
        raise RecordError(f"the number {digits} is too large; amounts are finite")
    return number


def decode(kind: type[T], data: object, where: str = "", *, complete: bool = True) -> T:
    """The dataclass of this kind that `data` describes.

    Parameters
    ----------
    where
        What `data` is called in errors, if it is a part of a file.
    complete
        Every field must be there, also one that has a default in the class: the file says all that it means.
    """
    try:
        msgspec.convert(data, _strict(cast(Any, kind), complete))
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        raise RecordError(_explained(str(error), data, kind, where)) from None


def schema_of(kind: type[object], *, format: str, version: int) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of the files that hold a complete record of this kind."""
    schema = msgspec.json.schema(_strict(cast(Any, kind), True))
    top = schema["$defs"][kind.__name__]
    for name, value in (("format", format), ("version", version)):
        top["properties"][name] = {"const": value}
        top["required"].append(name)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def check_record(record: object, error: type[ValueError], whose: str = "", *, depth: int = 1) -> None:
    """Raises `error` unless each field of a dataclass is of its type; those that are dataclasses check themselves.

    With a `depth` of -1 they are looked at too, and whatever numpy calls a number is one.
    """
    kind: Any = type(record)
    try:
        msgspec.convert(record, _strict(kind, True, depth), from_attributes=True)
        return
    except msgspec.ValidationError as wrong:
        if depth > 0:
            raise error(whose + _explained(str(wrong), record, kind, "")) from None
    try:
        decode(kind, msgspec.to_builtins(record, enc_hook=plain))
    except (RecordError, TypeError) as wrong:
        raise error(f"{whose}{wrong}") from None


def made_plain(record: T) -> T:
    """A dataclass that is being made, with Python's numbers in the place of numpy's."""
    for f in fields(record):  # type: ignore[arg-type]
        if isinstance(value := getattr(record, f.name), np.generic):
            object.__setattr__(record, f.name, value.item())
    return record


def plain(value: object) -> object:
    """A mapping, or a number of numpy, as JSON has it. Raises `TypeError` for what JSON has not."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Integral | Real):
        return int(value) if isinstance(value, Integral) else float(value)
    raise TypeError(f"{shown(value)} is of type {type(value).__name__}")


@cache
def _strict(kind: Any, complete: bool, depth: int = -1) -> Any:
    """The type with a struct in the place of each dataclass in it: a struct refuses fields that it does not know. In a
    complete one, rows have all that they may have.

    With a `depth`, dataclasses as deep as that are left as they are.
    """
    if isinstance(kind, type) and is_dataclass(kind):
        if not depth:
            return Any
        hints = _hints(kind)
        described = [(f.name, _strict(hints[f.name], complete, depth - 1)) for f in fields(kind)]
        optional = {f.name for f in fields(kind) if (f.default, f.default_factory) != (MISSING, MISSING)}
        return msgspec.defstruct(
            kind.__name__,
            [(*field, None) if field[0] in optional and not complete else field for field in described],
            kw_only=True,
            forbid_unknown_fields=True,
        )
    if isinstance(kind, type) and issubclass(kind, tuple) and complete and depth < 0:  # a named tuple: as long as it is
        return tuple[*(_hints(kind)[name] for name in kind._fields)]  # type: ignore[attr-defined,misc]
    origin, inner = get_origin(kind), get_args(kind)
    if origin is None or origin in (Annotated, Literal):
        return Any if kind is object else kind
    inner = tuple(x if x is ... else _strict(x, complete, depth) for x in inner)
    return reduce(or_, inner) if origin in (Union, UnionType) else origin[inner]


def _hints(kind: Any) -> dict[str, Any]:
    return {name: x for name, x in get_type_hints(kind, include_extras=True).items() if get_origin(x) is not ClassVar}


WORDS = {
    "int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "array": "a list",
    "object": "an object",
}  # fmt: skip
"""What msgspec calls `int`, in words."""


def _explained(message: str, data: Any, kind: Any, where: str) -> str:
    """What msgspec says, with the record's name, the value that stands there, and the rule."""
    text, _, path = message.partition(" - at `")
    of_key, _, path = path.partition("$")
    path, inside, _ = path.partition("[...]")
    for name, index in re.findall(r"\.(\w+)|\[(\d+)\]", path):
        kind = _without_none(kind)
        if name:
            data, kind = data[name] if isinstance(data, dict) else getattr(data, name), _hints(kind)[name]
            where += f": {name}" if where.endswith(")") else f".{name}" if where else name
        else:
            data, kind = data[int(index)], (get_args(kind) or (object,))[0]
            label = data.get("key") or data.get("name") if isinstance(data, dict) else None
            where += f"[{index}]" + (f" ({label!r})" if label else "")
    if inside and isinstance(data, Mapping):
        value_kind = get_args(_without_none(kind))[-1]
        for key, value in data.items():
            try:
                msgspec.convert(value, _strict(value_kind, True), from_attributes=True)
            except msgspec.ValidationError as error:
                return _explained(str(error), value, value_kind, f"{where}[{key!r}]")
    where = where or "the file"
    if match := re.fullmatch(r"Object contains unknown field `(.*)`", text):
        return f"{where} has an unknown field {match[1]!r}; the fields are {', '.join(_hints(_without_none(kind)))}"
    if match := re.fullmatch(r"Object missing required field `(.*)`", text):
        return f"{where} lacks the field {match[1]!r}, which must be there"
    if text.startswith("Invalid enum"):
        literals = (k for k in (kind, *get_args(kind)) if get_origin(k) is Literal)
        rule = f"one of {', '.join(str(word) for k in literals for word in get_args(k))}"
    elif match := re.match(r"Expected `(.*?)`([^,]*)", text):
        rule = " or ".join(WORDS.get(word, word) for word in match[1].split(" | ")) + match[2]
    else:
        return f"{where}: {text}"  # the class itself refused it
    rule = rule.replace(f"<= {LARGEST}", "that is finite")
    what = "its keys" if of_key else "its values" if inside else "it"
    return f"{where} is {shown(data)}; {what} must be {rule}"


def _without_none(kind: Any) -> Any:
    kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    others = [x for x in get_args(kind) if x is not type(None)] if get_origin(kind) in (Union, UnionType) else []
    return others[0] if len(others) == 1 else kind


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
