"""Finds the best plan for a model on a machine, and says how much better any other could be.

Compares with every published system's policy, and writes plan and schedule to one file that `tierplan run` executes.

Examples:

    tierplan plan --model gpt-13b --machine fuyou-4090 --batch 32
    tierplan plan --model gpt-13b --machine desktop-4090 --batch 8 -o plan.json --json
    tierplan plan --model gpt-13b --machine fuyou-4090 --sequences 32 --explain
"""

from __future__ import annotations

import argparse
import json
import sys

from tierplan.commands.options import scenario
from tierplan.commands.options.arguments import PICTURES, finite, new_file, option, whole
from tierplan.commands.options.terminal import say, say_nameplate, working

EXIT_INFEASIBLE = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    scenario.add_arguments(parser)
    option(parser, "-o --output FILE", "write plan and schedule, for `tierplan run`", new_file())
    option(parser, "--json", "print one JSON object")
    option(
        parser, "--timeline FILE", "draw what each stream does in one step: HTML to zoom into, PNG, SVG, PDF, or JSON "
        "for ui.perfetto.dev", new_file(".html", *PICTURES, ".json"),
    )  # fmt: skip
    option(parser, "--time-limit S", "seconds of each division's search (default: 2 to 5, at most 10)", finite(above=0))
    option(parser, "--seed N", "of the search's random changes", whole(0), 0)
    option(
        parser, "--drive-lifetime-years Y", "the drives are to last this long, training without pause, by their rated "
        "endurance (nvme.endurance): plans whose steps write more are left out", finite(above=0),
    )  # fmt: skip
    option(parser, "--explain", "also plan again for what could be bought: the table of `tierplan advise`")
    option(parser, "--frontier FILE.png", "plot the step time against device memory (plans again)", new_file(*PICTURES))


def run(args: argparse.Namespace) -> int:
    from tierplan.commands.advise import ask
    from tierplan.planner.infeasible import InfeasiblePlan
    from tierplan.studies.answer import answer_lines, answer_record, impossible_record, question_text, write_timeline
    from tierplan.studies.evaluate import best_plan

    point = scenario.read_point(args)
    try:
        with working("planning"):
            best = best_plan(point)
            _ = best.result.prediction.limits
    except InfeasiblePlan as error:
        if not args.json:
            raise
        print(json.dumps(impossible_record(error), indent=2))
        return EXIT_INFEASIBLE
    result, workload, machine = best.result, best.workload, best.machine
    if args.output:
        from tierplan.planner.plan_file import save_plan

        save_plan(result, workload, machine, args.output)
    if args.timeline:
        write_timeline(result.prediction, args.timeline)
    if args.frontier:
        from tierplan.planner.questions.frontier import frontier, plot_frontier

        with working("planning with less device memory"):
            points = frontier(
                workload,
                machine,
                semantics=args.semantics,
                time_limit_s=args.time_limit,
                seed=args.seed,
                drive_lifetime_years=args.drive_lifetime_years,
            )
        plot_frontier(points, args.frontier, workload, machine)
    advice = ask(args, progress=sys.stderr.isatty()) if args.explain else None
    if args.json:
        bought = {} if advice is None else {"changes": [change.record() for change in advice.changes]}
        print(json.dumps({**answer_record(best), **bought}, indent=2))
        return 0
    training = workload.training
    print(f"{workload.name} on {result.prediction.where}")
    batch, accumulation = training.per_device_train_batch_size, training.gradient_accumulation_steps
    print(question_text(point, batch, accumulation, training.dtype))
    say(*answer_lines(best))
    if advice is not None:
        from tierplan.studies.advice_text import change_lines

        say("", *change_lines(advice))
    for what, where in (("plan", args.output), ("timeline", args.timeline), ("picture", args.frontier)):
        if where:
            print(f"{what}: {where}")
    say_nameplate(result.prediction)
    return 0
