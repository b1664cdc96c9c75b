"""Stages that stay on their devices: which units each has, what its blocks keep, and which states the host has.

Megatron's stages have as many blocks each, and make all activations again. But the ends of the chain have embedding
and head beside their blocks, a device near the first is ahead by more micro-batches, and what is kept need not be made
again. Where optimizer states have no room, or something else is worth more there, some are in host memory. The host
updates units of the last stages while the first ones still go backward; others' states come to their device for that,
since each has a link of its own. So units move from stage to stage, and states to the host's memory and back, while an
estimate falls (1F1B as a recurrence), each stage keeps the activations of as many blocks as it has room for, and what
the estimate ranks first is simulated.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache, partial
from itertools import chain, permutations, product
from math import inf
from typing import NamedTuple

import numpy as np

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import COMPUTE, DEVICE, HOPS, HOST, HOST_ADAM, collective, d2h, h2d, p2p, ring
from tierplan.planner.milp.rates import limit_seconds, seconds_alone
from tierplan.planner.plan import PackPlan, Packs
from tierplan.planner.plan_rules import PLANNER, Runs
from tierplan.planner.search.candidates import Candidate, PlanSimulator
from tierplan.planner.search.incumbents import Incumbents, step_s_of
from tierplan.planner.several_devices.alike import first_for_all
from tierplan.planner.several_devices.packs.resident import StageTurn, turns_of
from tierplan.planner.several_devices.packs.search import Ends, balanced, runs_to
from tierplan.sim.columns import Float64, Int64
from tierplan.sim.compiled.compiler import compiled
from tierplan.sim.workloads.workload import Unit, Workload

STEPS = 3
"""In a row, of which the last one counts: the next begins where devices fall idle."""
SHARE = 0.4
"""Of the budget, what this search may take."""
SIMULATED = 6
"""Of what the estimate ranks first, at most so many are simulated."""
TRIES = 3
"""With less memory each time, where nothing fits."""
PROMISING = 1.05
"""By the estimate, what is simulated takes at most so many times the best so far."""
MOST_STAGES = 3
"""Of one device."""
NEARLY = 0.1
"""What lacks at most so much of all memory is simulated last: the estimate has all that may wait there."""
SHIFTS = (1, 2)
"""Units that move from a stage to another at a time."""
STATE_PARTS = 4
"""In which states come to their device for the update: all of a unit's have no room there beside another's."""
SAME_FRAC = 0.0001
"""By so much less, steps are the same."""
NO_TURN = (-1, -1, -1)


class Stages(NamedTuple):
    """What is searched: the rest follows."""

    ends: Ends
    away: tuple[int, ...]
    """By device: units whose states are in host memory, beyond those that have no room."""
    here: tuple[int, ...]
    """By device: of the units whose states are there, how many it updates itself, of those that it has room for."""


Move = Callable[[Stages], Stages | None]
Estimate = tuple[float, float]
"""What stages lack in bytes, and seconds of a step: those that lack less are better."""


class StageTurns(NamedTuple):
    """What devices do in order, and what waits for that."""

    of_devices: Int64
    """By device: whether a turn goes back, with which stage and micro-batch; `NO_TURN` behind the last one."""
    ahead: list[dict[int, int]]
    """By device and stage of it: micro-batches that wait for backward at most."""
    waiting_sums: int
    """Micro-batches whose gradient of a tied head waits on the first device, at most."""


class Share(NamedTuple):
    """What a device does with a micro-batch in each of its stages and in the end, in seconds, and what it keeps."""

    forward_s: list[float]
    backward_s: list[float]
    update_s: float
    host_update_s: float
    """What the host takes for its units."""
    kept: Collection[int]
    """Blocks whose activations wait for backward."""
    host_states: Collection[int]
    """Units whose states are in host memory."""
    updates_here: Collection[int]
    """Those of them that it updates itself."""
    host_bytes: int
    """What these need there."""
    lacking_bytes: float
    """Beyond the device's memory, where it keeps none."""


def search_stages(incumbents: Incumbents, simulate_plan: PlanSimulator, *, num_ops: float, beat_s: float = inf) -> None:
    """Better stages than Megatron's, where devices share micro-batches, with a share of so much work; none that seem to
    take longer than `beat_s`, or than other packs."""
    workload, num = simulate_plan.workload, simulate_plan.machine.num_devices
    if incumbents.batches == "each" or not 1 < num <= len(workload.blocks):
        return
    devices_bytes = num * simulate_plan.machine.tier(DEVICE).capacity_bytes
    least = ((_held_bytes(u, workload, is_lent=True), _held_bytes(u, workload)) for u in workload.units)
    without_states, with_states = map(sum, zip(*least, strict=True))
    if without_states > devices_bytes or with_states > devices_bytes + _host_bytes(simulate_plan.machine):
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
    """Step times of stages on devices that have so much memory."""

    def __init__(self, simulate_plan: PlanSimulator, capacity_bytes: float) -> None:
        self.workload, self.machine, self.capacity_bytes = simulate_plan.workload, simulate_plan.machine, capacity_bytes
        units, training = self.workload.units, self.workload.training
        works = [(u.forward, u.backward, (u.recompute or u.forward) if u.kind == "block" else {}) for u in units]
        compute_s = partial(seconds_alone, self.machine, COMPUTE)
        self.seconds = np.array([[compute_s(work) for work in each] for each in works])
        """Of each unit: forward, backward, and what makes a block's activations again."""
        self.seconds_of = self.seconds.T.tolist()
        """The same by what it is of."""
        self.worth = [
            again_s / max(u.saved_bytes, 1) for u, again_s in zip(units, self.seconds[:, 2].tolist(), strict=True)
        ]
        """Of what a unit saves, in seconds that a byte spares."""
        self.update_s = [compute_s(training.update_work(u)) if u.num_trained else 0.0 for u in units]
        self.states_bytes = [training.states_bytes(u) for u in units]
        self.host_bytes, self.host_update_s = _host_bytes(self.machine), [0.0] * len(units)
        self.here_update_s = self.update_s
        """Where states come from host memory, of all devices at once."""
        if self.host_bytes:
            host_s = partial(seconds_alone, self.machine, HOST_ADAM)
            norm = training.grad_bytes if training.max_grad_norm is not None else 0
            norms_s = [host_s({"elementwise_bytes": norm * u.num_trained}) for u in units]
            self.host_update_s = [
                norm_s + host_s(training.host_work(u)) if u.num_trained else 0.0
                for u, norm_s in zip(units, norms_s, strict=True)
            ]
            first = first_for_all(self.machine, self.machine.num_devices) or self.machine
            moved_s = [_both_ways_s(first, size_bytes) for size_bytes in self.states_bytes]
            self.here_update_s = [max(pair) for pair in zip(moved_s, self.update_s, strict=True)]
        self.share = cache(self._share)
        """Of a device with stages from units to others, of so many stages in all, with states of so many more units in
        host memory than have no room."""
        self.needed_bytes, self.turns = cache(self._needed_bytes), cache(self._turns)
        self.send_s = cache(self._send_s)
        tied = [u for u in units if u.name in {v.shares for v in units if v.adds_to_shared}]
        self.tied_s = sum(self.send_s(u.num_trained * training.grad_bytes) for u in tied)
        """Of the gradient that a tied head makes of the embedding."""
        self.new_s = sum(self.send_s(u.num_trained * training.param_bytes) for u in tied)
        self.of = cache(self._of)
        """What such stages lack, and take."""

    def shares(self, stages: Stages) -> list[Share]:
        num, runs = self.machine.num_devices, runs_to(stages.ends)
        return [self.share(d, runs[d::num], len(runs), stages.away[d], stages.here[d]) for d in range(num)]

    def _of(self, stages: Stages) -> Estimate:
        shares, training, num = self.shares(stages), self.workload.training, self.machine.num_devices
        ends = stages.ends
        forward_s = np.array([shares[stage % num].forward_s[stage // num] for stage in range(len(ends))])
        backward_s = np.array([shares[stage % num].backward_s[stage // num] for stage in range(len(ends))])
        updates = np.array([(share.update_s, share.host_update_s) for share in shares])
        sends_s = np.array([self.send_s(self.workload.units[end].input_bytes) for end in ends[:-1]])
        is_home = len(ends) % num == 1
        times = forward_s, backward_s, updates, sends_s, *((0.0, 0.0) if is_home else (self.tied_s, self.new_s))
        step_s = _step_s(*times, self.turns(len(ends)).of_devices, training.max_grad_norm is not None)
        lacking_bytes = max(0, sum(share.host_bytes for share in shares) - self.host_bytes)
        return lacking_bytes + sum(share.lacking_bytes for share in shares), float(step_s)

    def _turns(self, num_stages: int) -> StageTurns:
        num, total = self.machine.num_devices, self.workload.training.gradient_accumulation_steps
        turns, last = turns_of(num, num_stages, total), num_stages - 1
        ahead = [
            {s: _most(own, (False, s), (True, s)) for s in range(d, num_stages, num)} for d, own in enumerate(turns)
        ]
        sums = ahead[0][0] if last % num else _most(turns[0], (True, last), (True, 0))
        longest = max(map(len, turns))
        padded = np.array([[*own, *[NO_TURN] * (longest - len(own))] for own in turns], np.int64)
        return StageTurns(padded, ahead, sums)

    def _share(self, d: int, runs: Runs, num_stages: int, num_away: int, num_here: int) -> Share:
        units, training = self.workload.units, self.workload.training
        numbers, turns = [range(first, end) for first, end in runs], self.turns(num_stages)
        ahead = dict(zip(numbers, turns.ahead[d].values(), strict=True))
        free = self.capacity_bytes - self.needed_bytes(tuple(ahead.items()), turns.waiting_sums)
        own, states_bytes, away = [k for stage in numbers for k in stage], self.states_bytes, list[int]()
        for k in reversed(own):  # gradients of the last come first
            if states_bytes[k] and self.host_update_s[k] and (free < 0 or num_away):
                num_away -= free >= 0
                free += states_bytes[k]
                away.append(k)
        stay, here = [k for k in own if k not in away], list[int]()
        room = self.capacity_bytes - sum(training.params_bytes(u) for u in [*(units[k] for k in own), *self._lent(own)])
        room -= sum(states_bytes[k] for k in stay)  # when gradients of all others have gone
        for k in reversed(away):
            left = room - units[k].num_trained * training.grad_bytes
            comes = 2 * max(states_bytes[h] for h in (k, *here)) / STATE_PARTS  # one part goes while the next one comes
            if len(here) < num_here and left >= comes:
                room = left
                here.append(k)
        lacking, kept = max(0.0, -free), set[int]()
        blocks = {k: batches for stage, batches in ahead.items() for k in stage if units[k].kind == "block"}
        for k in sorted(blocks, key=lambda k: (-self.worth[k] / blocks[k], -k)):
            if (needed := blocks[k] * units[k].saved_bytes) <= free:
                free -= needed
                kept.add(k)
        forward_s, back_s, again_s = self.seconds_of
        return Share(
            forward_s=[sum(forward_s[k] for k in stage) for stage in numbers],
            backward_s=[sum(back_s[k] + (0.0 if k in kept else again_s[k]) for k in stage) for stage in numbers],
            update_s=sum(self.update_s[k] for k in stay) + sum(self.here_update_s[k] for k in here),
            host_update_s=sum(self.host_update_s[k] for k in away if k not in here),
            kept=kept,
            host_states=away,
            updates_here=here,
            host_bytes=sum(states_bytes[k] if k in here else _held_bytes(units[k], self.workload) for k in away),
            lacking_bytes=lacking,
        )

    def _needed_bytes(self, ahead: Sequence[tuple[range, int]], waiting_sums: int) -> int:
        """Of a device whose stages are ahead by so many micro-batches, where no block keeps its activations."""
        workload = self.workload
        units, shared = [workload.units[k] for stage, _ in ahead for k in stage], {u.shares for u in workload.units}
        held = sum(_held_bytes(u, workload) for u in units) + max(map(_works_bytes, units))
        lent = self._lent([k for stage, _ in ahead for k in stage])
        held += sum(_held_bytes(u, workload, is_lent=True) for u in lent)
        sums_bytes = sum(u.num_trained * workload.training.grad_bytes for u in units if u.name in shared)
        held += waiting_sums * sums_bytes  # come sooner than its backward
        held += max(batches for _, batches in ahead) * workload.shared_bytes
        for stage, batches in ahead:
            own = [workload.units[k] for k in stage]
            waiting = sum(u.input_bytes + (u.saved_bytes if u.kind != "block" else 0) for u in own)
            held += batches * waiting + 2 * (own[0].input_bytes + own[-1].output_bytes)
        return held

    def _lent(self, own: Collection[int]) -> list[Unit]:
        """Units of other devices, whose parameters these use."""
        units = self.workload.units
        used = {units[k].shares for k in own} - {units[k].name for k in own}
        return [u for u in units if u.name in used]

    def _send_s(self, size_bytes: float) -> float:
        """From one device to another."""
        if any(s.name == p2p(0, 1) for s in self.machine.streams):
            return seconds_alone(self.machine, p2p(0, 1), {"bytes": float(size_bytes)})
        return seconds_alone(self.machine, collective(0), {ring(2): float(size_bytes), HOPS: 1.0})


def _most(turns: Sequence[StageTurn], begins: tuple[bool, int], ends: tuple[bool, int]) -> int:
    """Micro-batches that are between two of a device's turns at most."""
    waiting = most = 0
    for goes_back, stage, _ in turns:
        waiting += ((goes_back, stage) == begins) - ((goes_back, stage) == ends)
        most = max(most, waiting)
    return most


def _both_ways_s(machine: Machine, size_bytes: int) -> float:
    """To the first device and back, one after the other's way back."""
    taken, work = Counter[str](), {"bytes": float(size_bytes)}
    for stream in (h2d(0), d2h(0)) if size_bytes else ():
        taken.update({**limit_seconds(machine, stream, work), stream: seconds_alone(machine, stream, work)})
    return max(taken.values(), default=0.0)


def _host_bytes(machine: Machine) -> int:
    """Of host memory; 0 where the host updates nothing."""
    has_rate = any(s.name == HOST_ADAM for s in machine.streams)
    return sum(t.capacity_bytes for t in machine.tiers if t.name == HOST) if has_rate else 0


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
        self.held_bytes = [_held_bytes(u, simulate_plan.workload) for u in simulate_plan.workload.units]
        self.short_bytes = 0.0
        """What those lacked at least that did not fit; 0 where none was simulated."""

    def found(self, *, than_s: float) -> Candidate[PackPlan] | None:
        """The best of those that the estimate ranks first; None where none fits, or none seems to be that quick."""
        none, every = (0,) * self.num, (len(self.held_bytes),) * self.num
        ways = [[*self._descended(Stages(ends, none, none))] for ends in self._starts()]
        if not ways:
            return None
        first, last = min(
            ((way[0], min(way, key=self.estimate.of)) for way in ways), key=lambda e: self.estimate.of(e[1])
        )
        if any(share.host_states for share in self.estimate.shares(last)):  # once more with all that leave brought
            ways += ([*self._descended(begun._replace(here=every))] for begun in (first, last))
        met = dict.fromkeys(chain(*ways))
        ranked = sorted((*self.estimate.of(stages), stages) for stages in met)
        most = NEARLY * self.num * self.estimate.capacity_bytes
        firsts: tuple[dict[tuple[Ends, bool], Stages], ...] = {}, {}  # that have room, and that nearly have
        for lacking, step_s, stages in ranked:
            if lacking <= most and step_s < PROMISING * than_s:
                firsts[lacking > 0].setdefault(self._kind_of(stages), stages)
        best, budget = None, self.simulate_plan.budget
        for stages in chain(*([*some.values()][:SIMULATED] for some in firsts)):
            if best is not None and (budget.is_out_of_time or budget.spent_frac > self.end_frac):
                break
            best = min((found for found in (best, self._simulated(stages)) if found), key=step_s_of)
        return best if step_s_of(best) < inf else None

    def _kind_of(self, stages: Stages) -> tuple[Ends, bool]:
        """Of each kind, the quickest by the estimate is enough."""
        return stages.ends, any(share.updates_here for share in self.estimate.shares(stages))

    def _starts(self) -> Iterator[Ends]:
        """As many units each, as long, as large: one stage on a device or several; and one more for a tied head."""
        workload, seconds = self.simulate_plan.workload, self.estimate.seconds.sum(axis=1).tolist()
        num_units, each = len(workload.units), 1
        while each * self.num <= len(workload.blocks) and each <= MOST_STAGES:
            for at_home in (False, True) if self.estimate.tied_s else (False,):
                sizes = [1.0 if k % self.num else each / (each + at_home) for k in range(each * self.num + at_home)]
                for weights in ([1.0] * num_units, seconds, self.held_bytes):
                    if (ends := balanced(weights, sizes, [num_units] * num_units)) is not None:
                        yield ends
            each += 1 if workload.training.gradient_accumulation_steps % self.num == 0 else MOST_STAGES

    def _descended(self, stages: Stages) -> Iterator[Stages]:
        """All that are met on the way down the estimate, move by move."""
        yield stages
        lacking, step_s = self.estimate.of(stages)
        waiting = deque(moves := self._moves(len(stages.ends)))
        while waiting:
            move = waiting.popleft()
            if (near := move(stages)) is not None:
                yield near
                if self.estimate.of(near) < (lacking, step_s * (1 - SAME_FRAC)):
                    stages, (lacking, step_s) = near, self.estimate.of(near)
                    at = moves.index(move)
                    waiting = deque((*moves[at:], *moves[:at]))

    def _moves(self, num_stages: int) -> list[Move]:
        """To other borders, or to one unit's states more or less in host memory, or brought from there."""
        moves: list[Move] = []
        for (giving, taking), number in product(permutations(range(num_stages), 2), SHIFTS):
            if giving % self.num != taking % self.num and (number == 1 or num_stages <= self.num + 1):
                moves.append(partial(_shifted, giving=giving, taking=taking, number=number))
        if self.estimate.host_bytes:
            changes = product(range(self.num), ((1, 0), (-1, 0), (0, 1), (0, -1)))
            moves += [partial(self._with_states, d=d, away=away, here=here) for d, (away, here) in changes]
        return moves

    def _with_states(self, stages: Stages, *, d: int, away: int, here: int) -> Stages | None:
        """A device has the states of so many more units in host memory, or updates so many more of these itself."""
        if here:  # beside those that it updates now
            here += len(self.estimate.shares(stages)[d].updates_here) - stages.here[d]
        numbers = stages.away[d] + away, stages.here[d] + here
        if min(numbers) < 0:
            return None
        of_all = ((*some[:d], n, *some[d + 1 :]) for some, n in zip(stages[1:], numbers, strict=True))
        return Stages(stages.ends, *of_all)

    def _simulated(self, stages: Stages) -> Candidate[PackPlan]:
        runs, shares = runs_to(stages.ends), self.estimate.shares(stages)
        kept, away, here = (
            tuple(sorted(chain(*of_devices)))
            for of_devices in zip(*((s.kept, s.host_states, s.updates_here) for s in shares), strict=True)
        )
        packs = Packs(
            form="resident",
            devices=self.num,
            forward=runs[:-1],
            backward=runs,
            kept=kept,
            host_states=away,
            updates_here=here,
            state_shards=STATE_PARTS if here else 1,
        )
        tried = self.simulate_plan(PackPlan(policy=PLANNER, packs=packs))
        is_surprise = tried.step_s is None and not self.estimate.of(stages)[0]
        if is_surprise and (short_gb := -tried.room_gb.get("device", 0.0)) > 0:
            self.short_bytes = min(self.short_bytes or inf, short_gb * 1e9)
        return tried


def _shifted(stages: Stages, *, giving: int, taking: int, number: int) -> Stages | None:
    """One stage has fewer units and another one more; those between have as many as before."""
    low, high, shift = min(giving, taking), max(giving, taking), number if taking < giving else -number
    ends = stages.ends
    moved = (*ends[:low], *(end + shift for end in ends[low:high]), *ends[high:])
    return stages._replace(ends=moved) if all(a < b for a, b in runs_to(moved)) else None


@compiled
def _step_s(
    forward_s: Float64,
    backward_s: Float64,
    updates: Float64,
    sends_s: Float64,
    tied_s: float,
    new_s: float,
    turns: Int64,
    holds: bool,
) -> float:
    """From the end of a step to that of the next, after the first few, of stages that take so long for a micro-batch
    each way and to send to the next one, on devices that take so long for their update, and the host for theirs; the
    last sends the first the gradient of what it shares, and gets it back. Where it `holds`, updates wait for all."""
    num, last = len(updates), len(forward_s) - 1
    num_turns = np.array([(own[:, 1] >= 0).sum() for own in turns])
    num_batches = num_turns.sum() // (2 * len(forward_s))
    free_s, end_s, end_before_s, sent_s = np.zeros(num), 0.0, 0.0, 0.0
    for _ in range(STEPS):
        came_s = np.full((2, last + 1, num_batches), np.inf)  # what forward and backward wait for
        came_s[0, 0], came_s[1, last] = 0.0, 0.0
        done, left = np.zeros(num, np.int64), num_turns.sum()
        while left:
            for d in range(num):
                while done[d] < num_turns[d]:
                    goes_back, s, m = turns[d, done[d]]
                    if came_s[goes_back, s, m] == np.inf:
                        break
                    now = max(free_s[d], came_s[goes_back, s, m])
                    if goes_back and s == last:
                        sent_s = max(sent_s, now) + tied_s
                    now += backward_s[s] if goes_back else forward_s[s]
                    if goes_back and s:
                        now = (max(now, sent_s) if s == last else now) + sends_s[s - 1]
                        came_s[1, s - 1, m] = now
                    elif not goes_back and s < last:
                        now += sends_s[s]
                        came_s[0, s + 1, m] = now
                    free_s[d] = now
                    done[d] += 1
                    left -= 1
        free_s[0] = max(free_s[0], sent_s)
        if holds:
            free_s[:] = free_s.max()
        host_s = 0.0
        for d in np.argsort(free_s):
            if updates[d, 1]:
                host_s = max(host_s, free_s[d]) + updates[d, 1]
            free_s[d] = max(free_s[d] + updates[d, 0], host_s if updates[d, 1] else 0.0)
        free_s[last % num] = max(free_s[last % num], free_s[0] + new_s)
        end_before_s, end_s = end_s, free_s.max()
    return end_s - end_before_s
