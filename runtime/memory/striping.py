"""Data over several drives: which part of the store's address space lies where.

The address space is cut into stripes of 1 MiB, dealt out to the files in rounds. A file's part of any range is one run
in that file, scattered in memory, so that it is moved by few large vectored requests. Faster drives get more stripes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

STRIPE_BYTES = 1 << 20
REQUEST_BYTES = 8 << 20
"""Largest single request: throughput no longer grows above about 4 MiB with two threads."""
LONGEST_ROUND = 32
GOOD_ENOUGH = 0.98
"""A round is no longer than it takes for the drives together to reach this part of their speed."""


class Request(NamedTuple):
    """One transfer between a run in a file and pieces of memory."""

    file: int
    offset_bytes: int
    """In the file."""
    parts: tuple[tuple[int, int], ...]
    """Begin and size of each piece, in the range that is moved."""


@dataclass(frozen=True, slots=True)
class Striping:
    """Where each byte of the address space lies."""

    pattern: tuple[int, ...]
    """One round of stripes, as file indices."""

    @property
    def num_files(self) -> int:
        return max(self.pattern) + 1

    def shares(self, size_bytes: int) -> list[int]:
        """Bytes that each file must hold when the address space ends at `size_bytes`."""
        if self.num_files == 1:
            return [size_bytes]
        whole, rest = divmod(-(-size_bytes // STRIPE_BYTES), len(self.pattern))
        return [
            (whole * self.pattern.count(k) + self.pattern[:rest].count(k)) * STRIPE_BYTES for k in range(self.num_files)
        ]

    def requests(self, offset: int, length: int) -> list[Request]:
        """The requests that move a range, those of the files in turn."""
        by_file: list[list[Request]] = [[] for _ in range(self.num_files)]
        for k, in_file, at, size in self._pieces(offset, length):
            mine = by_file[k]
            if mine and (held := sum(n for _, n in mine[-1].parts)) + size <= REQUEST_BYTES:
                last = mine[-1]
                assert last.offset_bytes + held == in_file, "a file's part of a range is one run in that file"
                begin, before = last.parts[-1]
                grown = ((begin, before + size),) if begin + before == at else ((begin, before), (at, size))
                mine[-1] = Request(k, last.offset_bytes, (*last.parts[:-1], *grown))
            else:
                mine.append(Request(k, in_file, ((at, size),)))
        longest = max(map(len, by_file))
        return [mine[turn] for turn in range(longest) for mine in by_file if turn < len(mine)]

    def _pieces(self, offset: int, length: int) -> list[tuple[int, int, int, int]]:
        """What is consecutive both in a file and in memory: (file, offset in the file, offset in the range, bytes)."""
        if self.num_files == 1:
            return [(0, offset + at, at, min(REQUEST_BYTES, length - at)) for at in range(0, length, REQUEST_BYTES)]
        per_round = [self.pattern.count(k) for k in range(self.num_files)]
        pieces = []
        at = 0
        while at < length:
            stripe, inside = divmod(offset + at, STRIPE_BYTES)
            turn, place = divmod(stripe, len(self.pattern))
            k = self.pattern[place]
            in_file = (turn * per_round[k] + self.pattern[:place].count(k)) * STRIPE_BYTES + inside
            size = min(STRIPE_BYTES - inside, length - at)
            pieces.append((k, in_file, at, size))
            at += size
        return pieces


def stripe_pattern(weights: Sequence[float]) -> tuple[int, ...]:
    """One round of stripes, as file indices, in proportion to the weights and spread evenly: (2, 1) -> (0, 1, 0).

    The shortest round with which all drives together come close to the sum of their speeds.
    """
    if any(not 0 < w < float("inf") for w in weights):
        raise ValueError(f"the weights of the drives are {list(weights)}; all must be finite and above 0")
    best: tuple[float, tuple[int, ...]] = (0.0, ())
    for length in range(len(weights), max(len(weights), LONGEST_ROUND) + 1):
        pattern = _deal(weights, length)
        slowest = max(pattern.count(k) / w for k, w in enumerate(weights))  # the drive that a round waits for
        efficiency = length / (slowest * sum(weights))
        best = max(best, (efficiency, pattern), key=lambda candidate: candidate[0])
        if best[0] >= GOOD_ENOUGH:
            break
    return best[1]


def _deal(weights: Sequence[float], length: int) -> tuple[int, ...]:
    """So many stripes, each to the drive that is done with it first; every drive gets one at least."""
    counts = [1] * len(weights)
    for _ in range(length - len(weights)):
        counts[min(range(len(weights)), key=lambda k: ((counts[k] + 1) / weights[k], k))] += 1
    turns = sorted(((n + 0.5) / counts[k], k) for k in range(len(weights)) for n in range(counts[k]))
    return tuple(k for _, k in turns)
