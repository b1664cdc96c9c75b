"""A calibration run: the calibration model is profiled and then trained under six plans, in short turns.

Where other guests share the cores of a machine, its speed changes from second to second. Trainings that take many short
turns meet the same speeds on average; one long training after another does not.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.scaling import with_ample_memory
from tierplan.planner.lowering import lower
from tierplan.runtime.data.synthetic import random_batches, seeded_model, versions
from tierplan.runtime.measure.units import profile_workload
from tierplan.runtime.memory.files import make_folder
from tierplan.runtime.optim.adam import OptimizerSettings
from tierplan.runtime.trainer import Trainer
from tierplan.sim.columns import unroll
from tierplan.sim.compiled.compiler import wall_s
from tierplan.sim.pricing import simulate_on
from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.workload import Training, Workload
from tierplan.validation.calibration.budgets import with_room
from tierplan.validation.calibration.calibration import Calibration, calibrate, machine_sha256
from tierplan.validation.calibration.dispatch import typical_reference_s
from tierplan.validation.calibration.measurements import PlanMeasurement, measurement_of
from tierplan.validation.calibration.plans import IN_MEMORY, calibration_plans
from tierplan.validation.calibration.rates import without_compute_latency
from tierplan.validation.comparison.steps import cut_steps

LEAST_TURNS, MOST_TURNS = 2, 40
TURN_S, MOST_STEPS = 0.5, 9
"""A turn is as many steps as fit, 2 or more. A third of them come first and do not count, three in the first turn:
after a pause a step of 50 ms takes 8 % longer, and the next ones still a little."""
PROFILE_STEPS = 5
ROOM = 1.3
"""Capacity over predicted peak: no training of a calibration run waits for memory."""
PROFILE_FRAC = 0.15
"""Of the budget, what profiling is shown to take as it goes on."""


class TurnwiseTraining:
    """A training whose steps are made in turns, with pauses in between. The first steps of each turn are not counted.

    It is of a model of this config, with random weights and batches, until `life` ends.
    """

    def __init__(
        self,
        schedule: Schedule,
        config: Mapping[str, object],
        training: Training,
        nvme_dir: Path,
        device: str,
        num_threads: int | None = None,
        *,
        life: ExitStack,
    ) -> None:
        make_folder(nvme_dir)
        settings = OptimizerSettings(name=training.optimizer)
        places: dict[str, Any] = {"nvme_dir": nvme_dir, "device": device, "num_threads": num_threads}
        model: Any = seeded_model(config, training)
        self.trainer = Trainer(schedule, model, optimizer=settings, reference_frac=0.0, **places)
        life.enter_context(self.trainer)
        self._batches = random_batches(model.config, training)
        self.skipped_steps = set[int]()
        """Steps that are not counted."""

    def take_turn(self, num_steps: int, warmup_steps: int) -> tuple[int, ...]:
        """Trains `num_steps` more steps, of which the first `warmup_steps` are not counted; returns those that are."""
        first = self.trainer.num_steps_done
        if self.trainer.reference_work is not None:
            self.trainer.reference_work.asked_step = first + warmup_steps - 1  # warm, and not counted
        self.trainer.run(self._batches, num_steps)
        self.skipped_steps.update(range(first, first + warmup_steps))
        return tuple(range(first + warmup_steps, first + num_steps))

    def step_s(self, steps: Sequence[int]) -> float:
        """Median duration of these steps."""
        durations_s = cut_steps(self.trainer.result().trace, 0).durations_s
        return median(durations_s[k] for k in steps)


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
    num_ranks: int = 1
    """On a CPU: so many processes train at once, as they will on its cores; this is the one that is timed."""
    budget_s: float = 60.0
    """Turns are taken until so much time has passed, compiling the simulator apart: `LEAST_TURNS` to `MOST_TURNS`."""
    is_stopped: Callable[[], bool] = lambda: False
    """Asked after each round of turns: what has been measured by then is kept, if each plan has had two turns."""
    progress: Callable[[str, float], None] = lambda what, part: None
    calibration: Calibration = field(init=False)
    """Once it has run."""
    _trainings: dict[str, TurnwiseTraining] = field(default_factory=dict)

    def run(self) -> Calibration:
        """Profiles the calibration model, trains it under all plans in turns, and fits the calibration."""
        began_s = wall_s()
        for k in range(1, self.num_ranks):
            self.life.enter_context(self._beside(k))
        ample, training = with_ample_memory(without_compute_latency(self.machine)), self.workload.training
        config = self.workload.config
        model: Any = seeded_model(config, training)
        profiled = profile_workload(
            self.workload,
            model,
            random_batches(model.config, training),
            num_steps=PROFILE_STEPS,
            device=self.device,
            num_threads=self.num_threads,
            on_step=lambda k, _: self.progress(
                "timing the model's blocks", PROFILE_FRAC * min(1.0, k / (2 * PROFILE_STEPS))
            ),
        )
        del model
        schedules = {}
        for name, plan in calibration_plans(profiled, ample).items():
            schedule = lower(plan, profiled, ample)
            peaks = simulate_on(unroll(schedule, 2), ample).peak_bytes
            schedules[name] = with_room(schedule, peaks, ROOM)
            folder = self.nvme_dir / name
            self._trainings[name] = TurnwiseTraining(
                schedules[name], config, training, folder, self.device, self.num_threads, life=self.life
            )
        measurements, reference_s = self._train_in_turns(schedules, began_s)
        in_memory = self._trainings[IN_MEMORY]
        self.calibration = replace(
            calibrate(self.workload, profiled, self.machine, measurements),
            reference_s=reference_s,
            machine=self.machine.name,
            machine_sha256=machine_sha256(self.machine),
            num_threads=int(str(in_memory.trainer.result().trace.meta["num_threads"])),
            num_ranks=self.num_ranks,
            versions=versions(),
            when=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        )
        return self.calibration

    @contextmanager
    def _beside(self, rank: int) -> Iterator[None]:
        """Another process trains as this one does, until this one has ended."""
        given = (self.workload, self.machine, self.nvme_dir / f"rank-{rank}", self.device, self.num_threads)
        process = get_context("spawn").Process(target=_train_on, args=given, daemon=True)
        process.start()
        try:
            yield
        finally:
            process.kill()
            process.join()

    def in_memory_step_s(self, num_steps: int) -> float:
        """Seconds per step with everything in device memory, measured now: clocks and other guests change."""
        training = self._trainings[IN_MEMORY]
        return training.step_s(training.take_turn(1 + num_steps, 1))

    def _train_in_turns(
        self, schedules: Mapping[str, Schedule], began_s: float
    ) -> tuple[dict[str, PlanMeasurement], tuple[float, float]]:
        """What each plan took, and the seconds of the reference work alone and beside other streams. Closes all but the
        in-memory plan. No turn begins that would end after the budget, but for the first ones."""
        turns_s: dict[str, list[float]] = {name: [] for name in schedules}
        for turn, name in itertools.product(range(MOST_TURNS), schedules):
            elapsed_s, training = wall_s() - began_s, self._trainings[name]
            num_steps = min(MOST_STEPS, max(2, int(TURN_S / turns_s[name][-1]))) if turn else 4
            is_late = turn >= LEAST_TURNS and elapsed_s + num_steps * turns_s[name][-1] > self.budget_s
            if is_late or (turn >= 2 and self.is_stopped()):
                continue
            part = max(PROFILE_FRAC, min(1.0, elapsed_s / self.budget_s))
            self.progress(f"training under {len(schedules)} plans, turn {turn + 1}", part)
            num_first = num_steps // 3 or 1 if turn else 3
            turns_s[name].append(training.step_s(training.take_turn(num_steps, num_first)))
        measurements = {}
        times_s: dict[bool, list[float]] = {True: [], False: []}
        for name, schedule in schedules.items():
            training = self._trainings[name]
            trace = training.trainer.result().trace
            measurements[name] = measurement_of(schedule, trace, training.skipped_steps, turns_s[name])
            assert training.trainer.reference_work is not None
            times_s[len(schedule.streams) == 1] += itertools.chain(*training.trainer.reference_work.seconds.values())
            if name != IN_MEMORY:
                self._trainings.pop(name).trainer.close()
        alone_s = typical_reference_s(times_s[True])
        return measurements, (alone_s, typical_reference_s(times_s[False] or [alone_s]))


def _train_on(workload: Workload, machine: Machine, nvme_dir: Path, device: str, num_threads: int | None) -> None:
    """Calibration runs, one after the other, whose results nobody reads."""
    while True:
        with ExitStack() as life:
            CalibrationSession(workload, machine, nvme_dir, life, device, num_threads).run()
