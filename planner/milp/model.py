"""The planning program: placements and activation choices over windows, with transfers as fluid queues.

The mathematics, term by term and in the names used here, is in docs/planner.md. With zero margins and no integers the
program is a relaxation: every schedule of the language, cut at the ends of its compute ops, is a point of it, so its
optimum is a lower bound on the step time. With margins and integers it is what plans are rounded from.

    columns.py       decisions, durations, flows
    queues.py        what moves: activations, parameters, gradients, states, updates
    capacities.py    what binds: deadlines, memory, streams, shared limits, drive endurance
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tierplan.planner.milp.amounts import Problem
from tierplan.planner.milp.capacities import deadline_rows, endurance_row, memory_rows, stream_rows
from tierplan.planner.milp.columns import TRANSFER_COST, Columns, Margins
from tierplan.planner.milp.program import Program, Solution
from tierplan.planner.milp.queues import activation_queues, parameter_queues, update_queues

__all__ = ["Fractions", "Margins", "Model", "build", "fractions", "with_actions"]


@dataclass
class Model:
    """The program with the columns that a plan is read from."""

    program: Program
    problem: Problem
    place: list[dict[int, int]]
    """Per unit: mode number -> column."""
    action: list[list[dict[str, int]]]
    """Per unit and slot group: action -> column."""
    tau: list[tuple[int, int]]
    """Per window: column of its duration, copies of its block."""
    excess: dict[str, int]
    """Tier -> column of the GB by which it is exceeded (elastic programs)."""

    def step_bound_s(self, objective_bound: float) -> float:
        """A bound on the step time alone, from a bound on the objective, which also charges `TRANSFER_COST` per GB.

        In a step of T seconds no stream moves more than T times its rate, so what transfers add is at most that.
        """
        r = self.problem.rates
        per_s = sum(max(rates.values(), default=0.0) for rates in (r.up, r.down, r.read, r.write)) + 2 * r.adam + 1.0
        return objective_bound / (1.0 + TRANSFER_COST * per_s)


@dataclass(frozen=True, slots=True)
class Fractions:
    """A solution's decisions: shares per mode and per action."""

    place: tuple[Mapping[int, float], ...]
    action: tuple[tuple[Mapping[str, float], ...], ...]
    step_s: float


def build(problem: Problem, *, margins: Margins | None = None, integral: bool = False) -> Model:
    """The program of one problem. `integral` adds whole counts of activation choices per run of identical units."""
    cols = Columns(problem, margins or Margins(), integral=integral)
    acts = activation_queues(cols)
    fetched = parameter_queues(cols)
    updates = update_queues(cols)
    deadline_rows(cols)
    memory_rows(cols, acts, fetched, updates)
    stream_rows(cols, acts, updates)
    endurance_row(cols)
    return Model(cols.lp, problem, cols.place, cols.action, cols.tau, cols.excess)


def with_actions(model: Model, actions: Sequence[Sequence[str]]) -> Model:
    """The program with every tensor's action decided: by unit and group, as `rounding.actions_of` has them."""
    program = model.program
    low, high = list(program.low), list(program.high)
    for chosen, groups in zip(actions, model.action, strict=True):
        for name, columns in zip(chosen, groups, strict=True):
            for action, column in columns.items():
                low[column] = high[column] = 1.0 if action == name else 0.0
    return replace(model, program=Program(low, high, program.cost, program.integer, program.rows))


def fractions(model: Model, solution: Solution) -> Fractions:
    """The decisions in a usable solution. What may not be taken at all is left out."""
    v, high = solution.values, model.program.high
    return Fractions(
        place=tuple({k: v[c] for k, c in choice.items()} for choice in model.place),
        action=tuple(
            tuple({a: v[c] for a, c in group.items() if high[c] > 0.0} for group in groups) for groups in model.action
        ),
        step_s=sum(v[c] * copies for c, copies in model.tau),
    )
