"""Updates on the device with states that come from host memory or NVMe and go back: the bits of plain training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.runtime.models import make_model
from tests.runtime.test_trainer import CPU, check
from tierplan.hwmodels import load_machine
from tierplan.planner.plan import UnitPlan
from tierplan.planner.plan_rules import PlanError
from tierplan.planner.prediction import predict
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.sampled
@pytest.mark.parametrize("states", ["host", "nvme"])
@pytest.mark.parametrize("params", ["device", "host", "nvme"])
@pytest.mark.parametrize(("dtype", "clip"), [("fp32", None), ("bf16", 0.5)])
@pytest.mark.parametrize("spec", ["adamw", "adamw:states=8bit", "muon"])
def test_numbers_of_plain_training(
    spec: str, dtype: str, clip: float | None, params: str, states: str, tmp_path: Path
) -> None:
    training = replace(CPU, dtype=dtype, max_grad_norm=clip, optimizer=spec, gradient_accumulation_steps=2)  # type: ignore[arg-type]
    choice = UnitPlan(params=params, grads="device", states=states, update="device")  # type: ignore[arg-type]
    schedule = check(make_model("gpt2", num_blocks=2, dtype=dtype), training, choice, tmp_path)
    updates = [op for op in schedule.ops if op.kind == "update"]
    assert {op.stream for op in updates} == {"gpu0.compute"}
    assert any(op.key == f"fetch_states/{updates[0].unit}" for op in schedule.ops)


def test_states_cross_the_link_both_ways_and_gradients_stay() -> None:
    workload = load_workload("gpt2-medium", Training(dtype="bf16"))
    machine = load_machine("desktop-4090")
    here, there = (predict("zero-offload", workload, machine, {"update": where}) for where in ("device", "host"))
    assert here.step_s is not None
    assert there.step_s is not None
    moved = {name: here.schedule.bytes_moved()[f"gpu0.{name}"] for name in ("h2d", "d2h")}
    assert moved == {"h2d": workload.states_bytes, "d2h": workload.states_bytes}


@pytest.mark.parametrize(
    "changed", [{"grads": "host"}, {"state_shards": 2, "states": "nvme"}, {"late_update": True}], ids=str
)
def test_what_such_an_update_cannot_do_is_refused(changed: dict[str, object], tmp_path: Path) -> None:
    choice = UnitPlan(states="host", update="device")
    with pytest.raises(PlanError, match="brought to the device"):
        check(make_model("gpt2"), CPU, replace(choice, **changed), tmp_path)  # type: ignore[arg-type]
