"""Several devices: better packs than Harmony's own search finds, over the same space.

Harmony tries packs of about equal compute. What decides is not equality: the first pack to run fills the pipeline, the
last ones drain it, every turn costs its change of parameters, and forward packs need less memory than backward packs.
So the search goes over forms (wrap-around pipeline, data parallelism), numbers of forward and of backward packs, and
the sizes of the packs at either end, each balanced exactly; then over borders, moved one by one; both by an estimate
(`pack_estimate`), best of several starts. What the estimate ranks first is simulated, and its borders are moved again,
now by simulation. Micro-batch sizes are the outer search's (`plan_sequences`).
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, product

from tierplan.planner.milp.amounts import Problem
from tierplan.planner.milp.bounds import compute_s
from tierplan.planner.plan import PackPlan, Packs, shared_micro_batches
from tierplan.planner.plan_rules import PackForm, Runs
from tierplan.planner.search.candidates import Candidate, PlanSimulator
from tierplan.planner.search.descent import BETTER
from tierplan.planner.search.incumbents import Incumbents
from tierplan.planner.several_devices.pack_estimate import PackEstimate

Numbers = tuple[PackForm, int, int]
"""Form, number of backward packs, number of forward packs."""
SHARE, SHARE_ALONE = 0.6, 0.95
"""Of the budget, what the search over packs may take: beside other plans, and where only packs are allowed."""
SHIFTS = (1, -1, 2, -2, 4, -4)
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
PATIENCE = 30
"""Descents from kicked borders without success after which the estimate has no more to say."""
KICKS = 3
"""Random moves of borders between two descents by the estimate."""
SIMULATED = 16
"""Of what the descents found, at most so many are simulated."""
PROMISING = 1.02
"""A move is simulated when the estimate is at most this much above the best plan's."""


def search_packs(incumbents: Incumbents, simulate_plan: PlanSimulator, *, num_ops: float, seed: int) -> None:
    """Better packs than the best so far, where packs are allowed and a policy's fit, with a share of so much work."""
    if incumbents.packed is not None and incumbents.batches != "each":
        share = SHARE_ALONE if incumbents.batches == "shared" else SHARE
        budget = simulate_plan.budget
        end = (budget.spent_ops + share * num_ops) / budget.num_ops
        incumbents.consider(improve_packs(incumbents.packed, simulate_plan, spent_frac=end, seed=seed))


def bound_of_packs(problem: Problem, packs: Packs) -> float:
    """No step in packs of this form is shorter, in seconds: compute is shared, and where packs visit devices, every
    parameter is updated in host memory."""
    parameters, adam = sum(unit.gparams for unit in problem.units), problem.rates.adam
    return max(compute_s(problem) / packs.devices, parameters / adam if adam and not packs.stays else 0.0)


def improve_packs(
    start: Candidate[PackPlan], simulate_plan: PlanSimulator, *, spent_frac: float, seed: int = 0
) -> Candidate[PackPlan]:
    """The best packs found, no slower than `start`, until this part of the budget is spent."""
    search = _Search(start, simulate_plan, spent_frac, seed)
    search.simulate(search.by_estimate())
    search.by_simulation()
    return search.best


def balanced(weights: Sequence[float], sizes: Sequence[float], reach: Sequence[int]) -> Runs | None:
    """Runs over all units with the least largest weight, each relative to its size; None where that cannot be.

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


def _greedy(sums: Sequence[float], sizes: Sequence[float], reach: Sequence[int], largest: float) -> Runs | None:
    num, borders = len(sums) - 1, [0]
    for k, size in enumerate(sizes):
        first, left = borders[-1], len(sizes) - k - 1
        limit = sums[first] + size * largest
        end = min(bisect_right(sums, limit * (1 + 1e-12)) - 1, reach[first], num - left)
        if end <= first:
            return None
        borders.append(end)
    return _runs(borders[1:]) if borders[-1] == num else None


class _Search:
    def __init__(self, start: Candidate[PackPlan], simulate_plan: PlanSimulator, spent_frac: float, seed: int) -> None:
        self.start, self.simulate_plan, self.budget = start, simulate_plan, simulate_plan.budget
        self.packs = start.plan.packs
        self.rng = random.Random(seed)
        self.estimate = PackEstimate(simulate_plan.workload, simulate_plan.machine)
        self.known: dict[Packs, float] = {}
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

    def _estimated_s(self, packs: Packs) -> float:
        if packs not in self.known:
            self.known[packs] = self.estimate.step_s(packs)
            self.budget.ops_left -= OPS_OF_ESTIMATE
        return self.known[packs]

    # ---- by the estimate ----

    def by_estimate(self) -> list[Packs]:
        """Ends of descents from Harmony's packs, from the best shapes, and from the best so far with a few kicks."""
        shapes = self._shapes()
        starts = [self.packs, *shapes[:STARTS]]
        ends_s: dict[Packs, float] = {}
        turn = stale = 0
        while not self._is_over(SHARE_OF_ESTIMATES) and stale < PATIENCE:
            packs = starts[turn] if turn < len(starts) else self._kicked(min(ends_s, key=lambda p: ends_s[p]))
            turn += 1
            packs = self._descend(packs)
            shorter = not ends_s or self._estimated_s(packs) < min(ends_s.values()) * BETTER
            stale = 0 if shorter or turn <= len(starts) else stale + 1
            ends_s[packs] = self._estimated_s(packs)
        ranked = sorted(dict.fromkeys([*ends_s, *shapes[: 4 * SIMULATED]]), key=self._estimated_s)
        return [packs for packs in ranked if self._estimated_s(packs) < float("inf")][:SIMULATED]

    def _shapes(self) -> list[Packs]:
        """Balanced packs, best first: all forms and numbers with equal packs, then other sizes of the ends."""
        forms: tuple[PackForm, ...] = (self.packs.form,)
        if self.packs.devices > 1:
            has_enough = all(shared_micro_batches(self.simulate_plan.workload, self.packs.devices))
            forms = ("pipeline", "data") if has_enough else ("pipeline",)
        numbers: dict[Packs, Numbers] = {}
        for form, backward, forward in product(forms, self._numbers("bwd"), self._numbers("fwd")):
            packs = self._shape((form, backward, forward), 1.0, 1.0, 1.0)
            if packs is not None and not self._is_over(SHARE_OF_ESTIMATES / 2):
                numbers.setdefault(packs, (form, backward, forward))
        ranked = sorted(numbers, key=self._estimated_s)
        shapes = dict.fromkeys(ranked)
        for equal in ranked[:VARIED]:
            for sizes in product(SIZES_OF_ENDS, repeat=3):
                packs = self._shape(numbers[equal], *sizes)
                if packs is not None and not self._is_over(SHARE_OF_ESTIMATES / 2):
                    shapes[packs] = None
        return sorted(shapes, key=self._estimated_s)

    def _shape(self, numbers: Numbers, first: float, last: float, first_forward: float) -> Packs | None:
        form, num_backward, num_forward = numbers
        backward = self._balanced("bwd", num_backward, first, last, len(self.weights["bwd"]))
        if backward is None:
            return None
        end = backward[-1][0]
        forward = self._balanced("fwd", num_forward, first_forward, 1.0, end) if end else ()
        return None if forward is None else replace(self.packs, form=form, forward=forward, backward=backward)

    def _numbers(self, phase: str) -> list[int]:
        """How many packs to try."""
        reach, at, least = self.reach[phase], 0, 0
        while at < len(reach) and reach[at] > at:
            at, least = reach[at], least + 1
        most = len(reach)
        if phase == "bwd":
            return list(range(least, min(least + MORE_PACKS, most + 1)))
        return sorted({n for n in (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20, 24) if least <= n < most} | {least})

    def _balanced(self, phase: str, num: int, first: float, last: float, end: int) -> Runs | None:
        if num > end:
            return None
        sizes = [1.0] * num
        sizes[0], sizes[-1] = first, last if num > 1 else first
        reach = [min(r, end) for r in self.reach[phase][:end]]
        return balanced(self.weights[phase][:end], sizes, reach)

    def _kicked(self, packs: Packs) -> Packs:
        for _ in range(KICKS):
            options = list(neighbours(packs))
            packs = self.rng.choice(options) if options else packs
        return packs

    def _descend(self, packs: Packs) -> Packs:
        """Moves of borders while the estimate falls."""
        while True:
            limit = self._estimated_s(packs) * BETTER
            for changed in neighbours(packs):
                if self._is_over(SHARE_OF_ESTIMATES):
                    return packs
                if self._estimated_s(changed) < limit:
                    packs = changed
                    break
            else:
                return packs

    # ---- by simulation ----

    def simulate(self, ranked: Sequence[Packs]) -> None:
        for packs in ranked:
            if self._is_over(SHARE_OF_FIRST_SIMULATIONS):
                return
            self._try(packs)

    def by_simulation(self) -> None:
        """Moves of borders from the best, the most promising first, while the simulated step gets shorter."""
        while True:
            packs = self.best.plan.packs
            limit = self._estimated_s(packs) * PROMISING
            for changed in sorted(neighbours(packs), key=self._estimated_s):
                if self._is_over(1.0) or self._estimated_s(changed) > limit:
                    return
                if self._try(changed):
                    break
            else:
                return

    def _try(self, packs: Packs) -> bool:
        tried = self.simulate_plan(replace(self.start.plan, policy="planner", packs=packs))
        if tried.step_s is None or self.best.step_s is None or tried.step_s >= self.best.step_s * BETTER:
            return False
        self.best = tried
        return True


def neighbours(packs: Packs) -> Iterator[Packs]:
    """Packs with one border moved, added or taken away, or a row of borders moved together.

    Forward packs end where the last backward pack begins, and follow it.
    """
    backward = [b for _, b in packs.backward]
    forward = [b for _, b in packs.forward]
    for borders in _changed(backward):
        end = borders[-2] if len(borders) > 1 else 0
        kept = [b for b in forward if b < end] + ([end] if end else [])
        yield replace(packs, backward=_runs(borders), forward=_runs(kept))
    for borders in _changed(forward):
        yield replace(packs, forward=_runs(borders))
    if len(backward) > 1 and forward != backward[:-1]:
        yield replace(packs, forward=_runs(backward[:-1]))


def _changed(borders: list[int]) -> Iterator[list[int]]:
    """The ends of runs, with one of them but the last changed, or all up to one."""
    for i in reversed(range(len(borders) - 1)):
        low, high = borders[i - 1] if i else 0, borders[i + 1]
        for shift in SHIFTS:
            if low < borders[i] + shift < high:
                yield [*borders[:i], borders[i] + shift, *borders[i + 1 :]]
    for i in reversed(range(len(borders))):
        low = borders[i - 1] if i else 0
        if borders[i] - low > 1:
            yield [*borders[:i], (low + borders[i]) // 2, *borders[i:]]
    for i in range(len(borders) - 1):
        yield borders[:i] + borders[i + 1 :]
    for i in range(1, len(borders) - 1):
        for shift in (1, -1):
            if borders[0] + shift > 0 and borders[i] + shift < borders[i + 1]:
                yield [*(b + shift for b in borders[: i + 1]), *borders[i + 1 :]]


def _runs(borders: list[int]) -> Runs:
    return tuple(pairwise([0, *borders]))
