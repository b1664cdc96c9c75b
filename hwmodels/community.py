"""Measured rates that people share, one small anonymous file each in `catalog/community/`, for pull requests.

A file has numbers, parts and a month: no names, paths or texts of the machine that it comes from.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import tomli_w

from tierplan.hwmodels.description import Description, Quantity, find_key, parse_quantity
from tierplan.hwmodels.machine import MachineError
from tierplan.hwmodels.values.records import Count, RecordError, decode

FORMAT, VERSION = "tierplan-community", 1
SHARED = ("measured", "calibrated")
"""Bases of numbers that are worth sharing."""
UNSHARED = ("part", "price", "count", "drives", "form", "rent")
"""Ends of keys that say nothing of a rate."""

Month = Annotated[str, msgspec.Meta(pattern=r"^20\d\d-(0[1-9]|1[0-2])$")]
Word = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][a-z0-9.-]{0,39}$")]
Seconds = Annotated[float, msgspec.Meta(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedStep:
    """One measured step, with all that a prediction of it takes."""

    model: Word
    policy: Word
    batch: Count
    seq: Count
    step_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRates:
    """What a file holds."""

    format: Word
    version: int
    date: Month
    gpu: Word | None = None
    """Part of the catalog."""
    drive: Word | None = None
    rates: Mapping[str, Any]
    """By key of a machine file: a number in base units, or points."""
    step: SharedStep | None = None


def share(description: Description, date: str, step: SharedStep | None = None) -> str:
    """The file's text. Raises `MachineError` where nothing of the machine was measured."""
    rates: dict[str, object] = {}
    for name, quantity in description.values.items():
        if quantity.basis in SHARED and not isinstance(quantity.value, str) and name.split(".")[1] not in UNSHARED:
            points = [[_round(x), _round(y)] for x, y in quantity.points]
            rates[name] = points if isinstance(quantity.value, tuple) else points[0][1]
    if not rates:
        raise MachineError(f"nothing of machine {description.name!r} was measured; run: tierplan machine measure")
    table: dict[str, object] = {"format": FORMAT, "version": VERSION, "date": date}
    for name, key, count in (("gpu", "gpu.part", "gpu.count"), ("drive", "nvme.part", "nvme.drives")):
        if (part := description.values.get(key)) and description.number(count) != 0:
            table[name] = part.value
    if step:
        table["step"] = {name: getattr(step, name) for name in ("model", "policy", "batch", "seq", "step_s")}
    text = tomli_w.dumps(table | {"rates": rates})
    parse_shared(text, where="the file")
    return text


def step_of(text: str) -> SharedStep:
    """A step as `MODEL,POLICY,BATCH,SEQ,SECONDS`. Raises `MachineError`."""
    try:
        model, policy, batch, seq, step_s = text.split(",")
        return SharedStep(model=model, policy=policy, batch=int(batch), seq=int(seq), step_s=float(step_s))
    except ValueError as error:
        raise MachineError(f"--step {text!r} is not MODEL,POLICY,BATCH,SEQ,SECONDS ({error})") from None


def _round(amount: float) -> float:
    return float(f"{amount:.3g}")


def parse_shared(text: str, *, where: str) -> tuple[SharedRates, dict[str, Quantity]]:
    """A file and its values. Raises `MachineError` that names what is wrong: an unknown field, key, unit or format."""
    try:
        shared = decode(SharedRates, tomllib.loads(text), complete=False)
    except (RecordError, ValueError) as error:
        raise MachineError(f"{where} is no shared file: {error}") from error
    if (shared.format, shared.version) != (FORMAT, VERSION):
        raise MachineError(f"{where} has format {shared.format!r} {shared.version}; it must be {FORMAT!r} {VERSION}")
    source = f"shared measurement {where}, {shared.date}"
    values = {}
    for name, value in shared.rates.items():
        key = find_key(name)
        if key.unit == "text" or isinstance(value, (str, dict)):
            raise MachineError(f"{where} has text for {name}; it must be a number or points, without names")
        values[name] = Quantity(parse_quantity(key, value, where=where).value, "community", source)
    return shared, values
