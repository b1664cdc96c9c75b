"""What each part of the planner brings, over the grid: step times and planning times with and without it.

    python -m benchmarks.planner.ablation benchmarks/results/ablation.jsonl      # runs what the file lacks
    python -m benchmarks.planner.ablation benchmarks/results/ablation.jsonl --table docs/planner_grid.md

    nothing moved   everything stays on the device
    best policy     the quickest published system
    greedy          from there, what frees memory at least cost per byte is moved until the plan fits
    rounded         the planning program, rounded, with the first margins that fit: no search
    planner         all of it: from `benchmarks/results/grid.jsonl`, which `benchmarks.planner.grid` writes

Seconds of planning are of computing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

from benchmarks.planner.grid import key, question, scenarios
from benchmarks.records import Question, Record, arguments, ask_or_write, read, versions_of
from tierplan.hwmodels.machine import Machine, MachineError
from tierplan.planner.milp.amounts import Problem, problem
from tierplan.planner.milp.bounds import lower_bound
from tierplan.planner.milp.program import Solver
from tierplan.planner.plan import UnitPlan, UnitwisePlan, plain_semantics
from tierplan.planner.plan_rules import Order, PlanError
from tierplan.planner.policies import POLICIES
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.candidates import PlanSimulator
from tierplan.planner.search.from_program import ProgramPlans
from tierplan.planner.search.incumbents import Incumbents
from tierplan.planner.search.local.moves import spread
from tierplan.planner.search.local.shifts import StreamPrices, applied, reliefs
from tierplan.sim.output.text import markdown_table
from tierplan.sim.workloads.workload import Workload, WorkloadError

GRID = Path(__file__).parents[1] / "results" / "grid.jsonl"
FIGURE = Path(__file__).parents[2] / "docs" / "figures" / "ablation.png"
PART = "ablation"
MOST_MOVES = 300
"""Moves after which the greedy rule is taken to go nowhere."""
AS_GOOD = 1.005
"""Steps that differ by less are equally good."""


def nothing_moved(workload: Workload, machine: Machine) -> float | None:
    return _simulator(workload, machine)(_all_on_device(workload)).step_s


def best_policy(workload: Workload, machine: Machine) -> float | None:
    simulate_plan = _simulator(workload, machine)
    steps_s = []
    for decide in POLICIES.values():
        try:
            candidate = simulate_plan(decide(workload, machine, {}))
        except (PlanError, MachineError, WorkloadError):
            continue
        if candidate.step_s is not None and candidate.plan.semantics != "delayed-1":
            steps_s.append(candidate.step_s)
    return min(steps_s, default=None)


def greedy(workload: Workload, machine: Machine) -> float | None:
    """From everything on the device, the least costly bytes leave the tier that is short, until the plan fits."""
    simulate_plan = _simulator(workload, machine)
    p = problem(workload, machine, semantics=plain_semantics(workload.training))
    prices = StreamPrices(p, dict.fromkeys([*(s.name for s in machine.streams), *p.loads], 1.0))
    plan = _all_on_device(workload)
    for _ in range(MOST_MOVES):
        tried = simulate_plan(plan)
        if tried.fits:
            return tried.step_s
        moved = _relieved(p, plan, tried.short_tier, -tried.room_gb.get(tried.short_tier, 0.0), prices)
        if moved is None:
            return None
        plan = moved
    return None


def _relieved(p: Problem, plan: UnitwisePlan, kind: str, short_gb: float, prices: StreamPrices) -> UnitwisePlan | None:
    """The plan with less in a tier; nothing goes back to the device."""
    for relief in reliefs(p, plan, kind, prices) if kind else ():
        if kind == "device" or relief.frees_gb.get("device", 0.0) >= 0:
            units = relief.units
            num = min(len(units), max(1, ceil(short_gb / relief.frees_gb[kind])))
            return applied(plan, relief, [units[i] for i in spread(len(units))[:num]])
    return None


def rounded(workload: Workload, machine: Machine) -> float | None:
    simulate_plan = _simulator(workload, machine)
    solver, incumbents = Solver(), Incumbents()
    programs = ProgramPlans(solver, simulate_plan, incumbents)
    shapes: list[tuple[Order, int]] = [("horizontal", 1)]
    shapes += [("vertical", n) for n in (2, 4, 8) if workload.training.per_device_train_batch_size % n == 0]
    for order, num in shapes:
        semantics = plain_semantics(workload.training)
        p = problem(workload, machine, semantics=semantics, order=order, sub_batches=num)
        bound = lower_bound(p, solver=solver)
        for _ in programs.tried(p, bound, goal_s=0.0) if bound.feasible else ():
            if p.shape in incumbents.by_shape:
                break
    return None if incumbents.best is None else incumbents.best.step_s


METHODS: Mapping[str, Callable[[Workload, Machine], float | None]] = {
    "nothing moved": nothing_moved,
    "best policy": best_policy,
    "greedy": greedy,
    "rounded": rounded,
}


def _simulator(workload: Workload, machine: Machine) -> PlanSimulator:
    return PlanSimulator(workload, machine, Budget(1e9))


def _all_on_device(workload: Workload) -> UnitwisePlan:
    units = (UnitPlan(),) * len(workload.units)
    return UnitwisePlan(policy="all", units=units, semantics=plain_semantics(workload.training))


def answer(*of: Any) -> Record:
    workload, machine = question(*of)
    record = {}
    for method, found in METHODS.items():
        began = time.process_time()
        record[method] = {"step_s": found(workload, machine), "planning_s": time.process_time() - began}
    return record


def questions(_: object) -> Iterator[Question]:
    for label, *of, model, batch, length in scenarios():
        yield {"machine": label, "model": model, "batch": batch}, partial(answer, *of, model, batch, length)


def joined(records: list[Record], grid: list[Record]) -> list[Record]:
    """Scenarios where something fits, with what the planner found and the bound."""
    planned = {key(r): r for r in grid if r["fits"]}
    return [
        r
        | {
            "planner": {"step_s": planned[key(r)]["step_s"], "planning_s": planned[key(r)]["computed_s"]},
            "bound_s": planned[key(r)]["lower_bound_s"],
        }
        for r in records
        if key(r) in planned
    ]


def table(records: list[Record]) -> str:
    names = [*METHODS, "planner"]
    head = ("", "fits", "over the planner's: median", "largest", "as good", "seconds of planning: median", "largest")
    rows = []
    for name in names:
        ratios = [r[name]["step_s"] / r["planner"]["step_s"] for r in records if r[name]["step_s"]]
        seconds = [r[name]["planning_s"] for r in records]
        over = [f"{(of(ratios) - 1) * 100:.1f} %" for of in (statistics.median, max)]
        as_good = sum(ratio <= AS_GOOD for ratio in ratios)
        took = [f"{of(seconds):.2f}" for of in (statistics.median, max)]
        rows.append((name, str(len(ratios)), *over, str(as_good), *took))
    lines = [
        f"{len(records)} scenarios in which something fits. `over the planner's`: how much longer its step is, where "
        "it fits.",
        "",
        *markdown_table(head, rows, right=range(1, 7)),
    ]
    alike = [r for r in records if (r["greedy"]["step_s"] or 1e9) <= AS_GOOD * r["planner"]["step_s"]]
    if alike:
        theirs, ours = ([r[name]["planning_s"] for r in alike] for name in ("greedy", "planner"))
        lines += [
            "",
            f"Where greedy is as good, it plans for {statistics.median(theirs):.2f} s (median), the planner for "
            f"{statistics.median(ours):.2f} s.",
        ]
    for left, right in (("greedy", "best policy"), ("rounded", "greedy"), ("rounded", "best policy")):
        both = [r for r in records if r[left]["step_s"] and r[right]["step_s"]]
        losses = sum(r[left]["step_s"] > AS_GOOD * r[right]["step_s"] for r in both)
        lines += ["", f"`{left}` is slower than `{right}` in {losses} of the {len(both)} where both fit."]
    steps = [
        (
            r["machine"], r["model"], str(r["batch"]),
            *(f"{r[name]['step_s']:.2f}" if r[name]["step_s"] else "" for name in names), f"{r['bound_s']:.2f}",
        )
        for r in records
    ]  # fmt: skip
    of_steps = ("machine", "model", "batch", *names, "bound")
    lines += ["", "Steps in seconds:", "", *markdown_table(of_steps, steps, right=range(2, len(of_steps)))]
    lines += ["", f"Version {versions_of(records)}."]
    return "\n".join(lines)


def plot(records: list[Record], path: Path) -> None:
    """Each scenario's steps over its bound, scenarios in the order of the planner's."""
    from matplotlib.figure import Figure

    ranked = sorted(records, key=lambda r: r["planner"]["step_s"] / r["bound_s"])
    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, mark in zip([*METHODS, "planner"], "sv^x.", strict=True):
        points = [(i, r[name]["step_s"] / r["bound_s"]) for i, r in enumerate(ranked) if r[name]["step_s"]]
        axes.plot(*zip(*points, strict=True), mark, label=name, markersize=5)
    axes.set(yscale="log", ylabel="step over lower bound", xlabel="scenarios of the grid, by the planner's gap")
    axes.set_yticks([1, 1.5, 2, 3, 5, 10], ["1", "1.5", "2", "3", "5", "10"])
    axes.minorticks_off()
    axes.legend()
    figure.savefig(path, dpi=120)


def table_beside_plot(records: list[Record]) -> str:
    compared = joined(records, read(GRID))
    plot(compared, FIGURE)
    return table(compared)


if __name__ == "__main__":
    shown = "{machine}, {model}, batch {batch}".format_map
    ask_or_write(arguments(__doc__), PART, questions, shown, table_beside_plot)
