"""Executes a campaign: each run is predicted, trained and compared, and leaves one artifact.

For each group, the machine is measured, and a calibration run is made on it (`tierplan.validation.calibration`). Then
each run is predicted and trained. It is trained in turns; right before each turn the calibration model is trained for a
step or a few, which says how slow the machine is at that moment. Where the campaign is `interleaved`, the runs of a
group take their turns alternately, so that all meet the machine at the same speeds.

A run that has an artifact is not repeated, so an interrupted campaign continues where it stopped. A group that is
continued is calibrated anew. Interleaved runs are saved when all of them have ended.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

from tierplan.hwmodels.build import build_machine
from tierplan.hwmodels.description import write_description
from tierplan.hwmodels.machine import Machine, PredictionBasis
from tierplan.hwmodels.names import DEVICE, HOST
from tierplan.hwmodels.scaling import with_ample_memory, with_capacity
from tierplan.planner.plan_rules import PLANNER
from tierplan.planner.planning import plan
from tierplan.planner.policies import decide
from tierplan.runtime.data.synthetic import device_model, versions
from tierplan.runtime.measure.machine import measure_description
from tierplan.runtime.memory import files
from tierplan.runtime.tracing.trace import trace_config
from tierplan.sim.analysis.steady import SteadyState, steady_state
from tierplan.sim.output.text import format_count, format_error, format_s
from tierplan.sim.schedule import Schedule
from tierplan.sim.trace import write_atomically
from tierplan.sim.workloads.workload import Workload
from tierplan.validation.calibration.budgets import capacity_for, peak_bytes, raise_capacities, with_room
from tierplan.validation.calibration.calibration import interval_half_width
from tierplan.validation.calibration.dispatch import steady_at
from tierplan.validation.calibration.session import CalibrationSession, TurnwiseTraining
from tierplan.validation.campaign.artifact import Artifact
from tierplan.validation.campaign.checks import check_runs, training_of_run
from tierplan.validation.campaign.spec import Campaign, CampaignError, Group, Run
from tierplan.validation.comparison.compare import compare

MAX_CAUSES = 4
TURNS_PER_REPORT = 4
CALIBRATION_STEPS = 6
"""Steps of the calibration model before each turn of a run. Of interleaved runs each has one, which counts for all."""
LOCK_NAME = "tierplan.campaign"
"""In the scratch folder, held by the campaign that works there."""
FAILURES = (ValueError, RuntimeError, OSError, MemoryError)
"""Errors that end a run but not the campaign: no plan, no room in memory or on the drive."""
CUDA_ERROR = "CUDA error:"
"""What PyTorch says of a GPU that has failed, and not of one whose memory is full."""
CALIBRATION_RUN = Run(blocks=0, policy="in-memory")
"""Settings of the calibration model: one micro-batch, no clipping. Its depth is the group's `calibration_blocks`."""
CALIBRATION_FILE = "calibration.txt"
"""The calibration of a group, beside its `machine.toml`. It is no artifact, so its name does not end with .json."""


@dataclass(eq=False, kw_only=True)
class CampaignExecution:
    """A campaign on this machine: all runs that have no artifact in `out_dir` yet and whose `group/name` has `only`."""

    campaign: Campaign
    out_dir: Path
    nvme_dir: Path
    machine_name: str = ""
    """In tables; its cores, memory and GPU if not given."""
    device: str = "cpu"
    measure_s: float = 20.0
    """Seconds of measuring the machine, once per group."""
    only: str = ""
    report: Callable[[str], None] = lambda line: None
    checks: list[float] = field(default_factory=list)
    """Predicted over measured steps of the calibration plans, of all groups so far."""

    def run(self) -> list[Artifact]:
        """Executes the runs; returns the artifacts of all that have one, in order.

        Raises `CampaignError` where the campaign is for another device, no run's name contains `only`, or one asks for
        what there is not.
        """
        campaign = self.campaign
        if campaign.device == "cuda" and not self.device.startswith("cuda"):
            raise CampaignError(
                f"campaign {campaign.name!r} is for a CUDA GPU, and the device is {self.device!r}; run it where there "
                "is one, or choose another campaign"
            )
        if not any(self.only in name for name in campaign.run_names):
            raise CampaignError(
                f"no run of campaign {campaign.name!r} has {self.only!r} in its group/name; `tierplan validate --list` "
                "names all"
            )
        asked_of = {g.name: [r for r in g.runs if self.only in f"{g.name}/{r.name}"] for g in campaign.groups}
        for group in campaign.groups:
            check_runs(group, asked_of[group.name], self.device)
        paths = {(g.name, r.name): self.out_dir / g.name / f"{r.name}.json" for g in campaign.groups for r in g.runs}
        left = [(g, [r for r in asked_of[g.name] if not paths[g.name, r.name].exists()]) for g in campaign.groups]
        left = [(group, missing) for group, missing in left if missing]
        with self.own_scratch() if left else nullcontext():
            for group, missing in left:
                with ExitStack() as life:
                    session = self._calibrate(group, life)
                    for batch in [missing] if campaign.interleaved else [[run] for run in missing]:
                        for artifact in self._execute(group, session, batch):
                            artifact.save(paths[group.name, artifact.run])
                            self.report(_line(artifact))
        return [Artifact.load(path) for path in paths.values() if path.exists()]

    @property
    def scratch(self) -> Path:
        return self.nvme_dir / "tierplan-campaign"

    @contextmanager
    def own_scratch(self) -> Iterator[Path]:
        """The folder on the drive, which no other campaign has meanwhile; gone at the end. What one that was killed has
        left there is removed. Raises `StoreError` where another one has it."""
        lock = self.scratch / LOCK_NAME
        others = [] if lock.exists() or not self.scratch.exists() else sorted(self.scratch.iterdir())
        if others:
            raise CampaignError(
                f"{self.scratch} holds {others[0].name!r}, which no campaign has made; take it away, or give another "
                "folder (--nvme-dir)"
            )
        files.make_folder(self.scratch)
        fd = files.lock_file(
            lock,
            f"{self.scratch} is in use by another campaign, and each would be measured beside the other; wait for it, "
            "or give another folder (--nvme-dir)",
        )
        with files.held_open(fd):
            for path in self.scratch.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
            try:
                yield self.scratch
            finally:
                shutil.rmtree(self.scratch, ignore_errors=True)

    def _calibrate(self, group: Group, life: ExitStack) -> CalibrationSession:
        """Measures the machine and makes a calibration run. Its checks are added to those of the groups before it."""
        began = time.monotonic()
        description = measure_description(
            self.scratch, budget_s=self.measure_s, device=self.device, dtypes=(group.dtype,)
        )
        write_atomically(self.out_dir / group.name / "machine.toml", write_description(description))
        config, training = (
            group.model_config(group.calibration_blocks),
            training_of_run(group, CALIBRATION_RUN, self.device),
        )
        session = CalibrationSession(
            workload=trace_config(group.name, config, training),
            machine=build_machine(description),
            nvme_dir=self.scratch,
            device=self.device,
            life=life,
        )
        calibration = session.run()
        calibration.save(self.out_dir / group.name / CALIBRATION_FILE)
        self.checks.extend(calibration.checks.values())
        checks = ", ".join(f"{plan} {format_error(x - 1.0)}" for plan, x in calibration.checks.items())
        self.report(f"{group.name}: calibrated in {time.monotonic() - began:.0f} s, {checks}")
        return session

    def _execute(self, group: Group, session: CalibrationSession, runs: Sequence[Run]) -> Iterator[Artifact]:
        """Predicts and trains these runs, turn by turn."""
        with ExitStack() as life:
            executions = [_RunExecution(self, group, session, run, life) for run in runs]
            turns = self.campaign.steps_by_turn
            for k, num_steps in enumerate(turns):
                for execution in executions:
                    execution.take_turn(num_steps, 1 if k else self.campaign.warmup_steps)
                if len(executions) > 1 and (k + 1) % TURNS_PER_REPORT == 0:
                    self.report(f"{group.name}: {k + 1} of {len(turns)} turns")
            slowdowns = [slowdown for execution in executions for slowdown in execution.slowdowns]
            for execution in executions:
                yield execution.artifact(median(slowdowns) if slowdowns else 1.0)


def _line(a: Artifact) -> str:
    if not a.answered:
        return f"{a.group}/{a.run}: no answer: {a.why_not}"
    return (
        f"{a.group}/{a.run}: predicted {format_s(a.predicted_step_s)}, measured {format_s(a.measured_step_s)}, "
        f"{format_error(a.error_frac)}"
    )


class _RunExecution:
    """One run: its prediction, its training, and how slow the machine was before each turn."""

    def __init__(
        self, execution: CampaignExecution, group: Group, session: CalibrationSession, run: Run, life: ExitStack
    ) -> None:
        self._campaign, self._checks, self._session = execution.campaign, execution.checks, session
        config, training = group.model_config(run.blocks), training_of_run(group, run, execution.device)
        workload = trace_config(f"{group.name}, {run.blocks} blocks", config, training)
        self._artifact = Artifact(
            campaign=self._campaign.name,
            group=group.name,
            run=run.name,
            model=f"{workload.model_type}, {run.blocks} blocks, {format_count(workload.num_parameters)} parameters",
            settings={**asdict(run), "batch": group.batch, "seq": group.seq, "dtype": group.dtype, "config": config},
            machine=execution.machine_name or _machine_name(execution.device),
            when=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            versions=versions(),
            answered=False,
            campaign_runs=self._campaign.run_names,
        )
        self.slowdowns: list[float] = []
        """By turn: seconds per step of the calibration model right before it, over those in the calibration run."""
        self._turn_predictions_s: list[float] = []
        self._life = life.enter_context(ExitStack())
        with self._recording_failure():
            calibration, described = session.calibration, session.machine
            self._machine, self._schedule, _ = predict_run(
                run, calibration.timed(workload, described), calibration.on(described)
            )
            self._training = TurnwiseTraining(
                self._schedule, config, training, execution.scratch / run.name, execution.device, life=self._life
            )

    @contextmanager
    def _recording_failure(self) -> Iterator[None]:
        """After an error the run has no answer, and its memory and files are released. One of the GPU itself is no
        answer: nothing works in this process from then on, and the run is to be repeated."""
        try:
            yield
        except FAILURES as error:
            if CUDA_ERROR in str(error):
                raise
            self._artifact = replace(self._artifact, why_not=str(error) or repr(error))
            self._life.close()

    def take_turn(self, num_steps: int, warmup_steps: int) -> None:
        """Measures the slowdown, predicts a step, and trains `num_steps` steps. Does nothing after an error."""
        if self._artifact.why_not:
            return
        with self._recording_failure():
            calibration_steps = 1 if self._campaign.interleaved else CALIBRATION_STEPS
            in_memory_s = self._session.in_memory_step_s(calibration_steps)
            slowdown = in_memory_s / self._session.calibration.in_memory_step_s
            self.slowdowns.append(slowdown)
            self._turn_predictions_s.append(steady_at(self._schedule, self._machine, slowdown).period_s)
            self._training.take_turn(num_steps, warmup_steps)

    def artifact(self, slowdown: float) -> Artifact:
        """The run's artifact, with the prediction for a machine of this slowdown."""
        if self._artifact.why_not:
            return self._artifact
        campaign, predicted = self._campaign, self._schedule
        with self._recording_failure():
            steady, result = steady_at(predicted, self._machine, slowdown), self._training.trainer.result()
            interval_s = PredictionBasis("", interval_half_width(self._checks)).interval_s(steady.period_s)
            skipped_steps = tuple(sorted(k for k in self._training.skipped_steps if k >= campaign.warmup_steps))
            comparison = compare(
                predicted,
                steady.trace,
                result.trace,
                predicted_step_s=steady.period_s,
                interval_s=interval_s,
                warmup_steps=campaign.warmup_steps,
                skipped_steps=skipped_steps,
            )
            largest = sorted(comparison.attribution, key=lambda c: -abs(c.seconds))[:MAX_CAUSES]
            self._artifact = replace(
                self._artifact,
                answered=True,
                capacity_bytes={t.name: t.capacity_bytes for t in predicted.tiers},
                predicted_step_s=steady.period_s,
                interval_s=interval_s,
                measured_steps_s=comparison.measured_steps_s,
                warmup_steps=comparison.warmup_steps,
                skipped_steps=skipped_steps,
                turn_predictions_s=tuple(self._turn_predictions_s),
                slowdowns=tuple(self.slowdowns),
                predicted_peak_bytes=dict(steady.peak_bytes),
                measured_peak_bytes=dict(result.peak_bytes),
                predicted_bytes=predicted.bytes_moved(),
                measured_bytes={stream: pair.measured or 0.0 for stream, pair in comparison.moved_bytes.items()},
                busy_s={s.stream: (s.predicted.busy_s, s.measured.busy_s) for s in comparison.streams},
                kinds_s={f"{k.kind} on {k.stream}": (k.predicted_s, k.measured_s) for k in comparison.kinds},
                causes=tuple((f"{c.kind} on {c.stream}" if c.stream else c.kind, c.seconds) for c in largest),
            )
        return self._artifact


def predict_run(run: Run, workload: Workload, machine: Machine) -> tuple[Machine, Schedule, SteadyState]:
    """The machine with a run's budgets, its schedule there, and the simulation.

    Raises `PlanError` or `OutOfMemory` where no plan fits.
    """
    ample, levels = with_ample_memory(machine), {DEVICE: run.device, HOST: run.host}
    if run.policy == PLANNER:
        # Budgets are fractions of the device memory that plain training takes.
        plain_bytes = peak_bytes(DEVICE, decide("in-memory", workload, ample, {}), workload, ample)
        fracs = {tier: 1.05 if level == "roomy" else float(level) for tier, level in levels.items()}
        machine = with_capacity(machine, {tier: int(plain_bytes * frac) for tier, frac in fracs.items()})
        # Sub-batches would run at sizes that were not profiled. Without "vertical", micro-batches are not cut.
        orders = ("horizontal",) if run.accumulation == 1 else ("horizontal", "vertical")
        planned = plan(workload, machine, orders=orders, **dict(run.options))  # type: ignore[arg-type]
        schedule = with_room(planned.schedule, {tier: planned.steady.peak_bytes[tier] for tier in levels})
        return machine, schedule, steady_state(schedule, machine)
    decided = decide(run.policy, workload, ample, run.options)
    budgets: dict[str, int] = {}
    for tier, level in levels.items():
        budgets[tier] = capacity_for(level, tier, decided, workload, with_capacity(ample, budgets))
    return raise_capacities(decided, workload, with_capacity(machine, budgets))


def _machine_name(device: str) -> str:
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores, {gib:.0f} GiB, {device_model(device)}"
