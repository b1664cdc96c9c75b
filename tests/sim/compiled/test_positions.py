"""The list order of wanted positions against its definition, step by step."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tierplan.sim.columns import lists_of
from tierplan.sim.compiled.positions import consistent_order


def by_definition(
    wanted: list[int], reads: list[list[int]], writes: list[list[int]], after: list[list[int]], reuses: list[int]
) -> list[int]:
    """Again and again the first op in the wanted order that nothing must come before any more."""
    before: list[set[int]] = [set(keys) for keys in after]
    for i, own in enumerate(reads):
        before[i] |= {j for j, made in enumerate(writes) if set(made) & set(own)}
    for i, made in enumerate(writes):
        for b in made:
            before[i] |= {j for j, own in enumerate(reads) if reuses[b] in own}
    order: list[int] = []
    while True:
        may_come = [i for i in wanted if i not in order and before[i] - {i} <= set(order)]
        if not may_come:
            return order
        order.append(may_come[0])


@pytest.mark.parametrize("seed", range(60))
def test_the_first_that_may_come_comes(seed: int) -> None:
    rng = random.Random(seed)
    num_ops = rng.randint(0, 12)
    writes: list[list[int]] = []
    reads: list[list[int]] = []
    reuses: list[int] = []
    for _ in range(num_ops):
        own = sorted(rng.sample(range(len(reuses)), min(len(reuses), rng.randint(0, 3))))
        made = list(range(len(reuses), len(reuses) + rng.randint(0, 2)))
        free = [b for b in own if b not in reuses]
        reuses += [rng.choice([-1, *free]) if k == 0 else -1 for k, _ in enumerate(made)]
        reads.append(own)
        writes.append(made)
    after = [[j for j in range(num_ops) if rng.random() < 0.1] for _ in range(num_ops)]  # circles too
    wanted = rng.sample(range(num_ops), num_ops)
    order = consistent_order(
        np.array(wanted, np.int64), lists_of(reads), lists_of(writes), lists_of(after), np.array(reuses, np.int32)
    )
    assert order.tolist() == by_definition(wanted, reads, writes, after, reuses)
