"""How long packs take, estimated some hundred times quicker than by simulation, to choose which ones to simulate.

The recurrence of a wrap-around pipeline: a micro-batch of a pack starts when the pack before has handed it on, when
the micro-batch before it is done, and when the device is free: the pack that had it has ended its turn, and the
parameters have come. Three steps in a row give the step time, since the next step starts where devices fall idle. What
streams do to each other is left out, but for data parallelism, where all devices copy at once. The estimate only ranks;
every plan is simulated before it counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from tierplan.hwmodels.machine import PARTS, Machine
from tierplan.hwmodels.names import COMPUTE, D2H, DEVICE, H2D, HOST_ADAM, collective, p2p
from tierplan.planner.plan import Packs
from tierplan.planner.plan_rules import PackForm
from tierplan.planner.several_devices.alike import first_for_all
from tierplan.planner.several_devices.collectives import collective_work
from tierplan.planner.several_devices.packs.updates import AT_ONCE
from tierplan.sim.columns import Float64, Int64
from tierplan.sim.compiled.compiler import compiled
from tierplan.sim.workloads.work import Amounts, flops_of, total_work
from tierplan.sim.workloads.workload import Unit, Workload

INFINITE = float("inf")
STEPS = 3


class _Pack(NamedTuple):
    """One pack's turn: seconds of its parts, for one micro-batch where they come once per micro-batch."""

    first: int
    end: int
    is_backward: bool
    is_last: bool
    """The pack with the loss: it has no gradient to wait for, and does its forward too."""
    params_s: float
    first_s: float
    """Forward, or the recomputation."""
    second_s: float
    """Backward; 0 in forward."""
    send_s: float
    """Its input, or the gradient of its output, from the pack before in time."""
    stash_s: float
    """Its stashed input from host memory, in backward."""
    gradients_s: float
    """From the end of its last micro-batch until its gradients are in host memory."""
    states_s: float
    """Until its device has updated it, where nothing else goes on there."""
    held_bytes: int
    states_bytes: int
    """Of its states, what is on its device at once while that updates."""
    grads_bytes: int


(FIRST, END, IS_BACKWARD, IS_LAST, PARAMS_S, FIRST_S, SECOND_S, SEND_S, STASH_S, GRADIENTS_S, STATES_S, HELD_BYTES,
 STATES_BYTES, GRADS_BYTES) = range(len(_Pack._fields))  # fmt: skip
"""Its fields in a row of an array."""
STATE_PARTS = 8
"""In which states come to a device that updates them."""


class PackWork(NamedTuple):
    """What a pack does with a micro-batch, and what it holds meanwhile, in bytes."""

    forward: Amounts
    backward: Amounts
    forward_bytes: int
    saved_bytes: int
    backward_bytes: int


class PackSizes:
    """What the packs of one workload do and hold: each from its first unit to the one behind its last."""

    def __init__(self, workload: Workload) -> None:
        units, training = workload.units, workload.training
        saved_bytes = [u.saved_bytes for u in units]
        self.units, self._training = units, training
        self._forward_bytes = [saved + u.forward_work_bytes for u, saved in zip(units, saved_bytes, strict=True)]
        self._backward_bytes = [u.backward_work_bytes for u in units]
        # sums over all units before each
        self._saved_bytes = [0, *accumulate(saved_bytes)]
        self._input_bytes = [0, *accumulate(u.input_bytes for u in units)]
        self._params_bytes = [0, *accumulate(map(training.params_bytes, units))]
        self._grads_bytes = [0, *accumulate(u.num_trained * training.grad_bytes for u in units)]
        number = {unit.name: u for u, unit in enumerate(units)}
        self._shares = [(u, number[unit.shares]) for u, unit in enumerate(units) if unit.shares]

    def forward_bytes(self, first: int, end: int) -> int:
        """Beside what the forward of a micro-batch reads and hands over."""
        return max(self._forward_bytes[first:end])

    def saved_bytes(self, first: int, end: int) -> int:
        """What backward needs of forward: saved tensors, and the inputs of all units but the first."""
        inputs_bytes = self._input_bytes[end] - self._input_bytes[first + 1]
        return self._saved_bytes[end] - self._saved_bytes[first] + inputs_bytes

    def backward_bytes(self, first: int, end: int) -> int:
        """Beside what backward reads and hands over."""
        return max(self._backward_bytes[first:end])

    def shared(self, first: int, end: int, *, is_trained: bool = False) -> list[Unit]:
        """Units outside whose parameters those of the pack use (a tied head: the embedding), or (`is_trained`) to whose
        gradient they add."""
        uses = [v for u, v in self._shares if v < first <= u < end and (self.units[u].adds_to_shared or not is_trained)]
        return [self.units[v] for v in dict.fromkeys(uses)]

    def params_bytes(self, first: int, end: int) -> int:
        """Of all parameters that a pack computes with."""
        shared = self.shared(first, end)
        return self._params_bytes[end] - self._params_bytes[first] + sum(map(self._training.params_bytes, shared))

    def grads_bytes(self, first: int, end: int) -> int:
        """Of all gradients that a pack's backward makes: of its own parameters, and of what it shares."""
        num_shared = sum(unit.num_trained for unit in self.shared(first, end, is_trained=True))
        return self._grads_bytes[end] - self._grads_bytes[first] + num_shared * self._training.grad_bytes

    def held_bytes(self, phase: str, first: int, end: int) -> int:
        """What a pack (`fwd` or `bwd`) must hold at its fullest; what enters and leaves it is there twice."""
        held = self.params_bytes(first, end)
        held += 2 * self.units[first].input_bytes + 2 * self.units[end - 1].output_bytes
        if phase == "fwd":
            return held + self.forward_bytes(first, end)
        return held + self.grads_bytes(first, end) + self.saved_bytes(first, end) + self.backward_bytes(first, end)

    def work(self, first: int, end: int) -> PackWork:
        pack = self.units[first:end]
        return PackWork(
            forward=_work_of([u.forward for u in pack]),
            backward=_work_of([u.backward for u in pack]),
            forward_bytes=self.forward_bytes(first, end),
            saved_bytes=self.saved_bytes(first, end),
            backward_bytes=self.backward_bytes(first, end),
        )


def _work_of(works: Sequence[Amounts]) -> Amounts:
    """Of units at once: each product has the rate that it has in its own unit."""
    num_parts = sum(flops_of(work) > 0 for work in works)
    return {**total_work(works), **({PARTS: float(num_parts)} if num_parts > 1 else {})}


class PackEstimate:
    """Step times and memory of packs of one workload on one machine."""

    def __init__(self, workload: Workload, machine: Machine) -> None:
        self.machine, self.training, self.units = machine, workload.training, workload.units
        self.sizes = PackSizes(workload)
        self.capacity_bytes = machine.tier(DEVICE).capacity_bytes
        update_s = [
            machine.cost(HOST_ADAM, workload.training.host_work(u)).alone_s if u.num_trained else 0.0
            for u in self.units
        ]
        self.update_s = np.array(update_s, np.float64)
        self.fits = cache(self._fits)
        """Whether a pack (`fwd` or `bwd`) fits on a device, given the first unit and the one after the last."""
        self._costs = np.empty((64, len(_Pack._fields)))
        self._num_costs = 0
        self._number = cache(self._numbered)
        """The row of `_costs` with a pack's, or -1 where it does not fit."""
        self._of_all = cache(partial(first_for_all, machine))

    def _fits(self, phase: str, first: int, end: int) -> bool:
        return self.sizes.held_bytes(phase, first, end) <= self.capacity_bytes

    def step_s(self, packs: Packs) -> float:
        """Seconds of a step among others like it; infinite where a pack does not fit."""
        here = set(packs.updates_here)
        firsts = {a for a, _ in packs.backward if a in here}
        return self.of_runs(packs.form, packs, packs.forward, packs.backward, firsts)

    def of_runs(
        self,
        form: PackForm,
        like: Packs,
        forward: Iterable[tuple[int, int]],
        backward: Sequence[tuple[int, int]],
        here: Collection[int],
    ) -> float:
        """The same of packs that nobody has put together, but `like` some in all else: they are the units from the
        first to the second number; devices update those that begin with the units `here`."""
        num_devices = like.devices
        at_once = 1 if form == "pipeline" else num_devices  # of data-parallel devices, all do the same
        turns = [self._number("fwd", a, b, at_once) for a, b in forward]
        turns += [self._number("bwd", a, b, at_once) for a, b in backward][::-1]
        if min(turns) < 0:
            return INFINITE
        total = self.training.gradient_accumulation_steps
        devices = num_devices if form == "pipeline" else 1
        shared = devices, -(-total // at_once), float(like.cleanup_s), self.update_s
        comes = np.array([0] * (len(turns) - len(backward)) + [a in here for a, _ in reversed(backward)], np.int64)
        held = like.hold_updates, float(self.capacity_bytes)
        return float(_step_s(self._costs, np.array(turns), comes, *shared, *held))

    def work_s(self, phase: str, first: int, end: int) -> float:
        """Compute of one micro-batch: `fwd` or `bwd`, the latter without its recomputation."""
        works = [u.forward if phase == "fwd" else u.backward for u in self.units[first:end]]
        return self.machine.cost(COMPUTE, _work_of(works)).alone_s

    def _numbered(self, phase: str, first: int, end: int, at_once: int) -> int:
        if not self.fits(phase, first, end):
            return -1
        number = self._num_costs
        if number == len(self._costs):
            self._costs = np.concatenate((self._costs, np.empty_like(self._costs)))
        self._costs[number] = self._pack(phase, first, end, at_once)
        self._num_costs += 1
        return number

    def _pack(self, phase: str, first: int, end: int, at_once: int) -> _Pack:
        units, num = self.units[first:end], len(self.units)
        is_backward, is_last = phase == "bwd", phase == "bwd" and end == num
        border = units[-1].output_bytes if is_backward and not is_last else units[0].input_bytes
        states_bytes = sum(map(self.training.states_bytes, units))
        gradients_s = 0.0
        if is_backward:
            size = self.sizes.grads_bytes(first, end)
            gradients_s = self._copy_s(D2H, size, at_once)
            if at_once > 1:
                gradients_s += self.machine.cost(collective(0), collective_work("all_reduce", size, at_once)).alone_s
        several = at_once == 1 and any(s.name == p2p(0, 1) for s in self.machine.streams)
        down_and_up = (p2p(0, 1),) if several else (D2H, H2D)
        return _Pack(
            first=first,
            end=end,
            is_backward=is_backward,
            is_last=is_last,
            params_s=self._copy_s(H2D, self.sizes.params_bytes(first, end), at_once),
            first_s=self.work_s("fwd", first, end),
            second_s=self.work_s("bwd", first, end) if is_backward else 0.0,
            send_s=sum(self._copy_s(stream, border, at_once) for stream in down_and_up),
            stash_s=self._copy_s(H2D, units[0].input_bytes, at_once) if is_backward and not is_last else 0.0,
            gradients_s=gradients_s,
            states_s=self._update_s(units, states_bytes) if is_backward else 0.0,
            held_bytes=self.sizes.held_bytes(phase, first, end),
            states_bytes=AT_ONCE * states_bytes // STATE_PARTS,
            grads_bytes=self.sizes.grads_bytes(first, end),
        )

    def _update_s(self, units: Sequence[Unit], states_bytes: int) -> float:
        """Of a pack on its device while all others update some: states come, the last part goes, then parameters."""
        last_bytes = states_bytes / STATE_PARTS + sum(u.num_trained for u in units) * self.training.param_bytes
        work = total_work(self.training.update_work(u) for u in units if u.num_trained)
        last_s = self.machine.cost(COMPUTE, work).alone_s / STATE_PARTS if work else 0.0
        num = self.machine.num_devices
        return self._copy_s(H2D, states_bytes, num) + last_s + self._copy_s(D2H, last_bytes, num)

    def _copy_s(self, stream: str, size_bytes: float, at_once: int) -> float:
        """A copy on a link, beside as many like it on other devices' links."""
        if not size_bytes:
            return 0.0
        machine = self._of_all(at_once) or self.machine
        cost, limits = machine.cost(stream, {"bytes": size_bytes}), machine.limits
        slower = max([1.0, *(taken / limits[name] for name, taken in cost.demand.items())])
        return cost.latency_s + cost.work_s * slower


@compiled
def _step_s(
    packs: Float64,
    turns: Int64,
    comes: Int64,
    devices: int,
    num_batches: int,
    cleanup_s: float,
    update_s: Float64,
    hold_updates: bool,
    capacity_bytes: float,
) -> float:
    """The time from the end of a step to that of the next, after the first few, of turns by their rows of `packs`;
    where states come to devices (`comes`), infinite if there is no room beside what the device's next turn has."""
    last_s, second_last_s = np.zeros(devices), np.zeros(devices)  # by device: ends of its last two micro-batches,
    gone_s, handed_s = np.zeros(devices), np.empty(num_batches)  # and of its last turn; by micro-batch: its end so far
    updated_s, host_s, end_s, end_before_s = np.zeros(len(update_s)), 0.0, 0.0, 0.0
    link_s, waits_bytes = np.zeros(devices), np.zeros(devices)  # by device: its link is busy until then; beside a turn
    shares_link = comes.any() and not hold_updates
    for _ in range(STEPS):
        handed_s[:] = 0.0
        waits_bytes[:] = 0.0
        for turn, k in enumerate(turns):
            d, first, end = turn % devices, int(packs[k, FIRST]), int(packs[k, END])
            is_backward, is_last = packs[k, IS_BACKWARD], packs[k, IS_LAST]
            first_s, second_s = packs[k, FIRST_S], packs[k, SECOND_S]
            send_s, stash_s = packs[k, SEND_S], packs[k, STASH_S]
            now, again_s = last_s[d], second_last_s[d]
            begun_s = now
            if waits_bytes[d] and waits_bytes[d] + packs[k, HELD_BYTES] > capacity_bytes:
                return INFINITE
            for u in range(first, end):
                now = max(now, updated_s[u])
            now = max(gone_s[d], now + packs[k, PARAMS_S])
            for i in range(num_batches):
                made_s = handed_s[i]
                ahead_s = second_last_s[d] if i == 0 else gone_s[d] if i == 1 else handed_s[i - 2]
                if is_backward and not is_last:
                    gradient_s = max(made_s, again_s) + send_s
                    again_s = max(now, ahead_s + stash_s) + first_s
                    now = max(again_s, gradient_s) + second_s
                elif first:
                    now = max(now, max(made_s, ahead_s) + send_s) + first_s + second_s
                else:
                    now += first_s + second_s
                handed_s[i] = now
            if shares_link:  # with states of the turn before
                copies_s = packs[k, PARAMS_S] + num_batches * packs[k, STASH_S]
                link_s[d] = max(link_s[d], begun_s) + copies_s
                now = max(now, link_s[d])
            left_s, waits_bytes[d] = now, 0.0
            if comes[turn] and not hold_updates:
                link_s[d] = max(link_s[d], now) + packs[k, STATES_S]
                waits_bytes[d] = packs[k, STATES_BYTES] + packs[k, GRADS_BYTES]
                for u in range(first, end):
                    updated_s[u] = link_s[d]
            elif is_backward:
                left_s += packs[k, GRADIENTS_S]
                if not hold_updates:
                    host_s = max(host_s, left_s)
                    for u in range(first, end):
                        host_s += update_s[u]
                        updated_s[u] = host_s
            second_last_s[d] = handed_s[-2] if num_batches > 1 else gone_s[d]
            last_s[d], gone_s[d] = now, left_s + cleanup_s
        if hold_updates:  # all gradients have left: the first units' updates come first
            host_s = gone_s.max()
            link_s[:] = host_s
            for turn in range(len(turns) - 1, -1, -1):
                k, d = turns[turn], turn % devices
                if packs[k, IS_BACKWARD]:
                    if comes[turn]:
                        link_s[d] += packs[k, STATES_S] + packs[k, GRADIENTS_S]
                    for u in range(int(packs[k, FIRST]), int(packs[k, END])):
                        host_s += 0.0 if comes[turn] else update_s[u]
                        updated_s[u] = link_s[d] if comes[turn] else host_s
        end_before_s, end_s = end_s, max(host_s, gone_s.max(), link_s.max())
    return end_s - end_before_s
