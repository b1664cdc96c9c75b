"""Templates: what one turn adds to a schedule, drawn once and placed wherever the same turn comes again.

A *turn* is a forward, a recomputation, a backward or an update of one unit, with the copies that hang on it. What it
adds depends on little: the unit's amounts, its choice, and in which tier it finds what it uses. It reaches for that by
the name of a *cell*: `x` is the unit's input for this micro-batch, `params` where its parameters live. A sketch knows
what a cell holds by the cell's name, and has names for what it makes; its `Template` numbers the latter from 0 and the
cells from -1 downwards. Who wants names draws the turn again, for the unit and micro-batch in question.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from tierplan.hwmodels.names import D2H, DEVICE, H2D, HOST, NVME, NVME_READ, NVME_WRITE
from tierplan.planner.lowering.placing import NO_REF
from tierplan.planner.plan import UnitwisePlan
from tierplan.planner.several_devices.kinds import BUFFER_KINDS, OP_KINDS, OTHER, number_of
from tierplan.sim.builder import Builder
from tierplan.sim.columns import BufferLabel, Float64, OpLabel, Works
from tierplan.sim.contents import Content, copy_key, parse_content
from tierplan.sim.schedule import Buffer
from tierplan.sim.step import Action, UnitSpec
from tierplan.sim.workloads.workload import Training, Unit, Workload

TIERS = (DEVICE, HOST, NVME)
COPIES = {
    (HOST, DEVICE): (H2D, "fetch"),
    (DEVICE, HOST): (D2H, "offload"),
    (NVME, HOST): (NVME_READ, "read"),
    (HOST, NVME): (NVME_WRITE, "write"),
}
"""Stream and verb of a copy, by the tiers it goes between."""
EMPTY = -1
"""What an empty cell holds, and its form."""
MOST_TOGETHER_BYTES = 1 << 20
"""Saved tensors that are moved in one copy have at most so many bytes together: an op of its own costs more than the
bytes of a small one."""
AS_IN = "as in "
"""Before the name of a cell: kind or content of what it holds, where nobody wants names."""
OWN, NEXT, OWNER = range(3)
"""Whose something is: the unit's own, the next one's, or that of the unit whose parameters it shares."""
NOW, PARAMS, PARAMS_EARLY, ACTS, ACTS_EARLY, STATES = range(6)
"""How much before its turn an op is wanted. `STATES + n`: the states of one of n + 1 parts."""
FETCHES, COMPUTES, OFFLOADS, UPDATES, GOES_HOME = range(5)
"""Order among ops that are wanted at the same moment."""


def leads(plan: UnitwisePlan, turns: int, num_parts: int) -> Float64:
    """How much before its turn an op is wanted, by the number of its lead; a unit has so many turns, one after the
    other, and states come in so many parts at most."""
    params, acts = plan.prefetch_params_units * turns, plan.prefetch_acts_units
    found = np.zeros(STATES + num_parts)
    found[[PARAMS, PARAMS_EARLY, ACTS, ACTS_EARLY]] = params, params + max(params, 1), acts, acts + max(acts, 1)
    found[STATES:] = [plan.prefetch_states_units * turns / (k + 1) for k in range(num_parts)]
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A turn, placed nowhere yet."""

    ops: list[int]
    """Of each op work, lead, rank, and how many buffers it reads and writes and how many ops it comes after."""
    reads: list[int]
    writes: list[int]
    after: list[int]
    buffers: list[int]
    """Of each tier, bytes, whether initial, the buffer that it reuses."""
    puts: list[int]
    """What cells hold afterwards: cell, buffer and its form, one after the other."""
    marks: Mapping[str, int]
    """Ops that others come after."""
    op_kinds: list[int]
    """As in `Kinds`."""
    buffer_kinds: list[int]
    """Of each buffer kind and content, as in `Kinds`, or the cell that holds the like; and whose it is."""


class Terms(NamedTuple):
    """What a template takes from the plan as a whole. Windows are not part of it: they are places in time."""

    semantics: str
    order: str
    cast_grads: bool
    sums_tied: bool = False
    """A tied head's share of the gradient is summed over micro-batches before its owner's are."""


class Facts(NamedTuple):
    """What a kind of turn knows of a unit and its choice."""

    kind: int
    choice: SimpleNamespace
    """What it may look at of a `UnitPlan`, and nothing else."""
    spec: UnitSpec
    """What happens to what the unit saves; the name may be that of another unit."""
    num_parts: int
    """Of the states."""
    moved: tuple[tuple[int, ...], ...]
    """Saved tensors that are moved, those in one tuple together (`moved_together`)."""


def moved_together(unit: Unit, spec: UnitSpec, training: Training) -> tuple[tuple[int, ...], ...]:
    """Indices of the saved tensors that are moved: of those that go to the same place, small ones by one copy.

    What is coded is coded and moved by itself.
    """
    found: list[list[int]] = []
    open_groups: dict[Action, list[int]] = {}
    for k in spec.moved:
        tensor = spec.saved[k]
        group = open_groups.get(tensor.action, [])
        is_coded = bool(training.coded(unit, unit.saved[k])[0])
        together_bytes = tensor.size_bytes + sum(spec.saved[i].size_bytes for i in group)
        if group and not is_coded and together_bytes <= MOST_TOGETHER_BYTES:
            group.append(k)
            continue
        found.append(group := [k])
        if not is_coded and tensor.size_bytes < MOST_TOGETHER_BYTES:
            open_groups[tensor.action] = group
    return tuple(map(tuple, found))


class Sketch(Builder):
    """A template in the making: what the turn is of, the cells that it finds, and what it adds."""

    def __init__(
        self,
        terms: Terms,
        workload: Workload,
        facts: Facts,
        u: int,
        m: int,
        flag: int,
        cells: Mapping[str, int],
        forms: Sequence[int],
        held: Sequence[BufferLabel],
    ) -> None:
        super().__init__()
        self.plan, self.workload, self.u = terms, workload, u
        self.m = m
        """Which micro-batch: for names alone."""
        self.flag = flag
        """Of an update: its part. Of others: see there."""
        self.choice, self.spec = facts.choice, facts.spec
        self.num_parts, self.moved = facts.num_parts, facts.moved
        self.cells = cells
        """The number of each cell within the template."""
        for cell, i in cells.items():
            if forms[i] != EMPTY:
                _, content, kind = held[i] if i < len(held) else ("", AS_IN + cell, AS_IN + cell)
                size_bytes, tier = divmod(forms[i], len(TIERS))
                self.buffers[cell] = Buffer(
                    name=cell, tier=TIERS[tier], size_bytes=size_bytes, content=content, kind=kind
                )
        self._num_held = len(self.buffers)
        self._positions: list[tuple[int, int]] = []
        self._puts: dict[str, str] = {}
        self._marks: dict[str, int] = {}

    @property
    def unit(self) -> Unit:
        return self.workload.units[self.u]

    def get(self, cell: str) -> str | None:
        """What a cell holds; None if nothing."""
        assert cell in self.cells, f"the turn of {self.unit.name} may not reach for {cell}"
        return self._puts.get(cell) or (cell if cell in self.buffers else None)

    def made(self, cell: str) -> str:
        """What a cell holds, which is something."""
        held = self.get(cell)
        assert held is not None, f"{cell} of {self.unit.name} is empty"
        return held

    def put(self, cell: str, buffer: str) -> str:
        """Has the cell hold the buffer, for the turns to come."""
        self._puts[cell] = buffer
        return buffer

    def tier(self, buffer: str) -> str:
        return self.buffers[buffer].tier

    def op(
        self,
        key: str,
        stream: str,
        kind: str,
        *,
        reads: Iterable[str | None] = (),
        after: Iterable[str] = (),
        rank: int = COMPUTES,
        lead: int = NOW,
        mark: str = "",
        **more: Any,
    ) -> str:
        """Adds an op; `after` names cells of ops, and empty ones are left out. Others find it by its mark."""
        if mark:
            self._marks[mark] = len(self._positions)
        self._positions.append((lead, rank))
        read = [buffer for buffer in reads if buffer is not None]
        ended = [self.get(cell) or "" for cell in after]
        unit = "" if kind == "clip" else self.unit.name
        return super().op(key, stream, kind, reads=read, after=ended, unit=unit, **more)

    def move(self, what: Content | str, source: str, tier: str, *, over: str | None = None, **more: Any) -> str:
        """Copies a buffer into another tier, over one that is there if one is given; the new buffer. `more` is as for
        `op`."""
        stream, verb = COPIES[self.tier(source), tier]
        return self.copy(copy_key(verb, what), stream, source, tier, over=over, **more)

    # ---- what becomes of it ----

    def template(self, works: Works) -> Template:
        made = self.made_buffers()
        number = {cell: -1 - i for cell, i in self.cells.items()} | {b.name: i for i, b in enumerate(made)}

        def numbers(refs: Iterable[Sequence[str]]) -> list[int]:
            return [number[ref] for some in refs for ref in some]

        ops = [
            (works.number(op.stream, op.work), *position, len(op.reads), len(op.writes), len(op.after))
            for op, position in zip(self._ops, self._positions, strict=True)
        ]
        buffers = [
            (TIERS.index(b.tier), b.size_bytes, int(b.initial), number[b.reuses] if b.reuses else NO_REF) for b in made
        ]
        return Template(
            ops=list(chain.from_iterable(ops)),
            reads=numbers(op.reads for op in self._ops),
            writes=numbers(op.writes for op in self._ops),
            after=numbers(op.after for op in self._ops),
            buffers=list(chain.from_iterable(buffers)),
            puts=[n for cell, b in self._puts.items() for n in (self.cells[cell], number[b], _form(self.buffers[b]))],
            marks=self._marks,
            op_kinds=[OP_KINDS.get(op.kind, OTHER) for op in self._ops],
            buffer_kinds=[n for b in made for n in self._kinds_of(b)],
        )

    def _kinds_of(self, buffer: Buffer) -> tuple[int, int, int]:
        """As in `Template.buffer_kinds`."""
        kind = self._cell_of(buffer.kind)
        kind = BUFFER_KINDS.get(buffer.kind, OTHER) if kind is None else kind
        if (of_cell := self._cell_of(buffer.content)) is not None:
            return kind, of_cell, OWN
        content = parse_content(buffer.content)
        own, unit = self.unit.name, getattr(content, "unit", self.unit.name)
        return (
            kind,
            number_of(content),
            OWN if unit == own else OWNER if unit == self.unit.shares else NEXT,
        )

    def _cell_of(self, text: str) -> int | None:
        """The number of the cell that holds something of this kind or content; None where that is known."""
        return -1 - self.cells[text.removeprefix(AS_IN)] if text.startswith(AS_IN) else None

    def op_labels(self) -> list[OpLabel]:
        return [OpLabel(op.key, op.kind, op.unit, op.micro_batch) for op in self._ops]

    def made_buffers(self) -> list[Buffer]:
        """Those of its own; their versions are counted from 0 in each sketch."""
        return list(self.buffers.values())[self._num_held :]


def _form(buffer: Buffer) -> int:
    """Tier and bytes in one number."""
    return len(TIERS) * buffer.size_bytes + TIERS.index(buffer.tier)
