"""Lowering of what happens to gradients: adding up, norms and clipping, and the update with all that moves for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tierplan.hwmodels.names import COMPUTE, DEVICE, HOST, HOST_ADAM, NVME
from tierplan.planner.lowering.compute_order import Stage
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.sim.builder import Builder, Position
from tierplan.sim.contents import (
    CastGradients,
    Clip,
    Gradients,
    Norm,
    Params,
    States,
    TiedGradients,
    copy_key,
    micro_batch_name,
    op_key,
    part_ranges,
)
from tierplan.sim.workloads.workload import Unit, Workload

__all__ = ["TIER_OF", "Updates"]

TIER_OF = {"device": DEVICE, "host": HOST, "nvme": NVME}
FP32_BYTES = 4
"""Bytes per parameter of a gradient in fp32."""
NORM_BYTES = 4096
"""Room for the norms of one unit's parameters."""


@dataclass(frozen=True, slots=True)
class _WayHome:
    """What one update has written, in host memory."""

    unit: str
    content: States
    """The states, or a part of them."""
    states: str | None
    params: str | None
    """None before the unit's last part."""
    at: Position


class Updates:
    """Emits the ops of gradients and updates; `*_home` says which buffer holds what at that point of the walk."""

    def __init__(self, made: Builder, plan: UnitwisePlan, workload: Workload, turns: list[str]) -> None:
        self.made, self.plan, self.turns = made, plan, turns
        self.training, self.units = workload.training, workload.units
        self.by_name = {u.name: u for u in workload.units}
        self.choice: Mapping[str, UnitPlan] = dict(zip(self.by_name, plan.units, strict=True))
        self.params_home: dict[str, str] = {}  # by unit
        self.states_home: dict[States, str] = {}  # by content
        self.grads: dict[str, str] = {}  # accumulated so far
        self.old_grads: dict[str, str] = {}  # of the step before, with delayed or late updates
        self.tied: dict[tuple[str, int], str] = {}
        self.norms: dict[str, str] = {}
        self.clip: str | None = None
        self.update_keys: list[str] = []
        self.home_keys: list[str] = []  # of the op that ended each update's way home
        self.waiting_home: Callable[[tuple[str, ...]], None] | None = None
        self.turns_per_unit = self.training.gradient_accumulation_steps if plan.order == "vertical" else 1

    def declare_homes(self) -> None:
        """Buffers that exist before the step: parameters, states, and the old gradients of delayed or late updates."""
        t, made = self.training, self.made
        for unit in self.units:
            n, choice = unit.num_parameters, self.choice[unit.name]
            if n == 0:
                continue
            place = TIER_OF[choice.params]
            self.params_home[unit.name] = made.home(Params(unit.name), place, n * t.param_bytes, "params")
            parts = part_ranges(n, choice.state_shards) if t.state_bytes else []
            for k, part in enumerate(parts):
                content, place = States(unit.name, k, len(parts)), TIER_OF[choice.states]
                self.states_home[content] = made.home(content, place, len(part) * t.state_bytes, "states")
            if self.plan.semantics == "delayed-1" or self.plan.is_late(choice):
                old = made.initial(Gradients(unit.name, 0), HOST, n * t.grad_bytes, "grads")
                self.old_grads[unit.name] = old

    # ---- gradients ----

    def gradients(self, stage: Stage, reads: list[str], writes: list[str]) -> str | None:
        """Adds to a backward's reads and writes what it does to gradients; the buffer of its own, if it makes any."""
        unit, m = self.units[stage.unit], stage.micro_batch
        if unit.shares:
            owner = self.by_name[unit.shares]
            earlier = self.tied.get((owner.name, m))  # of another unit that shares them
            if earlier:
                reads.append(earlier)
                self.tied[owner.name, m] = self.made.over(earlier)
            else:
                size = owner.num_parameters * self.training.grad_bytes
                self.tied[owner.name, m] = self.made.buffer(TiedGradients(owner.name, m), DEVICE, size, "grads")
            writes.append(self.tied[owner.name, m])
        if unit.num_parameters == 0:
            return None
        tied = self.tied.pop((unit.name, m), None)
        if tied:
            reads.append(tied)
        accumulated = self.grads.get(unit.name)
        if accumulated and self.choice[unit.name].grads == "device":
            reads.append(accumulated)
            made = self.made.over(accumulated)
        else:
            size = unit.num_parameters * self.training.grad_bytes
            made = self.made.buffer(Gradients(unit.name, m), DEVICE, size, "grads", reuses=tied)
        writes.append(made)
        return made

    def leave(self, stage: Stage, made: str) -> None:
        """After one micro-batch: gradients stay on the device, or join those that wait in host memory."""
        unit, m = self.units[stage.unit], stage.micro_batch
        if self.choice[unit.name].grads == "device":
            self.grads[unit.name] = made
            return
        arrived = self.made.move((stage.step, 2), Gradients(unit.name, m), made, HOST, unit.name, m)
        accumulated = self.grads.get(unit.name)
        if accumulated is None:
            self.grads[unit.name] = arrived
            return
        total = self.made.over(accumulated)
        self.made.op(
            op_key("accumulate", unit.name, micro_batch_name(m)),
            HOST_ADAM,
            "accumulate",
            at=(stage.step, 3),
            unit=unit.name,
            work={"elementwise_bytes": 3 * unit.num_parameters * self.training.grad_bytes},
            reads=(accumulated, arrived),
            writes=(total,),
            m=m,
        )
        self.grads[unit.name] = total

    def complete(self, stage: Stage) -> None:
        """After the last micro-batch: the norm if one is wanted, the way to where the update finds them, the update."""
        unit, choice = self.units[stage.unit], self.choice[self.units[stage.unit].name]
        if choice.states != "device" and choice.grads == "device":
            self.grads[unit.name] = self.made.move(
                (stage.step, 2), Gradients(unit.name), self.grads[unit.name], HOST, unit.name
            )
        grads = self.grads[unit.name]
        if self.training.max_grad_norm is not None:
            self._norm(stage, unit, grads)
        if choice.grads == "nvme":
            if self.plan.cast_grads and self.training.grad_bytes < FP32_BYTES:
                grads = self._cast(stage, unit, grads)
            self.grads[unit.name] = self.made.move((stage.step, 2), Gradients(unit.name), grads, NVME, unit.name)
        if self.plan.semantics == "in-backward" and not self.plan.is_late(choice):
            self._update(unit, float(stage.step), self.grads[unit.name])
        elif self.plan.semantics == "delayed-1" or self.plan.is_late(choice):
            self.made.outlives(grads, self.old_grads[unit.name])

    def _cast(self, stage: Stage, unit: Unit, grads: str) -> str:
        cast = self.made.buffer(CastGradients(unit.name), HOST, unit.num_parameters * FP32_BYTES, "grads")
        self.made.op(
            op_key("cast", unit.name),
            HOST_ADAM,
            "cast",
            at=(stage.step, 2),
            unit=unit.name,
            work={"elementwise_bytes": unit.num_parameters * (self.training.grad_bytes + FP32_BYTES)},
            reads=(grads,),
            writes=(cast,),
        )
        return cast

    def _norm(self, stage: Stage, unit: Unit, grads: str) -> None:
        norm = self.made.buffer(Norm(unit.name), HOST, NORM_BYTES, "work")
        on_device = self.made.buffers[grads].tier == DEVICE
        self.made.op(
            op_key("norm", unit.name),
            COMPUTE if on_device else HOST_ADAM,
            "norm",
            at=(stage.step, 3),
            unit=unit.name,
            work={"elementwise_bytes": unit.num_parameters * self.training.grad_bytes},
            reads=(grads,),
            writes=(norm,),
        )
        self.norms[unit.name] = norm

    def late(self) -> None:
        """Late updates of the step before, with its gradients: each in time for the unit's parameters to be fetched.

        Listed in the step that they overlap rather than behind the step whose gradients they use, so that their grants
        do not hold back those of this step's forward.
        """
        for u, unit in enumerate(self.units):
            if unit.num_parameters and self.plan.is_late(self.choice[unit.name]):
                ahead = self.plan.prefetch_params_units + 1
                self._update(unit, float((u - ahead) * self.turns_per_unit), self.old_grads[unit.name])
        if self.waiting_home:  # forward is to use what the last of them has made
            self.waiting_home(())

    def after(self, end: float) -> None:
        """Updates that wait for all gradients (exact clipping), or that use those of the step before (delayed)."""
        owners = [u for u in self.units if u.num_parameters]
        if self.plan.update_order == "backward":
            owners.reverse()
        if self.training.max_grad_norm is not None:
            self.clip = self.made.buffer(Clip(), HOST, NORM_BYTES, "work")
            norms = [self.norms[u.name] for u in owners]
            self.made.op(op_key("clip"), HOST_ADAM, "clip", work={}, reads=norms, writes=(self.clip,), at=(end, 0))
        if self.plan.semantics == "exact-clip":
            for i, unit in enumerate(owners):
                self._update(unit, end + i, self.grads[unit.name], apart=1.0)
        elif self.plan.semantics == "delayed-1":
            for i, unit in enumerate(owners):
                apart = end / len(owners)
                self._update(unit, end * i / len(owners), self.old_grads[unit.name], apart=apart, upload_at=end + i)
        if self.waiting_home:
            self.waiting_home(())

    def _update(
        self, unit: Unit, step: float, grads: str, *, apart: float | None = None, upload_at: float | None = None
    ) -> None:
        """The optimizer step of one unit, with what it reads brought to it and what it writes taken home.

        With states in parts, each part is an update of its own: its states come, are updated and go while those of
        the next come. Gradients and parameters are whole: the parts update them in place, one after the other.
        `apart` is the distance to the next unit's update, over which the parts are spread.
        """
        choice, made, t = self.choice[unit.name], self.made, self.training
        if choice.states == "device":
            self._update_on_device(unit, step, grads)
            return
        parts = part_ranges(unit.num_parameters, choice.state_shards)
        apart = self.turns_per_unit if apart is None else apart
        params = self.params_home[unit.name] if choice.params == "host" else ""
        for k, part in enumerate(parts):
            at = step + k * apart / len(parts)
            early = (at - self.plan.prefetch_states_units * self.turns_per_unit / len(parts), 0)
            may_read = (*self._held(), *self._update_before())
            content = States(unit.name, k, len(parts))
            if choice.grads == "nvme" and k == 0:
                grads = made.move(early, Gradients(unit.name), grads, HOST, unit.name, after=may_read)
            reads, writes = [grads, *self._coefficient()], []
            states = self._states_arrive(unit, content, early, may_read)
            if states:
                reads.append(states)
                states = made.over(states)
                writes.append(states)
            if not params and not t.has_master:
                params = made.move(
                    early, op_key(Params(unit.name), "update"), self.params_home[unit.name], HOST, unit.name
                )
            if params:
                reads.append(params)
                params = made.over(params)
            else:
                params = made.buffer(Params(unit.name), HOST, unit.num_parameters * t.param_bytes, "params")
            writes.append(params)
            key = content.update_key
            after = (*self._held(), *(self.home_keys[-1:] if self.plan.write_back == "awaited" else ()))
            made.op(
                key,
                HOST_ADAM,
                "update",
                work={"parameters": len(part)},
                reads=reads,
                writes=writes,
                after=after,
                unit=unit.name,
                at=(at, 3),
            )
            self.update_keys.append(key)
            self.home_keys.append(key)
            home_at = at if upload_at is None else upload_at + at - step
            home = _WayHome(
                unit.name, content, states, params if part.stop == unit.num_parameters else None, (home_at, 4)
            )
            if self.plan.write_back == "delayed":
                self.waiting_home = functools.partial(self._take_home, home, len(self.home_keys) - 1)
            else:
                self._take_home(home, len(self.home_keys) - 1, ())

    def _coefficient(self) -> tuple[str, ...]:
        """What clipping multiplies gradients with; nothing where it does not clip."""
        return (self.clip,) if self.clip and self.plan.semantics == "exact-clip" else ()

    def _states_arrive(self, unit: Unit, content: States, at: Position, after: tuple[str, ...]) -> str | None:
        """States in host memory, read from NVMe if they live there; a delayed write-back goes behind that read."""
        states = self.states_home.get(content)
        is_read = states is not None and self.choice[unit.name].states == "nvme"
        if states is not None and is_read:
            states = self.made.move(at, content, states, HOST, unit.name, after=after)
        if self.waiting_home:
            self.waiting_home((copy_key("read", content),) if is_read else ())
        return states

    def _update_on_device(self, unit: Unit, step: float, grads: str) -> None:
        reads, writes = [grads, *self._coefficient()], []
        content = States(unit.name)
        if content in self.states_home:
            reads.append(self.states_home[content])
            self.states_home[content] = self.made.over(self.states_home[content])
            writes.append(self.states_home[content])
        reads.append(self.params_home[unit.name])
        self.params_home[unit.name] = self.made.over(self.params_home[unit.name])
        writes.append(self.params_home[unit.name])
        work = {"elementwise_bytes": unit.num_parameters * self.training.update_traffic_bytes}
        key, at = content.update_key, (step, 3)
        self.made.op(key, COMPUTE, "update", work=work, reads=reads, writes=writes, unit=unit.name, at=at)

    def _take_home(self, home: _WayHome, index: int, after: tuple[str, ...]) -> None:
        """Sends what an update has written to where it lives between steps."""
        choice = self.choice[home.unit]
        states, params = home.states, home.params
        if states:
            if choice.states == "nvme":
                states_home = self.states_home[home.content]
                states = self.made.move(home.at, home.content, states, NVME, home.unit, over=states_home, after=after)
                self.home_keys[index] = copy_key("write", home.content)
            self.states_home[home.content] = states
        if params:
            if choice.params != "host":
                what, old = op_key(Params(home.unit), "update"), self.params_home[home.unit]
                tier = TIER_OF[choice.params]
                params = self.made.move(home.at, what, params, tier, home.unit, over=old, after=after)
                if choice.params == "nvme":
                    self.home_keys[index] = copy_key("write", what)
            self.params_home[home.unit] = params
        self.waiting_home = None

    def _held(self) -> tuple[str, ...]:
        """What an update and its reads wait for where no update may come before the end of backward."""
        return (self.turns[-1],) if self.plan.hold_updates and self.plan.semantics == "exact-clip" else ()

    def _update_before(self) -> tuple[str, ...]:
        """What has to end before the next update's states may be read, by the windows of the plan."""
        found = []
        window, in_flight = self.plan.prefetch_states_units, self.plan.updates_in_flight
        if self.plan.strict_windows and len(self.update_keys) > window:
            found.append(self.update_keys[-1 - window])
        if in_flight and len(self.home_keys) >= in_flight:
            found.append(self.home_keys[-in_flight])
        return tuple(found)
