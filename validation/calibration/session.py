"""A calibration run: the calibration model is profiled and then trained under six plans, in short turns.

Before and after each turn of a plan comes a turn with everything in device memory. It says how slow the machine is at
that moment, relative to the whole calibration run: the *slowdown*.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.scaling import with_ample_memory
from tierplan.planner.lowering import lower
from tierplan.runtime.data.synthetic import random_batches, seeded_model
from tierplan.runtime.measure.units import profile_workload
from tierplan.runtime.tracing.trace import trace_config
from tierplan.sim.columns import unroll
from tierplan.sim.pricing import simulate_on
from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.workload import Training
from tierplan.validation.calibration.budgets import with_room
from tierplan.validation.calibration.calibration import Calibration, calibrate
from tierplan.validation.calibration.measurements import MeasuredTurn, PlanMeasurement, measurement_of
from tierplan.validation.calibration.plans import IN_MEMORY, calibration_plans
from tierplan.validation.calibration.rates import without_compute_latency
from tierplan.validation.calibration.turns import MANY_BATCHES, TurnwiseTraining

NUM_TURNS = 12
STEPS_PER_TURN = 1
"""Counted ones. One more comes before them, and three before those of the first turn."""
PROFILE_STEPS = 8
ROOM = 1.3
"""Capacity over predicted peak: no training of a calibration run waits for memory."""


@dataclass(eq=False)
class CalibrationSession:
    """The calibration model under its plans, ready to be trained turn by turn."""

    config: Mapping[str, object]
    """The `config.json` of the calibration model: the blocks of the models to be predicted, but fewer of them."""
    training: Training
    machine: Machine
    nvme_dir: Path
    life: ExitStack
    """Closes its trainings."""
    device: str = "cpu"
    _trainings: dict[str, TurnwiseTraining] = field(default_factory=dict)

    def run(self) -> Calibration:
        """Profiles the calibration model, trains it under all plans in turns, and fits the calibration."""
        machine = without_compute_latency(self.machine)
        ample = with_ample_memory(machine)
        workload = profile_workload(
            trace_config("calibration model", self.config, self.training),
            seeded_model(self.config, self.training),
            random_batches(self.config, self.training, MANY_BATCHES),
            num_steps=PROFILE_STEPS,
            device=self.device,
        )
        schedules = {}
        for name, plan in calibration_plans(workload, ample).items():
            schedule = lower(plan, workload, ample)
            peaks = simulate_on(unroll(schedule, 2), ample).peak_bytes
            schedules[name] = with_room(schedule, peaks, ROOM)
            training = TurnwiseTraining.of(
                schedules[name], self.config, self.training, self.nvme_dir / name, self.device
            )
            self.life.enter_context(training.trainer)
            self._trainings[name] = training
        measurements, in_memory_s = self._train_in_turns(schedules)
        typical_s = median(in_memory_s)
        return calibrate(workload, machine, measurements, tuple(s / typical_s for s in in_memory_s))

    def in_memory_step_s(self, num_steps: int = STEPS_PER_TURN, warmup_steps: int = 1) -> float:
        """Seconds per step with everything in device memory, measured now: clocks and other guests change."""
        training = self._trainings[IN_MEMORY]
        return training.step_s(training.take_turn(warmup_steps + num_steps, warmup_steps))

    def _train_in_turns(self, schedules: Mapping[str, Schedule]) -> tuple[dict[str, PlanMeasurement], list[float]]:
        """What each plan took, and the seconds per step of all turns in memory. Closes all but the in-memory plan."""
        others = [name for name in schedules if name != IN_MEMORY]
        in_memory_s = [self.in_memory_step_s(warmup_steps=3)]
        turns: dict[str, list[MeasuredTurn]] = {name: [] for name in others}
        for k in range(NUM_TURNS):
            for name in others:
                warmup_steps = 3 if k == 0 else 1
                steps = self._trainings[name].take_turn(warmup_steps + STEPS_PER_TURN, warmup_steps)
                step_s = self._trainings[name].step_s(steps)
                in_memory_s.append(self.in_memory_step_s())
                turns[name].append(
                    MeasuredTurn(steps=steps, step_s=step_s, before_s=in_memory_s[-2], after_s=in_memory_s[-1])
                )
        typical_s = median(in_memory_s)
        in_memory = self._trainings[IN_MEMORY]
        counted = sorted(set(range(in_memory.trainer.num_steps_done)) - in_memory.skipped_steps)
        turns[IN_MEMORY] = [
            MeasuredTurn(
                steps=tuple(counted[k * STEPS_PER_TURN : (k + 1) * STEPS_PER_TURN]), step_s=s, before_s=s, after_s=s
            )
            for k, s in enumerate(in_memory_s)
        ]
        measurements = {}
        for name, schedule in schedules.items():
            training = self._trainings[name]
            trace, skipped = training.trainer.result().trace, training.skipped_steps
            measurements[name] = measurement_of(schedule, trace, skipped, turns[name], typical_s, name == IN_MEMORY)
        for name in others:
            self._trainings.pop(name).trainer.close()
        return measurements, in_memory_s
