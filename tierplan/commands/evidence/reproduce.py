"""Puts published figures beside predictions: every row with its signed error, coverage, order, calibrated constants.

Examples:

    tierplan reproduce                 all systems
    tierplan reproduce fuyou --json
    tierplan reproduce points          steps that others measured, on several GPUs (a few minutes; only when named)
    tierplan reproduce finetuning      steps of one GPU that fine-tune: times and peaks of memory (only when named)
    tierplan reproduce --write docs/validation.md
"""

from __future__ import annotations

import argparse
import sys

from tierplan.commands.options.arguments import new_file, option
from tierplan.commands.options.terminal import tell
from tierplan.sim.output.text import wrapped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "systems",
        nargs="*",
        metavar="SYSTEM",
        help="fuyou, harmony, ratel, ssdtrain, zero (default), points or finetuning",
    )
    option(parser, "--write FILE", "write tables and pictures into this page, between its markers", new_file())


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from tierplan.validation.published.page import summary_text, table_text, update_page
    from tierplan.validation.published.points import POINTS, reproduce_points
    from tierplan.validation.published.reproduce import check_named, published, reproduce, systems

    names = args.systems or systems()
    for name in names:
        check_named(name, [*systems(), *POINTS])
    of_points = any(name in POINTS for name in names)
    total = None if of_points else sum(len(result["rows"]) for name in names for result in published(name)["result"])
    with tqdm(total=total, disable=not sys.stderr.isatty(), leave=False) as bar:

        def show(text: str) -> None:
            bar.set_description_str(text[:60])
            bar.update()

        reports = [(reproduce_points if name in POINTS else reproduce)(name, progress=show) for name in names]
    if args.write:
        update_page(reports, args.write)
    lines: list[str] = []
    for report in reports:
        lines += wrapped(summary_text(report))
        lines += [f"  {line}" for constant in report.constants for line in wrapped(f"calibrated: {constant}", 78)]
        lines += [table_text(report), ""]
    tell(args, {report.system: report.record() for report in reports}, lines)
    return 0
