"""Compares published systems' policies, and the planner, for one model and machine, side by side, with a plot.

Each is simulated in steady state, with the division of a step into micro-batches that suits it best unless --batch or
--accumulation say which; one that does not fit says what is missing. The planner's row is what `tierplan plan` says.
Policies for several devices are compared on such machines, and where they are named.
`--plot FILE` writes the picture.

Example:

    tierplan compare-policies --model gpt-13b --machine fuyou-4090 --batch 32 --plot policies.png
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tierplan.commands.options import scenario
from tierplan.commands.options.arguments import PICTURES, new_file, option
from tierplan.commands.options.terminal import nameplate_lines, tell
from tierplan.hwmodels.names import (
    COMPUTE,
    D2H,
    H2D,
    HOST,
    HOST_ADAM,
    NUMBER,
    NVME,
    NVME_READ,
    NVME_WRITE,
    device_index,
    parse_stream,
)
from tierplan.planner.plan_rules import PLANNER
from tierplan.sim.output.text import columns, format_bytes, format_s, in_short, wrapped

if TYPE_CHECKING:
    from tierplan.planner.prediction import Prediction


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option(parser, "--policies NAME", "only these (default: all that suit the machine)", nargs="+")
    option(parser, "--plot FILE", "write the comparison as a picture (PNG, SVG or PDF)", new_file(*PICTURES))
    scenario.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    from tqdm import tqdm

    from tierplan.planner.policies import check_name, comparable
    from tierplan.studies.evaluate import machine_of, predict_point

    given = " ".join(args.policies or ())
    if "," in given:
        apart = " ".join(given.replace(",", " ").split())
        raise ValueError(f"--policies is {given!r}, but names are separated by spaces: --policies {apart}")
    for name in args.policies or ():
        if name != PLANNER:
            check_name(name)
    point = scenario.read_point(args)
    machine = machine_of(point)
    names = list(dict.fromkeys(args.policies or [PLANNER, *comparable(machine.num_devices)]))
    bar = tqdm(names, disable=args.json or not sys.stderr.isatty(), leave=False)
    predictions = [replace(predict_point(replace(point, policy=name)), policy=name) for name in bar]
    tokens = (point.sequences or point.batch * point.accumulation) * point.seq
    num, has = machine.num_devices, machine.own_devices
    fewer = [p for p in predictions if p.fits and p.devices < num]
    of = f"{num} of its {has}" if num < has else f"{num}"
    gpus = ", ".join([f"{of} GPUs", *(f"{p.policy} on {p.devices}" for p in fewer)])
    where = f"{machine.name}, {gpus}" if max(num, has) > 1 else machine.name
    if args.plot:
        plot_policies(predictions, args.plot, where, point.semantics)
    lines = wrapped(f"{predictions[0].model} on {where}, {tokens:,} tokens per step; memory in GiB")
    lines.append(policy_table(predictions, point.semantics))
    if num > has:
        lines += wrapped(next((p.devices_note for p in predictions if p.devices == num), ""))
    lines += [line for text in division_notes(predictions) for line in wrapped(text)]
    lines += [*nameplate_lines(*predictions), *([f"picture: {args.plot}"] if args.plot else [])]
    tell(args, lambda: {prediction.policy: prediction.record() for prediction in predictions}, lines)
    return 0 if any(prediction.fits for prediction in predictions) else 3


def policy_table(predictions: Sequence[Prediction], semantics: str = "") -> str:
    """One line per policy, the most tokens per second first, and those that do not fit at the end; memory in GiB."""
    names, notes = starred(predictions, semantics)
    heads = ("policy", "step", "tokens/s", "batch", "device", "host", "NVMe", "limited by")
    rows = []
    for p in _quickest_first(predictions):
        assert p.steady is not None
        assert p.step_s is not None
        peak = p.steady.peak_bytes
        device = max(size for tier, size in peak.items() if device_index(tier) is not None)
        held = [f"{size / 2**30:.1f}" for size in (device, *(peak.get(tier, 0) for tier in (HOST, NVME)))]
        batch = f"{p.micro_batch} x {p.accumulation}"
        rows.append((names[p.policy], format_s(p.step_s), f"{p.tokens_per_s:,.0f}", batch, *held, p.limited_by))
    missing = [(p.policy, short_reason(p)) for p in predictions if p.step_s is None]
    said = [line for note in notes for line in wrapped(note, 80)]
    return "\n".join([*columns([heads, *rows], right=range(1, 7)), *said, *(columns(missing) if missing else [])])


def starred(predictions: Sequence[Prediction], semantics: str) -> tuple[dict[str, str], list[str]]:
    """Policies that run as they are named, with stars where their numbers are others, and what the stars mean."""
    why = {p.policy: p.other_numbers(semantics) for p in predictions if p.fits}
    kinds = ["", *dict.fromkeys(filter(None, why.values()))]
    notes = [f"{'*' * k} other numbers than plain training's: {kind}" for k, kind in enumerate(kinds) if k]
    return {name: name + "*" * kinds.index(kind) for name, kind in why.items()}, notes


def _quickest_first(predictions: Sequence[Prediction]) -> list[Prediction]:
    return sorted((p for p in predictions if p.fits), key=lambda p: -(p.tokens_per_s or 0.0))


def division_notes(predictions: Sequence[Prediction]) -> list[str]:
    """Whose micro-batches are of each GPU, and whose step time is a mean."""
    of_each, means = dict[int, list[str]](), dict[str, list[str]]()
    for p in predictions:
        if p.fits and p.plan is not None and p.plan.num_batches > 1:
            of_each.setdefault(p.tokens, []).append(p.policy)
        if p.step_note:
            means.setdefault(p.step_note, []).append(p.policy)
    notes = [
        f"micro-batches of each GPU's own, {tokens:,} tokens per step: {', '.join(names)}"
        for tokens, names in of_each.items()
    ]
    return [*notes, *(f"{note}: {', '.join(names)}" for note, names in means.items())]


def short_reason(prediction: Prediction) -> str:
    """Why it does not fit, in one line."""
    shortage = prediction.shortage
    if shortage is None:
        return "does not run: " + in_short(prediction.why_not)
    if shortage.short_bytes is None:
        return f"does not fit: {shortage.tier} is too small, and {shortage.also_short} as well"
    return (
        f"does not fit: needs {format_bytes(shortage.short_bytes)} more in {shortage.tier} "
        f"({format_bytes(shortage.needed_bytes or 0)} instead of {format_bytes(shortage.capacity_bytes)})"
    )


COLOURS = {
    COMPUTE: "#0072B2",
    H2D: "#56B4E9",
    D2H: "#009E73",
    NVME_READ: "#F0E442",
    NVME_WRITE: "#E69F00",
    HOST_ADAM: "#D55E00",
}
"""Okabe and Ito's colours, which colour-blind readers can tell apart."""


def plot_policies(
    predictions: Sequence[Prediction], path: str | os.PathLike[str], where: str, semantics: str = ""
) -> None:
    """Writes bars of step time and, on the same scale, of each stream's work per step; most tokens per second first.

    Of several devices' streams of a kind, the busiest is shown. What does not fit is named.
    """
    from matplotlib.figure import Figure

    from tierplan.sim.output.plots import round_ticks, save_figure

    fitting = _quickest_first(predictions)[::-1]
    names, notes = starred(predictions, semantics)
    missing = [p.policy for p in predictions if p.step_s is None]
    figure = Figure(figsize=(11, 1.6 + 0.45 * max(len(fitting), 1)), layout="constrained")
    left, right = figure.subplots(1, 2, sharex=True, sharey=True)
    rows = list(range(len(fitting)))
    steps = [p.step_s or 0.0 for p in fitting]
    left.barh(rows, steps, color="#59636e", height=0.6)
    for row, p in zip(rows, fitting, strict=True):
        long = (p.step_s or 0.0) > 0.6 * max(steps)
        at, colour = (0.0, "white") if long else (p.step_s or 0.0, "black")
        text = f" {format_s(p.step_s or 0.0)}, {p.tokens_per_s:,.0f} tokens/s"
        left.text(at, row, text, va="center", fontsize=8, color=colour)
    left.set_yticks(rows, [names[p.policy] for p in fitting])
    left.set(xlim=(0, 1.02 * max(steps, default=1.0)), xlabel="step time (s)")
    round_ticks(left)
    streams = [name for name in COLOURS if any(_busiest(p, name) for p in fitting)]
    height = 0.8 / max(len(streams), 1)
    for k, stream in enumerate(streams):
        busy = [_busiest(p, stream) * (p.step_s or 0.0) for p in fitting]
        label = stream if all(p.devices < 2 for p in fitting) else NUMBER.sub("*", stream)
        offsets = [row + 0.4 - (k + 0.5) * height for row in rows]
        right.barh(offsets, busy, height=height, color=COLOURS[stream], label=label, edgecolor="black", linewidth=0.3)
    right.set_xlabel("work of each stream in one step (s, alone)")
    if fitting:
        figure.legend(fontsize=8, loc="outside lower center", ncols=len(COLOURS))
    said = [f"{predictions[0].model} on {where}", *notes, *([f"does not run: {', '.join(missing)}"] if missing else [])]
    figure.suptitle("\n".join(line for text in said for line in wrapped(text, 130, of=0)), fontsize=10)
    save_figure(figure, path)


def _busiest(prediction: Prediction, stream: str) -> float:
    """The part of the step that the stream of this kind works, on the device where that is most."""
    alike = {stream} | {name for name in prediction.utilization if parse_stream(name).on(0) == stream}
    return max(prediction.utilization.get(name, 0.0) for name in alike)
