"""A pipeline whose stages stay on their devices: one forward, one backward in turns (1F1B, PipeDream's, Megatron's).

Device d makes as many forwards ahead as there are stages behind it, then a backward and a forward in turns. With more
stages than devices, device d has every n-th, and micro-batches go round in groups of n (interleaved, Megatron's). One
stage more than that comes home to the first device, which goes forward and backward there whenever a micro-batch has
come. A stage keeps the inputs of its blocks; their activations it keeps, too, or makes again. Borders go to the
neighbour by its link, or through the host at the rate of a ring of two; compute waits for what it sends. Every device
updates its own stages in the end. States in host memory come to the device for that in parts, one after the other and
behind all that is there, and go back; or the host updates its units, in the order in which their gradients have come,
and the new parameters come back.

A tied head has a copy of the embedding's parameters: its share of their gradient goes to the first device with every
micro-batch, whose sums are then those of plain training, or their sum goes there once a step (`sums_tied`, Megatron's);
and the updated parameters come back. At home, on the first device, it needs neither.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from itertools import product, zip_longest

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import HOST, HOST_ADAM, compute, d2h, device, h2d
from tierplan.planner.plan import PackPlan, facts_of
from tierplan.planner.several_devices.packs.task import Task
from tierplan.planner.several_devices.packs.unitwise import Pipeline
from tierplan.sim.builder import Said
from tierplan.sim.columns import ScheduleColumns
from tierplan.sim.contents import Frozen, Gradients, KeptActs, Params, RecomputedActs, Shared, copy_key
from tierplan.sim.step import StepSpec, unit_spec
from tierplan.sim.workloads.workload import Unit, Workload


def resident_columns(plan: PackPlan, workload: Workload, machine: Machine) -> ScheduleColumns:
    """The schedule of one step of a plan that has been checked, with ops of each unit and micro-batch."""
    return _Resident(plan, workload, machine).lowered()


StageTurn = tuple[bool, int, int]
"""Whether it goes back, with which stage and micro-batch."""


@lru_cache(maxsize=32)
def turns_of(num: int, num_stages: int, num_batches: int) -> tuple[tuple[StageTurn, ...], ...]:
    """What each of so many devices does, in order."""
    each, at_home = divmod(num_stages, num)
    turns = [_in_turns(d, num, each, num_batches, more=at_home) for d in range(num)]
    if at_home:
        turns[0] = _with_last_stage(turns, each, num_batches)
    return tuple(map(tuple, turns))


def _in_turns(d: int, num: int, each: int, num_batches: int, *, more: int) -> list[StageTurn]:
    """Of device d, with so many stages each, and so many `more` behind those of all."""
    group = num if each > 1 else num_batches
    rounds = [(k, range(first, first + group)) for first in range(0, num_batches, group) for k in range(each)]
    forwards = [(False, k * num + d, m) for k, batches in rounds for m in batches]
    backwards = [(True, (each - 1 - k) * num + d, m) for k, batches in rounds for m in batches]
    ahead = more + (num - d if each == 1 else 2 * (num - 1 - d) + (each - 1) * num + 1)
    turns = forwards[:ahead]
    for back, forward in zip_longest(backwards, forwards[ahead:]):
        turns += [back, forward] if forward else [back]
    return turns


def _with_last_stage(turns: list[list[StageTurn]], each: int, num_batches: int) -> list[StageTurn]:
    """The first device's turns with those of the stage behind all others, each when its micro-batch would come if all
    devices had as much to do, and backward took twice as long as forward."""
    num, last = len(turns), len(turns) * each
    left = [*map(deque, turns), deque((back, last, m) for m in range(num_batches) for back in (False, True))]
    free, done, merged = [0] * num, dict[StageTurn, int](), list[StageTurn]()

    def came(back: bool, stage: int, m: int) -> int | None:
        if back:
            return done.get((True, stage + 1, m) if stage < last else (False, last, m))
        return done.get((False, stage - 1, m)) if stage else 0

    while any(left):
        began = [(came(*own[0]), k % num, k) for k, own in enumerate(left) if own]
        now, _, k = min((max(free[d], at), k < num, k) for at, d, k in began if at is not None)
        turn, d = left[k].popleft(), k % num
        free[d] = done[turn] = now + (1 + turn[0]) * (each + 1 if d else each)
        if d == 0:
            merged.append(turn)
    return merged


class _Resident(Pipeline):
    """As `Pipeline`, with all that a stage has on its device, but for states that the plan has in host memory."""

    def __init__(self, plan: PackPlan, workload: Workload, machine: Machine) -> None:
        super().__init__(plan, workload, machine)
        self.stages, self.n = [range(a, b) for a, b in self.packs.backward], self.packs.devices
        self.own = [s % self.n for s, stage in enumerate(self.stages) for _ in stage]
        self.frozen: list[dict[str, int]] = [{} for _ in range(self.n)]  # of each device, as `homes`
        self.at_stage = 0
        self.arrived: dict[tuple[bool, int, int], int] = {}  # whether backward, stage, micro-batch -> its border
        self.kept: dict[tuple[str, int], list[int | None]] = {}  # unit, micro-batch -> its input, and what it has saved
        self.shared: dict[tuple[int, int], int] = {}
        self.kept_blocks = frozenset(self.packs.kept)
        self.host_has = self._with_states(self.packs.host_states)
        self.last_forward: dict[int, int] = {}  # of each device: before it there is no room for states that come
        self.made_there: dict[str, int] = {}  # of a unit that the host has updated: its new parameters there
        self.left: list[int] = []  # units that the host updates, in the order in which their gradients leave

    def _declare_homes(self) -> None:
        own = {unit.name: d for unit, d in zip(self.units, self.own, strict=True)}
        for d, unit in product(range(self.n), self.units):
            is_lent = any(own[other.name] == d for other in self.units if other.shares == unit.name)
            sizes = Params, unit.num_trained * self.training.param_bytes, self.homes[d]
            for content, size, homes in (sizes, (Frozen, unit.frozen_bytes, self.frozen[d])):
                if size and (is_lent or own[unit.name] == d):
                    homes[unit.name] = self.home((content, unit.name), device(d), size, "params")
            if own[unit.name] == d:
                tier, owner = (HOST, d) if unit.name in self.host_has else (device(d), None)
                self._home_states(unit, tier, owner)

    def step(self) -> StepSpec:
        units = tuple(unit_spec(u, "keep" if self._keeps(k) else "recompute") for k, u in enumerate(self.units))
        return StepSpec(training=self.training, semantics=self.plan.semantics, units=units)

    def meta(self) -> dict[str, object]:
        return facts_of(self.plan, self.workload, self.machine, devices=self.n, config=dict(self.workload.config))

    def _take_turns(self) -> None:
        num = self.training.gradient_accumulation_steps
        turns = [*map(deque, turns_of(self.n, len(self.stages), num))]
        while any(turns):  # whatever may come next on any device: list order is one in which ops can run one by one
            for self.at, own in enumerate(turns):
                if own and self._is_ready(*own[0]):
                    self._stage(*own.popleft())
        tasks = {u: Task("bwd", u, (unit,), self.own[u]) for u, unit in enumerate(self.units) if unit.num_trained}
        if self.training.max_grad_norm is not None:
            for task in tasks.values():
                self._norms(task)
            self._coefficients()
        else:  # what has come first is updated first, and else what is needed first
            tasks = {u: tasks[u] for u in dict.fromkeys((*self.left, *tasks))}
        for u in sorted(tasks, key=lambda u: self._order(self.units[u])):
            self._update(tasks[u])

    def _keeps(self, u: int) -> bool:
        """Whether a unit's activations stay until its backward."""
        return self.units[u].kind != "block" or u in self.kept_blocks

    def _is_ready(self, goes_back: bool, stage: int, m: int) -> bool:
        return (goes_back, stage, m) in self.arrived or stage == (len(self.stages) - 1 if goes_back else 0)

    def _stage(self, goes_back: bool, stage: int, m: int) -> None:
        """A stage's forward or backward; what it hands over is sent to its neighbour."""
        step, run = (-1, self._stage_backward) if goes_back else (1, self._unit_forward)
        border, self.first, self.at_stage = self.arrived.get((goes_back, stage, m)), self.stages[stage].start, stage
        for u in self.stages[stage][::step]:
            border = run(u, m, border)
        if border is not None:
            self.arrived[goes_back, stage + step, m] = self._hand_over(border, (stage + step) % self.n, m)

    def _reads(self, unit: Unit, m: int) -> list[int | None]:
        homes, names = (self.homes[self.at], self.frozen[self.at]), [name for name in (unit.name, unit.shares) if name]
        params = [of.get(name) for name, of in product(names, homes)]
        return [*params, *([self.shared.get((self.at, m))] if unit.kind == "block" else [])]

    def _beside(self, u: int, kind: str) -> int:
        return super()._beside(u, kind) if kind == "forward" else 0

    def _unit_forward(self, u: int, m: int, x: int | None) -> int | None:
        """Adds a unit's forward; the next unit's input."""
        unit, shared_bytes, writes = self.units[u], self.workload.shared_bytes, list[int]()
        reads = [*self._reads(unit, m), x]
        if u == self.first and shared_bytes and (self.at, m) not in self.shared:
            self.shared[self.at, m] = self.buffer((Shared, m), device(self.at), shared_bytes, "acts")
            writes.append(self.shared[self.at, m])
        saved = KeptActs if self._keeps(u) else None
        self.last_forward[self.at], y, acts = self._run("forward", u, m, reads, writes=writes, saved=saved)
        self.kept[unit.name, m] = [x, acts]
        return y

    def _stage_backward(self, u: int, m: int, dy: int | None) -> int | None:
        """Adds a unit's backward, and what it makes again for that; the gradient of its input."""
        unit, params = self.units[u], self._reads(self.units[u], m)
        x, acts = self.kept.pop((unit.name, m))
        if not self._keeps(u):
            again, work = [*params, x, dy if u + 1 == self.stages[self.at_stage].stop else None], unit.recompute
            _, _, acts = self._run("recompute", u, m, again, work=work, saved=RecomputedActs, hands_over=False)
        _, dx = self._unit_backward(u, m, [*params, x, acts, dy])
        if unit.num_trained and self._is_updated_there(unit) and m + 1 == self.training.gradient_accumulation_steps:
            key = copy_key, "offload", (Gradients, unit.name)
            self.grads[unit.name] = self._to_host(key, self.grads[unit.name], u)
            self.left.append(u)
        owner = next((v for v, other in enumerate(self.units) if other.name == unit.shares), u)
        tied = self.units[owner].name, m
        if self.own[owner] != self.at and tied in self.tied:
            self.tied[tied] = self._hand_over(self.tied[tied], self.own[owner], m)
            del self.may_begin[self.at]  # compute need not wait for what is needed much later
        return dx

    def _hand_over(self, buffer: int, target: int, m: int) -> int:
        there = self._send((copy_key, "send", self.contents[buffer]), buffer, target, m=m)
        self.may_begin[self.at] = [self.last_op]
        return there

    # ---- updates ----

    def _order(self, unit: Unit) -> int:
        """Whose update comes first: states that come wait for what is there, and what comes back from the host for
        them, or they would wait for the host on the link."""
        return 1 if unit.name in self.comes else 2 * self._is_updated_there(unit)

    def _is_updated_there(self, unit: Unit) -> bool:
        """Whether the host updates it."""
        return unit.name in self.host_has and unit.name not in self.comes

    def _updates_on(self, device: int, unit: Unit) -> str:
        return HOST_ADAM if self._is_updated_there(unit) else compute(device)

    def _arrived(self, task: Task, unit: Unit) -> tuple[list[int], list[int]]:
        return [self.grads[unit.name]], []

    def _update_in_parts(self, task: Task, unit: Unit) -> None:
        """At once: behind all that is there."""
        d, grads = task.device, self.grads[unit.name]
        for k in range(len(self.parts_home[unit.name])):
            old, after = self.params_home[unit.name], [self.last_forward[d]]
            self.params_home[unit.name] = self._update_part(d, unit, k, grads, old, after)
        self._updated(unit, d)

    def _params_to_update(self, unit: Unit) -> tuple[list[int], int]:
        if not self._is_updated_there(unit):
            return super()._params_to_update(unit)
        old = self.params_home[unit.name]
        d, size = self.owner(old), self.sizes_bytes[old]
        assert d is not None
        if self.training.has_master:  # by which they are made anew
            reads, new = [], self.buffer((Params, unit.name), HOST, size, "params", owner=d)
        else:
            reads = [self._to_update("offload", unit, old, d2h(d), HOST, owner=d)]
            new = self.over(reads[0])
        self.made_there[unit.name] = new
        return reads, new

    def _updated(self, unit: Unit, d: int) -> None:
        if (made := self.made_there.get(unit.name)) is not None:
            home = self.params_home[unit.name]
            self.params_home[unit.name] = self._to_update("fetch", unit, made, h2d(d), device(d), over=home)
        super()._updated(unit, d)

    def _new_params(self, unit: Unit, d: int) -> Said:
        return Params, unit.name
