"""What a campaign asks for, looked at before its first run starts: a mistake is told now, and not hours later."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from tierplan.hwmodels.catalog import load_machine
from tierplan.hwmodels.machine import MachineError
from tierplan.hwmodels.scaling import with_ample_memory, with_capacity
from tierplan.hwmodels.values.arguments import checked
from tierplan.planner.infeasible import InfeasiblePlan
from tierplan.planner.plan_rules import PLANNER, PlanError
from tierplan.planner.planning import plan
from tierplan.planner.policies import decide
from tierplan.planner.policies.options import OptionError
from tierplan.runtime.tracing.trace import trace_config
from tierplan.sim.workloads.workload import Training, Workload
from tierplan.validation.campaign.spec import CampaignError, Group, Run

ANY_MACHINE = "laptop"
"""Of the catalog, with one GPU and a drive: which options a policy has, no machine changes."""


def check_runs(group: Group, runs: Iterable[Run], device: str) -> None:
    """Raises `CampaignError` unless the group has a model, its policies exist, and they take these options.

    Whether a run has room on the machine is found in its turn: that it has not is an answer, too.
    """
    smallest: Workload | None = None
    for run in runs:
        try:
            training = training_of_run(group, run, device)
            smallest = smallest or _smallest(group, training)
            workload = replace(smallest, training=training)
            if run.policy == PLANNER:
                _check_planner(workload, run)
            else:
                with suppress(MachineError):
                    decide(run.policy, workload, with_ample_memory(load_machine(ANY_MACHINE)), run.options)
        except (ValueError, TypeError) as error:
            if not isinstance(error, PlanError) or isinstance(error, OptionError) or run.policy == PLANNER:
                raise CampaignError(f"run {run.name!r} of group {group.name!r}: {error}") from error


def _smallest(group: Group, training: Training) -> Workload:
    """Of the group's models, the one with a block."""
    one, two = (trace_config(group.name, group.model_config(num), training) for num in (1, 2))
    if one.num_parameters == two.num_parameters:
        raise CampaignError(
            f"depth_key {group.depth_key!r} does not change the model's depth; give the name that its config has for it"
        )
    return one


def _check_planner(workload: Workload, run: Run) -> None:
    machine = load_machine(ANY_MACHINE)
    without = with_capacity(machine, {tier.name: 0 for tier in machine.tiers})  # so that nothing is searched
    with suppress(InfeasiblePlan):
        checked(plan, "tierplan.plan")(workload, without, orders=("horizontal",), **dict(run.options))  # type: ignore[arg-type]


def training_of_run(group: Group, run: Run, device: str) -> Training:
    """What a run of the group trains."""
    settings: dict[str, Any] = {"dtype": group.dtype, "backend": "cuda" if device.startswith("cuda") else "cpu"}
    return Training(
        per_device_train_batch_size=group.batch,
        gradient_accumulation_steps=run.accumulation,
        sequence_length=group.seq,
        master_weights=group.dtype != "fp32",
        max_grad_norm=run.max_grad_norm,
        **settings,
    )
