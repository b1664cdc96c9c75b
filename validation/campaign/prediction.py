"""The prediction of one run of a campaign: its plan, its budgets, its schedule, its step time."""

from __future__ import annotations

from dataclasses import dataclass

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import DEVICE, HOST
from tierplan.hwmodels.scaling import with_ample_memory, with_capacity
from tierplan.planner.plan_rules import PLANNER
from tierplan.planner.planning import plan
from tierplan.planner.policies import decide
from tierplan.sim.analysis.steady import SteadyState, steady_state
from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.workload import Workload
from tierplan.validation.calibration.budgets import capacity_for, peak_bytes, raise_capacities, with_room
from tierplan.validation.campaign.spec import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrediction:
    """The schedule of a run, and its simulation."""

    machine: Machine
    """With the run's budgets."""
    schedule: Schedule
    steady: SteadyState


def predict_run(run: Run, workload: Workload, machine: Machine) -> RunPrediction:
    """The prediction of a run within its budgets. Raises `PlanError` or `OutOfMemory` where no plan fits."""
    if run.policy == PLANNER:
        machine = _planner_budgets(run, workload, machine)
        # Sub-batches would run at sizes that were not profiled. Without "vertical", micro-batches are not cut.
        orders = ("horizontal",) if run.accumulation == 1 else ("horizontal", "vertical")
        planned = plan(workload, machine, orders=orders, **dict(run.options))  # type: ignore[arg-type]
        held = planned.steady.peak_bytes
        schedule = with_room(planned.schedule, {tier: held[tier] for tier in (DEVICE, HOST)})
        steady = steady_state(schedule, machine)
        return RunPrediction(machine=machine, schedule=schedule, steady=steady)
    ample = with_ample_memory(machine)
    decided = decide(run.policy, workload, ample, run.options)
    budgets: dict[str, int] = {}
    for tier, level in ((DEVICE, run.device), (HOST, run.host)):
        budgets[tier] = capacity_for(level, tier, decided, workload, with_capacity(ample, budgets))
    machine, schedule, steady = raise_capacities(decided, workload, with_capacity(machine, budgets))
    return RunPrediction(machine=machine, schedule=schedule, steady=steady)


def _planner_budgets(run: Run, workload: Workload, machine: Machine) -> Machine:
    """The machine with budgets that are fractions of the device memory that plain training takes."""
    ample = with_ample_memory(machine)
    plain_bytes = peak_bytes(DEVICE, decide("in-memory", workload, ample, {}), workload, ample)
    budgets: dict[str, int] = {}
    for tier, level in ((DEVICE, run.device), (HOST, run.host)):
        frac = {"roomy": 1.05}.get(level) or float(level)
        budgets[tier] = int(plain_bytes * frac)
    return with_capacity(machine, budgets)
