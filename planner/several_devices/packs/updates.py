"""Updates of packs: by the host, or by the device that has made their gradients, with states that come for that.

States in host memory come to a device in parts, at most two of which are there at once: the next one comes while one
is used, or goes back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import HOST, HOST_ADAM, compute, d2h, device, h2d
from tierplan.planner.plan import PackPlan
from tierplan.planner.several_devices.packs.task import Task
from tierplan.sim.builder import Builder, Said
from tierplan.sim.contents import NORM_BYTES, Clip, Norm, Params, States, copy_key, device_name, op_key
from tierplan.sim.workloads.workload import Unit, Workload

AT_ONCE = 2
"""Parts of states on a device."""


class StatesPart(NamedTuple):
    """What a device is to update when the part's states have come."""

    task: Task
    unit: Unit
    number: int


class PackUpdates(Builder):
    """What lowering of packs adds where gradients have been made."""

    def __init__(self, plan: PackPlan, workload: Workload, machine: Machine) -> None:
        super().__init__()
        self.plan, self.workload, self.machine = plan, workload, machine
        self.packs = plan.packs
        self.units, self.training = workload.units, workload.training
        self.params_home: dict[str, int] = {}
        self.states_home: dict[str, int] = {}
        self.parts_home: dict[str, list[int]] = {}  # of units whose states come: these in host memory
        self.comes = self._with_states(self.packs.updates_here)
        # by first unit of the backward pack, and as in `Task.grads`: gradients in host memory, of each device
        self.arrived_grads: dict[tuple[int, str], list[int]] = {}
        self.num_memories = 1
        self.norms: list[int] = []
        self.coefficients: list[int] = []  # of clipping, one in each host memory
        self.waiting: dict[int, deque[StatesPart]] = {}  # by device: what it is to update
        self.made: dict[int, list[int]] = {}  # by device: ops that have updated parts
        self.new_params: dict[str, int] = {}  # of units whose parts are being updated: parameters on the device
        self.fetched_grads: dict[int, int] = {}  # those in host memory -> on the device that updates by them

    def _with_states(self, numbers: Collection[int]) -> set[str]:
        """Of these units, those that have optimizer states."""
        return {unit.name for unit in (self.units[u] for u in numbers) if self.training.states_bytes(unit)}

    def _home_states(self, unit: Unit, tier: str, owner: int | None = None) -> None:
        """Declares a unit's states, in parts in host memory where they come for the update."""
        if unit.name in self.comes:
            parts = self.training.state_parts(unit, self.packs.state_shards)
            self.parts_home[unit.name] = [
                self.home(States(unit.name, k, len(parts)), HOST, size, "states", owner=owner)
                for k, size in enumerate(self.training.states_bytes(unit, part) for part in parts)
            ]
        elif size := self.training.states_bytes(unit):
            self.states_home[unit.name] = self.home((States, unit.name), tier, size, "states", owner=owner)

    # ---- all at once ----

    def _norms(self, task: Task) -> None:
        """The norms of the pack's gradients in host memory, which wait there."""
        for unit in task.units:
            if unit.num_trained:
                reads, after = self._arrived(task, unit)
                self.norms.append(self.buffer((Norm, unit.name), HOST, NORM_BYTES, "work"))
                work = {"elementwise_bytes": unit.num_trained * self.training.grad_bytes}
                stream = self._updates_on(task.device, unit)
                key, writes = self._key_on(task.device, (op_key, "norm", unit.name), stream), self.norms[-1:]
                self.op(key, stream, "norm", work=work, reads=reads[:1], writes=writes, after=after, unit=unit.name)

    def _coefficients(self) -> None:
        """The coefficient of exact clipping, from the norms of all units."""
        for d in range(self.num_memories):
            self.coefficients.append(self.buffer(Clip(), HOST, NORM_BYTES, "work"))
            key, writes = self._key_on(d, op_key(Clip()), HOST_ADAM), self.coefficients[-1:]
            self.op(key, HOST_ADAM, "clip", work={}, reads=self.norms, writes=writes)

    def _update(self, task: Task) -> None:
        """Updates the pack's units one by one, while the next turns run, or after all where it clips."""
        at_home = [unit for unit in task.units if unit.num_trained and unit.name not in self.comes]
        for unit in at_home:
            self._update_unit(task, unit)
        for unit in at_home:
            self._updated(unit, task.device)
        for unit in (unit for unit in task.units if unit.name in self.comes):
            self._update_in_parts(task, unit)

    def _update_unit(self, task: Task, unit: Unit) -> None:
        reads, after = self._arrived(task, unit)
        old, new = self._params_to_update(unit)
        reads, writes = [*reads, *old], [new]
        if (states := self.states_home.get(unit.name)) is not None:
            reads.append(states)
            self.states_home[unit.name] = self.over(states)
            writes.append(self.states_home[unit.name])
        reads += self._coefficient(task.device)
        stream = self._updates_on(task.device, unit)
        key = self._key_on(task.device, update_key(unit), stream)
        work = (self.training.host_work if stream == HOST_ADAM else self.training.update_work)(unit)
        self.op(key, stream, "update", work=work, reads=reads, writes=writes, after=after, unit=unit.name)

    def _arrived(self, task: Task, unit: Unit) -> tuple[list[int], list[int]]:
        """Gradients that a unit's update reads, and the ops that it comes after."""
        return [*self.arrived_grads[task.first, ""]], []

    def _params_to_update(self, unit: Unit) -> tuple[list[int], int]:
        """What an update reads of a unit's parameters, and what it writes."""
        old = self.params_home[unit.name]
        self.params_home[unit.name] = self.over(old)
        return [old], self.params_home[unit.name]

    def _updates_on(self, device: int, unit: Unit) -> str:
        """The stream of a unit's update, where no states come for it, and of its gradients' norm."""
        return HOST_ADAM

    def _key_on(self, device: int, key: Said, stream: str) -> Said:
        """What the host does for a device: said where each has host memory of its own."""
        return key if self.num_memories == 1 or stream != HOST_ADAM else (device_name, key, device)

    def _coefficient(self, device: int) -> list[int]:
        return [self.coefficients[device % self.num_memories]] if self.coefficients else []

    def _updated(self, unit: Unit, d: int) -> None:
        """What comes after the update of a unit whose gradients device `d` has made."""

    # ---- in parts, on devices ----

    def _update_in_parts(self, task: Task, unit: Unit) -> None:
        """Has a unit updated on its device, when there is room."""
        parts = (StatesPart(task, unit, k) for k in range(len(self.parts_home[unit.name])))
        self.waiting.setdefault(task.device, deque()).extend(parts)

    def _update_waiting(self, d: int, num: int, after: Sequence[int] = ()) -> None:
        """Updates so many of the parts that wait for a device, whose copies come after these ops."""
        for _ in range(num):
            task, unit, k = self.waiting[d].popleft()
            made, homes = self.made.setdefault(d, []), self._homes_of(d)
            may_come = [*after, *made[: len(made) - AT_ONCE + 1][-1:]]
            grads, params = self._grads_there(task, unit, may_come), self.new_params.get(unit.name)
            if params is None and not self.training.has_master:
                params = self._to_update("fetch", unit, homes[unit.name], h2d(d), device(d), after=may_come)
            self.new_params[unit.name] = self._update_part(d, unit, k, grads, params, may_come)
            made.append(self.last_op - 1)  # behind it the states go
            if k + 1 == len(self.parts_home[unit.name]):
                new, home = self.new_params.pop(unit.name), homes[unit.name]
                homes[unit.name] = self._to_update("offload", unit, new, d2h(d), HOST, over=home)
                self._updated(unit, d)

    def _homes_of(self, d: int) -> dict[str, int]:
        """By unit, the parameters in the memory of the device's process."""
        return self.params_home

    def _grads_there(self, task: Task, unit: Unit, after: Sequence[int]) -> int:
        """A unit's gradients, on the device that has made them: they come back where they have left."""
        (grads, *_), d = self._arrived(task, unit)[0], task.device
        if self.tiers[grads] != HOST:
            return grads
        if grads not in self.fetched_grads:
            key = copy_key, "fetch", (op_key, self.contents[grads], "update")
            self.fetched_grads[grads] = self.copy(key, h2d(d), grads, device(d), after=after)
        return self.fetched_grads[grads]

    def _update_part(self, d: int, unit: Unit, k: int, grads: int, params: int | None, after: Sequence[int]) -> int:
        """Updates a part of a unit on a device, where its states come from host memory and go back; the parameters
        there, over the old ones where those are given."""
        homes = self.parts_home[unit.name]
        states, part = States(unit.name, k, len(homes)), self.training.state_parts(unit, len(homes))[k]
        here = self.copy((copy_key, "fetch", states), h2d(d), homes[k], device(d), after=after)
        if params is None:
            new = self.buffer((Params, unit.name), device(d), unit.num_trained * self.training.param_bytes, "params")
        else:
            new = self.over(params)
        writes, reads = [new, self.over(here)], [grads, params, here, *self._coefficient(d)]
        work = self.training.update_work(unit, part)
        self.op(states.update_key, compute(d), "update", work=work, reads=reads, writes=writes, unit=unit.name)
        homes[k] = self.copy((copy_key, "offload", states), d2h(d), writes[1], HOST, over=homes[k])
        return new

    def _to_update(self, way: str, unit: Unit, source: int, stream: str, tier: str, **more: Any) -> int:
        """Parameters that go for an update, or come from it."""
        return self.copy((copy_key, way, (op_key, (Params, unit.name), "update")), stream, source, tier, **more)


def update_key(unit: Unit) -> Said:
    return attrgetter("update_key"), (States, unit.name)
