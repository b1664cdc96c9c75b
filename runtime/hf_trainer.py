"""Drives a schedule from the Hugging Face `Trainer`.

    from tierplan.runtime.hf_trainer import ScheduleTrainer
    ScheduleTrainer(schedule=schedule, nvme_dir="/mnt/nvme", model=model, args=arguments, train_dataset=data).train()

Logging, callbacks, the data loader and the learning-rate scheduler are the Trainer's. Forward, backward, clipping and
the update are the schedule's: micro-batches are collected, and each optimizer step is executed when its last one is
there. Weights are the schedule's while training, and the model's again at its end and for saving.

The Trainer needs the package `accelerate`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import nn

from tierplan.runtime.execution.executable import executable_step
from tierplan.runtime.optim.adam import OptimizerSettings, ParameterGroup
from tierplan.runtime.trainer import Trainer, TrainingError
from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.workload import Training

__all__ = ["ScheduleTrainer"]


class _Update(torch.optim.Optimizer):
    """Carries the learning rate for the scheduler; the schedule's own ops update the parameters."""

    def __init__(self, lr: float) -> None:
        super().__init__([nn.Parameter(torch.zeros(1))], {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Done already, by the schedule."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Gradients are the schedule's."""


class ScheduleTrainer(transformers.Trainer):
    """The Trainer whose training steps are executed by a schedule. Settings after `nvme_dir` are the Trainer's."""

    def __init__(
        self, *, schedule: Schedule, nvme_dir: Any = None, num_threads: int | None = None, **settings: Any
    ) -> None:
        super().__init__(**settings)
        training = executable_step(schedule).training
        self._check_arguments(training)
        self._num_micro_batches = training.gradient_accumulation_steps
        self._waiting: list[Mapping[str, Any]] = []
        args = self.args
        decayed = set(self.get_decay_parameter_names(self.model))
        spared = tuple(name for name, _ in self.model.named_parameters() if name not in decayed)
        self._engine = Trainer(
            schedule,
            self.model,
            nvme_dir=nvme_dir,
            optimizer=OptimizerSettings(
                lr=args.learning_rate,
                betas=(args.adam_beta1, args.adam_beta2),
                eps=args.adam_epsilon,
                weight_decay=args.weight_decay,
                groups=(ParameterGroup(names=spared, weight_decay=0.0),),
            ),
            learning_rate=lambda step: self._current_rate(),
            seed=None,
            num_threads=num_threads,
            device="cuda" if args.device.type == "cuda" else "cpu",
            trace_steps=20,
        )
        # As the Trainer does it: a loss that is divided by the number of tokens of the step is not divided again.
        self._engine.divides_loss = not self.model_accepts_loss_kwargs

    def _check_arguments(self, training: Training) -> None:
        args = self.args
        wanted = {
            "per_device_train_batch_size": training.per_device_train_batch_size,
            "gradient_accumulation_steps": training.gradient_accumulation_steps,
            "max_grad_norm": training.max_grad_norm or 0.0,
            "gradient_checkpointing": False,
            "fp16": False,
            "bf16": False,
        }
        for name, value in wanted.items():
            if getattr(args, name) != value:
                raise TrainingError(
                    f"TrainingArguments have {name}={getattr(args, name)!r}, but the schedule was made for {value!r}; "
                    "set it so, or plan again (a model in bf16 needs no autocast)"
                )

    def create_optimizer(self, *unused: Any, **ignored: Any) -> torch.optim.Optimizer:
        self.optimizer: Any
        if self.optimizer is None:
            self.optimizer = _Update(self.args.learning_rate)
        return self.optimizer  # type: ignore[no-any-return]

    def _current_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def training_step(self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None) -> torch.Tensor:
        """Collects a micro-batch; the loss of all of them when the step is complete, 0 before."""
        inputs = self._prepare_inputs(inputs)
        if num_items_in_batch is not None and self.model_accepts_loss_kwargs:
            inputs = {**inputs, "num_items_in_batch": num_items_in_batch}
        self._waiting.append(inputs)
        if len(self._waiting) < self._num_micro_batches:
            if self.accelerator.sync_gradients:
                raise TrainingError(
                    f"the last step of the epoch has {len(self._waiting)} micro-batches, but the schedule's steps have "
                    f"{self._num_micro_batches}; leave examples out so that their number is a multiple of both"
                )
            return torch.zeros(())
        batches, self._waiting = self._waiting, []
        self._engine.run(batches, 1)
        return torch.tensor(self._engine.last_loss)

    def _clip_grad_norm(self, *unused: Any, **ignored: Any) -> None:
        """The schedule clips."""

    def _inner_training_loop(self, *args: Any, **settings: Any) -> Any:
        with self._engine:
            out = super()._inner_training_loop(*args, **settings)
            self._engine.restore_model()
            return out

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self._engine.is_placed:
            self._engine.restore_model()
        super().save_model(output_dir, _internal_call)
