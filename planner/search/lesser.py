"""Better machines have the answers of lesser ones: which those are, and memory that no plan can use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tierplan.hwmodels.catalog import catalog_names, load_machine
from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.scaling import lesser, with_capacity
from tierplan.planner.milp.amounts import Problem
from tierplan.planner.milp.bounds import Bound
from tierplan.planner.plan import Plan, UnitwisePlan
from tierplan.planner.results import PlanResult
from tierplan.sim.workloads.workload import Workload

NO_PRICE, WORTH_DRIVES = 1e-9, 1e-3
"""Seconds per GB of host memory, and share of the bound: where memory is worth no more by the bound, and drives take no
more off it, plans do without drives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The best plan for a machine, and the micro-batches it is for."""

    machine: Machine
    plan: Plan
    batch: int
    accumulation: int

    is_cut: bool = False
    """The search was interrupted; `note` says it."""
    note: str = ""

    @classmethod
    def of(cls, machine: Machine, workload: Workload, result: PlanResult) -> Known:
        training, is_cut = workload.training, result.status == "interrupted"
        batch, accumulation = training.per_device_train_batch_size, training.gradient_accumulation_steps
        note = result.notes[-1] if is_cut else ""
        return cls(machine=machine, plan=result.plan, batch=batch, accumulation=accumulation, is_cut=is_cut, note=note)

    def divided(self, batch: int, accumulation: int, sub_batches: int) -> Known:
        """About the same work in other micro-batches, which are cut into so many; it may take a little more memory."""
        plan = replace(self.plan, sub_batches=sub_batches) if isinstance(self.plan, UnitwisePlan) else self.plan
        return replace(self, plan=plan, batch=batch, accumulation=accumulation)

    def is_of(self, machine: Machine) -> bool:
        """Whether it was planned for a machine that is the same in all that a plan can meet."""
        own = self.machine
        return (own.tiers, own.streams, own.shared_limits) == (machine.tiers, machine.streams, machine.shared_limits)


def lesser_of_catalog(machine: Machine) -> Machine | None:
    """The machine without what it has more of than the catalog's of this name; None where it has nothing more.

    Where a device would be a card that nobody has, as slow as one card at some work and as the other at other work, it
    is the machine's own: only what is beside it is less. So are all devices of a machine that has more of them than the
    catalog's: the others would be unlike those that both have.
    """
    if machine.name not in catalog_names():
        return None
    less = lesser(machine, base := load_machine(machine.name))
    of_base = {s.name: s.rates for s in base.streams}
    own_tiers, own_streams = {t.name: t for t in machine.tiers}, {s.name: s for s in machine.streams}
    own_limits = {x.name: x for x in machine.shared_limits}
    mixed = {
        one.name.split(".")[0]
        for one in less.streams
        if one.rates != own_streams[one.name].rates
        and any(rate != of_base.get(one.name, {}).get(kind) for kind, rate in one.rates.items())
    }
    if machine.num_devices > base.num_devices:
        mixed |= {t.name for t in machine.tiers if t.kind == "device"}
    tiers = tuple(own_tiers[one.name] if one.name in mixed else one for one in less.tiers)
    streams = tuple(own_streams[one.name] if one.name.split(".")[0] in mixed else one for one in less.streams)
    limits = tuple(own_limits[one.name] if one.name.split(".")[0] in mixed else one for one in less.shared_limits)
    less = replace(less, tiers=tiers, streams=streams, shared_limits=limits)
    return None if less == machine else less


def without_excess(machine: Machine, workload: Workload) -> Machine:
    """The machine with no more host and device memory than all that a step makes and holds.

    What is beyond changes no plan, but numbers in the planning program, and so which of equal plans it finds. A tier
    that rounds what it holds may need more.
    """
    most, tiers = most_bytes(workload, machine.num_devices), machine.tiers
    some = (t for t in tiers if t.kind != "nvme" and t.rounding == "exact")
    return with_capacity(machine, {t.name: min(t.capacity_bytes, most) for t in some})


def needs_no_drives(machine: Machine, workload: Workload) -> bool:
    """Whether host memory has room for all that a step makes and holds: then drives are only a longer way to it."""
    most = most_bytes(workload, machine.num_devices)
    return any(t.kind == "host" and t.rounding == "exact" and t.capacity_bytes >= most for t in machine.tiers)


def off_idle_drives(p: Problem, bound: Bound, bounded: Callable[[Problem], Bound]) -> tuple[Problem, Bound]:
    """The problem without drives, and its bound, where that is hardly higher and host memory is not short: drives would
    be no more than a longer way there, and more to search. Else the same."""
    if p.has_nvme and bound.s_per_gb.get("host", 0.0) <= NO_PRICE:
        other = bounded(without := replace(p, has_nvme=False))
        if other.feasible and other.model and other.searched_s <= bound.searched_s * (1 + WORTH_DRIVES):
            return without, other
    return p, bound


def most_bytes(workload: Workload, num_devices: int) -> int:
    """No less than all that a step makes and holds at a time, where each device may have all states (paged)."""
    training = workload.training
    passes = training.gradient_accumulation_steps * num_devices
    held = sum(u.num_trained * (2 * training.param_bytes + 4) + u.frozen_bytes for u in workload.units)
    made = workload.shared_bytes + sum(
        u.saved_bytes + 2 * u.input_bytes + u.output_bytes + u.forward_work_bytes + u.backward_work_bytes
        for u in workload.units
    )
    return num_devices * (held + workload.states_bytes) + passes * made
