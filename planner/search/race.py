"""Searches side by side: each shape of plans has one of its own, and those that find more get more of the work.

Who may go on and for how long depends on counted work and on steps found, never on the clock or on how much work there
is in all. So the same question has the same answer, and one with more work begins with all that one with less has done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import ceil, inf

from tierplan.planner.milp.amounts import Problem
from tierplan.planner.milp.bounds import Bound
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.from_program import ProgramPlans
from tierplan.planner.search.incumbents import Incumbents

LEAST_OPS, GROWTH, MOST_OPS = 1_000, 1.5, 100_000
"""Of a round in which all orders of micro-batches have their turn: the first, how they grow, and the last."""
GOOD_FRAC = 0.003
"""A search ends when the step is this close to the bound."""
FIRST_OPS = 90_000
"""Of work that each search may do in the first round."""


@dataclass(eq=False)
class Racer:
    """The search of one shape."""

    tried: Iterator[float]
    """After each plan that is tried: the shortest step so far, in seconds; infinite as long as none fits."""
    bound_s: float
    """Its search ends when others are as quick as this."""
    best_s: float = inf
    is_over: bool = False

    def run(self, ops: float, budget: Budget) -> Iterator[None]:
        """Goes on for some work."""
        while not self.is_over and ops > 0:
            before = budget.ops_left
            found = next(self.tried, None)
            ops -= before - budget.ops_left
            self.is_over = found is None
            self.best_s = self.best_s if found is None else found
            yield


def race(
    racers: list[Racer],
    budget: Budget,
    *,
    kept_frac: float = 0.5,
    first_ops: float = FIRST_OPS,
    bound_weight: float = 0.0,
    meet: Callable[[], list[Racer]] = list,
) -> Iterator[None]:
    """All searches to their ends, the most promising first: a step each time it may be interrupted.

    In each round are `kept_frac` of those of the one before, and each does twice as much. They `meet` after it, to tell
    each other what they have found; others may join then, and all of these are in the next round. After the first one,
    a percent of the bound counts as much as `bound_weight` percent of the step.
    """
    ops, num = first_ops, len(racers)
    joining: list[Racer] = []
    while racers:
        for racer in [*racers[:num], *(r for r in racers[num:] if r in joining)]:
            for _ in racer.run(ops, budget):
                best_s = min(r.best_s for r in racers)
                for other in racers:
                    other.is_over = other.is_over or other.bound_s >= best_s * (1 - GOOD_FRAC)
                yield
        joining = meet()
        able = (r for r in [*racers, *joining] if not r.is_over)
        racers = sorted(able, key=lambda r: r.best_s * r.bound_s**bound_weight)
        num, ops, bound_weight = ceil(kept_frac * num), 2 * ops, 0.0


def rounds(num_ops: float) -> Iterator[float]:
    """Sizes of rounds that together are about so much work: the first of much work are those of little."""
    ops = 0.0
    while num_ops > ops / 2 or not ops:
        ops = min(MOST_OPS, GROWTH * ops or LEAST_OPS)
        yield ops
        num_ops -= ops


@dataclass(eq=False)
class OrderSearch:
    """The search of one order of micro-batches, which knows nothing of the other's."""

    problems: list[Problem]
    bounds: list[Bound]
    from_program: ProgramPlans
    share: float
    """Of the budget, whatever else is searched."""
    spent_ops: float
    racers: list[Racer]
    race: Iterator[None]
    more_ops: float = 0.0
    """What it may spend beyond its share."""
    is_over: bool = False

    @property
    def found(self) -> Incumbents:
        return self.from_program.incumbents

    @property
    def best_s(self) -> float:
        return min((r.best_s for r in self.racers), default=inf)

    @property
    def least_s(self) -> float:
        return min((r.bound_s for r in self.racers), default=inf)
