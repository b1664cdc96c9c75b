"""Templates: what one turn adds to a schedule, drawn once and placed wherever the same turn comes again.

A *turn* is a forward, a recomputation, a backward or an update of one unit, with the copies that hang on it. What it
adds depends on little: the unit's amounts, its choice, and in which tier it finds what it uses. It reaches for that by
the name of a *cell*: `x` is the unit's input for this micro-batch, `params` where its parameters live. A sketch knows
what a cell holds by the cell's name; its template is rows of numbers. Who wants names draws the turn again, for the
unit and micro-batch in question.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from tierplan.hwmodels.names import D2H, DEVICE, H2D, HOST, NVME, NVME_READ, NVME_WRITE
from tierplan.planner.lowering.listing import EMPTY, MARKS
from tierplan.planner.lowering.placing import NO_REF
from tierplan.planner.plan import GradientsByLink, UnitwisePlan
from tierplan.planner.several_devices.kinds import BUFFER_KINDS, OP_KINDS, OTHER, number_of
from tierplan.sim.builder import Builder, Said, said
from tierplan.sim.columns import Float64, Works
from tierplan.sim.contents import Content, copy_key
from tierplan.sim.step import Action, UnitSpec
from tierplan.sim.workloads.workload import DTYPE_BYTES, Training, Unit, Workload

TIERS = (DEVICE, HOST, NVME)
COPIES = {
    (HOST, DEVICE): (H2D, "fetch"),
    (DEVICE, HOST): (D2H, "offload"),
    (NVME, HOST): (NVME_READ, "read"),
    (HOST, NVME): (NVME_WRITE, "write"),
}
"""Stream and verb of a copy, by the tiers it goes between."""
MOST_TOGETHER_BYTES = 1 << 20
"""Saved tensors that are moved in one copy have at most so many bytes together: an op of its own costs more than the
bytes of a small one."""
OWN, NEXT, OWNER = range(3)
"""Whose something is: the unit's own, the next one's, or that of the unit whose parameters it shares."""
NOW, PARAMS, PARAMS_EARLY, ACTS, ACTS_EARLY, STATES = range(6)
"""How much before its turn an op is wanted. `STATES + n`: the states of one of n + 1 parts."""
FETCHES, COMPUTES, OFFLOADS, UPDATES, GOES_HOME = range(5)
"""Order among ops that are wanted at the same moment."""

FP32_BYTES = DTYPE_BYTES["fp32"]
"""Bytes of a number in fp32."""


def leads(plan: UnitwisePlan, turns: int, num_parts: int) -> Float64:
    """How much before its turn an op is wanted, by the number of its lead; a unit has so many turns, one after the
    other, and states come in so many parts at most."""
    params, acts = plan.prefetch_params_units * turns, plan.prefetch_acts_units
    found = np.zeros(STATES + num_parts)
    found[[PARAMS, PARAMS_EARLY, ACTS, ACTS_EARLY]] = params, params + max(params, 1), acts, acts + max(acts, 1)
    found[STATES:] = [plan.prefetch_states_units * turns / (k + 1) for k in range(num_parts)]
    return found


class Terms(NamedTuple):
    """What a template takes from the plan as a whole. Windows are not part of it: they are places in time."""

    semantics: str
    order: str
    by_link: GradientsByLink | None
    sums_tied: bool = False
    """A tied head's share of the gradient is summed over micro-batches before its owner's are."""
    fp32_by_link: bool = False
    """Copies of parameters and gradients hold the link as those in fp32 do."""


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
    """A template in the making: what the turn is of, the cells that it finds, and what it adds.

    What cells hold are its first buffers. Where nobody wants names, their kinds and contents are numbers: of the cells,
    as in templates.
    """

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
        held: Sequence[tuple[str, str, str]],
        works: Works,
    ) -> None:
        super().__init__(works)
        self.plan, self.workload, self.u = terms, workload, u
        self.m = m
        """Which micro-batch: for names alone."""
        self.flag = flag
        """Of an update: its part. Of others: see there."""
        self.choice, self.spec = facts.choice, facts.spec
        self.num_parts, self.moved = facts.num_parts, facts.moved
        self.cells = cells
        """The number of each cell within the template."""
        self._held: dict[str, int] = {}
        for cell, i in cells.items():
            if forms[i] != EMPTY:
                content, _, kind = held[i] if i < len(held) else (-1 - i, "", -1 - i)
                size_bytes, tier = divmod(forms[i], len(TIERS))
                self._held[cell] = self.buffer(content, TIERS[tier], size_bytes, kind)  # type: ignore[arg-type]
        self._positions: list[tuple[int, int]] = []
        self._puts: dict[str, int] = {}
        self._marks: dict[str, int] = {}

    @property
    def unit(self) -> Unit:
        return self.workload.units[self.u]

    @property
    def goes_by_link(self) -> bool:
        """Whether the sum of the unit's gradients leaves the device as `GradientsByLink` says."""
        by_link, choice = self.plan.by_link, self.choice
        return by_link is not None and (choice.grads != "device" or (by_link.once and choice.leaves))

    def held_in_fp32(self, moved: int) -> float:
        """For how many bytes more the copy of parameters or gradients holds the link (`fp32_by_link`)."""
        wide = FP32_BYTES / self.workload.training.param_bytes if self.plan.fp32_by_link else 1
        return (wide - 1) * self.sizes_bytes[moved]

    def get(self, cell: str) -> int | None:
        """What a cell holds; None if nothing."""
        assert cell in self.cells, f"the turn of {self.unit.name} may not reach for {cell}"
        return self._puts.get(cell, self._held.get(cell))

    def made(self, cell: str) -> int:
        """What a cell holds, which is something."""
        held = self.get(cell)
        assert held is not None, f"{cell} of {self.unit.name} is empty"
        return held

    def put(self, cell: str, buffer: int) -> int:
        """Has the cell hold the buffer, for the turns to come."""
        self._puts[cell] = buffer
        return buffer

    def op(
        self,
        key: Said,
        stream: str,
        kind: str,
        *,
        after: Sequence[int | None] = (),
        rank: int = COMPUTES,
        lead: int = NOW,
        mark: str = "",
        **more: Any,
    ) -> int:
        """Adds an op; what it comes `after` is in cells, if they hold anything. Others find it by its mark."""
        self._place(rank, lead, mark)
        unit = "" if kind == "clip" else self.unit.name
        return super().op(key, stream, kind, after=[op for op in after if op is not None], unit=unit, **more)

    def move(
        self,
        what: Content | str,
        source: int,
        tier: str,
        *,
        rank: int,
        after: Sequence[int | None] = (),
        lead: int = NOW,
        mark: str = "",
        **more: Any,
    ) -> int:
        """Copies a buffer into another tier, over one that is there if one is given; the new buffer. As for
        `Builder.copy`."""
        self._place(rank, lead, mark)
        stream, verb = COPIES[self.tiers[source], tier]
        ended, unit = [op for op in after if op is not None], self.unit.name
        return self.copy(copy_key(verb, what), stream, source, tier, after=ended, unit=unit, **more)

    def _place(self, rank: int, lead: int, mark: str) -> None:
        if mark:
            self._marks[mark] = len(self._positions)
        self._positions.append((lead, rank))

    # ---- what becomes of it ----

    def rows(self) -> dict[str, list[int]]:
        """Those of its template, by name, as in `Table`."""
        made = range(len(self._held), len(self.tiers))
        number = [-1 - self.cells[cell] for cell in self._held] + [*range(len(made))]
        ops = [
            (work, *position, len(reads), len(writes), len(after), OP_KINDS.get(kind, OTHER))
            for (work, reads, writes, after, _, kind, *_), position in zip(self._ops, self._positions, strict=True)
        ]
        buffers = [
            (
                TIERS.index(self.tiers[b]),
                self.sizes_bytes[b],
                int(b in self._initial),
                number[self._reuses[b]] if b in self._reuses else NO_REF,
                *self._kinds_of(b),
            )
            for b in made
        ]
        return {
            "totals": [len(ops), len(buffers), *(self._marks.get(mark, -1) for mark in MARKS)],
            "puts": [n for cell, b in self._puts.items() for n in (self.cells[cell], number[b], self._form(b))],
            "ops": [*chain.from_iterable(ops)],
            "reads": [number[b] for _, reads, *_ in self._ops for b in reads],
            "writes": [number[b] for _, _, writes, *_ in self._ops for b in writes],
            "after": [number[b] for _, _, _, after, *_ in self._ops for b in after],
            "buffers": [*chain.from_iterable(buffers)],
        }

    def _form(self, buffer: int) -> int:
        """Tier and bytes in one number."""
        return len(TIERS) * self.sizes_bytes[buffer] + TIERS.index(self.tiers[buffer])

    def _kinds_of(self, buffer: int) -> tuple[int, int, int]:
        """Kind and content, as in `Kinds` or the cell that holds the like, and whose it is."""
        kind, content = self.kinds[buffer], self.contents[buffer]
        kind = kind if isinstance(kind, int) else BUFFER_KINDS.get(kind, OTHER)
        if isinstance(content, int):
            return kind, content, OWN
        own, unit = self.unit.name, getattr(content, "unit", self.unit.name)
        return kind, number_of(content), OWN if unit == own else OWNER if unit == self.unit.shares else NEXT

    # ---- its names ----

    def made_buffers(self) -> list[tuple[str, str, str]]:
        """Content, tier and kind of those of its own."""
        every = zip(self.contents, self.tiers, self.kinds, strict=True)
        return [(str(said(content)), tier, kind) for content, tier, kind in every][len(self._held) :]
