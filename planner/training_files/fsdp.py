"""PyTorch's FSDP, as accelerate and the Trainer set it up."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tierplan.planner.training_files.configured import UNSAID, Configured
from tierplan.planner.training_files.reading import flag, flat, section_of
from tierplan.sim.workloads.workload import Training, WorkloadError

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
"""Of FSDP, by the numbers 1 to 5. On one machine the hybrid ones are the first two: they shard over all of its GPUs."""

KEEP_PARAMETERS = ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")


def fsdp_of_trainer(raw: Mapping[str, object], path: Path) -> Mapping[str, object]:
    """The Trainer's `fsdp_config`, with what the older words of `fsdp` say."""
    said = raw["fsdp"]
    words = said.split() if isinstance(said, str) else [] if said is True else said
    if not isinstance(words, list):
        raise WorkloadError(f"{path}: fsdp is {said!r}; give true, or words such as 'full_shard auto_wrap'")
    found = dict(section_of(raw, "fsdp_config"))
    for word in map(str, words):
        if word.upper() in STRATEGIES:
            found.setdefault("reshard_after_forward", word)
        elif word == "offload":
            found.setdefault("cpu_offload", True)
        elif word != "auto_wrap":
            known = ", ".join([*map(str.lower, STRATEGIES), "offload", "auto_wrap"])
            raise WorkloadError(f"{path}: fsdp has {word!r}; it may have {known}")
    return found


def of_fsdp_config(
    given: Mapping[str, object], training: Training, raw: Mapping[str, object], path: Path, *, recompute: bool | None
) -> Configured:
    """PyTorch's FSDP; under accelerate and the Trainer gradients are summed after the last micro-batch (`no_sync`).

    `recompute` is what the Trainer says of gradient checkpointing, None where there is no Trainer.
    """
    section = {setting.removeprefix("fsdp_"): value for setting, value in given.items()}
    strategies = {key: _strategy(section, key, path) for key in ("reshard_after_forward", "sharding_strategy")}
    said = {strategy for strategy in strategies.values() if strategy}
    if len({(strategy == "NO_SHARD", strategy in KEEP_PARAMETERS) for strategy in said}) > 1:
        both = " and ".join(f"fsdp_{key}: {section[key]!r}" for key in strategies)
        raise WorkloadError(f"{path} says {both}, which contradict each other; leave one of them out")
    strategy = strategies["reshard_after_forward"] or strategies["sharding_strategy"] or "FULL_SHARD"
    offload = flag(section, "offload_params", path) or flag(section, "cpu_offload", path)
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
    of_fsdp = flag(section, "activation_checkpointing", path)
    if recompute and of_fsdp:
        raise WorkloadError(
            f"{path}: activation_checkpointing of fsdp_config and gradient_checkpointing are both on, which the "
            "Trainer refuses; leave out one of them"
        )
    if recompute is None and "activation_checkpointing" not in section:
        notes.append(UNSAID.format("fsdp_activation_checkpointing", "nothing"))
    options["checkpointing"] = "on" if recompute or of_fsdp else "off"
    return Configured(training=training, policy=policy, options=options, notes=tuple(notes), says=flat(raw))


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
