"""`TrainingArguments` of the Hugging Face Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tierplan.planner.training_files.configured import (
    MIXED,
    Configured,
    check_one_of,
    mixed_precision,
    unused_note,
    with_compiled_blocks,
)
from tierplan.planner.training_files.deepspeed import with_deepspeed
from tierplan.planner.training_files.fsdp import fsdp_of_trainer, of_fsdp_config
from tierplan.planner.training_files.reading import count, flag, flat, norm, section_of, switch
from tierplan.sim.workloads.optimizers import of_transformers
from tierplan.sim.workloads.workload import Training, WorkloadError

LONGEST = ("cutoff_len", "max_length", "max_seq_length")
"""LLaMA-Factory's word for the tokens of a sequence at most, and TRL's."""

LIGER_CHUNKS = 8
"""In about so many parts, or in more, Liger computes logits: the vocabulary over the model's width."""
INDUCTOR = "inductor"
"""The backend of compiled blocks that fuses their kernels."""
KERNELS = ("use_liger_kernel", "torch_compile", "torch_compile_backend", "torch_compile_mode")
TRAINER_ONLY = {"per_device_train_batch_size", "output_dir", "gradient_checkpointing", "optim"}


def of_trainer_arguments(raw: Mapping[str, object], base: Training, path: Path) -> Configured:
    """`TrainingArguments` as JSON, with the DeepSpeed configuration that they name or hold."""
    raw = _with_num_steps(raw, path)
    found = _read(raw, base, path)
    plain = _read({key: value for key, value in raw.items() if key not in KERNELS or value is False}, base, path)
    return found if found.training == plain.training else replace(found, plain=replace(plain, says=found.says))


def _with_num_steps(raw: Mapping[str, object], path: Path) -> Mapping[str, object]:
    """With the accumulation that `accelerator_config` says, which the Trainer takes in place of its own."""
    said = section_of(section_of(raw, "accelerator_config"), "gradient_accumulation_kwargs")
    if "num_steps" not in said:
        return raw
    num_steps = count(said, "num_steps", 1)
    if (own := count(raw, "gradient_accumulation_steps", 1)) > 1:
        raise WorkloadError(
            f"{path}: accelerator_config's num_steps is {num_steps}, but gradient_accumulation_steps is {own}, and the "
            "Trainer refuses both; leave one of them out"
        )
    return {**raw, "gradient_accumulation_steps": num_steps}


def _read(raw: Mapping[str, object], base: Training, path: Path) -> Configured:
    try:
        optimizer = of_transformers(str(raw.get("optim", "adamw_torch")))
    except ValueError as error:
        raise WorkloadError(f"{path}: {error}") from None
    said = {name: switch(raw, name, path) for name in MIXED}
    on = [name for name in MIXED if said[name]]
    check_one_of(on)
    mixed, shards = on[0] if on else "no", bool(raw.get("deepspeed") or raw.get("fsdp"))
    base, notes = mixed_precision(base, mixed, shards=shards, is_said={*said.values()} != {None})
    training = replace(
        base,
        per_device_train_batch_size=count(raw, "per_device_train_batch_size", 8),
        gradient_accumulation_steps=count(raw, "gradient_accumulation_steps", 1),
        max_grad_norm=norm({"max_grad_norm": 1.0, **raw}, "max_grad_norm", base),  # it clips unless told not to
        optimizer=optimizer,
    )
    training, of_kernels = _with_kernels(training, raw, path)
    notes = (*notes, *of_kernels)
    recompute = any(flag(raw, name, path) for name in ("gradient_checkpointing", "activation_checkpointing"))
    if "finetuning_type" in raw:  # LLaMA-Factory's, which recomputes unless told not to
        recompute = not flag(raw, "disable_gradient_checkpointing", path)
    if raw.get("deepspeed") and raw.get("fsdp"):
        raise WorkloadError(f"{path} has both deepspeed and fsdp, of which one can train; leave out the other")
    if deepspeed := raw.get("deepspeed"):
        found = with_deepspeed(deepspeed, training, path, raw, mixed=mixed, recompute=recompute)
        return found.noting(*of_kernels)
    if raw.get("fsdp"):
        found = of_fsdp_config(fsdp_of_trainer(raw, path), training, raw, path, recompute=recompute)
        return found.noting(*notes)
    notes = (*notes, *unused_note(raw, "fsdp_config", "fsdp is not on"))
    policy = "full-recompute" if recompute else "in-memory"
    return Configured(training=training, policy=policy, options={}, notes=notes, says=flat(raw))


def _with_kernels(training: Training, raw: Mapping[str, object], path: Path) -> tuple[Training, tuple[str, ...]]:
    """The settings with a fused loss and compiled blocks, where the file asks for them, and what is assumed."""
    notes: tuple[str, ...] = ()
    if flag(raw, "use_liger_kernel", path):
        chosen = section_of(raw, "liger_kernel_config")
        notes = ("use_liger_kernel: its norms, rotations and activations are simulated as PyTorch's",)
        if chosen.get("fused_linear_cross_entropy", True):
            chunks = training.loss_chunks if training.loss_chunks > 1 else LIGER_CHUNKS
            training = replace(training, loss="fused", loss_chunks=chunks)
            notes += (f"use_liger_kernel: its fused loss is one in {training.loss_chunks} chunks (--loss-chunks)",)
        elif chosen.get("cross_entropy"):
            training = replace(training, loss="fused")
    backend = raw.get("torch_compile_backend")
    # the Trainer compiles where a backend or a mode is given, too
    is_asked = bool(flag(raw, "torch_compile", path) or backend or raw.get("torch_compile_mode"))
    if is_asked and str(backend or INDUCTOR).lower() == INDUCTOR:
        training, of_blocks = with_compiled_blocks(training, "torch_compile")
        notes += of_blocks
    elif is_asked or switch(raw, "torch_compile", path) is False:
        training = replace(training, torch_compile=False)
    return training, notes
