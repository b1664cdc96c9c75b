"""Training settings from the files that people have: a DeepSpeed JSON, or Hugging Face training arguments.

    read_deepspeed(path, base)        the settings and the policy that a DeepSpeed configuration amounts to
    read_training_args(path, base)    the settings of a `TrainingArguments` JSON

Both take the settings that the file does not have (sequence length, attention) from `base`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tierplan.sim.workloads.workload import Training, WorkloadError

AUTO = "auto"
OFFLOAD_PLACES = {"cpu": "host", "nvme": "nvme", "none": "device"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """What a configuration file asks for."""

    training: Training
    policy: str
    """The name of the policy that does the same."""
    options: Mapping[str, str]
    """The policy's settings."""
    notes: tuple[str, ...] = ()
    """What was left out of account, or filled in."""


def read_deepspeed(path: str | Path, base: Training) -> Configured:
    """The training settings and the policy of a DeepSpeed configuration on one GPU.

    Raises `WorkloadError` for a file that is none, or a setting that no policy has.
    """
    raw = _read_json(Path(path))
    notes: list[str] = []
    zero = _section(raw, "zero_optimization")
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise WorkloadError(f"{path}: zero_optimization.stage is {stage!r}; DeepSpeed has stages 0 to 3")
    if known := sorted(set(raw) - KNOWN):
        notes.append(f"not taken into account: {', '.join(known)}")
    training = replace(
        base,
        per_device_train_batch_size=_count(raw, "train_micro_batch_size_per_gpu", base.per_device_train_batch_size),
        gradient_accumulation_steps=_count(raw, "gradient_accumulation_steps", base.gradient_accumulation_steps),
        dtype=_precision(raw),
        master_weights=True,
        optimizer=_optimizer(_section(raw, "optimizer"), base),
        max_grad_norm=_clipping(raw, base),
    )
    batch = raw.get("train_batch_size")
    of_file = training.per_device_train_batch_size * training.gradient_accumulation_steps
    if isinstance(batch, int) and batch != of_file:
        notes.append(f"train_batch_size {batch} is {batch / of_file:g} times one GPU's {of_file}: that many GPUs")
    recompute = bool(_section(raw, "activation_checkpointing"))
    notes += [] if recompute else ["no activation_checkpointing section: set in the model, if at all"]
    places = {
        name: _offload(zero, key, str(path))
        for name, key in (("params", "offload_param"), ("optimizer", "offload_optimizer"))
    }
    if stage == 3:
        options = {**places, **_of_optimizer(_section(zero, "offload_optimizer"))}
        return Configured(training=training, policy="zero-infinity", options=options, notes=tuple(notes))
    if places["params"] != "device":
        raise WorkloadError(f"{path}: offload_param needs zero_optimization.stage 3, but it is {stage}")
    if places["optimizer"] == "nvme":
        raise WorkloadError(f"{path}: offload_optimizer to nvme needs zero_optimization.stage 3, but it is {stage}")
    if places["optimizer"] == "host":
        options = {"checkpointing": "on" if recompute else "off"}
        return Configured(training=training, policy="zero-offload", options=options, notes=tuple(notes))
    return Configured(
        training=training, policy="full-recompute" if recompute else "in-memory", options={}, notes=tuple(notes)
    )


KNOWN = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "bf16",
    "fp16", "optimizer", "scheduler", "zero_optimization", "activation_checkpointing", "steps_per_print",
    "wall_clock_breakdown", "aio",
}  # fmt: skip


def read_training_args(path: str | Path, base: Training) -> tuple[Training, bool]:
    """The settings of a `TrainingArguments` JSON, and whether it asks for gradient checkpointing."""
    raw = _read_json(Path(path))
    norm = raw.get("max_grad_norm", 1.0)  # the Trainer clips unless told not to
    training = replace(
        base,
        per_device_train_batch_size=_count(raw, "per_device_train_batch_size", 8),
        gradient_accumulation_steps=_count(raw, "gradient_accumulation_steps", 1),
        max_grad_norm=float(norm) if isinstance(norm, (int, float)) and norm > 0 else None,
        optimizer="sgd" if raw.get("optim") == "sgd" else "adamw",
    )
    return training, bool(raw.get("gradient_checkpointing", False))


def _read_json(path: Path) -> dict[str, object]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise WorkloadError(f"there is no file {str(path)!r}; give a JSON file") from error
    except (ValueError, RecursionError) as error:
        raise WorkloadError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise WorkloadError(f"{path} holds a {type(raw).__name__}; a configuration is one JSON object")
    return raw


def _section(raw: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = raw.get(name) or {}
    if not isinstance(value, Mapping):
        raise WorkloadError(f"{name} is {value!r}; it must be an object")
    return value


def _count(raw: Mapping[str, object], name: str, default: int) -> int:
    value = raw.get(name, AUTO)
    if value in (AUTO, None):
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise WorkloadError(f"{name} is {value!r}; it must be a whole number of 1 or more")
    return value


def _precision(raw: Mapping[str, object]) -> Literal["fp32", "bf16", "fp16"]:
    if _section(raw, "bf16").get("enabled") in (True, AUTO):
        return "bf16"
    if _section(raw, "fp16").get("enabled") in (True, AUTO):
        return "fp16"
    return "fp32"


def _optimizer(section: Mapping[str, object], base: Training) -> Literal["adamw", "sgd"]:
    kind = section.get("type")
    if kind is None:
        return base.optimizer
    optimizer = {"adam": "adamw", "adamw": "adamw", "fusedadam": "adamw", "sgd": "sgd"}.get(str(kind).lower())
    if optimizer is None:
        raise WorkloadError(f"optimizer.type is {kind!r}; Adam, AdamW and SGD are supported")
    return "adamw" if optimizer == "adamw" else "sgd"


def _clipping(raw: Mapping[str, object], base: Training) -> float | None:
    value = raw.get("gradient_clipping", AUTO)
    if value == AUTO:
        return base.max_grad_norm
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value < 0:
        raise WorkloadError(f"gradient_clipping is {value!r}; it must be a number of 0 (off) or more")
    return float(value) or None


def _of_optimizer(section: Mapping[str, object]) -> dict[str, str]:
    """What a file says of how the offloaded optimizer is read, written and held, as options; what it does not say stays
    with the policy."""
    options = {}
    if "pipeline_read" in section or "pipeline_write" in section:
        options["pipeline"] = "on" if section.get("pipeline_read") or section.get("pipeline_write") else "off"
    if "pin_memory" in section:
        options["pin_memory"] = "on" if section["pin_memory"] else "off"
    return options


def _offload(zero: Mapping[str, object], key: str, path: str) -> str:
    device = _section(zero, key).get("device", "none")
    if device not in OFFLOAD_PLACES:
        raise WorkloadError(f"{path}: {key}.device is {device!r}; it must be cpu, nvme or none")
    return OFFLOAD_PLACES[str(device)]
