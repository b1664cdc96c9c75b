"""Updates on the device with states that come from host memory or NVMe and go back: the bits of plain training."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.planner.instances import MB, chain, small_machine
from tests.runtime.models import make_batches, make_model, observed_workload
from tests.runtime.test_trainer import CPU, check, machine
from tests.toys import uniform_plan
from tierplan.hwmodels import load_machine
from tierplan.hwmodels.machine import Rate
from tierplan.hwmodels.names import HOST_ADAM
from tierplan.planner.plan import GradientsByLink, UnitPlan, UnitwisePlan
from tierplan.planner.planning import plan
from tierplan.planner.prediction import predict
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.candidates import PlanSimulator
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("states", "shards", "in_host"),
    [("host", 1, 0), ("nvme", 1, 0), ("host", 3, 0), ("nvme", 4, 0), ("nvme", 4, 1)],
)
@pytest.mark.parametrize("params", ["device", "host", "nvme"])
@pytest.mark.parametrize(("dtype", "clip"), [("fp32", None), ("bf16", 0.5)])
@pytest.mark.parametrize("spec", ["adamw", "adamw:states=8bit", "muon"])
def test_numbers_of_plain_training(
    spec: str, dtype: str, clip: float | None, params: str, states: str, shards: int, in_host: int, tmp_path: Path
) -> None:
    training = replace(CPU, dtype=dtype, max_grad_norm=clip, optimizer=spec, gradient_accumulation_steps=2)  # type: ignore[arg-type]
    places: dict[str, Any] = {"params": params, "states": states, "state_shards": shards, "host_shards": in_host}
    choice = UnitPlan(grads="device", update="device", **places)
    schedule = check(make_model("gpt2", num_blocks=2, dtype=dtype), training, choice, tmp_path)
    updates = [op for op in schedule.ops if op.kind == "update" and op.unit == "L1"]
    assert {op.stream for op in updates} == {"gpu0.compute"}
    assert len(updates) == shards
    assert {f"fetch_states/{op.key.removeprefix('update/')}" for op in updates} <= {op.key for op in schedule.ops}
    read = {op.key for op in schedule.ops if op.key.startswith("read_states/L1")}
    assert len(read) == (shards - in_host if states == "nvme" else 0)


@pytest.mark.parametrize(("clip", "order"), [(None, "vertical"), (None, "horizontal"), (0.5, "vertical")])
def test_an_update_spread_over_several_turns_gives_the_same_numbers(
    clip: float | None, order: str, tmp_path: Path
) -> None:
    training = replace(CPU, dtype="bf16", max_grad_norm=clip, gradient_accumulation_steps=2)
    model = make_model("gpt2", num_blocks=3, dtype="bf16")
    choice = UnitPlan(params="host", states="host", grads="device", update="device", state_shards=4)
    semantics = "exact-clip" if clip else "in-backward"
    spread = partial(uniform_plan, choice=choice, update_over_units=3, order=order, semantics=semantics)
    check(model, training, spread, tmp_path)


def test_planned_with_clipping_where_gradients_have_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierplan.planner.search.budget.DEFAULT_OPS", 150_000)
    training = replace(CPU, max_grad_norm=0.5, optimizer="muon")
    model = make_model("gpt2", num_blocks=6)
    workload = observed_workload(model, make_batches(1)[0], training)
    roomy = machine(device_bytes=workload.num_parameters * training.grad_bytes)
    slow = {"parameters": Rate.constant(1e5)}
    streams = (replace(s, rates={**s.rates, **slow}) if s.name == HOST_ADAM else s for s in roomy.streams)
    on = replace(roomy, streams=tuple(streams))
    planned = plan(workload, on, orders=["horizontal"]).plan  # without sub-batches
    assert isinstance(planned, UnitwisePlan)
    assert sum(u.returns_grads for u in planned.units) > 4
    check(model, training, planned, tmp_path, workload=workload, on=on)


def test_states_cross_the_link_both_ways_and_gradients_stay() -> None:
    workload = load_workload("gpt2-medium", Training(dtype="bf16"))
    machine = load_machine("desktop-4090")
    here, there = (predict("zero-offload", workload, machine, {"update": where}) for where in ("device", "host"))
    assert here.step_s is not None
    assert there.step_s is not None
    moved = {name: here.schedule.bytes_moved()[f"gpu0.{name}"] for name in ("h2d", "d2h")}
    assert moved == {"h2d": workload.states_bytes, "d2h": workload.states_bytes}


def test_the_device_has_room_for_a_shard_at_a_time() -> None:
    """Three blocks of 20 MB in bf16: their states are 120 MB."""
    workload = chain(forward_s=[0.1] * 3, parameters=[10 * MB] * 3, saved_mb=[[5]] * 3)
    simulate_plan = PlanSimulator(workload, small_machine(device_mb=400, nvme_mb=0), Budget(1e9))
    free_gb = []
    for shards in (1, 2, 6):
        choice = UnitPlan(params="host", states="host", update="device", state_shards=shards)
        found = simulate_plan(UnitwisePlan(policy="all", units=(choice,) * 3, prefetch_states_units=0))
        free_gb.append(found.room_gb["device"])
    assert free_gb[1] - free_gb[0] == pytest.approx(0.060, rel=1e-3)
    assert free_gb[2] - free_gb[0] == pytest.approx(0.100, rel=1e-3)


@pytest.mark.sampled
@pytest.mark.parametrize(("order", "accumulation"), [("horizontal", 1), ("horizontal", 2), ("vertical", 2)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("params", "states"), [("device", "host"), ("host", "nvme")])
@pytest.mark.parametrize("grads", ["device", "host"])
@pytest.mark.parametrize(("shards", "clip"), [(1, None), (3, None), (3, 0.5)])
def test_such_an_update_may_be_late(
    order: str,
    accumulation: int,
    dtype: str,
    params: str,
    states: str,
    grads: str,
    shards: int,
    clip: float | None,
    tmp_path: Path,
) -> None:
    """Then it comes ahead of its unit's forward, with gradients that have waited where the plan says."""
    training = replace(CPU, dtype=dtype, gradient_accumulation_steps=accumulation, max_grad_norm=clip)  # type: ignore[arg-type]
    model = make_model("gpt2", num_blocks=2, dtype=dtype)
    workload = observed_workload(model, make_batches(1)[0], training)
    choice = UnitPlan(
        params=params,
        states=states,
        grads=grads,
        update="device",
        state_shards=shards,
        late_update=True,  # type: ignore[arg-type]
    )
    semantics = "exact-clip" if clip else "in-backward"
    chosen = uniform_plan(workload, choice, order=order, semantics=semantics, prefetch_params_units=1)
    schedule = check(model, training, chosen, tmp_path, workload=workload)
    keys = [op.key for op in schedule.ops]
    last = keys.index("update/L1" if shards == 1 else "update/L1/2of3")
    assert schedule.ops[last].stream == "gpu0.compute"
    assert last < keys.index("fwd/L1/mb0")
    waiting = next(b for b in schedule.buffers if b.initial and b.content == "grads/L1/mb0")
    assert waiting.tier == {"device": "gpu0", "host": "host"}[grads]


@pytest.mark.sampled
@pytest.mark.parametrize(("order", "accumulation"), [("horizontal", 1), ("horizontal", 2), ("vertical", 2)])
@pytest.mark.parametrize(("dtype", "clip"), [("fp32", 0.5), ("bf16", 0.5), ("bf16", None)])
@pytest.mark.parametrize(("grads", "cast"), [("host", False), ("nvme", False), ("nvme", True)])
@pytest.mark.parametrize("shards", [1, 3])
def test_gradients_that_wait_elsewhere_come_back(
    order: str, accumulation: int, dtype: str, clip: float | None, grads: str, cast: bool, shards: int, tmp_path: Path
) -> None:
    """They add up on the device where one turn has those of all micro-batches, and else in host memory."""
    training = replace(CPU, dtype=dtype, gradient_accumulation_steps=accumulation, max_grad_norm=clip)  # type: ignore[arg-type]
    model = make_model("gpt2", num_blocks=2, dtype=dtype)
    workload = observed_workload(model, make_batches(1)[0], training)
    choice = UnitPlan(params="host", states="nvme", grads=grads, update="device", state_shards=shards)  # type: ignore[arg-type]
    semantics = "exact-clip" if clip else "in-backward"
    chosen = uniform_plan(
        workload, choice, order=order, semantics=semantics, by_link=GradientsByLink() if cast else None
    )
    schedule = check(model, training, chosen, tmp_path, workload=workload)
    ops = {op.key: op for op in schedule.ops}
    updates = [op for op in schedule.ops if op.kind == "update" and op.unit == "L1"]
    assert {op.stream for op in updates} == {"gpu0.compute"}
    assert len(updates) == shards
    assert {op.reads[0] for op in updates} == {ops["fetch_grads/L1"].writes[0]}
    assert ("accumulate/L1/mb1" in ops) == (order == "horizontal" and accumulation == 2)
    assert ("read_grads/L1" in ops) == (grads == "nvme")
    if clip is not None and "accumulate/L1/mb1" not in ops:
        assert ops["norm/L1"].stream == ("gpu0.compute" if order == "vertical" or accumulation == 1 else "host.adam")
