"""The keys of a machine file: one table (`keys.toml`) for reading, checking, `--set` and the documentation.

A key without a default is absent from the machine unless somebody gives it. A `required` key must be given.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from types import MappingProxyType

from tierplan.hwmodels.machine import MachineError
from tierplan.hwmodels.records import decode
from tierplan.hwmodels.units import Unit

PARTS: Mapping[str, str] = MappingProxyType({"gpu": "gpus", "nvme": "drives"})
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
    choices: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()
    """Keys that a new value of this one makes void, because they stood for the same thing more directly."""
    whole: bool = False
    """Says something of the machine, not of the part: stays when another part is chosen."""

    @property
    def section(self) -> str:
        return self.name.split(".")[0]


def _read() -> dict[str, Key]:
    table = tomllib.loads(files("tierplan.hwmodels").joinpath("keys.toml").read_text(encoding="utf-8"))
    named = [{"name": f"{section}.{name}", **entry} for section, keys in table.items() for name, entry in keys.items()]
    return {entry["name"]: decode(Key, entry, entry["name"], complete=False) for entry in named}


KEYS: Mapping[str, Key] = MappingProxyType(_read())


def find_key(name: str) -> Key:
    """The key of that name. Raises `MachineError` that lists the keys that exist, the likely ones first."""
    if name in KEYS:
        return KEYS[name]
    section = name.split(".")[0]
    close = difflib.get_close_matches(name, KEYS, n=3, cutoff=0.6)
    if name.split(".")[-1] in SAID_OF_CAPACITY:
        close = [key for key in (f"{section}.capacity", "host.capacity") if key in KEYS][:1]
    siblings = [key for key in KEYS if KEYS[key].section == section] or list(KEYS)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    raise MachineError(f"no key {name!r} in a machine's description; {hint}the keys are {', '.join(siblings)}")
