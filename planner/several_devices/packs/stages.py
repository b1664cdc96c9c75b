"""Stages that stay on their devices: which units each has, and the blocks whose activations it keeps.

Megatron's stages have as many blocks each, and make all activations again. But the ends of the chain have embedding
and head beside their blocks, a device near the first is ahead by more micro-batches, and what is kept need not be made
again. So units move from stage to stage while an estimate falls (1F1B as a recurrence), each stage keeps the
activations of as many blocks as it has room for, and what the estimate ranks first is simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from itertools import permutations, product
from math import inf
from typing import NamedTuple

import numpy as np

from tierplan.hwmodels.names import COMPUTE, DEVICE, HOPS, collective, p2p, ring
from tierplan.planner.plan import PackPlan, Packs
from tierplan.planner.plan_rules import PLANNER
from tierplan.planner.search.candidates import Candidate, PlanSimulator
from tierplan.planner.search.incumbents import Incumbents, step_s_of
from tierplan.planner.several_devices.packs.search import Ends, balanced, runs_to
from tierplan.sim.columns import Float64
from tierplan.sim.compiled.compiler import compiled
from tierplan.sim.workloads.workload import Unit, Workload

STEPS = 3
"""In a row, of which the last one counts: the next begins where devices fall idle."""
SHARE = 0.2
"""Of the budget, what this search may take."""
SIMULATED = 6
"""Of what the estimate ranks first, at most so many are simulated."""
TRIES = 3
"""With less memory each time, where nothing fits."""
PROMISING = 1.05
"""By the estimate, what is simulated takes at most so many times the best so far."""
SHIFTS = (1, 2)
"""Units that move from a stage to another at a time."""
Estimate = tuple[float, float]
"""What stages lack in bytes, and seconds of a step: those that lack less are better."""


class Stage(NamedTuple):
    """What a device does with a micro-batch and with its units in the end, in seconds, and what it keeps."""

    forward_s: float
    backward_s: float
    update_s: float
    kept: tuple[int, ...]
    """Blocks whose activations wait for backward."""
    lacking_bytes: float
    """Beyond the device's memory, where it keeps none."""


def search_stages(incumbents: Incumbents, simulate_plan: PlanSimulator, *, num_ops: float, beat_s: float = inf) -> None:
    """Better stages than Megatron's, where devices share micro-batches, with a share of so much work; none that seem to
    take longer than `beat_s`, or than other packs."""
    workload, num = simulate_plan.workload, simulate_plan.machine.num_devices
    enough = min(workload.training.gradient_accumulation_steps, len(workload.blocks))
    if incumbents.batches == "each" or not 1 < num <= enough:
        return
    budget = simulate_plan.budget
    search = _Search(simulate_plan, end_frac=(budget.spent_ops + SHARE * num_ops) / budget.num_ops)
    for _ in range(TRIES):
        search.short_bytes = 0.0
        than_s = min(beat_s, step_s_of(incumbents.packed), step_s_of(incumbents.staged))
        if (found := search.found(than_s=than_s)) is not None:
            incumbents.consider(found)
        if found is not None or not search.short_bytes:
            return
        search.estimate = StageEstimate(simulate_plan, search.estimate.capacity_bytes - search.short_bytes)


class StageEstimate:
    """Step times of stages, one on each device, which has so much memory."""

    def __init__(self, simulate_plan: PlanSimulator, capacity_bytes: float) -> None:
        self.workload, self.machine, self.capacity_bytes = simulate_plan.workload, simulate_plan.machine, capacity_bytes
        units, training = self.workload.units, self.workload.training
        works = [(u.forward, u.backward, (u.recompute or u.forward) if u.kind == "block" else {}) for u in units]
        self.seconds = np.array([[self._compute_s(work) for work in each] for each in works])
        """Of each unit: forward, backward, and what makes a block's activations again."""
        self.worth = [
            again_s / max(u.saved_bytes, 1) for u, again_s in zip(units, self.seconds[:, 2].tolist(), strict=True)
        ]
        """Of what a unit saves, in seconds that a byte spares."""
        self.update_s = [self._compute_s(training.update_work(u)) if u.num_trained else 0.0 for u in units]
        self.held_bytes = [_held_bytes(u, self.workload) for u in units]
        self.stage = cache(self._stage)
        """Of a device, from a unit to the one before another."""
        self.send_s = cache(self._send_s)
        tied = [u for u in units if u.name in {v.shares for v in units if v.adds_to_shared}]
        self.tied_s = sum(self.send_s(u.num_trained * training.grad_bytes) for u in tied)
        """Of the gradient that a tied head makes of the embedding."""
        self.new_s = sum(self.send_s(u.num_trained * training.param_bytes) for u in tied)
        self.of = cache(self._of)
        """By where stages end."""

    def stages(self, ends: Ends) -> list[Stage]:
        return [self.stage(d, *run) for d, run in enumerate(runs_to(ends))]

    def _of(self, ends: Ends) -> Estimate:
        stages, training = self.stages(ends), self.workload.training
        forward_s, backward_s, update_s = np.array([stage[:3] for stage in stages]).T.copy()
        sends_s = np.array([self.send_s(self.workload.units[end].input_bytes) for end in ends[:-1]])
        num, holds = training.gradient_accumulation_steps, training.max_grad_norm is not None
        step_s = _step_s(forward_s, backward_s, update_s, sends_s, self.tied_s, self.new_s, num, holds)
        return sum(stage.lacking_bytes for stage in stages), float(step_s)

    def _stage(self, d: int, first: int, end: int) -> Stage:
        workload, units = self.workload, self.workload.units[first:end]
        ahead = min(workload.training.gradient_accumulation_steps, self.machine.num_devices - d)
        names = {u.name for u in units}
        lent = [u for u in workload.units if u.name not in names and any(v.shares == u.name for v in units)]
        shared = {u.shares for u in workload.units if u.name not in names}
        waiting = workload.shared_bytes + sum(
            u.input_bytes + (u.saved_bytes if u.kind != "block" else 0) for u in units
        )
        beside = 2 * (units[0].input_bytes + units[-1].output_bytes) + max(map(_works_bytes, units))
        held = sum(self.held_bytes[first:end]) + sum(_held_bytes(u, workload, is_lent=True) for u in lent)
        held += sum(u.num_trained * workload.training.grad_bytes for u in units if u.name in shared)
        free, kept = self.capacity_bytes - held - ahead * waiting - beside, list[int]()
        lacking = max(0.0, -free)
        blocks = [k for k in range(first, end) if workload.units[k].kind == "block"]
        for k in sorted(blocks, key=lambda k: (-self.worth[k], -k)):
            if (needed := ahead * workload.units[k].saved_bytes) <= free:
                free -= needed
                kept.append(k)
        forward_s, backward_s, again_s = self.seconds[first:end].sum(axis=0)
        backward_s += again_s - sum(self.seconds[k, 2] for k in kept)
        return Stage(forward_s, backward_s, sum(self.update_s[first:end]), tuple(sorted(kept)), lacking)

    def _compute_s(self, work: Mapping[str, float]) -> float:
        return self.machine.cost(COMPUTE, work).alone_s if work else 0.0

    def _send_s(self, size_bytes: float) -> float:
        """From one device to another."""
        if any(s.name == p2p(0, 1) for s in self.machine.streams):
            return self.machine.cost(p2p(0, 1), {"bytes": float(size_bytes)}).alone_s
        return self.machine.cost(collective(0), {ring(2): float(size_bytes), HOPS: 1.0}).alone_s


def _held_bytes(unit: Unit, workload: Workload, *, is_lent: bool = False) -> int:
    """Throughout a step: parameters, gradients, and where they are not those of another stage, optimizer states."""
    training = workload.training
    states_bytes = 0 if is_lent else training.states_bytes(unit)
    return training.params_bytes(unit) + unit.num_trained * training.grad_bytes + states_bytes


def _works_bytes(unit: Unit) -> int:
    """While a unit goes forward or backward, beside what waits."""
    again = unit.saved_bytes if unit.kind == "block" else 0
    return again + max(unit.forward_work_bytes, unit.backward_work_bytes, unit.accumulating_work_bytes)


class _Search:
    def __init__(self, simulate_plan: PlanSimulator, *, end_frac: float) -> None:
        self.simulate_plan, self.end_frac = simulate_plan, end_frac
        self.num = simulate_plan.machine.num_devices
        self.estimate = StageEstimate(simulate_plan, simulate_plan.machine.tier(DEVICE).capacity_bytes)
        self.short_bytes = 0.0
        """What those lacked at least that did not fit; 0 where none was simulated."""

    def found(self, *, than_s: float) -> Candidate[PackPlan] | None:
        """The best of those that the estimate ranks first; None where none fits, or none seems to be that quick."""
        met = {ends for start in self._starts() for ends in self._descended(start)}
        ranked = sorted((*self.estimate.of(ends), ends) for ends in met)
        worth = [ends for lacking_bytes, step_s, ends in ranked if not lacking_bytes and step_s < PROMISING * than_s]
        best, budget = None, self.simulate_plan.budget
        for ends in worth[:SIMULATED]:
            if budget.is_out_of_time or budget.spent_frac > self.end_frac:
                break
            best = min((found for found in (best, self._simulated(ends)) if found), key=step_s_of)
        return best if step_s_of(best) < inf else None

    def _starts(self) -> Iterator[Ends]:
        """As many units each, as long, and as large."""
        num_units = len(self.simulate_plan.workload.units)
        anywhere, equal = [num_units] * num_units, [1.0] * self.num
        for weights in ([1.0] * num_units, self.estimate.seconds.sum(axis=1).tolist(), self.estimate.held_bytes):
            if (ends := balanced(weights, equal, anywhere)) is not None:
                yield ends

    def _descended(self, ends: Ends) -> Iterator[Ends]:
        """All that are met on the way down the estimate."""
        yield ends
        while around := list(_neighbours(ends)):
            yield from around
            if self.estimate.of(better := min(around, key=self.estimate.of)) >= self.estimate.of(ends):
                return
            ends = better

    def _simulated(self, ends: Ends) -> Candidate[PackPlan]:
        stages, runs = self.estimate.stages(ends), runs_to(ends)
        kept = tuple(k for stage in stages for k in stage.kept)
        packs = Packs(form="resident", devices=self.num, forward=runs[:-1], backward=runs, kept=kept)
        tried = self.simulate_plan(PackPlan(policy=PLANNER, packs=packs))
        if tried.step_s is None and (short_gb := -tried.room_gb.get("device", 0.0)) > 0:
            self.short_bytes = min(self.short_bytes or inf, short_gb * 1e9)
        return tried


def _neighbours(ends: Ends) -> Iterator[Ends]:
    """Where one stage has fewer units and another one more; those between have as many as before."""
    for (giving, taking), number in product(permutations(range(len(ends)), 2), SHIFTS):
        low, high, shift = min(giving, taking), max(giving, taking), number if taking < giving else -number
        moved = (*ends[:low], *(end + shift for end in ends[low:high]), *ends[high:])
        if all(a < b for a, b in runs_to(moved)):
            yield moved


@compiled
def _step_s(
    forward_s: Float64,
    backward_s: Float64,
    update_s: Float64,
    sends_s: Float64,
    tied_s: float,
    new_s: float,
    num_batches: int,
    holds: bool,
) -> float:
    """From the end of a step to that of the next, after the first few, of stages that take so long for a micro-batch
    each way, for their update, and to send to the next one; the last sends the first the gradient of what it shares,
    and gets it back. Updates wait for the gradients of all where it `holds`."""
    num = len(forward_s)
    free_s, end_s, end_before_s, sent_s = np.zeros(num), 0.0, 0.0, 0.0
    for _ in range(STEPS):
        came_s = np.full((2, num, num_batches), np.inf)  # what forward and backward wait for
        came_s[0, 0], came_s[1, num - 1] = 0.0, 0.0
        turns, left = np.zeros(num, np.int64), 2 * num * num_batches
        while left:
            for d in range(num):
                ahead = min(num_batches, num - d)
                while turns[d] < 2 * num_batches:
                    turn, in_turns = turns[d] - ahead, 2 * (num_batches - ahead)
                    if turn < 0:
                        goes_back, m = 0, turns[d]
                    elif turn < in_turns:
                        goes_back = 1 - turn % 2
                        m = turn // 2 + (0 if goes_back else ahead)
                    else:
                        goes_back, m = 1, turn - in_turns + num_batches - ahead
                    if came_s[goes_back, d, m] == np.inf:
                        break
                    now = max(free_s[d], came_s[goes_back, d, m])
                    if goes_back and d + 1 == num:
                        sent_s = max(sent_s, now) + tied_s
                    now += backward_s[d] if goes_back else forward_s[d]
                    if goes_back and d:
                        now = (max(now, sent_s) if d + 1 == num else now) + sends_s[d - 1]
                        came_s[1, d - 1, m] = now
                    elif not goes_back and d + 1 < num:
                        now += sends_s[d]
                        came_s[0, d + 1, m] = now
                    free_s[d] = now
                    turns[d] += 1
                    left -= 1
        free_s[0] = max(free_s[0], sent_s)
        if holds:
            free_s[:] = free_s.max()
        free_s += update_s
        free_s[num - 1] = max(free_s[num - 1], free_s[0] + new_s)
        end_before_s, end_s = end_s, free_s.max()
    return end_s - end_before_s
