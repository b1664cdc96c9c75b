"""Lower bounds on the step time that no schedule can beat, and what an impossible problem lacks.

The bound is the optimum of the fluid program with no margins and no integers, where also small tensors may move, inputs
may be made again, and gradients of a vertical turn need no room to be added up on the device (`Margins.relaxed`): they
may leave it one by one. Cutting any schedule of the language at the ends of its compute ops
gives a point of that program, whatever it keeps, drops or moves, so nothing is quicker: with these costs per op, this
machine's limits, and the micro-batches in one of the two orders."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf

import numpy as np

from tierplan.hwmodels.names import COMPUTE
from tierplan.planner.milp.amounts import Problem, runs_of
from tierplan.planner.milp.model import Margins, Model, build, with_margins
from tierplan.planner.milp.program import Program, Solution, Solver
from tierplan.planner.milp.rates import GB, seconds_alone

MEMORY_FAMILIES: Mapping[str, str] = {"device memory": "device", "host memory": "host", "NVMe capacity": "nvme"}

WORTH_BRINGING = 1.01
"""How much longer the bound has to be without states that come to the device for updates, for plans to have any."""
COARSE_FRAC = 0.2
"""Or the share of it that one unit's update takes on the host: bounds have that in small amounts, plans have not."""
FEW_UNITS = 8
"""Short chains, of so many, have them anyway: there a bound says little, and every move of one unit is tried."""
MANY_WINDOWS = 12
"""Per pass over the units, beyond which three are asked first: in long chains of alike units they bound the step nearly
as well (0.3 % lower at most, where this was measured), in a tenth of the time."""
HOPELESS = 20.0
"""Times the bound, beyond which a step is no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """The step time that no schedule can beat, and what it consists of."""

    step_s: float
    shares: Mapping[str, float]
    """How much of the bound each stream or shared limit explains, largest first; adds up to 1."""
    s_per_gb: Mapping[str, float]
    """By tier: seconds that one more GB would take off the bound, at the margin."""
    feasible: bool = True
    proven: bool = True
    """False when the solver gave no optimum: then `step_s` is the sum of forward and backward."""
    solution: Solution | None = field(default=None, repr=False, compare=False)
    model: Model | None = field(default=None, repr=False, compare=False)
    """Of which this is the optimum: with margins, the one that plans are made from."""
    plain: Bound | None = field(default=None, repr=False, compare=False)
    """Without states that come to the device for their updates, where that is longer."""
    returning: Bound | None = field(default=None, repr=False, compare=False)
    """With gradients that leave the device and come back; `model`, `plain` and `kept_s` are without."""
    kept_s: float = 0.0
    """The step that no plan beats without them."""

    @property
    def needs_states_here(self) -> bool:
        """Whether no plan is any good unless states come to the device."""
        return self.plain is not None and self.plain.step_s > HOPELESS * self.step_s

    @property
    def searched_s(self) -> float:
        """What a search of the plans of `model` goes by."""
        return self.step_s if self.returning is None else self.kept_s

    @property
    def has_plans(self) -> bool:
        """Whether the program that plans are made from has a solution, as it is: it allows less than a bound's."""
        if not self.feasible or self.model is None:
            return False
        return Solver().solve(with_margins(self.model, Margins()).program).usable


IMPOSSIBLE = Bound(step_s=inf, shares={}, s_per_gb={}, feasible=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """A capacity that is too small, with all others as they are."""

    tier: str
    needed_bytes: int
    """The least capacity that would do."""
    capacity_bytes: int

    @property
    def short_bytes(self) -> int:
        return self.needed_bytes - self.capacity_bytes


def lower_bound(problem: Problem, *, solver: Solver | None = None, beat_s: float = inf) -> Bound:
    """The bound for one order of micro-batches. `feasible` is false where not even the relaxation fits into memory.

    A program of few windows is asked first: where that says that nothing fits, or nothing below `beat_s`, so it is, and
    what it says has no `model`. Where all has room on the device, computing may be the only stream, and none works
    beside it. The solver starts from where it ended before with programs without states that come to the device for
    their updates; those of programs with more (`solver_of`) start from there.
    """
    alone = alone_s(problem)
    if any(max(u.fwd_fixed_gb, u.bwd_fixed_gb) > problem.device_gb for u in problem.units):
        return IMPOSSIBLE
    if len(problem.runs) > MANY_WINDOWS:
        few = _optimum(replace(problem, runs=runs_of(len(problem.units), num_alone=1, max_runs=1)), Solver())
        if not few.feasible or min(few.step_s, alone) >= beat_s:
            return replace(few, step_s=min(few.step_s, alone), model=None)
    found = _lower_bound(problem, solver or Solver())
    return replace(found, step_s=min(found.step_s, alone))


def _lower_bound(problem: Problem, solver: Solver) -> Bound:
    plain = _optimum(replace(problem, brings_states=False), solver)
    if not problem.brings_states:
        return plain
    wide = _optimum(replace(problem, keeps_grads=True), solver.wider, narrower=solver)
    is_worth_it = WORTH_BRINGING * wide.step_s < plain.step_s or len(problem.units) <= FEW_UNITS
    is_worth_it |= COARSE_FRAC * wide.step_s < max(map(problem.host_gparams, problem.units)) / problem.rates.adam
    if wide.feasible and wide.proven and is_worth_it:
        found = replace(wide, plain=plain)
    else:
        found = replace(plain, step_s=min(plain.step_s, wide.step_s), proven=plain.proven and wide.proven)
    if not problem.returns_grads:
        return found
    back = _optimum(problem, solver_of(problem, solver), narrower=solver)
    if not found.feasible:
        return back
    least_s, is_proven = min(found.step_s, back.step_s), found.proven and back.proven
    return replace(found, step_s=least_s, proven=is_proven, returning=back, kept_s=found.step_s)


def solver_of(problem: Problem, plain: Solver) -> Solver:
    """Of a problem's programs, each kind has its own, so that it goes on from where it ended; `plain` is of those
    without states that come to the device."""
    if problem.returns_grads:
        return plain.wider.wider
    return plain.wider if problem.brings_states else plain


def _optimum(problem: Problem, solver: Solver, *, narrower: Solver | None = None) -> Bound:
    model = build(problem, margins=Margins(relaxed=True))
    solution = solver.solve(model.program, narrower=narrower)
    if solution.status == "infeasible":
        return replace(IMPOSSIBLE, solution=solution, model=model)
    if solution.status != "optimal":
        return Bound(step_s=compute_s(problem), shares={COMPUTE: 1.0}, s_per_gb={}, proven=False, model=model)
    return Bound(
        step_s=max(model.step_bound_s(solution.objective), compute_s(problem)),
        shares=shares_of(model.program, solution, [column for column, _ in model.cols.tau]),
        s_per_gb=worth_of_memory(model.program, solution),
        solution=solution,
        model=model,
    )


def alone_s(problem: Problem) -> float:
    """Seconds of computing where no other stream works in the step; infinite where it takes as long beside others, or
    where parameters and states do not all have room on the device, or it has no rate for an update."""
    machine, training, workload = problem.machine, problem.workload.training, problem.workload
    homes_gb = sum(u.params_gb + u.frozen_gb + u.states_gb for u in problem.units)
    if machine.num_devices > 1 or not machine.stream(COMPUTE).beside_s or homes_gb > problem.device_gb:
        return inf
    if not all(u.updates_on_device for u in problem.units):
        return inf
    seconds = partial(seconds_alone, machine, COMPUTE, is_alone=True)
    passes_s = sum(seconds(u.forward) + seconds(u.backward) for u in workload.units)
    updates_s = sum(seconds(training.update_work(u)) for u in workload.units if u.num_trained)
    return training.gradient_accumulation_steps * passes_s + updates_s


def compute_s(problem: Problem) -> float:
    """Seconds of forward and backward alone, over all micro-batches."""
    batches = problem.workload.training.gradient_accumulation_steps
    return batches * sum(u.fwd_s + u.bwd_s for u in problem.units)


def shares_of(program: Program, solution: Solution, durations: Collection[int]) -> dict[str, float]:
    """What the step time consists of, by the dual of every row that one of these columns, the durations, stands in.

    A duration's cost is the sum of its rows' duals, so these products add up to the whole step.
    """
    found = np.isin(program.columns, list(durations))
    rows, columns = program.row_of_entry[found], program.columns[found]
    products = solution.duals[rows] * program.values[found] * solution.values[columns]
    by_row = np.bincount(rows, weights=products, minlength=program.shape[1])
    parts: dict[str, float] = {}
    for family, numbers in program.families.items():
        name = COMPUTE if family in ("idle time", "prefix sums") else family
        parts[name] = parts.get(name, 0.0) + float(by_row[numbers].sum())
    whole = sum(v for v in parts.values() if v > 0)
    shares = {k: v / whole for k, v in parts.items() if v > 1e-9}
    return dict(sorted(shares.items(), key=lambda item: (-item[1], item[0])))


def worth_of_memory(program: Program, solution: Solution) -> dict[str, float]:
    """Seconds per GB that the memory rows' duals put on one more GB of each tier."""
    rows = {tier: program.rows_of(family) for family, tier in MEMORY_FAMILIES.items()}
    return {tier: -float(solution.duals[numbers].sum()) for tier, numbers in rows.items() if len(numbers)}


def shortages(problem: Problem) -> list[Shortage]:
    """For a problem without a solution: each tier that alone could make it possible, with the least that would do."""
    found = []
    for tier, capacity in (("device", problem.device_gb), ("host", problem.host_gb), ("nvme", problem.nvme_gb)):
        if (tier == "nvme" and not problem.has_nvme) or (tier == "host" and not problem.host_gb):
            continue
        model = build(problem, elastic=tier, margins=Margins(relaxed=True))
        solution = Solver().solve(model.program)
        if solution.usable:
            excess = float(solution.values[model.cols.excess[tier]])
            if excess > 1e-9:
                needed = round((capacity + excess) * GB)
                found.append(Shortage(tier=tier, needed_bytes=needed, capacity_bytes=round(capacity * GB)))
    return found
