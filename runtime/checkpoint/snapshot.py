"""What lies in memory at a commit, kept as it was while the next steps run.

Its blocks are read one after the other, as a file takes them, from where they lie in host memory. Who is about to
change one has to ask first: a copy is made where memory has room for it, else he waits until that block has been read,
which is next then. Of a block that is being read, what is left is copied, and he waits for a piece: the reading goes on
from the copy.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping

from tierplan.runtime.memory.arena import Block, Pool, map_host

PIECE_BYTES = 8 << 20
"""Read at a time: as much as drives like, and soon over for who waits."""


class Snapshot:
    """Blocks by name, as they are now, those that change soonest first.

    `read` takes them, in a thread of its own; until then `before_change` guards them. `spare_bytes` is the room that
    host memory has for copies. They are made in memory that `pool` has from the commits before.
    """

    def __init__(self, blocks: Mapping[str, Block], spare_bytes: int = 0, pool: Pool | None = None) -> None:
        self._left, self._spare_bytes = dict(blocks), spare_bytes
        self._pool = Pool(map_host, spare_bytes) if pool is None else pool
        self._asked_bytes: list[int] = []
        """Sizes of blocks that were to change before they were read."""
        self._lacks_memory = False
        """For one of them no memory was mapped."""
        self._names = {id(block): name for name, block in blocks.items()}
        self._copies: dict[str, Block] = {}
        self._wanted: list[str] = []
        self._is_overtaken = False
        """Who changes blocks has come to one before it was read."""
        self._news = threading.Condition()
        """A block may change now."""
        self._reading: str | None = None
        self._read_bytes = 0
        """Of it, with the piece that is being read."""
        self._instead: Block | None = None
        """A copy of what is being read."""
        self._is_let_go = False
        """The reading goes on from that copy."""

    def read(self) -> Iterator[tuple[str, Iterator[Block]]]:
        """Names and bytes, in host memory, in pieces: first what somebody waits for, then copies, then the others.

        What changes soonest comes first, until the changes have overtaken the reading; from then on what changes last,
        or they would wait for each block, one after the other. What has been read may change. A piece's bytes are there
        until the next is asked for.
        """
        while (item := self._next()) is not None:
            name, block, is_spare = item
            yield name, self._pieces(block)
            if name == self._reading:
                self._let_change()
            else:
                self._give_back(block, is_spare=is_spare)

    def _pieces(self, block: Block) -> Iterator[Block]:
        for begin in range(0, block.pages.numel(), PIECE_BYTES):
            with self._news:
                if self._instead is not None:
                    block, self._is_let_go = self._instead, True
                    self._news.notify_all()
                end = self._read_bytes = begin + PIECE_BYTES
            yield Block(block.data[begin:end], block.pages[begin:end])

    @property
    def is_left(self) -> bool:
        """Whether who changes a block may have to wait."""
        return bool(self._left) or self._reading is not None

    def end(self) -> None:
        """All may change: nobody reads any more."""
        with self._news:
            self._left.clear()
            for copied in self._copies.values():
                self._pool.give(copied)
            self._copies.clear()
        self._let_change()

    def prepare_next(self) -> None:
        """Maps memory for copies where there was none: who changes blocks would wait for it longer than for a drive."""
        if self._lacks_memory:
            self._pool.prepare(self._asked_bytes)

    def _next(self) -> tuple[str, Block, bool] | None:
        """A name, its bytes, and whether these take of the room for copies."""
        with self._news:
            left = reversed(self._left) if self._is_overtaken else iter(self._left)
            name = next(itertools.chain(self._wanted, self._copies, left), None)
            if name is None:
                return None
            if name in self._copies:
                return name, self._copies.pop(name), True
            block, self._reading, self._read_bytes = self._left.pop(name), name, 0
        if block.data.is_cpu:
            return name, block, False
        copied = self._copy_of(block)
        self._let_change()
        return name, copied, False

    def _let_change(self) -> None:
        """What was being read has been."""
        with self._news:
            self._wanted = [name for name in self._wanted if name != self._reading]
            copied, self._instead = self._instead, None
            self._reading, self._is_let_go = None, False
            self._news.notify_all()
        if copied is not None:
            self._give_back(copied, is_spare=True)

    def _give_back(self, block: Block, *, is_spare: bool) -> None:
        self._pool.give(block)
        with self._news:
            self._spare_bytes += is_spare * block.data.numel()

    def before_change(self, block: Block) -> None:
        """Returns when the block may change."""
        if not self._names or (name := self._names.get(id(block))) is None:
            return
        with self._news:
            if name not in self._left and name != self._reading:
                return
            self._is_overtaken = True
            if name == self._reading:
                self._instead = self._instead or self._spare_copy_of(block, self._read_bytes)
            elif (copied := self._spare_copy_of(block)) is not None:
                del self._left[name]
                self._copies[name] = copied
            else:
                self._wanted.append(name)
            while name in self._left or (name == self._reading and not self._is_let_go):
                self._news.wait()

    def _spare_copy_of(self, block: Block, begin: int = 0) -> Block | None:
        """A copy from there on, where there is room for it and memory is mapped."""
        size_bytes = block.data.numel()
        self._asked_bytes.append(size_bytes)
        is_mapped = self._pool.has_spare(size_bytes)
        self._lacks_memory |= not is_mapped
        if not is_mapped or size_bytes > self._spare_bytes:
            return None
        self._spare_bytes -= size_bytes
        return self._copy_of(block, begin)

    def _copy_of(self, block: Block, begin: int = 0) -> Block:
        copied = self._pool.take(block.data.numel())
        copied.data[begin:].copy_(block.data[begin:])
        return copied
