"""Lowering of packs: runs of units that visit one or several devices in turn, with all micro-batches (Harmony).

A *task* (`task.Task`) brings the pack's parameters in, takes the grouped micro-batches through, one ahead of compute
(double buffers), and leaves: a forward task stashes the inputs from which backward tasks recompute, a backward task
sends its gradients to host memory, where the pack is updated at once while the next task runs. What a tied head makes
of the embedding's gradient goes there, too, and is added before the embedding is updated. Between tasks micro-batches
stay on the device tier's links: over host memory on the same device, peer to peer between devices. Which moment each
transfer may begin is given by `after` edges.

One op stands for a whole pack. That is enough to choose packs by; `unitwise` has the ops of each unit, for the
runtime.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain, pairwise, product, zip_longest
from typing import Any

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import HOST, HOST_ADAM, compute, d2h, device, h2d, p2p, parse_stream
from tierplan.planner.plan import PackPlan, facts_of
from tierplan.planner.plan_rules import shared_micro_batches
from tierplan.planner.several_devices.collectives import add_all_reduce
from tierplan.planner.several_devices.packs.estimate import PackSizes
from tierplan.planner.several_devices.packs.task import Task
from tierplan.planner.several_devices.packs.updates import PackUpdates, update_key
from tierplan.sim.builder import About, Said, tiers_of
from tierplan.sim.columns import ScheduleColumns, collector_paused
from tierplan.sim.contents import (
    Frozen,
    Gradients,
    Input,
    InputGradient,
    PackActs,
    Params,
    TiedGradients,
    Transient,
    backward_key,
    copy_key,
    device_name,
    forward_key,
    micro_batch_name,
    op_key,
    pack_name,
    recompute_key,
)
from tierplan.sim.step import StepSpec
from tierplan.sim.workloads.work import Amounts
from tierplan.sim.workloads.workload import Unit, Workload


def pack_columns(plan: PackPlan, workload: Workload, machine: Machine) -> ScheduleColumns:
    """The schedule of one step of a plan that has been checked, with one op for each pack and micro-batch."""
    return PackLowering(plan, workload, machine).lowered()


class PackLowering(PackUpdates):
    """Builds the schedule turn by turn, with one op per pack; `unitwise` overrides what differs unit by unit."""

    def __init__(self, plan: PackPlan, workload: Workload, machine: Machine) -> None:
        super().__init__(plan, workload, machine)
        self.frozen_home: dict[str, int] = {}
        self.stash: dict[tuple[int, int], int | None] = {}  # (unit, micro-batch) -> its input in host memory
        self.handed: dict[tuple[str, int, int], int] = {}  # ("y" or "dx", unit, micro-batch) -> where it waits
        self.flushed: list[int] = []  # ends of the turns that a round comes after
        self.brought: dict[tuple[str, int, int], int | None] = {}  # as `handed`: host memory that is free when it came
        self.stash_at = dict.fromkeys(a for a, _ in self.packs.backward[:-1])  # first units, rising
        self.links = {stream.name for stream in machine.streams}
        self.sizes = PackSizes(workload)
        self.does = cache(self.sizes.work)
        """With one micro-batch, by a pack's first unit and the one behind its last."""
        self.has_peers = any(parse_stream(link).task == "p2p" for link in self.links)
        self.leaving = {"s": self.packs.cleanup_s}
        self.at, self.first = 0, 0  # the turn's device and first unit
        self.may_begin: dict[int, list[int]] = {}  # device -> ops that its next one comes after, beside what it reads
        self.takes_backward: dict[int, int] = {}  # first unit of a backward pack -> device, in pipelines

    # ---- tasks and their order ----

    def _rounds(self) -> list[list[Task]]:
        """Tasks in order; those of one round have the same pack on all devices (data) or are alone (pipeline)."""
        packs, total = self.packs, self.training.gradient_accumulation_steps
        turns = [("fwd", a, b) for a, b in packs.forward] + [("bwd", a, b) for a, b in reversed(packs.backward)]
        last, num, is_pipeline = packs.backward[-1], packs.rounds, packs.form == "pipeline"
        shares = [range(total)] if is_pipeline else shared_micro_batches(self.workload, packs.devices)
        rounds = []
        for k, (part, (phase, a, b)) in enumerate(product(range(num), turns)):
            is_last, is_final = phase == "bwd" and (a, b) == last, phase == "bwd" and part == num - 1
            if is_pipeline and phase == "bwd":
                self.takes_backward[a] = k % packs.devices
            parts = [share[len(share) * part // num : len(share) * (part + 1) // num] for share in shares]
            rounds.append(
                [
                    Task(phase, a, self.units[a:b], d, is_last, batches, is_final)
                    for d, batches in enumerate(parts, k % packs.devices if is_pipeline else 0)
                ]
            )
        return rounds

    def lowered(self) -> ScheduleColumns:
        with collector_paused():
            self._declare_homes()
            self._take_turns()
            return self.columns(tiers_of(self.machine), self.about, next_devices=self._next_devices())

    def _next_devices(self) -> tuple[int, ...]:
        """Turned by the turns of one step, where the next one goes on behind its last."""
        num, turns = self.packs.devices, self.packs.rounds * (len(self.packs.forward) + len(self.packs.backward))
        return tuple((d + turns) % num for d in range(num)) if self.packs.goes_on and turns % num else ()

    def _take_turns(self) -> None:
        before: dict[int, Task] = {}  # the last one on each device
        rounds = self._rounds()
        updated = [tasks[0] for tasks in rounds if tasks[0].is_final]
        if self.packs.late_updates:
            self._update_late([t[0] for t in rounds if t[0].phase == "bwd" and not t[0].batches[0]])
        for tasks in rounds:
            if self.packs.flushes and tasks[0].phase == "fwd" and tasks[0].first == 0:
                self.flushed = [done.gone for done in before.values()]
            for task in tasks:
                task.left = before.get(task.device)
                self._turn(task)
            if tasks[0].phase == "bwd":
                self._gradients(tasks)
            for task in tasks:
                self._clean_up(task)
                before[task.device] = task
            if tasks[0].is_final and not self.packs.late_updates:
                self._add_shared(tasks[0])
                (self._norms if self.packs.hold_updates else self._update)(tasks[0])
        if self.packs.hold_updates:
            self._coefficients()
            for task in reversed(updated):
                self._update(task)  # the next step needs the first pack first
        while any(self.waiting.values()):
            for d, parts in self.waiting.items():
                self._update_waiting(d, min(len(parts), 1))

    def about(self) -> About:
        return f"{self.plan.policy} {self.workload.name}", self.step(), self.meta()

    def step(self) -> StepSpec | None:
        """What the runtime has to know; nothing where it executes no such schedule."""
        return None

    def meta(self) -> dict[str, object]:
        return facts_of(self.plan, self.workload, self.machine, devices=self.packs.devices, form=self.packs.form)

    def _declare_homes(self) -> None:
        for unit in self.units:
            if unit.frozen_bytes:
                self.frozen_home[unit.name] = self.home((Frozen, unit.name), HOST, unit.frozen_bytes, "params")
            if size := unit.num_trained * self.training.param_bytes:
                self.params_home[unit.name] = self.home((Params, unit.name), HOST, size, "params")
            self._home_states(unit, HOST)

    # ---- names and units ----

    def name(self, task: Task) -> Said:
        name = (device_name, task.pack, task.device) if self.packs.devices > 1 else task.pack
        return (op_key, name, micro_batch_name(task.batches[0])) if self.packs.rounds > 1 else name

    def shared_params(self, task: Task) -> list[str]:
        """Units whose parameters the task needs: its own, and those that it shares with a unit outside (tied head)."""
        return [u.name for u in (*task.units, *self.sizes.shared(task.first, task.end)) if u.num_parameters]

    # ---- one turn ----

    def _turn(self, task: Task) -> None:
        """The ops of one task but for its end. What its device is to update is divided among its micro-batches."""
        self.at, self.first = task.device, task.first
        waiting = self.waiting.get(task.device, ())
        params_first = task.left is None or (self._goes_round and (task.phase == "fwd" or task.is_last))
        if params_first:
            self._fetch_params(task)
        if task.phase == "bwd":
            task.grads = self._earlier_gradients(task)
        for i, m in enumerate(task.batches):
            may_come = self._one_ahead(task, i)
            dy = None
            if task.phase == "fwd" or task.is_last:
                x = self._arrives("y", task.first, m, task, may_come)
            else:
                x = self._stash_arrives(task, m, may_come)
                dy = self._arrives("dx", task.end, m, task, self._gradient_ahead(task, i))
            if i == 0 and not params_first:
                self._fetch_params(task)
            if task.phase == "fwd":
                self._forward(task, i, m, x)
            else:
                self._backward(task, m, x, dy)
            self._update_waiting(task.device, -(-len(waiting) // (len(task.batches) - i)), task.computes[-2:-1])

    @property
    def _goes_round(self) -> bool:
        """Whether each pack is on another device than the one before."""
        return self.packs.form == "pipeline" and self.packs.devices > 1

    def _fetch_params(self, task: Task) -> None:
        ended = (task.left.computes[:1] if self.packs.streams else task.left.computes[-1:]) if task.left else []
        after, name = [*ended, *self.flushed], self.name(task)
        for unit in self.shared_params(task):
            for homes in (self.params_home, self.frozen_home):
                if (home := homes.get(unit)) is not None:
                    label = (op_key, self.contents[home], task.phase, name)
                    task.params.append(self._fetch(label, home, after=after))

    def _label(self, what: str, unit: int, m: int) -> Said:
        return op_key, what, self.units[unit].name, (micro_batch_name, m)

    def _one_ahead(self, task: Task, i: int) -> list[int]:
        """What has to end before micro-batch i's input may come: one buffer is in use, the other one is filled."""
        left = task.left
        if i >= 2:
            return [task.computes[i - 2]]
        if left is None:
            return []
        if i == 1:
            return [left.gone]
        if len(left.batches) >= 2:
            return [left.computes[-2]]
        return [left.left.gone] if left.left else []

    def _gradient_ahead(self, task: Task, i: int) -> list[int]:
        left = task.left
        if i >= 1:
            return [task.again[i - 1]]
        if left is None:
            return []
        if not self._goes_round or (left.phase == "bwd" and not left.is_last):
            return left.again[-1:] or left.computes[-1:]
        return self._one_ahead(task, 0)

    def _stash_arrives(self, task: Task, m: int, after: list[int]) -> int | None:
        """Brings the input from which a backward task recomputes; None where there is nothing to bring."""
        stashed = self.brought["dx", task.first, m] = self.stash.pop((task.first, m))
        assert stashed is not None
        return self._fetch(self._label("stash", task.first, m), stashed, after=after, m=m)

    def _fetch(self, label: Said, source: int, *, after: Sequence[int] = (), m: int = 0) -> int:
        """Brings a buffer from host memory to the turn's device."""
        return self.copy((copy_key, "fetch", label), h2d(self.at), source, device(self.at), after=after, m=m)

    def _arrives(self, what: str, unit: int, m: int, task: Task, after: list[int]) -> int | None:
        """Brings a micro-batch's activation or gradient to the task's device; None where there is nothing to bring."""
        if unit == 0:
            return None
        source, label = self.handed.pop((what, unit, m)), self._label(what, unit, m)
        if self.tiers[source] == HOST:
            if what == "y" and task.is_last:
                self.brought["dx", task.first, m] = source
            return self._fetch(label, source, after=after, m=m)
        return self._send((copy_key, "send", label), source, task.device, after=after, m=m)

    def _send(self, key: Said, buffer: int, target: int, **more: Any) -> int:
        """Adds the send of a buffer to another device; the buffer there."""
        source = self.owner(buffer)
        assert source is not None
        return self.copy(key, p2p(source, target), buffer, device(target), **more)

    def _leaves(self, what: str, unit: int, m: int, buffer: int, task: Task) -> None:
        """Over host memory to a later task on the same device; another device takes it itself where it can."""
        if not self._goes_round or not self.has_peers:
            # may take the place of the input that has been brought from there
            room = self.brought.get((what, unit, m)) if self.packs.streams else None
            key = (copy_key, "offload", self._label(what, unit, m))
            buffer = self.copy(key, d2h(task.device), buffer, HOST, over=room, m=m)
        self.handed[what, unit, m] = buffer

    def _forward(self, task: Task, i: int, m: int, x: int | None) -> None:
        first, end = task.first, task.end
        cuts = [first, *(a for a in self.stash_at if first < a < end), end]
        for start, end in pairwise(cuts):
            if start in self.stash_at and x is not None:
                self._stash(task, start, i, m, x)
            elif start in self.stash_at:
                self.stash[start, m] = self._no_input(start, m)
            op, x = self._run_forward(task, start, end, m, x)
        task.computes.append(op)
        assert x is not None
        self._leaves("y", task.end, m, x, task)

    def _run_forward(self, task: Task, start: int, end: int, m: int, x: int | None) -> tuple[int, int | None]:
        """The forward of these units: the last op, and the input of the unit behind them."""
        gpu, units = device(self.at), self.units[start:end]
        key = (forward_key, (pack_name, units[0].name, units[-1].name), m)
        y = self.buffer((Input, self.units[end].name, m), gpu, units[-1].output_bytes, "acts")
        does = self.does(start, end)
        work = self.buffer((Transient, key), gpu, does.forward_bytes, "work")
        return self._compute(key, "forward", does.forward, [*task.params, x], [y, work], units[0], m), y

    def _no_input(self, unit: int, m: int) -> int | None:
        """The first unit reads token ids, which are in host memory anyway and cost nothing."""
        return self.home((Input, self.units[unit].name, m), HOST, 0, "acts")

    def _stash(self, task: Task, unit: int, i: int, m: int, x: int) -> None:
        """Keeps the input of a backward pack in host memory; that of the turn itself when compute has come to it."""
        before = task.computes[i - 1 : i] if i else [task.left.gone] if task.left else []
        label, after = self._label("stash", unit, m), before if unit == task.first else []
        stashed = self._to_host((copy_key, "offload", label), x, unit, m=m, after=after)
        rate = self.packs.host_copy_bytes_per_s if self.num_memories == 1 else 0.0
        if rate and self.takes_backward.get(unit, task.device) != task.device:
            size = self.sizes_bytes[stashed]
            again = self.like(stashed, HOST)
            seconds = 2 * size * self.packs.devices / rate
            key, work = (copy_key, "pass", label), {"s": seconds}
            self.op(key, HOST_ADAM, "copy", work=work, reads=(stashed,), writes=(again,), m=m)
            stashed = again
        self.stash[unit, m] = stashed

    def _to_host(self, key: Said, buffer: int, u: int, *, m: int = 0, after: Sequence[int] = ()) -> int:
        """Takes what the turn has made to host memory, for the backward of a unit."""
        return self.copy(key, d2h(self.at), buffer, HOST, m=m, after=after)

    def _backward(self, task: Task, m: int, x: int | None, dy: int | None) -> None:
        gpu, units, pack = device(task.device), task.units, task.pack
        does = self.does(task.first, task.end)
        acts = self.buffer((PackActs, pack, m), gpu, does.saved_bytes, "acts")
        again = (recompute_key, pack, m)
        task.again.append(self._compute(again, "recompute", does.forward, [*task.params, x], [acts], units[0], m))
        reads, backward = [*task.params, x, acts, dy, *task.grads.values()], (backward_key, pack, m)
        writes = [self.buffer((Transient, backward), gpu, does.backward_bytes, "work")]
        if task.grads:
            task.grads = {name: self.over(old) for name, old in task.grads.items()}
        else:
            made = self._gradients_of(task).items()
            task.grads = {name: self.buffer(content, gpu, size, "grads") for name, (content, size) in made}
        writes += task.grads.values()
        if task.first > 0:
            dx = self.buffer((InputGradient, units[0].name, m), gpu, units[0].input_bytes, "acts")
            writes.append(dx)
        task.computes.append(self._compute(backward, "backward", does.backward, reads, writes, units[0], m))
        if task.first > 0:
            self._leaves("dx", task.first, m, dx, task)

    def _gradients_of(self, task: Task) -> dict[str, tuple[Said, int]]:
        """What a backward task makes, as in `Task.grads`: contents and bytes."""
        of_pack = Gradients, task.pack, None, task.device if self.packs.devices > 1 else None
        each = self.training.grad_bytes
        made: dict[str, tuple[Said, int]] = {"": (of_pack, each * sum(u.num_trained for u in task.units))}
        for unit in self.sizes.shared(task.first, task.end, is_trained=True):
            made[unit.name] = (TiedGradients, unit.name, 0), each * unit.num_trained
        return made

    def _compute(
        self,
        key: Said,
        kind: str,
        work: Amounts,
        reads: Iterable[int | None],
        writes: Sequence[int],
        unit: Unit,
        m: int,
    ) -> int:
        """Adds an op that computes."""
        after, stream = self.may_begin.pop(self.at, ()), compute(self.at)
        return self.op(key, stream, kind, work=work, reads=reads, writes=writes, after=after, unit=unit.name, m=m)

    # ---- the end of a turn ----

    def _gradients(self, tasks: list[Task]) -> None:
        """All-reduces the gradients of a round (data) and takes them to host memory."""
        first = tasks[0].first
        for name in tasks[0].grads:
            grads = reduced = [task.grads[name] for task in tasks]
            if not name and self._stay(tasks[0]):
                self.arrived_grads[first, name] = grads
                continue
            if len(tasks) > 1:
                keys = [(op_key, "all_reduce", name, self.name(task)) for task in tasks]
                reduced = [add_all_reduce(self, key, own, grads) for key, own in zip(keys, grads, strict=True)]
            sums = self.arrived_grads.get((first, name), [None])  # of earlier rounds, each of one device
            self.arrived_grads[first, name] = []
            for task, buffer, over in zip_longest(tasks, reduced, sums):
                key = (op_key, copy_key("offload", "grads"), name, self.name(task))
                self.arrived_grads[first, name].append(self.copy(key, d2h(task.device), buffer, HOST, over=over))
                task.sent.append(self.last_op)

    def _stay(self, task: Task) -> bool:
        """Whether the pack's gradients stay on the device that has made them, which updates by them."""
        return task.is_final and not self.packs.hold_updates and any(unit.name in self.comes for unit in task.units)

    def _earlier_gradients(self, task: Task) -> dict[str, int]:
        """Brings the sums of earlier rounds' gradients to the device, which adds to them."""
        if not task.batches[0]:
            return {}
        sums = {name: own[0] for (first, name), own in self.arrived_grads.items() if first == task.first}
        return {name: self._fetch((op_key, "grads", name, self.name(task)), own) for name, own in sums.items()}

    def _add_shared(self, task: Task) -> None:
        """Adds to the pack's gradients in host memory what packs behind it have made of its units' (a tied head)."""
        for unit in task.units:
            shares = [grads for (_, name), grads in self.arrived_grads.items() if name == unit.name]
            if shares:
                sums = self.arrived_grads[task.first, ""]
                reads, new = [sums[0], *chain(*shares)], self.over(sums[0])
                work = {"elementwise_bytes": 3 * len(shares) * unit.num_trained * self.training.grad_bytes}
                self.op((op_key, "accumulate", unit.name), HOST_ADAM, "accumulate", work=work, reads=reads,
                        writes=[new], unit=unit.name)  # fmt: skip
                sums[0] = new

    def _clean_up(self, task: Task) -> None:
        """Ends the turn: the pack's parameters are freed, and in backward its gradients have left."""
        waits, key = task.phase == "bwd" and not self.packs.streams, (op_key, "leave", task.phase, self.name(task))
        after = [task.computes[-1], *(task.sent if waits else [])]
        task.gone = self.op(key, compute(task.device), "leave", work=self.leaving, reads=task.params, after=after)

    def _update_late(self, tasks: list[Task]) -> None:
        """Applies the gradients of the step before, in host memory, and makes new parameters beside those in use.

        They are written over those of the step before, and the two change places: an update that asked for memory would
        hold back what is listed behind it, the step's first activations, until the last gradient has come.
        """
        for task in tasks:
            pack = task.units
            for name, (content, size) in self._gradients_of(task).items():
                self.arrived_grads[task.first, name] = [self.home(content, HOST, size, "grads")]
            self._add_shared(task)
            (old,) = self.arrived_grads[task.first, ""]
            for unit in pack:
                if not unit.num_trained:
                    continue
                used = self.params_home[unit.name]
                spare = self.home((Params, unit.name), HOST, self.sizes_bytes[used], "params")
                params = self.over(spare)
                self.replaces(params, used)
                self.replaces(used, spare)
                reads, writes = [old, spare], [params]
                if (home := self.states_home.get(unit.name)) is not None:
                    new = self.states_home[unit.name] = self.over(home)
                    reads, writes = [old, home, spare], [new, params]
                if not self.training.has_master:
                    reads.append(used)
                work, key = self.training.host_work(unit), update_key(unit)
                self.op(key, HOST_ADAM, "update", work=work, reads=reads, writes=writes, unit=unit.name)
