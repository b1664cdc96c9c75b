"""Training settings from the files that people have: DeepSpeed's JSON, accelerate's YAML, the Trainer's arguments.

    read_training_file(path, base)    any of the three, told apart by what they hold

It says the settings and the policy that a file amounts to on one machine. What it does not have (sequence length,
attention, whatever is `auto`) is taken from `base`.

    reading       files and settings, read as the tools read them
    configured    what a file amounts to, and the notes on what is not simulated
    keys          which settings are taken into account
    deepspeed     DeepSpeed's configuration, alone or inside another file
    fsdp          PyTorch's FSDP, as accelerate and the Trainer set it up
    accelerate    what `accelerate config` writes
    trainer       the Trainer's arguments
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from tierplan.planner.training_files.accelerate import of_accelerate_config
from tierplan.planner.training_files.configured import Configured
from tierplan.planner.training_files.deepspeed import DEEPSPEED_ONLY, of_deepspeed, with_clipping
from tierplan.planner.training_files.keys import AUTO, OF_ACCELERATE, OF_TRAINER, unaccounted_note
from tierplan.planner.training_files.reading import count, flat, read, read_beside
from tierplan.planner.training_files.trainer import LONGEST, TRAINER_ONLY, of_trainer_arguments
from tierplan.sim.workloads.workload import Training, WorkloadError

ADAPTERS = {
    "finetuning_type", "lora_r", "lora_rank", "quantization_bit", "peft_config", "use_peft", "use_lora", "load_in_4bit",
    "load_in_8bit",
}  # fmt: skip


SUPERVISED = ("sft", "pt")
"""LLaMA-Factory's stages that are."""
OTHER_OBJECTIVES = (
    "beta", "pref_loss", "rl", "num_generations", "max_completion_length", "num_ppo_epochs", "kl_coef",
    "desirable_weight", "center_rewards_coefficient", "precompute_ref_log_probs",
)  # fmt: skip
"""Settings of TRL, LLaMA-Factory and Axolotl that only preferences, rewards or generated text have."""


OTHER_TOOLS = {
    "torchtune": ("_component_",),
    "LitGPT": ("train.micro_batch_size",),
    "LLM Foundry": ("device_train_microbatch_size", "global_train_batch_size"),
    "Axolotl": ("micro_batch_size",),
}
"""By the ends of keys that only they have; the first whose there are."""
WORDS_OF_OTHERS = {
    "batch_size": "--batch", "micro_batch_size": "--batch", "train.micro_batch_size": "--batch",
    "device_train_microbatch_size": "--batch", "gradient_accumulation_steps": "--accumulation",
    "tokenizer.max_seq_len": "--seq", "max_seq_len": "--seq", "train.max_seq_length": "--seq", "sequence_len": "--seq",
    "dtype": "--dtype",
}  # fmt: skip
RECOMPUTING = ("gradient_checkpointing", "activation_checkpointing")


def read_training_file(path: str | Path, base: Training, *, devices: int = 1) -> Configured:
    """What a configuration of DeepSpeed, accelerate or the Hugging Face Trainer asks for.

    `devices` is the number of GPUs that share DeepSpeed's batch where the file does not say it.

    Raises `WorkloadError` for another file, and for settings that nothing here has (adapters, several machines).
    """
    path = Path(path)
    raw = read(path)
    adapters = sorted(key for key in ADAPTERS if raw.get(key))
    if adapters and (raw.get("finetuning_type") != "full" or len(adapters) > 1):
        raise WorkloadError(
            f"{path} has {adapters[0]}: {raw[adapters[0]]!r}; steps are explained where all parameters are trained "
            "in 32 or 16 bits, not for adapters or a quantised base"
        )
    _check_objective(raw, path)
    _check_tool(flat(raw), path)
    if "distributed_type" in raw or "compute_environment" in raw:
        found = of_accelerate_config(raw, base, path, devices)
        return found.noting(*unaccounted_note(flat(raw), OF_ACCELERATE))
    if TRAINER_ONLY & raw.keys():
        for section in ("fsdp_config", "accelerator_config"):
            if isinstance(beside := raw.get(section), str):
                raw[section] = read_beside(beside, path)
        found = of_trainer_arguments(raw, base, path)
        if "paged" in str(raw.get("optim")).lower():
            found = found.noting(f"optim {raw['optim']}: states are not paged here, and stay in one place")
        longest = next((count(raw, name, 0) for name in LONGEST if raw.get(name)), None)
        found = replace(found.noting(*unaccounted_note(flat(raw), OF_TRAINER)), left_open=(), longest=longest)
        return replace(found, plain=found.plain and replace(found.plain, left_open=(), longest=longest))
    if DEEPSPEED_ONLY & raw.keys():
        return with_clipping(of_deepspeed(raw, base, str(path), devices=devices))
    raise WorkloadError(
        f"{path} is no configuration of DeepSpeed (zero_optimization, train_micro_batch_size_per_gpu), of accelerate "
        "(distributed_type) or of the Trainer (per_device_train_batch_size); give one of these"
    )


def _check_tool(says: Mapping[str, object], path: Path) -> None:
    """Refuses another tool's file, and names the options that say the same as its words."""
    for tool, marks in OTHER_TOOLS.items():
        if not any(word.endswith(marks) for word in says):
            continue
        same = {flag: says[word] for word, flag in WORDS_OF_OTHERS.items() if says.get(word) not in (None, AUTO)}
        remade = any(word.endswith(RECOMPUTING) and value for word, value in says.items())
        given = [f"{flag} {value}" for flag, value in same.items()] + ["--policy full-recompute"] * remade
        others = (*dict.fromkeys(WORDS_OF_OTHERS.values()), "--optimizer", "--lora")
        open_still = ", ".join(flag for flag in others if flag not in same)
        raise WorkloadError(
            f"{path} is {tool}'s, whose words are not read; leave --config out and give options in their place"
            f"{': ' if given else ''}{' '.join(given)}, and what it says of {open_still}"
        )


def _check_objective(raw: Mapping[str, object], path: Path) -> None:
    """Refuses training that runs a second model, or generates."""
    stage = raw.get("stage") if "finetuning_type" in raw else None
    found = [key for key in OTHER_OBJECTIVES if raw.get(key)]
    if stage not in (None, *SUPERVISED):
        found.insert(0, "stage")
    if found:
        raise WorkloadError(
            f"{path} has {found[0]}: {raw[found[0]]!r}; only supervised training is simulated: steps of DPO, PPO, "
            "GRPO, KTO and reward models run a second model, pairs of sequences or generation"
        )
