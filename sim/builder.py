"""A schedule in the making: what every lowering does alike.

Buffers get their names and versions here, and what outlives the step is kept track of. Ops are added in list order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import DEVICE
from tierplan.sim.contents import Content, Transient, buffer_name
from tierplan.sim.schedule import Buffer, Op, Schedule, Tier
from tierplan.sim.step import StepSpec


class Builder:
    """Buffers and ops so far. Buffers are known by name; methods return the names of those that they make."""

    def __init__(self) -> None:
        self.buffers: dict[str, Buffer] = {}
        self._versions: dict[tuple[str, str], int] = {}
        self._becomes: dict[str, str] = {}
        self._ops: list[Op] = []

    def buffer(
        self,
        content: Content | str,
        tier: str,
        size_bytes: int,
        kind: str,
        *,
        initial: bool = False,
        reuses: str | None = None,
    ) -> str:
        """A new buffer, or one that exists before the step; with `reuses` it takes over the bytes of that one."""
        content = str(content)
        version = self._versions.get((content, tier), -1) + 1
        self._versions[content, tier] = version
        name = buffer_name(content, tier, version)
        self.buffers[name] = Buffer(
            name=name, tier=tier, size_bytes=size_bytes, content=content, kind=kind, initial=initial, reuses=reuses
        )
        return name

    def home(self, content: Content, tier: str, size_bytes: int, kind: str) -> str:
        """An initial buffer that exists in every step: its latest version outlives the step."""
        name = self.buffer(content, tier, size_bytes, kind, initial=True)
        self._becomes[name] = name
        return name

    def over(self, old: str, content: Content | str = "") -> str:
        """A buffer that takes over the bytes of `old`, and its identity in the next step: an in-place update."""
        b = self.buffers[old]
        new = self.buffer(content or b.content, b.tier, b.size_bytes, b.kind, reuses=old)
        if old in self._becomes:
            self._becomes[new] = self._becomes.pop(old)
        return new

    def like(self, source: str, tier: str) -> str:
        """A buffer for the content of `source` in another tier."""
        b = self.buffers[source]
        return self.buffer(b.content, tier, b.size_bytes, b.kind)

    def work(self, key: str, size_bytes: int) -> list[str]:
        """The transient of an op: the op writes it and nobody reads it, so it is freed when the op ends."""
        return [self.buffer(Transient(key), DEVICE, size_bytes, "work")] if size_bytes else []

    def op(
        self,
        key: str,
        stream: str,
        kind: str,
        *,
        work: Mapping[str, float],
        reads: Iterable[str] = (),
        writes: Iterable[str] = (),
        after: Iterable[str] = (),
        unit: str = "",
        m: int = 0,
    ) -> str:
        """Adds an op and returns its key. Amounts of nothing, buffers named twice and empty keys are left out."""
        op = Op(
            key=key,
            stream=stream,
            kind=kind,
            unit=unit,
            micro_batch=m,
            work={name: amount for name, amount in work.items() if amount},
            reads=tuple(dict.fromkeys(reads)),
            writes=tuple(writes),
            after=tuple(dict.fromkeys(other for other in after if other)),
        )
        self._ops.append(op)
        return key

    def copy(
        self,
        key: str,
        stream: str,
        source: str,
        tier: str,
        *,
        over: str | None = None,
        **more: Any,
    ) -> str:
        """Adds a copy of `source` into `tier`, over the buffer `over` if one is given; the name of the new buffer.

        `more` is as for `op`.
        """
        target = self.over(over, self.buffers[source].content) if over else self.like(source, tier)
        reads = (source, over) if over else (source,)
        work = {"bytes": self.buffers[source].size_bytes}
        self.op(key, stream, "copy", work=work, reads=reads, writes=(target,), **more)
        return target

    def schedule(
        self, name: str, tiers: Iterable[Tier], *, step: StepSpec | None = None, meta: Mapping[str, object]
    ) -> Schedule:
        """All of it, in list order."""
        becomes = self._becomes.get
        return Schedule(
            name=name,
            tiers=tuple(tiers),
            buffers=tuple(replace(b, becomes=new) if (new := becomes(b.name)) else b for b in self.buffers.values()),
            ops=tuple(self._ops),
            step=step,
            meta=meta,
        )


def tiers_of(machine: Machine) -> tuple[Tier, ...]:
    """The tiers that a schedule has on a machine."""
    return tuple(Tier(name=t.name, capacity_bytes=t.capacity_bytes, rounding=t.rounding) for t in machine.tiers)
