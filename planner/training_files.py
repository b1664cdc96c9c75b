"""Training settings from the files that people have: DeepSpeed's JSON, accelerate's YAML, the Trainer's arguments.

    read_training_file(path, base)           any of the three, told apart by what they hold
    read_deepspeed(path, base)        a DeepSpeed configuration

They say the settings and the policy that a file amounts to on one machine. What it does not have (sequence length,
attention, whatever is `auto`) is taken from `base`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from tierplan.planner.training_keys import AUTO, OF_ACCELERATE, OF_DEEPSPEED, OF_TRAINER, Known, unaccounted
from tierplan.sim.workloads.optimizers import of_transformers
from tierplan.sim.workloads.workload import Training, WorkloadError

OFFLOAD_PLACES = {"cpu": "host", "nvme": "nvme", "none": "device"}

OF_STEP = ("per_device_train_batch_size", "gradient_accumulation_steps")


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
    devices: int | None = None
    """GPUs that the file is of; None where it does not say."""
    why_devices: str = ""
    """What it says of them."""
    left_open: tuple[str, ...] = OF_STEP
    """Of these two settings, those that the file does not say."""
    says: Mapping[str, object] = field(default_factory=dict)
    """All that the file says, by dotted key: `zero_optimization.overlap_comm`."""


def read_training_file(path: str | Path, base: Training) -> Configured:
    """What a configuration of DeepSpeed, accelerate or the Hugging Face Trainer asks for.

    Raises `WorkloadError` for another file, and for settings that nothing here has (adapters, several machines).
    """
    path = Path(path)
    raw = _read(path)
    adapters = sorted(key for key in ADAPTERS if raw.get(key))
    if adapters and (raw.get("finetuning_type") != "full" or len(adapters) > 1):
        raise WorkloadError(
            f"{path} has {adapters[0]}: {raw[adapters[0]]!r}; steps are explained where all parameters are trained "
            "in 32 or 16 bits, not for adapters or a quantised base"
        )
    if "distributed_type" in raw or "compute_environment" in raw:
        found = _accelerate(raw, base, path)
        return replace(found, notes=(*found.notes, *_unaccounted(flat(raw), OF_ACCELERATE)))
    if TRAINER_ONLY & raw.keys():
        if isinstance(fsdp := raw.get("fsdp_config"), str):
            raw["fsdp_config"] = _read_beside(fsdp, path)
        found = _trainer(raw, base, path)
        return replace(found, notes=(*found.notes, *_unaccounted(flat(raw), OF_TRAINER)), left_open=())
    if DEEPSPEED_ONLY & raw.keys():
        return _deepspeed(raw, base, str(path))
    raise WorkloadError(
        f"{path} is no configuration of DeepSpeed (zero_optimization, train_micro_batch_size_per_gpu), of accelerate "
        "(distributed_type) or of the Trainer (per_device_train_batch_size); give one of these"
    )


def read_deepspeed(path: str | Path, base: Training) -> Configured:
    """The training settings and the policy of a DeepSpeed configuration on one GPU.

    Raises `WorkloadError` for a file that is none, or a setting that no policy has.
    """
    return _deepspeed(_read(Path(path)), base, str(path))


def _deepspeed(raw: Mapping[str, object], base: Training, path: str, of_trainer: bool | None = None) -> Configured:
    """The Trainer recomputes by its own setting, `of_trainer`, and never looks at DeepSpeed's."""
    says = flat(raw)
    zero = _section(raw, "zero_optimization")
    for old, key in (("cpu_offload", "offload_optimizer"), ("cpu_offload_params", "offload_param")):
        if _flag(zero, old, path):  # of DeepSpeed before 0.4
            zero = {key: {"device": "cpu"}, **zero}
    stage = zero.get("stage", 0)
    if not isinstance(stage, int) or isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise WorkloadError(f"{path}: zero_optimization.stage is {stage!r}; DeepSpeed has stages 0 to 3")
    read = ("activation_checkpointing.cpu_checkpointing",) if stage == 3 or of_trainer is not None else ()
    notes = [*_unaccounted({key: value for key, value in says.items() if key not in read}, OF_DEEPSPEED)]
    training = replace(
        base,
        per_device_train_batch_size=_count(raw, "train_micro_batch_size_per_gpu", base.per_device_train_batch_size),
        gradient_accumulation_steps=_count(raw, "gradient_accumulation_steps", base.gradient_accumulation_steps),
        dtype=_precision(raw, base),
        master_weights=True,
        optimizer=_optimizer(_section(raw, "optimizer"), base),
        max_grad_norm=_norm(raw, "gradient_clipping", base),
    )
    batch = _count(raw, "train_batch_size", 0) or None
    of_file = training.per_device_train_batch_size * training.gradient_accumulation_steps
    if batch is not None and (batch % of_file or (batch != of_file and not {*PER_GPU} <= raw.keys())):
        raise WorkloadError(
            f"{path}: train_batch_size is {batch}, but one GPU's micro-batch of {training.per_device_train_batch_size} "
            f"times {training.gradient_accumulation_steps} gradient accumulation steps is {of_file}; give "
            f"{' and '.join(PER_GPU)}, whose product divides it"
        )
    section = _section(raw, "activation_checkpointing")
    recompute = bool(section) or stage == 3 if of_trainer is None else of_trainer
    if of_trainer is None and not section:
        notes.append(_UNSAID.format("activation_checkpointing section", "each block" if recompute else "nothing"))
    if of_trainer is not None and section:
        notes.append(
            "activation_checkpointing is for models that call DeepSpeed's own; under the Trainer its "
            f"gradient_checkpointing: {str(of_trainer).lower()} decides"
        )
    on_cpu = of_trainer is None and _flag(section, "cpu_checkpointing", path)
    policy, options = _of_stage(
        zero, stage, path, checkpoints="none" if not recompute else "host" if on_cpu else "device"
    )
    if (stage, policy) == (1, "zero-offload"):
        notes.append("offload_optimizer of stage 1 is simulated as that of stage 2, which divides gradients too")
    return Configured(
        training=training,
        policy=policy,
        options=options,
        notes=tuple(notes),
        devices=None if batch is None else batch // of_file,
        why_devices=f"train_batch_size {batch}, of which one GPU's is {of_file}",
        left_open=tuple(ours for ours, their in zip(OF_STEP, PER_GPU, strict=True) if raw.get(their, AUTO) == AUTO),
        says=says,
    )


def _of_stage(zero: Mapping[str, object], stage: int, path: str, *, checkpoints: str) -> tuple[str, dict[str, str]]:
    """The policy of a stage of ZeRO, with its options; `checkpoints` is where they lie, or none."""
    places = {
        name: _offload(zero, key, path)
        for name, key in (("params", "offload_param"), ("optimizer", "offload_optimizer"))
    }
    if stage == 3:
        options = {**places, **_of_optimizer(_section(zero, "offload_optimizer")), "checkpoints": checkpoints}
        if zero.get("overlap_comm") is False or zero.get("stage3_prefetch_bucket_size") == 0:
            options["prefetch"] = "0"
        return "zero-infinity", options
    options = {"checkpointing": "off" if checkpoints == "none" else "on"}
    for key, place, least in (
        ("offload_param", places["params"] != "device", 3),
        ("offload_optimizer to nvme", places["optimizer"] == "nvme", 3),
        ("offload_optimizer", places["optimizer"] == "host", 1),
    ):
        if place and stage < least:
            stages = "3" if least == 3 else "1, 2 or 3"
            raise WorkloadError(f"{path}: {key} needs zero_optimization.stage {stages}, but it is {stage}")
    if places["optimizer"] == "host":
        return "zero-offload", options
    if stage == 0:
        return "in-memory" if checkpoints == "none" else "full-recompute", {}
    if isinstance(overlap := zero.get("overlap_comm"), bool):
        options["overlap"] = "on" if overlap else "off"
    return f"zero-{stage}", options


PER_GPU = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""DeepSpeed's names of `OF_STEP`."""
ADAPTERS = {
    "finetuning_type", "lora_r", "lora_rank", "quantization_bit", "peft_config", "use_peft", "use_lora", "load_in_4bit",
    "load_in_8bit",
}  # fmt: skip
TRAINER_ONLY = {"per_device_train_batch_size", "output_dir", "gradient_checkpointing", "optim"}
DEEPSPEED_ONLY = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"}


def _trainer(raw: Mapping[str, object], base: Training, path: Path) -> Configured:
    """`TrainingArguments` as JSON, with the DeepSpeed configuration that they name or hold."""
    try:
        optimizer = of_transformers(str(raw.get("optim", "adamw_torch")))
    except ValueError as error:
        raise WorkloadError(f"{path}: {error}") from None
    on = [name for name in MIXED if _flag(raw, name, path)]
    _check_one_of(*(name in on for name in MIXED))
    base, notes = _mixed(base, mixed := on[0] if on else "no")
    training = replace(
        base,
        per_device_train_batch_size=_count(raw, "per_device_train_batch_size", 8),
        gradient_accumulation_steps=_count(raw, "gradient_accumulation_steps", 1),
        max_grad_norm=_norm({"max_grad_norm": 1.0, **raw}, "max_grad_norm", base),  # it clips unless told not to
        optimizer=optimizer,
    )
    recompute = any(_flag(raw, name, path) for name in ("gradient_checkpointing", "activation_checkpointing"))
    if "finetuning_type" in raw:  # LLaMA-Factory's, which recomputes unless told not to
        recompute = not _flag(raw, "disable_gradient_checkpointing", path)
    if raw.get("deepspeed") and raw.get("fsdp"):
        raise WorkloadError(f"{path} has both deepspeed and fsdp, of which one can train; leave out the other")
    if deepspeed := raw.get("deepspeed"):
        return _with_deepspeed(deepspeed, training, path, raw, mixed=mixed, recompute=recompute)
    if raw.get("fsdp"):
        found = _fsdp(_fsdp_of_trainer(raw, path), training, raw, path, recompute=recompute)
        return replace(found, notes=(*found.notes, *notes)) if mixed == "no" else found
    notes = (*notes, *_unused_section(raw, "fsdp_config", "fsdp is not on"))
    policy = "full-recompute" if recompute else "in-memory"
    return Configured(training=training, policy=policy, options={}, notes=notes, says=flat(raw))


MIXED: tuple[Literal["bf16"], Literal["fp16"]] = ("bf16", "fp16")


def _mixed(base: Training, mixed: str) -> tuple[Training, tuple[str, ...]]:
    """The settings with autocast to a format, or without, and what is assumed for that without DeepSpeed and FSDP."""
    if mixed == "no":
        copy = "" if base.dtype == "fp32" else f", with{'' if base.master_weights else 'out'} an fp32 copy"
        said = "no mixed precision: a model is trained as it was loaded, which is not said and taken as "
        return base, (f"{said}{base.dtype}{copy} (--dtype, --no-master-weights)",)
    said = (
        f"{mixed} is autocast of fp32 parameters and gradients, simulated as {mixed} with an fp32 copy: as much "
        "memory, but GPUs exchange half the bytes"
    )
    return replace(base, dtype=mixed, master_weights=True), (said,)  # type: ignore[arg-type]


def _accelerate(raw: Mapping[str, object], base: Training, path: Path) -> Configured:
    """What `accelerate config` wrote, with the number of processes, each of which has a GPU."""
    found = _of_accelerate(raw, base, path)
    for kind, key in (("DEEPSPEED", "deepspeed_config"), ("FSDP", "fsdp_config")):
        if (own := raw.get("distributed_type")) != kind:
            found = replace(found, notes=(*found.notes, *_unused_section(raw, key, f"distributed_type is {own}")))
    alone = raw.get("distributed_type") in NOT_DISTRIBUTED
    num = _count(raw, "num_processes", 0) or (1 if alone else None)
    if num is None:
        return found
    if alone and num > 1:
        found = replace(
            found, notes=(*found.notes, f"num_processes {num} is not used: distributed_type NO is one process")
        )
        num = 1
    if found.devices not in (None, num):
        raise WorkloadError(
            f"{path}: num_processes is {num}, but DeepSpeed's {found.why_devices} is of {found.devices} GPUs; "
            "make them agree"
        )
    return replace(found, devices=num, why_devices=f"num_processes {num}")


NOT_DISTRIBUTED = ("NO", False, None)
"""YAML reads NO as false."""


def _unused_section(raw: Mapping[str, object], key: str, why: str) -> tuple[str, ...]:
    """The note that a section of a file says something and is not used there."""
    says_something = any(value not in (None, False, 0) for value in flat(_section(raw, key)).values())
    return (f"{key} is not used: {why}",) if says_something else ()


def _of_accelerate(raw: Mapping[str, object], base: Training, path: Path) -> Configured:
    if _count(raw, "num_machines", 1) != 1:
        raise WorkloadError(f"{path}: num_machines is {raw['num_machines']!r}; steps are explained on one machine")
    precision = str(raw.get("mixed_precision") or "no").lower()
    if precision not in ("no", "bf16", "fp16"):
        raise WorkloadError(f"{path}: mixed_precision is {precision!r}; no, bf16 and fp16 are supported")
    base, notes = _mixed(base, precision)
    match raw.get("distributed_type"):
        case "DEEPSPEED":
            ours = _section(raw, "deepspeed_config")
            if ours.get("deepspeed_config_file"):
                if both := [key for key in ours if key in DEEPSPEED_OF_ACCELERATE]:
                    raise WorkloadError(
                        f"{path}: deepspeed_config has {both[0]} beside deepspeed_config_file, which accelerate "
                        "refuses; leave one of them out"
                    )
                return _with_deepspeed(ours["deepspeed_config_file"], base, path, raw, mixed=precision)
            zero: dict[str, object] = {"stage": ours.get("zero_stage", 2)}
            for name in ("optimizer", "param"):
                if device := ours.get(f"offload_{name}_device"):
                    zero[f"offload_{name}"] = {"device": device, "nvme_path": ours.get(f"offload_{name}_nvme_path")}
            same = ("gradient_accumulation_steps", "gradient_clipping")
            content = {"zero_optimization": zero, **{key: ours[key] for key in same if key in ours}}
            return _with_deepspeed(content, base, path, raw, mixed=precision)
        case "FSDP":
            found = _fsdp(_section(raw, "fsdp_config"), base, raw, path, recompute=None)
            return replace(found, notes=(*found.notes, *notes)) if precision == "no" else found
        case "NO" | False | "MULTI_GPU" | None:
            notes = (*notes, _UNSAID.format("gradient checkpointing in this file", "nothing"))
            return Configured(training=base, policy="in-memory", options={}, notes=notes, says=flat(raw))
        case kind:
            raise WorkloadError(f"{path}: distributed_type is {kind!r}; NO, MULTI_GPU, DEEPSPEED and FSDP are known")


DEEPSPEED_OF_ACCELERATE = {
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "zero3_save_16bit_model",
    "offload_optimizer_device", "offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path",
}  # fmt: skip
SAME: Mapping[str, str] = {
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "max_grad_norm": "gradient_clipping",
    "bf16": "bf16.enabled",
    "fp16": "fp16.enabled",
}
"""Settings of the Trainer, and DeepSpeed's names for them."""


def _with_deepspeed(
    given: object,
    base: Training,
    path: Path,
    raw: Mapping[str, object],
    *,
    mixed: str,
    recompute: bool | None = None,
) -> Configured:
    """A DeepSpeed configuration inside another file, or beside it.

    Parameters
    ----------
    mixed
        What the other file says of mixed precision: it is DeepSpeed's where DeepSpeed's own file does not say.
    recompute
        What the Trainer says of gradient checkpointing, None where there is no Trainer.
    """
    content = dict(given if isinstance(given, Mapping) else _read_beside(given, path))
    theirs = flat(content)
    for name, their in SAME.items():
        ours, said = raw.get(name, AUTO), theirs.get(their, AUTO)
        if AUTO not in (ours, said) and None not in (ours, said) and ours != said:
            raise WorkloadError(
                f"{path}: {name} is {ours!r}, but DeepSpeed's {their} is {said!r}, which the Trainer refuses; make "
                "them agree, or DeepSpeed's auto"
            )
    for name in MIXED:
        section = _section(content, name)
        if section.get("enabled", AUTO) == AUTO:
            content[name] = {**section, "enabled": mixed == name}
        elif mixed != "no" and _flag(section, "enabled", f"{path}: {name}") != (mixed == name):
            raise WorkloadError(
                f"{path} asks for {mixed}, but DeepSpeed's {name}.enabled is {section['enabled']!r}; make them agree"
            )
    found = _deepspeed(content, base, str(path), recompute)
    notes = found.notes
    if "optim" in raw and found.training.optimizer != base.optimizer:
        notes = (*notes, f"DeepSpeed's optimizer.type {theirs['optimizer.type']} runs, not optim {raw['optim']}")
    return replace(found, notes=notes, says={**flat(raw), **found.says})


STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Of FSDP, by the numbers 1 to 5. On one machine the hybrid ones are the first two: they shard over all of its GPUs."""
KEEP_PARAMETERS = ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")


def _fsdp_of_trainer(raw: Mapping[str, object], path: Path) -> Mapping[str, object]:
    """The Trainer's `fsdp_config`, with what the older words of `fsdp` say."""
    said = raw["fsdp"]
    words = said.split() if isinstance(said, str) else [] if said is True else said
    if not isinstance(words, list):
        raise WorkloadError(f"{path}: fsdp is {said!r}; give true, or words such as 'full_shard auto_wrap'")
    found = dict(_section(raw, "fsdp_config"))
    for word in map(str, words):
        if word.upper() in STRATEGIES:
            found.setdefault("reshard_after_forward", word)
        elif word == "offload":
            found.setdefault("cpu_offload", True)
        elif word != "auto_wrap":
            known = ", ".join([*map(str.lower, STRATEGIES), "offload", "auto_wrap"])
            raise WorkloadError(f"{path}: fsdp has {word!r}; it may have {known}")
    return found


def _fsdp(
    given: Mapping[str, object], training: Training, raw: Mapping[str, object], path: Path, *, recompute: bool | None
) -> Configured:
    """PyTorch's FSDP; under accelerate and the Trainer gradients are summed after the last micro-batch (`no_sync`).

    `recompute` is what the Trainer says of gradient checkpointing, None where there is no Trainer.
    """
    section = {key.removeprefix("fsdp_"): value for key, value in given.items()}
    strategies = {key: _strategy(section, key, path) for key in ("reshard_after_forward", "sharding_strategy")}
    said = {strategy for strategy in strategies.values() if strategy}
    if len({strategy in KEEP_PARAMETERS for strategy in said}) > 1:
        both = " and ".join(f"fsdp_{key}: {section[key]!r}" for key in strategies)
        raise WorkloadError(f"{path} says {both}, which contradict each other; leave one of them out")
    strategy = strategies["reshard_after_forward"] or strategies["sharding_strategy"] or "FULL_SHARD"
    offload = _flag(section, "offload_params", path) or _flag(section, "cpu_offload", path)
    notes = []
    options = {"reduces": "last"}
    if strategy == "NO_SHARD" and offload:
        raise WorkloadError(
            f"{path}: FSDP with NO_SHARD and offloading has a whole model in host memory for every GPU, which no "
            "policy does; give FULL_SHARD, or no offloading"
        )
    if strategy == "NO_SHARD":
        policy = "ddp"
    elif not offload:
        policy, options["reshard"] = "fsdp", "off" if strategy in KEEP_PARAMETERS else "on"
    else:
        policy = "fsdp-offload"
        if strategy in KEEP_PARAMETERS:
            notes.append(
                f"FSDP keeps parameters on the GPU from forward to backward ({strategy}), but with offloading they are "
                "simulated as FULL_SHARD has them: copied and gathered again, and less of the GPU is taken"
            )
    of_fsdp = _flag(section, "activation_checkpointing", path)
    if recompute and of_fsdp:
        raise WorkloadError(
            f"{path}: activation_checkpointing of fsdp_config and gradient_checkpointing are both on, which the "
            "Trainer refuses; leave out one of them"
        )
    if recompute is None and "activation_checkpointing" not in section:
        notes.append(_UNSAID.format("fsdp_activation_checkpointing", "nothing"))
    options["checkpointing"] = "on" if recompute or of_fsdp else "off"
    return Configured(training=training, policy=policy, options=options, notes=tuple(notes), says=flat(raw))


_UNSAID = "no {}: it is set in the model, if at all; {} is made again in backward here"


def _strategy(section: Mapping[str, object], key: str, path: Path) -> str | None:
    """What a setting of FSDP says of parameters after forward, as one of `STRATEGIES`."""
    value = section.get(key)
    if value is None:
        return None
    word = str(value).upper()
    named = {"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP", **{str(k): s for k, s in enumerate(STRATEGIES, 1)}}
    if (strategy := named.get(word, word)) not in STRATEGIES:
        raise WorkloadError(f"{path}: fsdp_{key} is {value!r}; give true, false, or one of {', '.join(STRATEGIES)}")
    return strategy


def _read_beside(given: object, path: Path) -> dict[str, object]:
    """A file that another one names."""
    beside = path.parent / str(given)
    return _read(beside if beside.exists() else Path(str(given)))


def _read(path: Path) -> dict[str, object]:
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
        raise WorkloadError(f"{path} holds a {type(raw).__name__}; a configuration is one JSON object")
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


def _unaccounted(says: Mapping[str, object], known: Known) -> tuple[str, ...]:
    """The note that names what is not taken into account, if there is any."""
    names = unaccounted(says, known)
    return (f"not taken into account: {', '.join(names)}",) if names else ()


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


def _flag(section: Mapping[str, object], name: str, path: Path | str) -> bool:
    """A switch, also in the words that YAML and JSON files have for it; off where nothing is said."""
    value = section.get(name)
    found = {"true": True, "false": False, "none": False, "auto": False}.get(str(value).lower())
    if found is None:
        raise WorkloadError(f"{path}: {name} is {value!r}; it must be true or false")
    return found


def _precision(raw: Mapping[str, object], base: Training) -> Literal["fp32", "bf16", "fp16"]:
    """The one that is enabled; of those that are `auto` the one of `base`, or the first."""
    auto = [name for name in MIXED if _section(raw, name).get("enabled") == AUTO]
    on = [name for name in MIXED if name not in auto and _flag(_section(raw, name), "enabled", name)]
    _check_one_of(*(name in on for name in MIXED))
    if base.dtype in auto:
        auto.insert(0, base.dtype)  # type: ignore[arg-type]
    return next(iter((*on, *auto)), "fp32")


def _check_one_of(bf16: bool, fp16: bool) -> None:
    if bf16 and fp16:
        raise WorkloadError("bf16 and fp16 are both enabled; a model is trained in one of them, so disable the other")


DEEPSPEED_OPTIMIZERS = {
    **dict.fromkeys(("adam", "adamw", "fusedadam"), "adamw"),
    **{name: name for name in ("sgd", "lion", "muon")},
}


def _optimizer(section: Mapping[str, object], base: Training) -> str:
    kind = section.get("type")
    if kind is None:
        return base.optimizer
    optimizer = DEEPSPEED_OPTIMIZERS.get(str(kind).lower())
    if optimizer is None:
        raise WorkloadError(f"optimizer.type is {kind!r}; Adam, AdamW, SGD, Lion and Muon are supported")
    momentum = _section(section, "params").get("momentum")
    return f"sgd:momentum={momentum}" if optimizer == "sgd" and momentum else optimizer


def _norm(raw: Mapping[str, object], name: str, base: Training) -> float | None:
    """The norm by which gradients are clipped."""
    value = raw.get(name, AUTO)
    if value == AUTO:
        return base.max_grad_norm
    if value is None:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < math.inf:
        raise WorkloadError(f"{name} is {value!r}; it must be a number of 0 (off) or more")
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
    if str(device) not in OFFLOAD_PLACES:
        raise WorkloadError(f"{path}: {key}.device is {device!r}; it must be cpu, nvme or none")
    return OFFLOAD_PLACES[str(device)]
