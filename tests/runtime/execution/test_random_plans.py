"""Random plans train the numbers of plain training, bit for bit: a few here, and 20 of each kind with `-m matrix`.

Kinds are family, precision, accumulation and clipping; dropout is on throughout. A plan's decisions are drawn one by
one: places of parameters, gradients, states and inputs by unit, an action by saved tensor, and every knob of the plan
that changes what runs on one device.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from tests.runtime.models import make_batches, make_model, observed_workload
from tests.runtime.test_trainer import CPU, check, machine
from tierplan.planner.lowering import lower
from tierplan.planner.plan import PlanError, UnitPlan, UnitwisePlan
from tierplan.sim.workloads.workload import Training, Unit, Workload

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ("gpt2", "opt", "llama", "bert", "t5")
KINDS = [
    (family, dtype, accumulation, clip)
    for family in FAMILIES
    for dtype in ("fp32", "bf16")
    for accumulation in (1, 2)
    for clip in (None, 0.5)
]
PER_KIND = 20


def random_plan(workload: Workload, rng: random.Random) -> UnitwisePlan:
    """Any plan of one device that lowering accepts."""
    while True:
        plan = _draw(workload, rng)
        try:
            lower(plan, workload, machine(), refine=False)
        except PlanError:
            continue  # such as a delayed update with states on the device
        return plan


def _draw(workload: Workload, rng: random.Random) -> UnitwisePlan:
    clips = workload.training.max_grad_norm is not None
    semantics = "exact-clip" if clips else rng.choice(["in-backward", "in-backward", "exact-clip", "delayed-1"])
    segment_units = rng.choice([1, 1, 1, 2, 3])
    units = tuple(_draw_unit(unit, rng, semantics, segment_units) for unit in workload.units)
    return UnitwisePlan(
        policy="random",
        units=units,
        semantics=semantics,  # type: ignore[arg-type]
        order=rng.choice(["horizontal", "vertical"]),  # type: ignore[arg-type]
        prefetch_params_units=rng.randint(0, 2),
        prefetch_acts_units=rng.randint(0, 2),
        prefetch_states_units=rng.randint(0, 2),
        strict_windows=rng.random() < 0.3,
        updates_in_flight=rng.choice([0, 0, 1, 2, 4]),
        write_back=rng.choice(["at once", "delayed", "awaited"]),  # type: ignore[arg-type]
        update_order=rng.choice(["forward", "backward"]),  # type: ignore[arg-type]
        hold_updates=semantics == "exact-clip" and rng.random() < 0.5,
        cast_grads=rng.random() < 0.5,
        segment_units=segment_units,
    )


def _draw_unit(unit: Unit, rng: random.Random, semantics: str, segment_units: int) -> UnitPlan:
    params, grads, states = (rng.choice(["device", "host", "nvme"]) for _ in range(3))
    if rng.random() < 0.2 and semantics != "delayed-1":
        params = grads = states = "device"
    elif states == "device":
        states = "host"
    if semantics == "delayed-1" and grads == "nvme":
        grads = "host"
    late = semantics == "in-backward" and grads != "nvme" and rng.random() < 0.3
    actions = ["keep", "host", "nvme", "recompute"] if unit.kind == "block" else ["keep", "host", "nvme"]
    acts: object = tuple(rng.choice(actions) for _ in unit.saved)
    if segment_units > 1 and unit.kind == "block":
        acts = "recompute"
    place = rng.choice(["keep", "host", "nvme"])
    parts = rng.choice([1, 2, 3]) if states == "nvme" else 1
    return UnitPlan(
        params=params, grads=grads, states=states, acts=acts, input=place, late_update=late, state_shards=parts
    )  # type: ignore[arg-type]


def training_of(dtype: str, accumulation: int, clip: float | None) -> Training:
    return replace(CPU, dtype=dtype, gradient_accumulation_steps=accumulation, max_grad_norm=clip)  # type: ignore[arg-type]


def train_random(family: str, training: Training, seed: str, folder: Path) -> None:
    rng = random.Random(seed)
    model: nn.Module = make_model(family, num_blocks=2 if family == "t5" else 3, dropout=0.1, dtype=training.dtype)
    workload = observed_workload(model, make_batches(1)[0], training)
    check(model, training, random_plan(workload, rng), folder, workload=workload)


@pytest.mark.parametrize("seed", range(16))
def test_random_plans(seed: int, tmp_path: Path) -> None:
    family, dtype, accumulation, clip = random.Random(seed).choice(KINDS)
    train_random(family, training_of(dtype, accumulation, clip), f"quick {seed}", tmp_path)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("number", range(PER_KIND))
@pytest.mark.parametrize(("family", "dtype", "accumulation", "clip"), KINDS)
def test_the_whole_matrix(
    family: str, dtype: str, accumulation: int, clip: float | None, number: int, tmp_path: Path
) -> None:
    """800 trainings: `pytest -m matrix tests/runtime/execution/test_random_plans.py`."""
    train_random(family, training_of(dtype, accumulation, clip), f"{family} {number}", tmp_path)
