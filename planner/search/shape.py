"""The search for plans of one shape: those of the program, of published systems and of other shapes, and from the best
of them by local moves.

A program has plans whose states come to the device for their updates, and plans whose states do not. Both are tuned,
one after the other: which is quicker at first says little. On long chains both race with regular plans. With clipping,
plans whose gradients leave the device and come back are tuned first, where a simple one is clearly quicker than all so
far. Mostly they are in the way; and the bound does not say, since in it gradients pass through a device that has no
room for whole ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf
from typing import Literal

from tierplan.planner.milp.amounts import Problem, Shape
from tierplan.planner.milp.bounds import FEW_UNITS, Bound
from tierplan.planner.milp.modes import MODES, Mode
from tierplan.planner.milp.rates import STATE_SHARDS
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.planner.plan_rules import PLACES, PLANNER, Order, Place
from tierplan.planner.search.candidates import Candidate, PlanSimulator
from tierplan.planner.search.from_program import ProgramPlans
from tierplan.planner.search.incumbents import Incumbents
from tierplan.planner.search.local.descent import descend, descend_with_restarts
from tierplan.planner.search.local.moves import (
    RANK,
    in_shards,
    loosened,
    on_its_devices,
    with_brought_states,
    with_returned_grads,
    with_shape_of,
    with_tied,
    with_windows,
)
from tierplan.planner.search.local.patterns import Patterns
from tierplan.planner.search.local.shifts import descend_by_shifts
from tierplan.planner.search.race import FIRST_OPS, GOOD_FRAC, Racer, race
from tierplan.sim.workloads.families.slices import SUB_BATCHES
from tierplan.sim.workloads.workload import Workload

CLEARLY_QUICKER = 0.8
"""Of the first plan's step without states that come to the device, what one with them has to be below; and of the best
step so far of any shape without gradients that come back, what one with them has to be below."""
NUM_PATTERNS, OPS_PER_UNIT = 3, 1_500
"""Searches for regular plans that begin with other luck, and the work of each, per unit, before half of them go on."""
ALONE_OPS = 250_000
"""Of work that the plans which are quicker at first have before the others."""


def sub_batches_of(
    workload: Workload, seeds: Mapping[Shape, Candidate[UnitwisePlan]], *, cuts: bool
) -> dict[Order, list[int]]:
    """By order of micro-batches, the sub-batches that they are cut into (if any are) which are worth a look: those of
    the best plan that is known, too."""
    training = workload.training
    batch = training.per_device_train_batch_size
    nums: dict[Order, list[int]] = {
        "horizontal": [1],
        "vertical": [num for num in SUB_BATCHES if cuts and batch % num == 0],
    }
    if training.gradient_accumulation_steps > 1:
        nums["vertical"].insert(0, 1)
    if seeds:
        order, num, _ = min(seeds, key=lambda shape: (seeds[shape].step_s, shape))
        nums[order] = list(dict.fromkeys([*nums[order], num]))
    return {order: of for order, of in nums.items() if of}


def tried(
    from_program: ProgramPlans,
    p: Problem,
    bound: Bound,
    seeds: Mapping[Shape, Candidate[UnitwisePlan]],
    seed: int,
) -> Iterator[float]:
    """Plans of one shape: the program's, then local moves from the best of these and of the policies."""
    goal_s = bound.searched_s * (1 + GOOD_FRAC)
    shape = p.shape
    found, simulate_plan = from_program.incumbents, from_program.simulate_plan
    has_tied = any(unit.tied_gb for unit in p.units)

    def best_s() -> float:
        best = found.by_shape.get(shape)
        return inf if best is None or best.step_s is None else best.step_s

    def reshaped(others: Iterable[Candidate[UnitwisePlan]]) -> Iterator[float]:
        for other in others:
            same = with_shape_of(other.plan, p)
            more = [with_brought_states(loosened(same))] if p.brings_states else []
            more += [with_tied(loosened(same), p.workload, "host")] if p.turn > 1 and has_tied else []
            for changed in (same, loosened(same), *more):
                found.consider(simulate_plan(changed))
                yield best_s()

    back = bound.returning
    wide = p if back is None or back.model is None else back.model.problem

    def frugal() -> Iterator[float]:
        for posed in (p, wide) if best_s() == inf else ():
            for plan in holding_least(posed):
                found.consider(simulate_plan(plan))
                yield best_s()

    def going(trials: Iterator[float], p: Problem, bound: Bound) -> Iterator[float]:
        for _ in trials:
            yield best_s()
        yield from frugal()
        yield from reshaped([c for of, c in found.by_shape.items() if of != shape])
        if shape in found.by_shape:
            yield from _of_few_units(p, bound, found, simulate_plan, seed)

    yield from reshaped(seeds.values())
    kinds = [(from_program.tried(p, bound, goal_s=goal_s), p, bound)]
    if bound.plain is not None and bound.plain.feasible and bound.plain.model is not None:
        # first what has the quicker first plan: in memory that is short, bringing states may only be in the way
        posed, firsts = (bound.plain.model.problem, bound.plain), list[float]()
        kinds.append((from_program.tried(*posed, goal_s=goal_s), *posed))
        for each, *_ in () if bound.needs_states_here else reversed(kinds):
            firsts.append(inf)
            for firsts[-1] in each:
                yield best_s()
                if firsts[-1] < inf:
                    break
        if firsts and CLEARLY_QUICKER * firsts[0] <= firsts[1]:
            kinds.reverse()
    if back is not None and wide is not p:
        ops_left = simulate_plan.budget.ops_left
        starts = [*seeds.values(), *(c for of, c in found.by_shape.items() if of == shape)]
        returned = [simulate_plan(with_returned_grads(loosened(with_shape_of(c.plan, wide)))) for c in starts]
        others = [
            c for c in (*seeds.values(), *found.by_shape.values()) if not any(u.returns_grads for u in c.plan.units)
        ]
        if _least_s(returned) < CLEARLY_QUICKER * _least_s(others):
            for candidate in returned:
                found.consider(candidate)
            kinds.insert(0, (from_program.tried(wide, back, goal_s=goal_s), wide, back))
            p, bound = wide, back
        simulate_plan.budget.ops_left = ops_left  # a look is beside the budget: without success it changes nothing
    if len(p.units) > FEW_UNITS:
        programs = [trials for trials, *_ in kinds]
        for trials in programs:
            while best_s() == inf and next(trials, None) is not None:
                yield best_s()
        yield from frugal()
        first = found.by_shape.get(shape)
        if back is not None and first is not None and any(u.returns_grads for u in first.plan.units):
            p, bound = wide, back
        yield from reshaped([c for of, c in found.by_shape.items() if of != shape])
        if best_s() < inf:
            yield from _of_many_units(p, bound, found, simulate_plan, seed, programs)
        return
    racers = [Racer(going(*kind), kind[-1].searched_s) for kind in kinds]
    for _ in racers[0].run(ALONE_OPS, simulate_plan.budget):
        yield best_s()
    for _ in race(racers, simulate_plan.budget, kept_frac=1.0, first_ops=FIRST_OPS / 2):
        yield best_s()


def holding_least(p: Problem) -> Iterator[UnitwisePlan]:
    """Plans that hold in memory what a turn needs and hardly more: all else is as far away as it may be, or made again.

    They are slow, and where the program's plans do not fit the only ones to start from.
    """
    away: Literal["nvme", "host"] = "nvme" if p.has_nvme else "host"

    def choice(u: int, grads: Place) -> UnitPlan:
        def distance(mode: Mode) -> tuple[int, bool]:
            return sum(
                RANK[place] for place in (mode.states, mode.params, mode.frozen or mode.params)
            ), mode.grads == grads

        mode = max((MODES[k] for k in p.modes(u)), key=distance)
        unit, amounts = p.workload.units[u], p.units[u]
        acts = amounts.acts(["recompute"] * len(unit.saved))
        made = replace(mode, input=away, acts=acts) if unit.kind == "block" else mode
        return in_shards(made, max(STATE_SHARDS))

    has_modes = all(p.modes(u) for u in range(len(p.units)))
    for grads, ahead in product(PLACES, (0, 1)) if has_modes else ():
        units = tuple(choice(u, grads) for u in range(len(p.units)))
        plan = UnitwisePlan(
            policy=PLANNER, units=units, semantics=p.semantics, order=p.order, sub_batches=p.sub_batches
        )
        plan = with_tied(plan, p.workload, "host" if p.host_gb else "device")
        yield on_its_devices(with_windows(plan, (ahead, ahead, ahead)), p)


def _least_s(candidates: Iterable[Candidate[UnitwisePlan]]) -> float:
    return min((c.step_s for c in candidates if c.step_s is not None), default=inf)


def _of_few_units(
    p: Problem, bound: Bound, found: Incumbents, simulate_plan: PlanSimulator, seed: int
) -> Iterator[float]:
    """Local moves from the best plan of one shape, and anew where a better one was offered meanwhile."""
    shape, goal_s = p.shape, bound.searched_s * (1 + GOOD_FRAC)
    for descent in (descend, partial(descend_with_restarts, seed=seed)):
        start = None
        while start is not found.by_shape[shape]:
            start = found.by_shape[shape]
            for best in descent(p, start, simulate_plan, goal_s=goal_s):
                found.consider(best)
                start = found.by_shape[shape]
                yield start.step_s or inf
                if start is not found.by_shape[shape]:
                    break


def _of_many_units(
    p: Problem,
    bound: Bound,
    found: Incumbents,
    simulate_plan: PlanSimulator,
    seed: int,
    programs: Iterable[Iterator[float]],
) -> Iterator[float]:
    """A race between what is left of the programs' plans and regular ones by several seeds; each goes on by shifts from
    where it ends."""
    shape, goal_s = p.shape, bound.searched_s * (1 + GOOD_FRAC)

    def going(descent: Iterator[Candidate[UnitwisePlan]]) -> Iterator[float]:
        for best in descent:
            found.consider(best)
            yield inf if best.step_s is None else best.step_s

    def shifted(start: Candidate[UnitwisePlan], seed: int) -> Iterator[float]:
        yield from going(descend_by_shifts(p, start, simulate_plan, bound=bound, goal_s=goal_s, seed=seed))

    def programmed(trials: Iterator[float]) -> Iterator[float]:
        yield from trials
        yield from shifted(found.by_shape[shape], seed)

    def regular(seed: int) -> Iterator[float]:
        patterns = Patterns(p, found.by_shape[shape].plan, simulate_plan, bound.s_per_gb, seed)
        yield from going(patterns.descend(goal_s))
        if patterns.best.fits:
            yield from shifted(patterns.best, seed)

    num_patterns = NUM_PATTERNS if any(unit.kind == "block" for unit in p.workload.units) else 0
    ways = [*map(programmed, programs), *(regular(NUM_PATTERNS * seed + k) for k in range(num_patterns))]
    racers, first_ops = [Racer(way, bound.searched_s) for way in ways], OPS_PER_UNIT * len(p.units)
    for _ in race(racers, simulate_plan.budget, first_ops=first_ops):
        yield found.by_shape[shape].step_s or inf
