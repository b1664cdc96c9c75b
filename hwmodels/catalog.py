"""Finds descriptions: in the catalog that comes with tierplan, in a file, or as this machine was measured."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from types import MappingProxyType

from tierplan.hwmodels.build import build_machine
from tierplan.hwmodels.community import parse_shared
from tierplan.hwmodels.curves import continued, host_adam, kept_up, with_derived
from tierplan.hwmodels.description import KEYS, PARTS, Description, Quantity, override, parse_description, read_utf8
from tierplan.hwmodels.machine import Machine, MachineError

HERE = "here"
"""Name of the machine that `tierplan machine measure` describes."""


def load_machine(name_or_path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Machine:
    """The machine of a catalog name, a TOML file, or `here` (measured), with `key=value` overrides.

    Raises `MachineError` for an unknown name, a bad file, or a wrong key or value.
    """
    return build_machine(load_description(name_or_path, overrides))


def load_description(name_or_path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Description:
    """As `load_machine`, but the description: every number with its source."""
    name, path = str(name_or_path), description_path(str(name_or_path))
    where = path.name if name in catalog_names() else str(path)
    return with_part_values(override(parse_description(read_utf8(path), where=where), overrides))


def description_path(name_or_path: str) -> Path | Traversable:
    """The file of a catalog name, of `here`, or at a path. Raises `MachineError` where there is none."""
    name, names = str(name_or_path), catalog_names()
    path = Path(name)
    if name == HERE:
        path = here_path()
        if not path.exists():
            raise MachineError(
                f"this machine has not been measured ({path} does not exist); run: tierplan machine measure"
            )
    elif name in names:
        return _catalog("machines") / f"{name}.toml"
    elif not path.is_file() and name.endswith(".toml"):
        raise MachineError(f"no machine file {name!r}")
    elif not path.is_file():
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        if gpus := _spelled_as(name, catalog_names("gpus")):
            set_it = " or ".join(f"--set gpu.part={gpu}" for gpu in gpus[:2])
            hint = f"that is a GPU: give a machine to put it into, such as desktop-4090, and {set_it}; "
        raise MachineError(
            f"no machine {name!r}; {hint}the catalog has {', '.join(names)}; "
            "or give a .toml file, or 'here' once measured"
        )
    return path


def with_part_values(description: Description) -> Description:
    """The description with what the catalog says of its parts, and what follows from its own numbers."""
    values: dict[str, Quantity] = {}
    for section in PARTS:
        part = description.values.get(f"{section}.part")
        if part is not None:
            values |= part_values(section, str(part.value), description.values)
    traffic, sockets = (description.number(f"host.{key}") or 1.0 for key in ("adam_traffic", "sockets"))
    if adam := host_adam(description.values, traffic, sockets):
        values["host.adam"] = adam
    void = {derived for name in description.values for derived in KEYS[name].replaces}
    return replace(description, part_values={name: value for name, value in values.items() if name not in void})


def part_values(section: str, name: str, given: Mapping[str, Quantity] = MappingProxyType({})) -> dict[str, Quantity]:
    """What holds of a GPU or a drive: what its file says, and a GPU's measured curves, or those of a relative.

    `given` goes before the GPU's file in which relative that is, and how much of a table's rates lasts. A relative's
    curves are first made to last: watts per peak compare the clocks of two chips that are both short of power.
    """
    if section != "gpu":
        return dict(load_part(section, name).values)
    own = ((key, given[key]) for key in ("gpu.relative", "gpu.sustained_frac") if key in given)
    return dict(_gpu_values(name, *own))


@lru_cache(maxsize=256)
def _gpu_values(name: str, *given: tuple[str, Quantity]) -> Mapping[str, Quantity]:
    part = {**load_part("gpu", name).values, **dict(given)}
    relative = str(part["gpu.relative"].value) if "gpu.relative" in part else ""
    other = kept_up(_continued(relative)) if relative else {}
    return kept_up(with_derived({**shared_values(name), **load_curves(name).values, **part}, other, relative))


def _continued(gpu: str) -> dict[str, Quantity]:
    """A GPU's file and its measured curves, beyond which it is as its own relative."""

    def measured(name: str) -> dict[str, Quantity]:
        return {**load_part("gpu", name).values, **load_curves(name).values}

    own = measured(gpu)
    relative = str(own["gpu.relative"].value) if "gpu.relative" in own else ""
    return continued(own, measured(relative), relative) if relative else own


def shared_values(gpu: str) -> dict[str, Quantity]:
    """What people shared of a GPU; of several files, the last by name counts."""
    values: dict[str, Quantity] = {}
    for name in catalog_names("community"):
        shared, found = parse_shared(_catalog(f"community/{name}.toml").read_text(encoding="utf-8"), where=name)
        if shared.gpu == gpu:
            values |= {key: quantity for key, quantity in found.items() if KEYS[key].section == "gpu"}
    return values


def load_curves(name: str) -> Description:
    """The measured curves of a GPU; empty where nobody measured it."""
    return _read("curves", name) if name in catalog_names("curves") else Description(name=name)


def load_part(section: str, name: str) -> Description:
    """The catalog's description of a GPU (`gpu`) or a drive (`nvme`). Raises `MachineError` that lists all parts."""
    folder = PARTS[section]
    if name not in (names := catalog_names(folder)):
        close = _spelled_as(name, names) or difflib.get_close_matches(name.lower(), names, n=1)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise MachineError(f"no part {name!r} among the catalog's {folder}; {hint}it has {', '.join(names)}")
    return _read(folder, name)


def _spelled_as(name: str, names: list[str]) -> list[str]:
    """Those of the names that this is a part of, or the one that is a part of this, however it is spelled."""
    spelled = re.sub(r"[\s_]+", "-", name.strip().lower())
    spelled = re.sub(r"^((nvidia|geforce|tesla|amd|instinct|intel)-)+", "", spelled)
    return [n for n in names if spelled and spelled in n] or [n for n in names if n in spelled][-1:]


def _read(folder: str, name: str) -> Description:
    return parse_description((_catalog(folder) / f"{name}.toml").read_text(encoding="utf-8"), where=f"{name}.toml")


def catalog_names(folder: str = "machines") -> list[str]:
    """Names in one folder of the catalog (`machines`, `gpus`, `curves`, `drives`), sorted."""
    return sorted(f.name.removesuffix(".toml") for f in _catalog(folder).iterdir() if f.name.endswith(".toml"))


def _catalog(folder: str) -> Traversable:
    return files("tierplan.hwmodels").joinpath("catalog", folder)


def here_path() -> Path:
    """The file with the measured description of this machine, in the user's configuration folder."""
    return user_folder("XDG_CONFIG_HOME", ".config") / "machines" / f"{HERE}.toml"


def user_folder(variable: str, default: str) -> Path:
    """tierplan's own in the folder that a variable of the XDG specification names. One that is no absolute path is
    ignored, as that asks for: it would be another one from each working folder. So is an empty `HOME`."""
    base = Path(os.environ.get(variable, ""))
    if not base.is_absolute():
        home = os.environ.get("HOME", "~")
        if not home:
            import pwd  # which not every system has

            home = pwd.getpwuid(os.getuid()).pw_dir
        base = Path(home).expanduser() / default
    return base / "tierplan"
