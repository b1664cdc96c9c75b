"""One scenario of a study, answered by the simulator, as a row of figures.

A row has the names of `tierplan simulate --json`; what is a table there (`peak_bytes`, `bytes`, `utilization`) becomes
columns such as `peak_bytes.gpu0`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from tierplan.hwmodels import load_machine
from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import COMPUTE, CORES_LIMIT
from tierplan.planner.plan import PLANNER
from tierplan.planner.prediction import Prediction, predict, predicted
from tierplan.sim.workloads.models import SUPPORTED, read_config, workload_of
from tierplan.sim.workloads.workload import Training, Workload
from tierplan.studies.study import Point

__all__ = ["evaluate", "evaluate_point", "training_for"]

PRECISIONS = ("bf16", "fp16", "fp32")
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
    from tierplan.planner.solve import plan

    try:
        found = plan(workload, machine, **(options or {}))
    except InfeasiblePlan as error:
        return Prediction(policy=PLANNER, model=workload.name, machine=machine.name, plan=None, why_not=error.what)
    return predicted(found.plan, found.schedule, found.steady, workload, machine)


def evaluate_point(point: Point) -> dict[str, object]:
    """The figures of one point of a study. Raises what reading its model or machine raises."""
    overrides = tuple(f"{key}={value}" for key, value in point.overrides.items())
    machine = load_machine(point.machine, overrides)
    workload = _workload(point.model, training_for(point, machine))
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


def _workload(model: str, training: Training) -> Workload:
    """By closed forms; a family that has none is run on fake tensors, where torch is there to do so."""
    name, config = read_config(model, training)
    if config["model_type"] in SUPPORTED or not (find_spec("torch") and find_spec("transformers")):
        return workload_of(name, config, training)
    return _traced(name, json.dumps(config), training)


@lru_cache(maxsize=64)
def _traced(name: str, config: str, training: Training) -> Workload:
    """Takes seconds, so it is kept: by the config's text, since a file may change under the same path."""
    from tierplan.runtime.tracing.trace import trace_config

    return trace_config(name, json.loads(config), training)


def training_for(point: Point, machine: Machine) -> Training:
    """The training settings of a point, with `auto` resolved against the machine."""
    rates = machine.stream(COMPUTE).rates
    dtype = point.dtype
    if dtype == "auto":
        dtype = next((name for name in PRECISIONS if f"matmul_{name}_flops" in rates), "fp32")
    return Training(
        per_device_train_batch_size=point.batch,
        gradient_accumulation_steps=point.accumulation,
        sequence_length=point.seq,
        dtype=dtype,  # type: ignore[arg-type]
        attention=point.attention,  # type: ignore[arg-type]
        max_grad_norm=point.max_grad_norm,
        backend="cpu" if CORES_LIMIT in machine.stream(COMPUTE).takes else "cuda",
    )
