"""A pipeline whose stages stay on their devices: one forward, one backward in turns (1F1B, PipeDream's, Megatron's).

Device d makes as many forwards ahead as there are stages behind it, then a backward and a forward in turns. A stage
keeps its inputs and makes activations again. Borders go to the neighbour by its link, or through the host at the rate
of a ring of two; compute waits for what it sends. Every device updates its own stage in the end.
"""

from __future__ import annotations

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import collective, compute, device, p2p, parse_stream, ring
from tierplan.planner.plan import PackPlan, facts_of
from tierplan.sim.builder import Builder, tiers_of
from tierplan.sim.contents import (
    Gradients,
    Input,
    InputGradient,
    PackActs,
    Params,
    States,
    Transient,
    backward_key,
    copy_key,
    forward_key,
    micro_batch_name,
    op_key,
    pack_name,
    recompute_key,
)
from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.workload import Unit, Workload, total_work


def resident_schedule(plan: PackPlan, workload: Workload, machine: Machine) -> Schedule:
    """The schedule of one step of a plan that has been checked, with one op for each stage and micro-batch."""
    lowering = _Resident(plan, workload, machine)
    turns = [lowering.turns(d) for d in range(plan.devices)]
    while any(turns):  # whatever may come next on any device: list order is one in which ops can run one by one
        for d, own in enumerate(turns):
            if own and lowering.is_ready(d, *own[0]):
                lowering.add(d, *own.pop(0))
    lowering.update()
    name, meta = f"{plan.policy} {workload.name}", facts_of(plan, workload, machine, devices=plan.devices)
    return lowering.builder.schedule(name, tiers_of(machine), meta=meta)


class _Resident:
    def __init__(self, plan: PackPlan, workload: Workload, machine: Machine) -> None:
        self.stages = [workload.units[a:b] for a, b in plan.packs.backward]
        self.training, self.builder, self.n = workload.training, Builder(), plan.devices
        self.has_peer_links = any(parse_stream(stream.name).task == "p2p" for stream in machine.streams)
        self.arrived: dict[tuple[str, int, int], str] = {}  # forward or backward, device, micro-batch -> its border
        self.kept: dict[tuple[int, int], list[str]] = {}
        self.sent: list[str] = [""] * self.n
        self.grads: dict[int, str] = {}
        home = self.builder.home
        self.params = [
            [home(Params(u.name), device(d), self.training.params_bytes(u), "params") for u in stage]
            for d, stage in enumerate(self.stages)
        ]
        self.states = [
            [home(States(u.name), device(d), self.training.states_bytes(u), "states") for u in stage]
            for d, stage in enumerate(self.stages)
        ]

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
        (self._forward if phase == "fwd" else self._backward)(d, m)

    def _op(
        self, key: str, d: int, kind: str, works: list[dict[str, float]], reads: list[str], writes: list[str], m: int
    ) -> None:
        after, self.sent[d] = [self.sent[d]], ""
        work = total_work(works)
        self.builder.op(
            key, compute(d), kind, work=work, reads=reads, writes=writes, after=after, unit=self.stages[d][0].name, m=m
        )

    def _forward(self, d: int, m: int) -> None:
        stage, gpu = self.stages[d], device(d)
        x = [self.arrived["fwd", d, m]] if d else []
        key, between = forward_key(_name(stage), m), sum(u.input_bytes for u in stage[1:])
        inputs = self.builder.buffer(PackActs(_name(stage), m), gpu, between, "acts")  # each unit is recomputed alone
        self.kept[d, m] = [*x, inputs]
        size = max(u.saved_bytes + u.forward_work_bytes for u in stage)
        writes = [self.builder.buffer(Transient(key), gpu, size, "work"), inputs]
        if d < self.n - 1:
            writes.append(
                self.builder.buffer(Input(self.stages[d + 1][0].name, m), gpu, stage[-1].output_bytes, "acts")
            )
        self._op(key, d, "forward", [dict(u.forward) for u in stage], [*self.params[d], *x], writes, m)
        if d < self.n - 1:
            self.arrived["fwd", d + 1, m] = self._send("y", writes[-1], d, d + 1, m)

    def _backward(self, d: int, m: int) -> None:
        stage, gpu, name, x = self.stages[d], device(d), _name(self.stages[d]), self.kept[d, m]
        acts = self.builder.buffer(Transient(recompute_key(name, m)), gpu, max(u.saved_bytes for u in stage), "acts")
        dy = [self.arrived["bwd", d, m]] if d < self.n - 1 else []
        again = [dict(u.forward) for u in stage if u.kind == "block"]  # the head keeps what it saved
        self._op(recompute_key(name, m), d, "recompute", again, [*self.params[d], *x, *dy], [acts], m)
        key = backward_key(name, m)
        old = [self.grads[d]] if d in self.grads else []
        grad_bytes = sum(u.num_trained for u in stage) * self.training.grad_bytes
        content = Gradients(name, device=d)
        self.grads[d] = self.builder.over(old[0]) if old else self.builder.buffer(content, gpu, grad_bytes, "grads")
        work = self.builder.buffer(Transient(key), gpu, max(u.backward_work_bytes for u in stage), "work")
        writes = [work, self.grads[d]]
        if d:
            writes.append(self.builder.buffer(InputGradient(stage[0].name, m), gpu, stage[0].input_bytes, "acts"))
        self._op(
            key, d, "backward", [dict(u.backward) for u in stage], [*self.params[d], *x, acts, *dy, *old], writes, m
        )
        if d:
            self.arrived["bwd", d - 1, m] = self._send("dx", writes[-1], d, d - 1, m)

    def _send(self, what: str, buffer: str, source: int, target: int, m: int) -> str:
        key = op_key(copy_key("send", what), _name(self.stages[source]), micro_batch_name(m))
        arrived = self.builder.like(buffer, device(target))
        size = float(self.builder.buffers[buffer].size_bytes)
        stream, work = (
            (p2p(source, target), {"bytes": size}) if self.has_peer_links else (collective(source), {ring(2): size})
        )
        self.sent[source] = self.builder.op(key, stream, "copy", work=work, reads=(buffer,), writes=(arrived,), m=m)
        return arrived

    def update(self) -> None:
        """Each device updates its units."""
        for d, stage in enumerate(self.stages):
            for k, unit in enumerate(stage):
                homes = [self.params[d][k], self.states[d][k]]
                work = self.training.update_work(unit)
                reads, writes = [self.grads[d], *homes], [self.builder.over(home) for home in homes]
                key = States(unit.name).update_key
                if unit.num_trained:
                    self.builder.op(key, compute(d), "update", work=work, reads=reads, writes=writes, unit=unit.name)


def _name(stage: tuple[Unit, ...]) -> str:
    return pack_name(stage[0].name, stage[-1].name)
