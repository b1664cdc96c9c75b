"""The best plan as every command says it: as JSON values, and as lines for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from math import isclose
from pathlib import Path
from typing import Any

from tierplan.hwmodels.names import DEVICE
from tierplan.planner.infeasible import InfeasiblePlan, base_note, logits_note
from tierplan.planner.plan import PackPlan, Packs, PagedPlan, Plan, UnitPlan, UnitwisePlan
from tierplan.planner.plan_rules import Divided, Runs
from tierplan.planner.prediction import Prediction
from tierplan.planner.questions.endurance import life_text, written_bytes
from tierplan.planner.results import PlanResult
from tierplan.sim.analysis.explain import NOTHING, Sensitivity, limited_by
from tierplan.sim.output.drawn import Excerpt
from tierplan.sim.output.perfetto import write_perfetto
from tierplan.sim.output.text import alike_rows, columns, digits, format_bytes, format_frac, format_s, in_short, wrapped
from tierplan.sim.output.timeline import timeline
from tierplan.studies.evaluate import BestPlan
from tierplan.studies.study import Point
from tierplan.validation.report.page import write_page

ROOM = 55
"""Columns of an answer's lines beside the longest name in front of them, such as `moved gpu10.p2p.gpu11`."""
FULL_FRAC = 0.95
"""Of a memory, from which on it is full: what is left is no room for anything."""
OF_RESULT = ("lower_bound_s", "gap", "status", "solve_s", "total_s", "milp_gap")
"""What the planner knows of a plan beyond its prediction."""


def impossible_record(error: InfeasiblePlan) -> dict[str, object]:
    """That nothing fits, or was found (`may_fit` is true then, and where the clock ended the search `searched` is
    false), as one JSON object."""
    shortages = [{**asdict(s), "short_bytes": s.short_bytes} for s in error.shortages]
    why = {"searched": not error.not_found, "wears_drives": bool(error.endurance)}
    why |= {"may_fit": error.may_fit or bool(error.not_found)}
    return {"fits": False, "reason": str(error), "shortages": shortages, **why}


def answer_record(best: BestPlan) -> dict[str, object]:
    """The best plan as one JSON object: the figures of any prediction, and what the planner knows beyond them."""
    result, training = best.result, best.workload.training
    unitwise = result.plan if isinstance(result.plan, UnitwisePlan) else None
    return {
        **result.prediction.record(),
        "kind": result.plan.kind,
        **{name: getattr(unitwise, name, None) for name in ("order", "sub_batches")},
        **{name: getattr(training, name) for name in ("sequence_length", "dtype")},
        "numbers_of": _numbers_of(result.prediction),
        "numbers": numbers_texts(result.prediction),
        **{name: getattr(result, name) for name in OF_RESULT},
        **_decisions(result),
        "bound_shares": dict(result.bound_shares),
        "s_per_gb": dict(result.s_per_gb),
        "policies": _policies(result),
        "best_policy": result.best_policy,
        "notes": list(result.notes),
    }


ENDED = {
    "within-gap": ", until one was as quick as any can be", "searched": "", "time-limit": ", until the time limit",
    "interrupted": ", until it was interrupted",
}  # fmt: skip
"""What a search was ended by, where it is not its budget."""


def answer_lines(best: BestPlan) -> list[str]:
    """The best plan for people, in 80 columns."""
    result, p = best.result, best.result.prediction
    assert p.step_s is not None
    capacity = result.steady.capacity_bytes
    held = {tier: peak for tier, peak in result.steady.peak_bytes.items() if peak > 0}
    peaks = alike_rows((tier, f"{format_bytes(peak)} of {format_bytes(capacity[tier])}") for tier, peak in held.items())
    bound = f"no schedule is quicker than {format_s(result.lower_bound_s)}: gap {format_frac(result.gap)}"
    rows = [
        *_head_rows(p, f"{p.tokens_per_s:,.0f}", bound),
        ("decided by", f"{result.plan.policy}, {_shape(result.plan)}, {result.plan.semantics}"),
        *numbers_rows(p),
        *(
            ("uses only", f"{format_frac(part)} of {of} ({kind})")
            for of, kind, part in getattr(result.plan, "parts", ())
            if format_frac(part) != format_frac(1.0)
        ),
        *placements(result),
        *devices_rows(result.plan),
        *(("peak" if k == 0 else "", " ".join(row)) for k, row in enumerate(peaks)),
    ]
    peak, plan = result.steady.peak_bytes[DEVICE], result.plan
    cut = plan.sub_batches * plan.devices // plan.num_batches if isinstance(plan, UnitwisePlan) else 1
    if 2 * peak > capacity[DEVICE] and (note := logits_note(best.workload, peak, parts=cut)):
        rows.append(("of " + DEVICE, note))
    searched = f"{result.num_simulated} plans in {result.total_s:.1f} s{ENDED[result.status]}"
    limits = columns(limit_rows(p.limits), right=(1, 2))
    limits += wrapped(limits_note(p.limits, "`tierplan advise` plans for what is sold"))
    return [*columns([*rows, *_last_rows(p), ("searched", searched)]), "", *limits, "", *_policy_lines(result)]


def _head_rows(p: Prediction, tokens_per_s: str, below: str) -> list[tuple[str, ...]]:
    """What a step takes, its interval and what that rests on, a line below, and what limits."""
    rows: list[tuple[str, ...]] = [("devices", p.devices_note)] if p.devices_note else []
    rows.append(("step time", f"{format_s(p.step_s or 0.0)}, {tokens_per_s} tokens/s"))
    rows += [("", p.step_note)] * bool(p.step_note)
    if p.interval_s is not None:
        low_s, high_s = map(format_s, p.interval_s)
        lines = [f"in 9 of 10 cases between {low_s} and {high_s}", *wrapped(f"rates: {p.basis}", ROOM)]
        rows += [("", line) for line in lines]
    return [*rows, ("", below), ("limited by", limited_text(p.limits))]


def _last_rows(p: Prediction) -> list[tuple[str, ...]]:
    text = "" if p.columns is None else life_text(p.lifetime_s, written_bytes(p.columns))
    rows: list[tuple[str, ...]] = [("drives last", text)] if text else []
    return rows + [("" if k else "to run", line) for k, line in enumerate(wrapped(p.simulated_only, ROOM))]


def question_text(point: Point, row: Mapping[str, Any], dtype: str) -> str:
    """What was asked, with the division into micro-batches that answers it, by the record of the answer."""
    why = f", in {dtype} since this machine has no bf16" if point.dtype == "auto" and dtype != "bf16" else ""
    return step_text(*division_of(row, point.seq), row["devices"], point.seq) + why


def division_of(row: Mapping[str, Any], seq: int) -> tuple[int, int, int]:
    """Of a record: the sequences of a micro-batch, how many there are, and the devices that have so many each."""
    micro_batch, accumulation = int(row["micro_batch"]), int(row["accumulation"])
    return micro_batch, accumulation, row["tokens"] // (micro_batch * accumulation * seq)


def step_text(micro_batch: int, accumulation: int, num_batches: int, devices: int, seq: int) -> str:
    """What a step has, and who has it: `num_batches` of the devices have micro-batches of their own, or all share."""
    whose = f" on each of {num_batches} GPUs" if num_batches > 1 else f", which {devices} GPUs share" * (devices > 1)
    return f"{_batches(accumulation, micro_batch)}{whose}, {seq} token{'s' * (seq != 1)} each"


def batch_text(micro_batch: int, accumulation: int, num_batches: int) -> str:
    """The same in a table."""
    return f"{micro_batch} x {accumulation}" + " per GPU" * (num_batches > 1)


def _batches(accumulation: int, micro_batch: int) -> str:
    sequences = "1 sequence" if micro_batch == 1 else f"{micro_batch} sequences"
    return f"{accumulation} micro-batches of {sequences}" if accumulation > 1 else f"one micro-batch of {sequences}"


def write_timeline(prediction: Prediction, path: str) -> None:
    """Writes what each stream does in one steady step: a picture, or a page to zoom into (`.html`).

    For Perfetto (`.json`), all simulated steps.
    """
    steady = prediction.steady
    assert steady is not None, "what does not run has no timeline"
    suffix = Path(path).suffix.lower()
    if suffix == ".json":
        write_perfetto({"predicted": steady.trace}, path)
        return
    title = f"{prediction.model} on {prediction.where}: one step, {format_s(steady.period_s)}, by {prediction.policy}"
    if suffix == ".html":
        step = {"": Excerpt(steady.trace, *steady.window_s)}
        write_page(path, title, [timeline(step, title, schedule=prediction.schedule, focus=True)])
        return
    from tierplan.sim.output.plots import plot_timeline, save_figure

    figure = plot_timeline(steady.trace, window_s=steady.window_s)
    figure.suptitle("\n".join(wrapped(title, 100, of=0)), fontsize="medium")
    save_figure(figure, path)


def limited_text(limits: Sequence[Sensitivity]) -> str:
    """What limits, in a few words."""
    name = limited_by(limits)
    if name == NOTHING:
        return f"{NOTHING}: twice of any one thing saves less than 1 %, with the plan as it is"
    how = "large" if limits[0].kind == "memory" else "fast"
    return f"{name}: twice as {how}, and a step takes {format_frac(limits[0].gain_frac)} less"


def limits_note(limits: Iterable[Sensitivity], anew: str) -> str:
    """What the figures of what limits leave out: a plan is made for what there is, so the same one has hardly any use
    for more memory, where another may be several times as quick. `anew` says where such are planned."""
    full = [s.name.removesuffix(" memory") for s in limits if s.kind == "memory" and s.busy_frac >= FULL_FRAC]
    filled = f" (it fills {' and '.join(full)}, and has little use for more)" * bool(full)
    return f"With the plan as it is{filled}: one for a better machine may save far more, and {anew}."


def limit_rows(limits: Iterable[Sensitivity]) -> list[tuple[str, ...]]:
    """What limits as rows: how much of each is used, and what it saves if it is twice as good, the plan as it is."""
    rows = [("what limits", "used", "twice as good saves")]
    shown: dict[str, tuple[str, str, str]] = {}
    for s in limits:
        saves = f"{100 * s.gain_frac + 0.0:.1f} %".replace("-0.0", "0.0")
        shown.setdefault(s.shown_name, (s.shown_name, format_frac(s.busy_frac), saves))
    return [*rows, *shown.values()]


def _policies(result: PlanResult) -> dict[str, dict[str, Any]]:
    """The published systems, and what each takes for the plan's work."""
    return {name: {**asdict(p), "same_work_s": result.same_work_s(p)} for name, p in result.policies.items()}


def policy_rows(policies: Mapping[str, Mapping[str, Any]], step_s: float) -> list[tuple[str, ...]]:
    """The published systems that run, quickest first, beside a plan whose step takes `step_s`."""
    rows: list[tuple[str, ...]] = []
    for name, p in sorted(policies.items(), key=lambda item: (item[1]["same_work_s"] or float("inf"), item[0])):
        if seconds := p["same_work_s"]:
            num = p["micro_batch"] * p["accumulation"] * p["num_batches"]
            other = "" if isclose(seconds, p["step_s"]) else f" (steps of {num} sequences)"
            other += "" if p["same_numbers"] else " (other numbers)"
            batch = batch_text(p["micro_batch"], p["accumulation"], p["num_batches"])
            rows.append((name, batch, format_s(seconds), f"{seconds / step_s:.2f} x{other}"))
    return rows


def _policy_lines(result: PlanResult) -> list[str]:
    """The published systems beside the plan, for the same work."""
    policies, reasons = _policies(result), dict[str, list[str]]()
    for name in sorted(policies):
        if policies[name]["step_s"] is None:
            reasons.setdefault(in_short(policies[name]["reason"]), []).append(name)
    missing = [
        (f"{', '.join(names)} {'does' if len(names) == 1 else 'do'} not run: {why}",) for why, names in reasons.items()
    ]
    head = ("system, same work", "batch", "step", "takes")
    return [*columns([head, *policy_rows(policies, result.step_s)], right=(1, 2)), *columns(missing)]


def _shape(plan: Plan) -> str:
    match plan:
        case UnitwisePlan():
            return f"{plan.order} order" + (f", {plan.sub_batches} sub-batches" if plan.sub_batches > 1 else "")
        case PackPlan():
            return "in stages of units" if plan.packs.stays else "in packs of units"
        case PagedPlan():
            return "weights paged for every use"


def _numbers_of(prediction: Prediction) -> dict[str, int]:
    """The plain training whose gradients are summed in the same order: sub-batches are micro-batches of their own."""
    if prediction.schedule is None or (step := prediction.schedule.step) is None:
        return {"micro_batch": prediction.micro_batch, "accumulation": prediction.accumulation}
    training = step.training
    return {"micro_batch": training.per_device_train_batch_size, "accumulation": training.gradient_accumulation_steps}


def numbers_rows(prediction: Prediction) -> list[tuple[str, str]]:
    """What `numbers_texts` say, as rows."""
    lines = (line for text in numbers_texts(prediction) for line in wrapped(text, ROOM))
    return [("" if k else "numbers", line) for k, line in enumerate(lines)]


def numbers_texts(prediction: Prediction) -> list[str]:
    """What sub-batches and operators that devices cut change in the last bits, and late updates and coded activations
    in more."""
    numbers, same_as = [], _numbers_of(prediction)
    if isinstance(prediction.plan, UnitwisePlan) and prediction.plan.sub_batches > 1:
        numbers.append(f"of training in {_batches(same_as['accumulation'], same_as['micro_batch'])}")
    if isinstance(prediction.plan, UnitwisePlan) and prediction.plan.sharing.divided == "tensors":
        numbers.append("of plain training but for last bits: what GPUs cut is summed in another order")
    if other := prediction.other_numbers():
        numbers.append(f"not of plain training: {other}")
    elif prediction.schedule and (step := prediction.schedule.step) and (form := step.training.activation_format):
        numbers.append(f"no activation leaves the device in {form}, so --acts changes nothing")
    return numbers + ([note] if prediction.workload and (note := base_note(prediction.workload)) else [])


def devices_rows(plan: Plan) -> list[tuple[str, str]]:
    """How several devices divide the work."""
    match plan:
        case PackPlan(packs=packs) if packs.stays:
            num, at_home = divmod(len(packs.backward), packs.devices)
            stages = "a stage" if num == 1 else f"{num} stages"
            has = f"{stages} of the chain{', the first one also the last' * at_home}"
            return [
                ("devices", f"each of {packs.devices} has {has}; they share the micro-batches"),
                ("  units", ", ".join(str(b - a) for a, b in packs.backward)),
                ("  blocks", f"{len(packs.kept)} keep their activations, any others are made again"),
                *([("  states", _states_of(packs))] if packs.host_states else []),
            ]
        case PackPlan(packs=packs) if packs.devices > 1:
            how = "go round" if packs.form == "pipeline" else "visit each of"
            return [
                ("devices", f"packs of units {how} {packs.devices} devices, which share the micro-batches"),
                ("  forward", _sizes(packs.forward) or "in the first backward pack"),
                ("  backward", _sizes(packs.backward)),
                ("  states", _states_of(packs)),
            ]
        case UnitwisePlan(devices=devices, sharing=sharing) if devices > 1:
            return [("devices", f"{devices}, {DIVIDED[sharing.divided]}")]
        case _:
            return []


def _sizes(runs: Runs) -> str:
    """How many packs in a row have how many units."""
    alike = [(len(list(packs)), size) for size, packs in groupby(b - a for a, b in runs)]
    return ", ".join(f"{num} of {size}" + f" unit{'s' * (size != 1)}" * (k == 0) for k, (num, size) in enumerate(alike))


def _states_of(packs: Packs) -> str:
    num, here = len(packs.host_states) if packs.stays else packs.backward[-1][1], len(packs.updates_here)
    who = ", ".join(f"{n} updated {where}" for n, where in ((here, "on a device"), (num - here, "on the host")) if n)
    return f"of {num} unit{'s' * (num != 1)} in host memory: {who}"


_OWN = "each with micro-batches of its own and"
DIVIDED: Mapping[Divided, str] = {
    "tensors": "which divide every operator and work on the same micro-batches",
    "nothing": f"{_OWN} all of the model",
    "states": f"{_OWN} a part of the states",
    "gradients": f"{_OWN} a part of gradients and states",
    "all": f"{_OWN} a part of parameters, gradients and states",
}


def placements(result: PlanResult) -> list[tuple[str, str]]:
    """How many units have what where, which are updated elsewhere than there, and what happens to activations."""
    if not isinstance(result.plan, UnitwisePlan):
        return []
    places = Counter[str]()
    for unit in result.plan.units:
        in_host = f", {format_frac(unit.host_frac)} of them host" if unit.host_shards else ""
        frozen = f", frozen {unit.frozen}" if unit.frozen not in (None, unit.params) else ""
        update = ", updated on the device" * (unit.updated == "brought") + " (late)" * unit.late_update
        tied = ", tied gradients host" * (unit.tied_grads == "host")
        places[f"params {unit.params}{frozen}, states {unit.states}{in_host}{update}{tied}"] += 1
    rows = [("units" if k == 0 else "", f"{count} x {name}") for k, (name, count) in enumerate(places.most_common())]
    acts = _activations(result)
    kept = ", ".join(f"{format_frac(part)} {name}" for name, part in acts.items() if part >= 0.005)
    return [*rows, ("activations", kept)]


def _activations(result: PlanResult) -> dict[str, float]:
    """Of a unit-wise plan: the part of all activations by what happens to them."""
    acts = Counter[str]()
    assert result.schedule.step is not None, "a unit-wise schedule says what it trains"
    for tensor in (tensor for spec in result.schedule.step.units for tensor in spec.saved):
        acts[tensor.action] += tensor.size_bytes
    total = acts.total() or 1
    return {name: size / total for name, size in acts.items()}


def _decisions(result: PlanResult) -> dict[str, object]:
    """What the lines say of units, activations, packs and devices, as JSON values; null where the plan's kind has
    none."""
    plan = result.plan
    unitwise, packs = (plan if isinstance(plan, UnitwisePlan) else None), getattr(plan, "packs", None)
    units = [_decided(unit) for unit in unitwise.units] if unitwise else []
    of_packs = ("form", "forward", "backward", "kept", "host_states", "updates_here")
    return {
        "units": [{"num": len(list(same)), **unit} for unit, same in groupby(units)] if unitwise else None,
        "activations": _activations(result) if unitwise else None,
        "packs": packs and {name: getattr(packs, name) for name in of_packs},
        "divided": unitwise.sharing.divided if unitwise and unitwise.devices > 1 else None,
        "uses_only": [list(part) for part in unitwise.parts] if unitwise else None,
    }


def _decided(unit: UnitPlan) -> dict[str, object]:
    """Where a unit has what, and who updates it."""
    names = ("params", "frozen", "states", "tied_grads", "host_frac", "late_update")
    where = "host" if unit.updated == "host" else "device"
    return {**{name: getattr(unit, name) for name in names}, "frozen": unit.frozen or unit.params, "updated": where}


def prediction_text(p: Prediction) -> str:
    """The prediction of a policy for people."""
    head = f"{p.policy}: {p.model} on {p.where}"
    if p.step_s is None or p.steady is None or p.columns is None:
        heads = wrapped(f"{head} does not {'fit' if p.shortage else 'run'}")
        return "\n".join([*heads, *(f"  {line}" for line in wrapped(in_short(p.why_not), 78))])
    phases = asdict(p.phases) if p.phases else {}
    spent = ", ".join(f"{name.removesuffix('_s')} {format_s(value)}" for name, value in phases.items())
    capacity = p.steady.capacity_bytes
    num_batches = 1 if p.plan is None else p.plan.num_batches
    seq = p.tokens // (p.micro_batch * p.accumulation * num_batches)
    has = wrapped(step_text(p.micro_batch, p.accumulation, num_batches, p.devices, seq), ROOM)
    speeds = [f"{digits(p.flops / p.step_s / 1e12)} TFLOP/s"] if p.flops else []  # not where seconds are known alone
    if p.tflops_8nd is not None:
        active = "active " * (p.num_active != p.num_parameters)
        speeds.append(f"{digits(p.tflops_8nd)} TFLOP/s as papers count: 8 FLOPs per {active}parameter and token")
    rows = [
        *_head_rows(p, f"{p.tokens_per_s:,.1f}", spent),
        *(("" if k else "a step has", line) for k, line in enumerate(has)),
        *([("of the model", "; ".join(speeds))] if speeds else []),
        ("semantics", p.plan.semantics if p.plan else ""),
        *numbers_rows(p),
        *(devices_rows(p.plan) if p.plan else []),
        *alike_rows(
            (f"peak {tier}", f"{format_bytes(peak)} of {format_bytes(capacity[tier])}")
            for tier, peak in p.steady.peak_bytes.items()
            if peak
        ),
        *alike_rows((f"moved {stream}", format_bytes(size)) for stream, size in p.columns.bytes_moved().items()),
        *_last_rows(p),
    ]
    limits = columns(limit_rows(p.limits), right=(1, 2))
    limits += wrapped(limits_note(p.limits, "`tierplan advise` plans for what is sold"))
    return "\n".join([*wrapped(head), *columns(rows), "", *limits])
