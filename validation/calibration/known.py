"""Calibrations in the user's data folder, and which of them suits a question. Nothing here imports torch."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from math import hypot
from pathlib import Path

from tierplan.hwmodels.catalog import user_folder
from tierplan.hwmodels.machine import CATALOG, Machine
from tierplan.hwmodels.names import parse_stream
from tierplan.sim.workloads.models import SIZES
from tierplan.sim.workloads.workload import NOT_OF_AMOUNTS, Training, Workload
from tierplan.validation.calibration.calibration import Calibration, CalibrationError, machine_sha256

AUTO, NONE = "auto", "none"
"""In place of a file: the one that suits best, and none."""
CALIBRATION_BLOCKS = 3
FAMILY_HALF_WIDTH, OTHER_HALF_WIDTH = 0.11, 0.15
"""What a prediction from another model's calibration is off by beyond its own interval, as a logarithm: learnt, each
of twelve calibrations from the others (`tierplan validate --transfer`; rows and table: docs/commands_campaign.md)."""
SAME = ("dtype", "autocast", "backend", "optimizer", "attention", "loss", "torch_compile")
"""Of the training settings: what has to be that of the calibration."""
OF_UNITS = tuple(f.name for f in fields(Training) if f.name not in NOT_OF_AMOUNTS)
"""Of the training settings: what has to be that of the calibration for its units to be those that are asked about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibratedPlace:
    """Where something is trained: the machine as it was described, and as it is inside a step, where that is known."""

    described: Machine
    machine: Machine
    calibration: Calibration | None = None

    def timed(self, workload: Workload) -> Workload:
        """The workload for `machine`."""
        return workload if self.calibration is None else self.calibration.timed(workload, self.described)


def calibrations_dir() -> Path:
    """The user's own, one file each."""
    return user_folder("XDG_DATA_HOME", ".local/share") / "calibrations"


def own_paths() -> list[Path]:
    """Those that there are, the newest last."""
    return sorted(calibrations_dir().glob("*.json"), key=lambda path: path.lstat().st_mtime)  # also a link to nothing


def eligible_paths(machine: Machine, which: str = AUTO) -> list[Path]:
    """Files that `place_for` may take for this machine as it is before `--set`, the newest last."""
    if which != AUTO:
        return [] if which == NONE else [Path(which)]
    fingerprint = machine_sha256(machine).encode()
    return [path for path in own_paths() if fingerprint in _content(path)]


def _content(path: Path) -> bytes:
    """Empty where it cannot be read: then it is passed over."""
    try:
        return path.read_bytes()
    except OSError:
        return b""


def own_path(calibration: Calibration) -> Path:
    """Its place in that folder: the next one of the same model, settings and machine replaces it."""
    t = calibration.training
    name = re.sub(r"[^\w.-]+", "-", calibration.model)
    shape = f"{t.dtype}-{t.per_device_train_batch_size}x{t.sequence_length}-{calibration.num_threads}t"
    shape += f"-{calibration.num_ranks}r" if calibration.num_ranks > 1 else ""
    named = ("dtype", "per_device_train_batch_size", "sequence_length", "backend")  # here, or by the machine
    others = {f.name: getattr(t, f.name) for f in fields(t) if f.name in {*SAME, *OF_UNITS} - {*named}}
    if others != {name: getattr(Training(), name) for name in others}:
        shape += f"-{hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()[:6]}"
    return calibrations_dir() / f"{name}-{shape}-{calibration.machine_sha256[:8]}.json"


def calibration_config(config: Mapping[str, object], num_blocks: int = CALIBRATION_BLOCKS) -> dict[str, object]:
    """The `config.json` of the same model with at most so many blocks."""
    depths = _depths(config)
    fewer: dict[str, object] = {name: min(num_blocks, depth) for name, depth in depths.items()}
    deep = max((num_blocks, *depths.values()))
    by_block = {k: v[:num_blocks] for k, v in config.items() if isinstance(v, list) and len(v) == deep > num_blocks}
    return {**config, **fewer, **by_block}


def _depths(config: Mapping[str, object]) -> dict[str, int]:
    (names,) = (names for names in SIZES if "n_layer" in names)
    return {name: int(str(config[name])) for name in names if config.get(name)}


def place_for(
    described: Machine,
    training: Training,
    workload: Callable[[], Workload],
    *,
    which: str = AUTO,
    unchanged: Machine | None = None,
) -> CalibratedPlace:
    """The machine for what is to be trained: calibrated by a file, or by the best of the user's own that suits.

    The untimed `workload` is made only where there is a calibration to look at. `unchanged` is the machine before
    `--set`, with one device: what was calibrated. Raises `CalibrationError` for a file that does not suit.
    """
    base = unchanged or described
    if which == NONE:
        return CalibratedPlace(described=described, machine=described)
    if _part("gpu", described) != _part("gpu", base):
        passed_over = "".join(
            f"; {path.name} passed over: it is of another GPU" for path in eligible_paths(base, which)
        )
        basis = replace(described.basis, text=described.basis.text + passed_over)
        return CalibratedPlace(described=described, machine=replace(described, basis=basis))
    if which != AUTO:
        calibration = Calibration.load(which)
        if why := _why_not(calibration, base, training, described.num_devices):
            raise CalibrationError(f"{which} does not suit: {why}; run tierplan calibrate, or give --calibration none")
        return _placed(calibration, described, base, workload())
    passed_over, suiting = "", []
    for path in own_paths():
        try:
            calibration = Calibration.load(path)
            why = _why_not(calibration, base, training, described.num_devices)
        except (CalibrationError, OSError):
            why = "it cannot be read, is broken, or is of another version of tierplan"
        if why:
            passed_over = f"{path.name} passed over: {why}" if described.basis is not CATALOG else ""
        else:
            suiting.append(calibration)
    if not suiting:
        own = described.basis
        basis = replace(own, text=f"{own.text}; {passed_over}") if passed_over else own
        return CalibratedPlace(described=described, machine=replace(described, basis=basis))
    asked = workload()
    best = max(enumerate(suiting), key=lambda c: (c[1].num_ranks, _nearness(c[1], asked), c[0]))
    return _placed(best[1], described, base, asked)


def _part(section: str, machine: Machine) -> object:
    said = machine.description.get(f"{section}.part")
    return said["value"] if isinstance(said, Mapping) else None


def _why_not(calibration: Calibration, machine: Machine, training: Training, num_devices: int) -> str:
    """Why the calibration says nothing of this; empty where it does."""
    if calibration.machine_sha256 != machine_sha256(machine):
        return f"it is of another machine, or of this one as it was measured before {calibration.when}"
    if calibration.num_ranks not in (1, num_devices):
        return f"it is of {calibration.num_ranks} processes side by side, and this of {num_devices}"
    for name in SAME:
        if (its := getattr(calibration.training, name)) != getattr(training, name):
            return f"its {name} is {its}, not {getattr(training, name)}"
    for name in ("torch", "transformers"):
        try:
            now = version(name)
        except PackageNotFoundError:
            continue
        if calibration.versions.get(name) != now:
            return f"it is of {name} {calibration.versions.get(name)}, and {now} is installed"
    return ""


def _nearness(calibration: Calibration, workload: Workload) -> int:
    """2: it is of units like these; 1: of the same family; 0: of another."""
    if calibration.config.get("model_type") != workload.config.get("model_type"):
        return 0
    t = workload.training
    its, depth = calibration.training, max(_depths(calibration.config).values(), default=0)
    is_alike = all(getattr(its, name) == getattr(t, name) for name in OF_UNITS)
    return 1 + (is_alike and calibration_config(workload.config, depth) == dict(calibration.config))


def _placed(calibration: Calibration, described: Machine, base: Machine, workload: Workload) -> CalibratedPlace:
    if _part("nvme", described) != _part("nvme", base):
        others = {name: fit for name, fit in calibration.streams.items() if not parse_stream(name).is_drive}
        calibration = replace(calibration, streams=others, drive_contention=1.0)
    nearness = _nearness(calibration, workload)
    wider = (OTHER_HALF_WIDTH, FAMILY_HALF_WIDTH, 0.0)[nearness]
    t = calibration.training
    of_what = f"{calibration.model}, {t.per_device_train_batch_size} x {t.sequence_length} tokens"
    text = f"calibrated here with {of_what}, {calibration.when}" + ("" if nearness == 2 else ", carried over")
    if machine_sha256(described) != machine_sha256(base):
        text, wider = f"{text}; changed parts by --set", hypot(wider, CATALOG.half_width)
    half_width = hypot(calibration.half_width, wider)
    return CalibratedPlace(
        described=described, machine=calibration.on(described, text, half_width), calibration=calibration
    )
