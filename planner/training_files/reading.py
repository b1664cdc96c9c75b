"""Configuration files and their settings, read as the tools read them: every value is what it should be, or refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from tierplan.planner.training_files.keys import AUTO
from tierplan.sim.workloads.workload import Training, WorkloadError


def read_beside(given: object, path: Path) -> dict[str, object]:
    """A file that another one names."""
    beside = path.parent / str(given)
    return read(beside if beside.exists() else Path(str(given)))


def read(path: Path) -> dict[str, object]:
    """JSON or YAML, of which JSON is a part."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        raw = json.loads(text, object_pairs_hook=_once) if path.suffix == ".json" else yaml.safe_load(text)
        raw = _with_switches(raw) if isinstance(raw, dict) else raw
    except FileNotFoundError as error:
        raise WorkloadError(f"there is no file {str(path)!r}; give a configuration in JSON or YAML") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise WorkloadError(f"{path} is not {kind}: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        holds = "nothing" if raw is None else f"a {type(raw).__name__}"
        raise WorkloadError(f"{path} holds {holds}; a configuration is one JSON object")
    return raw


def _once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """An object of JSON, none of whose keys is there twice, which DeepSpeed refuses too."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)!r} is there twice; leave one of them out")
    return found


def _with_switches(raw: Mapping[str, object]) -> dict[str, object]:
    """With true and false for the words, as DeepSpeed and the Trainer read them."""
    switches = {"true": True, "false": False, "True": True, "False": False}
    found: dict[str, object] = {}
    for key, value in raw.items():
        if isinstance(value, Mapping):
            found[key] = _with_switches(value)
        else:
            found[key] = switches.get(value, value) if isinstance(value, str) else value
    return found


def flat(raw: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """`{"nvme": {"drives": 1}}` and `{"nvme.drives": 1}` are the same."""
    found: dict[str, object] = {}
    for key, value in raw.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def section_of(raw: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = raw.get(name) or {}
    if not isinstance(value, Mapping):
        raise WorkloadError(f"{name} is {value!r}; it must be an object")
    return value


def count(raw: Mapping[str, object], name: str, default: int) -> int:
    value = raw.get(name, AUTO)
    if value in (AUTO, None):
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise WorkloadError(f"{name} is {value!r}; it must be a whole number of 1 or more")
    return value


def flag(section: Mapping[str, object], name: str, path: Path | str) -> bool:
    """A switch, also in the words that YAML and JSON files have for it; off where nothing is said."""
    value = section.get(name)
    found = {"true": True, "false": False, "none": False, "auto": False}.get(str(value).lower())
    if found is None:
        raise WorkloadError(f"{path}: {name} is {value!r}; it must be true or false")
    return found


def norm(raw: Mapping[str, object], name: str, base: Training) -> float | None:
    """The norm by which gradients are clipped."""
    value = raw.get(name, AUTO)
    if value == AUTO:
        return base.max_grad_norm
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise WorkloadError(f"{name} is {value!r}; it must be a number of 0 (off) or more")
    return float(value) or None
