"""Runs the main job on this machine: measure, calibrate, plan, simulate, train, compare.

Trains a model of about 25 M parameters on the sources of Python's standard library, with device and host budgets that
plain in-memory training does not fit into, and shows what was predicted beside what was measured. Without a GPU the
device is a budget of bytes in this machine's memory, with real copies. Takes about a minute on 2 cores.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from tierplan.commands.options.arguments import new_folder, option, whole
from tierplan.commands.options.terminal import progress_bar, tell
from tierplan.hwmodels.names import DEVICE
from tierplan.sim.output.text import columns, format_bytes, format_s

if TYPE_CHECKING:
    from tierplan.validation.demo.demo import DemoResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "--out DIR", "where results go", new_folder, "tierplan-demo")
    option(parser, "--nvme --nvme-dir DIR", "folder of the NVMe tier, on a drive (default: OUT/nvme)", new_folder)
    option(parser, "--steps N", "training steps of each run, 4 or more", whole(4), 12)
    option(parser, "--threads N", "cores for the model's kernels", whole(1), 1)
    option(parser, "--seed N", "of weights and batches", whole(0), 0)


def run(args: argparse.Namespace) -> int:
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

    from tierplan.runtime.job import sigterm_interrupts
    from tierplan.validation.demo.demo import run_demo

    out = Path(args.out)
    own_nvme = args.nvme is None and not (out / "nvme").exists()  # else it may be that of a run, with its commits
    try:
        with sigterm_interrupts(), progress_bar(names_phases=True) as progress:
            result = run_demo(
                out,
                nvme_dir=None if args.nvme is None else Path(args.nvme),
                steps=args.steps,
                num_threads=args.threads,
                seed=args.seed,
                progress=progress,
            )
    finally:
        if own_nvme:
            shutil.rmtree(out / "nvme", ignore_errors=True)
    tell(args, result.record(), demo_lines(result, out))
    return 0


def demo_lines(result: DemoResult, out: Path) -> list[str]:
    """The result on one screen."""
    from tierplan.studies.answer import placements
    from tierplan.validation.comparison.words import figure_lines
    from tierplan.validation.demo.demo import about

    c, facts = result.comparison, about(result)
    assert c.interval_s is not None
    low_s, high_s = map(format_s, c.interval_s)
    losses, weights = (
        "equal bit for bit" if is_equal else "DIFFERENT"
        for is_equal in (result.losses == result.reference_losses, result.weights_equal)
    )
    return [
        f"{facts['Model']}; {facts['Batch']}",
        f"plain training in memory holds {format_bytes(result.in_memory_measured_bytes)} (tracked), "
        f"{format_bytes(result.in_memory_device_bytes)} (predicted); "
        f"the device budget is {format_bytes(result.machine.tier(DEVICE).capacity_bytes)}: it does not fit",
        *columns(placements(result.planned)),
        "",
        *figure_lines(
            c,
            *((f"peak {t.tier}", t.peak_bytes, format_bytes) for t in c.tiers),
            *((f"moved {stream}", pair, format_bytes) for stream, pair in sorted(c.moved_bytes.items())),
        ),
        f"90 % interval of the step, from the slowdown of the calibration to that of the run: {low_s} to {high_s}; it "
        f"lies {'within' if c.in_interval else 'OUTSIDE'}",
        "",
        f"losses with the plan   {' '.join(f'{loss:.3f}' for loss in result.losses)}",
        f"losses in memory       {' '.join(f'{loss:.3f}' for loss in result.reference_losses)}   {losses}",
        f"weights after {len(result.losses)} steps: {weights}; bytes moved: "
        + ("exact" if c.bytes_agree else "DIFFERENT"),
        *result.notes,
        f"{sum(result.seconds.values()):.0f} s: " + ", ".join(f"{k} {v:.0f}" for k, v in result.seconds.items()),
        f"report: {out / 'report.html'}; timeline for ui.perfetto.dev: {out / 'timeline.json'}",
    ]
