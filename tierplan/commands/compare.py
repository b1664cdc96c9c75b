"""Compare a run with its prediction, op by op: where the time went, and why it differs.

PLAN is what `tierplan plan -o` or `tierplan simulate -o` wrote; RUN is the folder of `tierplan run --out`. The plan is
simulated again on the machine that it was made for, which stands in it.

    tierplan compare plan.json run1 -o report.html
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

from tierplan.commands.options.arguments import PICTURES, add_set, existing_file, new_file, option, whole
from tierplan.commands.options.terminal import tell, working
from tierplan.hwmodels.names import parse_stream, parts_used
from tierplan.sim.output.text import format_s, wrapped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", type=existing_file, metavar="PLAN", help="the plan or schedule that was run")
    parser.add_argument("run_dir", metavar="RUN", help="the folder of the run")
    option(parser, "-o --output FILE", "the page", new_file(), "report.html")
    option(parser, "--machine X", "a catalog name, a TOML file, or here (default: the plan's own)")
    add_set(parser)
    option(parser, "--other-machine", "compare even if the plan is for another machine")
    option(parser, "--warmup N", "steps at the beginning to leave out (default 2)", whole(0))
    option(parser, "--plot FILE", "also write both timelines as a picture", new_file(*PICTURES))
    option(parser, "--perfetto FILE", "also write both timelines for Perfetto", new_file())


def run(args: argparse.Namespace) -> int:
    from tierplan.validation.comparison.compare import compare
    from tierplan.validation.comparison.run_folder import load_run, read_schedule
    from tierplan.validation.comparison.words import (
        at_slowdown,
        causes_in_words,
        figure_lines,
        judged_steps,
        steps_in_words,
        what_to_do,
    )
    from tierplan.validation.report.report import verdict, write_report

    schedule, machine = read_schedule(args.plan, args.machine, args.overrides, any_machine=args.other_machine)
    measured, losses = load_run(args.run_dir)
    used = {parse_stream(op.stream).device for op in schedule.ops} - {None}
    devices = {"devices": len(used), "devices_of_machine": machine.num_devices}
    from tierplan.sim.analysis.steady import steady_state

    with working("simulating and comparing"):
        steady = steady_state(schedule, machine)
        comparison = compare(
            schedule,
            steady.trace,
            measured,
            predicted_step_s=steady.period_s,
            interval_s=machine.basis.interval_s(steady.period_s),
            warmup_steps=args.warmup,
        )
        comparison = at_slowdown(comparison, schedule, machine, measured)
    causes, advice = causes_in_words(comparison), what_to_do(comparison, machine.basis, measured.meta)
    gpus = f", {len(used)} of its {machine.num_devices} GPUs" if machine.num_devices > 1 else ""
    parts = parts_used(s.stream for s in comparison.streams)
    where, text = machine.name + gpus, machine.basis.said(parts)
    sheets = [name for name in machine.nameplate if name.partition(".")[0] in parts]
    about = {"plan": str(args.plan), "run": str(args.run_dir), "machine": where, "basis": text}
    about |= {key: str(said) for key in ("model", "policy", "semantics") if (said := schedule.meta.get(key))}
    notes = [advice]
    notes += [f"From data sheets rather than measured: {', '.join(sheets)}."] if sheets else []
    write_report(
        args.output,
        comparison,
        steady.trace,
        measured,
        title=f"{schedule.name}: predicted and measured",
        about=about,
        losses=losses,
        notes=notes,
        schedule=schedule,
    )
    if args.plot:
        from tierplan.sim.output.plots import plot_timelines, save_figure
        from tierplan.validation.report.report import typical_steps

        steps = typical_steps(steady.trace, measured, comparison.warmup_steps)
        save_figure(plot_timelines(steps), args.plot, dpi=120)
    if args.perfetto:
        from tierplan.sim.output.perfetto import write_perfetto

        write_perfetto({"predicted": steady.trace, "measured": measured}, args.perfetto)
    basis = {**asdict(machine.basis), "text": text}
    judged = judged_steps(comparison, measured, len(losses))
    record = {**comparison.record(), **devices, "steps": judged, "basis": basis, "causes": causes, "what_to_do": advice}
    low_s, high_s = map(format_s, machine.basis.interval_s(comparison.step_s.predicted))
    interval = f"9 in 10 between {low_s} and {high_s} were predicted; by: {text}"
    lines = [
        *([f"on {where}"] if gpus else []),
        *wrapped(verdict(comparison)),
        *figure_lines(comparison),
        *wrapped(f"  {steps_in_words(judged)}"),
        *wrapped(f"  {interval}"),
        "  bytes per stream agree exactly" if comparison.bytes_agree else "  bytes per stream do not all agree",
        "measured minus predicted, the largest parts:",
        *(line for cause in causes for line in wrapped(f"  {cause}")),
        *wrapped(advice),
        args.output,
    ]
    tell(args, record, lines)
    return 0
