"""A schedule of several devices in the making, as columns. Buffers and ops are known by their numbers.

Schedules of packs are many and long, and hardly ever named. So each text is kept as what makes it of what, which is
called when somebody asks for names: `(forward_key, "L0", 3)` for `forward_key("L0", 3)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import device_index
from tierplan.planner.plan import PackPlan, PagedPlan
from tierplan.sim.builder import tiers_of
from tierplan.sim.columns import BufferLabel, Int32, Labels, OpLabel, ScheduleColumns, Works, lists_of
from tierplan.sim.contents import Content, buffer_name, device_name
from tierplan.sim.step import StepSpec
from tierplan.sim.workloads.workload import Workload

Said = str | Content | tuple[Any, ...]
"""A text, or a function and what it takes, each of which may be another such tuple. None is a method of the builder: it
would be kept, with all of its schedule, until cycles are collected."""
NONE = -1
_Op = tuple[int, Sequence[int], Sequence[int], Sequence[int], Said, str, str, int]
"""Its work, what it reads and writes, what it comes after, its key, kind, unit and micro-batch."""


def said(text: Any) -> Any:
    """A text itself; of a tuple, what the function makes of its arguments."""
    return text[0](*map(said, text[1:])) if isinstance(text, tuple) else text


class ColumnBuilder:
    """Buffers and ops so far; methods return the numbers of those that they make."""

    def __init__(self, plan: PackPlan | PagedPlan, workload: Workload, machine: Machine) -> None:
        self.plan, self.workload, self.machine = plan, workload, machine
        # one entry each per buffer
        self.tiers: list[str] = []
        self.sizes_bytes: list[int] = []
        self.contents: list[Said] = []
        self._kinds: list[str] = []
        # of some
        self._initial: list[int] = []
        self._reuses: dict[int, int] = {}
        self._becomes: dict[int, int] = {}
        self._owners: dict[int, int] = {}
        # one entry each per op
        self._ops: list[_Op] = []
        self._works = Works()
        self._numbers: dict[tuple[str, int], tuple[int, Mapping[str, float]]] = {}  # by stream, and which amounts
        self._copies: dict[tuple[str, int], int] = {}  # by stream and bytes

    # ---- buffers ----

    def buffer(
        self, content: Said, tier: str, size_bytes: int, kind: str, *, reuses: int = NONE, owner: int | None = None
    ) -> int:
        """A new buffer; with `reuses` it takes over the bytes of that one.

        The `owner` of what is not on a device is the device whose process has it, where each has its own memory.
        """
        number = len(self.tiers)
        self.tiers.append(tier)
        self.sizes_bytes.append(size_bytes)
        self.contents.append(content)
        self._kinds.append(kind)
        if reuses != NONE:
            self._reuses[number] = reuses
        if owner is not None:
            self._owners[number] = owner
        return number

    def home(self, content: Said, tier: str, size_bytes: int, kind: str, *, owner: int | None = None) -> int:
        """An initial buffer that exists in every step: its latest version outlives the step."""
        number = self.buffer(content, tier, size_bytes, kind, owner=owner)
        self._initial.append(number)
        self._becomes[number] = number
        return number

    def over(self, old: int, content: Said | None = None) -> int:
        """A buffer that takes over the bytes of `old`, and its identity in the next step: an in-place update."""
        content = self.contents[old] if content is None else content
        tier, size_bytes, kind = self.tiers[old], self.sizes_bytes[old], self._kinds[old]
        new = self.buffer(content, tier, size_bytes, kind, reuses=old, owner=self._owners.get(old))
        if old in self._becomes:
            self._becomes[new] = self._becomes.pop(old)
        return new

    def owner(self, buffer: int) -> int | None:
        """The device that it is on, or whose process has it."""
        index = device_index(self.tiers[buffer])
        return self._owners.get(buffer) if index is None else index

    def replaces(self, new: int, old: int) -> None:
        """The buffer `new` outlives the step, and is the initial buffer `old` in the next one."""
        self._becomes.pop(old, None)
        self._becomes[new] = old

    def like(self, source: int, tier: str, owner: int | None = None) -> int:
        """A buffer for the content of `source` in another tier."""
        return self.buffer(self.contents[source], tier, self.sizes_bytes[source], self._kinds[source], owner=owner)

    # ---- ops ----

    def op(
        self,
        key: Said,
        stream: str,
        kind: str,
        *,
        work: Mapping[str, float],
        reads: Iterable[int | None] = (),
        writes: Sequence[int] = (),
        after: Sequence[int] = (),
        unit: str = "",
        m: int = 0,
    ) -> int:
        """Adds an op. Amounts of nothing, and what is named twice or None, are left out."""
        known = self._numbers.get((stream, id(work)))
        if known is None:  # which keeps the amounts, so that no others come to have their id
            number = self._works.number(stream, {name: amount for name, amount in work.items() if amount})
            known = self._numbers[stream, id(work)] = number, work
        read = dict.fromkeys(reads)
        read.pop(None, None)
        after = after if len(after) < 2 else [*dict.fromkeys(after)]
        self._ops.append((known[0], [*read], writes, after, key, kind, unit, m))  # type: ignore[list-item]
        return len(self._ops) - 1

    def copy(
        self,
        key: Said,
        stream: str,
        source: int,
        tier: str,
        *,
        over: int | None = None,
        owner: int | None = None,
        after: Sequence[int] = (),
        unit: str = "",
        m: int = 0,
    ) -> int:
        """Adds a copy of `source` into `tier`, over the buffer `over` if one is given; the new buffer."""
        size_bytes = self.sizes_bytes[source]
        content, reads = self.contents[source], (source,) if over is None else (source, over)
        if over is None:
            target = self.buffer(content, tier, size_bytes, self._kinds[source], owner=owner)
        else:
            target = self.over(over, content)
        number = self._copies.get((stream, size_bytes))
        if number is None:
            work = {"bytes": size_bytes} if size_bytes else {}
            number = self._copies[stream, size_bytes] = self._works.number(stream, work)
        after = after if len(after) < 2 else [*dict.fromkeys(after)]
        self._ops.append((number, reads, (target,), after, key, "copy", unit, m))
        return target

    @property
    def last_op(self) -> int:
        """The one that was added last."""
        return len(self._ops) - 1

    # ---- all of it ----

    def step(self) -> StepSpec | None:
        """What the runtime has to know; nothing where it executes no such schedule."""
        return None

    def meta(self) -> Mapping[str, object]:
        """Facts for people and reports."""
        raise NotImplementedError

    def columns(self, *, next_devices: tuple[int, ...] = ()) -> ScheduleColumns:
        """All of it, in list order."""
        tiers, num = tiers_of(self.machine), len(self.tiers)
        number = {t.name: i for i, t in enumerate(tiers)}
        initial = np.zeros(num, np.bool_)
        initial[self._initial] = True
        work, reads, writes, after, *_ = zip(*self._ops, strict=True)
        return ScheduleColumns(
            tiers=tiers,
            works=tuple(self._works.listed),
            op_work=np.array(work, np.int32),
            reads=lists_of(reads),
            writes=lists_of(writes),
            after=lists_of(after),
            buffer_tier=np.array([number[tier] for tier in self.tiers], np.int32),
            buffer_bytes=np.array(self.sizes_bytes, np.int64),
            buffer_initial=initial,
            buffer_reuses=_column(self._reuses, num),
            buffer_becomes=_column(self._becomes, num),
            labels=self._labels,
            next_devices=next_devices,
        )

    def _labels(self) -> Labels:
        versions: dict[tuple[str, str], int] = {}
        buffers = []
        for b, (text, tier, kind) in enumerate(zip(self.contents, self.tiers, self._kinds, strict=True)):
            content = str(said(text))
            version = versions[content, tier] = versions.get((content, tier), -1) + 1
            name = buffer_name(content, tier, version)
            name = device_name(name, self._owners[b]) if b in self._owners else name
            buffers.append(BufferLabel(name, content, kind))
        return Labels(
            name=f"{self.plan.policy} {self.workload.name}",
            ops=[OpLabel(str(said(key)), kind, unit, m) for *_, key, kind, unit, m in self._ops],
            buffers=buffers,
            step=self.step(),
            meta=self.meta(),
        )


def _column(numbers: Mapping[int, int], length: int) -> Int32:
    """One entry for each buffer: of some a number, of others `NONE`."""
    column = np.full(length, NONE, np.int32)
    column[[*numbers]] = [*numbers.values()]
    return column
