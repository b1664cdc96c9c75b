"""Runs the main job on this machine: measure, calibrate, plan, simulate, train, compare.

Trains a model of about 25 M parameters on the sources of Python's standard library, with device and host budgets that
plain in-memory training does not fit into, and shows what was predicted beside what was measured. Without a GPU the
device is a budget of bytes in this machine's memory, with real copies. Takes about a minute on 2 cores.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
from pathlib import Path

from tierplan.commands.options.arguments import new_folder, option, whole
from tierplan.commands.options.terminal import progress_bar, tell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "--out DIR", "where results go", new_folder, "tierplan-demo")
    option(parser, "--nvme --nvme-dir DIR", "folder of the NVMe tier, on a drive (default: OUT/nvme)", new_folder)
    option(parser, "--steps N", "training steps of each run, 4 or more", whole(4), 12)
    option(parser, "--threads N", "cores for the model's kernels", whole(1), 1)
    option(parser, "--seed N", "of weights and batches", whole(0), 0)
    option(parser, "--json", "print the result as one JSON object")


def run(args: argparse.Namespace) -> int:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        raise RuntimeError(f"the demo needs {missing[0]}, which is not installed; install tierplan[runtime]")
    from tierplan.validation.demo.demo import demo_summary, run_demo

    out, own_nvme = Path(args.out), args.nvme is None
    try:
        with progress_bar(names_phases=True) as progress:
            result = run_demo(
                out,
                nvme_dir=None if own_nvme else Path(args.nvme),
                steps=args.steps,
                num_threads=args.threads,
                seed=args.seed,
                progress=progress,
            )
    finally:
        if own_nvme:
            shutil.rmtree(out / "nvme", ignore_errors=True)
    tell(args, result.record(), [demo_summary(result, out)])
    return 0
