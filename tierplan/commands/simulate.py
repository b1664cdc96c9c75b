"""Simulates one training step under a published system's policy: step time, memory, bytes, what limits it.

Says whether it fits; if not, what does not and by how much.

Examples:

    tierplan simulate --policy fuyou --model gpt-13b --machine fuyou-4090 --batch 32
    tierplan simulate --policy zero-offload --model gpt-13b --machine fuyou-4090 --set nvme.drives=3 --json
    tierplan simulate --policy fuyou --max-model --machine desktop-4090 --batch 1
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from tierplan.commands.options import scenario
from tierplan.commands.options.arguments import add_timeline, new_file, option
from tierplan.commands.options.terminal import nameplate_lines, tell, working


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = "fuyou, zero-infinity, ... (a wrong name lists all; `tierplan compare-policies` runs all)"
    option(parser, "--policy NAME", which, required=True)
    setting = "a setting of the policy, e.g. swap=all; repeatable (a wrong one lists all; docs/policies.md)"
    option(parser, "--option KEY=VALUE", setting, repeat=True, dest="options")
    add_timeline(parser)
    option(parser, "--max-model", "find the largest GPT-3-style model that fits, instead of --model")
    option(parser, "-o --output FILE", "write the schedule, if it fits, for `tierplan run`", new_file())
    scenario.add_arguments(parser, needs_model=False, searches=False)


def run(args: argparse.Namespace) -> int:
    from tierplan.planner.policies import check_name
    from tierplan.planner.policies.options import OptionError
    from tierplan.planner.prediction import predict
    from tierplan.studies.answer import prediction_text, write_timeline
    from tierplan.studies.evaluate import place_of, workload_in

    check_name(args.policy)
    options = policy_options(args)
    if args.max_model:
        given = {"--model": args.model, "-o": args.output, "--timeline": args.timeline}
        if what := " ".join(f"{name} {value}" for name, value in given.items() if value):
            raise OptionError(
                f"--max-model looks for a model, and writes neither schedule nor timeline; leave out {what}"
            )
        if args.exact:
            raise OptionError("--max-model looks among models by closed forms; leave out --exact, and what needs it")
        return _largest(args, options)
    if args.model is None:
        raise OptionError("no model was given; use --model config.json (or a name such as gpt-13b), or --max-model")
    with working("simulating"):
        place = place_of(point := scenario.read_point(args))
        machine = place.machine
        prediction = predict(args.policy, workload_in(place, point), machine, options)
        _ = prediction.limits, prediction.phases
    if args.output and prediction.schedule is not None and prediction.fits:
        from tierplan.planner.plan_file import machine_meta
        from tierplan.sim.digest import digest, sealed
        from tierplan.sim.schedule_file import save_schedule

        figures = {"predicted_step_s": prediction.step_s, "interval_s": prediction.interval_s}
        meta = {**figures, "machine_sha256": digest(machine), **machine_meta(machine)}
        save_schedule(sealed(replace(prediction.schedule, meta={**prediction.schedule.meta, **meta})), args.output)
    if args.timeline and prediction.fits:
        write_timeline(prediction, args.timeline)
    lines = [prediction_text(prediction), *nameplate_lines(prediction)]
    for what, path in {"schedule": args.output, "timeline": args.timeline}.items():
        if path:
            lines.append(f"{what}: {path}" if prediction.fits else f"{path} was not written")
    tell(args, {**prediction.record(), "nameplate": list(prediction.nameplate)}, lines)
    return 0 if prediction.fits else 3


def policy_options(args: argparse.Namespace) -> dict[str, object]:
    """The policy's options from `--option` and `--semantics`."""
    from tierplan.planner.policies.options import OptionError

    options: dict[str, object] = {}
    for setting in args.options:
        name, sign, value = setting.partition("=")
        if not sign:
            raise OptionError(f"--option {setting!r} is not KEY=VALUE; write for example --option swap=all")
        options[name.strip()] = value.strip()
    if args.semantics and options.setdefault("semantics", args.semantics) != args.semantics:
        given = f"--semantics {args.semantics} and --option semantics={options['semantics']}"
        raise OptionError(f"{given} contradict each other; leave one of them out")
    return options


def _largest(args: argparse.Namespace, options: dict[str, object]) -> int:
    """Prints the largest model of the GPT-3 family that fits, and the next one's reason."""
    from tierplan.planner.questions.largest import largest_model
    from tierplan.sim.output.text import in_short, wrapped
    from tierplan.studies.answer import prediction_text
    from tierplan.studies.evaluate import machine_of, training_of

    point = scenario.read_point(args)
    machine = machine_of(point)
    with working("looking for the largest model"):
        largest = largest_model(args.policy, machine, training_of(point, machine), options)
    why = in_short(largest.next_why_not)
    beyond = "this is the deepest that was looked at: larger models may fit too, give theirs with --model"
    if largest.next_model:
        beyond = f"the next size, {largest.next_model}, does not fit: {why}"
    lines = [f"{args.policy}: not even {largest.next_model} fits on {machine.name}", *wrapped(f"  {why}")]
    found = [] if largest.fits is None else [prediction_text(largest.fits), *wrapped(beyond)]
    tell(args, largest.record(), found or lines)
    return 0 if largest.fits is not None else 3
