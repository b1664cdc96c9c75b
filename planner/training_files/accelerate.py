"""What `accelerate config` writes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tierplan.planner.training_files.configured import (
    UNSAID,
    Configured,
    mixed_precision,
    unused_note,
    with_compiled_blocks,
)
from tierplan.planner.training_files.deepspeed import CLIPPING, with_clipping, with_deepspeed
from tierplan.planner.training_files.fsdp import of_fsdp_config
from tierplan.planner.training_files.keys import AUTO
from tierplan.planner.training_files.reading import check_undivided, count, flat, section_of
from tierplan.sim.workloads.workload import Training, WorkloadError

NOT_DISTRIBUTED = ("NO", False, None)
"""YAML reads NO as false."""

DEEPSPEED_OF_ACCELERATE = {
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "zero3_save_16bit_model",
    "offload_optimizer_device", "offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path",
}  # fmt: skip


def of_accelerate_config(raw: Mapping[str, object], base: Training, path: Path, devices: int) -> Configured:
    """What `accelerate config` wrote, with the number of processes, each of which has a GPU."""
    found = _read(raw, base, path, devices)
    backend = section_of(raw, "dynamo_config").get("dynamo_backend", raw.get("dynamo_backend"))
    if str(backend).lower() in ("no", "false"):
        return replace(found, training=replace(found.training, torch_compile=False))
    if str(backend).lower() != "inductor":
        return found
    training, notes = with_compiled_blocks(found.training, "dynamo_backend")
    return replace(found.noting(*notes), training=training, plain=found)


def _read(raw: Mapping[str, object], base: Training, path: Path, devices: int) -> Configured:
    alone = raw.get("distributed_type") in NOT_DISTRIBUTED
    num = count(raw, "num_processes", 0) or (1 if alone else None)
    found = _of_accelerate(raw, base, path, num or devices)
    for kind, key in (("DEEPSPEED", "deepspeed_config"), ("FSDP", "fsdp_config")):
        if (own := raw.get("distributed_type")) != kind:
            found = found.noting(*unused_note(raw, key, f"distributed_type is {own}"))
    if num is None:
        return found
    if alone and num > 1:
        found, num = found.noting(f"num_processes {num} is not used: distributed_type NO is one process"), 1
    if found.devices not in (None, num):
        raise WorkloadError(
            f"{path}: num_processes is {num}, but DeepSpeed's {found.why_devices} is of {found.devices} GPUs; "
            "make them agree"
        )
    return replace(found, devices=num, why_devices=f"num_processes {num}")


def _of_accelerate(raw: Mapping[str, object], base: Training, path: Path, devices: int) -> Configured:
    if count(raw, "num_machines", 1) != 1:
        raise WorkloadError(f"{path}: num_machines is {raw['num_machines']!r}; steps are explained on one machine")
    sizes = [f"parallelism_config_{kind}_size" for kind in ("tp", "cp", "sp")]
    check_undivided(section_of(raw, "parallelism_config"), sizes, path)
    precision = str(raw.get("mixed_precision") or "no").lower()
    if precision not in ("no", "bf16", "fp16"):
        raise WorkloadError(f"{path}: mixed_precision is {precision!r}; no, bf16 and fp16 are supported")
    shards = raw.get("distributed_type") in ("DEEPSPEED", "FSDP")
    base, notes = mixed_precision(base, precision, shards=shards, is_said=raw.get("mixed_precision") is not None)
    match raw.get("distributed_type"):
        case "DEEPSPEED":
            ours = section_of(raw, "deepspeed_config")
            if ours.get("deepspeed_config_file"):
                if both := [key for key in ours if key in DEEPSPEED_OF_ACCELERATE]:
                    raise WorkloadError(
                        f"{path}: deepspeed_config has {both[0]} beside deepspeed_config_file, which accelerate "
                        "refuses; leave one of them out"
                    )
                theirs = ours["deepspeed_config_file"]
                return with_clipping(with_deepspeed(theirs, base, path, raw, mixed=precision, devices=devices))
            zero: dict[str, object] = {"stage": ours.get("zero_stage", 2)}
            for name in ("optimizer", "param"):
                if device := ours.get(f"offload_{name}_device"):
                    zero[f"offload_{name}"] = {"device": device, "nvme_path": ours.get(f"offload_{name}_nvme_path")}
            same = ("gradient_accumulation_steps", CLIPPING)
            said = {key: ours[key] for key in same if ours.get(key) is not None}
            content = {"zero_optimization": zero, CLIPPING: AUTO, **said}
            return with_clipping(with_deepspeed(content, base, path, raw, mixed=precision))
        case "FSDP":
            found = of_fsdp_config(section_of(raw, "fsdp_config"), base, raw, path, recompute=None)
            return found.noting(*notes)
        case "NO" | False | "MULTI_GPU" | None:
            notes = (*notes, UNSAID.format("gradient checkpointing in this file", "nothing"))
            return Configured(training=base, policy="in-memory", options={}, notes=notes, says=flat(raw))
        case kind:
            raise WorkloadError(f"{path}: distributed_type is {kind!r}; NO, MULTI_GPU, DEEPSPEED and FSDP are known")
