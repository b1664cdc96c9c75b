"""Training with each optimizer under every placement: bit for bit the numbers of plain training."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from tests.runtime.execution.test_state_parts import split
from tests.runtime.models import make_batches, make_model, observed_workload, schedule_for
from tests.runtime.test_trainer import CPU, STEPS, check, machine, random_choices
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.execution.placement import TrainingError
from tierplan.runtime.optim import adam
from tierplan.runtime.optim.adam import OptimizerSettings
from tierplan.runtime.reference import train_plainly
from tierplan.runtime.trainer import Trainer
from tierplan.sim.workloads.workload import Training

pytestmark = pytest.mark.usefixtures("one_thread")
CHANCE = "adamw:states=bf16-stochastic"
SPECS = ("adamw:states=8bit", "adamw:states=4bit", "sgd:momentum=0.9", "lion", "muon", "adafactor", "lion:states=8bit")


def of(spec: str, dtype: str, **more: object) -> Training:
    return replace(CPU, optimizer=spec, dtype=dtype, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("states", ["device", "host", "nvme"])
@pytest.mark.parametrize("spec", [*SPECS, CHANCE])
def test_every_placement(spec: str, states: str, tmp_path: Path) -> None:
    place = "device" if states == "device" else "host"
    choice = UnitPlan(params=place, grads=place, states=states)  # type: ignore[arg-type]
    check(make_model("gpt2", num_blocks=2, dtype="bf16"), of(spec, "bf16"), choice, tmp_path)


@pytest.mark.parametrize("spec", [*SPECS, "adamw:states=bf16", CHANCE])
def test_states_in_shards(spec: str, tmp_path: Path) -> None:
    dtype = "bf16" if "bf16" in spec else "fp32"
    training = of(spec, dtype, max_grad_norm=0.5, gradient_accumulation_steps=2)
    model = make_model("llama", num_blocks=2, dtype=dtype)
    choice = UnitPlan(params="nvme", grads="host", states="nvme")
    check(model, training, partial(split, choice=choice, semantics="exact-clip"), tmp_path)


@pytest.mark.sampled
@pytest.mark.parametrize("family", ["gpt2", "llama", "mixtral", "t5"])
@pytest.mark.parametrize("spec", SPECS)
def test_every_family_with_everything_different(spec: str, family: str, tmp_path: Path) -> None:
    training = of(spec, "bf16", gradient_accumulation_steps=2)
    model = make_model(family, num_blocks=2, dropout=0.1, dtype="bf16")
    check(model, training, random_choices(model, training, seed=spec + family), tmp_path)


@pytest.mark.parametrize("spec", ["adamw:states=8bit", CHANCE])
def test_a_resumed_run_cuts_states_otherwise(spec: str, tmp_path: Path) -> None:
    """States that were committed in shards go on as a whole: the end is that of a run without a stop."""
    training = of(spec, "bf16")
    model = make_model("gpt2", num_blocks=2, dtype="bf16")
    workload = observed_workload(model, make_batches(1)[0], training)
    choice, settings = UnitPlan(params="host", grads="host", states="nvme"), OptimizerSettings(name=training.optimizer)
    plans = (split(workload, choice), replace(split(workload, choice), units=(choice,) * len(workload.units)))
    losses: list[float] = []
    for plan, until in zip(plans, (2, STEPS), strict=True):
        schedule = lower(plan, workload, machine())
        with Trainer(
            schedule, copy.deepcopy(model), nvme_dir=tmp_path, optimizer=settings, out_dir=tmp_path / "out", resume=True
        ) as trainer:
            trainer.run(make_batches(until), until - trainer.num_steps_done)
            losses = list(trainer.result().losses)
    assert losses == train_plainly(model, make_batches(STEPS), steps=STEPS, optimizer=settings)


def test_what_is_only_simulated_is_refused_by_name(tmp_path: Path) -> None:
    training = of("galore:rank=4", "bf16")
    model = make_model("gpt2", num_blocks=2, dtype="bf16")
    schedule = schedule_for(model, UnitPlan(), training)
    with pytest.raises(TrainingError, match="galore:rank=4, which is simulated only; plan with one of adamw, sgd"):
        Trainer(schedule, model, optimizer=OptimizerSettings(name=training.optimizer))


@pytest.mark.parametrize("spec", ["adamw", "sgd:momentum=0.9", "lion", "muon", "adafactor"])
def test_fp32_states_beside_bf16_weights_without_a_master_copy_are_refused(spec: str) -> None:
    model = make_model("gpt2", num_blocks=2, dtype="bf16")
    schedule = schedule_for(model, UnitPlan(), of(spec, "bf16", master_weights=False))
    with pytest.raises(TrainingError, match=f"fp32 states of {spec} without a master copy .*adamw:states=bf16"):
        Trainer(schedule, model, optimizer=OptimizerSettings(name=spec))


def test_an_8_bit_update_moves_8_bit_states() -> None:
    model = make_model("gpt2", num_blocks=2, dtype="bf16")
    moved = []
    for spec in ("adamw", "adamw:states=8bit"):
        workload = observed_workload(model, make_batches(1)[0], of(spec, "bf16", master_weights=False))
        moved.append(workload.states_bytes / workload.num_parameters)
    assert moved[0] == 8
    assert moved[1] < 3  # small ones stay in bf16


@pytest.mark.parametrize("spec", ["lion", "adamw:states=8bit", "adamw:states=4bit"])
def test_plain_training_has_its_states_where_parameters_are(spec: str) -> None:
    """As on a GPU, for which tensors without memory stand: an operation on those and on others is an error."""
    layer = nn.Linear(64, 64, device="meta")
    batches = [{"input": torch.zeros(2, 64, device="meta")}] * 2
    with mock.patch.object(adam, "_check_finite"), mock.patch.object(torch.Tensor, "item", return_value=0.0):
        train_plainly(layer, batches, steps=2, optimizer=OptimizerSettings(name=spec), loss=lambda out, _: out.sum())


@pytest.mark.parametrize("spec", ["lion", "adamw:states=8bit"])
def test_plain_training_takes_parameters_that_are_not_contiguous(spec: str) -> None:
    """The gradient does not depend on the weights, so that they stay equal to contiguous ones."""
    layer = nn.Linear(8, 64)
    turned = copy.deepcopy(layer)
    turned.weight.data = layer.weight.detach().t().contiguous().t()
    for each in (layer, turned):
        batches, settings = [{"input": torch.linspace(0, 1, 16).view(2, 8)}] * 3, OptimizerSettings(name=spec, lr=0.1)
        train_plainly(each, batches, steps=3, optimizer=settings, loss=lambda out, _: out.sum())
    assert not turned.weight.is_contiguous()
    assert torch.equal(layer.weight, turned.weight)
