"""Exchanges between units that are alike: which of them has which choice.

What a chain keeps, moves and makes again may add up and still come at the wrong time: side by side, or while a stream
has other work. An exchange changes the time alone, so it is possible where memory is full. Some go one way: one unit
takes the other's choice, and the plan's amounts change by one unit's.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from tierplan.planner.plan import UnitwisePlan
from tierplan.planner.search.local.moves import PLACEMENT, with_those_of
from tierplan.sim.workloads.workload import Workload, first_alike

ACTIVATIONS = ("acts", "input")
PARTS = (PLACEMENT + ACTIVATIONS, PLACEMENT, ACTIVATIONS)
"""Of choices that go from one unit to another together."""
ROW_LENGTHS = (3, 4, 6, 8, 12, 1000)
"""Units of a row that is turned round, or moved on by one; the last: as many as there are."""
IN_A_ROW = 0.5
"""Of the exchanges, those of a row of units; all others are of two."""
ONE_WAY = 1 / 3
"""Of the exchanges of two units, those that go one way."""
NEAR = 0.7
"""Rate of the exponential distance between two units that are near each other; the last is beside the first."""


def alike(workload: Workload) -> list[list[int]]:
    """Units that may have each other's choices, in order: each kind with at least three."""
    kinds: dict[int, list[int]] = {}
    for u, first in enumerate(first_alike(workload.units)):
        kinds.setdefault(first, []).append(u)
    return [units for units in kinds.values() if len(units) >= 3]


def exchanged(plan: UnitwisePlan, units: Sequence[int], rng: random.Random) -> UnitwisePlan | None:
    """The plan with one exchange among these units, drawn at random; None where that changes nothing."""
    choices = [plan.units[u] for u in units]
    i = rng.randrange(len(units))
    if rng.random() < IN_A_ROW:
        row = choices[i : i + rng.choice(ROW_LENGTHS)]
        choices[i : i + len(row)] = rng.choice((row[::-1], row[1:] + row[:1], row[-1:] + row[:-1]))
    else:
        near = i + rng.choice((-1, 1)) * (1 + int(rng.expovariate(NEAR)))
        j, names = rng.choice((near % len(units), rng.randrange(len(units)))), rng.choice(PARTS)
        one, other = choices[i], choices[j]
        choices[i] = with_those_of(one, other, names)
        choices[j] = other if rng.random() < ONE_WAY else with_those_of(other, one, names)
    changed = list(plan.units)
    for u, choice in zip(units, choices, strict=True):
        changed[u] = choice
    return replace(plan, units=tuple(changed)) if tuple(changed) != plan.units else None
