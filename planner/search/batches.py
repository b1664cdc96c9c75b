"""The outer search: micro-batch size and accumulation for a given number of sequences per step.

Divisions of long chains are racers for one budget, as shapes of plans are in the search of one division: those that
find more get more of it, and what one has found is a start for the others. A micro-batch is not cut into smaller ones
then, for these are a division of their own; and plans with one micro-batch after the other join where they are not far
behind. While all are far from the bound the race goes on, for less than a division alone does then. So one alone
may end a few percent better. Up to `SEARCHED_TO_THE_END` none races, nor where there is one only.

None is searched any longer once all that is left of it has a bound above what is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf, isqrt, log
from typing import Any, NamedTuple

from tierplan.hwmodels.machine import Machine
from tierplan.planner.compared import NEAR
from tierplan.planner.loop import FAR, Search
from tierplan.planner.milp.program import Solver
from tierplan.planner.plan_rules import PlanError
from tierplan.planner.planning import budget_of, known_of_lesser, plan, refuse_lacking, remember, remembering
from tierplan.planner.questions.endurance import allowed_bytes_per_s
from tierplan.planner.results import PlanResult, PolicyResult
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.incumbents import Batches
from tierplan.planner.search.lesser import Known
from tierplan.planner.search.local.moves import with_shape_of
from tierplan.planner.search.race import GOOD_FRAC, Racer, race
from tierplan.sim.digest import digest
from tierplan.sim.step import Semantics
from tierplan.sim.workloads.workload import MAX_SEQUENCES, Workload

SEARCHED_TO_THE_END = 20
"""Units up to which each division gets the search that it gets when asked by itself, so none of them alone ends better
than all: simulations take so little that the searches end by themselves. So do those of several devices, where most of
the work is in packs of units, which are no racers."""
KEPT_FRAC, BOUND_WEIGHT = 1 / 3, 6.0
"""Of the divisions in one round, those that have another; and how much their bounds count after the first, when steps
still say little."""
BEHIND = 1.05
"""Where all steps of the race are so many times one that is known, it does not go on."""
S_PER_DIVISION = 1.0
"""On several devices: of a time limit, for each division that is compared and not searched."""
FAR_FROM_KNOWN = 1.1
"""Instead of `FAR`, where the answer of a lesser machine is known: a better machine's is mostly near that one."""
TOO_SLOW = 1.5
"""Plans with one micro-batch after the other that take so many times the best step are no start of a search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """The best division of a step's sequences into micro-batches."""

    workload: Workload
    result: PlanResult
    planned_s: Mapping[int, float] = field(default_factory=dict)
    """Step time by micro-batch size, of those that fit, as far as each was searched."""


class Cut(NamedTuple):
    """How the sequences of a step are cut into micro-batches."""

    batch: int
    accumulation: int
    """Of each device that has micro-batches of its own."""
    batches: Batches | None
    """Whose they are; None on one device."""


def plan_sequences(
    make: Callable[[int, int], Workload],
    machine: Machine,
    *,
    sequences: int,
    semantics: Semantics | None = None,
    time_limit_s: float | None = None,
    by_clock: bool = True,
    seed: int = 0,
    drive_lifetime_years: float | None = None,
    beat_s: float = inf,
    known: Known | None = None,
) -> Division:
    """The best plan for `sequences` per optimizer step; `make(batch, accumulation)` gives the workload.

    On several devices, with micro-batches that they share, or with as many for each; `sequences` are those of all.
    `time_limit_s` is of all together. A machine that has more than the catalog's of its name has the answer of the
    lesser one too; `known` is that, where it is at hand. `by_clock` and `beat_s` are as for `plan`.
    Raises `InfeasiblePlan` when no division fits, that of single sequences included; `PlanError` for no sequences.
    """
    if sequences < 1:
        raise PlanError(f"a step of {sequences} sequences trains nothing; ask for 1 or more")
    if sequences > MAX_SEQUENCES:
        raise PlanError(f"a step of {sequences:,} sequences is no step; ask for {MAX_SEQUENCES:,} or fewer")
    write_limit, num = allowed_bytes_per_s(machine, drive_lifetime_years), machine.num_devices
    asked: dict[str, Any] = {
        "semantics": semantics,
        "time_limit_s": time_limit_s,
        "by_clock": by_clock,
        "seed": seed,
        "drive_lifetime_years": drive_lifetime_years,
        "beat_s": beat_s,
    }

    def planned_for(less: Machine) -> tuple[Workload, PlanResult]:
        found = plan_sequences(make, less, sequences=sequences, **asked)
        return found.workload, found.result

    one_by_one = make(1, sequences)
    refuse_lacking(one_by_one, machine)
    budget = budget_of(time_limit_s, by_clock=by_clock, divides=True)
    question = (digest(one_by_one), sequences, budget.num_ops, *asked.values())
    known = known_of_lesser(one_by_one, machine, question, planned_for, known)
    far = FAR if known is None else FAR_FROM_KNOWN
    solver = Solver(seed=seed)
    searches: list[Search] = []

    def searched(some: list[Cut], *, compared: bool = False) -> list[Search]:
        """Searches for these divisions, carried out; or with the policies `compared` alone."""
        alone, racing = list[Search](), list[Search]()
        for cut in some:
            batch, own, kind = cut
            workload = make(batch, own)
            to_the_end = not races(cut)
            own_known = known if known is not None and (known.batch, known.accumulation) == (batch, own) else None
            own_budget = budget_of(time_limit_s, by_clock=by_clock) if to_the_end else budget
            search = Search(workload, machine, semantics, own_budget, seed, kind, write_limit, beat_s, own_known)
            if compared:
                search.beat_s = min(beat_s, *(s.best_s for s in searches))
                search.compare()
                if num > 1:
                    search.search_stages()
            elif to_the_end:
                search.begin(orders=() if kind == "shared" else None)  # in which packs alone are searched
            else:
                search.begin(only="vertical" if own > 1 else "horizontal", solver=solver)
            (alone if to_the_end else racing).append(search)
        if not compared and (known is None or not known.is_cut):
            if racing:  # none whose bound is above what systems reach that share micro-batches
                _raced(racing, budget, min([beat_s, *(s.best_s for s in alone)]), far)
            if not any(s.is_interrupted for s in racing):
                _one_by_one(alone, min([beat_s, *(s.best_s for s in racing)]))
        return [*racing, *alone]

    def races(cut: Cut) -> bool:
        """Whether it races with others for one budget."""
        return cut.batches != "shared" and is_long

    ranked = _cuts(sequences, num)
    is_long = len(one_by_one.units) > SEARCHED_TO_THE_END and len(ranked) > 1
    known_cut = [] if known is None else [c for c in ranked if c[:2] == (known.batch, known.accumulation)]
    likely = list(dict.fromkeys(c.batch for c in ranked))[: 1 if num == 2 else 2]
    # packs take long: in other divisions they are searched where policies do better there
    first = known_cut or [c for c in ranked if num == 1 or c.batch in likely]
    searches += searched([c for c in ranked if races(c) or c in first])
    rest = [c for c in ranked if c not in map(_cut, searches)]
    some = list(dict.fromkeys(c.batch for c in rest))
    some = some if time_limit_s is None else some[: int(time_limit_s / S_PER_DIVISION)]
    if rest and not any(s.is_interrupted for s in searches):
        others = searched([c for c in rest if c.batch in some], compared=True)
        least_s, other = min(s.best_s for s in searches), min(others, key=lambda s: s.best_s, default=None)
        if other is not None and other.best_s < (1 - GOOD_FRAC) * least_s:
            others += searched([_cut(other)])
        elif least_s == inf:
            others += searched(rest)
        searches += others
    for search in searches:
        search.hold()
    best = min(searches, key=lambda s: s.best_s)
    planned: dict[int, float] = {}
    for search in searches:
        batch = _cut(search).batch
        planned[batch] = min(search.best_s, planned.get(batch, inf))
    with remembering(machine, question):
        if best.best_s < inf or beat_s < inf:
            workload, result = best.workload, best.result()
        else:
            workload = one_by_one
            result = plan(workload, machine, **asked, batches="shared" if num > 1 else None)  # or says what is missing
            planned[1] = result.step_s
    result = replace(result, compared=_in_their_best(result.compared, searches, sequences))
    remember(machine, question, workload, result)
    return Division(workload=workload, result=result, planned_s=planned)


def _cuts(sequences: int, num_devices: int) -> list[Cut]:
    """All divisions of a step, the most promising first: on several devices, two micro-batches for each are."""
    batches = sorted(divisors(sequences), reverse=True)
    if num_devices == 1:
        return [Cut(batch, sequences // batch, None) for batch in batches]
    batches.sort(key=lambda batch: abs(log(sequences / batch / (2 * num_devices))))
    found = []
    for batch in batches:
        accumulation = sequences // batch
        if accumulation % num_devices == 0:
            found.append(Cut(batch, accumulation // num_devices, "each"))
        found.append(Cut(batch, accumulation, "shared"))
    return found


def _cut(search: Search) -> Cut:
    training = search.workload.training
    return Cut(training.per_device_train_batch_size, training.gradient_accumulation_steps, search.batches)


def _in_their_best(
    compared: Mapping[str, Callable[..., PolicyResult]], searches: list[Search], sequences: int
) -> dict[str, Callable[[], PolicyResult]]:
    """Each published system in the division that suits it best, of those that were searched, for whoever asks."""

    def result(name: str) -> PolicyResult:
        others = [(s, s.compared[name](is_best=False)) for s in searches]
        if running := [of for of in others if of[1].step_s is not None]:
            near = NEAR * min(of[1].per_sequence_s for of in running)
            in_full = (s.compared[name]() for s, r in running if r.per_sequence_s <= near)
            return min(in_full, key=lambda r: r.per_sequence_s)
        own = compared[name]()
        if own.step_s is not None and own.num_sequences != sequences:
            alone = f"in this time it was tried in steps of {own.num_sequences} sequences alone"
            own = replace(own, step_s=None, reason=f"{alone}; give more (--time-limit)")
        elsewhere = (s.compared[name]() for s, r in others if r.lacks_memory and not own.lacks_memory)
        return next(elsewhere, own)  # what memory it lacks says more than that it has no plan for this division

    return {name: partial(result, name) for name in compared}


def _one_by_one(searches: list[Search], beat_s: float) -> None:
    """All that each search does when it is asked by itself, the best bound first."""
    for search in sorted(searches, key=lambda s: s.least_s):
        search.beat_s = min(beat_s, *(s.best_s for s in searches))
        left = search.budget.ops_left
        search.budget.restart()
        search.budget.ops_left = left if search.num_devices == 1 else search.budget.ops_left
        search.go_on()
        if search.is_interrupted:
            return


def _raced(searches: list[Search], budget: Budget, beat_s: float, far: float) -> None:
    """The race for one budget: in it, divisions are racers; searches for another order of micro-batches join. Beyond
    the budget it goes on while the best step is more than `far` times the bound, as long as that pays."""
    budget.restart()
    known_s, beat_s, num = beat_s, min(beat_s, *(s.best_s for s in searches)), len(searches)

    def meet() -> list[Racer]:
        for search in searches:
            search.collect()
        best = min(searches, key=lambda s: s.best_s)
        joining = list(_one_after_the_other(searches, best)) if len(searches) == num else []
        searches.extend(joining)
        if (found := best.incumbents.plain) is not None:
            for search in searches:
                if search.least_s < best.best_s:
                    search.offer(found.plan)
        return [racer for search in joining for racer in search.racers]

    def is_over() -> bool:
        all_racers = [racer for search in searches for racer in search.racers]
        best_s = min(r.best_s for r in all_racers)
        budget.note(best_s)
        if budget.ops_left > 0 or budget.is_out_of_time:
            return budget.is_out_of_time
        bound_s = min(r.bound_s for r in all_racers)
        is_near = min(beat_s, best_s) <= far * bound_s
        is_behind = best_s > BEHIND * known_s
        return is_near or is_behind or budget.is_stale(bound_s) or budget.ops_left <= -budget.more_ops

    racers = [racer for search in searches for racer in search.racers if racer.bound_s < beat_s]
    racers.sort(key=lambda r: r.bound_s)
    racers = racers or meet()  # where none fits whose micro-batches go through each unit together
    try:
        for _ in race(racers, budget, kept_frac=KEPT_FRAC, bound_weight=BOUND_WEIGHT, meet=meet):
            if is_over():
                break
        for search in searches:
            search.collect()
        if all(s.best_s == inf for s in searches):
            next((s for s in sorted(searches, key=lambda s: s.least_s) if s.found_any()), None)
    except KeyboardInterrupt:
        for search in searches:
            search.collect()
        min(searches, key=lambda s: s.best_s).interrupt()


def _one_after_the_other(searches: list[Search], best: Search) -> Iterator[Search]:
    """Those for plans with one micro-batch after the other, where they are worth a search."""
    solver = Solver(seed=best.seed)
    for search in searches:
        if search.workload.training.gradient_accumulation_steps == 1:
            continue
        if best.best_s < inf and search.has_room:
            steps_s = [c.step_s for shape, c in search.seeds.by_shape.items() if shape[0] == "horizontal"]
            if (plain := search.incumbents.plain) is not None:
                asked = search.posed("horizontal", 1)
                steps_s.append(search.simulate_plan(with_shape_of(plain.plan, asked)).step_s)
            if not any(step_s is not None and step_s < TOO_SLOW * best.best_s for step_s in steps_s):
                continue
        yield search.beside("horizontal", solver, best.best_s)


def divisors(number: int) -> list[int]:
    """All whole numbers that divide it, rising."""
    small = [k for k in range(1, isqrt(number) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})
