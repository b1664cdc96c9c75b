"""The arguments that say what is trained where, shared by `simulate`, `plan`, `compare-policies` and others.

    add_arguments(parser)      --model --machine --set --batch --seq --accumulation --dtype ... --semantics
    read_machine(args)         the machine, with its overrides
    read_workload(args, m)     the workload, for that machine's precision and kernels
    read_scenario(args)        both

This is no command: it is not listed in `COMMANDS`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tierplan.commands.options.arguments import add_set, finite, whole

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

SEMANTICS = ("in-backward", "exact-clip", "delayed-1")


@dataclass(frozen=True, slots=True)
class Scenario:
    """A model with its training settings, and the machine."""

    workload: Workload
    machine: Machine


def add_arguments(parser: argparse.ArgumentParser, *, needs_model: bool = True) -> None:
    """Adds the arguments of a scenario. `needs_model` makes `--model` required."""
    what = parser.add_argument_group("what is trained")
    what.add_argument(
        "--model",
        required=needs_model,
        metavar="M",
        help="config.json, a folder that holds one, or a name such as gpt-13b",
    )
    what.add_argument(
        "--batch", type=whole(1), default=1, metavar="B", help="sequences in one micro-batch, per device (default 1)"
    )
    what.add_argument(
        "--accumulation", type=whole(1), default=1, metavar="G", help="micro-batches in one optimizer step (default 1)"
    )
    what.add_argument("--seq", type=whole(1), default=1024, metavar="S", help="tokens in one sequence (default 1024)")
    what.add_argument(
        "--dtype",
        choices=("auto", "bf16", "fp16", "fp32"),
        default="auto",
        help="of parameters, activations and gradients (default: the first of bf16, fp16, fp32 that the machine knows)",
    )
    what.add_argument(
        "--optimizer", choices=("adamw", "sgd"), default="adamw", help="whose states are kept (default adamw)"
    )
    what.add_argument(
        "--no-master-weights", action="store_true", help="no fp32 copy of the parameters in the optimizer states"
    )
    what.add_argument(
        "--attention",
        choices=("flash", "plain"),
        default="flash",
        help="fused, or written out in matrix products, which needs --exact (default flash)",
    )
    what.add_argument(
        "--max-grad-norm",
        type=finite(above=0),
        metavar="X",
        help="clip gradients by their global norm (default: no clipping)",
    )
    what.add_argument(
        "--backend", choices=("auto", "cuda", "cpu"), default="auto", help="whose kernels run (default: the machine's)"
    )
    what.add_argument(
        "--exact",
        action="store_true",
        help="run the model class on fake tensors instead of the closed forms (needs torch); families without closed "
        "forms are run so by themselves",
    )
    what.add_argument(
        "--semantics",
        choices=SEMANTICS,
        help="when updates happen (default: the policy's own; docs/design.md has the meanings)",
    )
    where = parser.add_argument_group("where it runs")
    where.add_argument(
        "--machine", default="here", metavar="X", help="a catalog name, a TOML file, or `here` (default here)"
    )
    add_set(where)


def read_machine(args: argparse.Namespace) -> Machine:
    """The machine that the arguments name, with the changes that `--set` asks for."""
    from tierplan.hwmodels import load_machine

    return load_machine(args.machine, args.overrides)


def read_training(args: argparse.Namespace, machine: Machine) -> Training:
    """The training settings, with `auto` resolved against the machine."""
    from tierplan.sim.workloads.workload import Training
    from tierplan.studies.defaults import default_backend, default_precision

    return Training(
        per_device_train_batch_size=args.batch,
        gradient_accumulation_steps=args.accumulation,
        sequence_length=args.seq,
        dtype=default_precision(machine) if args.dtype == "auto" else args.dtype,
        master_weights=not args.no_master_weights,
        optimizer=args.optimizer,
        attention=args.attention,
        max_grad_norm=args.max_grad_norm,
        backend=default_backend(machine) if args.backend == "auto" else args.backend,
    )


def read_workload(args: argparse.Namespace, machine: Machine) -> Workload:
    """The workload that the arguments describe."""
    from tierplan.studies.defaults import load_or_trace

    return load_or_trace(args.model, read_training(args, machine), exact=args.exact)


def read_scenario(args: argparse.Namespace) -> Scenario:
    """The machine, and the workload for it."""
    machine = read_machine(args)
    return Scenario(workload=read_workload(args, machine), machine=machine)
