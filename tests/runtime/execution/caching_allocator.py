"""A model of PyTorch's caching allocator for CUDA with expandable segments (`CUDACachingAllocator.cpp`).

Sizes are rounded up to 512 bytes. Each stream has one range of addresses for tensors of at most 1 MiB, with pages of
2 MiB, and one for larger ones, with pages of 20 MiB. A tensor goes to the smallest gap in mapped memory that takes it,
else to the first gap of addresses, where the missing pages are mapped. Where the device has no room for them, whole
pages that nobody uses are unmapped first, of all streams.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

__all__ = ["CachingAllocator", "OutOfMemoryError"]

UNIT_BYTES, SMALL_BYTES = 512, 1 << 20
PAGE_BYTES = {True: 2 << 20, False: 20 << 20}
"""Of ranges for small tensors, and of those for others."""
Taken = tuple[str, bool, int, int]
"""Stream, whether it is small, begin and end."""


class OutOfMemoryError(Exception):
    """The device has no room for another page."""


@dataclass(slots=True)
class Range:
    """The addresses of one stream and kind."""

    page_bytes: int
    taken: list[tuple[int, int]] = field(default_factory=list)
    """Begin and end of tensors, in order."""
    mapped: set[int] = field(default_factory=set)
    """Numbers of pages."""

    def gaps(self) -> list[tuple[int, int]]:
        begins, ends = [begin for begin, _ in self.taken], [end for _, end in self.taken]
        return [gap for gap in zip([0, *ends], [*begins, 1 << 60], strict=True) if gap[0] < gap[1]]

    def pages(self, begin: int, end: int) -> range:
        return range(begin // self.page_bytes, -(-end // self.page_bytes))

    def mapped_gap(self, size: int) -> int | None:
        """Where the smallest gap of mapped memory begins that takes so much."""
        best: tuple[int, int] | None = None
        for begin, end in self.gaps():
            at = begin
            while at < end:  # runs of mapped pages in the gap
                stop = at
                while stop < end and stop // self.page_bytes in self.mapped:
                    stop = min(end, (stop // self.page_bytes + 1) * self.page_bytes)
                if stop - at >= size and (best is None or stop - at < best[0]):
                    best = stop - at, at
                if stop >= max(self.mapped, default=-1) * self.page_bytes:
                    break
                at = max(stop, (at // self.page_bytes + 1) * self.page_bytes)
        return None if best is None else best[1]

    def unused(self) -> set[int]:
        return self.mapped - {page for begin, end in self.taken for page in self.pages(begin, end)}


@dataclass
class CachingAllocator:
    """Hands out memory of a device with so many bytes."""

    capacity_bytes: float = float("inf")
    peak_bytes: int = 0
    """The most that was ever mapped."""
    ranges: dict[tuple[str, bool], Range] = field(default_factory=dict)

    @property
    def mapped_bytes(self) -> int:
        return sum(len(one.mapped) * one.page_bytes for one in self.ranges.values())

    def take(self, size_bytes: int, stream: str) -> Taken:
        size = max(UNIT_BYTES, -(-size_bytes // UNIT_BYTES) * UNIT_BYTES)
        is_small = size <= SMALL_BYTES
        one = self.ranges.setdefault((stream, is_small), Range(PAGE_BYTES[is_small]))
        begin = one.mapped_gap(size)
        if begin is None:
            begin = next(at for at, end in one.gaps() if end - at >= size)
            self._map(one, set(one.pages(begin, begin + size)))
        insort(one.taken, (begin, begin + size))
        return stream, is_small, begin, begin + size

    def give(self, taken: Taken) -> None:
        stream, is_small, begin, end = taken
        self.ranges[stream, is_small].taken.remove((begin, end))

    def _map(self, one: Range, pages: set[int]) -> None:
        if self.mapped_bytes + len(pages - one.mapped) * one.page_bytes > self.capacity_bytes:
            for other in self.ranges.values():
                other.mapped -= other.unused()
        if self.mapped_bytes + len(pages - one.mapped) * one.page_bytes > self.capacity_bytes:
            raise OutOfMemoryError(f"{self.mapped_bytes:,} of {self.capacity_bytes:,.0f} bytes are mapped and used")
        one.mapped |= pages
        self.peak_bytes = max(self.peak_bytes, self.mapped_bytes)
