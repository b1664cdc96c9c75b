"""Amounts of work by kind, such as `matmul_bf16_flops` and `elementwise_bytes`: what a machine needs seconds for."""

from __future__ import annotations

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
