"""Lowering: a plan becomes a schedule.

Every op is emitted with a *position*, the moment in the walk over compute ops at which it is wanted: a fetch some units
before the op that needs it, an offload right behind the op that made it, an update behind its gradients. The list order
is the order of positions, made consistent with who needs whose output. `tierplan.sim.ordering` then refines it by a
first simulation. Names, contents and kinds are those of docs/design.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace

from tierplan.hwmodels.machine import Machine
from tierplan.planner.lowering_packs import lower_packs
from tierplan.planner.lowering_paged import lower_paged
from tierplan.planner.partition import partition
from tierplan.planner.plan import Plan, PlanError, UnitPlan
from tierplan.planner.refine import order_under_contention
from tierplan.planner.tiling import cut_batches, cut_operators
from tierplan.sim.ordering import order_by_readiness
from tierplan.sim.pricing import price
from tierplan.sim.schedule import Buffer, Op, Schedule, Tier, validate
from tierplan.sim.workload import SavedTensor, Unit, Workload

__all__ = ["lower"]

DEVICE, HOST, NVME = "gpu0", "host", "nvme"
COMPUTE, CORES = "gpu0.compute", "host.adam"
LINKS = {
    (HOST, DEVICE): ("gpu0.h2d", "fetch"),
    (DEVICE, HOST): ("gpu0.d2h", "offload"),
    (NVME, HOST): ("nvme.read", "read"),
    (HOST, NVME): ("nvme.write", "write"),
}
"""Stream and verb of a copy, by the tiers it goes between."""
TIER_OF = {"device": DEVICE, "host": HOST, "nvme": NVME}
WIDE_BYTES = 4
"""Bytes per parameter of a gradient in fp32."""
NORM_BYTES = 4096
"""Room for the norms of one unit's parameters."""

Position = tuple[float, int]
"""Unit step in the walk, and rank within it: 0 fetches, 1 computes, 2 offloads, 3 updates, 4 writes back."""


def lower(plan: Plan, workload: Workload, machine: Machine, *, refine: bool = True) -> Schedule:
    """The schedule of one optimizer step of `plan`, valid and in list order.

    `refine` improves the order by a first simulation on the machine. Raises `PlanError` when plan, workload and machine
    do not fit together. Whether the step fits into memory is the simulator's answer (`OutOfMemory`).
    """
    plan.check(workload)
    have = sum(tier.kind == "device" for tier in machine.tiers)
    if plan.devices > have:
        raise PlanError(f"plan {plan.policy!r} wants {plan.devices} devices, but machine {machine.name!r} has {have}")
    if plan.packs is not None:
        return lower_packs(plan, plan.packs, workload, machine)
    if plan.paged_devices:
        return lower_paged(plan, workload, machine)
    if plan.tiles > 1:
        plan, workload = replace(plan, tiles=1), cut_batches(workload, plan.tiles)
    if plan.operator_tiles > 1:
        plan, workload = _with_cut_operators(plan, workload)
    schedule = _Lowering(plan, workload, machine).schedule()
    if plan.devices > 1:
        return validate(order_under_contention(partition(schedule, plan.devices), machine))
    if refine:
        schedule = order_by_readiness(schedule, price(schedule, machine))
    return validate(schedule)


def _with_cut_operators(plan: Plan, workload: Workload) -> tuple[Plan, Workload]:
    """The plan and workload with each block's tiles as units of their own, which share the block's choices."""
    tiles = plan.operator_tiles
    choices: list[UnitPlan] = []
    for unit, choice in zip(workload.units, plan.units, strict=True):
        choices += [choice] * (tiles if unit.kind == "block" else 1)
    return replace(plan, units=tuple(choices), operator_tiles=1), cut_operators(workload, tiles)


@dataclass(frozen=True, slots=True)
class _Stage:
    """One unit's turn on the compute stream."""

    step: int
    """Position in the walk."""
    phase: str
    """`fwd` or `bwd`."""
    unit: int
    micro_batch: int
    first: bool
    """The first micro-batch of this unit in this pass over its parameters."""
    last: bool
    """The last one: gradients are complete after it."""


def walk(plan: Plan, workload: Workload) -> list[_Stage]:
    """The order of the compute stream: horizontal or vertical, the head's backward right behind its forward."""
    num_units, batches = len(workload.units), range(workload.training.gradient_accumulation_steps)
    head = num_units - 1
    final = batches[-1]
    turns: list[tuple[str, int, int]] = []
    if plan.order == "horizontal":
        for m in batches:
            turns += [("fwd", u, m) for u in range(num_units)]
            turns += [("bwd", u, m) for u in reversed(range(num_units))]
    else:
        turns += [("fwd", u, m) for u in range(head) for m in batches]
        turns += [(phase, head, m) for m in batches for phase in ("fwd", "bwd")]
        turns += [("bwd", u, m) for u in reversed(range(head)) for m in batches]
    vertical = plan.order == "vertical"
    return [
        _Stage(step, phase, u, m, first=not vertical or m == 0, last=m == final)
        for step, (phase, u, m) in enumerate(turns)
    ]


class _Lowering:
    """Builds the schedule by walking the compute stream; `*_home` says which buffer holds what at that point."""

    def __init__(self, plan: Plan, workload: Workload, machine: Machine) -> None:
        self.plan, self.workload, self.machine = plan, workload, machine
        self.training = workload.training
        self.units = workload.units
        self.by_name = {u.name: u for u in workload.units}
        self.choice: dict[str, UnitPlan] = dict(zip(self.by_name, plan.units, strict=True))
        self.buffers: dict[str, Buffer] = {}
        self.ops: list[tuple[Position, Op]] = []
        self.versions: dict[tuple[str, str], int] = {}
        self.becomes: dict[str, str] = {}
        self.params_home: dict[str, str] = {}
        self.states_home: dict[str, str] = {}
        self.fetched_params: dict[tuple[str, ...], str] = {}
        self.grads: dict[str, str] = {}  # accumulated so far
        self.old_grads: dict[str, str] = {}  # of the step before, with delayed updates
        self.inputs: dict[tuple[int, int], str] = {}
        self.acts: dict[tuple[int, int], dict[int | str, str]] = {}
        self.remade: dict[tuple[int, int], str] = {}  # saved tensors that a segment's recomputation has made again
        self.dx: dict[int, str] = {}
        self.tied: dict[tuple[str, int], str] = {}
        self.shared: dict[int, str] = {}
        self.clip: str | None = None
        self.turns: list[str] = []  # keys of the compute ops, by step
        self.update_keys: list[str] = []
        self.home_keys: list[str] = []  # of the op that ended each update's way home
        self.waiting_home: Callable[[tuple[str, ...]], None] | None = None
        vertical = plan.order == "vertical"
        self.turns_per_unit = self.training.gradient_accumulation_steps if vertical else 1

    def schedule(self) -> Schedule:
        self._check_places()
        self._declare_homes()
        stages = walk(self.plan, self.workload)
        self.turns = [f"{s.phase}/{self.units[s.unit].name}/mb{s.micro_batch}" for s in stages]
        self._late_updates()
        for stage in stages:
            if stage.phase == "fwd":
                self._forward(stage)
            else:
                self._backward(stage)
        self._updates_after(float(len(stages)))
        buffers = [replace(b, becomes=self.becomes.get(b.name)) for b in self.buffers.values()]
        return Schedule(
            name=f"{self.plan.policy} {self.workload.name}",
            tiers=tuple(Tier(name=t.name, capacity_bytes=t.capacity_bytes) for t in self.machine.tiers),
            buffers=tuple(buffers),
            ops=_in_list_order(self.ops, self.buffers),
            meta=self._meta(),
        )

    def _meta(self) -> dict[str, object]:
        return {
            "policy": self.plan.policy,
            "semantics": self.plan.semantics,
            "order": self.plan.order,
            "model": self.workload.name,
            "machine": self.machine.name,
            "training": asdict(self.training),
            "config": dict(self.workload.config),
            "units": [
                {
                    "name": u.name,
                    "kind": u.kind,
                    "num_parameters": u.num_parameters,
                    "shares": u.shares,
                    "slot_bytes": [t.size_bytes for t in u.saved],
                    "slot_actions": [self.choice[u.name].action(k) for k in range(len(u.saved))],
                    "late_update": self._is_late(self.choice[u.name]),
                }
                for u in self.units
            ],
        }

    def _check_places(self) -> None:
        for unit, choice in zip(self.units, self.plan.units, strict=True):
            if self.plan.semantics == "delayed-1" and (choice.grads == "nvme" or choice.states == "device"):
                raise PlanError(
                    f"unit {unit.name!r} has gradients in {choice.grads!r} and states in {choice.states!r}; a delayed "
                    "update runs on the host with gradients that waited in host memory"
                )
            if self._is_late(choice) and choice.grads == "nvme":
                raise PlanError(
                    f"unit {unit.name!r} is updated late with gradients in 'nvme'; they wait in host memory: use 'host'"
                )
            if choice.states == "device" and (choice.params, choice.grads) != ("device", "device"):
                raise PlanError(
                    f"unit {unit.name!r} keeps optimizer states on the device, but parameters in {choice.params!r} and "
                    f"gradients in {choice.grads!r}; an update on the device needs all three there"
                )

    def _declare_homes(self) -> None:
        """Buffers that exist before the step: parameters, states, and the old gradients of delayed or late updates."""
        t = self.training
        for unit in self.units:
            n, choice = unit.num_parameters, self.choice[unit.name]
            if n == 0:
                continue
            params = self.buffer(
                f"params/{unit.name}", TIER_OF[choice.params], n * t.param_bytes, "params", initial=True
            )
            self.params_home[unit.name] = params
            self.becomes[params] = params
            if t.state_bytes:
                states = self.buffer(
                    f"states/{unit.name}", TIER_OF[choice.states], n * t.state_bytes, "states", initial=True
                )
                self.states_home[unit.name] = states
                self.becomes[states] = states
            if self.plan.semantics == "delayed-1" or self._is_late(choice):
                old = self.buffer(f"grads/{unit.name}/mb0", HOST, n * t.grad_bytes, "grads", initial=True)
                self.old_grads[unit.name] = old

    # ---- buffers and ops ----

    def buffer(
        self, content: str, tier: str, size_bytes: int, kind: str, *, initial: bool = False, reuses: str | None = None
    ) -> str:
        version = self.versions.get((content, tier), -1) + 1
        self.versions[content, tier] = version
        name = f"{content}@{tier}#{version}"
        self.buffers[name] = Buffer(
            name=name, tier=tier, size_bytes=size_bytes, content=content, kind=kind, initial=initial, reuses=reuses
        )
        return name

    def next_version(self, old: str) -> str:
        """A buffer that takes over the bytes of `old`: an in-place update."""
        b = self.buffers[old]
        new = self.buffer(b.content, b.tier, b.size_bytes, b.kind, reuses=old)
        if old in self.becomes:
            self.becomes[new] = self.becomes.pop(old)
        return new

    def op(
        self,
        at: Position,
        key: str,
        stream: str,
        kind: str,
        unit: str,
        *,
        work: Mapping[str, float],
        reads: Iterable[str],
        writes: Iterable[str],
        m: int = 0,
        after: Iterable[str] = (),
    ) -> None:
        reads, writes, after = tuple(dict.fromkeys(reads)), tuple(writes), tuple(dict.fromkeys(after))
        work = {name: amount for name, amount in work.items() if amount}
        op = Op(
            key=key, stream=stream, kind=kind, unit=unit, micro_batch=m,
            work=work, reads=reads, writes=writes, after=after,
        )  # fmt: skip
        self.ops.append((at, op))

    def work_buffer(self, key: str, size_bytes: int) -> list[str]:
        """The transient of an op: written by it and read by nobody, so it is freed when the op ends."""
        return [self.buffer(f"work/{key}", DEVICE, size_bytes, "work")] if size_bytes else []

    def copy(
        self,
        at: Position,
        what: str,
        source: str,
        tier: str,
        unit: str,
        m: int = 0,
        *,
        over: str | None = None,
        after: Iterable[str] = (),
    ) -> str:
        """Moves the content of `source` into `tier`, over the buffer `over` if one is given; the new buffer's name."""
        b = self.buffers[source]
        stream, verb = LINKS[b.tier, tier]
        target = self.next_version(over) if over else self.buffer(b.content, tier, b.size_bytes, b.kind)
        reads = (source, over) if over else (source,)
        key = f"{verb}_{what}"
        work = {"bytes": b.size_bytes}
        self.op(at, key, stream, "copy", unit, work=work, reads=reads, writes=(target,), m=m, after=after)
        return target

    def to_device(self, step: float, ahead: int, what: str, source: str, unit: str, m: int = 0) -> str:
        """Brings a buffer to the device `ahead` turns before `step`, and from NVMe into host memory as much earlier."""
        if self.buffers[source].tier == NVME:
            early = step - ahead - max(ahead, 1)
            source = self.copy((early, 0), what, source, HOST, unit, m, after=self._turn_before(early))
        return self.copy((step - ahead, 0), what, source, DEVICE, unit, m, after=self._turn_before(step - ahead))

    def _turn_before(self, step: float) -> tuple[str, ...]:
        """With strict windows: the compute op that has to end before a fetch for `step` may start."""
        index = int(step) - 1
        return (self.turns[index],) if self.plan.strict_windows and index >= 0 else ()

    def off_device(self, step: float, what: str, source: str, place: str, unit: str, m: int = 0) -> str:
        """Takes a buffer from the device to host memory, and on to NVMe if that is its place."""
        source = self.copy((step, 2), what, source, HOST, unit, m)
        return self.copy((step, 2), what, source, NVME, unit, m) if place == "nvme" else source

    # ---- the walk ----

    def _params(self, stage: _Stage) -> list[str]:
        """Device buffers with the parameters that a stage computes with, fetched once per pass over the unit."""
        unit = self.units[stage.unit]
        if stage.phase == "bwd" and not unit.saves_parameters:
            return []
        found = []
        for owner in ([unit.name] if unit.num_parameters else []) + ([unit.shares] if unit.shares else []):
            home = self.params_home[owner]
            if self.buffers[home].tier == DEVICE:
                found.append(home)
                continue
            turn = "turn" if unit.kind == "head" else stage.phase
            batch = "all" if self.plan.order == "vertical" else f"mb{stage.micro_batch}"
            pass_over = (owner, unit.name, turn, batch)
            if pass_over not in self.fetched_params:
                what = f"params/{owner}/{turn}"
                if owner != unit.name:
                    what = f"params/{owner}/{unit.name}" + ("" if unit.kind == "head" else f"/{turn}")
                what = what if batch == "all" else f"{what}/{batch}"
                ahead = self.plan.prefetch_params_units * self.turns_per_unit
                self.fetched_params[pass_over] = self.to_device(
                    stage.step, ahead, what, home, unit.name, stage.micro_batch
                )
            found.append(self.fetched_params[pass_over])
        return found

    def _forward(self, stage: _Stage) -> None:
        unit, u, m = self.units[stage.unit], stage.unit, stage.micro_batch
        choice, key = self.choice[unit.name], f"fwd/{unit.name}/mb{m}"
        reads, writes = self._params(stage), []
        if u > 0:
            reads.append(self.inputs[u, m])
        if unit.kind == "embed" and self.workload.shared_bytes:
            self.shared[m] = self.buffer(f"shared/mb{m}", DEVICE, self.workload.shared_bytes, "acts")
            writes.append(self.shared[m])
        elif unit.kind == "block" and m in self.shared:
            reads.append(self.shared[m])
        if u + 1 < len(self.units):
            following = self.units[u + 1].name
            self.inputs[u + 1, m] = self.buffer(f"x/{following}/mb{m}", DEVICE, unit.output_bytes, "acts")
            writes.append(self.inputs[u + 1, m])
        content, acts = f"acts/{unit.name}/mb{m}", self.acts.setdefault((u, m), {})
        kept = sum(t.size_bytes for t in unit.saved if choice.action(t.index) == "keep")
        dropped = sum(t.size_bytes for t in unit.saved if choice.action(t.index) == "recompute")
        if kept:
            acts["keep"] = self.buffer(f"{content}/keep", DEVICE, kept, "acts")
            writes.append(acts["keep"])
        leaving = [t for t in unit.saved if choice.action(t.index) in ("host", "nvme") and t.size_bytes]
        for t in leaving:
            acts[t.index] = self.buffer(f"{content}/{t.index}", DEVICE, t.size_bytes, "acts")
            writes.append(acts[t.index])
        writes += self.work_buffer(key, unit.forward_work_bytes + dropped)
        self.op((stage.step, 1), key, COMPUTE, "forward", unit.name, work=unit.forward, reads=reads, writes=writes, m=m)
        for t in leaving:
            what, place = f"{content}/{t.index}", choice.action(t.index)
            acts[t.index] = self.off_device(stage.step, what, acts[t.index], place, unit.name, m)
        if u > 0 and choice.input != "keep" and self._needs_input(unit, choice) and u == self._segment(u)[0]:
            what = f"x/{unit.name}/mb{m}"
            self.inputs[u, m] = self.off_device(stage.step, what, self.inputs[u, m], choice.input, unit.name, m)

    @staticmethod
    def _needs_input(unit: Unit, choice: UnitPlan) -> bool:
        """Whether backward reads the unit's input: autograd saved it, or something is recomputed from it."""
        return unit.saves_input or any(choice.action(t.index) == "recompute" for t in unit.saved)

    def _backward(self, stage: _Stage) -> None:
        unit, u, m = self.units[stage.unit], stage.unit, stage.micro_batch
        choice, key = self.choice[unit.name], f"bwd/{unit.name}/mb{m}"
        params = self._params(stage)
        ahead = self.plan.prefetch_acts_units
        inputs = []
        if len(segment := self._segment(u)) > 1 and u == segment[-1]:
            self._recompute_segment(stage, segment)
        if u > 0 and self._needs_input(unit, choice):
            if self.buffers[self.inputs[u, m]].tier != DEVICE:
                what = f"x/{unit.name}/mb{m}"
                self.inputs[u, m] = self.to_device(stage.step, ahead, what, self.inputs[u, m], unit.name, m)
            inputs.append(self.inputs[u, m])
        if unit.kind == "block" and m in self.shared:
            inputs.append(self.shared[m])
        acts = []
        for index, name in self.acts[u, m].items():
            if self.buffers[name].tier != DEVICE:
                name = self.to_device(stage.step, ahead, f"acts/{unit.name}/mb{m}/{index}", name, unit.name, m)
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
            self.dx[m] = self.buffer(f"dx/{unit.name}/mb{m}", DEVICE, unit.input_bytes, "acts")
            writes.append(self.dx[m])
        made = self._gradients(stage, reads, writes)
        writes += self.work_buffer(key, unit.backward_work_bytes)
        self.op(
            (stage.step, 1), key, COMPUTE, "backward", unit.name, work=unit.backward, reads=reads, writes=writes, m=m
        )
        if made:
            self._gradients_leave(stage, made)
            if stage.micro_batch == self.training.gradient_accumulation_steps - 1:
                self._gradients_complete(stage)

    def _segment(self, u: int) -> range:
        """The units that are recomputed together with `u` from the first one's input; itself alone without segments."""
        first = next(i for i, unit in enumerate(self.units) if unit.kind == "block") if len(self.units) > 1 else 0
        size, alone = self.plan.segment_units, range(u, u + 1)
        if size == 1 or self.units[u].kind != "block":
            return alone
        start = first + (u - first) // size * size
        blocks = sum(unit.kind == "block" for unit in self.units)
        return range(start, min(start + size, first + blocks))

    def _recompute_segment(self, stage: _Stage, segment: range) -> None:
        """Runs a segment's forward once more, from the input of its first unit: saved tensors and inputs in between."""
        m, first = stage.micro_batch, segment[0]
        if self.buffers[self.inputs[first, m]].tier != DEVICE:
            what, ahead = f"x/{self.units[first].name}/mb{m}", self.plan.prefetch_acts_units
            name = self.units[first].name
            self.inputs[first, m] = self.to_device(stage.step, ahead, what, self.inputs[first, m], name, m)
        for u in segment:
            here = replace(stage, unit=u)
            inputs = [*self._params(here), self.inputs[u, m], *([self.shared[m]] if m in self.shared else [])]
            made = []
            if u != segment[-1]:
                content = f"x/{self.units[u + 1].name}/mb{m}"
                made = [self.buffer(content, DEVICE, self.units[u].output_bytes, "acts")]
                self.inputs[u + 1, m] = made[0]
            self.remade[u, m] = self._recompute(here, list(self.units[u].saved), inputs, [], made)

    def _recompute(
        self, stage: _Stage, dropped: list[SavedTensor], inputs: list[str], acts: list[str], outputs: Iterable[str] = ()
    ) -> str:
        unit, m = self.units[stage.unit], stage.micro_batch
        key = f"recompute/{unit.name}/mb{m}"
        whole = len(dropped) == len(unit.saved)
        work: dict[str, float] = dict(unit.recompute or unit.forward) if whole else {}
        for t in [] if whole else dropped:
            for kind, amount in t.recompute.items():
                work[kind] = work.get(kind, 0.0) + amount
        size = sum(t.size_bytes for t in dropped)
        made = self.buffer(f"acts/{unit.name}/mb{m}/re", DEVICE, size, "acts")
        writes = [made, *outputs, *self.work_buffer(key, unit.forward_work_bytes)]
        reads = inputs if whole else [*inputs, *acts]
        self.op((stage.step, 1), key, COMPUTE, "recompute", unit.name, work=work, reads=reads, writes=writes, m=m)
        return made

    # ---- gradients and updates ----

    def _gradients(self, stage: _Stage, reads: list[str], writes: list[str]) -> str | None:
        """Adds to a backward's reads and writes what it does to gradients; the buffer of its own, if it makes any."""
        unit, m = self.units[stage.unit], stage.micro_batch
        if unit.shares:
            owner = self.by_name[unit.shares]
            earlier = self.tied.get((owner.name, m))  # of another unit that shares them
            if earlier:
                reads.append(earlier)
                self.tied[owner.name, m] = self.next_version(earlier)
            else:
                size = owner.num_parameters * self.training.grad_bytes
                self.tied[owner.name, m] = self.buffer(f"tied/{owner.name}/mb{m}", DEVICE, size, "grads")
            writes.append(self.tied[owner.name, m])
        if unit.num_parameters == 0:
            return None
        tied = self.tied.pop((unit.name, m), None)
        if tied:
            reads.append(tied)
        accumulated = self.grads.get(unit.name)
        if accumulated and self.choice[unit.name].grads == "device":
            reads.append(accumulated)
            made = self.next_version(accumulated)
        else:
            size = unit.num_parameters * self.training.grad_bytes
            made = self.buffer(f"grads/{unit.name}/mb{m}", DEVICE, size, "grads", reuses=tied)
        writes.append(made)
        return made

    def _gradients_leave(self, stage: _Stage, made: str) -> None:
        """After one micro-batch: gradients stay on the device, or join those that wait in host memory."""
        unit, m = self.units[stage.unit], stage.micro_batch
        if self.choice[unit.name].grads == "device":
            self.grads[unit.name] = made
            return
        arrived = self.copy((stage.step, 2), f"grads/{unit.name}/mb{m}", made, HOST, unit.name, m)
        accumulated = self.grads.get(unit.name)
        if accumulated is None:
            self.grads[unit.name] = arrived
            return
        total = self.next_version(accumulated)
        self.op(
            (stage.step, 3),
            f"accumulate/{unit.name}/mb{m}",
            CORES,
            "accumulate",
            unit.name,
            work={"elementwise_bytes": 3 * unit.num_parameters * self.training.grad_bytes},
            reads=(accumulated, arrived),
            writes=(total,),
            m=m,
        )
        self.grads[unit.name] = total

    def _gradients_complete(self, stage: _Stage) -> None:
        """After the last micro-batch: the norm if one is wanted, the way to where the update finds them, the update."""
        unit, choice = self.units[stage.unit], self.choice[self.units[stage.unit].name]
        if choice.states != "device" and choice.grads == "device":
            self.grads[unit.name] = self.copy(
                (stage.step, 2), f"grads/{unit.name}", self.grads[unit.name], HOST, unit.name
            )
        grads = self.grads[unit.name]
        if self.training.max_grad_norm is not None:
            self._norm(stage, unit, grads)
        if choice.grads == "nvme":
            if self.plan.wide_grads and self.training.grad_bytes < WIDE_BYTES:
                grads = self._widen(stage, unit, grads)
            self.grads[unit.name] = self.copy((stage.step, 2), f"grads/{unit.name}", grads, NVME, unit.name)
        if self.plan.semantics == "in-backward" and not self._is_late(choice):
            self._update(unit, float(stage.step), self.grads[unit.name])
        elif self.plan.semantics == "delayed-1" or self._is_late(choice):
            self.becomes[grads] = self.old_grads[unit.name]

    def _widen(self, stage: _Stage, unit: Unit, grads: str) -> str:
        wide = self.buffer(f"grads/{unit.name}/wide", HOST, unit.num_parameters * WIDE_BYTES, "grads")
        self.op(
            (stage.step, 2),
            f"widen/{unit.name}",
            CORES,
            "widen",
            unit.name,
            work={"elementwise_bytes": unit.num_parameters * (self.training.grad_bytes + WIDE_BYTES)},
            reads=(grads,),
            writes=(wide,),
        )
        return wide

    def _norm(self, stage: _Stage, unit: Unit, grads: str) -> None:
        norm = self.buffer(f"norm/{unit.name}", HOST, NORM_BYTES, "work")
        on_device = self.buffers[grads].tier == DEVICE
        self.op(
            (stage.step, 3),
            f"norm/{unit.name}",
            COMPUTE if on_device else CORES,
            "norm",
            unit.name,
            work={"elementwise_bytes": unit.num_parameters * self.training.grad_bytes},
            reads=(grads,),
            writes=(norm,),
        )

    def _is_late(self, choice: UnitPlan) -> bool:
        """Whether a unit's update waits for the next step: it then uses that step's forward, until it is needed."""
        return choice.late_update and choice.states != "device" and self.plan.semantics == "in-backward"

    def _late_updates(self) -> None:
        """Late updates of the step before, with its gradients: each in time for the unit's parameters to be fetched.

        Listed in the step that they overlap rather than behind the step whose gradients they use, so that their grants
        do not hold back those of this step's forward.
        """
        for u, unit in enumerate(self.units):
            if unit.num_parameters and self._is_late(self.choice[unit.name]):
                ahead = self.plan.prefetch_params_units + 1
                self._update(unit, float((u - ahead) * self.turns_per_unit), self.old_grads[unit.name])

    def _updates_after(self, end: float) -> None:
        """Updates that wait for all gradients (exact clipping), or that use those of the step before (delayed)."""
        owners = [u for u in self.units if u.num_parameters]
        if self.plan.update_order == "backward":
            owners.reverse()
        if self.training.max_grad_norm is not None:
            self.clip = self.buffer("clip", HOST, NORM_BYTES, "work")
            norms = [f"norm/{u.name}@{HOST}#0" for u in owners]
            self.op((end, 0), "clip", CORES, "clip", "", work={}, reads=norms, writes=(self.clip,))
        if self.plan.semantics == "exact-clip":
            for i, unit in enumerate(owners):
                self._update(unit, end + i, self.grads[unit.name])
        elif self.plan.semantics == "delayed-1":
            for i, unit in enumerate(owners):
                self._update(unit, end * i / len(owners), self.old_grads[unit.name], upload_at=end + i)
        if self.waiting_home:
            self.waiting_home(())

    def _update(self, unit: Unit, step: float, grads: str, *, upload_at: float | None = None) -> None:
        """The optimizer step of one unit, with what it reads brought to it and what it writes taken home."""
        choice, n, t = self.choice[unit.name], unit.num_parameters, self.training
        key, reads, writes = f"update/{unit.name}", [grads], []
        held = (self.turns[-1],) if self.plan.hold_updates and self.plan.semantics == "exact-clip" else ()
        if self.clip and self.plan.semantics == "exact-clip":
            reads.append(self.clip)
        if choice.states == "device":
            for home in (self.states_home, self.params_home):
                if unit.name in home:
                    reads.append(home[unit.name])
                    home[unit.name] = self.next_version(home[unit.name])
                    writes.append(home[unit.name])
            moved = n * (2 * t.state_bytes + t.grad_bytes + 2 * t.param_bytes)
            work: dict[str, float] = {"elementwise_bytes": moved}
            self.op((step, 3), key, COMPUTE, "update", unit.name, work=work, reads=reads, writes=writes)
            return
        early = (step - self.plan.prefetch_states_units * self.turns_per_unit, 0)
        may_read = (*held, *self._update_before())
        if choice.grads == "nvme":
            reads[0] = self.copy(early, f"grads/{unit.name}", grads, HOST, unit.name, after=may_read)
        states_home, params_home = self.states_home.get(unit.name), self.params_home[unit.name]
        states = states_home
        if states_home and choice.states == "nvme":
            states = self.copy(early, f"states/{unit.name}", states_home, HOST, unit.name, after=may_read)
        if self.waiting_home:
            self.waiting_home((f"read_states/{unit.name}",) if states and choice.states == "nvme" else ())
        if states:
            reads.append(states)
            states = self.next_version(states)
            writes.append(states)
        if choice.params == "host":
            reads.append(params_home)
            params = self.next_version(params_home)
        elif t.has_master:
            params = self.buffer(f"params/{unit.name}", HOST, n * t.param_bytes, "params")
        else:
            old = self.copy(early, f"params/{unit.name}/update", params_home, HOST, unit.name)
            reads.append(old)
            params = self.next_version(old)
        writes.append(params)
        work = {"parameters": n}
        after = (*held, *(self.home_keys[-1:] if self.plan.write_back == "awaited" else ()))
        self.op((step, 3), key, CORES, "update", unit.name, work=work, reads=reads, writes=writes, after=after)
        self.update_keys.append(key)
        home_at = (upload_at if upload_at is not None else step, 4)
        index = len(self.home_keys)
        self.home_keys.append(key)

        def take_home(after: tuple[str, ...]) -> None:
            now_states, now_params = states, params
            if now_states and states_home and choice.states == "nvme":
                what = f"states/{unit.name}"
                now_states = self.copy(home_at, what, now_states, NVME, unit.name, over=states_home, after=after)
                self.home_keys[index] = f"write_{what}"
            if choice.params != "host":
                what, tier = f"params/{unit.name}/update", TIER_OF[choice.params]
                now_params = self.copy(home_at, what, params, tier, unit.name, over=params_home, after=after)
                if choice.params == "nvme":
                    self.home_keys[index] = f"write_{what}"
            if now_states:
                self.states_home[unit.name] = now_states
            self.params_home[unit.name] = now_params
            self.waiting_home = None

        if self.plan.write_back == "delayed":
            self.waiting_home = take_home
        else:
            take_home(())

    def _update_before(self) -> tuple[str, ...]:
        """What has to end before the next update's states may be read, by the windows of the plan."""
        found = []
        window, in_flight = self.plan.prefetch_states_units, self.plan.updates_in_flight
        if self.plan.strict_windows and len(self.update_keys) > window:
            found.append(self.update_keys[-1 - window])
        if in_flight and len(self.home_keys) >= in_flight:
            found.append(self.home_keys[-in_flight])
        return tuple(found)


def _in_list_order(placed: list[tuple[Position, Op]], buffers: Mapping[str, Buffer]) -> tuple[Op, ...]:
    """Ops by position, each behind those whose output it needs and behind the readers of what it writes over."""
    writer: dict[str, int] = {}
    readers: dict[str, list[int]] = {}
    number = {op.key: i for i, (_, op) in enumerate(placed)}
    for i, (_, op) in enumerate(placed):
        for name in op.writes:
            writer[name] = i
        for name in op.reads:
            readers.setdefault(name, []).append(i)
    before: list[set[int]] = []
    for i, (_, op) in enumerate(placed):
        needed = {writer[name] for name in op.reads if name in writer} | {number[key] for key in op.after}
        for name in op.writes:
            old = buffers[name].reuses
            if old is not None:
                needed.update(readers.get(old, ()))
        before.append(needed - {i})
    followers: list[list[int]] = [[] for _ in placed]
    for i, needed in enumerate(before):
        for j in needed:
            followers[j].append(i)
    missing = [len(needed) for needed in before]
    ready = [(placed[i][0], i) for i, count in enumerate(missing) if count == 0]
    heapq.heapify(ready)
    ordered: list[Op] = []
    while ready:
        _, i = heapq.heappop(ready)
        ordered.append(placed[i][1])
        for j in followers[i]:
            missing[j] -= 1
            if missing[j] == 0:
                heapq.heappush(ready, (placed[j][0], j))
    assert len(ordered) == len(placed), "the lowering made a cycle"
    return tuple(ordered)
