"""Lowering of paged devices: data parallelism in which weights are paged in and out for every single use.

Each device works through its micro-batches, forward and backward, with recomputation. A unit's weights come in before
each use and go out after it, and so do the gradients that it adds to. The update runs on the device, where weights,
gradients and states come in and weights and states go out; gradients are all-reduced there. Nothing is prefetched: a
page fault comes when the op before has ended.
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
        self.home: dict[tuple[str, str, int], str] = {}  # (kind, unit, device) -> buffer in host memory
        self.becomes: dict[str, str] = {}
        self.version: dict[str, int] = {}
        self.last: list[str] = [""] * self.n

    def schedule(self) -> Schedule:
        t = self.workload.training
        for unit in self.workload.units:
            for r in range(self.n):
                for kind, per_parameter in (("params", t.param_bytes), ("states", t.state_bytes)):
                    if size := unit.num_parameters * per_parameter:
                        home = self.buffer(f"{kind}/{unit.name}/gpu{r}", HOST, size, kind, initial=True)
                        self.home[kind, unit.name, r] = self.becomes[home] = home
        total = t.gradient_accumulation_steps
        for r in range(self.n):
            for m in range(r * total // self.n, (r + 1) * total // self.n):
                self._micro_batch(r, m)
        for unit in self.workload.units:
            self._update(unit)
        return Schedule(
            name=f"{self.plan.policy} {self.workload.name}",
            tiers=tuple(Tier(name=t.name, capacity_bytes=t.capacity_bytes) for t in self.machine.tiers),
            buffers=tuple(replace(b, becomes=self.becomes.get(b.name)) for b in self.buffers.values()),
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

    def _page_in(self, kind: str, unit: Unit, r: int, what: str) -> list[str]:
        """The unit's bytes of this kind on the device; none where it has none."""
        home = self.home.get((kind, unit.name, r))
        if home is None:
            return []
        b = self.buffers[home]
        here = self.buffer(b.content, f"gpu{r}", b.size_bytes, kind)
        self.op(f"fetch_{kind}/{unit.name}/{what}/gpu{r}", f"gpu{r}.h2d", "copy", {"bytes": b.size_bytes},
                (home,), (here,), after=(self.last[r],), unit=unit.name)  # fmt: skip
        return [here]

    def _page_out(self, kind: str, unit: Unit, r: int, what: str, pages: list[str]) -> None:
        """Takes bytes on the device home, over what is there if anything is."""
        for here in pages:
            b, over = self.buffers[here], self.home.get((kind, unit.name, r))
            new = self.buffer(b.content, HOST, b.size_bytes, kind, reuses=over)
            if over in self.becomes:
                self.becomes[new] = self.becomes.pop(over)
            self.home[kind, unit.name, r] = new
            self.op(f"offload_{kind}/{unit.name}/{what}/gpu{r}", f"gpu{r}.d2h", "copy", {"bytes": b.size_bytes},
                    (here, *([over] if over else [])), (new,), after=(self.last[r],), unit=unit.name)  # fmt: skip

    def _micro_batch(self, r: int, m: int) -> None:
        units, gpu = self.workload.units, f"gpu{r}"
        x: list[str] = []  # inputs of units 1, 2, ...
        for u, unit in enumerate(units):
            pages = self._page_in("params", unit, r, f"fwd/mb{m}")
            out = [self.buffer(f"x/{v.name}/mb{m}", gpu, unit.output_bytes, "acts") for v in units[u + 1 : u + 2]]
            key = f"fwd/{unit.name}/mb{m}"
            work = self.buffer(f"work/{key}", gpu, unit.saved_bytes + unit.forward_work_bytes, "work")
            self.last[r] = self.op(key, f"{gpu}.compute", "forward", unit.forward, (*pages, *x[-1:]), (*out, work),
                                   unit=unit.name, m=m)  # fmt: skip
            self._page_out("params", unit, r, f"fwd/mb{m}", pages)
            x += out
        dy: list[str] = []
        for u, unit in reversed(list(enumerate(units))):
            dy = self._backward(unit, r, m, x[u - 1 : u] if u else [], dy)

    def _backward(self, unit: Unit, r: int, m: int, x: list[str], dy: list[str]) -> list[str]:
        """One unit's recomputation and backward; the buffer with the gradient of its input."""
        gpu, key, what = f"gpu{r}", f"bwd/{unit.name}/mb{m}", f"bwd/mb{m}"
        pages, old = self._page_in("params", unit, r, what), self._page_in("grads", unit, r, what)
        dx = [self.buffer(f"dx/{unit.name}/mb{m}", gpu, unit.input_bytes, "acts")] if x else []
        size = unit.num_parameters * self.workload.training.grad_bytes
        grads = []
        if size:
            grads = [self.buffer(f"grads/{unit.name}/{gpu}", gpu, size, "grads", reuses=old[0] if old else None)]
        work = self.buffer(f"work/{key}", gpu, unit.saved_bytes + unit.backward_work_bytes, "work")
        total = {k: unit.forward.get(k, 0.0) + unit.backward.get(k, 0.0) for k in {**unit.forward, **unit.backward}}
        self.last[r] = self.op(key, f"{gpu}.compute", "backward", total, (*pages, *x, *dy, *old), (*dx, *grads, work),
                               unit=unit.name, m=m)  # fmt: skip
        self._page_out("params", unit, r, what, pages)
        self._page_out("grads", unit, r, what, grads)
        return dx

    def _update(self, unit: Unit) -> None:
        """All-reduces a unit's gradients and updates it, on every device that trained."""
        if not unit.num_parameters:
            return
        ranks = [r for r in range(self.n) if ("grads", unit.name, r) in self.home]
        own = {r: self._page_in("grads", unit, r, "update")[0] for r in ranks}
        t = self.workload.training
        moved = unit.num_parameters * (2 * t.state_bytes + t.grad_bytes + 2 * t.param_bytes)
        for r in ranks:
            reads = [own[r]]
            if len(ranks) > 1:
                b = self.buffers[own[r]]
                reads = [self.buffer(b.content, b.tier, b.size_bytes, "grads")]
                work = {"bytes": 2 * (len(ranks) - 1) / len(ranks) * b.size_bytes}
                self.op(f"all_reduce/{unit.name}/gpu{r}", f"gpu{r}.p2p.gpu{(r + 1) % self.n}", "all_reduce", work,
                        own.values(), reads, unit=unit.name)  # fmt: skip
            pages = {kind: self._page_in(kind, unit, r, "update") for kind in ("params", "states")}
            old = [*pages["params"], *pages["states"]]
            new = {
                kind: [self.buffer(self.buffers[x].content, f"gpu{r}", self.buffers[x].size_bytes, kind, reuses=x)
                       for x in found]
                for kind, found in pages.items()
            }  # fmt: skip
            self.last[r] = self.op(f"update/{unit.name}/gpu{r}", f"gpu{r}.compute", "update",
                                   {"elementwise_bytes": moved}, (*reads, *old), (*new["params"], *new["states"]),
                                   unit=unit.name)  # fmt: skip
            for kind, found in new.items():
                self._page_out(kind, unit, r, "update", found)
