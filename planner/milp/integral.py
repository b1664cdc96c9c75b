"""The integral program: every tensor's action whole, with a gap to the bound without integers.

The bound is so tight that rounding mostly ends within the gap: the program with the rounded actions fixed says by how
much its optimum is above the bound, from whose basis it is solved in no time. Only where that is too much does the
solver branch."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tierplan.planner.milp.model import Margins, Model, build, fractions, with_actions, with_margins
from tierplan.planner.milp.program import Solution, Solver
from tierplan.planner.milp.rounding import actions_of, round_to_plan
from tierplan.planner.plan import UnitwisePlan

GAP = 0.005
TIME_LIMIT_S = 4.0
MANY_UNITS = 48
"""On longer chains the solver does not branch: it would end by the clock, and take seconds for nothing."""
DUST = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A solution in whole actions."""

    plan: UnitwisePlan
    step_s: float
    """In the program: placements are shares, transfers are fluid."""
    bound_s: float
    """Of the program without integers."""
    branched: bool
    """Whether the solver had to branch."""
    seconds: float
    """Of building and solving, all told."""
    solutions: tuple[Solution, ...]

    @property
    def gap(self) -> float:
        """How far above the bound, as a share of it."""
        return max(0.0, self.step_s / self.bound_s - 1.0) if self.bound_s else 0.0

    @property
    def work_ops(self) -> int:
        return sum(solution.work_ops for solution in self.solutions)


def solve_whole(
    model: Model,
    margins: Margins,
    *,
    gap: float = GAP,
    solver: Solver | None = None,
) -> Whole | None:
    """The best whole actions found for a program of `build`, within `gap` of the bound if branching gets there in time.

    None where nothing fits.
    """
    began_s = time.perf_counter()
    solver = solver or Solver()
    problem, model = model.problem, with_margins(model, margins)
    relaxed = solver.solve(model.program)
    if not relaxed.usable:
        return None
    bound_s = fractions(model, relaxed).step_s
    rounded = round_to_plan(problem, fractions(model, relaxed))
    decided = with_actions(model, actions_of(problem, rounded))
    found = solver.solve(decided.program)
    solutions = [relaxed, found]
    best: tuple[UnitwisePlan, float] | None = None
    if found.usable:
        best = round_to_plan(problem, fractions(model, found)), fractions(decided, found).step_s
    branched = (best is None or best[1] > bound_s * (1 + gap) + DUST) and len(problem.units) <= MANY_UNITS
    if branched:
        whole = build(problem, margins=margins, integral=True)
        counted = solver.solve(whole.program, integral=True, time_limit_s=TIME_LIMIT_S, gap=gap)
        solutions.append(counted)
        if counted.usable:
            shares = fractions(whole, counted)
            if best is None or shares.step_s < best[1]:
                best = round_to_plan(problem, shares), shares.step_s
    if best is None:
        return None
    return Whole(
        plan=best[0],
        step_s=best[1],
        bound_s=bound_s,
        branched=branched,
        seconds=time.perf_counter() - began_s,
        solutions=tuple(solutions),
    )
