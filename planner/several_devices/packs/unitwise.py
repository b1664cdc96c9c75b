"""Packs unit by unit: a schedule that the runtime executes, on one device or by ranks with host memory of their own.

Turns, transfers and their order are those of `packs`. Where that has one op for a whole pack, here every unit
has its own: its forward hands over to the next unit, a recomputation makes the input of the next unit again too, and
gradients are buffers of one unit each. The last backward pack's forward is the only one whose saved tensors are kept.

A tied head's share of the embedding's gradient waits in host memory where the two are in different packs.

With data parallelism each rank has all parameters in its host memory and fetches them whole, as in Harmony. It takes a
shard of the gradients and of the states, updates that, and gathers what the others have updated. In a pipeline packs
go round the ranks (`Pipeline`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import HOPS, HOST, collective, d2h, device, p2p, ring
from tierplan.planner.plan import PackPlan, Sharing
from tierplan.planner.several_devices.packs.by_turns import PackLowering
from tierplan.planner.several_devices.packs.task import Task
from tierplan.planner.several_devices.partition import partition
from tierplan.sim.builder import Said
from tierplan.sim.columns import ScheduleColumns
from tierplan.sim.contents import (
    Gradients,
    Input,
    InputGradient,
    KeptActs,
    Params,
    RecomputedActs,
    TiedGradients,
    backward_key,
    copy_key,
    forward_key,
    op_key,
    recompute_key,
)
from tierplan.sim.ranks import SEND
from tierplan.sim.step import StepSpec, unit_spec
from tierplan.sim.workloads.work import Amounts
from tierplan.sim.workloads.workload import Unit, Workload


def unitwise_pack_columns(plan: PackPlan, workload: Workload, machine: Machine) -> ScheduleColumns:
    """The schedule of one step of a plan that has been checked, as the runtime executes it."""
    packs, training = plan.packs, workload.training
    if packs.form == "data" and packs.devices > 1:
        batches = training.gradient_accumulation_steps // packs.devices
        workload = replace(workload, training=replace(training, gradient_accumulation_steps=batches))
        one = _UnitwiseLowering(replace(plan, packs=replace(packs, devices=1)), workload, machine).lowered()
        return partition(one, packs.devices, Sharing(divided="gradients"))
    lowering = _UnitwiseLowering if packs.devices == 1 else Pipeline
    return lowering(plan, workload, machine).lowered()


class _UnitwiseLowering(PackLowering):
    """As `PackLowering`, with ops and buffers of each unit."""

    def __init__(self, plan: PackPlan, workload: Workload, machine: Machine) -> None:
        super().__init__(plan, workload, machine)
        self.grads: dict[str, int] = {}  # of a unit, accumulated so far
        self.tied: dict[tuple[str, int], int] = {}  # of a unit, by the micro-batch in which it is added to its own
        self.by_name = {unit.name: unit for unit in self.units}

    def step(self) -> StepSpec:
        kept_from = self.packs.backward[-1][0]
        units = [unit_spec(unit, "keep" if u >= kept_from else "recompute") for u, unit in enumerate(self.units)]
        return StepSpec(training=self.training, semantics=self.plan.semantics, units=tuple(units))

    def meta(self) -> dict[str, object]:
        return {**super().meta(), "config": dict(self.workload.config)}

    def _no_input(self, unit: int, m: int) -> None:
        return None  # token ids are where they are

    def _stash_arrives(self, task: Task, m: int, after: list[int]) -> int | None:
        if task.first:
            return super()._stash_arrives(task, m, after)
        self.may_begin[self.at] = after  # nothing to bring, but the turn is the same
        return None

    def _beside(self, u: int, kind: str) -> int:
        """Bytes that a unit's forward has beside its own."""
        return 0

    # ---- compute ----

    def _params_of(self, unit: Unit, params: list[int]) -> list[int]:
        wanted = [(Params, name) for name in (unit.name, unit.shares) if name]
        return [number for number in params if self.contents[number] in wanted]

    def _run(
        self,
        kind: str,
        u: int,
        m: int,
        reads: list[int | None],
        *,
        work: Amounts | None = None,
        writes: Iterable[int] = (),
        saved: type[KeptActs | RecomputedActs] | None = None,
        hands_over: bool = True,
    ) -> tuple[int, int | None, int | None]:
        """A unit's forward or recomputation: the op, the next unit's input, and what is saved."""
        unit, gpu = self.units[u], device(self.at)
        key = (forward_key if kind == "forward" else recompute_key, unit.name, m)
        acts = y = None
        if hands_over and u + 1 < len(self.units):
            y = self.buffer((Input, self.units[u + 1].name, m), gpu, unit.output_bytes, "acts")
        if saved and unit.saved_bytes:
            acts = self.buffer((saved, unit.name, m), gpu, unit.saved_bytes, "acts")
        work_bytes = max(unit.forward_work_bytes + (0 if saved else unit.saved_bytes), self._beside(u, kind))
        writes = [*writes, *(b for b in (y, acts) if b is not None), *self.work(key, work_bytes, gpu)]
        return self._compute(key, kind, work or unit.forward, reads, writes, unit, m), y, acts

    def _run_forward(self, task: Task, start: int, end: int, m: int, x: int | None) -> tuple[int, int | None]:
        for u in range(start, end):
            op, x, _ = self._run("forward", u, m, [*self._params_of(self.units[u], task.params), x])
        return op, x

    def _backward(self, task: Task, m: int, x: int | None, dy: int | None) -> None:
        inputs: dict[int, int | None] = {task.first: x}
        acts: dict[int, int | None] = {}
        kind, saved = ("forward", KeptActs) if task.is_last else ("recompute", RecomputedActs)
        own_params = {u: self._params_of(unit, task.params) for u, unit in enumerate(task.units, task.first)}
        for u in range(task.first, task.end):
            hands_over, reads = u + 1 < task.end, [*own_params[u], inputs[u]]
            op, inputs[u + 1], acts[u] = self._run(kind, u, m, reads, saved=saved, hands_over=hands_over)
        task.again.append(op)
        for u in reversed(range(task.first, task.end)):
            reads = [*(own_params[u] if self.units[u].saves_parameters else []), inputs[u], acts[u], dy]
            op, dy = self._unit_backward(u, m, reads)
        task.computes.append(op)
        if dy is not None:
            self._leaves("dx", task.first, m, dy, task)
        for (owner, batch), tied in self.tied.items():
            if batch == m and self.tiers[tied] != HOST:
                label, u = (copy_key, "offload", (TiedGradients, owner, m)), self.units.index(self.by_name[owner])
                self.tied[owner, batch] = self._to_host(label, tied, u, m=m)

    def _unit_backward(self, u: int, m: int, reads: list[int | None]) -> tuple[int, int | None]:
        """A unit's backward: the op, and the gradient of its input."""
        unit, grad_bytes, gpu = self.units[u], self.training.grad_bytes, device(self.at)
        key = (backward_key, unit.name, m)
        writes, dx, work_bytes = list[int](), None, unit.backward_work_bytes
        if u > 0:
            dx = self.buffer((InputGradient, unit.name, m), gpu, unit.input_bytes, "acts")
            writes.append(dx)
        if unit.shares and unit.adds_to_shared:
            until = self.training.gradient_accumulation_steps - 1 if self.packs.sums_tied else m
            size, sums = self.by_name[unit.shares].num_trained * grad_bytes, self.tied.get((unit.shares, until))
            if sums is None:
                tied = self.buffer((TiedGradients, unit.shares, m), gpu, size, "grads")
            else:  # the new one is made beside it
                tied, reads, work_bytes = self.over(sums), [*reads, sums], work_bytes + size
            self.tied[unit.shares, until] = tied
            writes.append(tied)
        if unit.num_trained:
            shared = self.tied.pop((unit.name, m), None)
            if shared is not None and self.tiers[shared] == HOST:
                shared = self._fetch((TiedGradients, unit.name, m), shared, m=m)
            old = self.grads.get(unit.name)
            reads = [*reads, shared, old]
            earlier, content = shared if old is None else old, (Gradients, unit.name, m)
            if earlier is not None:  # gradients are added to: these are there throughout, the new beside them
                grads = self.over(earlier, content)
                work_bytes = max(work_bytes, unit.accumulating_work_bytes)
            else:
                grads = self.buffer(content, gpu, unit.num_trained * grad_bytes, "grads")
            self.grads[unit.name] = grads
            writes.append(grads)
        writes += self.work(key, work_bytes, gpu)
        return self._compute(key, "backward", unit.backward, reads, writes, unit, m), dx

    # ---- the end of a turn ----

    def _gradients(self, tasks: list[Task]) -> None:
        (task,) = tasks
        if self._stay(task):
            return
        for u, unit in enumerate(task.units, task.first):
            if unit.num_trained:
                label, on_device = (copy_key, "offload", (Gradients, unit.name)), self.grads[unit.name]
                self.grads[unit.name] = self._to_host(label, on_device, u, after=task.computes[-1:])
                task.sent.append(self.last_op)

    def _arrived(self, task: Task, unit: Unit) -> tuple[list[int], list[int]]:
        return [self.grads[unit.name]], task.sent


class Pipeline(_UnitwiseLowering):
    """On devices whose processes have host memory of their own.

    The one that makes a unit's gradients has its parameters and states, and updates it; others that compute with it
    have a copy of the parameters, and are sent them anew. What goes from turn to turn is sent to the device that wants
    it, or into its process's memory where it waits there: inputs from which a pack is made again, a tied head's share.
    """

    def __init__(self, plan: PackPlan, workload: Workload, machine: Machine) -> None:
        super().__init__(plan, workload, machine)
        self.num_memories = self.packs.devices
        self.homes: list[dict[str, int]] = [{} for _ in range(self.num_memories)]
        self.own: list[int] = []  # by unit: the device that makes its gradients

    def _declare_homes(self) -> None:
        rounds = self._rounds()
        wanted_by: dict[str, list[int]] = {}  # unit -> devices that compute with its parameters, its own first
        for (task,) in sorted(rounds, key=lambda tasks: tasks[0].phase):
            for name in self.shared_params(task):
                wanted_by.setdefault(name, []).append(task.device)
        self.own = [self.takes_backward[a] for a, b in self.packs.backward for _ in range(a, b)]
        for unit, own in zip(self.units, self.own, strict=True):
            if size := unit.num_trained * self.training.param_bytes:
                for d in dict.fromkeys((own, *wanted_by[unit.name])):
                    self.homes[d][unit.name] = self.home((Params, unit.name), HOST, size, "params", owner=d)
            self._home_states(unit, HOST, own)

    def _turn(self, task: Task) -> None:
        self.params_home = self.homes[task.device]
        super()._turn(task)

    def _beside(self, u: int, kind: str) -> int:
        embed = self.units[0]  # by which the model's own forward leads to the turn's first unit
        return embed.forward_work_bytes + embed.saved_bytes + embed.output_bytes if u == self.first > 0 else 0

    def _send(
        self, key: Said, buffer: int, target: int, *, tier: str | None = None, over: int | None = None, **more: Any
    ) -> int:
        """The same, or into the memory of the device's process (`tier`), over what that has of the same. By the link
        between the two, or through the host at the rate of a ring of two."""
        size_bytes, source = float(self.sizes_bytes[buffer]), self.owner(buffer)
        assert source is not None
        if over is None:
            arrived = self.like(buffer, tier or device(target), target if tier else None)
        else:
            arrived = self.over(over)
        stream, work = p2p(source, target), {"bytes": size_bytes}
        if stream not in self.links:
            stream, work = collective(source), {ring(2): size_bytes, HOPS: 1.0}
        self.op(key, stream, SEND, work=work, reads=(buffer, over), writes=(arrived,), **more)
        return arrived

    def _leaves(self, what: str, unit: int, m: int, buffer: int, task: Task) -> None:
        self.handed[what, unit, m] = buffer

    def _to_host(self, key: Said, buffer: int, u: int, *, m: int = 0, after: Sequence[int] = ()) -> int:
        if (own := self.own[u]) != self.at:
            return self._send(key, buffer, own, tier=HOST, m=m, after=after)
        return self.copy(key, d2h(self.at), buffer, HOST, owner=own, m=m, after=after)

    def _update(self, task: Task) -> None:
        self.params_home = self.homes[task.device]
        super()._update(task)

    def _homes_of(self, d: int) -> dict[str, int]:
        return self.homes[d]

    def _updated(self, unit: Unit, d: int) -> None:
        """Sends new parameters to all others that compute with them."""
        for other, homes in enumerate(self.homes):
            if other != d and unit.name in homes:
                key, new = (copy_key, "send", self._new_params(unit, other)), self.homes[d][unit.name]
                homes[unit.name] = self._send(key, new, other, over=homes[unit.name])

    def _new_params(self, unit: Unit, d: int) -> Said:
        return op_key, (Params, unit.name), f"for{d}"
