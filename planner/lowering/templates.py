"""The templates of a chain of units: which cells each kind of turn may reach for, and what has been drawn so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from tierplan.planner.lowering.placing import Growing, Rows, Table, enter
from tierplan.planner.lowering.sketch import Sketch, Template
from tierplan.planner.lowering.turns import (
    arrive,
    backward,
    clip,
    declare,
    fetch,
    forward,
    go_home,
    remake,
    update,
    update_here,
)
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.sim.columns import Int64, Works
from tierplan.sim.contents import part_ranges
from tierplan.sim.step import UnitSpec, unit_spec
from tierplan.sim.workloads.workload import Workload

USED = ("params", "owner's params")
CELLS: Mapping[str, tuple[str, str]] = {
    "params": ("params", "u"),
    "owner's params": ("params", "o"),
    **{f"{name} in {turn}": (f"{name} in {turn}", "up") for name in USED for turn in ("fwd", "bwd", "turn")},
    "x": ("x", "um"),
    "next x": ("x", "nm"),
    "shared": ("shared", "m"),
    "kept": ("kept", "um"),
    "left*": ("left*", "um"),
    "remade": ("remade", "um"),
    "dx": ("dx", "m"),
    "tied": ("tied", "um"),
    "owner's tied": ("tied", "om"),
    **{name: (name, "u") for name in ("states*", "grads", "old grads", "norm", "due", "old states", "new states")},
    "new params": ("new params", "u"),
    "clip": ("clip", ""),
}
"""Which cell a name means: what it holds, and of which unit (u), next unit (n), owner of shared parameters (o),
micro-batch (m) or pass over the parameters (p). Of those with a star there are several, with numbers in its place; of
`states#` the one is meant that the turn's flag says."""


@dataclass(frozen=True, slots=True, eq=False)
class TurnKind:
    """A kind of turn: what draws it, and what that may reach for."""

    draws: tuple[Callable[[Sketch], None], ...]
    cells: tuple[str, ...]
    ops: tuple[str, ...] = ()
    """Ops that it may come after, given anew each time."""


BEFORE = ("before params", "before early params", "before acts", "before early acts")
TO_UPDATE = ("params", "states#", "due", "old states", "new states", "new params", "clip")
AFTER = ("read after 0", "read after 1", "read after 2", "update after 0", "update after 1")
IN_FORWARD = (*USED, *(f"{name} in {turn}" for name in USED for turn in ("fwd", "turn")))
IN_BACKWARD = (*USED, *(f"{name} in {turn}" for name in USED for turn in ("bwd", "turn")))

DECLARE = TurnKind((declare,), ("params", "states*", "old grads"))
FORWARD = TurnKind((forward,), (*IN_FORWARD, "x", "next x", "shared", "kept", "left*"), BEFORE[:2])
FETCH = TurnKind((fetch,), IN_BACKWARD, BEFORE[:2])
REMAKE = TurnKind((remake,), (*IN_BACKWARD, "x", "next x", "shared", "remade"), BEFORE)
GRADIENTS = ("tied", "owner's tied", "grads", "norm")
BACKWARD = TurnKind((backward,), (*IN_BACKWARD, "x", "shared", "kept", "left*", "remade", "dx", *GRADIENTS), BEFORE)
CLIP = TurnKind((clip,), ("clip",))
UPDATE_HERE = TurnKind((update_here,), ("params", "states#", "due", "clip"))
ARRIVE = TurnKind((arrive,), TO_UPDATE, AFTER)
UPDATE = TurnKind((update,), TO_UPDATE, AFTER)
GO_HOME = TurnKind((go_home,), TO_UPDATE, ("home after",))
ALIAS = TurnKind((), ())
UPDATE_AND_GO = TurnKind((arrive, update, go_home), TO_UPDATE, (*AFTER, "home after"))


MARKS = ("compute", "read", "home")
"""Ops of turns that others come after, in the order of their numbers in `placing`."""


class Terms(NamedTuple):
    """What a template takes from the plan as a whole. Windows are not part of it: they are places in time."""

    semantics: str
    order: str
    cast_grads: bool


class Facts(NamedTuple):
    """What one choice means for one unit."""

    number: int
    """The same for units and choices that have the same templates."""
    spec: UnitSpec
    """What happens to what the unit saves; with the name of the first unit for which it does."""
    num_moved: int
    num_parts: int


class Place(NamedTuple):
    """A turn of one unit and micro-batch."""

    turn: TurnKind
    u: int
    m: int
    flag: int
    names: Mapping[str, int]
    """The numbers of its cells in its template, by name."""


class Drawn:
    """All places and templates for plans of the same terms."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.numbers: dict[tuple[object, ...], int] = {}
        """Of places, by all that tells them apart."""
        self.templates: list[Template] = []
        self.longest = 0
        """Cells and ops that a turn may reach for, at most."""
        self._bases: dict[tuple[object, ...], int] = {}
        self._cells, self._keys, self._puts, self._totals = Growing(), Growing(), Growing(), Growing()
        self._parts = {name: Growing() for name in ("ops", "reads", "writes", "after", "buffers")}
        self._slots = np.full(1024, -1, np.int64)

    def add_place(self, key: tuple[object, ...], place: Place, cells: Sequence[int], facts: Facts) -> int:
        base = self._bases.setdefault((place.turn, facts.number, place.flag), len(self._bases))
        self.places.append(place)
        self.longest = max(self.longest, len(cells) + len(place.turn.ops))
        number = self.numbers[key] = self._cells.add([base, *cells])
        return number

    def add_alias(self, key: tuple[object, ...], cell: int, of: int) -> int:
        """A place where one cell comes to hold what another does."""
        self.places.append(Place(ALIAS, 0, 0, 0, {}))
        number = self.numbers[key] = self._cells.add([-1, cell, of])
        return number

    def add_template(self, key: Int64, template: Template) -> None:
        self.templates.append(template)
        number = self._keys.add(key.tolist())
        self._puts.add(template.puts)
        marks = [template.marks.get(mark, -1) for mark in MARKS]
        self._totals.add([template.num_ops, template.num_buffers, *marks])
        for name, rows in self._parts.items():
            rows.add(getattr(template, name))
        first = number
        if 2 * len(self.templates) > len(self._slots):
            self._slots, first = np.full(2 * len(self._slots), -1, np.int64), 0
        enter(self._keys.rows, self._slots, first, len(self.templates))

    def forms(self, template: int) -> list[int]:
        """Of the cells and ops that a template comes after."""
        begins, items = self._keys.rows
        return items[begins[template] + 1 : begins[template + 1]].tolist()  # type: ignore[no-any-return]

    @property
    def table(self) -> Table:
        """As it is until a place or template is added."""
        return Table(self._cells.rows, self._keys.rows, self._puts.rows, self._totals.rows, self._slots)

    @property
    def parts(self) -> tuple[Rows, ...]:
        """Ops, reads, writes, after and buffers by template."""
        return tuple(rows.rows for rows in self._parts.values())


class Chain:
    """A workload with all templates that its plans have had so far."""

    def __init__(self, workload: Workload) -> None:
        self.workload, self.works = workload, Works()
        units = workload.units
        number = {unit.name: u for u, unit in enumerate(units)}
        self._owner = [number[unit.shares] if unit.shares else -1 for unit in units]
        alike = [(replace(unit, name=""), u == 0, u == len(units) - 1) for u, unit in enumerate(units)]
        first = [alike.index(like) for like in alike]
        known: list[dict[UnitPlan, Facts]] = [{} for _ in units]
        self._facts = [known[u] for u in first]
        self._num_facts = 0
        self._cells: dict[tuple[str, tuple[int, ...]], int] = {}
        self._names: dict[tuple[object, ...], tuple[Mapping[str, int], list[tuple[str, str]]]] = {}
        self._drawn: dict[Terms, Drawn] = {}
        names = ("grads", "old grads", "due", "norm", "clip")
        self.cells = {name: [self._cell(name, u, 0, 0) for u in range(len(units))] for name in names}
        """Numbers of these cells of each unit."""

    def facts(self, u: int, choice: UnitPlan) -> Facts:
        known = self._facts[u].get(choice)
        if known is None:
            unit = self.workload.units[u]
            spec = unit_spec(unit, choice.acts)
            num_parts = len(part_ranges(unit.num_parameters, choice.state_shards))
            known = self._facts[u][choice] = Facts(self._num_facts, spec, len(spec.moved), num_parts)
            self._num_facts += 1
        return known

    def drawn(self, plan: UnitwisePlan) -> Drawn:
        """What has been drawn for plans with the same terms."""
        return self._drawn.setdefault(Terms(plan.semantics, plan.order, plan.cast_grads), Drawn())

    @property
    def num_cells(self) -> int:
        return len(self._cells)

    def cells_of(
        self, turn: TurnKind, u: int, m: int, flag: int, facts: Facts, *, is_vertical: bool
    ) -> tuple[Mapping[str, int], list[int]]:
        """What a turn of unit u may reach for: numbers in its template by name, and the cells."""
        counts = (turn, flag, facts.num_moved, facts.num_parts)
        if counts not in self._names:
            found = list(_names(*counts))
            numbers = {name: i for i, name in enumerate((*(name for name, _, _ in found), *turn.ops))}
            self._names[counts] = numbers, [(what, of) for _, what, of in found]
        names, wanted = self._names[counts]
        at, known = self._at(u, m, 0 if is_vertical else m), self._cells
        return names, [known.setdefault((what, at[of]), len(known)) for what, of in wanted]

    def _cell(self, name: str, u: int, m: int, batch: int) -> int:
        what, of = CELLS[name]
        return self._cells.setdefault((what, self._at(u, m, batch)[of]), len(self._cells))

    def _at(self, u: int, m: int, batch: int) -> dict[str, tuple[int, ...]]:
        """Where a cell is, by what it is of."""
        owner = self._owner[u]
        one = {"": (), "u": (u,), "o": (owner,), "m": (m,)}
        return {**one, "um": (u, m), "nm": (u + 1, m), "om": (owner, m), "up": (u, batch)}


def _names(turn: TurnKind, flag: int, num_moved: int, num_parts: int) -> Iterator[tuple[str, str, str]]:
    """Of the cells that a turn may reach for: name, what it holds, of what."""
    for name in turn.cells:
        what, of = CELLS[name.replace("#", "*")]
        found = [str(flag)] if name.endswith("#") else [""]
        if name.endswith("*"):
            found = [str(i) for i in range(num_moved if name == "left*" else num_parts)]
        for number in found:
            yield name.rstrip("#*") + number, what.rstrip("*") + number, of
