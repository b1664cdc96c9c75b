"""Finds the best plan for a model on a machine, and says how much better any other could be.

Compares with every published system's policy, and writes plan and schedule to one file that `tierplan run` executes.

Examples:

    tierplan plan --model gpt-13b --machine fuyou-4090 --batch 32
    tierplan plan --model gpt-13b --machine desktop-4090 --batch 8 -o plan.json --json
    tierplan plan --model gpt-13b --machine fuyou-4090 --sequences 32 --explain
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from tierplan.commands.options import scenario
from tierplan.commands.options.arguments import PICTURES, finite, new_file, option, whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tierplan.planner.plan import Plan
    from tierplan.planner.questions.what_if import Worth
    from tierplan.planner.results import PlanResult
    from tierplan.sim.workloads.workload import Workload

GB = 1e9
EXIT_INFEASIBLE = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    scenario.add_arguments(parser)
    option(parser, "-o --output FILE", "write plan and schedule, for `tierplan run`", new_file())
    option(parser, "--json", "print one JSON object")
    option(parser, "--time-limit S", "seconds that each search may compute", finite(above=0), 8.0)
    option(parser, "--seed N", "of the search's random changes", whole(0), 0)
    option(
        parser, "--sequences N", "sequences per optimizer step, of all devices: micro-batch size and accumulation are "
        "searched too (--batch and --accumulation do not apply then)", whole(1),
    )  # fmt: skip
    option(
        parser, "--drive-lifetime-years Y", "the drives are to last this long, training without pause, by their rated "
        "endurance (nvme.endurance): plans whose steps write more are left out", finite(above=0),
    )  # fmt: skip
    option(parser, "--explain", "also say what more memory, drives or link would be worth (plans again)")
    option(parser, "--frontier FILE.png", "plot the step time against device memory (plans again)", new_file(*PICTURES))


def run(args: argparse.Namespace) -> int:
    import json

    from tierplan.planner.infeasible import InfeasiblePlan
    from tierplan.planner.planning import plan

    machine = scenario.read_machine(args)
    workload = scenario.read_workload(args, machine)
    try:
        if args.sequences:
            from tierplan.planner.search.batches import plan_sequences

            chosen = plan_sequences(
                lambda batch, accumulation: _with_batch(args, batch, accumulation),
                machine,
                sequences=args.sequences,
                semantics=args.semantics,
                time_limit_s=args.time_limit,
                seed=args.seed,
                drive_lifetime_years=args.drive_lifetime_years,
            )
            result, workload = chosen.result, chosen.workload
        else:
            result = plan(
                workload,
                machine,
                semantics=args.semantics,
                time_limit_s=args.time_limit,
                seed=args.seed,
                drive_lifetime_years=args.drive_lifetime_years,
            )
    except InfeasiblePlan as error:
        if not args.json:
            raise
        print(json.dumps({"fits": False, "reason": str(error), "shortages": _shortages(error)}, indent=2))
        return EXIT_INFEASIBLE
    worths = _worths(args, workload) if args.explain else None
    if args.output:
        from tierplan.planner.plan_file import save_plan

        save_plan(result, workload, machine, args.output)
    if args.frontier:
        from tierplan.planner.questions.what_if import frontier, plot_frontier

        points = frontier(
            workload, machine, time_limit_s=args.time_limit, drive_lifetime_years=args.drive_lifetime_years
        )
        plot_frontier(points, args.frontier, workload, machine)
    if args.json:
        print(json.dumps(record(result, workload, worths), indent=2))
    else:
        print(text(result, workload, worths))
        for what, where in (("plan", args.output), ("picture", args.frontier)):
            if where:
                print(f"{what}: {where}")
        if machine.nameplate:
            print(f"from data sheets rather than measured: {', '.join(machine.nameplate)}")
    return 0


def _with_batch(args: argparse.Namespace, batch: int, accumulation: int) -> Workload:
    changed = argparse.Namespace(**{**vars(args), "batch": batch, "accumulation": accumulation})
    return scenario.read_workload(changed, scenario.read_machine(args))


def _worths(args: argparse.Namespace, workload: Workload) -> Sequence[Worth]:
    from tierplan.hwmodels import load_machine
    from tierplan.planner.questions.what_if import worths

    def changed(overrides: Sequence[str]) -> object:
        return load_machine(args.machine, [*args.overrides, *overrides])

    return worths(
        workload,
        changed,  # type: ignore[arg-type]
        time_limit_s=args.time_limit,
        semantics=args.semantics,
        drive_lifetime_years=args.drive_lifetime_years,
    )


def _shortages(error: object) -> list[dict[str, object]]:
    return [
        {
            "tier": s.tier,
            "needed_bytes": s.needed_bytes,
            "capacity_bytes": s.capacity_bytes,
            "short_bytes": s.short_bytes,
        }
        for s in error.shortages  # type: ignore[attr-defined]
    ]


def record(result: PlanResult, workload: Workload, worths: Sequence[Worth] | None = None) -> dict[str, object]:
    """The result as one JSON object."""
    from tierplan.planner.plan import UnitwisePlan

    training = workload.training
    unitwise = result.plan if isinstance(result.plan, UnitwisePlan) else None
    fields: dict[str, object] = {
        "fits": True,
        "policy": result.plan.policy,
        "kind": result.plan.kind,
        "order": unitwise.order if unitwise else None,
        "sub_batches": unitwise.sub_batches if unitwise else None,
        "micro_batch": training.per_device_train_batch_size,
        "accumulation": training.gradient_accumulation_steps,
        "semantics": result.plan.semantics,
        "numbers_of": _numbers_of(result, workload),
        "step_s": result.step_s,
        "devices": result.plan.devices,
        "tokens_per_s": _tokens_per_s(result, workload),
        "lower_bound_s": result.lower_bound_s,
        "gap": result.gap,
        "status": result.status,
        "solve_s": result.solve_s,
        "total_s": result.total_s,
        "milp_gap": result.milp_gap,
        "drive_lifetime_s": result.drive_lifetime_s,
        "bound_by": dict(result.bound_by),
        "s_per_gb": dict(result.s_per_gb),
        "peak_bytes": dict(result.steady.trace.peak_bytes),
        "policies": {
            name: {"step_s": p.step_s, "reason": p.reason, "same_numbers": p.same_numbers}
            for name, p in result.policies.items()
        },
        "best_policy": result.best_policy,
        "notes": list(result.notes),
    }
    if worths is not None:
        fields["worth"] = [{"change": w.change, "step_s": w.step_s, "saves_s": w.saves_s} for w in worths]
    return fields


def text(result: PlanResult, workload: Workload, worths: Sequence[Worth] | None = None) -> str:
    """The result for people."""
    from tierplan.sim.output.text import in_short

    training, plan = workload.training, result.plan
    lines = [
        f"{workload.name}, {training.per_device_train_batch_size} sequences of {training.sequence_length} tokens"
        + (f" x {training.gradient_accumulation_steps}" if training.gradient_accumulation_steps > 1 else ""),
        f"  step time      {result.step_s:10.3f} s        {_tokens_per_s(result, workload):.1f} tokens/s",
        f"  no schedule is quicker than {result.lower_bound_s:.3f} s: gap {100 * result.gap:.1f} %",
        f"  bound by       {_shares(result.bound_by)}",
        f"  decided by     {plan.policy}, {_shape(plan)}, {plan.semantics}",
        *_numbers(result, workload),
        *_placements(result),
        *_on_devices(result),
        f"  searched       {result.num_simulated} plans in {result.total_s:.1f} s, {result.solve_s:.1f} s of it in the "
        f"solver ({result.status})",
    ]
    for tier, peak in result.steady.trace.peak_bytes.items():
        capacity = result.steady.trace.capacity_bytes[tier]
        lines.append(f"  peak {tier:10s}{peak / GB:10.2f} GB of {capacity / GB:.2f} GB")
    lines.append(f"  published systems on the same model and machine{', for the same work' * (plan.num_batches > 1)}:")
    for name, policy in sorted(result.policies.items(), key=lambda item: (item[1].step_s or float("inf"), item[0])):
        if policy.step_s is None:
            lines.append(f"    {name:16s}  does not run: {in_short(policy.reason, lambda size: f'{size / GB:.1f} GB')}")
        else:
            other = "" if policy.same_numbers else "  (other numbers: delayed updates)"
            same_work_s = policy.step_s * plan.num_batches / policy.num_batches
            lines.append(f"    {name:16s}{same_work_s:10.3f} s   {same_work_s / result.step_s:6.2f} x{other}")
    if worths is not None:
        lines.append("  what a change would save per step (planned again):")
        lines += [f"    {w.change:34s}{w.saves_s:9.3f} s   {100 * w.saves_s / result.step_s:5.1f} %" for w in worths]
    return "\n".join(lines)


def _tokens_per_s(result: PlanResult, workload: Workload) -> float:
    """Of all devices."""
    return workload.training.tokens_per_step * result.plan.num_batches / result.step_s


def _shape(plan: Plan) -> str:
    from tierplan.planner.plan import PackPlan, PagedPlan, UnitwisePlan

    match plan:
        case UnitwisePlan():
            return f"{plan.order} order" + (f", {plan.sub_batches} sub-batches" if plan.sub_batches > 1 else "")
        case PackPlan():
            return "in packs of units"
        case PagedPlan():
            return "weights paged for every use"


def _numbers_of(result: PlanResult, workload: Workload) -> dict[str, int]:
    """The plain training whose gradients are summed in the same order: sub-batches are micro-batches of their own."""
    training = result.schedule.step.training if result.schedule.step else workload.training
    return {
        "micro_batch": training.per_device_train_batch_size,
        "accumulation": training.gradient_accumulation_steps,
    }


def _numbers(result: PlanResult, workload: Workload) -> list[str]:
    """What sub-batches change in the last bits."""
    from tierplan.planner.plan import UnitwisePlan

    if not isinstance(result.plan, UnitwisePlan) or result.plan.sub_batches == 1:
        return []
    same_as = _numbers_of(result, workload)
    return [
        f"  numbers        of training in {same_as['accumulation']} micro-batches of {same_as['micro_batch']} sequences"
    ]


def _on_devices(result: PlanResult) -> list[str]:
    """How several devices divide the work."""
    from tierplan.planner.plan import PackPlan, UnitwisePlan

    match result.plan:
        case PackPlan(packs=packs) if packs.devices > 1:
            how = "go round" if packs.form == "pipeline" else "visit each of"
            sizes = [", ".join(str(b - a) for a, b in runs) for runs in (packs.forward, packs.backward)]
            return [
                f"  devices        packs of units {how} {packs.devices} devices, which share the micro-batches",
                f"    forward      {sizes[0] or 'in the first backward pack'}",
                f"    backward     {sizes[1]}",
            ]
        case UnitwisePlan(devices=devices) if devices > 1:
            return [f"  devices        {devices}, each with micro-batches of its own and a part of the states"]
        case _:
            return []


def _shares(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares.items() if share >= 0.01) or "nothing"


def _placements(result: PlanResult) -> list[str]:
    """How many units have what where, and what happens to activations, in two lines."""
    from tierplan.planner.plan import UnitwisePlan

    if not isinstance(result.plan, UnitwisePlan):
        return []
    places: dict[str, int] = {}
    acts: dict[str, int] = {}
    for unit in result.plan.units:
        name = f"params {unit.params}, states {unit.states}" + (" (late)" if unit.late_update else "")
        places[name] = places.get(name, 0) + 1
    assert result.schedule.step is not None, "a unit-wise schedule says what it trains"
    for spec in result.schedule.step.units:
        for tensor in spec.saved:
            acts[tensor.action] = acts.get(tensor.action, 0) + tensor.size_bytes
    total = sum(acts.values()) or 1
    return [
        "  units          "
        + "; ".join(f"{count} x {name}" for name, count in sorted(places.items(), key=lambda i: -i[1])),
        "  activations    " + ", ".join(f"{100 * size / total:.0f} % {name}" for name, size in acts.items() if size),
    ]
