"""Templates: what one turn adds to a schedule, drawn once and placed wherever the same turn comes again.

A *turn* is a forward, a recomputation, a backward or an update of one unit, with the copies that hang on it. What it
adds depends on little: the unit's amounts, its choice, and in which tier it finds what it uses. It reaches for that by
the name of a *cell*: `x` is the unit's input for this micro-batch, `params` where its parameters live. A sketch numbers
its own buffers from 0, and what it finds in cells from -1 downwards; its `Template` has nothing but such numbers. Who
wants names draws the turn again, for the unit and micro-batch in question.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from tierplan.hwmodels.names import DEVICE, HOST, NVME
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.sim.builder import LINKS
from tierplan.sim.columns import Int64, OpLabel, Work
from tierplan.sim.contents import Content, copy_key
from tierplan.sim.step import UnitSpec
from tierplan.sim.workloads.workload import Unit, Workload

__all__ = ["EMPTY", "TIERS", "Ref", "Sketch", "Template", "Works"]

TIERS = (DEVICE, HOST, NVME)
Ref = int
"""A buffer that the sketch has made, or the content of the cell -1, -2, ..."""
EMPTY = -1
"""What an empty cell holds, and its form."""
NO_REF = 2**40
"""No buffer at all, where a buffer is expected."""
NOW, PARAMS, PARAMS_EARLY, ACTS, ACTS_EARLY, STATES = range(6)
"""How much before its turn an op is wanted. `STATES + n`: the states of one of n + 1 parts."""
FETCHES, COMPUTES, OFFLOADS, UPDATES, GOES_HOME = range(5)
"""Order among ops that are wanted at the same moment."""


class Works:
    """The works of all ops so far, each once."""

    def __init__(self) -> None:
        self.listed: list[Work] = []
        self._numbers: dict[tuple[object, ...], int] = {}

    def number(self, stream: str, amounts: Mapping[str, float]) -> int:
        """Of this work; amounts of nothing are left out."""
        amounts = {kind: amount for kind, amount in amounts.items() if amount}
        signature = (stream, *amounts.items(), *map(type, amounts.values()))
        number = self._numbers.setdefault(signature, len(self.listed))
        if number == len(self.listed):
            self.listed.append(Work(stream, amounts))
        return number


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A turn, placed nowhere yet."""

    ops: Int64
    """Rows: work, lead, rank, and how many buffers each op reads and writes and how many ops it comes after."""
    reads: Int64
    writes: Int64
    after: Int64
    buffers: Int64
    """Rows: tier, bytes, whether initial, the buffer that it reuses."""
    puts: Sequence[tuple[int, Ref, int]]
    """What cells hold afterwards: cell, buffer and its form."""
    marks: Mapping[str, int]
    """Ops that others come after."""
    num_ops: int
    num_buffers: int


@dataclass(slots=True)
class Sketch:
    """A template in the making: what the turn is of, the cells that it finds, and what it has made."""

    plan: UnitwisePlan
    """Of this, a sketch may look only at what `templates.Terms` names."""
    workload: Workload
    works: Works
    u: int
    m: int
    """Which micro-batch: for names alone."""
    flag: int
    """Of an update: its part. Of others: see there."""
    choice: UnitPlan
    spec: UnitSpec
    """What happens to what the unit saves; its name may be that of another unit."""
    num_parts: int
    cells: Mapping[str, int]
    """The number of each cell within the template."""
    forms: Sequence[int]
    """Of what each cell holds: tier and bytes of a buffer, 0 of an op, `EMPTY`."""
    contents: list[tuple[Content, str] | Ref] = field(default_factory=list)
    """Of each buffer, with its kind; or the buffer that it has both from."""
    labels: list[OpLabel] = field(default_factory=list)
    _ops: list[tuple[int, ...]] = field(default_factory=list)
    _refs: tuple[list[Ref], list[Ref], list[Ref]] = field(default_factory=lambda: ([], [], []))
    _buffers: list[tuple[int, ...]] = field(default_factory=list)
    _puts: dict[str, Ref] = field(default_factory=dict)
    _marks: dict[str, int] = field(default_factory=dict)

    # ---- whose turn it is ----

    @property
    def unit(self) -> Unit:
        return self.workload.units[self.u]

    @property
    def following(self) -> Unit | None:
        """The next unit."""
        return self.workload.units[self.u + 1] if self.u + 1 < len(self.workload.units) else None

    # ---- cells ----

    def get(self, cell: str) -> Ref | None:
        """What a cell holds; None if nothing."""
        if cell in self._puts:
            return self._puts[cell]
        index = self.cells[cell]
        return -1 - index if self.forms[index] != EMPTY else None

    def made(self, cell: str) -> Ref:
        """What a cell holds, which is something."""
        held = self.get(cell)
        assert held is not None, f"{cell} of {self.unit.name} is empty"
        return held

    def put(self, cell: str, buffer: Ref) -> Ref:
        """Has the cell hold the buffer, for the turns to come."""
        self._puts[cell] = buffer
        return buffer

    def tier(self, buffer: Ref) -> str:
        return TIERS[self._buffers[buffer][0] if buffer >= 0 else self.forms[-1 - buffer] % 4]

    def size_bytes(self, buffer: Ref) -> int:
        return self._buffers[buffer][1] if buffer >= 0 else self.forms[-1 - buffer] // 4

    # ---- buffers ----

    def buffer(self, content: Content, kind: str, tier: str, size_bytes: int, *, reuses: Ref | None = None) -> Ref:
        """A buffer of its own, or one that takes over the bytes of another."""
        return self._add((content, kind), tier, size_bytes, reuses=reuses)

    def initial(self, content: Content, kind: str, tier: str, size_bytes: int) -> Ref:
        """A buffer that is there before the step."""
        return self._add((content, kind), tier, size_bytes, initial=True)

    def over(self, old: Ref) -> Ref:
        """A buffer that takes over the bytes of `old`: an in-place update."""
        return self._add(old, self.tier(old), self.size_bytes(old), reuses=old)

    def _add(
        self,
        content: tuple[Content, str] | Ref,
        tier: str,
        size_bytes: int,
        *,
        initial: bool = False,
        reuses: Ref | None = None,
    ) -> Ref:
        self._buffers.append((TIERS.index(tier), size_bytes, int(initial), NO_REF if reuses is None else reuses))
        self.contents.append(content)
        return len(self._buffers) - 1

    # ---- ops ----

    def op(
        self,
        key: str,
        stream: str,
        kind: str,
        *,
        work: Mapping[str, float],
        reads: Iterable[Ref | None],
        writes: Iterable[Ref | None],
        after: Iterable[str] = (),
        m: int = 0,
        rank: int,
        lead: int = NOW,
        mark: str = "",
    ) -> None:
        """Adds an op; what is None is left out, and `after` names cells of ops. Others find it by its mark."""
        counts = []
        for role, refs in zip(self._refs, (reads, writes, map(self.get, after)), strict=True):
            listed = [ref for ref in dict.fromkeys(refs) if ref is not None]
            role += listed
            counts.append(len(listed))
        if mark:
            self._marks[mark] = len(self._ops)
        self._ops.append((self.works.number(stream, work), lead, rank, *counts))
        self.labels.append(OpLabel(key, kind, "" if kind == "clip" else self.unit.name, m))

    def move(
        self,
        what: Content | str,
        source: Ref,
        tier: str,
        *,
        over: Ref | None = None,
        after: Iterable[str] = (),
        m: int = 0,
        rank: int,
        lead: int = NOW,
        mark: str = "",
    ) -> Ref:
        """Copies a buffer into another tier, over one that is there if one is given; the new buffer."""
        stream, verb = LINKS[self.tier(source), tier]
        size_bytes = self.size_bytes(source)
        target = self._add(source, tier, size_bytes) if over is None else self.over(over)
        self.op(
            copy_key(verb, what),
            stream,
            "copy",
            work={"bytes": size_bytes},
            reads=(source, over),
            writes=(target,),
            after=after,
            m=m,
            rank=rank,
            lead=lead,
            mark=mark,
        )
        return target

    def template(self) -> Template:
        puts = [
            (self.cells[cell], b, 4 * self.size_bytes(b) + TIERS.index(self.tier(b))) for cell, b in self._puts.items()
        ]
        reads, writes, after = (np.array(role, np.int64) for role in self._refs)
        return Template(
            ops=_columns(self._ops, 6),
            reads=reads,
            writes=writes,
            after=after,
            buffers=_columns(self._buffers, 4),
            puts=puts,
            marks=self._marks,
            num_ops=len(self._ops),
            num_buffers=len(self._buffers),
        )


def _columns(rows: Sequence[tuple[int, ...]], width: int) -> Int64:
    return np.ascontiguousarray(np.array(rows, np.int64).reshape(-1, width).T)
