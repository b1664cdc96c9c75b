"""What the Hugging Face Trainer logs of training on a schedule is what the plain Trainer logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from tests.runtime.test_hf_trainer import examples, made
from tierplan.runtime.hf_trainer import ScheduleTrainer

pytestmark = pytest.mark.usefixtures("one_thread", "past_set_aside")


@pytest.mark.parametrize("is_filtered", [True, False])
def test_a_loss_that_is_not_finite_is_logged_as_the_plain_trainer_does(is_filtered: bool, tmp_path: Path) -> None:
    """In the second, third and sixth of seven steps no label counts, so the losses of their micro-batches are nan."""
    data, logs = examples(42), []
    for k in (k for k in range(42) if k // 6 in (1, 2, 5)):
        data[k]["labels"] = torch.full_like(data[k]["labels"], -100)
    for build in (hf.Trainer, ScheduleTrainer):
        often: dict[str, Any] = {"logging_steps": 3, "logging_nan_inf_filter": is_filtered, "max_steps": 7}
        given = {"train_dataset": data}
        trainer = made(build, tmp_path, 3, given=given, **often, train_sampling_strategy="sequential")
        trainer.train()
        logs.append([entry.get("loss", entry.get("train_loss")) for entry in trainer.state.log_history])
    assert str(logs[1]) == str(logs[0])
    assert ("nan" in str(logs[0])) != is_filtered
