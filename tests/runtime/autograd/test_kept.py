"""Where nothing that backward needs moves, autograd holds it by itself, and the next forward follows at once."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.runtime.models import make_batches, make_model, observed_workload
from tests.runtime.test_trainer import machine
from tests.toys import uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.planner.plan_rules import Order
from tierplan.runtime.autograd.micro_batch import MicroBatchRun
from tierplan.runtime.autograd.saved import Recorder
from tierplan.runtime.reference import train_plainly
from tierplan.runtime.trainer import Trainer
from tierplan.sim.workloads.workload import Training

STEPS = 3
PLACES = {
    "kept": UnitPlan(),
    "activations in host memory": UnitPlan(acts="host"),
    "parameters in host memory": UnitPlan(params="host", grads="host", states="host"),
    "inputs in host memory": UnitPlan(input="host"),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("order", ["horizontal", "vertical"])
def test_saved_tensors_are_looked_at_once_where_nothing_moves(
    place: str, order: Order, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the threads in which models run: none of their own where all forwards of a micro-batch follow each other."""
    count, batches = 2, make_batches(2 * STEPS)
    training = Training(
        per_device_train_batch_size=2, sequence_length=16, gradient_accumulation_steps=count, dtype="fp32"
    )
    looks: list[int] = []
    threads: set[str] = set()
    pack, block = Recorder.pack, MicroBatchRun.block

    def counted(self: Recorder, t: torch.Tensor) -> object:
        looks[-1] += self.params[0].parameters[0][0].startswith("transformer.h.")
        return pack(self, t)

    def seen(self: MicroBatchRun, *args: object) -> object:
        threads.add(threading.current_thread().name)
        return block(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Recorder, "pack", counted)
    monkeypatch.setattr(MicroBatchRun, "block", seen)
    looks.append(0)
    model = make_model()
    workload = observed_workload(model, batches[0], training)
    plan = uniform_plan(workload, PLACES[place], order=order)
    threads.clear()
    with Trainer(lower(plan, workload, machine()), model) as trainer:
        for step in range(STEPS):
            looks.append(0)
            trainer.run(batches[count * step :], 1)
        losses = trainer.result().losses
    assert list(losses) == train_plainly(make_model(), batches, steps=STEPS, gradient_accumulation_steps=count)
    of_micro_batch, *of_steps = looks
    assert of_micro_batch > 0
    if place == "kept":
        assert of_steps == [of_micro_batch, 0, 0], "the second micro-batch saves as the first one did"
    else:
        assert of_steps == [count * of_micro_batch] * STEPS
    in_one = {"tierplan gpu0.compute"} if order == "horizontal" else {"tierplan micro-batch"}
    assert threads == in_one
