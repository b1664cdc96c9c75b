"""The outer search: micro-batch size and accumulation for a given number of sequences per step.

Each division of the sequences gets the search that it gets when asked by itself, so none of them alone ends better than
all: the most promising first, and none any longer once all that is left of it has a bound above what is found. The most
promising has the best bound, and of those that are as good the largest micro-batches, since the planner also cuts these
into the smaller ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import inf, isqrt, log

from tierplan.hwmodels.machine import Machine
from tierplan.planner.infeasible import InfeasiblePlan
from tierplan.planner.milp.amounts import problem
from tierplan.planner.milp.bounds import compute_s, lower_bound
from tierplan.planner.plan import plain_semantics
from tierplan.planner.plan_rules import PlanError
from tierplan.planner.planning import plan
from tierplan.planner.questions.endurance import allowed_bytes_per_s
from tierplan.planner.results import PlanResult
from tierplan.planner.search.incumbents import Batches
from tierplan.sim.step import Semantics
from tierplan.sim.workloads.workload import MAX_SEQUENCES, Workload

SUB_BATCHES = (1, 2, 4, 8)
"""Into which the planner cuts a micro-batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The best division of a step's sequences into micro-batches."""

    workload: Workload
    result: PlanResult
    bounds_s: Mapping[int, float] = field(default_factory=dict)
    """Lower bound by micro-batch size, where all micro-batches go through a block before the next; infinite where that
    cannot fit."""
    planned_s: Mapping[int, float] = field(default_factory=dict)
    """Step time by micro-batch size, for those that were planned."""


def plan_sequences(
    make: Callable[[int, int], Workload],
    machine: Machine,
    *,
    sequences: int,
    semantics: Semantics | None = None,
    time_limit_s: float | None = None,
    seed: int = 0,
    drive_lifetime_years: float | None = None,
    only_one: bool = False,
) -> Division:
    """The best plan for `sequences` per optimizer step; `make(batch, accumulation)` gives the workload.

    On several devices, with micro-batches that they share, or with as many for each; `sequences` are those of all.
    `time_limit_s` is of each division. With `only_one`, the most promising one that fits is the answer.
    Raises `InfeasiblePlan` when no division fits, that of single sequences included; `PlanError` for no sequences.
    """
    if sequences < 1:
        raise PlanError(f"a step of {sequences} sequences trains nothing; ask for 1 or more")
    if sequences > MAX_SEQUENCES:
        raise PlanError(f"a step of {sequences:,} sequences is no step; ask for {MAX_SEQUENCES:,} or fewer")
    write_limit = float("inf")
    if drive_lifetime_years is not None:
        write_limit = allowed_bytes_per_s(machine, drive_lifetime_years)
    planned_for = partial(
        plan,
        machine=machine,
        semantics=semantics,
        time_limit_s=time_limit_s,
        seed=seed,
        drive_lifetime_years=drive_lifetime_years,
    )
    num = machine.num_devices
    workloads = {batch: make(batch, sequences // batch) for batch in divisors(sequences)}
    if num > 1:
        chosen = semantics or plain_semantics(workloads[1].training)
        bounds = {b: compute_s(problem(w, machine, semantics=chosen)) / num for b, w in workloads.items()}
    else:
        bounds = _bounds_s(workloads, machine, semantics, write_limit)

    def rank(batch: int) -> tuple[float, float]:
        """Best bound first, to three digits, and larger micro-batches; on several devices, two for each first."""
        return (float(f"{bounds[batch]:.3g}"), -batch) if num == 1 else (0.0, abs(log(sequences / batch / (2 * num))))

    best: tuple[Workload, PlanResult] | None = None
    planned: dict[int, float] = {}
    for batch in sorted(bounds, key=rank):
        if best is not None and (only_one or best[1].status == "interrupted"):
            break
        accumulation = sequences // batch
        kinds: list[tuple[Workload, Batches | None]] = [(workloads[batch], "shared" if num > 1 else None)]
        if num > 1 and accumulation % num == 0:
            kinds.insert(0, (make(batch, accumulation // num), "each"))
        for workload, batches in kinds:
            try:
                result = planned_for(workload, batches=batches, beat_s=inf if best is None else best[1].step_s)
            except InfeasiblePlan:
                continue
            planned[batch] = min(result.step_s, planned.get(batch, result.step_s))
            if best is None or result.step_s < best[1].step_s:
                best = workload, result
    if best is None:
        planned_for(workloads[1])  # says what is missing
        raise AssertionError("single sequences fit, but no division did")
    return Division(workload=best[0], result=best[1], bounds_s=bounds, planned_s=planned)


def divisors(number: int) -> list[int]:
    """All whole numbers that divide it, rising."""
    small = [k for k in range(1, isqrt(number) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})


def _bounds_s(
    workloads: Mapping[int, Workload],
    machine: Machine,
    semantics: Semantics | None,
    write_limit_bytes_per_s: float,
) -> dict[int, float]:
    """By micro-batch size: the least bound over the parts that the planner cuts it into, on one device."""

    vertical = {}
    for batch, workload in workloads.items():
        asked = problem(
            workload,
            machine,
            semantics=semantics or plain_semantics(workload.training),
            order="vertical",
            write_limit_bytes_per_s=write_limit_bytes_per_s,
        )
        vertical[batch] = lower_bound(asked).step_s
    return {
        batch: min(vertical[batch // n] for n in SUB_BATCHES if batch % n == 0 and batch // n in vertical)
        for batch in workloads
    }
