"""A what-if study: a grid of scenarios, from a TOML file (`tierplan sweep --help` shows one) or made in code.

The points are all combinations, the last key varying fastest.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import get_args

from tierplan import __version__
from tierplan.hwmodels import load_machine
from tierplan.hwmodels.catalog import load_part
from tierplan.hwmodels.description import find_key
from tierplan.planner.plan_rules import PLANNER
from tierplan.planner.training_files.reading import flat
from tierplan.sim.step import Semantics
from tierplan.sim.workloads.workload import Training, WorkloadError


class StudyError(ValueError):
    """A study that cannot be read; names the key and what is allowed."""


SEQUENCES = 16
"""Of one step, where nobody says how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One scenario of a study: what is trained, where, and who decides."""

    model: str
    machine: str
    policy: str = "planner"
    """A policy's name, or `planner`."""
    batch: int = 1
    accumulation: int = 1
    sequences: int = 0
    """Of one step, on all devices, where micro-batch and accumulation are to be searched; 0 where they are not."""
    seq: int = 1024
    dtype: str = "auto"
    autocast: str = ""
    """In which products of an fp32 model run: bf16 or fp16."""
    optimizer: str = "adamw"
    lora: str = ""
    """Adapters to train, as `adapters.read_adapters` reads them."""
    trained_dtype: str | None = None
    """Of adapters: fp32, bf16 or fp16. None for fp32, as PEFT has them."""
    freeze: str = ""
    """Patterns of names of parameters that are not trained, with commas between."""
    base: str = ""
    """Format of frozen linear layers: nf4, nf4-double, int4, int8, fp8 or df11."""
    activation_format: str = ""
    """Format in which activations leave the device: fp8."""
    master_weights: bool = True
    semantics: str = ""
    """Empty for the policy's own."""
    max_grad_norm: float | None = None
    padded: bool = False
    """Batches are padded, so that attention takes a mask."""
    loss: str = "plain"
    """plain or fused."""
    torch_compile: bool = False
    """Blocks run as kernels of `torch.compile`."""
    loss_chunks: int = 1
    attention: str = "flash"
    backend: str = "auto"
    exact: bool = False
    """The model's class is run on fake tensors, where closed forms would do too."""
    planner_s: float | None = None
    """Time limit of the planner, if not its own."""
    drive_lifetime_years: float | None = None
    seed: int = 0
    calibration: str = "auto"
    """A file of `tierplan calibrate`; `auto` for the user's own that suits best, `none` for none."""
    overrides: Mapping[str, object] = field(default_factory=dict)
    """Changes to the machine's description, by key."""
    devices: int | None = None
    """GPUs that are asked for, where it is not for all that the machine has."""

    def on_machine(self, machine: str) -> Point:
        """The same question for another machine, of which neither changes nor a file of calibration says anything."""
        calibration = self.calibration if self.calibration == "none" else "auto"
        return replace(self, machine=machine, calibration=calibration, overrides={}, devices=None)

    @property
    def settings(self) -> list[str]:
        """Changes to the description, the number of GPUs among them."""
        return [*self.own_settings, *([] if self.devices is None else [f"gpu.count={self.devices}"])]

    @property
    def own_settings(self) -> list[str]:
        """Changes to the description of the machine that there is, however many of its GPUs are asked for."""
        return [f"{key}={value}" for key, value in self.overrides.items()]

    @property
    def key(self) -> str:
        """The same for the same question, in any study and any process, as long as tierplan's version is the same;
        whatever the files say that it names."""
        record = json.dumps([__version__, asdict(self)], sort_keys=True, default=str)
        return hashlib.sha256(record.encode()).hexdigest()[:16]

    @property
    def words(self) -> list[str]:
        """The options of a command that say how is trained, where that is not the default; sequences' length always."""
        words, default = ["--seq", str(self.seq)], Point(model="", machine="")
        for name in (*ALIKE, "exact"):
            if (value := getattr(self, name)) == getattr(default, name):
                continue
            flag = {"activation_format": "acts", "master_weights": "no-master-weights"}.get(name, name)
            values = str(value).split(",") if name == "freeze" else [] if isinstance(value, bool) else [str(value)]
            flags = [f"--{flag.replace('_', '-')}"]
            words += [word for each in values for word in (*flags, each)] if values else flags
        return words

    def columns(self) -> dict[str, object]:
        """The point as columns of a table: one per field that was asked, and one per changed machine key."""
        record = asdict(replace(self, devices=None))
        overrides = record.pop("overrides")
        answered = ("devices", *(("batch", "accumulation") if self.sequences else ()))
        for name in answered:  # a prediction says it
            del record[name]
        return {**record, **overrides}


SIZES = ("batch", "accumulation", "sequences")
"""How many sequences a step has."""
KEYS: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("model", "machine", "policy", "dtype", "optimizer", "semantics", "attention", "loss"), str),
    **dict.fromkeys(("lora", "trained_dtype", "freeze", "base", "activation_format", "autocast", "backend"), str),
    **dict.fromkeys(("batch", "accumulation", "sequences", "seq", "loss_chunks"), int),
    **dict.fromkeys(("padded", "torch_compile", "master_weights", "exact"), bool),
    **dict.fromkeys(("max_grad_norm", "planner_s", "drive_lifetime_years"), (int, float)),
}
ALIKE = (
    "dtype", "autocast", "optimizer", "lora", "trained_dtype", "freeze", "base", "activation_format", "attention",
    "loss", "loss_chunks", "torch_compile", "max_grad_norm", "master_weights", "padded", "backend",
)  # fmt: skip
OF_TRAINING: Mapping[str, str] = {
    "batch": "per_device_train_batch_size", "accumulation": "gradient_accumulation_steps", "seq": "sequence_length",
    **{name: name for name in ALIKE},
}  # fmt: skip
"""Settings of a point that say how is trained, wherever that is, and their names in `Training`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A grid: each axis has a name and its values."""

    name: str
    question: str = ""
    scenario: Mapping[str, Sequence[object]]
    """Values by field of `Point`; `model` and `machine` are needed."""
    overrides: Mapping[str, Sequence[object]] = field(default_factory=dict)
    """Values by key of the machine's description."""

    def __post_init__(self) -> None:
        for key, values in self.scenario.items():
            if key not in KEYS:
                raise StudyError(f"study {self.name!r}: no key {key!r} in [scenario]; the keys are {', '.join(KEYS)}")
            for value in values:
                if not isinstance(value, KEYS[key]) or isinstance(value, bool) != (KEYS[key] is bool):
                    names = {str: "text", int: "a whole number", bool: "true or false"}
                    wanted = names.get(KEYS[key], "a number")  # type: ignore[arg-type]
                    raise StudyError(f"study {self.name!r}: {key} is {value!r}; it must be {wanted}")
                if KEYS[key] is int and value < 1:  # type: ignore[operator]
                    raise StudyError(f"study {self.name!r}: {key} is {value}; it must be 1 or more")
                if KEYS[key] not in (int, str, bool) and not value > 0:  # type: ignore[operator]
                    raise StudyError(f"study {self.name!r}: {key} is {value}; it must be above 0")
        for key in ("model", "machine"):
            if key not in self.scenario:
                raise StudyError(f"study {self.name!r} names no {key}; add {key} = ... to [scenario]")
        if "sequences" in self.scenario and (given := [k for k in ("batch", "accumulation") if k in self.scenario]):
            raise StudyError(
                f"study {self.name!r}: sequences looks for the best batch and accumulation; leave out "
                f"{' and '.join(given)}, or give them without sequences"
            )
        for key, values in {**self.scenario, **self.overrides}.items():
            if not values:
                raise StudyError(f"study {self.name!r}: {key} is an empty list; give at least one value")

    def points(self) -> Iterator[Point]:
        """All combinations, the last key varying fastest.

        Where the study does not say how many sequences a step has, it has as many as for `tierplan plan`.
        """
        scenario = self.scenario if {*SIZES} & self.scenario.keys() else {**self.scenario, "sequences": [SEQUENCES]}
        names, changed = list(scenario), list(self.overrides)
        for values in itertools.product(*scenario.values(), *self.overrides.values()):
            settings = dict(zip(names, values[: len(names)], strict=True))
            overrides = dict(zip(changed, values[len(names) :], strict=True))
            yield Point(**settings, overrides=overrides)  # type: ignore[arg-type]

    def check_names(self) -> None:
        """Raises what is wrong with a model, a machine, a policy or a key of the machine, each looked at alone, and
        with a setting that no training can have, alone or with any of the others.

        A typo would otherwise be an error in every row. What only some combinations cannot do stays their row's error.
        """
        from tierplan.planner.policies import check_name
        from tierplan.sim.workloads.models import read_config

        for policy in self.scenario.get("policy", ()):
            check_name(str(policy), PLANNER)
        for model in self.scenario["model"]:
            read_config(str(model), Training())
        for machine in self.scenario["machine"]:
            load_machine(str(machine))
        for key, values in self.overrides.items():
            section = find_key(key).section
            for part in values if key == f"{section}.part" else ():
                load_part(section, str(part))
        for semantics in self.scenario.get("semantics", ()):
            if semantics and semantics not in (known := get_args(Semantics)):
                raise StudyError(f"study {self.name!r}: semantics is {semantics!r}; choose among {', '.join(known)}")
        self._check_training()

    def _check_training(self) -> None:
        """Raises what is wrong with a setting of training that none can have."""
        from tierplan.studies.evaluate import training_of

        axes = {key: values for key, values in self.scenario.items() if key in OF_TRAINING}
        alone = [{key: value} for key, values in axes.items() for value in values]
        together = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
        wrong: dict[tuple[str, object], WorkloadError] = {}
        right: set[tuple[str, object]] = set()
        for settings in (*alone, *together):
            try:
                training_of(Point(model="", machine="", **settings), None)  # type: ignore[arg-type]
            except WorkloadError as error:
                wrong = dict.fromkeys(settings.items(), error) | wrong
            else:
                right |= settings.items()
        for setting, why in wrong.items():
            if setting not in right:
                raise StudyError(f"study {self.name!r}: {why}")

    def relative_to(self, folder: Path) -> Study:
        """The study with models and machines that are files in `folder` found from anywhere."""

        def found(value: object) -> object:
            path = folder / str(value)
            return str(path.resolve()) if path.exists() and not Path(str(value)).is_absolute() else value

        files = {key: [found(v) for v in self.scenario[key]] for key in ("model", "machine")}
        return replace(self, scenario={**self.scenario, **files})


def load_study(path: str | os.PathLike[str]) -> Study:
    """The study of a TOML file. Paths in it are relative to the file. Raises `StudyError`."""
    source = Path(path)
    try:
        record = tomllib.loads(source.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise StudyError(f"{source} is not TOML: {error}") from error
    allowed = ("name", "question", "scenario", "set")
    if unknown := sorted(set(record) - set(allowed)):
        raise StudyError(f"{source}: no key {unknown[0]!r}; the keys are {', '.join(allowed)}")
    sections = {name: record.get(name, {}) for name in ("scenario", "set")}
    for name, section in sections.items():
        if not isinstance(section, dict):
            raise StudyError(f"{source}: [{name}] must be a table of keys and values")
    name = record.get("name", source.stem)
    if not isinstance(name, str) or Path(name).name != name or name == "..":
        raise StudyError(f"{source}: name is {name!r}; it is that of a folder, without /; --out says where else")
    study = Study(
        name=name,
        question=record.get("question", ""),
        scenario={key: _values(value) for key, value in sections["scenario"].items()},
        overrides={key: _values(value) for key, value in flat(sections["set"]).items()},
    )
    return study.relative_to(source.parent)


def _values(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]
