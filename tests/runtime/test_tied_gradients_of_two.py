"""Gradients that two units make of the embedding's parameters: those of plain training, wherever they wait."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.runtime.models import make_batches, make_model
from tests.runtime.test_trainer import CPU, STEPS, machine
from tests.toys import uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.planner.plan_rules import Order
from tierplan.runtime.reference import train_plainly
from tierplan.runtime.tracing.trace import trace_module
from tierplan.runtime.trainer import train


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
