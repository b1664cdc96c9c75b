"""Where the bytes of buffers are: blocks of a pool, extents of a drive, or tensors that are autograd's."""

from __future__ import annotations

import functools
from collections.abc import Set
from dataclasses import dataclass, field

import torch

from tierplan.hwmodels.names import DEVICE, NVME
from tierplan.runtime.checkpoint.snapshot import Snapshot
from tierplan.runtime.execution.instances import Instance
from tierplan.runtime.execution.values import BufferValue, value_of
from tierplan.runtime.memory.arena import Block, Pool, map_host
from tierplan.runtime.memory.store import Extent, Store
from tierplan.sim.contents import SavedActs, parse_content
from tierplan.sim.ranks import COLLECTIVES, SEND
from tierplan.sim.schedule import Op

IN_BLOCKS = ("copy", "accumulate", "cast", "update", SEND, *COLLECTIVES)
"""Kinds of op that write flat memory, which is a block of a pool."""


@functools.lru_cache(maxsize=4096)
def _is_autograd_s(kind: str, text: str) -> bool:
    """Whether a buffer of this content, that an op of this kind writes on the device, is no block of the pool."""
    content = parse_content(text)
    is_moved = kind in IN_BLOCKS and not (kind == "copy" and isinstance(content, SavedActs))
    return not is_moved and not getattr(content, "is_coded", False)


@dataclass(eq=False)
class Places:
    """Gives buffers their places in the tiers, takes them back, and keeps what a commit needs."""

    device_pool: Pool
    host_pool: Pool
    store: Store | None
    committed: Set[Extent] = frozenset()
    """Extents that the last commit needs, and one that is being made: neither written nor freed."""
    snapshot: Snapshot = field(default_factory=lambda: Snapshot({}))
    """What the last commit has taken from memory, or is to take."""

    @property
    def drives(self) -> Store:
        """The store, where the schedule uses the NVMe tier."""
        assert self.store is not None
        return self.store

    def allocate(self, instance: Instance) -> Block | Extent:
        """A place for a buffer in its tier."""
        b = instance.buffer
        if b.tier == NVME:
            return self.drives.allocate(b.size_bytes)
        return (self.device_pool if b.tier == DEVICE else self.host_pool).take(b.size_bytes)

    def on_grant(self, op: Op, instance: Instance, size_bytes: int) -> None:
        """Bytes on the device that autograd will hold, and no block of the pool, count against what the pool keeps."""
        if instance.buffer.tier == DEVICE and _is_autograd_s(op.kind, instance.buffer.content):
            instance.outside_bytes = size_bytes
            self.device_pool.make_room(size_bytes)

    def place(self, instance: Instance) -> BufferValue:
        """The value of a buffer that is about to be written: new memory, or that of the buffer it writes over."""
        over = instance.over
        if over is not None and (old := value_of(over).place) not in self.committed:
            if isinstance(old, Block):
                self.snapshot.before_change(old)
            instance.value = value = value_of(over)
        else:
            instance.value = value = BufferValue(self.allocate(instance))
        return value

    def release(self, instance: Instance) -> None:
        """Gives a freed buffer's memory back."""
        value = instance.value
        if not isinstance(value, BufferValue):
            return
        if value.handle is not None and instance.buffer.tier == DEVICE:
            value.handle.leave(value)
        value.gradients = None
        if isinstance(value.place, Extent):
            if value.place not in self.committed:
                self.drives.free(value.place)
        elif value.place is not None:
            if value.place.unbind is not None:
                value.place.unbind(value.place.pages.data_ptr())
            self.snapshot.before_change(value.place)
            (self.device_pool if instance.buffer.tier == DEVICE else self.host_pool).give(value.place)

    def on_free(self, instance: Instance) -> None:
        """Nobody may use the memory of a freed buffer any more."""
        if instance.outside_bytes:
            self.device_pool.make_room(-instance.outside_bytes)
            instance.outside_bytes = 0

    def read(self, instance: Instance) -> torch.Tensor:
        """A copy of the bytes of a buffer that lies in a pool or on a drive, or of gradients on the device, in host
        memory."""
        value, size_bytes = value_of(instance), instance.buffer.size_bytes
        if value.gradients is not None:
            return torch.cat([g.cpu().view(-1) for g in value.gradients if g is not None]).view(torch.uint8)
        place = value.place
        if isinstance(place, Extent):
            out = map_host(size_bytes)[:size_bytes]
            self.drives.read(place, out)
            return out
        assert isinstance(place, Block)
        return place.data.cpu().clone()

    def keep(self, extents: Set[Extent], snapshot: Snapshot) -> None:
        """From now on these extents, and what the snapshot has yet to read, are as they are for a commit."""
        self.committed, self.snapshot = self.committed | extents, snapshot

    def commit(self, extents: Set[Extent]) -> None:
        """From now on these are the extents of the last commit."""
        before, self.committed = self.committed, extents
        for extent in before - extents:
            self.drives.free(extent)

    def close(self) -> None:
        """Lets go of the pools' memory."""
        self.device_pool.close()
        self.host_pool.close()
