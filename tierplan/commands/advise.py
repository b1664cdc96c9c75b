"""Can I train this model on this machine, how fast, what limits it, and what should I buy?

Simulates the policies at several batch sizes on the machine as it is, asks the planner at the best of them, and
simulates again with one thing changed at a time: a drive, DRAM, another GPU. Says time and cost per billion tokens,
how long the drives live, and the largest model that fits.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from tierplan.commands.options.arguments import add_set, finite, new_file, whole

if TYPE_CHECKING:
    from tierplan.studies.advise import Advice

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", required=True, metavar="M", help="config.json, its folder, or a name such as gpt-13b"
    )
    parser.add_argument("--machine", default="here", metavar="X", help="a catalog name, a TOML file, or here (default)")
    add_set(parser)
    parser.add_argument("--seq", type=whole(1), default=1024, metavar="S", help="tokens in one sequence (default 1024)")
    parser.add_argument("--batch", type=whole(1), action="append", metavar="B",
                        help="micro-batch sizes to try, repeatable (default 1, 4, 16, 64)")  # fmt: skip
    parser.add_argument("--planner-s", type=finite(least=0), default=3.0, metavar="S",
                        help="time limit of the planner; 0 leaves it out (default 3)")  # fmt: skip
    parser.add_argument(
        "--electricity", type=finite(least=0), default=0.20, metavar="USD", help="per kWh (default 0.20)"
    )
    parser.add_argument(
        "--years",
        type=finite(above=0),
        default=3.0,
        metavar="YEARS",
        help="over which the machine is written off (default 3)",
    )
    parser.add_argument(
        "--workers", type=whole(1), metavar="N", help="processes (default 1: most questions take seconds)"
    )
    parser.add_argument("--json", action="store_true", help="print the advice as one JSON object")
    parser.add_argument(
        "-o", "--output", "--out", dest="out", type=new_file(), metavar="PAGE.html", help="also write it as a page"
    )


def run(args: argparse.Namespace) -> int:
    from tierplan.studies.advice_text import advice_lines, write_advice
    from tierplan.studies.advise import BATCHES, PriceList, advise

    overrides = dict(_pair(text) for text in args.overrides)
    advice = advise(
        args.model,
        args.machine,
        overrides=overrides,
        batches=args.batch or BATCHES,
        seq=args.seq,
        planner_s=args.planner_s,
        prices=PriceList(electricity_usd_per_kwh=args.electricity, years=args.years),
        num_workers=args.workers,
        progress=sys.stderr.isatty() and not args.json,
    )
    if args.out:
        write_advice(args.out, advice)
    if args.json:
        print(json.dumps(advice.record()))
    else:
        print("\n".join(advice_lines(advice)))
        if args.out:
            print(f"\n{args.out}")
    return _status(advice)


def _status(advice: Advice) -> int:
    """That a model does not fit is an answer, not an error."""
    return 0 if advice.fits or advice.why_not else 1


def _pair(text: str) -> tuple[str, str]:
    key, sep, value = text.partition("=")
    if not sep or not key:
        raise ValueError(f"--set {text!r}; write KEY=VALUE, e.g. nvme.drives=3")
    return key.strip(), value.strip()
