"""What lies in memory at a commit, kept as it was while the next steps run.

Its blocks are read one after the other, as a file takes them, from where they lie in host memory. Who is about to
change one has to ask first: a copy is made where memory has room for it, else he waits until that block has been read,
which is next then.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping

from tierplan.runtime.memory.arena import Block, Pool, map_host


class Snapshot:
    """Blocks by name, as they are now, those that change soonest first.

    `read` takes them, in a thread of its own; until then `before_change` guards them. `spare_bytes` is the room that
    host memory has for copies, which `pool` keeps for the next commit.
    """

    def __init__(self, blocks: Mapping[str, Block], spare_bytes: int = 0, pool: Pool | None = None) -> None:
        self._left, self._spare_bytes = dict(blocks), spare_bytes
        self._pool = Pool(map_host, spare_bytes) if pool is None else pool
        self._names = {id(block): name for name, block in blocks.items()}
        self._copies: dict[str, Block] = {}
        self._wanted: list[str] = []
        self._is_overtaken = False
        """Who changes blocks has come to one before it was read."""
        self._news = threading.Condition()
        """A block may change now."""
        self._reading: str | None = None

    def read(self) -> Iterator[tuple[str, Block]]:
        """Names and bytes, in host memory: first what somebody waits for, then copies, then the others.

        What changes soonest comes first, until the changes have overtaken the reading; from then on what changes last,
        or they would wait for each block, one after the other. What has been read may change. Its bytes are there until
        the next is asked for.
        """
        while (item := self._next()) is not None:
            name, block, is_spare = item
            yield name, block
            if name == self._reading:
                self._let_change()
                continue
            self._pool.give(block)
            with self._news:
                self._spare_bytes += is_spare * block.data.numel()

    def end(self) -> None:
        """All may change: nobody reads any more."""
        with self._news:
            self._left.clear()
            for copied in self._copies.values():
                self._pool.give(copied)
            self._copies.clear()
            self._reading = None
            self._news.notify_all()

    def _next(self) -> tuple[str, Block, bool] | None:
        """A name, its bytes, and whether these take of the room for copies."""
        with self._news:
            left = reversed(self._left) if self._is_overtaken else iter(self._left)
            name = next(itertools.chain(self._wanted, self._copies, left), None)
            if name is None:
                return None
            if name in self._copies:
                return name, self._copies.pop(name), True
            block, self._reading = self._left.pop(name), name
        if block.data.is_cpu:
            return name, block, False
        copied = self._copy_of(block)
        self._let_change()
        return name, copied, False

    def _let_change(self) -> None:
        """What was being read has been."""
        with self._news:
            self._wanted = [name for name in self._wanted if name != self._reading]
            self._reading = None
            self._news.notify_all()

    def before_change(self, block: Block) -> None:
        """Returns when the block may change."""
        name = self._names.get(id(block))
        if name is None:
            return
        with self._news:
            self._is_overtaken |= name in self._left or name == self._reading
            if name in self._left and block.data.numel() <= self._spare_bytes:
                self._spare_bytes -= block.data.numel()
                self._copies[name] = self._copy_of(self._left.pop(name))
            elif name in self._left:
                self._wanted.append(name)
            while name in self._left or name == self._reading:
                self._news.wait()

    def _copy_of(self, block: Block) -> Block:
        copied = self._pool.take(block.data.numel())
        copied.data.copy_(block.data)
        return copied
