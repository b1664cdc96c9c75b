"""Simulates one training step under a published system's policy: step time, memory, bytes, what limits it.

Says whether it fits; if not, what does not and by how much.

Examples:

    tierplan simulate --policy fuyou --model gpt-13b --machine fuyou-4090 --batch 32
    tierplan simulate --policy zero-offload --model gpt-13b --machine fuyou-4090 --set nvme.drives=3 --json
    tierplan simulate --policy fuyou --max-model --machine desktop-4090 --batch 1
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from tierplan.commands.options import scenario
from tierplan.commands.options.arguments import add_timeline, new_file, option
from tierplan.commands.options.terminal import nameplate_lines, tell, working
from tierplan.sim.output.text import alike_rows, columns, format_bytes, format_s, in_short, wrapped

if TYPE_CHECKING:
    from tierplan.planner.prediction import Prediction


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
    from tierplan.studies.evaluate import place_of, workload_in

    check_name(args.policy)
    options = policy_options(args)
    if args.max_model:
        if args.model or args.output:
            what = f"--model {args.model}" if args.model else f"-o {args.output}"
            raise OptionError(f"--max-model looks for a model and writes no schedule; leave out {what}")
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
        from tierplan.studies.answer import write_timeline

        write_timeline(prediction, args.timeline)
    lines = [text_of(prediction), *nameplate_lines(prediction)]
    if args.output:
        lines.append(f"schedule: {args.output}" if prediction.fits else f"{args.output} was not written")
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
    if args.semantics:
        options["semantics"] = args.semantics
    return options


def text_of(prediction: Prediction) -> str:
    """The prediction for people."""
    from tierplan.studies.answer import interval_rows, limit_rows, limited_text, numbers_rows

    head = f"{prediction.policy}: {prediction.model} on {prediction.where}"
    if prediction.step_s is None or prediction.steady is None or prediction.columns is None:
        said = wrapped(in_short(prediction.why_not), 78)
        heads = wrapped(f"{head} does not {'fit' if prediction.shortage else 'run'}")
        return "\n".join([*heads, *(f"  {line}" for line in said)])
    spent = asdict(prediction.phases) if prediction.phases else {}
    rows: list[tuple[str, ...]] = [("devices", prediction.devices_note)] if prediction.devices_note else []
    rows += [
        ("step time", f"{format_s(prediction.step_s)}, {prediction.tokens_per_s:,.1f} tokens/s"),
        *interval_rows(prediction),
        ("", ", ".join(f"{name.removesuffix('_s')} {format_s(value)}" for name, value in spent.items())),
        ("limited by", limited_text(prediction.limits)),
        ("of the model", f"{prediction.flops / prediction.step_s / 1e12:.1f} TFLOP/s{_as_papers_count(prediction)}"),
        *(
            [("trained on", sequences_text(prediction))]
            if max(prediction.devices, prediction.devices_of_machine) > 1
            else []
        ),
        ("semantics", prediction.plan.semantics if prediction.plan else ""),
        *numbers_rows(prediction),
    ]
    rows += alike_rows(
        (f"peak {tier}", f"{format_bytes(peak)} of {format_bytes(prediction.steady.capacity_bytes[tier])}")
        for tier, peak in prediction.steady.peak_bytes.items()
    )
    moved = prediction.columns.bytes_moved().items()
    rows += alike_rows((f"moved {stream}", f"{format_bytes(size)}") for stream, size in moved)
    if prediction.lifetime_s is not None:
        rows.append(
            ("drives last", f"{format_s(prediction.lifetime_s)} of writing like this, by their rated endurance")
        )
    return "\n".join([*wrapped(head), *columns(rows), "", *columns(limit_rows(prediction.limits), right=(1, 2))])


def _as_papers_count(prediction: Prediction) -> str:
    if prediction.tflops_8nd is None:
        return ""
    active = "active " * (prediction.num_active != prediction.num_parameters)
    return f" ({prediction.tflops_8nd:.1f} as papers count: 8 FLOPs per {active}parameter and token)"


def sequences_text(prediction: Prediction) -> str:
    """The sequences of one step, and who has them."""
    num = 0 if prediction.plan is None else prediction.plan.num_batches
    each = prediction.micro_batch * prediction.accumulation
    whose = f"{each} on each of {num} GPUs" if num > 1 else f"which {prediction.devices} GPUs share"
    return f"{each * num} sequences per step, {whose}"


def _largest(args: argparse.Namespace, options: dict[str, object]) -> int:
    """Prints the largest model of the GPT-3 family that fits, and the next one's reason."""
    from tierplan.planner.questions.largest import largest_model
    from tierplan.studies.evaluate import machine_of, training_of

    point = scenario.read_point(args)
    machine = machine_of(point)
    with working("looking for the largest model"):
        largest = largest_model(args.policy, machine, training_of(point, machine), options)
    if largest.fits is None:
        lines = [f"{args.policy}: not even {largest.next_model} fits on {machine.name}", f"  {largest.next_why_not}"]
    elif largest.next_model:
        beyond = f"the next size, {largest.next_model}, does not fit: {largest.next_why_not}"
    else:
        beyond = "this is the deepest that was looked at: larger models may fit too, give theirs with --model"
    if largest.fits is not None:
        lines = [text_of(largest.fits), beyond]
    tell(args, largest.record(), lines)
    return 0 if largest.fits is not None else 3
