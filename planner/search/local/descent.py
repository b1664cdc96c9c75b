"""Local search: from a plan along moves that shorten the simulated step, until none does.

On short chains, where a move of one or two units is much of a plan, one descent may end beside the best plan, and there
is time for more. Each restart changes some units of the best plan at random (or all of them), and descends again. The
random numbers come from the seed, so a search is repeatable.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from tierplan.planner.milp.amounts import Problem
from tierplan.planner.milp.modes import MODES
from tierplan.planner.plan import UnitwisePlan
from tierplan.planner.plan_rules import ACTIONS
from tierplan.planner.search.candidates import Candidate, PlanSimulator
from tierplan.planner.search.local.moves import (
    FAMILIES,
    SHORT_CHAIN,
    WINDOWS,
    with_action,
    with_placement,
    with_windows,
)

BETTER = 1 - 1e-4
"""A move counts as an improvement when it shortens the step by more than this."""
RESTARTS = 30
"""Descents without success after which the search ends."""
TRIES = 20
"""Random changes that are tried until one fits."""


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
                tried = simulate_plan(changed, best)
                if tried.step_s is not None and best.step_s is not None and tried.step_s < best.step_s * BETTER:
                    best = tried
                yield best
                if best.step_s is not None and best.step_s <= goal_s:
                    return
            stale = 0 if best is not before else stale + 1
            if stale >= len(families):
                return


def descend_with_restarts(
    problem: Problem, start: Candidate[UnitwisePlan], simulate_plan: PlanSimulator, *, goal_s: float, seed: int
) -> Iterator[Candidate[UnitwisePlan]]:
    """Descents from random changes of `start`, after each move the best so far; none for long chains."""
    if len(problem.units) > SHORT_CHAIN:
        return
    rng = random.Random(seed)
    best, stale = start, 0
    while stale < RESTARTS and best.step_s is not None and best.step_s > goal_s:
        changed = _elsewhere(problem, best.plan, simulate_plan, rng)
        stale += 1
        if changed is None:
            yield best
            continue
        before_s = best.step_s
        for end in descend(problem, changed, simulate_plan, goal_s=goal_s, of_several_units=False):
            if end.step_s is not None and end.step_s < before_s * BETTER:
                best, stale = end, 0
            yield best


def _elsewhere(
    problem: Problem, plan: UnitwisePlan, simulate_plan: PlanSimulator, rng: random.Random
) -> Candidate[UnitwisePlan] | None:
    """A plan that fits, with some units changed at random."""
    num = len(problem.units)
    for _ in range(TRIES):
        changed = with_windows(plan, rng.choice(WINDOWS))
        for u in rng.sample(range(num), rng.randint(min(2, num), num)):
            changed = _with_random_unit(problem, changed, u, rng)
        tried = simulate_plan(changed)
        if tried.fits:
            return tried
    return None


def _with_random_unit(problem: Problem, plan: UnitwisePlan, u: int, rng: random.Random) -> UnitwisePlan:
    plan = with_placement(plan, u, MODES[rng.choice(problem.modes(u))])
    for g, group in enumerate(problem.units[u].groups):
        able = [action for action in (ACTIONS if group.slots else ACTIONS[:1]) if problem.may_be(group, action)]
        plan = with_action(plan, problem, u, g, rng.choice(able))
    choice = plan.units[u]
    if choice.states != "device" and choice.grads != "nvme" and plan.semantics != "delayed-1":
        units = list(plan.units)
        units[u] = replace(choice, late_update=rng.random() < 0.5)
        plan = replace(plan, units=tuple(units))
    return plan
