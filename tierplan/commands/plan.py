"""Finds the best plan for a model on a machine, and says how much better any other could be.

Compares with every published system's policy, and writes plan and schedule to one file that `tierplan run` executes.

Examples:

    tierplan plan --model gpt-13b --machine fuyou-4090 --batch 32
    tierplan plan --model gpt-13b --machine desktop-4090 --batch 8 -o plan.json --json
    tierplan plan --model gpt-13b --machine fuyou-4090 --sequences 32 --explain
"""

from __future__ import annotations

import argparse
import sys

from tierplan.commands.options import scenario
from tierplan.commands.options.arguments import PICTURES, add_timeline, finite, new_file, option, seed
from tierplan.commands.options.terminal import nameplate_lines, tell, told_anyway, working

EXIT_INFEASIBLE = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    scenario.add_arguments(parser)
    option(parser, "-o --output FILE", "write plan and schedule, for `tierplan run`", new_file())
    add_timeline(parser)
    option(parser, "--time-limit S", "seconds of each division's search (default: by counted work)", finite(above=0))
    option(parser, "--seed N", "of the search's random changes", seed, 0)
    option(parser, "--explain", "also plan again for what could be bought: the table of `tierplan advise`")
    option(parser, "--frontier FILE.png", "plot the step time against device memory (plans again)", new_file(*PICTURES))


def run(args: argparse.Namespace) -> int:
    from tierplan.planner.infeasible import InfeasiblePlan
    from tierplan.sim.output.text import wrapped
    from tierplan.studies.answer import answer_lines, answer_record, impossible_record, question_text, write_timeline
    from tierplan.studies.evaluate import bounded_plan

    point = scenario.read_point(args)
    try:
        with working("planning"):
            best = bounded_plan(point)
            _ = best.result.prediction.limits
    except InfeasiblePlan as error:
        reason = str(error)
        unwritten = [f"{args.output} was not written"] if args.output else []
        tell(args, impossible_record(error), [*wrapped(f"{reason[:1].upper()}{reason[1:]}."), *unwritten])
        return EXIT_INFEASIBLE
    result, workload, machine = best.result, best.workload, best.machine
    record = answer_record(best)
    lines = [
        *wrapped(f"{workload.name} on {result.prediction.where}"),
        *wrapped(question_text(point, record, workload.training.dtype)),
        *answer_lines(best),
    ]
    if args.explain:
        from tierplan.commands.advise import ask
        from tierplan.studies.advice_text import change_lines

        advice = ask(args, progress=sys.stderr.isatty())
        record["changes"] = [change.record() for change in advice.changes]
        lines += ["", *change_lines(advice)]
    sheets = nameplate_lines(result.prediction)
    with told_anyway(args, record, [*lines, *sheets]):
        if args.output:
            from tierplan.planner.plan_file import save_plan

            save_plan(result, workload, machine, args.output)
        if args.timeline:
            write_timeline(result.prediction, args.timeline)
        if args.frontier:
            from tierplan.studies.frontier import frontier, plot_frontier, quicker_with_less

            with working("planning with other device memory"):
                points = frontier(point, best)
            plot_frontier(points, args.frontier, best)
            lines += wrapped(quicker_with_less(points, best))
    written = {"plan": args.output, "timeline": args.timeline, "picture": args.frontier}
    lines += [f"{what}: {where}" for what, where in written.items() if where]
    tell(args, record, [*lines, *sheets])
    return 0
