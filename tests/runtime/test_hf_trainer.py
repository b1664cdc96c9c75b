"""The Hugging Face Trainer on a schedule gives the weights of the plain Trainer, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from tests.runtime.models import make_batches, make_model, observed_workload
from tests.runtime.test_trainer import CPU, machine
from tests.toys import uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.hf_trainer import ScheduleTrainer
from tierplan.runtime.optim.groups import without_decay
from tierplan.runtime.trainer import TrainingError
from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.workload import Training

pytestmark = pytest.mark.usefixtures("one_thread")

pytest.importorskip("accelerate", reason="the Hugging Face Trainer needs accelerate")


def examples(count: int) -> list[dict[str, torch.Tensor]]:
    return [{k: v[0] for k, v in batch.items()} for batch in make_batches(count, batch=1)]


def arguments(folder: Path, accumulation: int, clip: float | None, **more: Any) -> hf.TrainingArguments:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": accumulation,
        "max_grad_norm": clip or 0.0,
        "max_steps": 5,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "optim": "adamw_torch_fused",
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 3,
    }
    return hf.TrainingArguments(**{**settings, **more})


def schedule_for(accumulation: int, clip: float | None) -> Schedule:
    training = Training(
        per_device_train_batch_size=2,
        sequence_length=16,
        dtype="fp32",
        backend="cpu",
        gradient_accumulation_steps=accumulation,
        max_grad_norm=clip,
    )
    workload = observed_workload(make_model("gpt2", dropout=0.1), make_batches(1)[0], training)
    choice = UnitPlan(params="nvme", grads="host", states="nvme", acts="host")
    plan = uniform_plan(workload, choice, semantics="exact-clip" if clip else "in-backward")
    return lower(plan, workload, machine())


@pytest.mark.parametrize(("accumulation", "clip", "decay"), [(1, None, 0.0), (2, None, 0.3), (2, 0.5, 0.3)])
def test_against_the_plain_trainer(accumulation: int, clip: float | None, decay: float, tmp_path: Path) -> None:
    plain, model = make_model("gpt2", dropout=0.1), make_model("gpt2", dropout=0.1)
    args = arguments(tmp_path, accumulation, clip, weight_decay=decay)
    hf.set_seed(1)
    expected = hf.Trainer(model=plain, args=args, train_dataset=examples(40))
    expected._clip_grad_norm = lambda m: torch.nn.utils.clip_grad_norm_(m.parameters(), clip, foreach=False)
    expected.train()
    hf.set_seed(1)
    trainer = ScheduleTrainer(
        schedule=schedule_for(accumulation, clip),
        nvme_dir=tmp_path / "nvme",
        model=model,
        args=args,
        train_dataset=examples(40),
    )
    trainer.train()
    for (name, a), (_, b) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    trainer.save_model(str(tmp_path / "saved"))
    loaded = hf.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert torch.equal(loaded.transformer.wte.weight, plain.transformer.wte.weight)  # type: ignore[union-attr]


@pytest.mark.parametrize("family", ["gpt2", "opt", "llama", "bert", "t5"])
def test_what_the_trainer_spares_weight_decay(family: str, tmp_path: Path) -> None:
    model = make_model(family)
    decayed = set(hf.Trainer(model=model, args=arguments(tmp_path, 1, None)).get_decay_parameter_names(model))
    assert set(without_decay(model).names) == {name for name, _ in model.named_parameters()} - decayed


@pytest.mark.parametrize(("setting", "value"), [("per_device_train_batch_size", 4), ("max_grad_norm", 1.0)])
def test_arguments_that_are_not_the_schedule_s_are_refused(setting: str, value: float, tmp_path: Path) -> None:
    assert CPU.max_grad_norm is None
    args = arguments(tmp_path, 1, None, **{setting: value})
    with pytest.raises(TrainingError, match=f"have {setting}={value}"):
        ScheduleTrainer(schedule=schedule_for(1, None), model=make_model("gpt2"), args=args)
