"""The templates of a chain of units: which cells each kind of turn may reach for, and what has been drawn so far."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import numpy as np

import tierplan.planner.lowering.listing as listing
import tierplan.planner.lowering.turns as turns
import tierplan.planner.lowering.updates as updates
from tierplan.planner.lowering.placing import CELL_FIELDS, Growing, Table, enter
from tierplan.planner.lowering.sketch import NEXT, OWN, OWNER, Facts, Sketch, Terms, moved_together
from tierplan.planner.plan import UnitPlan
from tierplan.sim.columns import Int64, OpLabel, Works
from tierplan.sim.step import unit_spec
from tierplan.sim.workloads.workload import Workload, first_alike

USED = ("params", "owner's params", "frozen", "owner's frozen")
OF_UNIT = (
    "params", "frozen", "states*", "grads", "old grads", "norm", "due", "old states", "new states*", "new params",
    "tied sum",
)  # fmt: skip
CELLS: Mapping[str, tuple[str, str]] = {
    **{name: (name, "u") for name in OF_UNIT},
    **{f"owner's {name}": (name, "o") for name in ("params", "frozen", "tied sum")},
    **{f"{name} in {turn}": (f"{name} in {turn}", "up") for name in USED for turn in ("fwd", "bwd", "turn")},
    **{name: (name, "um") for name in ("x", "kept", "left*", "remade", "tied")},
    "next x": ("x", "nm"),
    "owner's tied": ("tied", "om"),
    **{name: (name, "m") for name in ("shared", "dx")},
    "clip": ("clip", ""),
}
"""Which cell a name means: what it holds, and of which unit (u), next unit (n), owner of shared parameters (o),
micro-batch (m) or pass over the parameters (p). Of those with a star there are several, with numbers in its place; of
`states#` the one is meant that the turn's flag says."""


@dataclass(frozen=True, slots=True, eq=False)
class TurnKind:
    """A kind of turn: what draws it, and what that may reach for."""

    draw: Callable[[Sketch], None] | None
    looks_at: tuple[str, ...]
    """Of the unit's choice, beside whether its update runs on the device: what else there is changes no template."""
    cells: tuple[str, ...]
    ops: tuple[str, ...] = ()
    """Ops that it may come after, given anew each time."""


BEFORE = ("before params", "before early params", "before acts", "before early acts")
TO_UPDATE = ("params", "states#", "due", "old states", "new states#", "new params", "clip")
PARAMS_IN_FORWARD, PARAMS_IN_BACKWARD = (
    (*USED, *(f"{name} in {turn}" for name in USED for turn in (phase, "turn"))) for phase in ("fwd", "bwd")
)
IN_FORWARD = (*PARAMS_IN_FORWARD, "x", "next x", "shared", "kept", "left*")
REMADE = (*PARAMS_IN_BACKWARD, "x", "next x", "shared", "remade")
GRADIENTS = ("tied", "owner's tied", "tied sum", "owner's tied sum", "grads", "norm")
IN_BACKWARD = (*PARAMS_IN_BACKWARD, "x", "shared", "kept", "left*", "remade", "dx", *GRADIENTS)
DECLARED = ("params", "frozen", "states*", "old grads", "clip")
AT_HOME = ("params", "states", "state_shards", "host_shards")

TURNS: Mapping[int, TurnKind] = {
    listing.DECLARE: TurnKind(
        turns.declare, (*AT_HOME, "frozen", "grads", "leaves", "late_update", "late_grads"), DECLARED
    ),
    listing.FORWARD: TurnKind(turns.forward, ("acts", "input"), IN_FORWARD, BEFORE[:2]),
    listing.FETCH: TurnKind(turns.fetch, (), PARAMS_IN_BACKWARD, BEFORE[:2]),
    listing.REMAKE: TurnKind(turns.remake, ("acts",), REMADE, BEFORE),
    listing.BACKWARD: TurnKind(
        turns.backward, ("acts", "grads", "tied_grads", "update", "leaves"), IN_BACKWARD, BEFORE
    ),
    listing.CLIP: TurnKind(updates.clip, (), ("norm", "clip")),
    listing.UPDATE_HERE: TurnKind(
        updates.update_here, ("state_shards",), ("params", "states#", "due", "new params", "clip")
    ),
    listing.ALIAS: TurnKind(None, (), ("due", "grads", "old grads")),
    listing.ARRIVE: TurnKind(updates.arrive, ("state_shards",), TO_UPDATE, tuple(f"read after {k}" for k in range(3))),
    listing.UPDATE: TurnKind(
        updates.update, ("params", "state_shards"), TO_UPDATE, ("update after 0", "update after 1")
    ),
    listing.GO_HOME: TurnKind(updates.go_home, AT_HOME, TO_UPDATE, ("home after",)),
    listing.PARAMS_HOME: TurnKind(updates.params_home, AT_HOME, TO_UPDATE, ("home after",)),
    listing.STATES_HOME: TurnKind(updates.states_home, AT_HOME, TO_UPDATE, ("home after",)),
}
ROW_FIELDS = listing.NUM_KINDS + 4
Made = tuple[str, str, str]
"""Content, tier and kind of a buffer that a turn makes."""


class Chain:
    """A workload with all templates that its plans of the same terms have had so far."""

    def __init__(self, workload: Workload, terms: Terms) -> None:
        self.workload, self.terms, self.works = workload, terms, Works()
        units = workload.units
        number = {unit.name: u for u, unit in enumerate(units)}
        self.owner_of = np.array([number[unit.shares] if unit.shares else len(units) + 1 for unit in units], np.int64)
        self.is_block = np.array([unit.kind == "block" for unit in units], np.bool_)
        self.is_owner = np.array([unit.num_trained > 0 for unit in units], np.bool_)
        self.has_any = np.array([unit.num_parameters > 0 for unit in units], np.bool_)
        self.first_trained = workload.first_trained
        alike = [(first, u <= self.first_trained, u == len(units) - 1) for u, first in enumerate(first_alike(units))]
        self._first = [alike.index(like) for like in alike]
        known: list[dict[UnitPlan, int]] = [{} for _ in units]
        self._known = [known[u] for u in self._first]
        self._rows, self._first_pattern, self._numbers = Growing(), Growing(), dict[tuple[object, ...], int]()
        self.facts: list[Facts] = []
        self._spec = cache(lambda u, acts: unit_spec(units[u], acts))
        self._cells: dict[str, int] = {}
        self.num_cells = self.longest_key = 0
        self.names: list[Mapping[str, int]] = []
        """By pattern: the numbers of its cells, and behind them of ops that come before, in its templates."""
        self.labels: dict[tuple[object, ...], tuple[list[OpLabel], list[Made]]] = {}
        """Of turns that were drawn for their names, by template, unit, micro-batch and what their cells hold."""
        self.rows_by_name = {name: Growing() for name in Table._fields if name != "slots"}
        """Of `Table`."""
        self._slots = np.full(1024, -1, np.int64)

    # ---- what is known of units and choices ----

    def rows(self, choices: Sequence[UnitPlan]) -> Int64:
        """By unit, transposed: the facts of each kind of turn; parts of its states; whether it is updated on the
        device, and late."""
        try:
            found = [known[choice] for known, choice in zip(self._known, choices, strict=True)]
        except KeyError:
            found = [self._row(u, choice) for u, choice in enumerate(choices)]
        every = self._rows.items[: ROW_FIELDS * self._rows.num].reshape(-1, ROW_FIELDS)
        return np.ascontiguousarray(every[found].T)

    def _row(self, u: int, choice: UnitPlan) -> int:
        if choice not in self._known[u]:
            num_parts = len(self.workload.training.state_parts(self.workload.units[u], choice.state_shards))
            facts = [self._numbered(u, kind, choice) for kind in TURNS]
            reads = choice.states == "nvme" and not choice.updates_here
            row = [*facts, num_parts, choice.updates_here, choice.late_update, reads]
            self._known[u][choice] = self._rows.add(row)
        return self._known[u][choice]

    def _numbered(self, u: int, kind: int, choice: UnitPlan) -> int:
        """The number of what a kind of turn knows of a unit and its choice."""
        known = {name: getattr(choice, name) for name in TURNS[kind].looks_at}
        known.setdefault("states", "device" if choice.states == "device" else "host")
        number = self._numbers.setdefault((self._first[u], kind, *known.values()), len(self.facts))
        if number == len(self.facts):
            unit = self.workload.units[u]
            spec = self._spec(self._first[u], known.get("acts", "keep"))
            num_parts = len(self.workload.training.state_parts(unit, known.get("state_shards", 1)))
            moved = moved_together(unit, spec, self.workload.training)
            self.facts.append(Facts(kind, SimpleNamespace(**known), spec, num_parts, moved))
            self._first_pattern.add([self._pattern(kind, len(moved), num_parts)])
        return number

    def _pattern(self, kind: int, *counts: int) -> int:
        """The number of the first pattern of these: there is one for each flag."""
        key = ("pattern", kind, *counts)
        if key not in self._numbers:
            self._numbers[key] = len(self.names)
            for flag in range(max(2, *counts)):
                turn = TURNS[kind]
                if kind == listing.CLIP:
                    owners = np.flatnonzero(self.is_owner)[:: -1 if flag else 1].tolist()
                    fields = [(self.cell("norm") + u, 0, 0, OWN) for u in owners] + [(self.cell("clip"), 0, 0, OWN)]
                    names = [*(f"norm{i}" for i in range(len(owners))), "clip"]
                else:
                    found = list(_names(turn, flag, *counts))
                    names, fields = [name for name, _, _ in found], [self._fields(what, of) for _, what, of in found]
                self.names.append({name: i for i, name in enumerate((*names, *turn.ops))})
                self.longest_key = max(self.longest_key, 2 + len(self.names[-1]))
                self.rows_by_name["patterns"].add([x for field in fields for x in field])
        return self._numbers[key]

    def _fields(self, what: str, of: str) -> tuple[int, int, int, int]:
        """As in `Table.patterns`."""
        num_batches = self.workload.training.gradient_accumulation_steps
        of_unit = 0 if of in ("", "m") else num_batches if len(of) == 2 else 1
        of_batch = int("m" in of or (of == "up" and self.terms.order == "horizontal"))
        whose = NEXT if "n" in of else OWNER if "o" in of else OWN
        return self.cell(what, num_batches if "m" in of or "p" in of else 1), of_unit, of_batch, whose

    def cell(self, what: str, num_batches: int = 1) -> int:
        """The first of all cells of this name; there are as many for each unit, and for two more that are no units."""
        if what not in self._cells:
            self._cells[what] = self.num_cells
            self.num_cells += (len(self.workload.units) + 2) * num_batches
        return self._cells[what]

    def patterns(self, facts: Int64, flag: Int64) -> tuple[Int64, int]:
        """Of turns, and the number of their cells in all."""
        found = self._first_pattern.items[facts] + flag
        return found, int(np.diff(self.rows_by_name["patterns"].begins)[found].sum()) // CELL_FIELDS

    # ---- templates ----

    def add_template(self, key: Int64, rows: Mapping[str, Sequence[int]]) -> None:
        keys = self.rows_by_name["keys"]
        first = keys.add(key.tolist())
        for name, row in rows.items():
            self.rows_by_name[name].add(row)
        if 2 * keys.num > len(self._slots):
            self._slots, first = np.full(2 * len(self._slots), -1, np.int64), 0
        enter(keys.rows, self._slots, first, keys.num)

    @property
    def table(self) -> Table:
        """As it is until something is added."""
        return Table(slots=self._slots, **{name: rows.rows for name, rows in self.rows_by_name.items()})


def _names(turn: TurnKind, flag: int, num_moved: int, num_parts: int) -> Iterator[tuple[str, str, str]]:
    """Of the cells that a turn may reach for: name, what it holds, of what."""
    for name in turn.cells:
        what, of = CELLS[name.replace("#", "*")]
        found = [str(flag)] if name.endswith("#") else [""]
        if name.endswith("*"):
            found = [str(i) for i in range(num_moved if name == "left*" else num_parts)]
        for number in found:
            yield name.rstrip("#*") + number, what.rstrip("*") + number, of
