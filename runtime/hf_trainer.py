"""Drives a schedule from the Hugging Face `Trainer`.

    from tierplan.runtime.hf_trainer import ScheduleTrainer
    ScheduleTrainer(schedule=schedule, nvme_dir="/mnt/nvme", model=model, args=arguments, train_dataset=data).train()

Logging, callbacks, the data loader and the learning-rate scheduler are the Trainer's. Forward, backward, clipping and
the update are the schedule's: micro-batches are collected, and each optimizer step is executed when its last one is
there. Weights are the schedule's in a step, and the model's again at the end of training and from an evaluation or a
save to the next step.

Settings that a schedule does not honour are refused (`hf_arguments`). The Trainer needs the package `accelerate`, which
the extra `runtime` brings.
"""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Iterable, Mapping, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from tierplan.runtime.execution.executable import executable_step
from tierplan.runtime.execution.executor import traced_steps
from tierplan.runtime.execution.placement import TrainingError
from tierplan.runtime.hf_arguments import (
    check_accelerator,
    check_arguments,
    check_attributes,
    check_callbacks,
    check_devices,
    check_environment,
    check_epoch,
    check_methods,
    check_step,
    check_trainer_settings,
)
from tierplan.runtime.job import stop_on_interrupt
from tierplan.runtime.optim.adam import OptimizerSettings, ParameterGroup
from tierplan.runtime.trainer import Trainer
from tierplan.sim.schedule import Schedule

STATES_NAME = "tierplan"
"""In a checkpoint, the folder with what outlives a step."""


FIXED = frozenset({"betas", "eps", "momentum", "weight_decay"})
"""Settings of an optimizer's groups that nobody can change while it trains."""


BESIDE_STATES = ("optimizer.pt", "scheduler.pt", "rng_state.pth")
"""What else a checkpoint has that numbers depend on, and that the plain Trainer goes on without."""


class _Update(torch.optim.Optimizer):
    """Carries the learning rate for the scheduler, in the Trainer's two groups; the schedule's own ops update the
    parameters.

    `rates` has it by step, since an update may be made during the next one, and comes into checkpoints this way.
    """

    def __init__(self, lr: float, groups: Iterable[tuple[float, Iterable[nn.Parameter]]]) -> None:
        """Each group by its weight decay and its parameters."""
        self._own = [({"weight_decay": decay}, any(p.requires_grad for p in some)) for decay, some in groups]
        super().__init__([{"params": [nn.Parameter(torch.zeros(1))], **fixed} for fixed, _ in self._own], {"lr": lr})
        self.param_groups[0]["rates"] = {}

    def rate(self) -> float:
        """Of the next step. Raises `TrainingError` where somebody has set what the schedule cannot take over."""
        for group, (fixed, _) in zip(self.param_groups, self._own, strict=True):
            now = {name: value for name, value in group.items() if name in FIXED}
            if changed := sorted(name for name in {**now, **fixed} if now.get(name) != fixed.get(name)):
                raise TrainingError(
                    f"the optimizer's groups have other {', '.join(changed)}, which the schedule has from the "
                    "beginning; only lr can change: give these to TrainingArguments"
                )
        own = [float(group["lr"]) for group, (_, has) in zip(self.param_groups, self._own, strict=True) if has]
        if len(set(own)) > 1:
            raise TrainingError(
                f"the optimizer's groups have learning rates {' and '.join(f'{lr:g}' for lr in own)}, but the schedule "
                "has one for all parameters; set lr of both groups alike"
            )
        return own[0]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Done already, by the schedule."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients are the schedule's."""


class ScheduleTrainer(transformers.Trainer):
    """The Trainer whose training steps are executed by a schedule. Settings after `nvme_dir` are the Trainer's."""

    def __init__(
        self, *, schedule: Schedule, nvme_dir: Any = None, num_threads: int | None = None, **settings: Any
    ) -> None:
        if not hasattr(transformers.Trainer, "_finalize_training"):
            raise TrainingError(
                f"transformers {transformers.__version__} has another training loop than the one that the adapter was "
                "made for; install 5.23 or a later one"
            )
        check_devices(schedule)
        training = executable_step(schedule).training
        check_methods(self, ScheduleTrainer)
        check_trainer_settings(settings)
        check_environment(os.environ)
        if settings.get("args") is None:
            settings["args"] = transformers.TrainingArguments(output_dir="tmp_trainer")  # as the Trainer does
        check_arguments(settings["args"], training)
        super().__init__(**settings)
        check_accelerator(self.accelerator)
        self._training = training
        self._update: _Update | None = None
        self._has_trained = self._is_over = self._is_torn = False
        self._waiting: list[Mapping[str, Any]] = []
        check_arguments(self.args, training)
        self._engine = Trainer(
            schedule,
            self.model,
            nvme_dir=nvme_dir,
            optimizer=self._optimizer_settings(),
            learning_rate=lambda step: self._rates[step],
            seed=None,
            num_threads=num_threads,
            device=str(self.args.device) if self.args.device.type == "cuda" else "cpu",
            trace_steps=traced_steps(schedule),
        )

    def _optimizer_settings(self) -> OptimizerSettings:
        args, decayed = self.args, set(self.get_decay_parameter_names(self.model))
        spared = tuple(name for name, _ in self.model.named_parameters() if name not in decayed)
        return OptimizerSettings(
            name=self._training.optimizer,
            lr=args.learning_rate,
            betas=(args.adam_beta1, args.adam_beta2),
            eps=args.adam_epsilon,
            weight_decay=args.weight_decay,
            groups=(ParameterGroup(names=spared, weight_decay=0.0),),
        )

    def create_optimizer(self, *unused: Any, **ignored: Any) -> torch.optim.Optimizer:
        self.optimizer: Any
        if self.optimizer is None:
            named, decayed = dict(self.model.named_parameters()), set(self.get_decay_parameter_names(self.model))
            both = [[p for name, p in named.items() if (name in decayed) == is_decayed] for is_decayed in (True, False)]
            groups = zip((self.args.weight_decay, 0.0), both, strict=True)
            self.optimizer = self._update = _Update(self.args.learning_rate, groups)
            if (settings := self._optimizer_settings()) != self._engine.optimizer:  # arguments were changed meanwhile
                self._engine = replace(self._engine, optimizer=settings)
        return self.optimizer  # type: ignore[no-any-return]

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **settings: Any) -> Any:
        if self._has_trained:
            raise TrainingError("train is called again, but its optimizer states are gone; make a new ScheduleTrainer")
        check_arguments(self.args, self._training)
        check_methods(self, ScheduleTrainer)
        check_attributes(self, self._update)
        check_callbacks(self.callback_handler.callbacks, transformers.TrainerCallback)
        if isinstance(self.train_dataset, Sized):
            check_epoch(len(self.train_dataset), self.args, self._training.gradient_accumulation_steps)
        return super().train(resume_from_checkpoint, *args, **settings)

    @property
    def _rates(self) -> dict[int, float]:
        return self.optimizer.param_groups[0]["rates"]  # type: ignore[no-any-return]

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # Else it would be moved to the device, and under a launcher of one process DDP would hold all gradients twice.
        self.accelerator.prepare_model = lambda model, *unused, **ignored: model

    def _move_model_to_device(self, *unused: Any, **ignored: Any) -> None:
        """The schedule moves what an op needs."""

    def _run_epoch(self, *args: Any, **settings: Any) -> None:
        if self._waiting:  # the Trainer would go on with their gradients, of a callback or of data without a length
            raise TrainingError(
                f"an epoch ended after {len(self._waiting)} micro-batches of a step, but the schedule's steps have "
                f"{self._training.gradient_accumulation_steps}; leave examples out so that epochs end with a step, and "
                "set should_epoch_stop in on_step_end alone"
            )
        super()._run_epoch(*args, **settings)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Collects a micro-batch; its loss when the step is complete, which those of earlier ones join, 0 before."""
        check_step(self.args, self._training)
        model.train()  # an evaluation has set it to evaluation
        inputs = self._prepare_inputs(inputs)
        is_divided = num_items_in_batch is not None and self.model_accepts_loss_kwargs
        if is_divided:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        self._waiting.append(inputs)
        if len(self._waiting) < (wanted := self._training.gradient_accumulation_steps):
            if self.accelerator.sync_gradients:
                raise TrainingError(
                    f"the last step of the epoch has {len(self._waiting)} micro-batches, but the schedule's steps have "
                    f"{wanted}; leave examples out so that their number is a multiple of both"
                )
            return torch.zeros((), device=self.args.device)
        batches, self._waiting = self._waiting, []
        # As the Trainer does it: a loss that is divided by the number of tokens of the step is not divided again.
        asks = hasattr(transformers.Trainer, "loss_is_scaled_for_ga")  # not before 5.23
        is_scaled = self.loss_is_scaled_for_ga if asks else None
        self._engine.divides_loss = not (is_divided if is_scaled is None else is_scaled)
        done = self._engine.num_steps_done
        self._rates.pop(done - 2, None)
        assert self._update is not None, "made before the first step"
        self._rates[done] = self._update.rate()
        with stop_on_interrupt(numbers=[signal.SIGINT]) as is_interrupted:  # between steps, where the model is whole
            self._engine.run(batches, 1)
        if is_interrupted():
            raise KeyboardInterrupt
        *earlier, loss = self._engine.last_losses
        for earlier_loss in earlier:  # one by one, as the Trainer adds them, which leaves out those that are not finite
            is_left_out = self.args.logging_nan_inf_filter and not math.isfinite(earlier_loss)
            num_steps = 1 + self.state.global_step - self._globalstep_last_logged
            self._tr_loss += self._tr_loss / num_steps if is_left_out else earlier_loss
        return torch.tensor(loss, device=self.args.device)

    def _clip_grad_norm(self, *unused: Any, **ignored: Any) -> None:
        """The schedule clips."""

    def _get_grad_norm(self, *unused: Any, **ignored: Any) -> torch.Tensor | None:
        """Where the schedule clips. Else nobody has seen all gradients together, and no norm is logged."""
        return self._engine.last_grad_norm

    def _inner_training_loop(self, *args: Any, **settings: Any) -> Any:
        self._has_trained = True
        try:
            return super()._inner_training_loop(*args, **settings)
        except BaseException:  # between steps the model is whole, as it was after the last one
            if self._engine.is_placed and not self._is_over:
                try:
                    self._engine.restore_model()
                except Exception:
                    self._is_torn = True
                    for part in (part for unit in self._engine.units for part in unit.parts):
                        part.unbind()  # else those that are on the device would look whole
            raise
        finally:
            self._engine.close()

    def _finalize_training(self, *args: Any, **settings: Any) -> Any:
        self._make_whole()
        self._is_over = True
        return super()._finalize_training(*args, **settings)

    def _make_whole(self) -> None:
        """The model has its parameters, until the next step: callbacks after an evaluation or a save see them, too.
        Raises `TrainingError` where one has changed them since they were made whole before."""
        if self._is_torn:
            raise TrainingError(
                "training ended in the middle of a step, by an error or a second Ctrl-C, and left no whole model; load "
                "the last checkpoint"
            )
        if self._engine.is_placed and not self._is_over:
            self._engine.placement.take_back()
            self._engine.restore_model()

    def evaluation_loop(self, *args: Any, **settings: Any) -> Any:
        self._make_whole()
        self.model.to(self.args.device)
        return super().evaluation_loop(*args, **settings)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        self._engine.save_copy(Path(output_dir) / STATES_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        folder = Path(checkpoint) / STATES_NAME
        if not folder.is_dir():
            raise TrainingError(
                f"{checkpoint} has no {STATES_NAME}, which holds the optimizer states: it was saved with "
                "save_only_model=True, or by another Trainer. Resume where it was made, or begin anew from its weights"
            )
        if missing := [name for name in BESIDE_STATES if not (Path(checkpoint) / name).is_file()]:
            raise TrainingError(
                f"{checkpoint} has no {' and no '.join(missing)}, without which training would go on with other "
                "numbers; resume from a checkpoint that is complete"
            )
        super()._load_optimizer_and_scheduler(checkpoint)
        self._engine = replace(self._engine, start=folder)
        if self._engine.num_steps_done != self.state.global_step:
            raise TrainingError(
                f"{folder} was saved after {self._engine.num_steps_done} steps, but {checkpoint} is that of step "
                f"{self.state.global_step}; resume from a checkpoint whose files were saved together"
            )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        self._make_whole()
        super().save_model(output_dir, _internal_call)
