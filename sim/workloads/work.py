"""Amounts of work by kind, such as `matmul_bf16_flops` and `elementwise_bytes`: what a machine needs seconds for."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Amounts = Mapping[str, float]
"""Of work, by its kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonWork:
    """Operations that making several saved tensors again has in common: they run once, whichever of these are made."""

    tensors: tuple[int, ...]
    """Their indices. The work is part of the `recompute` of each."""
    work: Amounts


def flops_of(work: Amounts) -> float:
    """Of all kinds of products."""
    return sum(amount for kind, amount in work.items() if kind.endswith("_flops"))


def total_work(works: Iterable[Amounts]) -> dict[str, float]:
    """The sum of amounts of work, kind by kind; kinds with nothing are left out."""
    total: dict[str, float] = {}
    for work in works:
        for kind, amount in work.items():
            if amount:
                total[kind] = total.get(kind, 0) + amount
    return total


@dataclass(frozen=True, slots=True)
class WorkBytes:
    """What a unit holds for a while in micro-batches of so many sequences: see `Unit.forward_work_bytes` and those
    behind it."""

    sequences: int
    forward: int
    backward: int
    accumulating: int


def bytes_at(sequences: int, known: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    """The row for so many sequences: their number, and what is held, from rows that are known of other numbers.

    Each entry is the most of several amounts that grow with the number, less one that does, too. So between two numbers
    it is no more than on the line between them, which is the answer; beyond the largest, the line through the last two
    goes on. Of one number, in proportion.
    """
    points = sorted({row[0]: row for row in known}.values())
    if len(points) == 1:
        points.insert(0, (0,) * len(points[0]))
    k = min(max(bisect_left(points, (sequences,)), 1), len(points) - 1)
    (a, *less), (b, *more) = points[k - 1], points[k]
    return (sequences, *(max(0, x - (x - y) * (sequences - a) // (b - a)) for x, y in zip(less, more, strict=True)))
