"""Finds out what this machine does inside a training step of your model, for predictions that hold.

Times the units of the model in its dtype, batch and length, and trains a model of three of its blocks under six plans
in short turns. `simulate`, `plan`, `advise` and others take the result by themselves for the same machine, dtype and
versions.

    tierplan calibrate --model gpt2 --batch 4 --seq 256  about 3 minutes
    tierplan calibrate --model config.json --quick -o mine.json
    tierplan plan --calibration mine.json ...            predicts with it
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from tierplan.commands.options import scenario
from tierplan.commands.options.arguments import add_device, check_writable, finite, new_file, new_folder, option, whole
from tierplan.commands.options.terminal import progress_bar, tell
from tierplan.sim.output.text import wrapped

BUDGET_S, QUICK_S, FIT_S = 180.0, 45.0, 4.0
"""All in all; and, of it, after the last step."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    scenario.add_arguments(parser, searches=False, calibrated=False)
    how = parser.add_argument_group("how")
    where = "folder on the drive that is the NVMe tier, once per drive (default: this folder)"
    option(how, "--nvme --nvme-dir DIR", where, new_folder, default=".")
    add_device(how)
    option(how, "--threads T", "threads for kernels on the CPU, as for `tierplan run`", whole(1))
    option(how, "--quick", f"in about {QUICK_S:.0f} s: wider intervals")
    option(how, "--budget-s S", f"seconds, about (default {BUDGET_S:.0f})", finite(above=0))
    option(how, "-o --output FILE", "write it there, for --calibration, and not into the user's own", new_file())


def run(args: argparse.Namespace) -> int:
    began_s = time.monotonic()

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from tierplan.runtime.execution.device import device_named
    from tierplan.runtime.job import stop_on_interrupt
    from tierplan.studies.evaluate import calibration_workload, machine_of
    from tierplan.validation.calibration.calibration import calibration_lines
    from tierplan.validation.calibration.known import calibrations_dir, own_path
    from tierplan.validation.calibration.session import CalibrationSession

    if args.output is None:
        check_writable(calibrations_dir(), f"{calibrations_dir()}, where it is kept without -o")
    wanted_s = args.budget_s or (QUICK_S if args.quick else BUDGET_S)
    point = replace(scenario.read_point(args), accumulation=1, max_grad_norm=None)
    if point.padded:
        raise ValueError(
            "--padded: a calibration runs batches without padding, and padded ones are predicted from it; leave it out"
        )
    machine = machine_of(point)
    if (of_machine := machine.num_devices) > 1:
        point = replace(point, devices=1)
        machine = machine_of(point)
    device = device_named(args.device)
    num_ranks = of_machine if device == "cpu" else 1
    beside = f" beside {num_ranks - 1} more on the same cores" if num_ranks > 1 else ""
    where = [f"{machine.name}, 1 of its {of_machine} GPUs{beside}: use it with --devices {num_ranks}"]
    where = where if of_machine > 1 else []
    Path(args.nvme).mkdir(parents=True, exist_ok=True)
    with ExitStack() as life:
        scratch = TemporaryDirectory(prefix="tierplan-calibration-", dir=args.nvme, ignore_cleanup_errors=True)
        is_stopped = life.enter_context(stop_on_interrupt())
        session = CalibrationSession(
            workload=calibration_workload(point, machine),
            machine=machine,
            nvme_dir=Path(life.enter_context(scratch)),
            life=life,
            device=device,
            num_threads=args.threads,
            num_ranks=num_ranks,
            budget_s=wanted_s - (time.monotonic() - began_s) - FIT_S,
            is_stopped=is_stopped,
            progress=life.enter_context(progress_bar()),
        )
        calibration = session.run()
    target = args.output or own_path(calibration)
    calibration.save(target)
    about = {"devices": num_ranks, "devices_of_machine": of_machine, "file": str(target)}
    stopped = ["interrupted: it is made from the turns until then"] if is_stopped() else []
    use = f"use it with --calibration {target}" if args.output else "predictions that it suits are made from it"
    lines = [*where, *calibration_lines(calibration), *stopped, *wrapped(f"written to {target}; {use}")]
    tell(args, {**asdict(calibration), "half_width": calibration.half_width, **about}, lines)
    return 130 if stopped else 0
