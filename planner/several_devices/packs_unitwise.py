"""Packs unit by unit: a schedule that the runtime executes, on one device or by ranks with host memory of their own.

Turns, transfers and their order are those of `packs`. Where that has one op for a whole pack, here every unit
has its own: its forward hands over to the next unit, a recomputation makes the input of the next unit again too, and
gradients are buffers of one unit each. The last backward pack's forward is the only one whose saved tensors are kept.

A tied head's share of the embedding's gradient waits in host memory where the two are in different packs.

With data parallelism each rank has all parameters in its host memory and fetches them whole, as in Harmony. It takes a
shard of the gradients and of the states, updates that, and gathers what the others have updated.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import COMPUTE, D2H, DEVICE, H2D, HOST
from tierplan.planner.plan import PackPlan, Sharing
from tierplan.planner.several_devices.packs import PackLowering, Task
from tierplan.planner.several_devices.partition import partition
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
    recompute_key,
)
from tierplan.sim.schedule import Schedule
from tierplan.sim.step import StepSpec, unit_spec
from tierplan.sim.workloads.workload import Unit, Workload


def unitwise_pack_schedule(plan: PackPlan, workload: Workload, machine: Machine) -> Schedule:
    """The schedule of one step of a plan that has been checked, as the runtime executes it."""
    packs, training = plan.packs, workload.training
    if packs.form == "data" and packs.devices > 1:
        batches = training.gradient_accumulation_steps // packs.devices
        workload = replace(workload, training=replace(training, gradient_accumulation_steps=batches))
        one = _UnitwiseLowering(replace(plan, packs=replace(packs, devices=1)), workload).schedule(machine)
        return partition(one, packs.devices, Sharing(divided="gradients"))
    return _UnitwiseLowering(plan, workload).schedule(machine)


class _UnitwiseLowering(PackLowering):
    """As `PackLowering`, with ops and buffers of each unit."""

    def __init__(self, plan: PackPlan, workload: Workload) -> None:
        super().__init__(plan, workload)
        self.grads: dict[str, str] = {}  # of a unit, accumulated so far
        self.tied: dict[tuple[str, int], str] = {}
        self.may_begin: list[str] = []
        self.by_name = {unit.name: unit for unit in self.units}

    def step(self) -> StepSpec:
        kept_from = self.packs.backward[-1][0]
        units = [unit_spec(unit, "keep" if u >= kept_from else "recompute") for u, unit in enumerate(self.units)]
        return StepSpec(training=self.training, semantics=self.plan.semantics, units=tuple(units))

    def meta(self, machine: Machine) -> dict[str, object]:
        return {**super().meta(machine), "config": dict(self.workload.config)}

    def _no_input(self, unit: int, m: int) -> str:
        return ""  # token ids are where they are

    def _stash_arrives(self, task: Task, m: int, after: list[str]) -> str | None:
        if task.first:
            return super()._stash_arrives(task, m, after)
        self.may_begin = after  # nothing to bring, but the turn is the same
        return None

    # ---- compute ----

    def _params_of(self, unit: Unit, params: list[str]) -> list[str]:
        wanted = {str(Params(name)) for name in (unit.name, unit.shares) if name}
        return [name for name in params if self.builder.buffers[name].content in wanted]

    def _run(
        self,
        kind: str,
        u: int,
        m: int,
        x: str | None,
        params: list[str],
        *,
        saved: type[KeptActs | RecomputedActs] | None = None,
        hands_over: bool = True,
    ) -> tuple[str, str | None, str]:
        """A unit's forward or recomputation: the op's key, the next unit's input, and what is saved."""
        unit = self.units[u]
        key = (forward_key if kind == "forward" else recompute_key)(unit.name, m)
        writes, acts, y = [], "", None
        if hands_over and u + 1 < len(self.units):
            y = self.builder.buffer(Input(self.units[u + 1].name, m), DEVICE, unit.output_bytes, "acts")
            writes.append(y)
        if saved and unit.saved_bytes:
            content = saved(unit.name, m)
            acts = self.builder.buffer(content, DEVICE, unit.saved_bytes, "acts")
            writes.append(acts)
        writes += self.builder.work(key, unit.forward_work_bytes + (0 if saved else unit.saved_bytes))
        reads = [*self._params_of(unit, params), *([x] if x else [])]
        after, self.may_begin = self.may_begin, []
        self.builder.op(
            key, COMPUTE, kind, work=unit.forward, reads=reads, writes=writes, after=after, unit=unit.name, m=m
        )
        return key, y, acts

    def _forward(self, task: Task, i: int, m: int, x: str | None, params: list[str], left: Task | None) -> None:
        cuts = sorted({task.first, *(a for a in self.stash_at if task.first < a < task.end), task.end})
        for start, end in pairwise(cuts):
            if start in self.stash_at and x is not None:
                self._stash(task, start, i, m, x, left)
            for u in range(start, end):
                key, x, _ = self._run("forward", u, m, x, params)
        task.computes.append(key)
        assert x is not None
        self._leaves("y", task.end, m, x, task, 0)

    def _backward(
        self, task: Task, m: int, x: str | None, dy: str | None, params: list[str], grads: str | None
    ) -> str | None:
        inputs: dict[int, str | None] = {task.first: x}
        acts: dict[int, str] = {}
        kind, saved = ("forward", KeptActs) if task.is_last else ("recompute", RecomputedActs)
        for u in range(task.first, task.end):
            hands_over = u + 1 < task.end
            key, y, acts[u] = self._run(kind, u, m, inputs[u], params, saved=saved, hands_over=hands_over)
            inputs[u + 1] = y
        task.again.append(key)
        for u in reversed(range(task.first, task.end)):
            key, dy = self._unit_backward(u, m, [inputs[u] or "", acts[u], dy or ""], params)
        task.computes.append(key)
        if dy:
            self._leaves("dx", task.first, m, dy, task, 0)
        for owner, batch in [k for k in self.tied if k[1] == m]:
            if self.builder.buffers[self.tied[owner, batch]].tier == DEVICE:
                label = copy_key("offload", TiedGradients(owner, m))
                self.tied[owner, batch] = self.builder.copy(label, D2H, self.tied[owner, batch], HOST, m=m)
        return None

    def _unit_backward(self, u: int, m: int, reads: list[str], params: list[str]) -> tuple[str, str | None]:
        """A unit's backward: the op's key, and the gradient of its input."""
        unit, t = self.units[u], self.training
        key = backward_key(unit.name, m)
        reads = [*(self._params_of(unit, params) if unit.saves_parameters else []), *(name for name in reads if name)]
        writes, dx, work_bytes = [], None, unit.backward_work_bytes
        if u > 0:
            dx = self.builder.buffer(InputGradient(unit.name, m), DEVICE, unit.input_bytes, "acts")
            writes.append(dx)
        if unit.shares:
            size = self.by_name[unit.shares].num_parameters * t.grad_bytes
            self.tied[unit.shares, m] = self.builder.buffer(TiedGradients(unit.shares, m), DEVICE, size, "grads")
            writes.append(self.tied[unit.shares, m])
        if unit.num_parameters:
            tied = self.tied.pop((unit.name, m), "")
            if tied and self.builder.buffers[tied].tier == HOST:
                key_of_copy = copy_key("fetch", TiedGradients(unit.name, m))
                tied = self.builder.copy(key_of_copy, H2D, tied, DEVICE, m=m)
            old = self.grads.get(unit.name)
            reads += [name for name in (tied, old) if name]
            if old or tied:  # gradients are added to: the earlier ones are there throughout, the new beside them
                grads = self.builder.over(old or tied, Gradients(unit.name, m))
                work_bytes = max(work_bytes, unit.accumulating_work_bytes)
            else:
                size = unit.num_parameters * t.grad_bytes
                grads = self.builder.buffer(Gradients(unit.name, m), DEVICE, size, "grads")
            self.grads[unit.name] = grads
            writes.append(grads)
        writes += self.builder.work(key, work_bytes)
        self.builder.op(key, COMPUTE, "backward", work=unit.backward, reads=reads, writes=writes, unit=unit.name, m=m)
        return key, dx

    # ---- the end of a turn ----

    def _gradients(self, tasks: list[Task], grads: list[str]) -> None:
        (task,) = tasks
        for unit in self.between(task.first, task.end):
            if unit.num_parameters:
                label, on_device = copy_key("offload", Gradients(unit.name)), self.grads[unit.name]
                self.grads[unit.name] = self.builder.copy(label, D2H, on_device, HOST, after=task.computes[-1:])

    def _gradients_gone(self, task: Task) -> list[str]:
        units = self.between(task.first, task.end)
        return [copy_key("offload", Gradients(unit.name)) for unit in units if unit.num_parameters]

    def _arrived(self, task: Task, unit: Unit) -> tuple[list[str], list[str]]:
        return [self.grads[unit.name]], self._gradients_gone(task)
