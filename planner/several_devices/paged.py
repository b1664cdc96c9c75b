"""Lowering of paged devices: data parallelism in which weights are paged in and out for every single use.

Each device works through its micro-batches, forward and backward, with recomputation. A unit's weights come in before
each use and go out after it, and so do the gradients that it adds to; a tied head uses the embedding's. The update runs
on the device, where weights, gradients and states come in and weights and states go out; gradients are all-reduced
there. Nothing is prefetched: a page fault comes when the op before has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import HOST, compute, d2h, device, h2d
from tierplan.planner.plan import PagedPlan, facts_of
from tierplan.planner.plan_rules import shared_micro_batches
from tierplan.planner.several_devices.collectives import add_all_reduce
from tierplan.sim.builder import About, Builder, Said, tiers_of
from tierplan.sim.columns import ScheduleColumns, collector_paused
from tierplan.sim.contents import (
    Gradients,
    Input,
    InputGradient,
    Params,
    States,
    Transient,
    backward_key,
    copy_key,
    device_name,
    forward_key,
    micro_batch_name,
    op_key,
)
from tierplan.sim.workloads.work import Amounts, total_work
from tierplan.sim.workloads.workload import Unit, Workload

Numbers = tuple[int, ...]
Used = Mapping[str, Unit]
"""Units whose bytes a unit uses, by what tells that use in keys from their own: nothing for itself."""


def paged_columns(plan: PagedPlan, workload: Workload, machine: Machine) -> ScheduleColumns:
    """The schedule of one step of a plan that has been checked."""
    with collector_paused():
        return _Paged(plan, workload, machine).lowered()


class _Paged(Builder):
    """Builds the schedule in list order, device by device."""

    def __init__(self, plan: PagedPlan, workload: Workload, machine: Machine) -> None:
        super().__init__()
        self.plan, self.workload, self.machine = plan, workload, machine
        self.n, self.by_name = plan.devices, {unit.name: unit for unit in workload.units}
        self.homes: dict[tuple[str, str, int], int] = {}  # (kind, unit, device) -> buffer in host memory
        self.last: list[list[int]] = [[]] * self.n  # by device: the last op that computed, if there was one

    def about(self) -> About:
        facts = facts_of(self.plan, self.workload, self.machine, devices=self.n)
        return f"{self.plan.policy} {self.workload.name}", None, facts

    def lowered(self) -> ScheduleColumns:
        t = self.workload.training
        for unit in self.workload.units:
            for r in range(self.n):
                if size := t.params_bytes(unit):
                    self.homes["params", unit.name, r] = self.home((Params, unit.name, r), HOST, size, "params")
                if size := t.states_bytes(unit):
                    self.homes["states", unit.name, r] = self.home((States, unit.name, 0, 1, r), HOST, size, "states")
        for r, batches in enumerate(shared_micro_batches(self.workload, self.n)):
            for m in batches:
                self._micro_batch(r, m)
        for unit in self.workload.units:
            self._update(unit)
        return self.columns(tiers_of(self.machine), self.about)

    def _used(self, unit: Unit) -> Used:
        """The unit, and the one whose parameters it shares (a tied head: the embedding)."""
        shared = self.by_name.get(unit.shares or "")
        return {"": unit, unit.name: shared} if shared else {"": unit}

    def _page_in(self, kind: str, used: Used, r: int, *use: str) -> dict[str, int]:
        """Bytes of this kind on the device, of those units that have any."""
        pages = {}
        for by, unit in used.items():
            if (home := self.homes.get((kind, unit.name, r))) is not None:
                key = (device_name, (op_key, (copy_key, "fetch", kind), unit.name, *use, by), r)
                pages[by] = self.copy(key, h2d(r), home, device(r), after=self.last[r], unit=unit.name)
        return pages

    def _page_out(self, kind: str, used: Used, r: int, pages: Mapping[str, int], *use: str) -> None:
        """Takes bytes on the device home, over what is there if anything is."""
        for by, here in pages.items():
            name = used[by].name
            key = (device_name, (op_key, (copy_key, "offload", kind), name, *use, by), r)
            over = self.homes.get((kind, name, r))
            self.homes[kind, name, r] = self.copy(key, d2h(r), here, HOST, over=over, after=self.last[r], unit=name)

    def _compute(
        self, key: Said, r: int, kind: str, work: Amounts, reads: Numbers, writes: Numbers, unit: Unit, m: int
    ) -> None:
        """An op that computes on a device, the last one there."""
        op = self.op(key, compute(r), kind, work=work, reads=reads, writes=writes, unit=unit.name, m=m)
        self.last[r] = [op]

    def _micro_batch(self, r: int, m: int) -> None:
        units, gpu = self.workload.units, device(r)
        x: list[int] = []  # inputs of units 1, 2, ...
        use = ("fwd", micro_batch_name(m))
        for u, unit in enumerate(units):
            used = self._used(unit)
            pages = self._page_in("params", used, r, *use)
            out = [self.buffer((Input, v.name, m), gpu, unit.output_bytes, "acts") for v in units[u + 1 : u + 2]]
            key = (forward_key, unit.name, m)
            work = self.buffer((Transient, key), gpu, unit.saved_bytes + unit.forward_work_bytes, "work")
            self._compute(key, r, "forward", unit.forward, (*pages.values(), *x[-1:]), (*out, work), unit, m)
            self._page_out("params", used, r, pages, *use)
            x += out
        dy: list[int] = []
        for u, unit in reversed(list(enumerate(units))):
            dy = self._backward(unit, r, m, x[u - 1 : u] if u else [], dy)

    def _backward(self, unit: Unit, r: int, m: int, x: list[int], dy: list[int]) -> list[int]:
        """One unit's recomputation and backward; the buffer with the gradient of its input."""
        gpu, key, use = device(r), (backward_key, unit.name, m), ("bwd", micro_batch_name(m))
        used = self._used(unit)
        pages, old = self._page_in("params", used, r, *use), self._page_in("grads", used, r, *use)
        dx = [self.buffer((InputGradient, unit.name, m), gpu, unit.input_bytes, "acts")] if x else []
        grads = {}
        for by, owner in used.items():
            if size := owner.num_parameters * self.workload.training.grad_bytes:
                grads[by] = self.buffer((Gradients, owner.name, None, r), gpu, size, "grads", reuses=old.get(by))
        work = self.buffer((Transient, key), gpu, unit.saved_bytes + unit.backward_work_bytes, "work")
        both = total_work((unit.forward, unit.backward))
        reads, writes = (*pages.values(), *x, *dy, *old.values()), (*dx, *grads.values(), work)
        self._compute(key, r, "backward", both, reads, writes, unit, m)
        self._page_out("params", used, r, pages, *use)
        self._page_out("grads", used, r, grads, *use)
        return dx

    def _update(self, unit: Unit) -> None:
        """All-reduces a unit's gradients and updates it, on every device that trained."""
        ranks = [r for r in range(self.n) if ("grads", unit.name, r) in self.homes]
        alone = {"": unit}
        own = {r: self._page_in("grads", alone, r, "update")[""] for r in ranks}
        update_work = self.workload.training.update_work(unit)
        for r in ranks:
            grads, key = own[r], (device_name, op_key("all_reduce", unit.name), r)
            if len(ranks) > 1:
                grads = add_all_reduce(self, key, grads, own.values(), unit=unit.name)
            pages = {kind: self._page_in(kind, alone, r, "update") for kind in ("params", "states")}
            old = [*pages["params"].values(), *pages["states"].values()]
            new = {kind: {by: self.over(page) for by, page in old_pages.items()} for kind, old_pages in pages.items()}
            writes = (*new["params"].values(), *new["states"].values())
            update = (attrgetter("update_key"), (States, unit.name, 0, 1, r))
            self._compute(update, r, "update", update_work, (grads, *old), writes, unit, 0)
            for kind, new_pages in new.items():
                self._page_out(kind, alone, r, new_pages, "update")
