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
from dataclasses import dataclass, field, replace

import numpy as np

from tierplan.planner.milp.amounts import Problem, UnitAmounts
from tierplan.planner.milp.capacities import ENDURANCE, deadline_rows, endurance_row, memory_rows, stream_rows
from tierplan.planner.milp.columns import TRANSFER_COST, Columns, UnitColumns
from tierplan.planner.milp.program import Program, Solution
from tierplan.planner.milp.queues import queues


@dataclass(frozen=True, slots=True, kw_only=True)
class Margins:
    """What the plan leaves unused, because the fluid model cannot see it: numbers of the program differ, no row."""

    device_gb: float = 0.0
    host_gb: float = 0.0
    rate_frac: Mapping[str, float] = field(default_factory=dict)
    """Share of a stream's rate or a shared limit that is planned with, by name; 1 where absent."""
    write_frac: float = 1.0
    """Share of the drives' endurance that is planned with."""
    relaxed: bool = False
    """For bounds: also what no rounded plan does, such as moving the smallest tensors or dropping inputs."""

    def leave_no_more(self, than: Margins) -> bool:
        """Whether no plan has room with these where none has with others: a step may take its time, so rates do not
        matter."""
        in_memory = self.device_gb >= than.device_gb and self.host_gb >= than.host_gb
        return in_memory and self.write_frac <= than.write_frac


@dataclass(frozen=True, kw_only=True)
class Model:
    """The program with the columns that a plan is read from."""

    program: Program
    bare: Program
    """Without margins."""
    cols: Columns

    @property
    def problem(self) -> Problem:
        return self.cols.p

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
    tied: tuple[float, ...]
    """Of a unit's tied gradients, the share that waits in host memory."""
    step_s: float


def build(
    problem: Problem,
    *,
    margins: Margins | None = None,
    integral: bool = False,
    elastic: str = "",
) -> Model:
    """The program of one problem.

    Parameters
    ----------
    margins
        None leaves nothing unused.
    integral
        Adds whole counts of activation choices per run of identical units.
    elastic
        This tier's capacity may be exceeded, and the excess is minimised instead of the time: what does it lack?
    """
    cols = Columns(problem, elastic=elastic, integral=integral)
    held = queues(cols)
    deadline_rows(cols)
    memory_rows(cols, held)
    stream_rows(cols, held)
    endurance_row(cols)
    bare = cols.lp.program()
    model = Model(program=bare, bare=bare, cols=cols)
    return with_margins(model, margins or Margins())


def with_margins(model: Model, margins: Margins) -> Model:
    """The same model with other margins: some numbers of its program differ."""
    bare = model.bare
    high, row_high, values = bare.high.copy(), bare.row_high.copy(), bare.values.copy()
    if margins.relaxed:
        row_high[list(model.cols.in_bounds)] = list(model.cols.in_bounds.values())
        high[model.cols.only_plans] = 0.0
    else:
        high[list(model.cols.only_bounds)] = 0.0
    row_high[bare.rows_of("device memory")] -= margins.device_gb
    row_high[bare.rows_of("host memory")] -= margins.host_gb
    # what a stream or limit is used for stands beside -1 x the window's duration, writing beside -1 x a step's worth
    durations = np.isin(bare.columns, [column for column, _ in model.cols.tau])
    for family, frac in {**margins.rate_frac, ENDURANCE: margins.write_frac}.items():
        if frac != 1.0:
            values[durations & np.isin(bare.row_of_entry, bare.rows_of(family))] *= frac
    return replace(model, program=replace(bare, high=high, row_high=row_high, values=values))


def with_actions(model: Model, actions: Sequence[Sequence[str]]) -> Model:
    """The model with every tensor's action decided: by unit and group, as `rounding.actions_of` has them."""
    low, high = model.program.low.copy(), model.program.high.copy()
    for chosen, choice, unit in zip(actions, model.cols.choices, model.problem.units, strict=True):
        for g, column in choice.recompute.items():
            low[column] = high[column] = float(chosen[g] == "recompute")
        for inputs, columns in ((True, choice.inputs), (False, choice.saved)):
            for where, column in columns.items():
                low[column] = high[column] = sum(
                    group.gb
                    for group, action in zip(unit.groups, chosen, strict=True)
                    if (not group.slots) == inputs and action == where
                )
    return replace(model, program=replace(model.program, low=low, high=high))


def fractions(model: Model, solution: Solution) -> Fractions:
    """The decisions in a usable solution. What may not be taken at all is left out."""
    v, high = solution.values.tolist(), model.program.high.tolist()
    return Fractions(
        place=tuple({k: v[c] for k, c in choice.place.items()} for choice in model.cols.choices),
        action=tuple(
            tuple(_actions(unit, choice, v, high))
            for unit, choice in zip(model.problem.units, model.cols.choices, strict=True)
        ),
        tied=tuple(
            0.0 if choice.tied is None else v[choice.tied] / (model.problem.turn * unit.tied_gb)
            for unit, choice in zip(model.problem.units, model.cols.choices, strict=True)
        ),
        step_s=sum(v[c] * copies for c, copies in model.cols.tau),
    )


def _actions(unit: UnitAmounts, choice: UnitColumns, v: list[float], high: list[float]) -> list[dict[str, float]]:
    """By group: the share of each action. What leaves is made up of the first groups that may, drives before host."""
    shares: list[dict[str, float]] = [{} for _ in unit.groups]
    left = {True: {w: v[c] for w, c in choice.inputs.items()}, False: {w: v[c] for w, c in choice.saved.items()}}
    for g, group in enumerate(unit.groups):
        rest = 1.0
        if (again := choice.recompute.get(g)) is not None and high[again] > 0:
            shares[g]["recompute"] = v[again]
            rest -= shares[g]["recompute"]
        amounts = left[not group.slots]
        for where in ("nvme", "host") if group.movable else ():
            if where in amounts:
                taken = min(rest, amounts[where] / group.gb)
                amounts[where] -= taken * group.gb
                rest -= taken
                shares[g][where] = taken
        shares[g]["keep"] = max(0.0, rest)
    return shares
