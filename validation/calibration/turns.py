"""A schedule that is trained in short turns, with pauses in between.

Where other guests share the cores of a machine, its speed changes from second to second. Trainings that take many short
turns meet the same speeds on average; one long training after another does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tierplan.runtime.data.synthetic import random_batches, seeded_model
from tierplan.runtime.memory.files import make_folder
from tierplan.runtime.optim.adam import OptimizerSettings
from tierplan.runtime.trainer import Trainer
from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.workload import Training
from tierplan.validation.comparison.steps import cut_steps

MANY_BATCHES = 1 << 30


@dataclass(eq=False)
class TurnwiseTraining:
    """A training whose steps are made in turns. The first steps of each turn are not counted: they follow a pause."""

    trainer: Trainer
    batches: Iterator[dict[str, Any]]
    skipped_steps: set[int] = field(default_factory=set)
    """Steps that are not counted."""

    @classmethod
    def of(
        cls,
        schedule: Schedule,
        config: Mapping[str, object],
        training: Training,
        nvme_dir: Path,
        device: str,
        num_threads: int | None = None,
    ) -> TurnwiseTraining:
        """Of a model of this config, with random weights and batches; until its trainer is closed."""
        model = seeded_model(config, training)
        make_folder(nvme_dir)
        optimizer = OptimizerSettings(name=training.optimizer)
        places: dict[str, Any] = {"nvme_dir": nvme_dir, "device": device, "num_threads": num_threads}
        trainer = Trainer(schedule, model, optimizer=optimizer, reference_frac=0.0, **places)
        return cls(trainer, random_batches(config, training, MANY_BATCHES))

    def take_turn(self, num_steps: int, warmup_steps: int = 1) -> tuple[int, ...]:
        """Trains `num_steps` more steps, of which the first `warmup_steps` are not counted; returns those that are."""
        first = self.trainer.num_steps_done
        if self.trainer.reference_work is not None:
            self.trainer.reference_work.asked_step = first + warmup_steps - 1  # warm, and not counted
        self.trainer.run(self.batches, num_steps)
        self.skipped_steps.update(range(first, first + warmup_steps))
        return tuple(range(first + warmup_steps, first + num_steps))

    def step_s(self, steps: Sequence[int]) -> float:
        """Median duration of these steps."""
        durations_s = cut_steps(self.trainer.result().trace, 0).durations_s
        return median(durations_s[k] for k in steps)
