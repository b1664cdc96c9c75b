"""A pipeline whose stages stay on their devices: one forward, one backward in turns (1F1B, PipeDream's, Megatron's).

Device d makes as many forwards ahead as there are stages behind it, then a backward and a forward in turns. A stage
keeps the inputs of its blocks and makes their activations again. Borders go to the neighbour by its link, or through
the host at the rate of a ring of two; compute waits for what it sends. Every device updates its own stage in the end.

A tied head has a copy of the embedding's parameters: its share of their gradient goes to the first device with every
micro-batch, whose sums are then those of plain training, and the updated parameters come back.
"""

from __future__ import annotations

from itertools import product

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import HOST, HOST_ADAM, compute, device
from tierplan.planner.plan import PackPlan, facts_of
from tierplan.planner.several_devices.collectives import add_send
from tierplan.sim.builder import Builder, tiers_of
from tierplan.sim.contents import (
    NORM_BYTES,
    Clip,
    Gradients,
    Input,
    InputGradient,
    KeptActs,
    Norm,
    Params,
    RecomputedActs,
    Shared,
    States,
    TiedGradients,
    backward_key,
    copy_key,
    device_name,
    forward_key,
    op_key,
    recompute_key,
)
from tierplan.sim.schedule import Schedule
from tierplan.sim.step import StepSpec, unit_spec
from tierplan.sim.workloads.workload import Unit, Workload


def resident_schedule(plan: PackPlan, workload: Workload, machine: Machine) -> Schedule:
    """The schedule of one step of a plan that has been checked, with ops of each unit and micro-batch."""
    lowering = _Resident(plan, workload, machine)
    turns = [lowering.turns(d) for d in range(plan.devices)]
    while any(turns):  # whatever may come next on any device: list order is one in which ops can run one by one
        for d, own in enumerate(turns):
            if own and lowering.is_ready(d, *own[0]):
                lowering.add(d, *own.pop(0))
    lowering.update()
    specs = tuple(unit_spec(u, "recompute" if u.kind == "block" else "keep") for u in workload.units)
    step = StepSpec(training=workload.training, semantics=plan.semantics, units=specs)
    meta = facts_of(plan, workload, machine, devices=plan.devices, config=dict(workload.config))
    return lowering.builder.schedule(f"{plan.policy} {workload.name}", tiers_of(machine), step=step, meta=meta)


class _Resident:
    def __init__(self, plan: PackPlan, workload: Workload, machine: Machine) -> None:
        self.stages, self.units = [range(a, b) for a, b in plan.packs.backward], workload.units
        self.workload, self.training, self.builder, self.n = workload, workload.training, Builder(), plan.devices
        self.links = {stream.name for stream in machine.streams}
        self.arrived: dict[tuple[str, int, int], str] = {}  # forward or backward, device, micro-batch -> its border
        self.kept: dict[tuple[str, int], list[str]] = {}  # unit, micro-batch -> its input, and what it has saved
        self.shared: dict[tuple[int, int], list[str]] = {}
        self.tied: dict[tuple[str, int], str] = {}
        self.sent: list[str] = [""] * self.n
        self.grads: dict[str, str] = {}
        self.home = {self.units[u].name: d for d, stage in enumerate(self.stages) for u in stage}
        self.params: dict[tuple[int, str], str] = {}
        self.states: dict[str, str] = {}
        for d, unit in product(range(self.n), self.units):
            is_lent = any(self.home[other.name] == d for other in self.units if other.shares == unit.name)
            if (size := self.training.params_bytes(unit)) and (is_lent or self.home[unit.name] == d):
                self.params[d, unit.name] = self.builder.home(Params(unit.name), device(d), size, "params")
            if (size := self.training.states_bytes(unit)) and self.home[unit.name] == d:
                self.states[unit.name] = self.builder.home(States(unit.name), device(d), size, "states")

    def turns(self, d: int) -> list[tuple[str, int]]:
        """What device d does, in order."""
        total = self.training.gradient_accumulation_steps
        ahead = min(total, self.n - d)
        turns = [("fwd", m) for m in range(ahead)]
        for m in range(total):
            turns += [("bwd", m), *([("fwd", m + ahead)] if m + ahead < total else [])]
        return turns

    def is_ready(self, d: int, phase: str, m: int) -> bool:
        return (phase, d, m) in self.arrived or (d == 0 if phase == "fwd" else d == self.n - 1)

    def add(self, d: int, phase: str, m: int) -> None:
        if phase == "fwd":
            x = self.arrived.get(("fwd", d, m), "")
            for u in self.stages[d]:
                x = self._forward(d, self.units[u], u, m, x)
            if x:
                self.arrived["fwd", d + 1, m] = self._send(x, d + 1, m)
        else:
            dy = self.arrived.get(("bwd", d, m), "")
            for u in reversed(self.stages[d]):
                dy = self._backward(d, self.units[u], u, m, dy)
            if dy:
                self.arrived["bwd", d - 1, m] = self._send(dy, d - 1, m)

    def _reads(self, d: int, unit: Unit, m: int) -> list[str]:
        params = [self.params.get((d, name or ""), "") for name in (unit.name, unit.shares)]
        return params + (self.shared.get((d, m), []) if unit.kind == "block" else [])

    def _op(
        self, d: int, key: str, kind: str, unit: Unit, m: int, reads: list[str], writes: list[str], work_bytes: int
    ) -> None:
        writes = [*writes, *self.builder.work(key, work_bytes, device(d))]
        work = {"forward": unit.forward, "recompute": unit.recompute or unit.forward, "backward": unit.backward}[kind]
        after, self.sent[d] = [self.sent[d]], ""
        self.builder.op(
            key, compute(d), kind, work=work, reads=filter(None, reads), writes=writes, after=after, unit=unit.name, m=m
        )

    def _forward(self, d: int, unit: Unit, u: int, m: int, x: str) -> str:
        """Adds a unit's forward; the next unit's input."""
        gpu, reads, writes, acts, y = device(d), [*self._reads(d, unit, m), x], [], "", ""
        size, is_first = unit.forward_work_bytes, u == self.stages[d].start
        if is_first and self.workload.shared_bytes:
            self.shared[d, m] = [self.builder.buffer(Shared(m), gpu, self.workload.shared_bytes, "acts")]
            writes += self.shared[d, m]
        if u + 1 < len(self.units):
            y = self.builder.buffer(Input(self.units[u + 1].name, m), gpu, unit.output_bytes, "acts")
            writes.append(y)
        if unit.kind == "block":
            size += unit.saved_bytes
        elif unit.saved_bytes:
            acts = self.builder.buffer(KeptActs(unit.name, m), gpu, unit.saved_bytes, "acts")
            writes.append(acts)
        if is_first and d:  # the model's own forward leads there by its embedding
            size = max(size, self.units[0].forward_work_bytes + self.units[0].saved_bytes + self.units[0].output_bytes)
        self.kept[unit.name, m] = [x, acts]
        self._op(d, forward_key(unit.name, m), "forward", unit, m, reads, writes, size)
        return y

    def _backward(self, d: int, unit: Unit, u: int, m: int, dy: str) -> str:
        """Adds a unit's backward, and what it makes again for that; the gradient of its input."""
        gpu, params = device(d), self._reads(d, unit, m)
        x, acts = self.kept.pop((unit.name, m))
        if unit.kind == "block":
            acts = self.builder.buffer(RecomputedActs(unit.name, m), gpu, unit.saved_bytes, "acts")
            again = [*params, x, *([dy] if u + 1 == self.stages[d].stop else [])]
            self._op(d, recompute_key(unit.name, m), "recompute", unit, m, again, [acts], unit.forward_work_bytes)
        reads, writes, dx, size = [*params, x, acts, dy], [], "", unit.backward_work_bytes
        if u:
            dx = self.builder.buffer(InputGradient(unit.name, m), gpu, unit.input_bytes, "acts")
            writes.append(dx)
        owner = next((other for other in self.units if other.name == unit.shares and unit.adds_to_shared), None)
        if owner is not None:
            grad_bytes = owner.num_trained * self.training.grad_bytes
            tied = self.tied[owner.name, m] = self.builder.buffer(
                TiedGradients(owner.name, m), gpu, grad_bytes, "grads"
            )
            writes.append(tied)
        if unit.num_trained:
            tied, old = self.tied.pop((unit.name, m), ""), self.grads.get(unit.name, "")
            reads += [tied, old]
            if old or tied:
                size = max(size, unit.accumulating_work_bytes)
                self.grads[unit.name] = self.builder.over(old or tied, Gradients(unit.name, m))
            else:
                grad_bytes = unit.num_trained * self.training.grad_bytes
                self.grads[unit.name] = self.builder.buffer(Gradients(unit.name, m), gpu, grad_bytes, "grads")
            writes.append(self.grads[unit.name])
        self._op(d, backward_key(unit.name, m), "backward", unit, m, reads, writes, size)
        if owner is not None and self.home[owner.name] != d:
            self.tied[owner.name, m] = self._send(self.tied[owner.name, m], self.home[owner.name], m)
            self.sent[d] = ""  # compute need not wait for what is needed much later
        return dx

    def _send(self, buffer: str, target: int, m: int = 0, *, over: str = "") -> str:
        """To another device, over what it had of the same; the buffer there."""
        key = self.sent[self.builder.owner(buffer) or 0] = copy_key("send", self.builder.buffers[buffer].content)
        return add_send(self.builder, self.links, key, buffer, target, over=over or None, m=m)

    def update(self) -> None:
        """Each device updates its units, clipped by the norm of all gradients where that is wanted."""
        t, coefficient = self.training, [""] * self.n
        own = [(self.home[unit.name], unit) for unit in self.units if unit.num_trained]
        if t.max_grad_norm is not None:
            norms = []
            for d, unit in own:
                norms.append(self.builder.buffer(Norm(unit.name), HOST, NORM_BYTES, "work"))
                work, key = {"elementwise_bytes": unit.num_trained * t.grad_bytes}, op_key("norm", unit.name)
                grads, stream = self.grads[unit.name], compute(d)
                self.builder.op(key, stream, "norm", work=work, reads=[grads], writes=norms[-1:], unit=unit.name)
            for d in range(self.n):
                coefficient[d] = self.builder.buffer(Clip(), HOST, NORM_BYTES, "work")
                key = device_name(op_key("clip"), d)
                self.builder.op(key, HOST_ADAM, "clip", work={}, reads=norms, writes=(coefficient[d],))
        for d, unit in own:
            homes = [*filter(None, (self.params[d, unit.name], self.states.get(unit.name)))]
            reads = filter(None, [self.grads[unit.name], *homes, coefficient[d]])
            writes, amounts = [self.builder.over(home) for home in homes], t.update_work(unit)
            key, stream = States(unit.name).update_key, compute(d)
            self.builder.op(key, stream, "update", work=amounts, reads=reads, writes=writes, unit=unit.name)
            for (other, name), lent in self.params.items():
                if name == unit.name and other != d:
                    self._send(writes[0], other, over=lent)
