"""A machine's description: the parts it is made of, every number with its source. Read from and written to TOML.

`docs/machines.md` shows a file. The keys are one table (`keys.toml`), for reading, checking, `--set` and the
documentation. A key without a default is absent from the machine unless somebody gives it. A `required` key must be
given.
"""

from __future__ import annotations

import difflib
import functools
import json
import logging
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from importlib.resources.abc import Traversable
from math import inf
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
import tomli_w

from tierplan.hwmodels.machine import MachineError
from tierplan.hwmodels.names import COMPUTE, CORES_LIMIT, device_index, parse_stream
from tierplan.hwmodels.values.records import Amount, RecordError, decode
from tierplan.hwmodels.values.units import Unit, format_amount, leading_number, parse_amount

log = logging.getLogger(__name__)

PARTS: Mapping[str, str] = {"gpu": "gpus", "nvme": "drives"}
"""Sections that can name a part, and the folder of the catalog where it is looked up."""
SAID_OF_CAPACITY = ("dram", "ram", "vram", "memory", "mem", "size")
"""Words that people have for it, in the place of a key's name."""


@dataclass(frozen=True, slots=True)
class Key:
    """One number (or word) of a machine's description."""

    name: str
    unit: Unit
    meaning: str
    default: int | float | str | None = None
    reason: str = ""
    """Where the default comes from."""
    required: bool = False
    curve: bool = False
    """May be a list of [amount, rate] points, by rising amount of one op."""
    over: Unit | None = None
    """Unit of these amounts, where it is not that of the rate: `count` for numbers of GPUs."""
    choices: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()
    """Keys that a new value of this one makes void, because they stood for the same thing more directly."""
    unless: tuple[str, ...] = ()
    """Keys that say the same more directly: where the machine's file has one, setting this changes nothing."""
    whole: bool = False
    """Says something of the machine, not of the part: stays when another part is chosen."""
    most: float = inf
    """What no machine has more of; infinite where its unit says that."""
    above_zero: bool = False
    """0 says nothing of it, as of no rate: a limit that does not exist is left out."""

    @property
    def section(self) -> str:
        return self.name.split(".")[0]


def _read_keys() -> dict[str, Key]:
    table = tomllib.loads(files("tierplan.hwmodels").joinpath("keys.toml").read_text(encoding="utf-8"))
    named = [{"name": f"{section}.{name}", **entry} for section, keys in table.items() for name, entry in keys.items()]
    return {entry["name"]: decode(Key, entry, entry["name"], complete=False) for entry in named}


KEYS: Mapping[str, Key] = _read_keys()
END = "end"
"""The last section of a file that a command writes."""
GONE = ("gpu.adam", "gpu.adam_traffic")
"""Keys that mean nothing any more, which files of earlier measurements have."""


def find_key(name: str, where: str = "a machine's description") -> Key:
    """The key of that name. Raises `MachineError` that lists the keys that exist, the likely ones first."""
    if name in KEYS:
        return KEYS[name]
    section = name.split(".")[0]
    close = difflib.get_close_matches(name, KEYS, n=3, cutoff=0.6)
    if name.split(".")[-1] in SAID_OF_CAPACITY:
        close = [key for key in (f"{section}.capacity", "host.capacity") if key in KEYS][:1]
    siblings = [key for key in KEYS if KEYS[key].section == section] or list(KEYS)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise MachineError(f"no key {name!r} in {where}; {hint}the keys are {', '.join(siblings)}")


Basis = Literal["measured", "calibrated", "published", "given", "community", "derived", "nameplate", "assumed"]
"""Where a number comes from, the strongest first: a measurement of ours; a fit to published results; somebody's
publication; the user; a shared file; another part's measurement, scaled; a data sheet; a rule of thumb."""

STRENGTH: tuple[Basis, ...] = get_args(Basis)

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Quantity:
    """One value of a description, in base units, and where it comes from."""

    value: float | str | Points
    basis: Basis = "given"
    source: str = ""
    spread: Amount | None = None
    """Relative standard deviation between measurements of it: two of them differ by less than twice that, as a rule."""

    @property
    def points(self) -> Points:
        """A rate over amounts; one number holds for any amount."""
        return self.value if isinstance(self.value, tuple) else ((1.0, float(self.value)),)

    def text(self, key: Key) -> str:
        """The value for people, with its unit."""
        if isinstance(self.value, str):
            return self.value
        if isinstance(self.value, tuple):
            low, high = self.value[0], self.value[-1]
            unit = key.over or key.unit
            amounts = [format_amount(amount, unit).removesuffix("/s") for amount, _ in (low, high)]
            amounts = [f"{amount} GPUs" for amount in amounts] if unit == "count" else amounts
            rates = [format_amount(rate, key.unit) for _, rate in (low, high)]
            ends = (f"{rate} (at {amount})" for rate, amount in zip(rates, amounts, strict=True))
            return " to ".join(dict.fromkeys(ends))  # one point is both
        if key.name.endswith(".endurance"):  # a decimal amount, as on the drive's box
            return f"{self.value / 1e12:,.0f} TB"
        return format_amount(self.value, key.unit)


@dataclass(frozen=True, slots=True)
class Switch:
    """GPUs and drives behind one PCIe switch: they share its link to the host, each direction on its own."""

    name: str
    limit: Any
    """Bytes per second; a file may give it as text with a unit."""
    members: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    """`gpu0`, `gpu1`, ..., `nvme` (all drives)."""
    source: str = ""
    basis: Basis = "given"


@dataclass(frozen=True, slots=True)
class Limit:
    """A shared limit in fractions of full speed: the sum over streams of `takes * speed` is at most `limit`."""

    name: str
    limit: Amount
    takes: Annotated[Mapping[str, Amount], msgspec.Meta(min_length=1)]
    source: str = ""
    basis: Basis = "given"
    spread: Amount | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Values by key (`nvme.read`), of `KEYS`, and the shared limits that are listed."""

    name: str
    summary: str = ""
    date: str = ""
    """When a part's numbers were gathered."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """A machine file."""

    name: str = ""
    summary: str = ""
    date: str = ""
    sources: Mapping[str, str] = field(default_factory=dict)
    """By the short name that entries give as their source."""
    last_section: str = ""
    """Of a file that a command wrote: one that was cut off has it not. Empty where people wrote it."""
    end: Mapping[str, object] = field(default_factory=dict)
    """Has nothing in it."""
    switch: tuple[Switch, ...] = ()
    limit: tuple[Limit, ...] = ()
    shares: Mapping[str, Amount] = field(default_factory=dict)
    notes: Mapping[str, object] = field(default_factory=dict)
    gpu: Mapping[str, object] = field(default_factory=dict)
    link: Mapping[str, object] = field(default_factory=dict)
    host: Mapping[str, object] = field(default_factory=dict)
    nvme: Mapping[str, object] = field(default_factory=dict)


def read_utf8(path: Path | Traversable) -> str:
    """What a file says, without the mark of Windows at its begin. Raises `MachineError` where it is no text."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise MachineError(f"{path} is not text in UTF-8 ({error}); give another file") from error


def parse_description(text: str, *, where: str) -> Description:
    """A description from the text of a machine file (or of a part, when `where` is one). `where` is used in errors."""
    try:
        table = tomllib.loads(text)
        if "rates" in table:
            raise RecordError(
                "`tierplan machine share` wrote it: rates without their machine, for the folder community of the "
                "catalog; give a machine, and what you want of these rates by --set"
            )
        for section in ("gpu", "link", "host", "nvme"):
            if not isinstance(said := table.get(section, {}), dict):
                raise RecordError(f"{section} is {said!r}; write [{section}] on a line, and what it has below, by key")
        file = decode(_File, table, complete=False)
        if file.last_section and file.last_section not in table:
            raise RecordError(
                f"it was cut off: its last section is to be [{file.last_section}], which is not there; write it again "
                "(tierplan machine measure, where it was measured), or where nothing is missing, leave last_section out"
            )
    except RecordError as error:
        raise MachineError(f"{where}: {error}") from error
    except (ValueError, RecursionError) as error:
        raise MachineError(f"{where} is not TOML: {error}") from error
    values = {}
    for section in dict.fromkeys(key.section for key in KEYS.values()):
        for name, value in getattr(file, section).items():
            if f"{section}.{name}" in GONE:
                _note_gone(f"{section}.{name}", where)
                continue
            key = find_key(f"{section}.{name}", where)
            values[key.name] = parse_quantity(key, value, where=where, sources=file.sources)

    def source(entry: Switch | Limit) -> str:
        return file.sources.get(entry.source, entry.source) or where

    return Description(
        name=file.name or Path(where).stem,
        summary=file.summary,
        date=file.date,
        values=values,
        switches=tuple(
            replace(x, limit=parse_amount(x.limit, "bytes/s", what=f"limit of [[switch]] {x.name!r}"), source=source(x))
            for x in file.switch
        ),
        limits=tuple(replace(entry, source=source(entry)) for entry in file.limit),
        shares=file.shares,
        notes=file.notes,
    )


@functools.cache  # says it once
def _note_gone(name: str, where: str) -> None:
    log.warning(f"{where}: {name} means nothing any more and is passed over; take that line out")


def parse_quantity(key: Key, value: object, *, where: str, sources: Mapping[str, str] | None = None) -> Quantity:
    """One value as TOML gives it: plain, or `{ value, basis, source, spread }`."""
    what = f"{key.name} in {where}"
    if not isinstance(value, dict):
        return Quantity(_value(key, value, what), "given", where)
    if "value" in value:
        value = {**value, "value": _value(key, value["value"], what)}
    try:
        given = decode(Quantity, value, f"{where}: {key.name}", complete=False)
    except RecordError as error:
        raise MachineError(str(error)) from error
    return replace(given, source=(sources or {}).get(given.source, given.source))


def _value(key: Key, value: object, what: str) -> float | str | Points:
    if key.unit == "text":
        if not isinstance(value, str) or (key.choices and value not in key.choices):
            raise MachineError(
                f"{what} is {value!r}; choose {'among ' + ', '.join(key.choices) if key.choices else 'a name'}"
            )
        return value
    if not isinstance(value, (list, tuple)):
        return _plausible(parse_amount(value, key.unit, what=what), value, key, what)
    if not key.curve:
        raise MachineError(f"{what} is a list; this key takes one number")
    points = []
    for point in value:
        if not isinstance(point, (list, tuple)) or len(point) != 2:
            raise MachineError(f"{what} has the point {point!r}; a curve is [[amount, rate], ...] by rising amount")
        over = key.over or ("bytes" if key.unit == "bytes/s" else "number")
        amount = parse_amount(point[0], over, what=f"an amount of {what}")
        points.append((amount, parse_amount(point[1], key.unit, what=f"a rate of {what}")))
    amounts = [amount for amount, _ in points]
    if not points or amounts != sorted(set(amounts)) or any(rate <= 0 or amount <= 0 for amount, rate in points):
        raise MachineError(f"{what} is {value!r}; a curve has points with rising amounts and rates above 0")
    highest, given = max((rate, point[1]) for (_, rate), point in zip(points, value, strict=True))
    _plausible(highest, given, key, f"the highest rate of {what}")
    return tuple(points)


PLAUSIBLE: Mapping[str, tuple[float, str, float]] = {
    "flops/s": (1e7, "TFLOP/s", 1e17), "bytes/s": (1e6, "GB/s", 1e14), "parameters/s": (1e5, "G/s", 1e14),
    "bytes": (2**16, "GiB", 1e18), "W": (1.0, "kW", inf), "s": (0.0, "", 0.05), "nvme.endurance": (1e12, "TB", 1e18),
}  # fmt: skip
"""By key or unit: what no part is below, the unit that was probably meant, and what nothing is above where its key does
not say. Busy processors measure 5e8 flops/s."""
LIKELY_S = 1e-3
"""No latency that a unit was left out of is meant to be longer."""
DRIVES_SAY_MB = ("nvme.read", "nvme.write")
"""Data sheets of drives give these in MB/s."""


def _plausible(amount: float, value: object, key: Key, what: str) -> float:
    """The amount, unless its order of magnitude says that a unit was left out or is wrong."""
    if not amount and (key.above_zero or key.unit.endswith(("/s", "W"))):
        raise MachineError(f"{what} is {value!r}; it must be above 0")
    least, meant, most = PLAUSIBLE.get(key.name, PLAUSIBLE.get(key.unit, (0.0, "", inf)))
    if 0 < amount < least:
        number = leading_number(str(value))
        if key.name in DRIVES_SAY_MB and float(number) >= 100:
            number = f"{float(number) / 1000:g}"
        is_meant = parse_amount(f"{number} {meant}", key.unit, what=what) >= least
        hint = f'did you mean "{number} {meant}"?' if is_meant else "which is less than anything has; check its unit"
        raise MachineError(f"{what} is {value!r}, {format_amount(amount, key.unit)}{'; ' if is_meant else ', '}{hint}")
    if amount > (key.most if key.most < inf else most):
        shown = f"{value!r}, {format_amount(amount, key.unit)}, which nothing reaches; "
        less = [f"{leading_number(str(value))} {unit}" for unit in ("ms", "us")] if key.unit == "s" else []
        likely = (text for text in less if parse_amount(text, "s", what=what) <= LIKELY_S)
        shown += f'did you mean "{text}"?' if (text := next(likely, "")) else "check its unit"
        if key.unit == "number":
            shown = f"{value}; it is at most {key.most:g} ({key.meaning})"
        elif key.unit == "count":
            shown = f"{value}; no machine has more than {key.most:g}"
        raise MachineError(f"{what} is {shown}")
    return amount


def override(description: Description, settings: Sequence[str]) -> Description:
    """The description with `key=value` settings, in any order; of one key, the last.

    Choosing another part drops what the file says about the old one (the same part again changes nothing), and a basic
    number drops those derived from it (`Key.replaces`), so that each setting has an effect. Neither drops another
    setting. Raises `MachineError` for an unknown key or a bad value, and for one that would have none (`Key.unless`).
    """
    if isinstance(settings, (str, Mapping)):
        raise MachineError(f'settings are {settings!r}; give a list of texts such as ["nvme.drives=3"]')
    given = dict[str, Quantity]()
    for name, text in pairs_of(settings):
        key = find_key(name)
        given[key.name] = parse_quantity(key, _points_or_text(name, text), where="--set")
    parts = [x for x in given if x.endswith(".part")]
    new = {
        KEYS[x].section for x in parts if x not in description.values or description.values[x].value != given[x].value
    }
    if "gpu" in new:
        description = _in_a_slot(description)
    values = {k: v for k, v in description.values.items() if KEYS[k].section not in new or KEYS[k].whole}
    for name in given:
        key = KEYS[name]
        for void in key.replaces:
            values.pop(void, None)
        if (direct := next((k for k in key.unless if k in values and k not in given), None)) is not None:
            raise MachineError(
                f"{name} in --set changes nothing: the file of {description.name!r} has {direct}; set that one"
            )
    switches = description.switches
    if (count := given.get("gpu.count")) is not None:
        switches = within(switches, int(float(count.value)))  # type: ignore[arg-type]
    limits = tuple(x for x in description.limits if x.takes)
    return replace(description, values=values | given, switches=switches, limits=limits)


SLOT = "PCIe 4.0 x16"
"""Of a card in a machine that was measured without one."""


def _in_a_slot(description: Description) -> Description:
    """With a new GPU. Where the host's own cores were measured as one, the link is assumed, since copies within host
    memory say nothing of it, and the host has the memory again that was the device tier's."""
    is_cpu = any(limit.name == CORES_LIMIT and COMPUTE in limit.takes for limit in description.limits)
    values, shares = {**description.values}, description.shares
    if is_cpu:
        source = f"{SLOT}: the machine was measured without a GPU, and copies within host memory are no link"
        of_link = {"value": SLOT, "basis": "assumed", "source": source}
        values |= {name: parse_quantity(KEYS[name], of_link, where="") for name in ("link.h2d", "link.d2h")}
        values = {name: x for name, x in values.items() if name not in ("link.latency", "link.loaded_latency")}
        shares = {name: x for name, x in shares.items() if device_index(name.partition(".")[0]) is None}
        if {"host.capacity", "gpu.capacity"} <= values.keys():
            host, budget = values["host.capacity"], values["gpu.capacity"]
            total = host.points[0][1] + budget.points[0][1]
            values["host.capacity"] = replace(host, value=total, source=f"{host.source}, and that budget")

    def is_gone(stream: str) -> bool:
        name = parse_stream(stream)
        return name.is_compute or (is_cpu and name.is_host_link)

    left = (replace(x, takes={k: y for k, y in x.takes.items() if not is_gone(k)}) for x in description.limits)
    return replace(description, values=values, shares=shares, limits=tuple(left))


def within(switches: tuple[Switch, ...], num_gpus: int) -> tuple[Switch, ...]:
    """The switches of a machine of fewer GPUs: without those beyond, and without switches that have nothing behind."""
    gone = {m for switch in switches for m in switch.members if (device_index(m) or 0) >= num_gpus}
    while gone:
        left = [replace(x, members=tuple(m for m in x.members if m not in gone)) for x in switches]
        switches, gone = tuple(x for x in left if x.members), {x.name for x in left if not x.members}
    return switches


def pairs_of(settings: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Keys and values of `key=value` settings. Raises `MachineError`."""
    for setting in settings:
        name, text = (part.strip() for part in setting.partition("=")[::2])
        if not name or not text.strip("\"'"):
            raise MachineError(f"setting {setting!r} is not key=value; write for example nvme.drives=3")
        yield name, text.strip("\"'")


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
    """TOML that `parse_description` reads back to an equal description, and refuses where its end was cut off."""
    table: dict[str, object] = {name: getattr(description, name) for name in ("name", "summary", "date")}
    table["last_section"] = END
    for name, quantity in description.values.items():
        section = table.setdefault(KEYS[name].section, {})
        assert isinstance(section, dict)
        section[name.partition(".")[2]] = _record(quantity)
    table |= {
        "switch": [_record(x) for x in description.switches],
        "limit": [_record(x) for x in description.limits],
        "shares": dict(description.shares),
        "notes": dict(description.notes),
    }
    return tomli_w.dumps({name: value for name, value in table.items() if value} | {END: {}})


def _record(entry: Quantity | Switch | Limit) -> dict[str, object]:
    """The fields that have a value."""
    return {name: value for name, value in asdict(entry).items() if value is not None}
