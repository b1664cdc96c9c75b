"""From a plan to a schedule. `lower` takes any kind of plan; those of one device are lowered here. In reading order:

listing    which turn comes when: forwards, backwards and updates of units, compiled
turns      what each kind of turn adds: a forward, a backward, with all that moves for it
updates    the same of updates, on the host and on the device
sketch     how a turn is drawn, and the template that remains of it
templates  what a turn may reach for, and what has been drawn so far
placing    turns put one after the other: which template each is, compiled
known      what was made for one plan and one machine, for the next ones
unitwise   a plan's turns, their templates, and its schedule as columns
tiling     the same step in smaller pieces
launches   the kernels that its units launch, where a machine says what that costs
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

from tierplan.hwmodels.machine import SECONDS, Machine
from tierplan.hwmodels.scaling import rates_of, with_parts
from tierplan.planner.lowering.known import known_columns
from tierplan.planner.lowering.launches import with_launches
from tierplan.planner.lowering.unitwise import unitwise_step
from tierplan.planner.plan import PackPlan, PagedPlan, Plan, UnitwisePlan
from tierplan.planner.plan_rules import PlanError
from tierplan.planner.several_devices.alike import do_the_same, first_for_all
from tierplan.planner.several_devices.packs.by_turns import pack_columns
from tierplan.planner.several_devices.packs.resident import resident_columns
from tierplan.planner.several_devices.packs.unitwise import unitwise_pack_columns
from tierplan.planner.several_devices.paged import paged_columns
from tierplan.planner.several_devices.partition import partition
from tierplan.sim.analysis.ordering import refine_columns
from tierplan.sim.builder import HELD_BYTES, tiers_of
from tierplan.sim.columns import ScheduleColumns, Work
from tierplan.sim.schedule import Schedule, validate
from tierplan.sim.workloads.workload import Workload

__all__ = ["Lowering", "lower"]


class Lowering:
    """Lowers plans of one workload for one machine. What it has drawn for one, it has for the next."""

    def __init__(self, workload: Workload, machine: Machine) -> None:
        self.workload, self.machine = workload, machine
        self._with_launches = cache(partial(with_launches, workload, machine))
        self._first_for_all = cache(partial(first_for_all, machine))

    def simulated(self, plan: Plan) -> tuple[ScheduleColumns, Machine]:
        """Columns, not refined yet, whose steps take as long as those of the plan, and the machine for them: of one
        device where all do the same at once."""
        if not do_the_same(plan) or plan.devices > self.machine.num_devices:
            return self.columns(plan, refine=False), self.machine
        if (machine := self._first_for_all(plan.devices)) is None:
            return self.columns(plan, refine=False), self.machine
        plan.check(self.workload)
        columns = known_columns(_of_the_first, plan, self._with_launches(plan.sharing), machine)
        return _holding(columns, machine), machine

    def columns(self, plan: Plan, *, refine: bool = True) -> ScheduleColumns:
        """As `lower`, without a name being made where one device runs a unit-wise plan."""
        plan.check(self.workload)
        if plan.devices > self.machine.num_devices:
            raise PlanError(
                f"plan {plan.policy!r} wants {plan.devices} devices, but machine {self.machine.name!r} has "
                f"{self.machine.num_devices}"
            )
        workload = self._with_launches(plan.sharing if isinstance(plan, UnitwisePlan) else None)
        match plan:
            case UnitwisePlan():
                if plan.devices > 1:
                    columns = known_columns(_partitioned, plan, workload, self.machine)
                else:
                    columns = unitwise_step(plan, workload).columns(self.machine)
                columns = _holding(columns, self.machine)
                if plan.parts:
                    columns = _held_back(columns, self.machine, with_parts(self.machine, plan.parts))
            case PackPlan():
                make = unitwise_pack_columns if plan.packs.is_executed else pack_columns
                make = resident_columns if plan.packs.stays else make
                columns = known_columns(make, plan, workload, self.machine)
            case PagedPlan():
                columns = known_columns(paged_columns, plan, workload, self.machine)
        if not refine:
            return columns
        return refine_columns(columns, self.machine, overtakes=plan.overtaking)


def _partitioned(plan: UnitwisePlan, workload: Workload, machine: Machine, drawn: int | None = None) -> ScheduleColumns:
    step = unitwise_step(plan, workload)
    one, is_vertical = step.columns(machine), plan.order == "vertical"
    return partition(one, plan.devices, plan.sharing, is_vertical=is_vertical, kinds=step.kinds(), drawn=drawn)


_of_the_first = partial(_partitioned, drawn=1)


def _holding(columns: ScheduleColumns, machine: Machine) -> ScheduleColumns:
    """With seconds in place of bytes for which copies hold their stream: what is known of a schedule has no rates."""

    def in_seconds(work: Work) -> Work:
        if HELD_BYTES not in work.amounts:
            return work
        amounts = dict(work.amounts)
        held = {"bytes": amounts.pop(HELD_BYTES)}
        return Work(work.stream, {**amounts, SECONDS: machine.cost(work.stream, held).work_s})

    holds = any(HELD_BYTES in work.amounts for work in columns.works)
    return replace(columns, works=tuple(map(in_seconds, columns.works))) if holds else columns


def _held_back(columns: ScheduleColumns, machine: Machine, less: Machine) -> ScheduleColumns:
    """What runs on a machine as on one that has less: its tiers, and ops with seconds in which they rest."""
    is_alone = len(columns.streams) == 1

    def longer(work: Work) -> Work:
        has_s, takes_s = (m.cost(work.stream, work.amounts, is_alone=is_alone).alone_s for m in (machine, less))
        rest_s = (takes_s - has_s) * rates_of(machine.stream(work.stream))[SECONDS].at(1.0)
        amounts = {**work.amounts, SECONDS: work.amounts.get(SECONDS, 0.0) + rest_s}
        return Work(work.stream, amounts) if takes_s > has_s else work

    return replace(columns, tiers=tiers_of(less), works=tuple(map(longer, columns.works)))


def lower(plan: Plan, workload: Workload, machine: Machine, *, refine: bool = True) -> Schedule:
    """The schedule of one optimizer step of `plan`, valid and in list order.

    Whether the step fits into memory is the simulator's answer (`OutOfMemory`).

    Parameters
    ----------
    plan, workload, machine
        Raises `PlanError` when they do not fit together.
    refine
        Improves the order by a first simulation on the machine.
    """
    return validate(Lowering(workload, machine).columns(plan, refine=refine).schedule())
