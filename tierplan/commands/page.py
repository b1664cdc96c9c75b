"""Write a what-if page: models, GPUs, DRAM, drives, methods and batches to choose among, in one file for a browser.

All combinations are planned beforehand, as by `tierplan sweep`: the default grid, some 400, takes about twenty minutes
on two cores, and a second run continues where the first one stopped. The page opens from disk and asks no network.

    tierplan page -o what-if.html --quick
    tierplan page -o what-if.html --model llama-3.1-8b qwen3-8b --gpu rtx-3090 rtx-5090 --dram 64 128 192 --drives 1 2 4
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tierplan.commands.options import scenario
from tierplan.commands.options.arguments import add_set, amount, finite, new_file, new_folder, option, whole
from tierplan.hwmodels.description import pairs_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "-o --output --out PAGE.html", "the page", new_file(".html"), dest="out", required=True)
    choices = parser.add_argument_group("what can be chosen (default: what shops sell for the machine)")
    option(choices, "--model M", "as for `plan`", nargs="+", default=())
    option(choices, "--machine X", "which is changed: a catalog name, a TOML file or `here`", default="desktop-4090")
    option(choices, "--gpu NAME", "cards of the catalog", nargs="+", default=(), dest="gpu.part")
    option(choices, "--gpus N", "numbers of GPUs", whole(1), nargs="+", default=(), dest="gpu.count")
    option(choices, "--dram GIB", "of DRAM", whole(1), nargs="+", default=(), dest="host.capacity")
    option(choices, "--drives N", "numbers of drives", whole(0), nargs="+", default=(), dest="nvme.drives")
    option(choices, "--method NAME", "planner, or a published system's policy", nargs="+", default=(), dest="policy")
    option(choices, "--sequences N", "per optimizer step, as for `plan`", whole(1), nargs="+", default=())
    fixed = parser.add_argument_group("the same everywhere")
    scenario.add_settings(fixed)
    scenario.add_drive_lifetime(fixed)
    option(fixed, "--tokens N", "of the job whose time and cost are shown (default 1B)", amount)
    add_set(fixed)
    option(fixed, "--time-limit S", "seconds of a search, as for `plan` (default: by counted work)", finite(above=0))
    option(parser, "--quick", "a small grid, and searches for a moment only")
    option(parser, "--keep DIR", "folder of the answers (default: beside the page, with its name)", new_folder)
    option(parser, "--workers N", "processes (default: one per core)", whole(1))


def run(args: argparse.Namespace) -> int:
    from tierplan.studies.advise import QUICK_S
    from tierplan.studies.page import LABELS, grid_of, write_what_if
    from tierplan.studies.purchases import TOKENS

    named = {key: vars(args)[key] for key in LABELS}
    named["host.capacity"] = [f"{gib} GiB" for gib in named["host.capacity"]]
    settings = scenario.read_settings(args)
    if args.drive_lifetime_years is not None:
        settings["drive_lifetime_years"] = args.drive_lifetime_years
    study = grid_of(
        args.machine,
        named,
        settings=settings,
        overrides=dict(pairs_of(args.overrides)),
        planner_s=args.time_limit or (QUICK_S if args.quick else None),
        most=2 if args.quick else None,
    )
    rows = write_what_if(
        args.out,
        study,
        keep_in=args.keep or Path(args.out).with_suffix(""),
        tokens=args.tokens or TOKENS,
        num_workers=args.workers,
        progress=sys.stderr.isatty(),
    )
    if args.json:
        print("\n".join(map(json.dumps, rows)))
        return 0
    print(f"{args.out}: {sum(bool(row.get('fits')) for row in rows)} of {len(rows)} combinations can be trained")
    return 0
