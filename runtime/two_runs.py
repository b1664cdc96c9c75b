"""One model trained twice from the same start: on a schedule, and plainly in memory. The demo compares the two.

setup = TrainingSetup(workload=workload, tokens=tokens, optimizer=OptimizerSettings())
profiled = setup.profile(num_steps=6)
run, model = setup.train(schedule, steps=12, nvme_dir=folder)
plain = setup.train_plainly(steps=12)
plain.losses == run.losses
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from tierplan.runtime.measure.units import profile_workload
from tierplan.runtime.optim.adam import OptimizerSettings
from tierplan.runtime.reference import train_plainly
from tierplan.runtime.tracing.models import build_model
from tierplan.runtime.trainer import RunResult, train
from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.workload import Workload

__all__ = ["PlainRun", "TrainingSetup", "same_weights", "window_batches"]

OnStep = Callable[[int, float], None]


def ignore_step(step: int, loss: float) -> None:
    """Does nothing: nobody asked to be told of steps."""


def window_batches(tokens: np.ndarray, *, batch: int, length: int, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Micro-batches of `batch` sequences of `length` tokens from random places; the same for the same seed."""
    if len(tokens) <= length:
        raise ValueError(f"there are {len(tokens):,} tokens, but one sequence takes {length:,}; give a longer text")
    text = torch.from_numpy(np.ascontiguousarray(tokens, dtype=np.int64))
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(text) - length, (batch,), generator=generator).tolist()
        ids = torch.stack([text[k : k + length] for k in starts])
        yield {"input_ids": ids, "labels": ids}


def same_weights(a: nn.Module, b: nn.Module) -> bool:
    """Whether two models have the same parameters, bit for bit."""
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


@dataclass(frozen=True, kw_only=True)
class PlainRun:
    """The result of plain training in memory."""

    losses: tuple[float, ...]
    model: nn.Module
    peak_bytes: int
    """Highest sum of live tensors (parameters, gradients, states, activations) by PyTorch's memory tracker; 0 where
    memory was not tracked."""


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """A workload with its text and seed. Every training from it begins with the same weights and the same batches."""

    workload: Workload
    """Its `config` says which model."""
    tokens: np.ndarray
    optimizer: OptimizerSettings
    seed: int = 0
    num_threads: int = 1
    """For kernels on the CPU."""
    device: str = "cpu"

    def model(self) -> nn.Module:
        """The model at its start."""
        torch.manual_seed(self.seed)
        return build_model(self.workload.config, self.workload.training)

    def batches(self) -> Iterator[dict[str, torch.Tensor]]:
        training = self.workload.training
        return window_batches(
            self.tokens,
            batch=training.per_device_train_batch_size,
            length=training.sequence_length,
            seed=self.seed,
        )

    def profile(self, *, num_steps: int, on_step: OnStep = ignore_step) -> Workload:
        """The workload with the times that its units take here."""
        return profile_workload(
            self.workload,
            self.model(),
            self.batches(),
            num_steps=num_steps,
            device=self.device,
            num_threads=self.num_threads,
            on_step=on_step,
        )

    def train(
        self,
        schedule: Schedule,
        *,
        steps: int,
        nvme_dir: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None,
        on_step: OnStep = ignore_step,
    ) -> tuple[RunResult, nn.Module]:
        """Trains on a schedule; what happened, and the trained model."""
        model = self.model()
        run = train(
            schedule,
            model,
            self.batches(),
            steps=steps,
            nvme_dir=nvme_dir,
            optimizer=self.optimizer,
            seed=self.seed,
            num_threads=self.num_threads,
            device=self.device,
            on_step=on_step,
        )
        return run, model

    def train_plainly(self, *, steps: int, track_memory: bool = False, on_step: OnStep = ignore_step) -> PlainRun:
        """The same training with PyTorch's own optimizer, everything in memory."""
        training = self.workload.training
        threads = torch.get_num_threads()
        torch.set_num_threads(self.num_threads)
        try:
            model, tracker = self.model(), None
            if track_memory:
                tracker = MemTracker()
                tracker.track_external(model)

            def after_step(step: int, loss: float) -> None:
                if tracker:
                    tracker.reset_mod_stats()  # it takes one iteration at a time
                on_step(step, loss)

            with tracker or contextlib.nullcontext():
                losses = train_plainly(
                    model,
                    self.batches(),
                    steps=steps,
                    optimizer=self.optimizer,
                    gradient_accumulation_steps=training.gradient_accumulation_steps,
                    max_grad_norm=training.max_grad_norm,
                    master_weights=training.master_weights,
                    seed=self.seed,
                    on_step=after_step,
                )
        finally:
            torch.set_num_threads(threads)
        peak = 0
        if tracker:
            snapshot = tracker.get_tracker_snapshot("peak")
            peak = sum(int(by_kind["Total"]) for by_kind in snapshot.values())
        return PlainRun(losses=tuple(losses), model=model, peak_bytes=peak)
