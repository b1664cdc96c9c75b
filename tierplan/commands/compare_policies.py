"""Compares all published systems' policies for one model and machine, side by side, with a plot.

Each is simulated in steady state; one that does not fit says what is missing. `--plot FILE` writes the picture.

Example:

    tierplan compare-policies --model gpt-13b --machine fuyou-4090 --batch 32 --plot policies.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tierplan.commands.options import scenario
from tierplan.commands.options.arguments import PICTURES, new_file, option

if TYPE_CHECKING:
    from tierplan.planner.prediction import Prediction

GB = 1e9
OWN_SEMANTICS = ("harmony", "virtual-memory")
"""Policies that update in backward and in no other way."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "--policies NAME", "only these (default: all)", nargs="+")
    option(parser, "--plot FILE", "write the comparison as a picture (PNG, SVG or PDF)", new_file(*PICTURES))
    option(parser, "--json", "print one JSON object")
    scenario.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    import json
    import sys

    from tqdm import tqdm

    from tierplan.planner.policies import POLICIES, check_name
    from tierplan.planner.prediction import predict

    names = args.policies or list(POLICIES)
    for name in names:
        check_name(name)
    given = scenario.read_scenario(args)
    bar = tqdm(names, disable=args.json or not sys.stderr.isatty(), leave=False)
    options = {"semantics": args.semantics} if args.semantics else {}
    predictions = [
        predict(name, given.workload, given.machine, {} if name.startswith(OWN_SEMANTICS) else options) for name in bar
    ]
    if args.plot:
        from tierplan.studies.policy_plot import plot_policies

        plot_policies(predictions, args.plot)
    if args.json:
        print(json.dumps({prediction.policy: prediction.record() for prediction in predictions}, indent=2))
    else:
        tokens = given.workload.training.tokens_per_step
        print(f"{given.workload.name} on {given.machine.name}, {tokens:,} tokens per step")
        print(policy_table(predictions))
        for p in predictions:
            if p.fits and p.tokens != tokens:
                print(
                    f"{p.policy}: {p.tokens:,} tokens per step, since each of its devices has micro-batches of its own"
                )
        if given.machine.nameplate:
            print(f"from data sheets rather than measured: {', '.join(given.machine.nameplate)}")
        if args.plot:
            print(f"picture: {args.plot}")
    return 0


def policy_table(predictions: Sequence[Prediction]) -> str:
    """One line per policy, the most tokens per second first, those that do not fit at the end."""
    from tierplan.hwmodels.names import HOST, NVME, device_index

    columns = ("step s", "tokens/s", "TFLOP/s", "device GB", "host GB", "NVMe GB")
    lines = [f"{'policy':16}" + "".join(f"{name:>11}" for name in columns) + "  bound by"]
    for p in sorted(predictions, key=lambda p: -(p.tokens_per_s or 0.0)):
        if p.step_s is None or p.steady is None:
            lines.append(f"{p.policy:16}{'-':>11}  {short_reason(p)}")
            continue
        peak = p.steady.trace.peak_bytes
        device = max(size for tier, size in peak.items() if device_index(tier) is not None)
        held = [device / GB, *(peak.get(tier, 0) / GB for tier in (HOST, NVME))]
        cells = "".join(f"{value:11.1f}" for value in (p.tokens_per_s or 0.0, p.flops / p.step_s / 1e12, *held))
        lines.append(f"{p.policy:16}{p.step_s:11.3f}{cells}  {p.bound_by}")
    return "\n".join(lines)


def short_reason(prediction: Prediction) -> str:
    """Why it does not fit, in one line."""
    shortage = prediction.shortage
    if shortage is None:
        from tierplan.sim.output.text import in_short

        return "does not run: " + in_short(prediction.why_not, lambda size: f"{size / GB:.1f} GB")
    if shortage.short_bytes is None:
        return f"does not fit: {shortage.tier} is too small, and another tier as well"
    return (
        f"does not fit: needs {shortage.short_bytes / GB:.1f} GB more in {shortage.tier} "
        f"({(shortage.needed_bytes or 0) / GB:.1f} instead of {shortage.capacity_bytes / GB:.1f})"
    )
