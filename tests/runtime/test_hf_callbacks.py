"""Where callbacks of the Hugging Face Trainer see the model's weights while a schedule trains it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from tests.runtime.test_hf_trainer import examples, made
from tierplan.runtime.execution.placement import TrainingError
from tierplan.runtime.hf_trainer import ScheduleTrainer
from tierplan.runtime.reference import same_weights

pytestmark = pytest.mark.usefixtures("one_thread", "past_set_aside")


class Looks(hf.TrainerCallback):
    """Notes a weight, and what a model gives that is used as it is, in these events."""

    def __init__(self, *events: str) -> None:
        self.seen: list[tuple[str, int, float, list[list[int]]]] = []
        for event in events:
            setattr(self, event, lambda *args, event=event, **settings: self._look(event, *args, **settings))

    def _look(self, event: str, args: Any, state: Any, control: Any, model: Any = None, **settings: Any) -> None:
        tokens = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
        weight = float(sum(t.double().sum() for t in model.state_dict().values()))
        self.seen.append((event, state.global_step, weight, tokens.tolist()))


class Changes(hf.TrainerCallback):
    """The weights after the evaluation of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **settings: Any) -> None:
        if state.global_step == self.step:
            with torch.no_grad():
                model.transformer.wpe.weight.mul_(0.5)


def made_with(callback: hf.TrainerCallback, kind: type, folder: Path) -> Any:
    often: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 3}
    given = {"train_dataset": examples(16), "eval_dataset": examples(4), "callbacks": [callback]}
    return made(kind, folder, 2, given=given, **often, max_steps=4)


def test_weights_are_whole_after_an_evaluation_and_after_saving(tmp_path: Path) -> None:
    """What callbacks see, generate and could save there is the plain Trainer's, and training goes on as there."""
    trainers, seen = [], []
    for kind in (hf.Trainer, ScheduleTrainer):
        callback = Looks("on_train_begin", "on_evaluate", "on_prediction_step", "on_save", "on_train_end")
        trainers.append(made_with(callback, kind, tmp_path))
        trainers[-1].train()
        seen.append(callback.seen)
    assert seen[1] == seen[0]
    assert [(event, step) for event, step, *_ in seen[0] if event != "on_prediction_step"] == [
        ("on_train_begin", 0),
        ("on_evaluate", 2),
        ("on_save", 3),
        ("on_evaluate", 4),
        ("on_save", 4),
        ("on_train_end", 4),
    ]
    assert same_weights(trainers[1].model, trainers[0].model)


@pytest.mark.parametrize("step", [2, 4])
def test_weights_that_a_callback_changes_there_end_training(step: int, tmp_path: Path) -> None:
    """In the middle of training, and after its last step: before they are saved, or the model is given back."""
    trainer = made_with(Changes(step), ScheduleTrainer, tmp_path)
    with pytest.raises(TrainingError, match=r"parameter 'transformer\.wpe\.weight' was changed"):
        trainer.train()
    assert trainer._engine.num_steps_done == step
    assert not (Path(trainer.args.output_dir) / f"checkpoint-{step}").exists()
