"""Lowering of unit-wise plans: a walk along the compute stream.

Every op is emitted with a *position*, the moment in the walk over compute ops at which it is wanted: a fetch some units
before the op that needs it, an offload right behind the op that made it, an update behind its gradients. The list order
is the order of positions, made consistent with who needs whose output. Names, contents and kinds are those of
docs/design.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import COMPUTE, DEVICE, HOST, NVME
from tierplan.planner.lowering.compute_order import Stage, walk
from tierplan.planner.lowering.tiling import cut_batches, cut_operators
from tierplan.planner.lowering.updates import Updates
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.sim.builder import Builder, tiers_of
from tierplan.sim.contents import (
    Content,
    Input,
    InputGradient,
    KeptActs,
    Params,
    RecomputedActs,
    SavedActs,
    Shared,
    backward_key,
    forward_key,
    micro_batch_name,
    op_key,
    recompute_key,
)
from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.workload import SavedTensor, Unit, Workload, total_work

__all__ = ["unitwise_schedule"]


def unitwise_schedule(plan: UnitwisePlan, workload: Workload, machine: Machine) -> Schedule:
    """The schedule of one step of a plan that has been checked, on one device of the machine."""
    if plan.sub_batches > 1:
        plan, workload = replace(plan, sub_batches=1), cut_batches(workload, plan.sub_batches)
    if plan.operator_tiles > 1:
        plan, workload = _with_cut_operators(plan, workload)
    return _Lowering(plan, workload).schedule(machine)


def _with_cut_operators(plan: UnitwisePlan, workload: Workload) -> tuple[UnitwisePlan, Workload]:
    """The plan and workload with each block's tiles as units of their own, which share the block's choices."""
    tiles = plan.operator_tiles
    choices: list[UnitPlan] = []
    for unit, choice in zip(workload.units, plan.units, strict=True):
        choices += [choice] * (tiles if unit.kind == "block" else 1)
    return replace(plan, units=tuple(choices), operator_tiles=1), cut_operators(workload, tiles)


class _Lowering:
    """Builds the schedule by walking the compute stream."""

    def __init__(self, plan: UnitwisePlan, workload: Workload) -> None:
        self.plan, self.workload = plan, workload
        self.training, self.units = workload.training, workload.units
        self.choice: dict[str, UnitPlan] = {u.name: c for u, c in zip(self.units, plan.units, strict=True)}
        self.made = Builder()
        self.stages = walk(plan, workload)
        key_of = {"fwd": forward_key, "bwd": backward_key}
        self.turns = [key_of[s.phase](self.units[s.unit].name, s.micro_batch) for s in self.stages]
        self.updates = Updates(self.made, plan, workload, self.turns)
        self.fetched_params: dict[tuple[str, ...], str] = {}
        self.inputs: dict[tuple[int, int], str] = {}
        self.acts: dict[tuple[int, int], dict[KeptActs | SavedActs, str]] = {}
        self.remade: dict[tuple[int, int], str] = {}  # saved tensors that a segment's recomputation has made again
        self.dx: dict[int, str] = {}
        self.shared: dict[int, str] = {}
        vertical = plan.order == "vertical"
        self.turns_per_unit = self.training.gradient_accumulation_steps if vertical else 1

    def schedule(self, machine: Machine) -> Schedule:
        self.updates.declare_homes()
        self.updates.late()
        for stage in self.stages:
            if stage.phase == "fwd":
                self._forward(stage)
            else:
                self._backward(stage)
        self.updates.after(float(len(self.stages)))
        return self.made.schedule(f"{self.plan.policy} {self.workload.name}", tiers_of(machine), self._meta(machine))

    def _meta(self, machine: Machine) -> dict[str, object]:
        return {
            "policy": self.plan.policy,
            "semantics": self.plan.semantics,
            "order": self.plan.order,
            "model": self.workload.name,
            "machine": machine.name,
            "training": asdict(self.training),
            "config": dict(self.workload.config),
            "units": [
                {
                    **u.record([self.choice[u.name].action(k) for k in range(len(u.saved))]),
                    "late_update": self.plan.is_late(self.choice[u.name]),
                }
                for u in self.units
            ],
        }

    # ---- copies ----

    def to_device(self, step: float, ahead: int, what: Content | str, source: str, unit: str, m: int = 0) -> str:
        """Brings a buffer to the device `ahead` turns before `step`, and from NVMe into host memory as much earlier."""
        if self.made.buffers[source].tier == NVME:
            early = step - ahead - max(ahead, 1)
            source = self.made.move((early, 0), what, source, HOST, unit, m, after=self._turn_before(early))
        return self.made.move((step - ahead, 0), what, source, DEVICE, unit, m, after=self._turn_before(step - ahead))

    def _turn_before(self, step: float) -> tuple[str, ...]:
        """With strict windows: the compute op that has to end before a fetch for `step` may start."""
        index = int(step) - 1
        return (self.turns[index],) if self.plan.strict_windows and index >= 0 else ()

    def off_device(self, step: float, what: Content, source: str, place: str, unit: str, m: int = 0) -> str:
        """Takes a buffer from the device to host memory, and on to NVMe if that is its place."""
        source = self.made.move((step, 2), what, source, HOST, unit, m)
        return self.made.move((step, 2), what, source, NVME, unit, m) if place == "nvme" else source

    # ---- the walk ----

    def _params(self, stage: Stage) -> list[str]:
        """Device buffers with the parameters that a stage computes with, fetched once per pass over the unit."""
        unit = self.units[stage.unit]
        if stage.phase == "bwd" and not (unit.saves_parameters or self._is_made_again(stage.unit)):
            return []
        found = []
        for owner in ([unit.name] if unit.num_parameters else []) + ([unit.shares] if unit.shares else []):
            home = self.updates.params_home[owner]
            if self.made.buffers[home].tier == DEVICE:
                found.append(home)
                continue
            turn = "turn" if unit.kind == "head" else stage.phase
            batch = "" if self.plan.order == "vertical" else micro_batch_name(stage.micro_batch)
            pass_over = (owner, unit.name, turn, batch)
            if pass_over not in self.fetched_params:
                user = "" if owner == unit.name else unit.name
                what = op_key(Params(owner), user, "" if user and unit.kind == "head" else turn, batch)
                ahead = self.plan.prefetch_params_units * self.turns_per_unit
                self.fetched_params[pass_over] = self.to_device(
                    stage.step, ahead, what, home, unit.name, stage.micro_batch
                )
            found.append(self.fetched_params[pass_over])
        return found

    def _forward(self, stage: Stage) -> None:
        unit, u, m = self.units[stage.unit], stage.unit, stage.micro_batch
        choice, key = self.choice[unit.name], forward_key(unit.name, m)
        reads, writes = self._params(stage), []
        if u > 0:
            reads.append(self.inputs[u, m])
        if unit.kind == "embed" and self.workload.shared_bytes:
            self.shared[m] = self.made.buffer(Shared(m), DEVICE, self.workload.shared_bytes, "acts")
            writes.append(self.shared[m])
        elif unit.kind == "block" and m in self.shared:
            reads.append(self.shared[m])
        if u + 1 < len(self.units):
            following = self.units[u + 1].name
            self.inputs[u + 1, m] = self.made.buffer(Input(following, m), DEVICE, unit.output_bytes, "acts")
            writes.append(self.inputs[u + 1, m])
        acts = self.acts.setdefault((u, m), {})
        kept = sum(t.size_bytes for t in unit.saved if choice.action(t.index) == "keep")
        dropped = sum(t.size_bytes for t in unit.saved if choice.action(t.index) == "recompute")
        if kept:
            together = KeptActs(unit.name, m)
            acts[together] = self.made.buffer(together, DEVICE, kept, "acts")
            writes.append(acts[together])
        leaving = {
            SavedActs(unit.name, m, t.index): t
            for t in unit.saved
            if choice.action(t.index) in ("host", "nvme") and t.size_bytes
        }
        for content, t in leaving.items():
            acts[content] = self.made.buffer(content, DEVICE, t.size_bytes, "acts")
            writes.append(acts[content])
        writes += self.made.work(key, unit.forward_work_bytes + dropped)
        self._compute(stage, key, "forward", unit.forward, reads, writes)
        for content, t in leaving.items():
            place = choice.action(t.index)
            acts[content] = self.off_device(stage.step, content, acts[content], place, unit.name, m)
        if u > 0 and choice.input != "keep" and self._needs_input(unit, choice) and u == self._segment(u)[0]:
            what = Input(unit.name, m)
            self.inputs[u, m] = self.off_device(stage.step, what, self.inputs[u, m], choice.input, unit.name, m)

    def _compute(
        self, stage: Stage, key: str, kind: str, work: Mapping[str, float], reads: list[str], writes: list[str]
    ) -> None:
        unit = self.units[stage.unit].name
        at = (float(stage.step), 1)
        self.made.op(key, COMPUTE, kind, work=work, reads=reads, writes=writes, unit=unit, m=stage.micro_batch, at=at)

    @staticmethod
    def _needs_input(unit: Unit, choice: UnitPlan) -> bool:
        """Whether backward reads the unit's input: autograd saved it, or something is recomputed from it."""
        return unit.saves_input or any(choice.action(t.index) == "recompute" for t in unit.saved)

    def _backward(self, stage: Stage) -> None:
        unit, u, m = self.units[stage.unit], stage.unit, stage.micro_batch
        choice, key = self.choice[unit.name], backward_key(unit.name, m)
        params = self._params(stage)
        ahead = self.plan.prefetch_acts_units
        inputs = []
        if len(segment := self._segment(u)) > 1 and u == segment[-1]:
            self._recompute_segment(stage, segment)
        if u > 0 and self._needs_input(unit, choice):
            if self.made.buffers[self.inputs[u, m]].tier != DEVICE:
                what = Input(unit.name, m)
                self.inputs[u, m] = self.to_device(stage.step, ahead, what, self.inputs[u, m], unit.name, m)
            inputs.append(self.inputs[u, m])
        if unit.kind == "block" and m in self.shared:
            inputs.append(self.shared[m])
        acts = []
        for content, name in self.acts[u, m].items():
            if self.made.buffers[name].tier != DEVICE:
                name = self.to_device(stage.step, ahead, content, name, unit.name, m)
            acts.append(name)
        dropped = [t for t in unit.saved if choice.action(t.index) == "recompute"]
        if (u, m) in self.remade:
            acts.append(self.remade.pop((u, m)))
        elif dropped:
            acts.append(self._recompute(stage, dropped, params + inputs, acts))
        reads = [*params, *inputs, *acts]
        writes = []
        if u + 1 < len(self.units):
            reads.append(self.dx.pop(m))
        if u > 0:
            self.dx[m] = self.made.buffer(InputGradient(unit.name, m), DEVICE, unit.input_bytes, "acts")
            writes.append(self.dx[m])
        made = self.updates.gradients(stage, reads, writes)
        writes += self.made.backward_work(key, unit, writes)
        self._compute(stage, key, "backward", unit.backward, reads, writes)
        if made:
            self.updates.leave(stage, made)
            if stage.micro_batch == self.training.gradient_accumulation_steps - 1:
                self.updates.complete(stage)

    def _is_made_again(self, u: int) -> bool:
        """Whether backward runs the unit's forward again, or a part of it."""
        choice = self.choice[self.units[u].name]
        return len(self._segment(u)) > 1 or any(choice.action(t.index) == "recompute" for t in self.units[u].saved)

    def _segment(self, u: int) -> range:
        """The units that are recomputed together with `u` from the first one's input; itself alone without segments."""
        first = next(i for i, unit in enumerate(self.units) if unit.kind == "block") if len(self.units) > 1 else 0
        size, alone = self.plan.segment_units, range(u, u + 1)
        if size == 1 or self.units[u].kind != "block":
            return alone
        start = first + (u - first) // size * size
        blocks = sum(unit.kind == "block" for unit in self.units)
        return range(start, min(start + size, first + blocks))

    def _recompute_segment(self, stage: Stage, segment: range) -> None:
        """Runs a segment's forward once more, from the input of its first unit: saved tensors and inputs in between."""
        m, first = stage.micro_batch, segment[0]
        if self.made.buffers[self.inputs[first, m]].tier != DEVICE:
            what, ahead = Input(self.units[first].name, m), self.plan.prefetch_acts_units
            name = self.units[first].name
            self.inputs[first, m] = self.to_device(stage.step, ahead, what, self.inputs[first, m], name, m)
        for u in segment:
            here = replace(stage, unit=u)
            inputs = [*self._params(here), self.inputs[u, m], *([self.shared[m]] if m in self.shared else [])]
            made = []
            if u != segment[-1]:
                content = Input(self.units[u + 1].name, m)
                made = [self.made.buffer(content, DEVICE, self.units[u].output_bytes, "acts")]
                self.inputs[u + 1, m] = made[0]
            self.remade[u, m] = self._recompute(here, list(self.units[u].saved), inputs, [], made)

    def _recompute(
        self, stage: Stage, dropped: list[SavedTensor], inputs: list[str], acts: list[str], outputs: Iterable[str] = ()
    ) -> str:
        unit, m = self.units[stage.unit], stage.micro_batch
        key = recompute_key(unit.name, m)
        # What needs random numbers drawn again is made by running the whole unit again.
        whole = len(dropped) == len(unit.saved) or not all(t.replayable for t in dropped)
        work = dict(unit.recompute or unit.forward) if whole else total_work(t.recompute for t in dropped)
        size = sum(t.size_bytes for t in dropped)
        made = self.made.buffer(RecomputedActs(unit.name, m), DEVICE, size, "acts")
        writes = [made, *outputs, *self.made.work(key, unit.forward_work_bytes)]
        reads = inputs if whole else [*inputs, *acts]
        self._compute(stage, key, "recompute", work, reads, writes)
        return made
