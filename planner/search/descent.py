"""Local search: from a plan along moves that shorten the simulated step, until none does."""

from __future__ import annotations

from collections.abc import Iterator

from tierplan.planner.milp.amounts import Problem
from tierplan.planner.plan import UnitwisePlan
from tierplan.planner.search.candidates import Candidate, PlanSimulator
from tierplan.planner.search.moves import FAMILIES

LONG_CHAIN = 8
"""Units up to which every move of one is tried; longer chains have shifts."""
BETTER = 1 - 1e-4
"""A move counts as an improvement when it shortens the step by more than this."""


def descend(
    problem: Problem,
    start: Candidate[UnitwisePlan],
    simulate_plan: PlanSimulator,
    *,
    goal_s: float = 0.0,
    of_several_units: bool = True,
) -> Iterator[Candidate[UnitwisePlan]]:
    """From `start` along local moves: after each one, the best so far. Until none helps, or a step of `goal_s`.

    Goes round the families of moves, with `of_several_units` those that change two at once too.
    """
    families = FAMILIES if of_several_units else FAMILIES[:-1]
    best = start
    stale = 0
    while True:
        for family in families:
            before = best
            for move in family(problem, best.plan):
                changed = move(best.plan)
                if changed is None or changed == best.plan:
                    continue
                tried = simulate_plan(changed)
                if tried.step_s is not None and best.step_s is not None and tried.step_s < best.step_s * BETTER:
                    best = tried
                yield best
                if best.step_s is not None and best.step_s <= goal_s:
                    return
            stale = 0 if best is not before else stale + 1
            if stale >= len(families):
                return
