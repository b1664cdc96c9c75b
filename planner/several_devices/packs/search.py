"""Several devices: better packs than Harmony's own search finds, over the same space and with updates on devices.

Harmony tries packs of about equal compute. What decides is not equality: the first pack to run fills the pipeline, the
last ones drain it, every turn costs its change of parameters, and forward packs need less memory than backward packs.
So the search goes over forms (wrap-around pipeline, data parallelism), numbers of forward and of backward packs, and
the sizes of the packs at either end, each balanced exactly; then over borders, moved one by one; both by an estimate
(`estimate`), best of several starts. So is the number of packs that devices update. What the estimate ranks first is
simulated, and its borders are moved again, now by simulation. Micro-batch sizes are the outer search's
(`plan_sequences`).
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise, product
from math import inf
from typing import NamedTuple

from tierplan.hwmodels.names import DEVICE
from tierplan.planner.milp.amounts import Problem
from tierplan.planner.milp.totals import at_once_s
from tierplan.planner.plan import PackPlan, Packs
from tierplan.planner.plan_rules import PackForm, Runs, lent_units, shared_micro_batches, updatable_packs
from tierplan.planner.search.candidates import Candidate, PlanSimulator
from tierplan.planner.search.incumbents import Incumbents
from tierplan.planner.search.local.descent import BETTER
from tierplan.planner.several_devices.packs.estimate import STATE_PARTS, PackEstimate, PackSizes
from tierplan.sim.compiled.compiler import interrupts_wait

Ends = tuple[int, ...]
"""Of each pack in order, the unit after its last one."""


class Borders(NamedTuple):
    """Packs by where they end: the last forward one where the last backward one begins."""

    form: PackForm
    forward: Ends
    backward: Ends
    num_here: int = 0
    """Of the backward packs that their devices may update, how many they do."""

    @classmethod
    def of(cls, packs: Packs) -> Borders:
        forward, backward = (tuple(b for _, b in runs) for runs in (packs.forward, packs.backward))
        return cls(packs.form, forward, backward, sum(a in packs.updates_here for a, _ in packs.backward))

    def packs(self, like: Packs, here: Runs) -> Packs:
        """Such packs, alike in all else, of which devices update these."""
        units = tuple(u for a, b in sorted(here) for u in range(a, b))
        packs = replace(like, form=self.form, forward=runs_to(self.forward), backward=runs_to(self.backward))
        return replace(packs, updates_here=units, state_shards=STATE_PARTS if units else 1)


Numbers = tuple[PackForm, int, int]
"""Form, number of backward packs, number of forward packs."""
SHARE, SHARE_ALONE = 0.6, 0.95
"""Of the budget, what the search over packs may take: beside other plans, and where only packs are allowed."""
SHIFTS = (1, -1, 2, -2, 4, -4)
MORE_UPDATES = (8, -8, 2, -2, 1, -1)
SHARE_OF_ESTIMATES, SHARE_OF_FIRST_SIMULATIONS = 0.4, 0.6
"""Parts of the search's budget that are spent when estimates end, and when what they found has been simulated."""
OPS_OF_ESTIMATE = 15
"""What one estimate counts in the budget, in simulated ops; it takes less time than these."""
MORE_PACKS = 10
"""Numbers of backward packs that are tried, from the fewest that fit."""
SIZES_OF_ENDS = (1.0, 0.6, 0.3)
"""Of the packs at either end, relative to those between."""
VARIED = 8
"""Forms and numbers of packs of which other sizes of the ends are tried."""
STARTS = 6
FAR = 1.2
"""By the estimate, packs that take at most so many times the best plan so far are searched for further."""
PATIENCE = 30
"""Descents from kicked borders without success after which the estimate has no more to say."""
KICKS = 3
"""Random moves of borders between two descents by the estimate."""
SIMULATED = 16
"""Of what the descents found, at most so many are simulated."""
GOLDEN = (5**0.5 - 1) / 2
"""Multiples of it, without their whole parts, lie evenly, however many they are."""
PROMISING = 1.02
"""A move is simulated when the estimate is at most this much above the best plan's."""


def search_packs(
    incumbents: Incumbents, simulate_plan: PlanSimulator, *, num_ops: float, seed: int, beat_s: float = inf
) -> None:
    """Better packs than the best so far, where packs are allowed and a policy's fit, with a share of so much work;
    little is spent where none comes near `beat_s`."""
    if incumbents.packed is not None and incumbents.batches != "each":
        share = SHARE_ALONE if incumbents.batches == "shared" else SHARE
        budget = simulate_plan.budget
        end = (budget.spent_ops + share * num_ops) / budget.num_ops
        incumbents.consider(improve_packs(incumbents.packed, simulate_plan, spent_frac=end, seed=seed, beat_s=beat_s))


def bound_of_packs(problem: Problem, packs: Packs) -> float:
    """No step in packs that the search may try is shorter, in seconds: compute is shared, all but the last pack, which
    has to fit, go forward twice, and late updates are the host's."""
    sizes, num = PackSizes(problem.workload), len(problem.units)
    device_bytes = problem.machine.tier(DEVICE).capacity_bytes
    again = [unit.fwd_s for u, unit in enumerate(problem.units) if sizes.held_bytes("bwd", u, num) > device_bytes]
    num_batches = problem.workload.training.gradient_accumulation_steps
    computes_s = num_batches * (at_once_s(problem) + sum(again)) / packs.devices
    if not packs.late_updates:
        return computes_s
    parameters, adam = sum(map(problem.host_gparams, problem.units)), problem.rates.adam
    return max(computes_s, parameters / adam if adam else 0.0)


def improve_packs(
    start: Candidate[PackPlan], simulate_plan: PlanSimulator, *, spent_frac: float, seed: int = 0, beat_s: float = inf
) -> Candidate[PackPlan]:
    """The best packs found, no slower than `start`, until this part of the budget is spent, or `beat_s` is far."""
    search = _Search(start, simulate_plan, spent_frac, seed)
    if ranked := search.by_estimate(FAR * beat_s):
        search.simulate(ranked)
        search.by_simulation()
    return search.best


def balanced(weights: Sequence[float], sizes: Sequence[float], reach: Sequence[int]) -> Ends | None:
    """Ends of runs over all units with the least largest weight, each relative to its size; None where that cannot be.

    `reach[i]` is where a run that begins at unit i must end at the latest. Exact: for a given largest weight, runs that
    are as long as it allows, one after the other, cover the units if any runs do; the least is found by bisection.
    """
    sums = [0.0, *accumulate(weights)]
    low, high = 0.0, sums[-1] / min(sizes) * (1 + 1e-9)
    best = _greedy(sums, sizes, reach, high)
    if best is None:
        return None
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        tried = _greedy(sums, sizes, reach, middle)
        if tried is None:
            low = middle
        else:
            best, high = tried, middle
    return best


def _greedy(sums: Sequence[float], sizes: Sequence[float], reach: Sequence[int], largest: float) -> Ends | None:
    num, borders = len(sums) - 1, [0]
    for k, size in enumerate(sizes):
        first, left = borders[-1], len(sizes) - k - 1
        limit = sums[first] + size * largest
        end = min(bisect_right(sums, limit * (1 + 1e-12)) - 1, reach[first], num - left)
        if end <= first:
            return None
        borders.append(end)
    return tuple(borders[1:]) if borders[-1] == num else None


class _Search:
    def __init__(self, start: Candidate[PackPlan], simulate_plan: PlanSimulator, spent_frac: float, seed: int) -> None:
        self.start, self.simulate_plan, self.budget = start, simulate_plan, simulate_plan.budget
        self.packs = start.plan.packs
        self.rng = random.Random(seed)
        self.lent = lent_units(simulate_plan.workload)
        self.estimate = PackEstimate(simulate_plan.workload, simulate_plan.machine)
        self._estimated_s = cache(self._estimate_s)
        self.best = start
        self.begun, self.end = self.budget.spent_frac, spent_frac
        num = len(simulate_plan.workload.units)
        self.reach = {phase: self._reach(phase, num) for phase in ("fwd", "bwd")}
        forward = [self.estimate.work_s("fwd", u, u + 1) for u in range(num)]
        backward = [f + self.estimate.work_s("bwd", u, u + 1) for u, f in enumerate(forward)]
        self.weights = {"fwd": forward, "bwd": backward}

    def _reach(self, phase: str, num: int) -> list[int]:
        """For each first unit, the end of the longest pack that fits; the unit itself where none does."""
        reach, end = [], 0
        for first in range(num):
            end = max(end, first)
            while end < num and self.estimate.fits(phase, first, end + 1):
                end += 1
            reach.append(end)
        return reach

    def _is_over(self, share: float) -> bool:
        return self.budget.is_out_of_time or self.budget.spent_frac > self.begun + share * (self.end - self.begun)

    def _estimate_s(self, borders: Borders) -> float:
        self.budget.ops_left -= OPS_OF_ESTIMATE
        runs, here = (runs_to(borders.forward), runs_to(borders.backward)), self._here(borders)
        return self.estimate.of_runs(borders.form, self.packs, *runs, {a for a, _ in here})

    def _may_be_here(self, borders: Borders) -> bool:
        """Whether devices may update such packs."""
        has_states = self.simulate_plan.workload.states_bytes > 0
        return has_states and borders.form == "pipeline" and not self.packs.late_updates

    def _here(self, borders: Borders) -> Runs:
        """The backward packs that their devices update: spread over time and devices. The first one, which is updated
        when there is nothing left to compute, is chosen first."""
        if not borders.num_here:
            return ()
        able = updatable_packs(runs_to(borders.backward), self.lent)
        return tuple(able[k] for k in evenly(len(able))[: borders.num_here])

    def _neighbours(self, borders: Borders) -> Iterator[Borders]:
        if self._may_be_here(borders):
            yield from with_other_updates(borders)
        yield from neighbours(borders)

    # ---- by the estimate ----

    def by_estimate(self, most_s: float = inf) -> list[Borders]:
        """Ends of descents from Harmony's packs, from the best shapes, and from the best of each form, kicked; none
        that take more than `most_s`."""
        shapes = self._shapes()
        starts = [Borders.of(self.packs), *shapes[:STARTS]]
        ends_s, best = dict[Borders, float](), list[Borders]()
        turn = stale = 0
        while not self._is_over(SHARE_OF_ESTIMATES) and stale < PATIENCE:
            if turn >= len(starts) and min(ends_s.values()) > most_s:
                return []
            begun = starts[turn] if turn < len(starts) else self._kicked(best[turn % len(best)])
            turn += 1
            borders = self._descend(begun)
            shorter = not ends_s or self._estimated_s(borders) < min(ends_s.values()) * BETTER
            stale = 0 if shorter or turn <= len(starts) else stale + 1
            ends_s[borders] = self._estimated_s(borders)
            quickest_last = sorted(ends_s, key=lambda p: -ends_s[p])
            best = list({borders.form: borders for borders in quickest_last}.values())
        ranked = sorted(dict.fromkeys([*ends_s, *shapes[: 4 * SIMULATED]]), key=self._estimated_s)
        return [borders for borders in ranked if (step_s := self._estimated_s(borders)) <= most_s and step_s < inf][
            :SIMULATED
        ]

    def _shapes(self) -> list[Borders]:
        """Balanced packs, best first: all forms and numbers with equal packs, then other sizes of the ends."""
        forms: tuple[PackForm, ...] = (self.packs.form,)
        if self.packs.devices > 1:
            has_enough = all(shared_micro_batches(self.simulate_plan.workload, self.packs.devices))
            forms = ("pipeline", "data") if has_enough else ("pipeline",)
        numbers: dict[Borders, Numbers] = {}
        for form, backward, forward in product(forms, self._numbers("bwd"), self._numbers("fwd")):
            borders = self._shape((form, backward, forward), 1.0, 1.0, 1.0)
            if borders is not None and not self._is_over(SHARE_OF_ESTIMATES / 2):
                for num_here in {0, backward} if self._may_be_here(borders) else {0}:
                    numbers.setdefault(borders._replace(num_here=num_here), (form, backward, forward))
        ranked = sorted(numbers, key=self._estimated_s)
        shapes = dict.fromkeys(ranked)
        for equal in ranked[:VARIED]:
            for sizes in product(SIZES_OF_ENDS, repeat=3):
                borders = self._shape(numbers[equal], *sizes)
                if borders is not None and not self._is_over(SHARE_OF_ESTIMATES / 2):
                    shapes[borders._replace(num_here=equal.num_here)] = None
        return sorted(shapes, key=self._estimated_s)

    def _shape(self, numbers: Numbers, first: float, last: float, first_forward: float) -> Borders | None:
        form, num_backward, num_forward = numbers
        backward = self._balanced("bwd", num_backward, first, last, len(self.weights["bwd"]))
        if backward is None:
            return None
        end = backward[-2] if len(backward) > 1 else 0
        forward = self._balanced("fwd", num_forward, first_forward, 1.0, end) if end else ()
        return None if forward is None else Borders(form, forward, backward)

    def _numbers(self, phase: str) -> list[int]:
        """How many packs to try."""
        reach, at, least = self.reach[phase], 0, 0
        while at < len(reach) and reach[at] > at:
            at, least = reach[at], least + 1
        most = len(reach)
        if phase == "bwd":
            return list(range(least, min(least + MORE_PACKS, most + 1)))
        return sorted({n for n in (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24) if least <= n < most} | {least})

    def _balanced(self, phase: str, num: int, first: float, last: float, end: int) -> Ends | None:
        if num > end:
            return None
        sizes = [1.0] * num
        sizes[0], sizes[-1] = first, last if num > 1 else first
        reach = [min(r, end) for r in self.reach[phase][:end]]
        return balanced(self.weights[phase][:end], sizes, reach)

    def _kicked(self, borders: Borders) -> Borders:
        for _ in range(KICKS):
            options = list(self._neighbours(borders))
            borders = self.rng.choice(options) if options else borders
        return borders

    def _descend(self, borders: Borders) -> Borders:
        """Moves of borders while the estimate falls."""
        while not self._is_over(SHARE_OF_ESTIMATES):
            limit = self._estimated_s(borders) * BETTER
            with interrupts_wait():
                shorter = (changed for changed in self._neighbours(borders) if self._estimated_s(changed) < limit)
                if (found := next(shorter, None)) is None:
                    break
            borders = found
        return borders

    # ---- by simulation ----

    def simulate(self, ranked: Sequence[Borders]) -> None:
        for borders in ranked:
            if self._is_over(SHARE_OF_FIRST_SIMULATIONS):
                return
            self._try(borders)

    def by_simulation(self) -> None:
        """Moves of borders from the best, the most promising first, while the simulated step gets shorter."""
        while True:
            borders = Borders.of(self.best.plan.packs)
            limit = self._estimated_s(borders) * PROMISING
            for changed in sorted(self._neighbours(borders), key=self._estimated_s):
                if self._is_over(1.0) or self._estimated_s(changed) > limit:
                    return
                if self._try(changed):
                    break
            else:
                return

    def _try(self, borders: Borders) -> bool:
        packs = borders.packs(self.packs, self._here(borders))
        tried = self.simulate_plan(replace(self.start.plan, policy="planner", packs=packs))
        if tried.step_s is None or self.best.step_s is None or tried.step_s >= self.best.step_s * BETTER:
            return False
        self.best = tried
        return True


def neighbours(of: Borders) -> Iterator[Borders]:
    """Packs with one border moved, added or taken away, or a row of borders moved together.

    Forward packs follow the last backward pack.
    """
    _, forward, backward, _ = of
    for borders in _changed(backward):
        end = borders[-2] if len(borders) > 1 else 0
        yield of._replace(forward=(*(b for b in forward if b < end), end) if end else (), backward=borders)
    for borders in _changed(forward):
        yield of._replace(forward=borders)
    if len(backward) > 1 and forward != backward[:-1]:
        yield of._replace(forward=backward[:-1])


@cache
def evenly(num: int) -> list[int]:
    """So many numbers from 0, in an order of which each beginning lies evenly among them."""
    return sorted(range(num), key=lambda k: k * GOLDEN % 1)


def with_other_updates(of: Borders) -> Iterator[Borders]:
    """The same packs, of which devices update others than now: some more or fewer, half of them or all."""
    num, most = of.num_here, len(of.backward)
    others = [most // 2, most, 0, *(num + shift for shift in MORE_UPDATES)]
    yield from (of._replace(num_here=n) for n in dict.fromkeys(others) if 0 <= n <= most and n != num)


def _changed(borders: Ends) -> Iterator[Ends]:
    """The ends of runs, with one of them but the last changed, or all up to one."""
    for i in reversed(range(len(borders) - 1)):
        low, high = borders[i - 1] if i else 0, borders[i + 1]
        for shift in SHIFTS:
            if low < borders[i] + shift < high:
                yield (*borders[:i], borders[i] + shift, *borders[i + 1 :])
    for i in reversed(range(len(borders))):
        low = borders[i - 1] if i else 0
        if borders[i] - low > 1:
            yield (*borders[:i], (low + borders[i]) // 2, *borders[i:])
    for i in range(len(borders) - 1):
        yield borders[:i] + borders[i + 1 :]
    for i in range(1, len(borders) - 1):
        for shift in (1, -1):
            if borders[0] + shift > 0 and borders[i] + shift < borders[i + 1]:
                yield (*(b + shift for b in borders[: i + 1]), *borders[i + 1 :])


def runs_to(borders: Sequence[int]) -> Runs:
    """By where they end, the runs of units."""
    return tuple(pairwise((0, *borders)))
