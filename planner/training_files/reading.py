"""Configuration files and their settings, read as the tools read them: every value is what it should be, or refused."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from tierplan.hwmodels.values.records import RecordError, parse_json
from tierplan.planner.training_files.keys import AUTO
from tierplan.sim.workloads.workload import Training, WorkloadError


def read_beside(given: object, path: Path) -> dict[str, object]:
    """A file that another one names."""
    if not isinstance(given, str) or "{" in given:
        raise WorkloadError(f"{path} has {given!r} where a file of settings is named; give a path, or an object")
    beside = path.parent / given
    return read(beside if beside.exists() else Path(given))


def read(path: Path) -> dict[str, object]:
    """JSON or YAML, of which JSON is a part."""
    import yaml

    try:
        raw = parse_json(path.read_bytes()) if path.suffix == ".json" else yaml.safe_load(path.read_text("utf-8"))
        raw = _with_switches(raw) if isinstance(raw, dict) else raw
    except FileNotFoundError as error:
        raise WorkloadError(f"there is no file {str(path)!r}; give a configuration in JSON or YAML") from error
    except RecordError as error:
        hint = (
            "; take out comments and commas at ends, which DeepSpeed alone reads" if "it is not" in str(error) else ""
        )
        raise WorkloadError(f"{path}: {error}{hint}") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise WorkloadError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        holds = "nothing" if raw is None else f"a {type(raw).__name__}"
        raise WorkloadError(f"{path} holds {holds}; a configuration is one JSON object")
    return raw


def _with_switches(raw: Mapping[str, object]) -> dict[str, object]:
    """With true and false for the words, as DeepSpeed and the Trainer read them."""
    switches = {"true": True, "false": False}
    found: dict[str, object] = {}
    for key, value in raw.items():
        if isinstance(value, Mapping):
            found[key] = _with_switches(value)
        else:
            found[key] = switches.get(value.lower(), value) if isinstance(value, str) else value
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


def check_undivided(section: Mapping[str, object], names: Iterable[str], path: Path | str) -> None:
    """Refuses GPUs that share sequences or operators: here each has micro-batches of its own."""
    for name in names:
        if section.get(name) != 0 and (num := count(section, name, 1)) > 1:
            raise WorkloadError(
                f"{path}: {name} is {num}, by which so many GPUs share every sequence or operator; steps are explained "
                "where each GPU has micro-batches of its own; make it 1"
            )


def switch(section: Mapping[str, object], name: str, path: Path | str) -> bool | None:
    """A switch, also in the words that YAML and JSON files have for it; None where nothing is said."""
    value = section.get(name)
    words = {"true": True, "false": False, "none": None, AUTO: None}
    if (word := str(value).lower()) not in words:
        raise WorkloadError(f"{path}: {name} is {value!r}; it must be true or false")
    return words[word]


def flag(section: Mapping[str, object], name: str, path: Path | str) -> bool:
    """A switch that is off where nothing is said."""
    return bool(switch(section, name, path))


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
