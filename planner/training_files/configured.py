"""What a configuration amounts to, and what is said of settings that are not simulated."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from tierplan.planner.training_files.reading import flat, section_of
from tierplan.sim.workloads.workload import Training, WorkloadError

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
    longest: int | None = None
    """Tokens of a sequence at most; None where the file does not say."""
    says: Mapping[str, object] = field(default_factory=dict)
    """All that the file says, by dotted key: `zero_optimization.overlap_comm`."""
    plain: Configured | None = None
    """The same without the compiled kernels that the file asks for, which are not described of every model."""

    def noting(self, *notes: str) -> Configured:
        plain = None if self.plain is None else self.plain.noting(*notes)
        return replace(self, notes=(*self.notes, *notes), plain=plain)


UNSAID = "no {}: it is set in the model, if at all; {} is made again in backward here"

MIXED: tuple[Literal["bf16"], Literal["fp16"]] = ("bf16", "fp16")


def mixed_precision(base: Training, mixed: str, *, shards: bool, is_said: bool) -> tuple[Training, tuple[str, ...]]:
    """The settings in mixed precision to a format, or in none, and what is assumed for that: who `shards`, DeepSpeed or
    FSDP, has 16-bit parameters and an fp32 copy, and who does not has autocast. Where none `is_said`, that of `base` is
    off.
    """
    if mixed == "no":
        if base.autocast and not is_said:
            return base, ()
        copy = "" if base.dtype == "fp32" else ", without an fp32 copy"
        said = f"a model is trained as it was loaded, which is not said and taken as {base.dtype}{copy} (--dtype)"
        return replace(base, autocast="", master_weights=False), (f"no mixed precision: {said}",)
    if shards:
        return replace(base, dtype=mixed, master_weights=True), ()  # type: ignore[arg-type]
    if base.lora:
        adapters = f"{mixed} is autocast of fp32 adapters on a frozen model, which is not said and taken as {mixed}"
        said, cast = (f"{adapters}, in {base.base}: simulated without autocast", "") if base.base else (adapters, mixed)
        return replace(base, dtype=mixed, autocast=cast, master_weights=True), (said,)  # type: ignore[arg-type]
    said = f"{mixed} is autocast of a model in fp32: parameters and gradients take 4 bytes each"
    return replace(base, dtype="fp32", autocast=mixed), (said,)  # type: ignore[arg-type]


def with_compiled_blocks(training: Training, asked_by: str) -> tuple[Training, tuple[str, ...]]:
    """The settings with compiled blocks and a fused loss, as far as these are described, and what is assumed."""
    why = "under autocast" if training.autocast else "with padded batches" if training.padded else ""
    notes = (f"{asked_by}: {why}, blocks are simulated as they are without it",) if why else ()
    return replace(training, loss="fused", torch_compile=not why), notes


def check_one_of(enabled: Collection[str]) -> None:
    if len(enabled) > 1:
        raise WorkloadError("bf16 and fp16 are both enabled; a model is trained in one of them, so disable the other")


def unused_note(raw: Mapping[str, object], key: str, why: str) -> tuple[str, ...]:
    """The note that a section of a file says something and is not used there."""
    says_something = any(value not in (None, False, 0) for value in flat(section_of(raw, key)).values())
    return (f"{key} is not used: {why}",) if says_something else ()
