"""DeepSpeed's configuration, alone or inside another file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

from tierplan.planner.training_files.configured import MIXED, OF_STEP, UNSAID, Configured, check_one_of
from tierplan.planner.training_files.keys import AUTO, OF_DEEPSPEED, unaccounted_note
from tierplan.planner.training_files.reading import (
    check_undivided,
    count,
    flag,
    flat,
    norm,
    read_beside,
    section_of,
    switch,
)
from tierplan.sim.workloads.workload import Training, WorkloadError

OFFLOAD_PLACES = {"cpu": "host", "nvme": "nvme", "none": "device"}

PER_GPU = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
"""DeepSpeed's names of `OF_STEP`."""

CLIPPING = "gradient_clipping"
"""By DeepSpeed's default gradients are not clipped. Trainers fill in what is `auto` alone, and leave clipping to it."""

DEEPSPEED_ONLY = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"}


def of_deepspeed(
    raw: Mapping[str, object], base: Training, path: str, of_trainer: bool | None = None, devices: int = 1
) -> Configured:
    """The Trainer recomputes by its own setting, `of_trainer`, and never looks at DeepSpeed's."""
    raw = with_new_names(raw)
    check_undivided(section_of(raw, "tensor_parallel"), ["autotp_size"], path)
    check_undivided(raw, ["sequence_parallel_size"], path)
    raw = {CLIPPING: 0.0, **raw}
    says = flat(raw)
    made = {} if of_trainer is not None else _left_out(raw, base, devices, path)
    raw = {**raw, **made}
    zero = section_of(raw, "zero_optimization")
    for old, key in (("cpu_offload", "offload_optimizer"), ("cpu_offload_params", "offload_param")):
        if flag(zero, old, path):  # of DeepSpeed before 0.4
            zero = {key: {"device": "cpu"}, **zero}
    switch(section_of(zero, "offload_param"), "pin_memory", path)  # these three are read where a slow step is explained
    switch(section_of(section_of(raw, "optimizer"), "params"), "torch_adam", path)
    switch(raw, "zero_force_ds_cpu_optimizer", path)
    stage = zero.get("stage", 0)
    if not isinstance(stage, int) or isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise WorkloadError(f"{path}: zero_optimization.stage is {stage!r}; DeepSpeed has stages 0 to 3")
    read = ("activation_checkpointing.cpu_checkpointing",) if stage == 3 or of_trainer is not None else ()
    notes = [*unaccounted_note({key: value for key, value in says.items() if key not in read}, OF_DEEPSPEED)]
    if made:
        sizes = ", ".join(f"{key} {size}" for key, size in made.items())
        notes.append(f"train_batch_size {raw['train_batch_size']} on {_gpus(devices)} makes {sizes}, as in DeepSpeed")
    dtype, is_auto = _precision(raw, base)
    if is_auto:
        notes.append(f"bf16 and fp16 are auto, which accelerate and the Trainer fill in: taken as {dtype} (--dtype)")
    training = replace(
        base,
        per_device_train_batch_size=count(raw, "train_micro_batch_size_per_gpu", base.per_device_train_batch_size),
        gradient_accumulation_steps=count(raw, "gradient_accumulation_steps", base.gradient_accumulation_steps),
        dtype=dtype,
        trained_dtype=base.trained_dtype or (dtype if base.lora else None),  # it casts the whole model
        master_weights=True,
        optimizer=_optimizer(section_of(raw, "optimizer"), base),
        max_grad_norm=norm(raw, CLIPPING, base),
    )
    batch = count(raw, "train_batch_size", 0) or None
    of_file = training.per_device_train_batch_size * training.gradient_accumulation_steps
    if batch is not None and (batch % of_file or (batch != of_file and not {*PER_GPU} <= raw.keys())):
        raise WorkloadError(
            f"{path}: train_batch_size is {batch}, but one GPU's micro-batch of {training.per_device_train_batch_size} "
            f"times {training.gradient_accumulation_steps} gradient accumulation steps is {of_file}; give "
            f"{' and '.join(PER_GPU)}, whose product divides it"
        )
    section = section_of(raw, "activation_checkpointing")
    is_on = any(section.values())  # all off, as DeepSpeed's documentation has it, it says nothing
    recompute = is_on or stage == 3 if of_trainer is None else of_trainer
    if of_trainer is None and not is_on:
        what = "activation_checkpointing that is on" if section else "activation_checkpointing section"
        notes.append(UNSAID.format(what, "each block" if recompute else "nothing"))
    if of_trainer is not None and section:
        notes.append(
            "activation_checkpointing is for models that call DeepSpeed's own; under the Trainer its "
            f"gradient_checkpointing: {str(of_trainer).lower()} decides"
        )
    on_cpu = of_trainer is None and flag(section, "cpu_checkpointing", path)
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


def with_new_names(raw: Mapping[str, object]) -> dict[str, object]:
    """With today's name of bf16's section, where a file has the old one alone: DeepSpeed still reads that."""
    old = {"bf16": raw["bfloat16"]} if "bfloat16" in raw and "bf16" not in raw else {}
    return old | {key: value for key, value in raw.items() if key != "bfloat16" or not old}


def with_clipping(found: Configured) -> Configured:
    """With the norm of accelerate where DeepSpeed's is `auto`, and nobody else says one."""
    if found.says[CLIPPING] != AUTO or found.training.max_grad_norm:
        return found
    note = f"{CLIPPING} is auto, which accelerate makes 1.0, and the Trainer its max_grad_norm (--max-grad-norm)"
    return replace(found, training=replace(found.training, max_grad_norm=1.0)).noting(note)


def _left_out(raw: Mapping[str, object], base: Training, devices: int, path: str) -> dict[str, int]:
    """What DeepSpeed makes of the batch of all GPUs where the file does not say how it is divided.

    Raises `WorkloadError` where it cannot be divided so. What is `auto` is said by `base`; where that has no more than
    the default, it follows from the rest, and of two such sizes the accumulation does.
    """
    sizes = zip(PER_GPU, OF_STEP, strict=True)
    follows = [key for key, ours in sizes if raw.get(key) == AUTO and getattr(base, ours) == getattr(Training(), ours)]
    said = [key for key in PER_GPU if raw.get(key) is not None and key not in follows[-1:]]
    batch = count(raw, "train_batch_size", 0)
    if not batch or len(said) == len(PER_GPU):
        return {}
    micro_key, accumulation_key = PER_GPU
    if micro_key in said:
        micro = count(raw, micro_key, base.per_device_train_batch_size)
        made, size, what = {accumulation_key: batch // (micro * devices)}, micro, f"micro-batches of {micro}"
    else:
        size = count(raw, accumulation_key, base.gradient_accumulation_steps) if said else 1
        made = {micro_key: batch // (size * devices), **({} if said else {accumulation_key: 1})}
        what = f"micro-batches in {size} gradient accumulation steps"
    if batch % (size * devices):
        raise WorkloadError(
            f"{path}: train_batch_size is {batch}, but {batch} sequences are not whole {what} on {_gpus(devices)}; "
            "make it a multiple, or say of how many GPUs it is (explain-run --devices)"
        )
    return made


def _gpus(num: int) -> str:
    return "1 GPU" if num == 1 else f"{num} GPUs"


def _of_stage(zero: Mapping[str, object], stage: int, path: str, *, checkpoints: str) -> tuple[str, dict[str, str]]:
    """The policy of a stage of ZeRO, with its options; `checkpoints` is where they lie, or none."""
    places = {
        name: _offload(zero, key, path)
        for name, key in (("params", "offload_param"), ("optimizer", "offload_optimizer"))
    }
    if stage == 3:
        if places["params"] != "device" and places["optimizer"] == "device":
            raise WorkloadError(
                f"{path}: offload_param without offload_optimizer leaves optimizer states on the GPU while parameters "
                "are not there, which no policy does; offload both, or neither"
            )
        options = {**places, **_of_optimizer(section_of(zero, "offload_optimizer"), path), "checkpoints": checkpoints}
        if switch(zero, "overlap_comm", path) is False or zero.get("stage3_prefetch_bucket_size") == 0:
            options["prefetch"] = "0"
        return "zero-infinity", options | _overlap(zero, path)
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
        options |= _on_or_off("round_robin", switch(zero, "round_robin_gradients", path))
        pinned = _on_or_off("pin_memory", switch(section_of(zero, "offload_optimizer"), "pin_memory", path))
        return "zero-offload", options | pinned | _overlap(zero, path)
    if stage == 0:
        return "in-memory" if checkpoints == "none" else "full-recompute", {}
    return f"zero-{stage}", options | _overlap(zero, path)


def _overlap(zero: Mapping[str, object], path: str) -> dict[str, str]:
    """What a file says of communication beside compute, as an option."""
    return _on_or_off("overlap", switch(zero, "overlap_comm", path))


def _on_or_off(option: str, said: bool | None) -> dict[str, str]:
    """A policy's option that is a switch; none where nothing is said, which stays with the policy."""
    return {} if said is None else {option: "on" if said else "off"}


SAME: Mapping[str, str] = {
    "per_device_train_batch_size": "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "max_grad_norm": CLIPPING,
    "bf16": "bf16.enabled",
    "fp16": "fp16.enabled",
}
"""Settings of the Trainer, and DeepSpeed's names for them."""


def with_deepspeed(
    given: object,
    base: Training,
    path: Path,
    raw: Mapping[str, object],
    *,
    mixed: str,
    recompute: bool | None = None,
    devices: int = 1,
) -> Configured:
    """A DeepSpeed configuration inside another file, or beside it.

    Parameters
    ----------
    mixed
        What the other file says of mixed precision: it is DeepSpeed's where DeepSpeed's own file does not say.
    recompute
        What the Trainer says of gradient checkpointing, None where there is no Trainer.
    """
    content = dict(given if isinstance(given, Mapping) else read_beside(given, path))
    content = with_new_names(content)
    theirs = flat(content)
    for name, their in SAME.items():
        ours, said = raw.get(name, AUTO), theirs.get(their, AUTO)
        if AUTO not in (ours, said) and None not in (ours, said) and ours != said:
            raise WorkloadError(
                f"{path}: {name} is {ours!r}, but DeepSpeed's {their} is {said!r}, which the Trainer refuses; make "
                "them agree, or DeepSpeed's auto"
            )
    for name in MIXED:
        section = section_of(content, name)
        if section.get("enabled", AUTO) == AUTO:
            content[name] = {**section, "enabled": mixed == name}
        elif mixed != "no" and flag(section, "enabled", f"{path}: {name}") != (mixed == name):
            raise WorkloadError(
                f"{path} asks for {mixed}, but DeepSpeed's {name}.enabled is {section['enabled']!r}; make them agree"
            )
    found = of_deepspeed(content, base, str(path), recompute, devices)
    if recompute is not None and base.max_grad_norm and CLIPPING not in content:
        why = f"DeepSpeed's configuration has no {CLIPPING}, and nothing is clipped (auto takes the Trainer's)"
        found = found.noting(f"max_grad_norm {base.max_grad_norm} is not used: {why}")
    if "optim" in raw and found.training.optimizer != base.optimizer:
        found = found.noting(f"DeepSpeed's optimizer.type {theirs['optimizer.type']} runs, not optim {raw['optim']}")
    return replace(found, says={**flat(raw), **found.says})


def _precision(raw: Mapping[str, object], base: Training) -> tuple[Literal["fp32", "bf16", "fp16"], bool]:
    """The one that is enabled; of those that are `auto` the one of `base`, or the first, and whether both are."""
    auto = [name for name in MIXED if section_of(raw, name).get("enabled") == AUTO]
    on = [name for name in MIXED if name not in auto and flag(section_of(raw, name), "enabled", name)]
    check_one_of(on)
    if base.dtype in auto:
        auto.insert(0, base.dtype)  # type: ignore[arg-type]
    return next(iter((*on, *auto)), "fp32"), not on and {*MIXED} <= {*auto}


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
    momentum = section_of(section, "params").get("momentum")
    return f"sgd:momentum={momentum}" if optimizer == "sgd" and momentum else optimizer


def _of_optimizer(section: Mapping[str, object], path: str) -> dict[str, str]:
    """What a file says of how the offloaded optimizer is read, written and held, as options."""
    ways = [switch(section, name, path) for name in ("pipeline_read", "pipeline_write")]
    pipeline = any(ways) if {*ways} != {None} else None
    return _on_or_off("pipeline", pipeline) | _on_or_off("pin_memory", switch(section, "pin_memory", path))


def _offload(zero: Mapping[str, object], key: str, path: str) -> str:
    device = section_of(zero, key).get("device", "none")
    if str(device) not in OFFLOAD_PLACES:
        raise WorkloadError(f"{path}: {key}.device is {device!r}; it must be cpu, nvme or none")
    return OFFLOAD_PLACES[str(device)]
