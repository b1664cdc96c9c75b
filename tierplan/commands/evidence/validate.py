"""Predict many configurations and then run them: the evidence for this machine, in one command.

tierplan validate                            runs the campaign cpu-small here, about an hour; can be continued
tierplan validate gpu-billions               models of billions of parameters, on a CUDA GPU
tierplan validate MY.toml --out runs         another campaign
tierplan validate --list                     what the campaign asks
tierplan validate --transfer                 each calibrated model, predicted from the calibrations of the others
tierplan validate --table runs -o page.md    the page of all runs below a folder, without running anything

Every run leaves one JSON file in OUT. To add the runs of another machine to a table, put their folders side by side.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path

from tierplan.commands.options.arguments import add_device, finite, new_file, new_folder, option
from tierplan.commands.options.terminal import tell
from tierplan.hwmodels import load_machine
from tierplan.sim.trace import write_atomically


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("campaign", nargs="?", default="cpu-small", help="a name or a TOML file (default cpu-small)")
    option(parser, "--out DIR", "folder for the artifacts", new_folder, "campaign")
    option(parser, "--nvme-dir --nvme DIR", "folder on the drive that is the NVMe tier", new_folder, ".")
    add_device(parser)
    option(parser, "--machine-name NAME", "what this machine is called in tables")
    option(parser, "--measure-s S", "seconds to measure the machine, once per group", finite(least=5), 20.0)
    option(parser, "--only TEXT", "take up only runs whose group/name contains this")
    option(parser, "--list", "print what the campaign asks, and run nothing")
    option(parser, "--table DIR", "make the page of the artifacts in DIR, and run nothing")
    option(parser, "--transfer", "predict each of the user's calibrations on `here` from the others, and run nothing")
    option(parser, "-o --output FILE", "write the page here", new_file())


def run(args: argparse.Namespace) -> int:
    from tierplan.validation.campaign.artifact import load_artifacts
    from tierplan.validation.campaign.spec import load_campaign

    if args.transfer:
        return _transfer(args)
    if args.table:
        if not Path(args.table).is_dir():
            raise FileNotFoundError(f"--table {args.table}: no such folder; give one that holds artifacts")
        return _show(args, load_artifacts(args.table))
    campaign = load_campaign(args.campaign)
    if args.list:
        lines = []
        for group in campaign.groups:
            lines.append(f"{group.name}: batch {group.batch}, {group.seq} tokens, {group.dtype}")
            lines += [f"  {r.name}" for r in group.runs]
        lines.append(f"{len(campaign.run_names)} runs of {campaign.steps} steps")
        tell(args, {group.name: [run.name for run in group.runs] for group in campaign.groups}, lines)
        return 0

    from tierplan.runtime.execution.device import device_named
    from tierplan.runtime.job import sigterm_interrupts
    from tierplan.validation.campaign.run import CampaignExecution

    execution = CampaignExecution(
        campaign=campaign,
        out_dir=Path(args.out),
        nvme_dir=Path(args.nvme_dir),
        machine_name=args.machine_name or "",
        device=device_named(args.device),
        measure_s=args.measure_s,
        only=args.only or "",
        report=lambda line: print(line, file=sys.stderr, flush=True),
    )
    with sigterm_interrupts():
        artifacts = execution.run()
    return _show(args, artifacts)


def _transfer(args: argparse.Namespace) -> int:
    from tierplan.studies.defaults import workload_or_traced
    from tierplan.validation.calibration.calibration import Calibration, CalibrationError
    from tierplan.validation.calibration.known import calibrations_dir
    from tierplan.validation.calibration.transfer import transfer_lines, transfers

    known = [Calibration.load(path) for path in sorted(calibrations_dir().glob("*.json"))]
    found = transfers(known, load_machine("here"), lambda c: workload_or_traced(c.model, dict(c.config), c.training))
    if not found:
        raise CalibrationError(
            f"{calibrations_dir()} has no calibration of this machine as it was measured last; run tierplan calibrate"
        )
    lines = transfer_lines(found)
    if args.output:
        write_atomically(args.output, "\n".join(lines) + "\n")
    tell(args, [asdict(t) for t in found], lines)
    return 0


def _show(args: argparse.Namespace, artifacts: list) -> int:  # type: ignore[type-arg]
    from tierplan.validation.campaign.summary import campaign_markdown, summarise, summary_lines

    if args.output:
        write_atomically(args.output, campaign_markdown(artifacts))
    tell(args, asdict(summarise(artifacts)), summary_lines(artifacts))
    return 0
