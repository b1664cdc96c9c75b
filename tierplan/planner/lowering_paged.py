"""Lowering of paged devices: data parallelism in which weights are paged in and out for every single use.

Each device works through its micro-batches, forward and backward, with recomputation. A unit's weights come in before
each use and go out after it, and once more for the update on the device. Gradients and states are paged as well in
such systems; that traffic is not modelled, so the step time is a lower estimate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace

from tierplan.hwmodels.machine import Machine
from tierplan.planner.plan import Plan
from tierplan.planner.refine import order_under_contention
from tierplan.sim.schedule import Buffer, Op, Schedule, Tier, validate
from tierplan.sim.workload import Unit, Workload

__all__ = ["lower_paged"]

HOST = "host"


def lower_paged(plan: Plan, workload: Workload, machine: Machine) -> Schedule:
    """The schedule of one step: `plan.paged_devices` devices, which share the micro-batches."""
    return validate(order_under_contention(_Paged(plan, workload, machine).schedule(), machine))


class _Paged:
    def __init__(self, plan: Plan, workload: Workload, machine: Machine) -> None:
        self.plan, self.workload, self.machine = plan, workload, machine
        self.n = plan.paged_devices
        self.buffers: dict[str, Buffer] = {}
        self.ops: list[Op] = []
        self.home: dict[tuple[str, int], str] = {}
        self.version: dict[str, int] = {}
        self.last: list[str] = [""] * self.n

    def schedule(self) -> Schedule:
        t = self.workload.training
        for unit in self.workload.units:
            for r in range(self.n):
                if unit.num_parameters:
                    size = unit.num_parameters * t.param_bytes
                    self.home[unit.name, r] = self.buffer(
                        f"params/{unit.name}/gpu{r}", HOST, size, "params", initial=True
                    )
        total = t.gradient_accumulation_steps
        for r in range(self.n):
            for m in range(r * total // self.n, (r + 1) * total // self.n):
                self._micro_batch(r, m)
        for unit in self.workload.units:
            for r in range(self.n):
                self._update(unit, r)
        becomes = {name: f"params/{unit}/gpu{r}@{HOST}#0" for (unit, r), name in self.home.items()}
        return Schedule(
            name=f"{self.plan.policy} {self.workload.name}",
            tiers=tuple(Tier(name=t.name, capacity_bytes=t.capacity_bytes) for t in self.machine.tiers),
            buffers=tuple(replace(b, becomes=becomes.get(b.name)) for b in self.buffers.values()),
            ops=tuple(self.ops),
            meta={"policy": self.plan.policy, "semantics": self.plan.semantics, "model": self.workload.name,
                  "machine": self.machine.name, "training": asdict(t), "devices": self.n},
        )  # fmt: skip

    def buffer(
        self, content: str, tier: str, size: int, kind: str, *, initial: bool = False, reuses: str | None = None
    ) -> str:
        count = self.version[f"{content}@{tier}"] = self.version.get(f"{content}@{tier}", -1) + 1
        name = f"{content}@{tier}#{count}"
        self.buffers[name] = Buffer(name=name, tier=tier, size_bytes=size, content=content, kind=kind,
                                    initial=initial, reuses=reuses)  # fmt: skip
        return name

    def op(self, key: str, stream: str, kind: str, work: Mapping[str, float], reads: Iterable[str],
           writes: Iterable[str], *, after: Iterable[str] = (), unit: str = "", m: int = 0) -> str:  # fmt: skip
        self.ops.append(Op(key=key, stream=stream, kind=kind, unit=unit, micro_batch=m, work=dict(work),
                           reads=tuple(reads), writes=tuple(writes), after=tuple(a for a in after if a)))  # fmt: skip
        return key

    def _page_in(self, unit: Unit, r: int, what: str) -> str | None:
        """Weights come in when the op before has ended: a page fault knows of no prefetching."""
        if not unit.num_parameters:
            return None
        home = self.home[unit.name, r]
        b = self.buffers[home]
        here = self.buffer(b.content, f"gpu{r}", b.size_bytes, "params")
        work = {"bytes": b.size_bytes}
        self.op(f"fetch_params/{unit.name}/{what}/gpu{r}", f"gpu{r}.h2d", "copy", work, (home,), (here,),
                after=(self.last[r],), unit=unit.name)  # fmt: skip
        return here

    def _page_out(self, unit: Unit, r: int, what: str, here: str | None) -> None:
        if here is None:
            return
        home = self.home[unit.name, r]
        b = self.buffers[home]
        self.home[unit.name, r] = self.buffer(b.content, HOST, b.size_bytes, "params", reuses=home)
        self.op(f"offload_params/{unit.name}/{what}/gpu{r}", f"gpu{r}.d2h", "copy", {"bytes": b.size_bytes},
                (here, home), (self.home[unit.name, r],), after=(self.last[r],), unit=unit.name)  # fmt: skip

    def _micro_batch(self, r: int, m: int) -> None:
        units, gpu = self.workload.units, f"gpu{r}"
        x: list[str] = []
        for u, unit in enumerate(units):
            here = self._page_in(unit, r, f"fwd/mb{m}")
            out = (
                [self.buffer(f"x/{units[u + 1].name}/mb{m}", gpu, unit.output_bytes, "acts")]
                if u + 1 < len(units)
                else []
            )
            reads = [*([here] if here else []), *x[-1:]]
            key = f"fwd/{unit.name}/mb{m}"
            work = self.buffer(f"work/{key}", gpu, unit.saved_bytes + unit.forward_work_bytes, "work")
            self.last[r] = self.op(
                key, f"{gpu}.compute", "forward", unit.forward, reads, (*out, work), unit=unit.name, m=m
            )
            self._page_out(unit, r, f"fwd/mb{m}", here)
            x += out
        dy: list[str] = []
        for u, unit in reversed(list(enumerate(units))):
            here = self._page_in(unit, r, f"bwd/mb{m}")
            reads = [*([here] if here else []), *x[u - 1 : u], *dy]
            dx = [self.buffer(f"dx/{unit.name}/mb{m}", gpu, unit.input_bytes, "acts")] if u else []
            key = f"bwd/{unit.name}/mb{m}"
            size = unit.saved_bytes + unit.backward_work_bytes + unit.num_parameters * self.workload.training.grad_bytes
            work = self.buffer(f"work/{key}", gpu, size, "work")
            total = {k: unit.forward.get(k, 0.0) + unit.backward.get(k, 0.0) for k in {**unit.forward, **unit.backward}}
            self.last[r] = self.op(key, f"{gpu}.compute", "backward", total, reads, (*dx, work), unit=unit.name, m=m)
            self._page_out(unit, r, f"bwd/mb{m}", here)
            dy = dx

    def _update(self, unit: Unit, r: int) -> None:
        here = self._page_in(unit, r, "update")
        if here is None:
            return
        b = self.buffers[here]
        new = self.buffer(b.content, b.tier, b.size_bytes, "params", reuses=here)
        t = self.workload.training
        moved = unit.num_parameters * (2 * t.state_bytes + t.grad_bytes + 2 * t.param_bytes)
        key, work = f"update/{unit.name}/gpu{r}", {"elementwise_bytes": moved}
        self.last[r] = self.op(key, f"gpu{r}.compute", "update", work,
                               (here,), (new,), unit=unit.name)  # fmt: skip
        self._page_out(unit, r, "update", new)
