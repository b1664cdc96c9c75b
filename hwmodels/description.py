"""A machine's description: the parts it is made of, every number with its source. Read from and written to TOML.

name = "my-machine"
summary = "one sentence"
[gpu]
part = "rtx-4090"                                   # numbers of the catalog, unless given here
matmul_fp16 = { value = "150 TFLOP/s", basis = "measured", source = "own benchmark", spread = 0.02 }
[host]
capacity = "64 GiB"                                 # a plain value is `given`: its source is this file
[[switch]]                                          # optional: who shares a PCIe switch's link to the host
name = "plx0"
limit = "24 GB/s"
members = ["gpu0", "gpu1", "nvme"]
[[limit]]                                           # optional: any other shared limit, in fractions of full speed
name = "cores"
limit = 1.0
takes = { "gpu0.compute" = 1.0, "host.adam" = 1.0 }
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Literal, get_args

import tomli_w

from tierplan.hwmodels.keys import KEYS, Key, find_key
from tierplan.hwmodels.machine import MachineError
from tierplan.hwmodels.units import format_amount, parse_amount

__all__ = ["Basis", "Description", "Limit", "Quantity", "Switch", "parse_description", "read_utf8", "write_description"]

Basis = Literal["nameplate", "measured", "published", "calibrated", "assumed", "given"]
"""Where a number comes from: a data sheet; a measurement of ours; somebody's publication; a fit to published results;
a rule of thumb; the user."""

_BASES: tuple[Basis, ...] = get_args(Basis)

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Quantity:
    """One value of a description, in base units, and where it comes from."""

    value: float | str | Points
    basis: Basis = "given"
    source: str = ""
    spread: float | None = None
    """Relative standard deviation between measurements of it: two of them differ by less than twice that, as a rule."""

    def text(self, key: Key) -> str:
        """The value for people, with its unit."""
        if isinstance(self.value, str):
            return self.value
        if isinstance(self.value, tuple):
            low, high = self.value[0], self.value[-1]
            ends = (f"{format_amount(rate, key.unit)} (at {amount:.3g})" for amount, rate in (low, high))
            return " to ".join(ends)
        return format_amount(self.value, key.unit)


@dataclass(frozen=True, slots=True)
class Switch:
    """GPUs and drives behind one PCIe switch: they share its link to the host, each direction on its own."""

    name: str
    limit_bytes_per_s: float
    members: tuple[str, ...]
    """`gpu0`, `gpu1`, ..., `nvme` (all drives)."""
    source: str = ""
    basis: Basis = "given"


@dataclass(frozen=True, slots=True)
class Limit:
    """A shared limit in fractions of full speed: the sum over streams of `takes * speed` is at most `limit`."""

    name: str
    limit: float
    takes: Mapping[str, float]
    source: str = ""
    basis: Basis = "given"
    spread: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Values by key (`nvme.read`), of `tierplan.hwmodels.keys.KEYS`, and the shared limits that are listed."""

    name: str
    summary: str = ""
    values: Mapping[str, Quantity] = field(default_factory=dict)
    switches: tuple[Switch, ...] = ()
    limits: tuple[Limit, ...] = ()
    shares: Mapping[str, float] = field(default_factory=dict)
    """Weight under contention by stream, where it is not 1."""
    notes: Mapping[str, object] = field(default_factory=dict)
    """Whatever else the file records (how it was measured); not used by the machine."""
    part_values: Mapping[str, Quantity] = field(default_factory=dict)
    """What the catalog's parts say; `values` go before it."""

    def quantity(self, name: str) -> Quantity | None:
        """The value of a key: given, else the part's, else the default; None where there is none."""
        for values in (self.values, self.part_values):
            if name in values:
                return values[name]
        key = find_key(name)
        return None if key.default is None else Quantity(key.default, "assumed", key.reason)

    def number(self, name: str) -> float | None:
        """The value of a key that holds one number."""
        quantity = self.quantity(name)
        if quantity is None:
            return None
        if not isinstance(quantity.value, (int, float)):
            raise MachineError(f"{name} of machine {self.name!r} is {quantity.value!r}; it must be one number")
        return float(quantity.value)

    def used(self) -> dict[str, Quantity]:
        """Every key that has a value, in the order of the table."""
        return {name: q for name in KEYS if (q := self.quantity(name)) is not None}


_SECTIONS = tuple(dict.fromkeys(key.section for key in KEYS.values()))
_TOP = ("name", "summary", "sources", "switch", "limit", "shares", "notes", *_SECTIONS)


def read_utf8(path: Path) -> str:
    """What a file says. Raises `MachineError` where it is no text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise MachineError(f"{path} is not text in UTF-8 ({error}); give another file") from error


def parse_description(text: str, *, where: str, folder: Path | None = None) -> Description:
    """A description from the text of a machine file (or of a part, when `where` is one). `where` is used in errors."""
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise MachineError(f"{where} is not TOML: {error}") from error
    if unknown := [key for key in table if key not in _TOP]:
        raise MachineError(f"{where} has an unknown entry {unknown[0]!r}; a machine file has {', '.join(_TOP)}")
    sources = _table(table, "sources", where)
    values: dict[str, Quantity] = {}
    for section in _SECTIONS:
        for name, value in _table(table, section, where).items():
            key = find_key(f"{section}.{name}")
            values[key.name] = parse_quantity(key, value, where=where, sources=sources)
    return Description(
        name=str(table.get("name", Path(where).stem)),
        summary=str(table.get("summary", "")),
        values=values,
        switches=tuple(_switch(entry, where, sources) for entry in _tables(table, "switch", where)),
        limits=tuple(_limit(entry, where, sources) for entry in _tables(table, "limit", where)),
        shares={
            str(k): parse_amount(v, "number", what=f"shares.{k} in {where}")
            for k, v in _table(table, "shares", where).items()
        },
        notes=_table(table, "notes", where),
    )


def _table(table: Mapping[str, object], name: str, where: str) -> Mapping[str, object]:
    value = table.get(name, {})
    if not isinstance(value, dict):
        raise MachineError(f"{name!r} in {where} is {value!r}; it must be a table: [{name}]")
    return value


def _tables(table: Mapping[str, object], name: str, where: str) -> list[object]:
    value = table.get(name, [])
    if not isinstance(value, list):
        raise MachineError(f"{name!r} in {where} is {value!r}; it must be a list of tables: write [[{name}]]")
    return value


def parse_quantity(key: Key, value: object, *, where: str, sources: Mapping[str, object] | None = None) -> Quantity:
    """One value as TOML gives it: plain, or `{ value, basis, source, spread }`."""
    what = f"{key.name} in {where}"
    if not isinstance(value, dict):
        return Quantity(_value(key, value, what), "given", where)
    if unknown := set(value) - {"value", "basis", "source", "spread"}:
        raise MachineError(f"{what} has {sorted(unknown)[0]!r}; a number has value, basis, source and spread")
    if "value" not in value:
        raise MachineError(f"{what} has no value; write {{ value = ..., source = ... }}")
    source, basis = _origin(value, what, sources or {})
    return Quantity(_value(key, value["value"], what), basis, source, _spread(value, what))


def _origin(entry: Mapping[str, object], what: str, sources: Mapping[str, object]) -> tuple[str, Basis]:
    source = str(entry.get("source", ""))
    basis = entry.get("basis", "given")
    for known in _BASES:
        if basis == known:
            return str(sources.get(source, source)), known
    raise MachineError(f"basis of {what} is {basis!r}; choose among {', '.join(_BASES)}")


def _spread(entry: Mapping[str, object], what: str) -> float | None:
    spread = entry.get("spread")
    return None if spread is None else parse_amount(spread, "number", what=f"spread of {what}")


def _value(key: Key, value: object, what: str) -> float | str | Points:
    if key.unit == "text":
        if not isinstance(value, str) or (key.choices and value not in key.choices):
            raise MachineError(
                f"{what} is {value!r}; choose {'among ' + ', '.join(key.choices) if key.choices else 'a name'}"
            )
        return value
    if not isinstance(value, (list, tuple)):
        return parse_amount(value, key.unit, what=what)
    if not key.curve:
        raise MachineError(f"{what} is a list; this key takes one number")
    points = []
    for point in value:
        if not isinstance(point, (list, tuple)) or len(point) != 2:
            raise MachineError(f"{what} has the point {point!r}; a curve is [[amount, rate], ...] by rising amount")
        amount = parse_amount(point[0], "bytes" if key.unit == "bytes/s" else "number", what=f"an amount of {what}")
        points.append((amount, parse_amount(point[1], key.unit, what=f"a rate of {what}")))
    amounts = [amount for amount, _ in points]
    if not points or amounts != sorted(set(amounts)) or any(rate <= 0 or amount <= 0 for amount, rate in points):
        raise MachineError(f"{what} is {value!r}; a curve has points with rising amounts and rates above 0")
    return tuple(points)


def _switch(entry: object, where: str, sources: Mapping[str, object]) -> Switch:
    what = f"a [[switch]] in {where}"
    entry = _entry(entry, what, required=("name", "limit", "members"), optional=("source", "basis"))
    source, basis = _origin(entry, what, sources)
    members = entry["members"]
    if not isinstance(members, list) or not members:
        raise MachineError(f"{what} has members {members!r}; list at least one of gpu0, gpu1, ..., nvme")
    return Switch(
        name=str(entry["name"]),
        limit_bytes_per_s=parse_amount(entry["limit"], "bytes/s", what=f"limit of {what}"),
        members=tuple(map(str, members)),
        source=source or where,
        basis=basis,
    )


def _limit(entry: object, where: str, sources: Mapping[str, object]) -> Limit:
    what = f"a [[limit]] in {where}"
    entry = _entry(entry, what, required=("name", "limit", "takes"), optional=("source", "basis", "spread"))
    source, basis = _origin(entry, what, sources)
    takes = entry["takes"]
    if not isinstance(takes, dict) or not takes:
        raise MachineError(f'{what} takes {takes!r}; write takes = {{ "gpu0.compute" = 1.0, ... }}')
    return Limit(
        name=str(entry["name"]),
        limit=parse_amount(entry["limit"], "number", what=f"limit of {what}"),
        takes={str(k): parse_amount(v, "number", what=f"takes.{k} of {what}") for k, v in takes.items()},
        source=source or where,
        basis=basis,
        spread=_spread(entry, what),
    )


def _entry(entry: object, what: str, *, required: Sequence[str], optional: Sequence[str]) -> Mapping[str, object]:
    if not isinstance(entry, dict):
        raise MachineError(f"{what} is {entry!r}; it must be a table")
    for name in required:
        if name not in entry:
            raise MachineError(f"{what} has no {name!r}; it needs {', '.join(required)}")
    if unknown := set(entry) - {*required, *optional}:
        raise MachineError(f"{what} has {sorted(unknown)[0]!r}; it may have {', '.join((*required, *optional))}")
    return entry


def override(description: Description, settings: Sequence[str]) -> Description:
    """The description with `key=value` settings applied in turn.

    Choosing another part drops what the file says about the old one, and a basic number drops those derived from it
    (`Key.replaces`), so that each setting has an effect. Raises `MachineError` for an unknown key or a bad value.
    """
    values = dict(description.values)
    for setting in settings:
        name, sign, text = setting.partition("=")
        name, text = name.strip(), text.strip().strip("\"'")
        if not sign or not text:
            raise MachineError(f"setting {setting!r} is not key=value; write for example nvme.drives=3")
        key = find_key(name)
        quantity = parse_quantity(key, _points_or_text(name, text), where="--set")
        if key.name.endswith(".part"):
            values = {k: v for k, v in values.items() if KEYS[k].section != key.section or KEYS[k].whole}
        for void in key.replaces:
            values.pop(void, None)
        values[key.name] = quantity
    return replace(description, values=values)


def _points_or_text(name: str, text: str) -> object:
    if not text.startswith("["):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise MachineError(
            f'{name} in --set is {text!r}, which is not a list of points such as [[1e6, "2 GB/s"]]'
        ) from error


def write_description(description: Description) -> str:
    """TOML that `parse_description` reads back to an equal description."""
    table: dict[str, object] = {"name": description.name}
    if description.summary:
        table["summary"] = description.summary
    for name, quantity in description.values.items():
        section = table.setdefault(KEYS[name].section, {})
        assert isinstance(section, dict)
        section[name.partition(".")[2]] = _record(quantity)
    table |= {
        "switch": [
            {**_record(s, "limit_bytes_per_s"), "limit": s.limit_bytes_per_s, "members": list(s.members)}
            for s in description.switches
        ],
        "limit": [_record(x) for x in description.limits],
        "shares": dict(description.shares),
        "notes": dict(description.notes),
    }
    return tomli_w.dumps({name: value for name, value in table.items() if value})


def _record(entry: Quantity | Switch | Limit, *left_out: str) -> dict[str, object]:
    """The fields that have a value."""
    record = {f.name: getattr(entry, f.name) for f in fields(entry) if f.name not in left_out}
    return {name: value for name, value in record.items() if value is not None}
