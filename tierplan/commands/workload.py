"""Show what one training step of a model computes, keeps and owns: no GPU, no weights.

tierplan workload list                                the models known by name
tierplan workload show gpt-13b --batch 4              a table: parameters, states, activations, FLOPs
tierplan workload show path/to/config.json --exact    the same from the model's own class (needs torch)
tierplan workload show gpt-13b --unit L0              one unit, tensor by tensor
tierplan workload deepspeed ds.json --model gpt-13b   what a DeepSpeed configuration amounts to
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby

from tierplan.commands.options import scenario
from tierplan.commands.options.arguments import actions, existing_file, option
from tierplan.commands.options.terminal import tell, working
from tierplan.sim.output.text import columns, digits, format_bytes, format_count, wrapped
from tierplan.sim.workloads.work import flops_of
from tierplan.sim.workloads.workload import Training, Unit, Workload, WorkloadError
from tierplan.studies.study import OF_TRAINING, Point


def add_arguments(parser: argparse.ArgumentParser) -> None:
    action = actions(parser)
    action("list", _list, "the models known by name")

    show = action("show", _show, "per unit and in total: parameters, states, activations, FLOPs")
    show.add_argument("model", metavar="CONFIG", help=scenario.MODEL)
    scenario.add_training(show)
    option(show, "--unit U", "list the saved tensors of this unit, such as L0 or head")

    deepspeed = action("deepspeed", _deepspeed, "the settings and the policy of a DeepSpeed configuration")
    files = "DeepSpeed's configuration, or accelerate's, or the Trainer's arguments as JSON"
    deepspeed.add_argument("file", type=existing_file, metavar="DS.JSON", help=files)
    option(deepspeed, "--model M", scenario.MODEL, required=True)
    scenario.add_training(deepspeed)
    for parser in (show, deepspeed):
        option(parser, "--measured", "seconds of real steps of the whole model here, with their spread")


def _read(model: str, training: Training, args: argparse.Namespace) -> Workload:
    if args.measured:
        from tierplan.runtime.measure.units import measure_workload

        return measure_workload(model, training)
    from tierplan.studies.defaults import load_or_trace

    with working("reading the model"):
        return load_or_trace(model, training, exact=args.exact)


def _list(args: argparse.Namespace) -> int:
    from tierplan.sim.workloads.models import SUPPORTED, named_models

    models = named_models()
    from_where = {name: str(c.get("source", "its paper")).rpartition(".co/")[2] for name, c in models.items()}
    rows = [(name, str(c["model_type"]), from_where[name]) for name, c in models.items()]
    forms = (
        f"By closed forms: {', '.join(SUPPORTED)}. Others of `transformers` are traced, but for a few (docs/limits.md)."
    )
    tell(args, models, [*columns([("name", "model_type", "from"), *rows]), "", *wrapped(forms)])
    return 0


def _show(args: argparse.Namespace) -> int:
    workload = _read(args.model, scenario.read_training(args), args)
    units = {u.name: u for u in workload.units}
    if args.unit and args.unit not in units:
        raise WorkloadError(f"there is no unit {args.unit!r} in {workload.name}; it has {', '.join(units)}")
    if unit := units.get(args.unit):
        tell(args, {**workload.record(), "units": [asdict(unit)]}, unit_lines(unit))
    else:
        tell(args, workload.record(), table_lines(workload))
    return 0


def _deepspeed(args: argparse.Namespace) -> int:
    deepspeed = scenario.read_configured(args, args.file, scenario.read_training(args))
    t = deepspeed.training
    workload = _read(args.model, t, args)
    lines = [" ".join([f"{args.file}: policy {deepspeed.policy}", *(f"{k}={v}" for k, v in deepspeed.options.items())])]
    if deepspeed.devices is not None:
        lines.append(f"  on {deepspeed.devices} GPU{'s' * (deepspeed.devices > 1)}, by {deepspeed.why_devices}")
    lines += [f"  {line}" for note in deepspeed.notes for line in wrapped(note, 78)]
    options = "".join(f" --option {k}={v}" for k, v in deepspeed.options.items())
    settings = {name: getattr(t, its) for name, its in OF_TRAINING.items()}
    backend = args.backend or scenario.DEFAULTS.backend
    point = Point(model=args.model, machine="X", **{**settings, "backend": backend, "exact": args.exact})
    words = ["--batch", point.batch, "--accumulation", point.accumulation, *point.words]
    words += [] if deepspeed.devices is None else ["--devices", deepspeed.devices]
    simulate = (
        f"To simulate it: tierplan simulate --policy {deepspeed.policy}{options} --model {args.model} "
        f"{shlex.join(str(word) for word in words)} --machine X"
    )
    record = {**asdict(deepspeed), "workload": workload.record()}
    tell(args, record, [*lines, "", *table_lines(workload), "", simulate])
    return 0


# ---- tables ----


def table_lines(workload: Workload) -> list[str]:
    """Per unit and in total; blocks that are alike share a row."""
    t, n, units = workload.training, workload.num_parameters, workload.units
    largest_bytes = max(workload.states_bytes, sum(u.saved_bytes for u in units))
    is_large, is_measured = largest_bytes > 8 * 2**30, "s" in units[0].forward
    unit_name, scale = ("GiB", 2**30) if is_large else ("MiB", 2**20)
    flop_name, flop_scale = ("TFLOP", 1e12) if is_large else ("GFLOP", 1e9)
    tokens = t.per_device_train_batch_size * t.sequence_length

    def effort(work: Mapping[str, float]) -> float:
        return work["s"] * 1e3 if "s" in work else flops_of(work) / flop_scale

    def row(name: str, among: Sequence[Unit], more: Sequence[str]) -> tuple[str, ...]:
        owned = sum(u.num_parameters for u in among)
        states = sum(t.states_bytes(u) for u in among)
        sizes = (states, sum(u.input_bytes for u in among), sum(u.saved_bytes for u in among))
        efforts = (sum(effort(getattr(u, way)) for u in among) for way in ("forward", "backward"))
        return (
            name, format_count(owned), *(digits(round(size / scale, 3)) for size in sizes), *more, *map(digits, efforts)
        )  # fmt: skip

    frozen = sum(u.num_frozen for u in units)
    held = format_bytes(sum(u.frozen_bytes for u in units))
    base = f", linear layers in {t.base}, decoded in every pass" if t.base else ""
    extra = "spread" if is_measured else "work f/b"
    rows: list[Sequence[str]] = [("unit", "params", "states", "input", "saved", extra, "forward", "backward")]
    for _, neighbours in groupby(units, lambda unit: replace(unit, name="")):
        alike = list(neighbours)
        unit = alike[0]
        work = (digits(round(size / scale, 3)) for size in (unit.forward_work_bytes, unit.backward_work_bytes))
        name = unit.name if len(alike) == 1 else f"{unit.name}..{alike[-1].name} x {len(alike)}"
        rows.append(row(name, alike[:1], [f"{unit.spread * 100:.1f} %" if is_measured else " / ".join(work)]))
    rows.append(row("total", units, [""]))
    lines = [
        f"{workload.name} ({workload.model_type}): {n:,} parameters, {len(workload.blocks)} blocks",
        *wrapped(
            f"micro-batch {t.per_device_train_batch_size} x {t.sequence_length} tokens, {t.precision}"
            f"{' with fp32 master copy' if t.has_master else ''}, {t.optimizer}, "
            f"{attention_text(workload)}, {'compiled blocks, ' * t.torch_compile}"
            f"{'fused loss, ' * (t.loss == 'fused')}{t.backend}"
        ),
        f"parameters {format_bytes(workload.params_bytes)}, states {format_bytes(workload.states_bytes)}",
        *(wrapped(f"{n - frozen:,} are trained; {frozen:,} are frozen, in {held}{base}") if frozen else ()),
        "",
        *columns(rows, right=range(1, 8)),
        "",
        *(f"{u.name} shares the parameters of {u.shares}." for u in units if u.shares),
        *wrapped(
            f"Sizes in {unit_name}, {'times in ms' if is_measured else flop_name}, for one micro-batch; saved: what "
            "autograd keeps beside the unit's input; work: live at the peak beyond that. All blocks share "
            f"{format_bytes(workload.shared_bytes)}."
        ),
    ]
    if not is_measured:
        each = f"{workload.flops / tokens / n:.2f} FLOPs per parameter and token"
        remade = ", without the logits that are made again for a loss in chunks" if workload.remakes_logits else ""
        lines += wrapped(f"Forward and backward: {each}{remade}.")
    return lines


def attention_text(workload: Workload) -> str:
    """Which attention the work is of: a class that is traced may have no fused one, whatever was asked for."""
    asked = workload.training.attention
    is_known = asked == "plain" or "s" in workload.units[0].forward
    if is_known or any("attention_" in kind for unit in workload.units for kind in unit.forward):
        return f"{asked} attention"
    return "attention in matrix products (no fused one for this model)"


def unit_lines(unit: Unit) -> list[str]:
    """The saved tensors of one unit, with what it takes to make each again."""
    rows = [("slot", "size", "dtype", "TFLOP", "GiB moved", "made by", "from")]
    for t in unit.saved:
        moved = t.recompute.get("elementwise_bytes", 0.0) / 2**30
        source = (", ".join(map(str, t.needs)) or "input") + ("" if t.replayable else " (draws random numbers)")
        again = f"{flops_of(t.recompute) / 1e12:.4f}"
        rows.append((str(t.index), format_bytes(t.size_bytes), t.dtype, again, f"{moved:.4f}", t.name, source))
    return [
        f"{unit.name}: {len(unit.saved)} saved tensors, {unit.saved_bytes:,} bytes"
        f"{'; backward also reads the input' if unit.saves_input else ''}",
        *columns(rows, right=(0, 1, 3, 4)),
        "TFLOP and GiB moved: to recompute it from the tensors in the last column.",
    ]
