"""Optimizers with coded states: the numbers of the Hugging Face Trainer, whose steps are torchao's, uncompiled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.runtime.models import make_model, schedule_for
from tests.runtime.test_trainer import CPU
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.reference import same_weights

pytest.importorskip("accelerate", reason="the Hugging Face Trainer needs accelerate")
pytest.importorskip("torchao", reason="the Trainer's coded states are torchao's")

import transformers as hf

from tests.runtime.test_hf_trainer import made
from tierplan.runtime.hf_trainer import ScheduleTrainer

pytestmark = pytest.mark.usefixtures("one_thread", "past_set_aside")


@pytest.mark.parametrize(
    ("optim", "spec"),
    [("adamw_torch_8bit", "adamw:states=8bit"), ("adamw_torch_4bit", "adamw:states=4bit-256")],
)
def test_coded_states_are_the_trainers(optim: str, spec: str, tmp_path: Path) -> None:
    """In 4 bits torchao's own blocks have 128 values, and the Trainer's 256."""
    choice = UnitPlan(params="host", grads="host", states="nvme", acts="host")
    schedule, models = schedule_for(make_model("gpt2"), choice, replace(CPU, optimizer=spec)), []
    more: dict[str, Any] = {"weight_decay": 0.1, "lr_scheduler_type": "constant", "warmup_steps": 0}
    for kind in (hf.Trainer, ScheduleTrainer):
        given = {"schedule": schedule, "model": make_model("gpt2")}
        with torch.compiler.set_stance("force_eager"):
            made(kind, tmp_path, given=given, optim=optim, **more).train()
        models.append(given["model"])
    assert same_weights(*models)
