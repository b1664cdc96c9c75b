"""The arguments that say what is trained where, shared by `simulate`, `plan`, `advise` and others."""

from __future__ import annotations

import argparse
from argparse import _ActionsContainer
from dataclasses import fields, replace
from typing import Any

from tierplan.commands.options.arguments import add_set, finite, optimizer, option, whole
from tierplan.hwmodels.description import find_key, pairs_of
from tierplan.planner.training_files import read_training_file
from tierplan.planner.training_files.configured import Configured
from tierplan.planner.training_files.keys import AUTO
from tierplan.sim.workloads.formats import act_formats, bases
from tierplan.sim.workloads.optimizers import OPTIMIZERS
from tierplan.sim.workloads.workload import Training, WorkloadError
from tierplan.studies.study import ALIKE, OF_TRAINING, SEQUENCES, Point

MODEL = "config.json, a folder that holds one, or a name such as gpt-13b"
SEMANTICS = ("in-backward", "exact-clip", "delayed-1")
OF_FILES = (
    "batch", "accumulation", "seq", "dtype", "autocast", "trained_dtype", "optimizer", "max_grad_norm", "loss",
    "loss_chunks", "attention", "backend",
)  # fmt: skip
"""Settings that a configuration file and an option may both say."""
TRAINERS_DEFAULTS = {
    "batch": ("per_device_train_batch_size", "train_micro_batch_size_per_gpu", "train_batch_size"),
    "accumulation": ("gradient_accumulation_steps", "train_batch_size"),
    "optimizer": ("optim", "optimizer.type"),
    "max_grad_norm": ("max_grad_norm", "gradient_clipping"),
}
"""Settings that the Trainer has defaults for, and the keys that say them, its own and DeepSpeed's."""
DEFAULTS = Point(model="", machine="")


def add_arguments(
    parser: argparse.ArgumentParser, *, needs_model: bool = True, searches: bool = True, calibrated: bool = True
) -> None:
    """Adds the arguments of a scenario. `needs_model` makes `--model` required; `calibrated` adds `--calibration`.

    Where the command `searches`, the division of a step into micro-batches is its to choose unless it is given.
    """
    what = parser.add_argument_group("what is trained")
    option(what, "--model M", MODEL, required=needs_model)
    if searches:
        option(
            what, "--sequences N", "sequences per optimizer step, of all devices, divided into micro-batches as is "
            f"quickest (default {SEQUENCES}, without --batch and --accumulation)", whole(1),
        )  # fmt: skip
    add_training(what, divided="searched" if searches else "1")
    option(
        what, "--semantics", "when updates happen (default: the policy's own; docs/design.md has the meanings)",
        choices=SEMANTICS,
    )  # fmt: skip
    where = parser.add_argument_group("where it runs")
    option(where, "--machine X", "a catalog name, a TOML file, or `here`", default="here")
    if calibrated:
        option(where, "--calibration FILE", "of tierplan calibrate (default: your own that suits best; none: none)")
    option(
        where,
        "--devices N",
        "GPUs to train on, of the machine's or more than it has (default: all of them)",
        whole(1, find_key("gpu.count").most),
    )
    if searches:
        add_drive_lifetime(where)
    add_set(where)


def add_drive_lifetime(where: _ActionsContainer) -> None:
    """Adds how long drives are to last: whoever compares plans leaves out those that wear them out sooner."""
    option(
        where, "--drive-lifetime-years Y", "the drives are to last this long, training without pause, by their rated "
        "endurance (nvme.endurance): plans whose steps write more are left out", finite(above=0),
    )  # fmt: skip


def add_training(what: _ActionsContainer, divided: str = "1") -> None:
    """Adds the training settings; `divided` says what micro-batches are where they are not given."""
    one, default = whole(1), f" (default {divided})"
    option(what, "--batch --per_device_train_batch_size B", "sequences in one micro-batch, per device" + default, one)
    batches = "micro-batches in one optimizer step" + default
    option(what, "--accumulation --gradient_accumulation_steps G", batches, one)
    add_settings(what)


def add_settings(what: _ActionsContainer) -> None:
    """Adds those that do not say how many sequences there are.

    One that is not given is None: `read_settings` leaves it to the defaults of `Point`, and `read_configured` knows
    what was given, be it the default.
    """
    one = whole(1)
    option(what, "--seq --sequence_length S", f"tokens in one sequence (default {DEFAULTS.seq})", one)
    option(
        what, "--dtype", "of parameters, activations and gradients: auto is the first of bf16, fp16, fp32 that the "
        f"machine knows, if one is given (default {DEFAULTS.dtype})", choices=("auto", "bf16", "fp16", "fp32"),
    )  # fmt: skip
    option(
        what, "--autocast", "products of weights in fp32, of a model or of adapters on it, run in this dtype, as with "
        "the Trainer's bf16: true: weights are cast for each; simulated only, and by --exact", choices=("bf16", "fp16"),
    )  # fmt: skip
    kept = f"whose states are kept: {', '.join(OPTIMIZERS)}, with options as in adamw:states=8bit, sgd:momentum=0.9"
    option(what, "--optimizer NAME[:OPTIONS]", f"{kept} (default {DEFAULTS.optimizer})", optimizer)
    option(
        what, "--lora ADAPTERS", "train adapters of PEFT's on a frozen model, such as r=16,targets=all-linear (also "
        "method=dora or ia3, alpha=, dropout=, and save=embed_tokens+lm_head for copies that are trained in full)",
    )  # fmt: skip
    option(
        what, "--trained-dtype", "of adapters and of their gradients (default: fp32, as PEFT has them; DeepSpeed and "
        "recipes in bf16 have them in the model's)", choices=("bf16", "fp16", "fp32"),
    )  # fmt: skip
    option(
        what, "--freeze PATTERN", "do not train parameters whose names match, such as 'transformer.wte.*'; may be "
        "repeated", repeat=True,
    )  # fmt: skip
    option(what, "--base", "linear layers of the frozen model are in this format, as in QLoRA", choices=bases())
    option(
        what, "--acts", "activations that leave the device do so in this format: other numbers than plain training's",
        choices=act_formats(), dest="activation_format",
    )  # fmt: skip
    option(what, "--no-master-weights", "no fp32 copy of the parameters in the optimizer states")
    fused = f"fused, or written out in matrix products, which needs --exact (default {DEFAULTS.attention})"
    option(what, "--attention", fused, choices=("flash", "plain"))
    option(
        what, "--padded", "batches are padded, with an attention_mask: attention takes a mask, and more is kept for "
        "backward; runs of such batches need it (by --exact)",
    )  # fmt: skip
    chunked = "make the logits of 1/N of a micro-batch's tokens at a time, and again in backward: for long sequences"
    option(what, "--loss-chunks N", f"{chunked} (default {DEFAULTS.loss_chunks})", one)
    option(
        what, "--loss", "by PyTorch's kernels, or fused: one kernel reads logits as they are and writes gradients in "
        "their place, as compiled ones do; Liger's is --loss fused --loss-chunks 8, about; simulated only "
        f"(default {DEFAULTS.loss})", choices=("plain", "fused"),
    )  # fmt: skip
    option(
        what, "--torch-compile", "blocks run as kernels of torch.compile, one for all between two products: Llama, "
        "Mistral, Qwen 2 and 3, GPT-2; simulated only",
    )  # fmt: skip
    clip = "clip gradients by their global norm (default: no clipping)"
    option(what, "--max-grad-norm --max_grad_norm X", clip, finite(above=0))
    kernels = f"whose kernels run: auto is the machine's (default {DEFAULTS.backend})"
    option(what, "--backend", kernels, choices=("auto", "cuda", "cpu"))
    option(
        what, "--exact", "run the model class on fake tensors instead of the closed forms (needs torch); families "
        "without closed forms are run so by themselves",
    )  # fmt: skip


def read_settings(args: argparse.Namespace) -> dict[str, Any]:
    """How is trained, by field of a point."""
    given = {**vars(args), "freeze": ",".join(args.freeze), "master_weights": not args.no_master_weights}
    return {name: given[name] for name in (*ALIKE, "seq", "exact") if given[name] is not None}


def read_point(args: argparse.Namespace) -> Point:
    """The question that the arguments ask."""
    given = vars(args)
    named: dict[str, Any] = {f.name: given[f.name] for f in fields(Point) if given.get(f.name) is not None}
    others = {
        **read_settings(args),
        "policy": DEFAULTS.policy,
        "sequences": _sequences(args),
        "planner_s": given.get("time_limit"),
        "calibration": given.get("calibration", "none") or "auto",
        "overrides": dict(pairs_of(given.get("overrides", ()))),
    }
    return Point(**{"model": "", "machine": "", **named, **others})


def read_configured(args: argparse.Namespace, file: str, base: Training, *, devices: int = 1) -> Configured:
    """What a configuration file asks for on so many GPUs, with what the options say where it leaves something open."""
    found = read_training_file(file, base, devices=devices)
    completed = _completed(args, file, found)
    return completed if found.plain is None else replace(completed, plain=_completed(args, file, found.plain))


def _completed(args: argparse.Namespace, file: str, found: Configured) -> Configured:
    """With what options say of what the file leaves open."""
    says = {key for key, value in found.says.items() if value != AUTO}
    open_still = [name for name, keys in TRAINERS_DEFAULTS.items() if says.isdisjoint(keys)]
    given = {OF_TRAINING[name]: getattr(args, name) for name in open_still if getattr(args, name) is not None}
    found = replace(found, training=replace(found.training, **given))
    if found.longest and args.seq is None:
        whole_length = replace(found.training, sequence_length=found.longest)
        note = f"all sequences are taken to be of {found.longest} tokens, the most that the file allows (--seq)"
        found = replace(found.noting(note), training=whole_length)
    elif found.longest and args.seq > found.longest:
        raise ValueError(f"--seq is {args.seq}, but {file} says {found.longest} at most; leave one of them out")
    _check_agreement(args, file, found.training)
    return found.noting(*_taken_from_defaults(args, found))


def _check_agreement(args: argparse.Namespace, file: str, training: Training) -> None:
    """Refuses an option that contradicts what a configuration file says; `said_by` names who says it, if no option."""
    for name in OF_FILES:
        said = getattr(training, OF_TRAINING[name])
        if (given := getattr(args, name)) not in (None, "auto", said):
            flag = vars(args).get("said_by", {}).get(name, f"--{name.replace('_', '-')}")
            raise ValueError(f"{flag} is {given}, but {file} says {said or 'none'}; leave one of them out")
    if args.torch_compile and not training.torch_compile:
        raise ValueError(f"--torch-compile is given, but {file} says not to; leave one of them out")
    if args.no_master_weights and training.master_weights:
        raise ValueError(f"--no-master-weights is given, but {file} is of training with them; leave one of them out")


def _taken_from_defaults(args: argparse.Namespace, configured: Configured) -> tuple[str, ...]:
    """The note that names what neither a configuration file nor an option says, if there is any such setting."""
    names = [name for name in ("batch", "accumulation") if OF_TRAINING[name] in configured.left_open]
    names += [] if configured.longest else ["seq"]
    flags = [f"--{name} {getattr(DEFAULTS, name)}" for name in names if getattr(args, name) is None]
    return (f"neither in the file nor given, so the default is taken: {', '.join(flags)}",) if flags else ()


def _sequences(args: argparse.Namespace) -> int:
    """Of one step, where micro-batch and accumulation are to be searched; else 0."""
    divided = args.batch is not None or args.accumulation is not None
    if "sequences" not in vars(args) or (args.sequences is None and divided):
        return 0
    if args.sequences is not None and divided:
        raise WorkloadError(
            f"--sequences {args.sequences} looks for the best micro-batch and accumulation; leave out --batch and "
            "--accumulation, or give them without --sequences"
        )
    return args.sequences or SEQUENCES


def read_training(args: argparse.Namespace) -> Training:
    """The training settings where no machine is asked about: `auto` is bf16 and CUDA's kernels."""
    from tierplan.studies.evaluate import training_of

    return training_of(read_point(args), None)
