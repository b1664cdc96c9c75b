"""One scenario of a study, simulated, as a row of figures.

Columns have the names of `tierplan simulate --json`. A nested table (`peak_bytes`, `bytes`, `utilization`) becomes
columns such as `peak_bytes.gpu0`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tierplan.hwmodels import load_machine
from tierplan.hwmodels.machine import Machine
from tierplan.planner.plan import PLANNER
from tierplan.planner.prediction import Prediction, predict, predicted
from tierplan.sim.workloads.workload import Training, Workload
from tierplan.studies.defaults import default_backend, default_precision, load_or_trace
from tierplan.studies.study import Point

__all__ = ["evaluate", "evaluate_point", "training_for"]

LEFT_OUT = ("policy", "model", "machine", "options", "semantics", "shortage")
"""Of a prediction's record: columns of the point, and what is no figure."""


def evaluate(
    workload: Workload, machine: Machine, policy: str = PLANNER, options: Mapping[str, Any] | None = None
) -> Prediction:
    """What a policy, or the planner, makes of the workload on the machine.

    That something does not fit is an answer. An unknown policy or option raises `PlanError`.
    """
    if policy != PLANNER:
        return predict(policy, workload, machine, options)
    from tierplan.planner.infeasible import InfeasiblePlan
    from tierplan.planner.planning import plan

    try:
        planned = plan(workload, machine, **(options or {}))
    except InfeasiblePlan as error:
        return Prediction(policy=PLANNER, model=workload.name, machine=machine.name, plan=None, why_not=error.what)
    return predicted(planned.plan, planned.schedule, planned.steady, workload, machine)


def evaluate_point(point: Point) -> dict[str, object]:
    """The figures of one point of a study. Raises what reading its model or machine raises."""
    overrides = tuple(f"{key}={value}" for key, value in point.overrides.items())
    machine = load_machine(point.machine, overrides)
    workload = load_or_trace(point.model, training_for(point, machine))
    options: dict[str, object] = {"semantics": point.semantics} if point.semantics else {}
    if point.policy == PLANNER:
        options["time_limit_s"] = point.planner_s
    return _flat(evaluate(workload, machine, point.policy, options).record())


def _flat(record: Mapping[str, object]) -> dict[str, object]:
    row: dict[str, object] = {}
    for name, value in record.items():
        if name in LEFT_OUT:
            continue
        if isinstance(value, Mapping):
            row |= {f"{name}.{key}": figure for key, figure in value.items()}
        elif value is not None:
            row[name] = value
    return row


def training_for(point: Point, machine: Machine) -> Training:
    """The training settings of a point, with `auto` resolved against the machine."""
    return Training(
        per_device_train_batch_size=point.batch,
        gradient_accumulation_steps=point.accumulation,
        sequence_length=point.seq,
        dtype=default_precision(machine) if point.dtype == "auto" else point.dtype,  # type: ignore[arg-type]
        attention=point.attention,  # type: ignore[arg-type]
        max_grad_norm=point.max_grad_norm,
        backend=default_backend(machine),
    )
