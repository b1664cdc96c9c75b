"""From a plan to a schedule. `lower` takes any kind of plan; those of one device are lowered here. In reading order:

listing    which turn comes when: forwards, backwards and updates of units, compiled
turns      what each kind of turn adds: a forward, a backward, an update, with all that moves for it
sketch     how a turn is drawn, and the template that remains of it
templates  what a turn may reach for, and what has been drawn so far
placing    turns put one after the other: which template each is, compiled
unitwise   a plan's turns, their templates, and its schedule as columns
tiling     the same step in smaller pieces
launches   the kernels that its units launch, where a machine says what that costs
"""

from __future__ import annotations

from dataclasses import replace

from tierplan.hwmodels.machine import SECONDS, Machine
from tierplan.hwmodels.scaling import rates_of, with_parts
from tierplan.planner.lowering.launches import with_launches
from tierplan.planner.lowering.unitwise import Chains, chains_of, unitwise_columns, unitwise_step
from tierplan.planner.plan import PackPlan, PagedPlan, Plan, Sharing, UnitwisePlan
from tierplan.planner.plan_rules import PlanError
from tierplan.planner.several_devices.alike import do_the_same, first_for_all
from tierplan.planner.several_devices.known import known_columns
from tierplan.planner.several_devices.packs.by_turns import pack_columns
from tierplan.planner.several_devices.packs.resident import resident_columns
from tierplan.planner.several_devices.packs.unitwise import unitwise_pack_columns
from tierplan.planner.several_devices.paged import paged_columns
from tierplan.planner.several_devices.partition import partition
from tierplan.sim.analysis.ordering import refine_columns
from tierplan.sim.builder import tiers_of
from tierplan.sim.columns import ScheduleColumns, Work
from tierplan.sim.schedule import Schedule, validate
from tierplan.sim.workloads.workload import Workload

__all__ = ["Lowering", "lower"]


class Lowering:
    """Lowers plans of one workload for one machine. What it has drawn for one, it has for the next."""

    def __init__(self, workload: Workload, machine: Machine) -> None:
        self.workload, self.machine = workload, machine
        self._launching: dict[Sharing | None, tuple[Workload, Chains]] = {}
        self._first_for_all: dict[int, Machine | None] = {}

    def simulated(self, plan: Plan) -> tuple[ScheduleColumns, Machine]:
        """Columns, not refined yet, whose steps take as long as those of the plan, and the machine for them: of one
        device where all do the same at once."""
        if do_the_same(plan) and plan.devices <= self.machine.num_devices:
            if plan.devices not in self._first_for_all:
                self._first_for_all[plan.devices] = first_for_all(self.machine, plan.devices)
            if (machine := self._first_for_all[plan.devices]) is not None:
                plan.check(self.workload)
                workload, _ = self._with_launches(plan.sharing)
                return known_columns(_of_the_first, plan, workload, machine), machine
        return self.columns(plan, refine=False), self.machine

    def columns(self, plan: Plan, *, refine: bool = True) -> ScheduleColumns:
        """As `lower`, without a name being made where one device runs a unit-wise plan."""
        plan.check(self.workload)
        if plan.devices > self.machine.num_devices:
            raise PlanError(
                f"plan {plan.policy!r} wants {plan.devices} devices, but machine {self.machine.name!r} has "
                f"{self.machine.num_devices}"
            )
        workload, chains = self._with_launches(plan.sharing if isinstance(plan, UnitwisePlan) else None)
        match plan:
            case UnitwisePlan():
                if plan.devices > 1:
                    columns = known_columns(_partitioned, plan, workload, self.machine)
                else:
                    columns = unitwise_columns(plan, workload, self.machine, chains)
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

    def _with_launches(self, sharing: Sharing | None) -> tuple[Workload, Chains]:
        if sharing not in self._launching:
            workload = with_launches(self.workload, self.machine, sharing)
            self._launching[sharing] = workload, chains_of(workload)
        return self._launching[sharing]


def _partitioned(plan: UnitwisePlan, workload: Workload, machine: Machine, drawn: int | None = None) -> ScheduleColumns:
    step = unitwise_step(plan, workload, chains_of(workload))
    one, is_vertical = step.columns(machine), plan.order == "vertical"
    return partition(one, plan.devices, plan.sharing, is_vertical=is_vertical, kinds=step.kinds(), drawn=drawn)


def _of_the_first(plan: UnitwisePlan, workload: Workload, machine: Machine) -> ScheduleColumns:
    return _partitioned(plan, workload, machine, drawn=1)


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
