"""A calibration run: the calibration model is profiled and then trained under six plans, in short turns."""

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
from tierplan.validation.calibration.calibration import Calibration, calibrate, machine_sha256
from tierplan.validation.calibration.measurements import PlanMeasurement, measurement_of
from tierplan.validation.calibration.plans import IN_MEMORY, calibration_plans
from tierplan.validation.calibration.rates import without_compute_latency
from tierplan.validation.calibration.turns import MANY_BATCHES, TurnwiseTraining

NUM_TURNS = 12
LEAST_TURNS, MOST_TURNS = 3, 40
STEPS_PER_TURN = 1
"""Counted ones. One more comes before them, and three before those of the first turn."""
PROFILE_STEPS = 8
SHORT_S = 60.0
"""A run with less has half as many."""
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
        config, is_short = self.workload.config, self.budget_s is not None and self.budget_s < SHORT_S
        num_steps = max(2, PROFILE_STEPS // 2) if is_short else PROFILE_STEPS
        profiled = profile_workload(
            self.workload,
            seeded_model(config, training),
            random_batches(config, training, MANY_BATCHES),
            num_steps=num_steps,
            device=self.device,
            num_threads=self.num_threads,
            on_step=lambda k, _: self.progress(
                "timing the model's blocks", PROFILE_FRAC * min(1.0, k / (2 * num_steps))
            ),
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
        measurements, reference_s = self._train_in_turns(schedules, began_s)
        in_memory = self._trainings[IN_MEMORY]
        return replace(
            calibrate(self.workload, profiled, self.machine, measurements),
            reference_s=reference_s,
            machine=self.machine.name,
            machine_sha256=machine_sha256(self.machine),
            num_threads=int(str(in_memory.trainer.result().trace.meta["num_threads"])),
            versions={"tierplan": __version__, **versions(), "Python": platform.python_version()},
            when=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        )

    def in_memory_step_s(self, num_steps: int = STEPS_PER_TURN) -> float:
        """Seconds per step with everything in device memory, measured now: clocks and other guests change."""
        return self._turn_s(IN_MEMORY, num_steps)

    def _turn_s(self, name: str, num_steps: int = STEPS_PER_TURN) -> float:
        """Seconds per step of a turn, after a step that follows a pause, or three at first."""
        training = self._trainings[name]
        warmup_steps = 1 if training.skipped_steps else 3
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
    ) -> tuple[dict[str, PlanMeasurement], tuple[float, float]]:
        """What each plan took, and the seconds of the reference work alone and beside other streams. Closes all but the
        in-memory plan."""
        turns_s: dict[str, list[float]] = {name: [] for name in schedules}
        num_turns = 0
        while not self._is_over(num_turns, began_s):
            elapsed = (time.monotonic() - began_s) / self.budget_s if self.budget_s else num_turns / NUM_TURNS
            self.progress(
                f"training under {len(schedules)} plans, turn {num_turns + 1}", max(PROFILE_FRAC, min(1.0, elapsed))
            )
            for name in schedules:
                turns_s[name].append(self._turn_s(name))
            num_turns += 1
        measurements = {}
        times_s: dict[bool, list[float]] = {True: [], False: []}
        for name, schedule in schedules.items():
            training = self._trainings[name]
            trace = training.trainer.result().trace
            measurements[name] = measurement_of(schedule, trace, training.skipped_steps, turns_s[name])
            assert training.trainer.reference_work is not None
            times_s[len(schedule.streams) == 1] += chain(*training.trainer.reference_work.seconds.values())
            if name != IN_MEMORY:
                self._trainings.pop(name).trainer.close()
        return measurements, (median(times_s[True]), median(times_s[False]))
