"""What is set on the Hugging Face Trainer behind its arguments' back, or after it was made, trains what the plain
Trainer trains, or is refused before the first step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from accelerate.state import AcceleratorState
from transformers.trainer_pt_utils import LabelSmoother

from tests.runtime.models import make_model
from tests.runtime.test_hf_trainer import made as plainly_made
from tests.runtime.test_hf_trainer import schedule_for
from tierplan.runtime.execution.placement import TrainingError
from tierplan.runtime.hf_arguments import EXECUTED
from tierplan.runtime.hf_trainer import ScheduleTrainer
from tierplan.runtime.reference import same_weights

pytestmark = pytest.mark.usefixtures("one_thread", "past_set_aside")

Change = Callable[[Any], object]


def made(kind: type, folder: Path, accumulation: int = 1, change: Change = lambda trainer: None, **more: Any) -> Any:
    given, steps = {"schedule": schedule_for(accumulation, None)}, {"max_steps": 2, "logging_steps": 1}
    in_arguments = 1 if "accelerator_config" in more else accumulation
    trainer = plainly_made(kind, folder, in_arguments, given=given, **steps, **more)
    change(trainer)
    return trainer


def assert_like_the_plain(
    make: Callable[[type], Any], kinds: tuple[type, type] = (hf.Trainer, ScheduleTrainer)
) -> None:
    trainers = [make(kind) for kind in kinds]
    for trainer in trainers:
        hf.set_seed(1)
        trainer.train()
    expected, found = ([entry.get("loss") for entry in t.state.log_history] for t in trainers)
    assert found == expected
    assert same_weights(trainers[1].model, trainers[0].model)


def sets(**values: Any) -> Change:
    """Arguments, after the Trainer is made."""

    def change(trainer: Any) -> None:
        for name, value in values.items():
            setattr(trainer.args, name, value)

    return change


def test_the_number_of_micro_batches_that_accelerator_config_gives(tmp_path: Path) -> None:
    """transformers takes it in place of its own, where that is 1."""

    def make(kind: type, accumulation: int = 2) -> Any:
        return made(kind, tmp_path, accumulation, accelerator_config={"gradient_accumulation_kwargs": {"num_steps": 2}})

    assert_like_the_plain(make)
    with pytest.raises(
        TrainingError, match=r"gradient_accumulation_steps=2 \(num_steps of accelerator_config\), .* 1;"
    ):
        make(ScheduleTrainer, accumulation=1)


@pytest.mark.parametrize("how", [{"dispatch_batches": True}, {"split_batches": True}, {"use_seedable_sampler": False}])
def test_how_accelerate_loads_data_is_honoured(how: dict[str, Any], tmp_path: Path) -> None:
    assert_like_the_plain(lambda kind: made(kind, tmp_path, accelerator_config=dict(how)))


def test_settings_of_the_optimizer_are_those_when_training_begins(tmp_path: Path) -> None:
    change = sets(weight_decay=0.5, adam_beta1=0.1, adam_beta2=0.5, adam_epsilon=1e-3, learning_rate=1e-3)
    assert_like_the_plain(lambda kind: made(kind, tmp_path, change=change))


def test_settings_of_an_optimizer_that_is_made_before_training_stay(tmp_path: Path) -> None:
    def change(trainer: Any) -> None:
        sets(weight_decay=0.5)(trainer)
        trainer.create_optimizer()
        sets(weight_decay=0.1, adam_beta1=0.1)(trainer)

    assert_like_the_plain(lambda kind: made(kind, tmp_path, change=change))


@pytest.mark.parametrize(
    ("name", "value"),
    [("gradient_accumulation_steps", 2), ("max_grad_norm", 0.01), ("optim", "sgd"), ("torch_compile", True)],
)
def test_arguments_are_checked_again_when_training_begins(name: str, value: object, tmp_path: Path) -> None:
    trainer = made(ScheduleTrainer, tmp_path)
    setattr(trainer.args, name, value)
    with pytest.raises(TrainingError, match=f"TrainingArguments have {name}={value!r}"):
        trainer.train()
    assert trainer._engine.num_steps_done == 0


class Clips(hf.TrainerCallback):
    """From the second step on, by an argument that the plain Trainer reads in each step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **settings: Any) -> None:
        args.max_grad_norm = 0.01


def test_a_callback_cannot_change_what_the_schedule_has(tmp_path: Path) -> None:
    trainer = made(ScheduleTrainer, tmp_path)
    trainer.add_callback(Clips())
    with pytest.raises(TrainingError, match=r"have max_grad_norm=0\.01, but the schedule was made for 0\.0"):
        trainer.train()
    assert trainer._engine.num_steps_done == 1


@pytest.mark.parametrize("accepts", [True, False])
@pytest.mark.parametrize("is_scaled", [True, False])
def test_whether_the_loss_is_scaled_already_is_what_a_subclass_says(
    is_scaled: bool, accepts: bool, tmp_path: Path
) -> None:
    class Plain(hf.Trainer):
        loss_is_scaled_for_ga = is_scaled

    class OnSchedule(ScheduleTrainer):
        loss_is_scaled_for_ga = is_scaled

    def change(trainer: Any) -> None:
        trainer.model_accepts_loss_kwargs = accepts

    assert_like_the_plain(lambda kind: made(kind, tmp_path, accumulation=2, change=change), kinds=(Plain, OnSchedule))


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("compute_loss", lambda *args, **settings: torch.zeros(()), "given its own compute_loss, but"),
        ("training_step", lambda *args, **settings: torch.zeros(()), "given its own training_step, but"),
        ("label_smoother", LabelSmoother(0.1), "given label_smoother=LabelSmoother.*; smooth labels in the model's"),
        ("compute_loss_func", lambda *args, **settings: torch.zeros(()), "given compute_loss_func=.* in the model's"),
        ("neftune_noise_alpha", 5.0, r"given neftune_noise_alpha=5\.0, .* no noise"),
        ("model_init", lambda: make_model("gpt2"), "given model_init=.*; give the model itself"),
        ("optimizer_cls_and_kwargs", (torch.optim.SGD, {}), "given optimizer_cls_and_kwargs=.*; use TrainingArguments"),
        ("optimizer", torch.optim.SGD([torch.zeros(1)]), "given optimizer=SGD .*; use TrainingArguments for both"),
    ],
)
def test_what_is_set_on_the_trainer_itself_is_refused(name: str, value: object, says: str, tmp_path: Path) -> None:
    trainer = made(ScheduleTrainer, tmp_path, change=lambda trainer: setattr(trainer, name, value))
    with pytest.raises(TrainingError, match=says):
        trainer.train()
    assert trainer._engine.num_steps_done == 0


def test_a_method_that_would_change_what_the_model_gets_is_refused(tmp_path: Path) -> None:
    class Other(ScheduleTrainer):
        def _prepare_context_parallel_inputs(self, model: Any, inputs: Any) -> Any:
            raise AssertionError

    with pytest.raises(TrainingError, match="Other overrides _prepare_context_parallel_inputs"):
        made(Other, tmp_path)


def test_mixed_precision_that_accelerate_has_from_the_environment_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `accelerate launch --mixed_precision bf16` sets it; the plain Trainer then trains under autocast."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert made(hf.Trainer, tmp_path).accelerator.mixed_precision == "bf16"
    with pytest.raises(TrainingError, match=r"accelerate has mixed_precision='bf16', .* without autocast; .* in bf16"):
        made(ScheduleTrainer, tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("ACCELERATE_DYNAMO_BACKEND", "eager", r"ACCELERATE_DYNAMO_BACKEND=eager, .* eagerly; unset it"),
        ("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR", "ACCELERATE_DYNAMO_BACKEND=INDUCTOR, .* eagerly"),
        ("ACCELERATE_USE_FSDP", "true", "ACCELERATE_USE_FSDP=true, .* by one process"),
        ("ACCELERATE_USE_FSDP", "True", "ACCELERATE_USE_FSDP=True, .* by one process"),
        ("ACCELERATE_USE_DEEPSPEED", "true", "ACCELERATE_USE_DEEPSPEED=true, .* by one process"),
        ("ACCELERATE_USE_MEGATRON_LM", "true", "ACCELERATE_USE_MEGATRON_LM=true, .* by one process"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "ACCELERATE_USE_PARALLELISM_CONFIG=true, .* by one process"),
    ],
)
def test_what_accelerate_launch_says_in_the_environment_is_refused(
    name: str, value: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = made(ScheduleTrainer, tmp_path).args
    monkeypatch.setenv(name, value)
    with pytest.raises(TrainingError, match=f"the environment has {says}"):
        ScheduleTrainer(schedule=schedule_for(1, None), model=make_model("gpt2"), args=arguments)


@pytest.mark.parametrize("name", ["DYNAMO_BACKEND", "USE_FSDP", "USE_DEEPSPEED", "USE_PARALLELISM_CONFIG"])
def test_what_accelerate_launch_says_is_off_is_not_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It always says something of these."""
    monkeypatch.setenv(f"ACCELERATE_{name}", "no" if name == "DYNAMO_BACKEND" else "false")
    made(ScheduleTrainer, tmp_path)


def test_a_launcher_of_one_process_does_not_wrap_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`torchrun --nproc-per-node 1`: DDP would hold all gradients twice, and takes no model on the CPU for a GPU."""
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_PORT", "0")
    try:
        trainer = made(ScheduleTrainer, tmp_path)
        trainer.train()
        assert trainer.accelerator.distributed_type == "MULTI_CPU"
        assert trainer.model_wrapped is trainer.model
    finally:
        torch.distributed.destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)
    plain = made(hf.Trainer, tmp_path)
    plain.train()
    assert same_weights(trainer.model, plain.model)


def test_transformers_knows_every_optim_that_is_taken_and_advised() -> None:
    assert set(EXECUTED) <= {name.value for name in hf.training_args.OptimizerNames}
