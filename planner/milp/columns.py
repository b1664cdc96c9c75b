"""The columns of the planning program: decisions per unit, durations and flows per window; and sums over them.

`queues.py` and `capacities.py` add the rows, `milp.py` puts the program together. Names are those of docs/planner.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tierplan.planner.milp.amounts import MODES, Problem, SlotGroup, Window
from tierplan.planner.milp.program import Program, Terms

__all__ = ["TRANSFER_COST", "Columns", "Margins", "minus"]

TRANSFER_COST = 3e-6
"""Seconds of objective per GB moved, against pointless transfers. `Model.step_bound_s` takes them out again."""
BLOCK_LAYERS = 6
"""Identical neighbouring units whose activation choices are counted together in integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Margins:
    """What the plan leaves unused, because the fluid model cannot see it."""

    device_gb: float = 0.0
    host_gb: float = 0.0
    rate_frac: Mapping[str, float] = field(default_factory=dict)
    """Share of a stream's rate or a shared limit that is planned with, by name; 1 where absent."""
    write_frac: float = 1.0
    """Share of the drives' endurance that is planned with."""
    relaxed: bool = False
    """For bounds: also what no rounded plan does, such as moving the smallest tensors or dropping inputs."""
    transients: bool = True
    """Count what is on the device only while an op runs; without, the bound also holds for tiled micro-batches."""
    elastic: str = ""
    """This tier's capacity may be exceeded, and the excess is minimised instead of the time: what does it lack?"""


class Columns:
    """A program with the columns of one problem, and the expressions that its rows are made of."""

    def __init__(self, problem: Problem, margins: Margins, *, integral: bool) -> None:
        self.p = problem
        self.margins = margins
        self.lp = Program()
        self.units = problem.units
        self.windows = problem.windows
        self.place: list[dict[int, int]] = []
        """Per unit: mode number -> column."""
        self.action: list[list[dict[str, int]]] = []
        """Per unit and slot group: action -> column."""
        self.tau: list[tuple[int, int]] = []
        """Per window: column of its duration, copies of its block."""
        self.flows: list[dict[str, int]] = []
        """Per window: flow name -> column, in GB (Adam: 1e9 parameters)."""
        self.early: list[dict[str, int]] = []
        """Per window: the part of a flow before the window's compute op starts."""
        self.excess: dict[str, int] = {}
        """Tier -> column of the GB by which it is exceeded (elastic programs)."""
        self._decisions()
        if integral:
            self._counts()
        for window in self.windows:
            self._window(window)

    # ---- decisions ----

    def _decisions(self) -> None:
        lp = self.lp
        if self.margins.elastic:
            self.excess[self.margins.elastic] = lp.column(cost=1.0)
        for u, unit in enumerate(self.units):
            choice = {k: lp.column(high=1.0) for k in self.p.modes(u)}
            lp.row([(1.0, c) for c in choice.values()], low=1.0, high=1.0, family="one placement per unit")
            self.place.append(choice)
            groups = []
            for group in unit.groups:
                # what only a bound may do has a column everywhere, so that all programs of a problem are of one shape
                columns = {a: lp.column(high=high) for a, high in self._highest(group).items()}
                lp.row([(1.0, c) for c in columns.values()], low=1.0, high=1.0, family="one action per tensor")
                groups.append(columns)
            self.action.append(groups)

    def _highest(self, group: SlotGroup) -> dict[str, float]:
        """The actions of one group of tensors, each with the most that it may be taken."""
        relaxed = 1.0 if self.margins.relaxed else 0.0
        highest = {"keep": 1.0}
        if group.recomputable or not group.slots:
            # an input made again, several units from one: no plan of ours, but a schedule could
            highest["recompute"] = 1.0 if group.recomputable else relaxed
        if self.p.host_gb:
            highest["host"] = 1.0 if group.movable else relaxed
            if self.p.has_nvme:
                highest["nvme"] = highest["host"]
        return highest

    def _counts(self) -> None:
        """Over runs of identical neighbours, each action is chosen a whole number of times."""
        start = 0
        for u in range(1, len(self.units) + 1):
            if u < len(self.units) and _alike(self.p, start, u) and u - start < BLOCK_LAYERS:
                continue
            run = range(start, u)
            for g in range(len(self.units[start].groups)):
                names = [a for a, c in self.action[start][g].items() if self.lp.high[c] > 0.0]
                if len(names) > 1:
                    for name in names:
                        count = self.lp.column(high=float(len(run)), integer=True)
                        terms: Terms = [(1.0, self.action[i][g][name]) for i in run]
                        self.lp.row([*terms, (-1.0, count)], low=0.0, high=0.0, family="whole counts")
            start = u

    # ---- windows ----

    def _window(self, window: Window) -> None:
        """Duration and flow columns of one window. Only flows that can exist there get a column."""
        lp, p = self.lp, self.p
        block = p.blocks[window.block]
        charged = 0.0 if self.margins.elastic else 1.0
        self.tau.append((lp.column(cost=charged * block.copies), block.copies))
        names = ["uA", "uW", "dA"] if p.host_gb else []
        if p.host_gb and p.rates.adam:
            names.append("dG")
        if p.has_nvme and p.host_gb:
            names += ["rA", "wA", "rW", "rO", "wO", "wP"]
        may_update = p.semantics == "delayed-1" or (block.first and window.phase == "fwd")
        may_update = may_update or (p.semantics == "in-backward" and block.last and window.phase == "bwd")
        if p.rates.adam and may_update:
            names += ["aH", "aN", "uP", "dP", "rP", "acc"]
        elif p.rates.adam and block.last:
            names += ["dP", "rP", "acc"]
        elif p.rates.adam:
            names += ["acc"]
        if not p.has_nvme:
            names = [n for n in names if n not in ("aN", "rP")]
        if p.has_master:
            names = [n for n in names if n not in ("dP", "rP")]
        if len(p.blocks) == 1 and p.turn == 1:
            names = [n for n in names if n != "acc"]
        self.flows.append({n: lp.column(cost=charged * TRANSFER_COST * block.copies) for n in names})
        self.early.append({n: lp.column() for n in ("uA", "uW", "d") if p.host_gb})

    def block_windows(self, b: int) -> list[int]:
        return [s for s, w in enumerate(self.windows) if w.block == b]

    # ---- expressions ----

    def placed(self, u: int, part: str, where: str, scale: float = 1.0) -> Terms:
        """scale x the share of unit u whose `params`, `states` or `grads` are `where`."""
        return [(scale, c) for k, c in self.place[u].items() if getattr(MODES[k], part) == where]

    def away(self, u: int, part: str, scale: float = 1.0) -> Terms:
        """scale x the share that is not on the device."""
        return [(scale, c) for k, c in self.place[u].items() if getattr(MODES[k], part) != "device"]

    def acted(self, u: int, names: tuple[str, ...], *, inputs: bool, scale: float = 1.0) -> Terms:
        """scale x GB of unit u's saved tensors (`inputs`: of its input) with one of these actions."""
        found: Terms = []
        for group, columns in zip(self.units[u].groups, self.action[u], strict=True):
            if (not group.slots) == inputs:
                found += [(scale * group.gb, columns[a]) for a in names if a in columns]
        return found

    def flow(self, s: int, name: str, scale: float = 1.0) -> Terms:
        """scale x a flow of window s; nothing where that flow cannot exist."""
        column = self.flows[s].get(name)
        return [] if column is None else [(scale, column)]

    def updates(self, s: int) -> Terms:
        """What the host's cores update in window s, in 1e9 parameters."""
        return [*self.flow(s, "aH"), *self.flow(s, "aN")]

    def over_step(self, name: str) -> Terms:
        """A flow's sum over the step."""
        return [t for s, w in enumerate(self.windows) for t in self.flow(s, name, float(self.p.blocks[w.block].copies))]

    def step(self) -> Terms:
        """Seconds of the step."""
        return [(float(copies), column) for column, copies in self.tau]

    def compute(self, s: int) -> tuple[float, Terms]:
        """Seconds of window s's compute ops: a constant and what decisions add."""
        window, turn = self.windows[s], self.p.turn
        if window.phase == "fwd":
            return sum(self.units[u].fwd_s for u in window.units) * turn, []
        terms: Terms = []
        for u in window.units:
            unit = self.units[u]
            for group, columns in zip(unit.groups, self.action[u], strict=True):
                if "recompute" in columns:
                    seconds = group.recompute_s if group.slots else self._output_s(u - 1)
                    terms.append((seconds * turn, columns["recompute"]))
            if self.p.blocks[window.block].last:
                terms += self.placed(u, "states", "device", unit.update_s)
        return sum(self.units[u].bwd_s for u in window.units) * turn, terms

    def _output_s(self, u: int) -> float:
        """At least what making unit u's output again takes beyond making its saved tensors again."""
        unit = self.units[u]
        return max(0.0, unit.fwd_s - sum(g.recompute_s for g in unit.groups))

    def over_units(self, of: Callable[[int], Terms]) -> Terms:
        """The sum of an expression over all units, as one column."""
        return self.column_for([t for u in range(len(self.units)) for t in of(u)])

    # ---- rows that name a sum ----

    def queue(self, before: Terms, inflow: Terms, outflow: Terms, family: str) -> int:
        """The column of a queue's content: before + inflow - outflow, never negative."""
        state = self.lp.column()
        self.lp.row([(1.0, state), *minus(before), *minus(inflow), *outflow], low=0.0, high=0.0, family=family)
        return state

    def carry(self, before: Terms, more: Terms) -> Terms:
        """A column equal to the sum, so that prefix sums stay sparse."""
        if not before and not more:
            return []
        column = self.lp.column()
        self.lp.row([(1.0, column), *minus(before), *minus(more)], low=0.0, high=0.0, family="prefix sums")
        return [(1.0, column)]

    def column_for(self, terms: Terms) -> Terms:
        """One column equal to a long sum that many rows use."""
        return self.carry([], terms) if len(terms) > 1 else terms


def minus(terms: Terms) -> Terms:
    return [(-a, c) for a, c in terms]


def _alike(problem: Problem, a: int, b: int) -> bool:
    """Whether two units offer the same activation choices."""
    x, y = problem.units[a], problem.units[b]
    return (x.groups, x.fwd_s, x.bwd_s) == (y.groups, y.fwd_s, y.bwd_s)
