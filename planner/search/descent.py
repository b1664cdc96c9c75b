"""Local search: from a plan along moves that shorten the simulated step, until none does."""

from __future__ import annotations

from collections.abc import Iterator

from tierplan.planner.milp.amounts import Problem
from tierplan.planner.plan import UnitwisePlan
from tierplan.planner.search.candidates import Candidate, PlanSimulator
from tierplan.planner.search.moves import FAMILIES

LONG_CHAIN = 8
PATIENCE = 5
"""Moves of one family without success after which it is left, on chains longer than `LONG_CHAIN`."""
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

    Goes round the families of moves. On long chains, where neighbours are much alike, a family is left after a few
    moves without success; on short ones every move is tried, with `of_several_units` those that change two at once too.
    """
    families = FAMILIES if of_several_units else FAMILIES[:-1]
    best = start
    patience = PATIENCE if len(problem.units) > LONG_CHAIN else 10**9
    stale = 0
    while True:
        for family in families:
            failures, before = 0, best
            for move in family(problem, best.plan):
                changed = move(best.plan)
                if changed is None or changed == best.plan:
                    continue
                tried = simulate_plan(changed)
                if tried.step_s is not None and best.step_s is not None and tried.step_s < best.step_s * BETTER:
                    best, failures = tried, 0
                else:
                    failures += 1
                yield best
                if best.step_s is not None and best.step_s <= goal_s:
                    return
                if failures >= patience:
                    break
            stale = 0 if best is not before else stale + 1
            if stale >= len(families):
                return
