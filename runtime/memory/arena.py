"""Host memory that file I/O and copies like: page-aligned, huge pages, exact sizes, reused by size.

`torch.empty` aligns to 64 bytes, which O_DIRECT refuses; pinned allocations round up to powers of two; and memory that
is mapped afresh costs page faults (157 MB: 55 ms into memory in use, 83 to 131 ms into fresh memory). So a `Pool` maps
whole pages, hands them out by exact size, and keeps what comes back for the next request of that size.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

PAGE_BYTES = 4096
"""Alignment of addresses, file offsets and lengths that every drive takes."""
HUGE_PAGE_BYTES = 2 << 20
MADV_WIPEONFORK = 18
"""Of <sys/mman.h>. With `MADV_DONTFORK` there would be a hole in the forked process, where something else may come to
lie that is unmapped when our tensor is freed there."""


HOST_GIB = "TIERPLAN_HOST_GIB"
"""In the environment: how much memory this system has. A hypervisor may add some as it is used, and until then the
system says that there is little."""


def system_bytes() -> int:
    """Memory of this system. Raises `ValueError` where the environment says what is no amount of it."""
    text = os.environ.get(HOST_GIB)
    if text is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(ValueError, OverflowError):
        if (gib := float(text)) > 0 and math.isfinite(gib):
            return int(gib * 2**30)
    raise ValueError(f"{HOST_GIB} is {text!r}; give the memory that this system has, or can get, as a number of GiB")


def padded(size_bytes: int) -> int:
    """The size rounded up to whole pages."""
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


@dataclass(eq=False, slots=True)
class Block:
    """Memory from a pool: `data` has the bytes that were asked for, `pages` the whole pages that hold them."""

    data: torch.Tensor
    """uint8, one-dimensional."""
    pages: torch.Tensor
    unbind: Callable[[int], None] | None = None
    """Takes memory at an address away from the model's parameters that were made views of this block."""
    _views: dict[object, Any] = field(default_factory=dict)

    def once(self, key: object, make: Callable[[torch.Tensor], Any]) -> Any:
        """What `make` makes of `data`, such as views of it: made once for as long as the memory is the pool's."""
        if key not in self._views:
            self._views[key] = make(self.data)
        return self._views[key]


def map_host(size_bytes: int, *, for_transfers: bool = False) -> torch.Tensor:
    """Zeroed anonymous memory of whole pages as a uint8 tensor; unmapped when the last view of it is gone.

    `MAP_PRIVATE`, because shared anonymous mappings escape `RLIMIT_DATA`. Memory `for_transfers` is empty in forked
    processes (workers of a data loader): while both have a page, a write to it goes to a copy, and a drive or a GPU
    that is about to fill the page may fill the other one. Raises `MemoryError` with the size when the system refuses.
    """
    try:
        mapping = mmap.mmap(-1, padded(size_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(
            f"the system refused {padded(size_bytes):,} bytes of host memory ({error.strerror}); "
            "lower the host budget of the plan, or free memory"
        ) from error
    if size_bytes >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    if for_transfers:
        with contextlib.suppress(OSError):  # before Linux 4.14
            mapping.madvise(MADV_WIPEONFORK)
    return torch.frombuffer(mapping, dtype=torch.uint8)


@dataclass
class Pool:
    """Blocks of memory in one tier, reused by exact size. What is lent, what is spare and what others hold in the tier
    are at most `capacity_bytes` together, as long as what is lent and what others hold are.

    When more is wanted, spare blocks are given back to the system first. Sizes are few in training (one per unit and
    kind), so where the tier has room this happens in the first step and then never.
    """

    allocate: Callable[[int], torch.Tensor]
    """Makes memory of at least so many bytes, whole pages."""
    capacity_bytes: int
    release: Callable[[torch.Tensor], None] = lambda pages: None
    """Called before a block's memory goes back to the system."""
    lent_bytes: int = 0
    mapped_bytes: int = 0
    others_bytes: int = 0
    """Granted in this tier to tensors that are not in blocks of the pool."""
    _spare: dict[int, list[Block]] = field(default_factory=dict)
    _lent: dict[Block, None] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, size_bytes: int) -> Block:
        """A block of exactly this size. Its content is whatever was there."""
        room = padded(size_bytes)
        with self._lock:
            self.lent_bytes += room
            spare = self._spare.get(room)
            if spare:
                return self._lend(spare.pop(), size_bytes)
            self._shed(room)
            self.mapped_bytes += room
        try:  # out of the lock: mapping and pinning take long
            pages = self.allocate(room)
        except BaseException:
            with self._lock:
                self.lent_bytes -= room
                self.mapped_bytes -= room
            raise
        with self._lock:
            return self._lend(Block(pages[:size_bytes], pages), size_bytes)

    def _lend(self, block: Block, size_bytes: int) -> Block:
        if block.data.numel() != size_bytes:
            block = Block(block.pages[:size_bytes], block.pages)
        self._lent[block] = None
        return block

    def has_spare(self, size_bytes: int) -> bool:
        """Whether memory that is mapped already serves for a block of this size."""
        with self._lock:
            return bool(self._spare.get(padded(size_bytes)))

    def prepare(self, sizes_bytes: Iterable[int]) -> None:
        """Maps what blocks of these sizes take together, as far as there is room and the system does not refuse, and
        gives it its pages."""
        blocks = []
        with contextlib.suppress(MemoryError):
            for size_bytes in sizes_bytes:
                if self.lent_bytes + padded(size_bytes) <= self.capacity_bytes:
                    blocks.append(self.take(size_bytes))
                    blocks[-1].pages.zero_()
        for block in blocks:
            self.give(block)

    def give(self, block: Block) -> None:
        """Takes a block back; its memory may be lent again at once."""
        with self._lock:
            room = block.pages.numel()
            self.lent_bytes -= room
            del self._lent[block]
            block.unbind = None
            self._spare.setdefault(room, []).append(block)

    def make_room(self, size_bytes: int) -> None:
        """Others will hold so many bytes more (fewer, where it is negative)."""
        with self._lock:
            self.others_bytes += size_bytes
            if self.mapped_bytes + self.others_bytes > self.capacity_bytes:
                self._shed(0)

    def close(self) -> None:
        """Lets go of all memory, lent or not. Nothing may move any more."""
        with self._lock:
            spare = (block for blocks in self._spare.values() for block in blocks)
            for pages in [block.pages for block in (*self._lent, *spare)]:
                self.release(pages)
            self._lent.clear()
            self._spare.clear()
            self.lent_bytes = self.mapped_bytes = 0

    def _shed(self, room: int) -> None:
        """Drops spare blocks, largest first, until `room` more bytes fit or none is left."""
        for size in sorted(self._spare, reverse=True):
            while self._spare[size] and self.mapped_bytes + self.others_bytes + room > self.capacity_bytes:
                self.release(self._spare[size].pop().pages)
                self.mapped_bytes -= size
