"""A run that fails leaves the model of the last step that ended, or says that there is none."""

from __future__ import annotations

import copy
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.models import CPU, make_batches, make_model, schedule_for
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.execution.instances import ExecutionError
from tierplan.runtime.execution.placement import TrainingError
from tierplan.runtime.optim.adam import NonFiniteGradientError, OptimizerSettings
from tierplan.runtime.reference import same_weights, train_plainly
from tierplan.runtime.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

ADAM = OptimizerSettings(lr=1e-2)


def run(trainer: Trainer, batches: Any, steps: int, at_once: bool) -> None:
    for part in [steps] if at_once else [1] * steps:
        trainer.run(batches, part)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize(
    ("why", "place"), [("gradient", "nvme"), ("error", "nvme"), ("error", "host"), ("end", "host")]
)
def test_where_nothing_of_the_step_was_updated_the_model_is_that_of_the_step_before(
    why: str, place: Any, clip: float | None, at_once: bool, tmp_path: Path
) -> None:
    """In the third step all gradients are nan, or somebody's own code fails, or there is no batch: whether it was the
    third call of `run`, or one call was to do six steps."""
    model = make_model("gpt2", dropout=0.1)
    plain, batches = copy.deepcopy(model), make_batches(6)
    choice = UnitPlan(params=place, grads="host", states=place, acts="host")
    schedule = schedule_for(model, choice, replace(CPU, max_grad_norm=clip))
    calls: list[object] = []

    def loss(output: Any, batch: Any) -> torch.Tensor:
        calls.append(batch)
        is_third = len(calls) == 3
        while is_third and trainer.num_steps_done < 2:
            time.sleep(0.001)  # what the second step writes is on its way
        if is_third and why == "error":
            raise ZeroDivisionError("of its own")
        return output.loss * (float("nan") if is_third else 1.0)  # type: ignore[no-any-return]

    error, says = {
        "gradient": (NonFiniteGradientError, "no update was made" if clip else "gradient of head"),
        "end": (TrainingError, "batches ended before micro-batch 0 of step 2"),
        "error": (ZeroDivisionError, "of its own"),
    }[why]
    with Trainer(schedule, model, nvme_dir=tmp_path, loss=loss, optimizer=ADAM) as trainer:
        given = iter(batches[:2] if why == "end" else batches)
        with pytest.raises(error, match=says):
            run(trainer, given, 6, at_once)
        assert trainer.num_steps_done == 2
        trainer.restore_model()
        if clip:
            trainer.save_copy(tmp_path / "copy")
    train_plainly(plain, batches, steps=2, optimizer=ADAM, max_grad_norm=clip)
    assert same_weights(model, plain)


@pytest.mark.parametrize("at_once", [True, False])
def test_where_some_of_the_step_was_updated_there_is_none(at_once: bool, tmp_path: Path) -> None:
    """Updates inside backward have made nearly all parameters those of the third step when the last gradient is nan."""
    model = make_model("llama")
    schedule = schedule_for(model, UnitPlan(params="host", grads="host", states="nvme"))
    calls: list[torch.Tensor] = []

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(gradient)
        return gradient * (float("nan") if len(calls) == 3 else 1.0)

    model.model.embed_tokens.weight.register_hook(spoil)
    with Trainer(schedule, model, nvme_dir=tmp_path / "nvme", optimizer=ADAM) as trainer:
        with pytest.raises(NonFiniteGradientError, match="gradient of embed"):
            run(trainer, iter(make_batches(6)), 6, at_once)
        for refused in (trainer.restore_model, lambda: trainer.save_copy(tmp_path / "copy")):
            with pytest.raises(ExecutionError, match="some parameters had been updated and others had not"):
                refused()


def test_a_closed_trainer_says_so() -> None:
    """It was an error of the executor's threads."""
    model = make_model("gpt2")
    with Trainer(schedule_for(model, UnitPlan()), model) as trainer:
        trainer.run(make_batches(2), steps=1)
    with pytest.raises(TrainingError, match="this trainer is closed"):
        trainer.run(make_batches(2), steps=1)
