"""The arguments that say what is trained where, shared by `simulate`, `plan`, `compare-policies` and others.

    add_arguments(parser)      --model --machine --set --batch --seq --accumulation --dtype ... --semantics
    read_machine(args)         the machine, with its overrides
    read_workload(args, m)     the workload, for that machine's precision and kernels
    read_scenario(args)        both

This is no command: it is not listed in `COMMANDS`.
"""

from __future__ import annotations

import argparse
from argparse import _ActionsContainer
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierplan.commands.options.arguments import add_set, finite, option, whole

if TYPE_CHECKING:
    from tierplan.hwmodels.machine import Machine
    from tierplan.sim.workloads.workload import Training, Workload

__all__ = [
    "Scenario",
    "add_arguments",
    "read_machine",
    "read_scenario",
    "read_training",
    "read_workload",
]

MODEL = "config.json, a folder that holds one, or a name such as gpt-13b"
SEMANTICS = ("in-backward", "exact-clip", "delayed-1")


@dataclass(frozen=True, slots=True)
class Scenario:
    """A model with its training settings, and the machine."""

    workload: Workload
    machine: Machine


def add_arguments(parser: argparse.ArgumentParser, *, needs_model: bool = True) -> None:
    """Adds the arguments of a scenario. `needs_model` makes `--model` required."""
    what = parser.add_argument_group("what is trained")
    option(what, "--model M", MODEL, required=needs_model)
    add_training(what)
    option(
        what, "--semantics", "when updates happen (default: the policy's own; docs/design.md has the meanings)",
        choices=SEMANTICS,
    )  # fmt: skip
    where = parser.add_argument_group("where it runs")
    option(where, "--machine X", "a catalog name, a TOML file, or `here`", default="here")
    add_set(where)


def add_training(what: _ActionsContainer) -> None:
    """Adds the training settings."""
    one = whole(1)
    option(what, "--batch --per_device_train_batch_size B", "sequences in one micro-batch, per device", one, 1)
    option(what, "--accumulation --gradient_accumulation_steps G", "micro-batches in one optimizer step", one, 1)
    option(what, "--seq --sequence_length S", "tokens in one sequence", one, 1024)
    option(
        what, "--dtype", "of parameters, activations and gradients: auto is the first of bf16, fp16, fp32 that the "
        "machine knows, if one is given", default="auto", choices=("auto", "bf16", "fp16", "fp32"),
    )  # fmt: skip
    option(what, "--optimizer", "whose states are kept", default="adamw", choices=("adamw", "sgd"))
    option(what, "--no-master-weights", "no fp32 copy of the parameters in the optimizer states")
    fused = "fused, or written out in matrix products, which needs --exact"
    option(what, "--attention", fused, default="flash", choices=("flash", "plain"))
    clip = "clip gradients by their global norm (default: no clipping)"
    option(what, "--max-grad-norm --max_grad_norm X", clip, finite(above=0))
    option(
        what, "--backend", "whose kernels run: auto is the machine's", default="auto", choices=("auto", "cuda", "cpu")
    )
    option(
        what, "--exact", "run the model class on fake tensors instead of the closed forms (needs torch); families "
        "without closed forms are run so by themselves",
    )  # fmt: skip


def read_machine(args: argparse.Namespace) -> Machine:
    """The machine that the arguments name, with the changes that `--set` asks for."""
    from tierplan.hwmodels import load_machine

    return load_machine(args.machine, args.overrides)


def read_training(args: argparse.Namespace, machine: Machine | None = None) -> Training:
    """The training settings, with `auto` resolved against the machine; without one, bf16 and CUDA's kernels."""
    from tierplan.sim.workloads.workload import Training
    from tierplan.studies.defaults import default_backend, default_precision

    dtype = "bf16" if machine is None else default_precision(machine)
    backend = "cuda" if machine is None else default_backend(machine)
    return Training(
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=args.accumulation,
        sequence_length=args.seq,
        dtype=dtype if args.dtype == "auto" else args.dtype,
        master_weights=not args.no_master_weights,
        optimizer=args.optimizer,
        attention=args.attention,
        max_grad_norm=args.max_grad_norm,
        backend=backend if args.backend == "auto" else args.backend,
    )


def read_workload(args: argparse.Namespace, machine: Machine) -> Workload:
    """The workload that the arguments describe."""
    from tierplan.studies.defaults import load_or_trace

    return load_or_trace(args.model, read_training(args, machine), exact=args.exact)


def read_scenario(args: argparse.Namespace) -> Scenario:
    """The machine, and the workload for it."""
    machine = read_machine(args)
    return Scenario(workload=read_workload(args, machine), machine=machine)
