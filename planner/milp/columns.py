"""The columns of the planning program: decisions per unit, durations and flows per window; and sums over them.

`queues.py` and `capacities.py` add the rows, `model.py` puts the program together. Names are those of docs/planner.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from operator import attrgetter

from tierplan.planner.milp.amounts import Problem, UnitAmounts, Window
from tierplan.planner.milp.modes import MODES, Mode
from tierplan.planner.milp.program import Draft, Terms

TRANSFER_COST = 3e-6
"""Seconds of objective per GB moved, against pointless transfers. `Model.step_bound_s` takes them out again."""
STAGED = ("uN", "dN", "uM", "dM")
"""Parts of `uS`, `dS`, `uQ`, `dQ`: what comes from NVMe and goes there, and is in host memory between its two ways."""
BROUGHT = ("uS", "dS", "uQ", "dQ", "uG", "rS", "wS", "aD", "aQ", *STAGED)
"""Flows that only updates have on the device of what comes there."""
BLOCK_LAYERS = 6
"""Identical neighbouring units whose activation choices are counted together in integers."""


@dataclass
class UnitColumns:
    """The columns of one unit's decisions."""

    place: dict[int, int] = field(default_factory=dict)
    """Mode number -> column, a share."""
    recompute: dict[int, int] = field(default_factory=dict)
    """Number of a group of saved tensors -> column, the share that is made again."""
    inputs: dict[str, int] = field(default_factory=dict)
    """`keep`, `host`, `nvme` -> column: GB of the unit's input that wait there. A GB is as good as any other, so which
    tensor goes where is settled afterwards (`model.fractions`)."""
    saved: dict[str, int] = field(default_factory=dict)
    """The same of all other saved tensors."""
    tied: int | None = None
    """GB of its tied gradients that wait in host memory."""


class Columns:
    """A program with the columns of one problem, and the expressions that its rows are made of."""

    def __init__(self, problem: Problem, *, elastic: str, integral: bool) -> None:
        self.p = problem
        self.elastic = elastic
        self.lp = Draft()
        self.units = problem.units
        self.windows = problem.windows
        self.choices: list[UnitColumns] = []
        """Per unit. Alike units inside a window's run, which stand in sums only, have theirs in common."""
        self.only_bounds: list[int] = []
        """Columns that only a bound may use."""
        self.only_plans: list[int] = []
        """Columns that a bound has no use for, since it has others that may do more."""
        self.in_bounds: dict[int, float] = {}
        """Row -> what it allows in a bound: there small tensors may move, and gradients of a vertical turn leave one by
        one, to be added up in host memory."""
        self.tau: list[tuple[int, int]] = []
        """Per window: column of its duration, copies of its block."""
        self.flows: list[dict[str, int]] = []
        """Per window: flow name -> column, in GB (Adam: 1e9 parameters)."""
        self.early: list[dict[str, int]] = []
        """Per window: the part of a flow before the window's compute op starts."""
        self.excess: dict[str, int] = {}
        """Tier -> column of the GB by which it is exceeded (elastic programs)."""
        if elastic:
            self.excess[elastic] = self.lp.column(cost=1.0)
        for run in problem.runs:
            for u in run:
                is_inside = run[0] < u - 1 and u < run[-1]
                common = is_inside and _alike(problem, u - 1, u) and not integral
                self.choices.append(self.choices[-1] if common else self._choice(u))
        if integral:
            self._counts()
        for window in self.windows:
            self._window(window)

    # ---- decisions ----

    def _choice(self, u: int) -> UnitColumns:
        lp, unit, wheres = self.lp, self.units[u], self._wheres
        place = {k: lp.column(high=1.0, optional=MODES[k].updated == "brought") for k in self.p.modes(u)}
        lp.row([(1.0, c) for c in place.values()], low=1.0, high=1.0, family="one placement per unit")
        found = UnitColumns(place)
        if unit.tied_gb and self.p.host_gb:
            moves = 0 if self.elastic else 2 * sum(block.copies for block in self.p.blocks)
            found.tied = lp.column(cost=moves * TRANSFER_COST, high=self.p.turn * unit.tied_gb)
            self.only_plans.append(found.tied)
        for g, group in enumerate(unit.groups):
            if group.recomputable or (group.slots and unit.is_block):
                found.recompute[g] = lp.column(high=1.0)
                if not group.recomputable:  # as long as the whole block is run again: in no plan of ours
                    self.only_bounds.append(found.recompute[g])
        for g in found.recompute if 0 in found.recompute and not unit.groups[0].slots else ():
            if g:  # an input is dropped only where nothing is made again from it
                lp.row([(1.0, found.recompute[0]), (1.0, found.recompute[g])], high=1.0, family="dropped inputs")
        for inputs, columns in ((True, found.inputs), (False, found.saved)):
            groups = {g: group for g, group in enumerate(unit.groups) if (not group.slots) == inputs}
            if not groups:
                continue
            columns.update({where: lp.column() for where in wheres})
            again = {g: (group.gb, found.recompute[g]) for g, group in groups.items() if g in found.recompute}
            whole = sum(group.gb for group in groups.values())
            held: Terms = [(1.0, c) for c in columns.values()]
            lp.row([*held, *again.values()], low=whole, high=whole, family="all that is saved")
            movable = sum(group.gb for group in groups.values() if group.movable)
            if movable < whole and len(wheres) > 1:
                moved: Terms = [(1.0, columns[where]) for where in wheres[1:]]
                moved += [terms for g, terms in again.items() if groups[g].movable]
                self.in_bounds[lp.row(moved, high=movable, family="small tensors stay")] = whole
        return found

    @property
    def _wheres(self) -> tuple[str, ...]:
        """Where saved tensors may wait."""
        if not self.p.host_gb:
            return ("keep",)
        return ("keep", "host", "nvme") if self.p.has_nvme else ("keep", "host")

    def _counts(self) -> None:
        """Every group has one action, and over runs of identical neighbours each is chosen a whole number of times."""
        start = 0
        shares = [self._shares(u) for u in range(len(self.units))]
        for u in range(1, len(self.units) + 1):
            if u < len(self.units) and _alike(self.p, start, u) and u - start < BLOCK_LAYERS:
                continue
            run = range(start, u)
            for g, names in enumerate(shares[start]):
                for name in names if len(names) > 1 else ():
                    count = self.lp.column(high=float(len(run)), integer=True)
                    terms: Terms = [(1.0, shares[i][g][name]) for i in run]
                    self.lp.row([*terms, (-1.0, count)], low=0.0, high=0.0, family="whole counts")
            start = u

    def _shares(self, u: int) -> list[dict[str, int]]:
        """By group: action -> column of its share, from which the unit's amounts are made up."""
        lp, unit, choice = self.lp, self.units[u], self.choices[u]
        found = []
        for g, group in enumerate(unit.groups):
            names = [*(self._wheres if group.movable else ("keep",)), *(["recompute"] if group.recomputable else [])]
            columns = {name: lp.column(high=1.0) for name in names}
            lp.row([(1.0, c) for c in columns.values()], low=1.0, high=1.0, family="one action per tensor")
            if group.recomputable:
                again: Terms = [(1.0, choice.recompute[g]), (-1.0, columns["recompute"])]
                lp.row(again, low=0.0, high=0.0, family="one action per tensor")
            found.append(columns)
        for inputs, amounts in ((True, choice.inputs), (False, choice.saved)):
            for where, amount in amounts.items():
                parts: Terms = [
                    (-group.gb, columns[where])
                    for group, columns in zip(unit.groups, found, strict=True)
                    if (not group.slots) == inputs and where in columns
                ]
                lp.row([(1.0, amount), *parts], low=0.0, high=0.0, family="one action per tensor")
        return found

    def for_bound(self, high: float, *, cost: float = 0.0) -> int:
        """A column that only a bound may use."""
        self.only_bounds.append(self.lp.column(high=high, cost=0.0 if self.elastic else cost))
        return self.only_bounds[-1]

    # ---- windows ----

    def _window(self, window: Window) -> None:
        """Duration and flow columns of one window. Only flows that can exist there get a column."""
        lp, p = self.lp, self.p
        block = p.blocks[window.block]
        charged = 0.0 if self.elastic else 1.0
        self.tau.append((lp.column(cost=charged * block.copies), block.copies))
        names = ["uA", "uW", "dA"] if p.host_gb else []
        if p.host_gb and p.rates.adam:
            names.append("dG")
        names += ["uS", "dS", "uQ", "dQ"] if p.brings_states else []
        names += ["uG"] if p.returns_grads else []
        if p.has_nvme and p.host_gb:
            names += ["rS", "wS"] if p.brings_states else []
            names += STAGED if p.brings_states and self._counts_staged(window) else ()
            names += ["rA", "wA", "rW", "rO", "wO", "wP"]
        may_update = p.semantics == "delayed-1" or (block.first and window.phase == "fwd")
        may_update = may_update or (p.semantics == "in-backward" and block.last and window.phase == "bwd")
        if p.rates.adam and may_update:
            names += ["aH", "aN", "aL", "uP", "dP", "rP", "acc"]
            if p.brings_states:
                names += ["aD", "aQ"] if p.semantics == "exact-clip" else ["aD"]
        elif p.rates.adam and block.last:
            names += ["dP", "rP", "acc"]
        elif p.rates.adam:
            names += ["acc"]
        if not p.has_nvme:
            names = [n for n in names if n not in ("aN", "rP")]
        if p.workload.training.has_master:
            names = [n for n in names if n not in ("dP", "rP", "uQ", "uM")]
        cost, costs = charged * TRANSFER_COST * block.copies, dict.fromkeys(("aD", "aQ", *STAGED), 0.0)
        self.flows.append({n: lp.column(cost=costs.get(n, cost), optional=n in BROUGHT) for n in names})
        self.early.append({n: lp.column() for n in ("uA", "uW", "d") if p.host_gb})

    def _counts_staged(self, window: Window) -> bool:
        """Whether what is on its way between drives and the device is counted after this window: after each where all
        of it waits for the norm, else at the end of forward and of backward, which bounds hardly less."""
        last = 0 if window.phase == "bwd" else len(self.units) - 1
        return window.last == last or self.p.semantics == "exact-clip"

    def adds_up_on_host(self, window: Window) -> bool:
        """Whether at its end all gradients that leave the device add up in host memory, but for what is on its way."""
        block = self.p.blocks[window.block]
        if len(self.p.blocks) == 1 or (block.last and window.phase == "bwd"):
            return False
        return not block.first or (window.phase == "bwd" and window.last == 0)

    def block_windows(self, b: int) -> list[int]:
        return [s for s, w in enumerate(self.windows) if w.block == b]

    # ---- expressions ----

    def share(self, u: int, scale: float, is_so: Callable[[Mode], bool]) -> Terms:
        """scale x the share of unit u in placements of which this holds."""
        return [(scale, c) for k, c in self.choices[u].place.items() if is_so(MODES[k])]

    def placed(self, u: int, part: str, where: str, scale: float = 1.0) -> Terms:
        """scale x the share of unit u whose `params`, `states` or `grads` are `where`, or that is `updated` so."""
        chosen = _with(part, where)
        return [(scale, c) for k, c in self.choices[u].place.items() if k in chosen]

    def away(self, u: int, part: str, scale: float = 1.0) -> Terms:
        """scale x the share that is not on the device."""
        there = _with(part, "device")
        return [(scale, c) for k, c in self.choices[u].place.items() if k not in there]

    def leaving(self, u: int, scale: float = 1.0) -> Terms:
        """scale x the share whose gradients leave the device when they are complete."""
        return self.share(u, scale, lambda mode: mode.updated == "host" or mode.returns_grads)

    def params_of(self, u: int, updated: str, *wheres: str) -> Terms:
        """GB of unit u's trained parameters that are there and are `updated` so."""
        chosen, gb = _with("updated", updated), self.units[u].params_gb
        return [(gb, c) for k, c in self.choices[u].place.items() if k in chosen and MODES[k].params in wheres]

    def params_on(self, u: int, where: str) -> Terms:
        """GB of unit u's parameters, trained and frozen, that are `where`."""
        unit = self.units[u]
        frozen = self.placed(u, "frozen", where, unit.frozen_gb) if unit.frozen_gb else []
        return [*self.placed(u, "params", where, unit.params_gb), *frozen]

    def params_away(self, u: int) -> Terms:
        """GB of unit u's parameters, trained and frozen, that are not on the device."""
        unit = self.units[u]
        frozen = self.away(u, "frozen", unit.frozen_gb) if unit.frozen_gb else []
        return [*self.away(u, "params", unit.params_gb), *frozen]

    def acted(self, u: int, wheres: tuple[str, ...], *, inputs: bool, scale: float = 1.0) -> Terms:
        """scale x GB of unit u's saved tensors (`inputs`: of its input) that wait there."""
        columns = self.choices[u].inputs if inputs else self.choices[u].saved
        return [(scale, columns[where]) for where in wheres if where in columns]

    def recomputed(self, u: int, each: Sequence[float]) -> Terms:
        """The sum over unit u's groups of an amount of each, times the share that is made again."""
        groups = self.units[u].groups
        return [(each[g], c) for g, c in self.choices[u].recompute.items() if each[g] and groups[g].slots]

    def dropped(self, u: int, scale: float) -> Terms:
        """scale x GB of unit u's input that is there for its forward alone."""
        groups = self.units[u].groups
        return [(scale * groups[g].gb, c) for g, c in self.choices[u].recompute.items() if not groups[g].slots]

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

    def compute(self, s: int, *, waits: bool = False, updates: bool = True) -> tuple[float, Terms]:
        """Seconds of window s's compute ops: a constant and what decisions add; perhaps with those in which they wait
        for what devices sum, or without those of updates."""
        window, turn = self.windows[s], self.p.turn
        if window.phase == "fwd":
            each = (self.units[u].fwd_s - (0.0 if waits else self.units[u].fwd_waits_s) for u in window.units)
            return sum(each) * turn, []
        terms: Terms = []
        for u in window.units:
            unit = self.units[u]
            frac = 1.0 if waits else 1.0 - unit.again_waits_frac
            terms += self.recomputed(u, [turn * frac * group.recompute_s for group in unit.groups])
            if updates and self.p.blocks[window.block].last:
                terms += self.placed(u, "states", "device", unit.update_s)
        each = (self.units[u].bwd_s - (0.0 if waits else self.units[u].bwd_waits_s) for u in window.units)
        return sum(each) * turn, terms

    def over_units(self, of: Callable[[int], Terms]) -> Terms:
        """The sum of an expression over all units, as one column."""
        return self.column_for([t for u in range(len(self.units)) for t in of(u)])

    # ---- rows that name a sum ----

    def queue(self, before: Terms, inflow: Terms, outflow: Terms, family: str) -> Terms:
        """A queue's content, as one column: before + inflow - outflow, never negative."""
        return self._equal_to([*before, *inflow, *minus(outflow)], family)

    def carry(self, before: Terms, more: Terms) -> Terms:
        """A column equal to the sum, so that prefix sums stay sparse."""
        return self._equal_to([*before, *more], "prefix sums") if before or more else []

    def _equal_to(self, terms: Terms, family: str) -> Terms:
        """A column that is an expression's value; optional where all that stands in it is."""
        column = self.lp.column(optional=all(self.lp.optional[c] for _, c in terms))
        self.lp.row([(1.0, column), *minus(terms)], low=0.0, high=0.0, family=family)
        return [(1.0, column)]

    def column_for(self, terms: Terms) -> Terms:
        """One column equal to a long sum that many rows use."""
        return self.carry([], terms) if len(terms) > 1 else terms


@cache
def _with(part: str, where: str) -> frozenset[int]:
    """Numbers of the placements in which a part is there, or that are `updated` so."""
    return frozenset(k for k, mode in enumerate(MODES) if getattr(mode, part) == where)


def times(scale: float, terms: Terms) -> Terms:
    return [(scale * a, c) for a, c in terms]


def minus(terms: Terms) -> Terms:
    return times(-1.0, terms)


_choices_of = attrgetter(*(f.name for f in fields(UnitAmounts) if f.name not in ("name", "fetched_from")))


def _alike(problem: Problem, a: int, b: int) -> bool:
    """Whether two units offer the same choices."""
    x, y = problem.units[a], problem.units[b]
    return x.fetched_from == a and y.fetched_from == b and _choices_of(x) == _choices_of(y)
