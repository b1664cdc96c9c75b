"""What a tied head makes of the embedding's gradient, on its way to the embedding's backward."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.runtime.models import CPU, machine, make_batches, make_model, observed_workload
from tests.toys import uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.planner.plan_rules import Order
from tierplan.planner.prediction import predict_plan
from tierplan.planner.search.local.moves import with_tied
from tierplan.runtime.autograd.units import ModelError
from tierplan.runtime.reference import train_plainly
from tierplan.runtime.tracing.trace import trace_config, trace_module
from tierplan.runtime.trainer import train
from tierplan.sim.analysis.completion import smallest_capacity_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 4


@pytest.mark.parametrize("order", ["vertical", "horizontal"])
def test_tied_gradients_that_wait_in_host_memory_are_those_of_plain_training(order: Order, tmp_path: Path) -> None:
    """One of each micro-batch: in vertical order the device trains where all of them do not fit."""
    model = make_model("gpt2")
    raw = {**model.config.to_dict(), "architectures": [type(model).__name__]}  # type: ignore[union-attr, operator]
    workload = trace_config("gpt2", raw, replace(CPU, gradient_accumulation_steps=4))
    here = uniform_plan(workload, UnitPlan(grads="host", states="host", acts="recompute"), order=order)
    away = with_tied(replace(here, prefetch_acts_units=0), workload, "host")
    least_bytes = smallest_capacity_bytes(lower(away, workload, machine()), "gpu0")
    assert least_bytes is not None
    small = machine(device_bytes=least_bytes)
    assert predict_plan(here, workload, small).fits == (order == "horizontal")
    plain, batches = copy.deepcopy(model), make_batches(STEPS * 4)
    expected = train_plainly(plain, batches, steps=STEPS, gradient_accumulation_steps=4)
    result = train(lower(away, workload, small), model, batches, steps=STEPS, nvme_dir=tmp_path)
    assert result.losses == tuple(expected)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert result.peak_bytes["gpu0"] <= least_bytes


@pytest.mark.parametrize(("order", "places"), [("vertical", "hh"), ("vertical", "hd"), ("horizontal", "dh")])
def test_tied_gradients_of_two_units_that_wait_in_host_memory_are_those_of_plain_training(
    order: Order, places: str, tmp_path: Path
) -> None:
    """T5's decoder adds to the head's, wherever either has them wait."""
    model, training = make_model("t5", num_blocks=2), replace(CPU, gradient_accumulation_steps=3)
    workload = trace_module(model, make_batches(1)[0], training)
    sharers = [u for u, unit in enumerate(workload.units) if unit.shares]
    assert len(sharers) == 2
    plan = uniform_plan(workload, UnitPlan(grads="host", states="host", acts="recompute"), order=order)
    units = list(plan.units)
    for u, place in zip(sharers, places, strict=True):
        units[u] = replace(units[u], tied_grads="host" if place == "h" else "device")
    plain, batches = copy.deepcopy(model), make_batches(STEPS * 3)
    expected = train_plainly(plain, batches, steps=STEPS, gradient_accumulation_steps=3)
    schedule = lower(replace(plan, units=tuple(units)), workload, machine())
    result = train(schedule, model, batches, steps=STEPS, nvme_dir=tmp_path)
    assert result.losses == tuple(expected)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("order", ["vertical", "horizontal"])
def test_a_gradient_that_the_schedule_has_no_place_for_is_refused(order: Order) -> None:
    """It was put away for the next micro-batch's, without a word: half of the head's share was lost."""
    model = make_model("opt", num_blocks=2)
    for name, p in model.named_parameters():
        p.requires_grad_("embed_positions" not in name)
    batches = make_batches(2)
    workload = observed_workload(model, batches[0], replace(CPU, gradient_accumulation_steps=2))
    *before, head = workload.units
    assert head.shares == "embed"
    assert head.adds_to_shared
    other = replace(workload, units=(*before, replace(head, adds_to_shared=False)))
    schedule = lower(uniform_plan(other, UnitPlan(), order=order), other, machine())
    with pytest.raises(ModelError, match=r"backward of unit 'head' has made a gradient of 'model\.decoder\.embed_tok"):
        train(schedule, model, batches, steps=1)
    assert all(p.grad is None for p in model.parameters())
