"""Can I train this model on this machine, how fast, what limits it, and what should I buy?

The best plan for the machine as it is, as `tierplan plan` finds it, and again with one thing bought at a time: DRAM,
drives, another GPU. Lists what makes training quicker. Says time, energy and money, how long the drives live, and the
largest model of the GPT-3 family that `tierplan plan` has a plan for with these settings and one sequence at a time
(and where a larger one may fit, since none was found in a short search, but no bound excludes it, that it is so).

    tierplan advise --model gpt-6.7b --machine desktop-4090
    tierplan advise --model gpt-6.7b --machine desktop-4090 --set gpu.part=rtx-3090 --tokens 10M -o advice.html
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from tierplan.commands.options import scenario
from tierplan.commands.options.arguments import amount, finite, new_file, option, whole
from tierplan.commands.options.terminal import tell, told_anyway

if TYPE_CHECKING:
    from tierplan.studies.advise import Advice


def add_arguments(parser: argparse.ArgumentParser) -> None:
    scenario.add_arguments(parser)
    job = parser.add_argument_group("the job")
    option(job, "--tokens N", "to train in all: 10M, 2.5B (default 1B)", amount)
    option(job, "--dataset-tokens N", "of the data, with --epochs", amount)
    option(job, "--epochs E", "how often the data are gone through", finite(above=0))
    option(job, "--electricity USD", "per kWh", finite(least=0), 0.20)
    option(job, "--years YEARS", "over which the machine is written off", finite(above=0), 3.0)
    option(parser, "--quick", "search for a moment only: seconds, and a rougher answer")
    what = "seconds of a search, as for `plan` (default: by counted work); with --quick, what they buy usually"
    option(parser, "--time-limit S", what, finite(above=0))
    option(parser, "--workers N", "processes (default: one per core)", whole(1))
    option(parser, "-o --output --out PAGE.html", "also write it as a page", new_file(), dest="out")


def run(args: argparse.Namespace) -> int:
    from tierplan.studies.advice_text import advice_lines, write_advice

    advice = ask(args, progress=sys.stderr.isatty() and not args.json)
    record, lines = advice.record(), advice_lines(advice)
    if args.out:
        with told_anyway(args, record, lines):
            write_advice(args.out, advice)
        lines += ["", f"page: {args.out}"]
    tell(args, record, lines)
    return 0 if advice.fits else 3


def ask(args: argparse.Namespace, *, progress: bool) -> Advice:
    """The advice that the arguments ask for; what `plan` does not have is at its default."""
    from tierplan.studies.advise import advise
    from tierplan.studies.purchases import TOKENS, PriceList

    given = vars(args)
    tokens = given.get("tokens")
    if (given.get("epochs") is None) != (given.get("dataset_tokens") is None):
        raise ValueError("--epochs and --dataset-tokens say together how much is trained; give both, or --tokens")
    if given.get("epochs") is not None:
        if tokens is not None:
            raise ValueError("--tokens and --epochs both say how much is trained; give one of them")
        tokens = args.epochs * args.dataset_tokens
    return advise(
        scenario.read_point(args),
        prices=PriceList(electricity_usd_per_kwh=given.get("electricity", 0.20), years=given.get("years", 3.0)),
        tokens=TOKENS if tokens is None else tokens,
        quick=given.get("quick", False),
        num_workers=given.get("workers"),
        progress=progress,
    )
