"""A schedule in the making: what every lowering does alike.

Buffers and ops are known by their numbers, and ops are added in list order. Schedules are many and long, and hardly
ever named. So a text may be given as what makes it of what, which is called when somebody asks for names:
`(forward_key, "L0", 3)` for `forward_key("L0", 3)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import DEVICE, device_index
from tierplan.sim.columns import BufferLabel, Int32, Labels, OpLabel, ScheduleColumns, Works, lists_of
from tierplan.sim.contents import Content, Transient, buffer_name, device_name
from tierplan.sim.schedule import Schedule, Tier
from tierplan.sim.step import StepSpec

Said = str | Content | tuple[Any, ...]
"""A text, or a function and what it takes, each of which may be another such tuple. None is a method of the builder: it
would be kept, with all of its schedule, until cycles are collected."""
About = tuple[str, StepSpec | None, Mapping[str, object]]
"""A schedule's name, what the runtime has to know, and facts for people and reports."""
NONE = -1
HELD_BYTES = "held_bytes"
"""Work kind of a copy that holds its stream for longer than its bytes take: as long as so many more would."""
_Op = tuple[int, Sequence[int], Sequence[int], Sequence[int], Said, str, str, int]
"""Its work, what it reads and writes, what it comes after, its key, kind, unit and micro-batch."""


def said(text: Any) -> Any:
    """A text itself; of a tuple, what the function makes of its arguments."""
    return text[0](*map(said, text[1:])) if isinstance(text, tuple) else text


class Builder:
    """Buffers and ops so far; methods return the numbers of those that they make."""

    def __init__(self, works: Works | None = None) -> None:
        # one entry each per buffer
        self.tiers: list[str] = []
        self.sizes_bytes: list[int] = []
        self.contents: list[Any] = []  # what is `Said`, or what a sketch knows of it
        self.kinds: list[Any] = []
        # of some
        self._initial: list[int] = []
        self._reuses: dict[int, int] = {}
        self._becomes: dict[int, int] = {}
        self._owners: dict[int, int] = {}
        # one entry each per op
        self._ops: list[_Op] = []
        self._works = Works() if works is None else works
        self._numbers: dict[tuple[str, int], tuple[int, Mapping[str, float]]] = {}  # by stream, and which amounts
        self._copies: dict[tuple[str, int, float], int] = {}  # by stream, bytes, and bytes that it is held for

    # ---- buffers ----

    def buffer(
        self,
        content: Said,
        tier: str,
        size_bytes: int,
        kind: str,
        *,
        reuses: int | None = None,
        owner: int | None = None,
    ) -> int:
        """A new buffer; with `reuses` it takes over the bytes of that one.

        The `owner` of what is not on a device is the device whose process has it, where each has its own memory.
        """
        number = len(self.tiers)
        self.tiers.append(tier)
        self.sizes_bytes.append(size_bytes)
        self.contents.append(content)
        self.kinds.append(kind)
        if reuses is not None:
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
        tier, size_bytes, kind = self.tiers[old], self.sizes_bytes[old], self.kinds[old]
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
        return self.buffer(self.contents[source], tier, self.sizes_bytes[source], self.kinds[source], owner=owner)

    def work(self, key: Said, size_bytes: int, tier: str = DEVICE) -> list[int]:
        """The transient of an op: the op writes it and nobody reads it, so it is freed when the op ends."""
        return [self.buffer((Transient, key), tier, size_bytes, "work")] if size_bytes else []

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
        behind: int | None = None,
        held_bytes: float = 0.0,
        after: Sequence[int] = (),
        unit: str = "",
        m: int = 0,
    ) -> int:
        """Adds a copy of `source` into `tier`, over the buffer `over` if one is given; the new buffer.

        It begins when the buffer `behind` is made, and holds the stream for so many bytes more.
        """
        size_bytes = self.sizes_bytes[source]
        target = self.like(source, tier, owner) if over is None else self.over(over, self.contents[source])
        number = self._copies.get((stream, size_bytes, held_bytes))
        if number is None:
            work = {kind: amount for kind, amount in (("bytes", size_bytes), (HELD_BYTES, held_bytes)) if amount}
            number = self._copies[stream, size_bytes, held_bytes] = self._works.number(stream, work)
        reads = (source,) if over is None else (source, over)
        reads = reads if behind is None else (*reads, behind)
        after = after if len(after) < 2 else [*dict.fromkeys(after)]
        self._ops.append((number, reads, (target,), after, key, "copy", unit, m))
        return target

    @property
    def last_op(self) -> int:
        """The one that was added last."""
        return len(self._ops) - 1

    # ---- all of it ----

    def columns(
        self, tiers: tuple[Tier, ...], about: Callable[[], About], *, next_devices: tuple[int, ...] = ()
    ) -> ScheduleColumns:
        """All of it, in list order; `about` is called when somebody asks for names."""
        num, number = len(self.tiers), {t.name: i for i, t in enumerate(tiers)}
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
            labels=partial(self._labels, about),
            next_devices=next_devices,
        )

    def schedule(
        self, name: str, tiers: Iterable[Tier], *, step: StepSpec | None = None, meta: Mapping[str, object]
    ) -> Schedule:
        """All of it, in list order, as objects."""
        return self.columns((*tiers,), lambda: (name, step, meta)).schedule()

    def _labels(self, about: Callable[[], About]) -> Labels:
        name, step, meta = about()
        contents = [str(said(text)) for text in self.contents]
        buffers = buffer_labels(zip(contents, self.tiers, self.kinds, strict=True))
        for b, owner in self._owners.items():
            buffers[b] = buffers[b]._replace(name=device_name(buffers[b].name, owner))
        return Labels(name=name, ops=self.op_labels(), buffers=buffers, step=step, meta=meta)

    def op_labels(self) -> list[OpLabel]:
        return [OpLabel(str(said(key)), kind, unit, m) for *_, key, kind, unit, m in self._ops]


def buffer_labels(buffers: Iterable[tuple[str, str, str]]) -> list[BufferLabel]:
    """The labels of all buffers of a schedule in order, from content, tier and kind of each."""
    versions: dict[tuple[str, str], int] = {}
    labels = []
    for content, tier, kind in buffers:
        version = versions[content, tier] = versions.get((content, tier), -1) + 1
        labels.append(BufferLabel(buffer_name(content, tier, version), content, kind))
    return labels


def _column(numbers: Mapping[int, int], length: int) -> Int32:
    """One entry for each buffer: of some a number, of others `NONE`."""
    column = np.full(length, NONE, np.int32)
    column[[*numbers]] = [*numbers.values()]
    return column


def tiers_of(machine: Machine) -> tuple[Tier, ...]:
    """The tiers that a schedule has on a machine."""
    return tuple(Tier(name=t.name, capacity_bytes=t.capacity_bytes, rounding=t.rounding) for t in machine.tiers)
