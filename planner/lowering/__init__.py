"""From a plan to a schedule. `lower` takes any kind of plan; those of one device are lowered here:

compute_order  which unit's forward or backward comes when
unitwise       the walk over that order: parameters, saved tensors, inputs
updates        gradients: adding up, clipping, the optimizer step and what moves for it
tiling         the same step in smaller pieces
list_order     ops in the order in which a first simulation finds them ready
"""

from __future__ import annotations

from tierplan.hwmodels.machine import Machine
from tierplan.planner.lowering.list_order import refine_order
from tierplan.planner.lowering.unitwise import unitwise_schedule
from tierplan.planner.plan import PackPlan, PagedPlan, Plan, PlanError, UnitwisePlan
from tierplan.planner.several_devices.packs import pack_schedule
from tierplan.planner.several_devices.packs_unitwise import unitwise_pack_schedule
from tierplan.planner.several_devices.paged import paged_schedule
from tierplan.planner.several_devices.partition import partition
from tierplan.sim.schedule import Schedule, validate
from tierplan.sim.workloads.workload import Workload

__all__ = ["lower"]


def lower(plan: Plan, workload: Workload, machine: Machine, *, refine: bool = True) -> Schedule:
    """The schedule of one optimizer step of `plan`, valid and in list order.

    `refine` improves the order by a first simulation on the machine. Raises `PlanError` when plan, workload and machine
    do not fit together. Whether the step fits into memory is the simulator's answer (`OutOfMemory`).
    """
    plan.check(workload)
    if plan.devices > machine.num_devices:
        raise PlanError(
            f"plan {plan.policy!r} wants {plan.devices} devices, but machine {machine.name!r} has {machine.num_devices}"
        )
    match plan:
        case UnitwisePlan():
            schedule = unitwise_schedule(plan, workload, machine)
            if plan.devices > 1:
                schedule = partition(schedule, plan.devices)
        case PackPlan():
            make = pack_schedule if plan.devices > 1 else unitwise_pack_schedule
            schedule = make(plan, workload, machine)
        case PagedPlan():
            schedule = paged_schedule(plan, workload, machine)
    if refine:
        schedule = refine_order(schedule, machine, num_devices=plan.devices)
    return validate(schedule)
