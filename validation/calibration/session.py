"""A calibration run: the calibration model is profiled and then trained under six plans, in short turns.

Before and after each turn of a plan comes a turn with everything in device memory. It says how slow the machine is at
that moment, relative to the whole calibration run: the *slowdown*.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from statistics import median

from tierplan import __version__
from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.scaling import with_ample_memory
from tierplan.planner.lowering import lower
from tierplan.runtime.data.synthetic import random_batches, seeded_model, versions
from tierplan.runtime.measure.units import profile_workload
from tierplan.sim.columns import unroll
from tierplan.sim.pricing import simulate_on
from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.workload import Workload
from tierplan.validation.calibration.budgets import with_room
from tierplan.validation.calibration.calibration import (
    Calibration,
    calibrate,
    machine_sha256,
    reference_mean_s,
)
from tierplan.validation.calibration.measurements import MeasuredTurn, PlanMeasurement, measurement_of
from tierplan.validation.calibration.plans import IN_MEMORY, calibration_plans
from tierplan.validation.calibration.rates import without_compute_latency
from tierplan.validation.calibration.turns import MANY_BATCHES, TurnwiseTraining

NUM_TURNS = 12
LEAST_TURNS, MOST_TURNS = 3, 40
STEPS_PER_TURN = 1
"""Counted ones. One more comes before them, and three before those of the first turn."""
PROFILE_STEPS = 8
ROOM = 1.3
"""Capacity over predicted peak: no training of a calibration run waits for memory."""
PROFILE_FRAC = 0.15
"""Of a run with a time budget, what profiling is shown to take as it goes on."""


@dataclass(eq=False)
class CalibrationSession:
    """The calibration model under its plans, ready to be trained turn by turn."""

    workload: Workload
    """The calibration model, untimed: the blocks of the models to be predicted, but fewer of them."""
    machine: Machine
    """As it was described."""
    nvme_dir: Path
    life: ExitStack
    """Closes its trainings."""
    device: str = "cpu"
    num_threads: int | None = None
    budget_s: float | None = None
    """Turns are taken until so much time has passed, `LEAST_TURNS` in any case; `NUM_TURNS` if not given."""
    is_stopped: Callable[[], bool] = lambda: False
    """Asked after each round of turns: what has been measured by then is kept, if each plan has had two turns."""
    progress: Callable[[str, float], None] = lambda what, part: None
    _trainings: dict[str, TurnwiseTraining] = field(default_factory=dict)

    def run(self) -> Calibration:
        """Profiles the calibration model, trains it under all plans in turns, and fits the calibration."""
        began_s = time.monotonic()
        ample, training = with_ample_memory(without_compute_latency(self.machine)), self.workload.training
        config, steps = self.workload.config, 2 * PROFILE_STEPS
        profiled = profile_workload(
            self.workload,
            seeded_model(config, training),
            random_batches(config, training, MANY_BATCHES),
            num_steps=PROFILE_STEPS,
            device=self.device,
            num_threads=self.num_threads,
            on_step=lambda k, _: self.progress("timing the model's blocks", PROFILE_FRAC * min(1.0, k / steps)),
        )
        schedules = {}
        for name, plan in calibration_plans(profiled, ample).items():
            schedule = lower(plan, profiled, ample)
            peaks = simulate_on(unroll(schedule, 2), ample).peak_bytes
            schedules[name] = with_room(schedule, peaks, ROOM)
            turnwise = TurnwiseTraining.of(
                schedules[name], config, training, self.nvme_dir / name, self.device, self.num_threads
            )
            self.life.enter_context(turnwise.trainer)
            self._trainings[name] = turnwise
        measurements, in_memory_s, reference_s = self._train_in_turns(schedules, began_s)
        in_memory, typical_s = self._trainings[IN_MEMORY], median(in_memory_s)
        calibration = calibrate(
            self.workload, profiled, self.machine, measurements, tuple(s / typical_s for s in in_memory_s)
        )
        return replace(
            calibration,
            reference_s=reference_s,
            machine=self.machine.name,
            machine_sha256=machine_sha256(self.machine),
            num_threads=int(str(in_memory.trainer.result().trace.meta["num_threads"])),
            versions={"tierplan": __version__, **versions(), "Python": platform.python_version()},
            when=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        )

    def in_memory_step_s(self, num_steps: int = STEPS_PER_TURN, warmup_steps: int = 1) -> float:
        """Seconds per step with everything in device memory, measured now: clocks and other guests change."""
        training = self._trainings[IN_MEMORY]
        return training.step_s(training.take_turn(warmup_steps + num_steps, warmup_steps))

    def _is_over(self, num_turns: int, began_s: float) -> bool:
        """Whether so many turns are enough."""
        if self.is_stopped() and num_turns >= 2:
            return True
        if self.budget_s is None:
            return num_turns >= NUM_TURNS
        is_late = time.monotonic() - began_s > self.budget_s
        return num_turns >= (LEAST_TURNS if is_late else MOST_TURNS)

    def _train_in_turns(
        self, schedules: Mapping[str, Schedule], began_s: float
    ) -> tuple[dict[str, PlanMeasurement], list[float], tuple[float, float]]:
        """What each plan took, the seconds per step of all turns in memory, and those of the reference work alone and
        beside other streams. Closes all but the in-memory plan."""
        others = [name for name in schedules if name != IN_MEMORY]
        in_memory_s = [self.in_memory_step_s(warmup_steps=3)]
        turns: dict[str, list[MeasuredTurn]] = {name: [] for name in others}
        num_turns = 0
        while not self._is_over(num_turns, began_s):
            elapsed = (time.monotonic() - began_s) / self.budget_s if self.budget_s else num_turns / NUM_TURNS
            self.progress(
                f"training under {len(others)} plans, turn {num_turns + 1}", max(PROFILE_FRAC, min(1.0, elapsed))
            )
            for name in others:
                warmup_steps = 3 if num_turns == 0 else 1
                steps = self._trainings[name].take_turn(warmup_steps + STEPS_PER_TURN, warmup_steps)
                step_s = self._trainings[name].step_s(steps)
                in_memory_s.append(self.in_memory_step_s())
                turns[name].append(
                    MeasuredTurn(steps=steps, step_s=step_s, before_s=in_memory_s[-2], after_s=in_memory_s[-1])
                )
            num_turns += 1
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
        times_s: dict[bool, list[float]] = {True: [], False: []}
        for name, schedule in schedules.items():
            training = self._trainings[name]
            trace, skipped = training.trainer.result().trace, training.skipped_steps
            measurements[name] = measurement_of(schedule, trace, skipped, turns[name], typical_s, name == IN_MEMORY)
            assert training.trainer.reference_work is not None
            times_s[len(schedule.streams) == 1] += chain(*training.trainer.reference_work.seconds.values())
        for name in others:
            self._trainings.pop(name).trainer.close()
        return measurements, in_memory_s, (reference_mean_s(times_s[True]), reference_mean_s(times_s[False]))
