"""How the Hugging Face Trainer's training ends on a schedule: by an error, by Ctrl-C, or before it begins."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from tests.runtime.models import make_batches, make_model
from tests.runtime.models import schedule_for as planned_for
from tests.runtime.ranks.test_ranks import several
from tests.runtime.test_hf_trainer import arguments, examples, made
from tests.runtime.test_trainer import CPU, machine
from tests.toys import uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.planner.policies import decide
from tierplan.runtime.execution.instances import ExecutionError
from tierplan.runtime.execution.placement import TrainingError
from tierplan.runtime.execution.values import SizeError
from tierplan.runtime.hf_arguments import check_epoch
from tierplan.runtime.hf_trainer import ScheduleTrainer
from tierplan.runtime.optim.adam import NonFiniteGradientError
from tierplan.runtime.reference import same_weights
from tierplan.runtime.tracing.trace import trace_module

pytestmark = pytest.mark.usefixtures("one_thread", "past_set_aside")


CONSTANT: dict[str, Any] = {"lr_scheduler_type": "constant", "warmup_steps": 0}
"""The same rates, however many steps there are."""


class Sets(hf.TrainerCallback):
    """Sets something of the first of the optimizer's groups, or ends training by an error, after the second step."""

    def __init__(self, **values: float) -> None:
        self.values = values

    def on_step_end(self, args: Any, state: Any, control: Any, **settings: Any) -> None:
        if state.global_step == 2:
            settings["optimizer"].param_groups[0].update(self.values)
            if not self.values:
                raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"weight_decay": 0.1}, "groups have other weight_decay, .* only lr"),
        ({"lr": 0.5}, r"groups have learning rates 0\.5 and 0\.01, .* both groups alike"),
        ({}, "^$"),
    ],
)
def test_where_training_ends_by_an_error_the_model_is_whole(
    values: dict[str, float], says: str, tmp_path: Path
) -> None:
    """As it was after the last step: two steps of the plain Trainer, before anything was set."""
    trainer = made(ScheduleTrainer, tmp_path, given={"callbacks": [Sets(**values)]}, **CONSTANT)
    with pytest.raises(TrainingError if values else KeyboardInterrupt, match=says):
        trainer.train()
    expected = made(hf.Trainer, tmp_path, **CONSTANT, max_steps=2)
    expected.train()
    assert same_weights(trainer.model, expected.model)


class SetsRates(hf.TrainerCallback):
    """A learning rate of its own in each step, in all groups."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **settings: Any) -> None:
        for group in settings["optimizer"].param_groups:
            group["lr"] = 1e-3 * (state.global_step + 1)


class Freezes(hf.TrainerCallback):
    """Freezes a parameter, or trains it from now on, after the second step."""

    def __init__(self, name: str, is_trained: bool) -> None:
        self.name, self.is_trained = name, is_trained

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **settings: Any) -> None:
        if state.global_step == 2:
            model.get_parameter(self.name).requires_grad_(self.is_trained)


@pytest.mark.parametrize(
    ("name", "is_trained"), [("transformer.h.1.ln_1.bias", False), ("transformer.h.0.mlp.c_fc.weight", True)]
)
@pytest.mark.parametrize("acts", ["host", "recompute"])
def test_a_callback_cannot_change_what_is_trained(name: str, is_trained: bool, acts: Any, tmp_path: Path) -> None:
    def new_model() -> Any:
        model = make_model("gpt2")
        model.get_parameter("transformer.h.0.mlp.c_fc.weight").requires_grad_(False)
        return model

    choice = UnitPlan(params="host", frozen="host", grads="host", states="host", acts=acts)
    schedule = planned_for(new_model(), choice, traced=make_batches(1)[0])
    given = {"schedule": schedule, "model": new_model(), "callbacks": [Freezes(name, is_trained)]}
    trainer = made(ScheduleTrainer, tmp_path, given=given)
    now = "to be trained" if is_trained else "frozen"
    with pytest.raises(TrainingError, match=rf"'{name}' is {now} .* now, which it was not when the run began"):
        trainer.train()


def test_a_learning_rate_that_a_callback_sets_in_all_groups(tmp_path: Path) -> None:
    """The groups are those of the plain Trainer, and training with their rates gives its weights."""
    models, decays = [], []
    for build in (hf.Trainer, ScheduleTrainer):
        trainer = made(build, tmp_path, given={"callbacks": [SetsRates()]}, weight_decay=0.1)
        trainer.train()
        models.append(trainer.model)
        decays.append([group["weight_decay"] for group in trainer.optimizer.param_groups])  # type: ignore[union-attr]
    assert decays == [[0.1, 0.0]] * 2
    assert same_weights(*models)


def test_ctrl_c_in_the_middle_of_a_step_comes_behind_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = made(ScheduleTrainer, tmp_path)
    run, calls = trainer._engine.run, []

    def interrupted(batches: Any, steps: int) -> None:
        calls.append(steps)
        if len(calls) == 3:
            threading.Timer(0.001, os.kill, (os.getpid(), signal.SIGINT)).start()
        run(batches, steps)
        if len(calls) == 3:
            time.sleep(0.1)  # it has come, sooner or later

    monkeypatch.setattr(trainer._engine, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer._engine.num_steps_done == 3
    assert all(p.isfinite().all() for p in trainer.model.parameters())
    trainer.save_model(str(tmp_path / "saved"))


@pytest.mark.parametrize("is_torn", [False, True])
def test_a_model_that_an_error_tore_apart_is_not_saved(
    is_torn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the third step a micro-batch has another length: an op ends by an error, before anything is updated."""
    longer = [{k: v[0] for k, v in batch.items()} for batch in make_batches(2, batch=1, length=32)]
    data = [*examples(4), *longer, *examples(20)]
    trainer = made(ScheduleTrainer, tmp_path, given={"train_dataset": data}, train_sampling_strategy="sequential")
    if is_torn:
        monkeypatch.setattr(trainer._engine, "restore_model", lambda: 1 / 0)
    with pytest.raises(SizeError):
        trainer.train()
    if is_torn:
        with pytest.raises(TrainingError, match="left no whole model; load the last checkpoint"):
            trainer.save_model(str(tmp_path / "saved"))
        assert not (tmp_path / "saved").exists()
    else:
        trainer.save_model(str(tmp_path / "saved"))
        assert all(p.isfinite().all() for p in hf.GPT2LMHeadModel.from_pretrained(tmp_path / "saved").parameters())


@pytest.mark.parametrize("is_error", [False, True])
@pytest.mark.parametrize("is_in_backward", [False, True])
def test_a_model_that_is_half_updated_is_not_saved(is_in_backward: bool, is_error: bool, tmp_path: Path) -> None:
    """The gradient that comes last in backward is wrong in the third step. By then updates inside backward have made
    nearly all parameters those of that step, in memory and finite. Updates behind it have not begun: all are those of
    two steps of the plain Trainer."""
    plain, model = make_model("llama"), make_model("llama")
    workload = trace_module(model, make_batches(1)[0], CPU)
    plan = uniform_plan(workload, UnitPlan()) if is_in_backward else decide("in-memory", workload, machine(), {})
    calls: list[torch.Tensor] = []

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(gradient)
        if len(calls) < 3:
            return gradient
        return gradient * (1 / 0 if is_error else float("nan"))

    model.model.embed_tokens.weight.register_hook(spoil)
    schedule = lower(plan, workload, machine())
    trainer = made(ScheduleTrainer, tmp_path, given={"schedule": schedule, "model": model}, **CONSTANT)
    with pytest.raises(ZeroDivisionError if is_error else NonFiniteGradientError):
        trainer.train()
    if is_in_backward:
        assert all(p.isnan().all() for p in model.parameters())
        for refused in (lambda: trainer.save_model(str(tmp_path / "saved")), lambda: trainer.evaluate(examples(2))):
            with pytest.raises(TrainingError, match="left no whole model; load the last checkpoint"):
                refused()
        with pytest.raises(ExecutionError, match="some parameters had been updated and others had not"):
            trainer._engine.save_copy(tmp_path / "copy")
        return
    trainer.save_model(str(tmp_path / "saved"))
    made(hf.Trainer, tmp_path, given={"model": plain}, **CONSTANT, max_steps=2).train()
    assert same_weights(model, plain)


@pytest.mark.parametrize(
    ("count", "accumulation", "more", "says"),
    [
        (
            9,
            2,
            {"max_steps": 3},
            "an epoch of 9 examples ends in a micro-batch of 1, .* 2 micro-batches of 2; set datal",
        ),
        (9, 2, {"max_steps": 2}, ""),
        (9, 2, {"max_steps": 3, "dataloader_drop_last": True}, ""),
        (
            10,
            2,
            {"max_steps": -1, "num_train_epochs": 1},
            "ends in a step of 1 micro-batches, .* 2; leave examples out",
        ),
        (8, 2, {"max_steps": 3}, ""),
        (18, 2, {"max_steps": -1, "num_train_epochs": 0.95}, "ends in a step of 1 micro-batches"),
        (18, 2, {"max_steps": -1, "num_train_epochs": 0.8}, ""),
        (3, 2, {"max_steps": -1, "num_train_epochs": 0.5}, "ends in a micro-batch of 1"),
    ],
)
def test_an_epoch_that_ends_in_less_than_a_step_is_refused_before(
    count: int, accumulation: int, more: dict[str, Any], says: str, tmp_path: Path
) -> None:
    args = arguments(tmp_path, accumulation, None, **more)
    if says:
        with pytest.raises(TrainingError, match=says):
            check_epoch(count, args, accumulation)
    else:
        check_epoch(count, args, accumulation)


class EndsTheEpoch(hf.TrainerCallback):
    """In the middle of the third step, once."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **settings: Any) -> None:
        control.should_epoch_stop = state.global_step == 2


class Stream(torch.utils.data.IterableDataset[Any]):
    """Of five micro-batches; nobody knows that before."""

    def __iter__(self) -> Any:
        return iter(examples(10))


@pytest.mark.parametrize("is_stream", [True, False])
def test_no_update_is_made_of_two_epochs(is_stream: bool, tmp_path: Path) -> None:
    """After two steps, whose weights are those of the plain Trainer, the next epoch ends training by an error."""
    given = {"train_dataset": Stream() if is_stream else examples(16)}
    plain = made(hf.Trainer, tmp_path, 2, given=given, **CONSTANT, max_steps=2)
    plain.train()
    trainer = made(ScheduleTrainer, tmp_path, 2, given=given, **CONSTANT)
    if not is_stream:
        trainer.add_callback(EndsTheEpoch())
    with pytest.raises(TrainingError, match=r"an epoch ended after 1 micro-batches of a step, .* 2;"):
        trainer.train()
    assert trainer._engine.num_steps_done == 2
    assert same_weights(trainer.model, plain.model)


def test_a_checkpoint_with_states_of_another_step_is_refused(tmp_path: Path) -> None:
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    first = made(ScheduleTrainer, tmp_path, **saving)
    first.train()
    before, last = (Path(first.args.output_dir) / f"checkpoint-{k}" for k in (1, 2))
    shutil.rmtree(last / "tierplan")
    shutil.copytree(before / "tierplan", last / "tierplan")
    trainer = made(ScheduleTrainer, tmp_path, **saving)
    with pytest.raises(TrainingError, match=r"tierplan was saved after 1 steps, but .*checkpoint-2 is that of step 2"):
        trainer.train(resume_from_checkpoint=str(last))


def test_a_plan_of_several_devices_is_refused() -> None:
    """Also under `torchrun`: the advice was to start as many processes as were started."""
    workload, two = trace_module(make_model("gpt2"), make_batches(1)[0], CPU), several(2)
    schedule = lower(decide("ddp", workload, two, {}), workload, two)
    with pytest.raises(
        TrainingError, match=r"is for 2 devices, but under the Hugging Face Trainer .* plan for one, or"
    ):
        ScheduleTrainer(schedule=schedule)
