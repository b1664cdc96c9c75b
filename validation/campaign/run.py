"""Runs a campaign: measures the machine, predicts each configuration, runs it, and keeps one artifact per run.

For each group, in this order: the machine is measured and a shallow model is rehearsed
(`tierplan.validation.calibration`), then each run is predicted, executed and compared. A run is executed in pieces;
right before each, the shallow model is trained for a little while, which says how slow the machine is now. Where the
campaign says so, a group's runs take turns piece by piece, so that all meet the same machine. A run whose artifact is
there is not repeated, so an interrupted campaign continues; a group is measured anew when it is taken up again, and
runs that take turns are saved when all of them have ended.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from tierplan import __version__
from tierplan.hwmodels.build import build
from tierplan.hwmodels.description import write_description
from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import DEVICE, HOST
from tierplan.hwmodels.scaling import with_capacity
from tierplan.planner.plan import PLANNER
from tierplan.planner.policies import decide
from tierplan.planner.solve import plan as solve
from tierplan.runtime.data.synthetic import device_name, random_batches, seeded_model, versions
from tierplan.runtime.measure.machine import measure_description
from tierplan.runtime.tracing.trace import trace_config
from tierplan.runtime.trainer import RunResult, Trainer
from tierplan.sim.analysis.steady import SteadyState, steady_state
from tierplan.sim.output.text import format_count, format_error, format_s
from tierplan.sim.schedule import Schedule
from tierplan.sim.trace import write_atomically
from tierplan.sim.workloads.workload import Training, Workload
from tierplan.validation.calibration.budgets import (
    AMPLE_BYTES,
    capacity_for,
    fitting,
    peak_bytes,
    with_room,
)
from tierplan.validation.calibration.runs import (
    Basis,
    Pieces,
    Stage,
    interval_frac,
    log_interval,
    made_folder,
    with_times_of,
)
from tierplan.validation.campaign.spec import Artifact, Campaign, CampaignError, Group, Run
from tierplan.validation.comparison.compare import compare

__all__ = ["Prediction", "artifact_path", "predict", "run_campaign"]

MAX_CAUSES = 4
REPORT_EVERY = 4
"""Pieces."""
STEPS_ASKED = 6
"""Of the shallow model before each piece of a run on its own; runs that take turns have one each, for all of them."""
FAILURES = (ValueError, RuntimeError, OSError, MemoryError)
"""What ends a run, and not the campaign: no plan, no room in memory or on the drive."""
SHALLOW = Run(blocks=0, policy="in-memory")
"""One micro-batch, no clipping; its depth is the group's `profile_blocks`."""
MEASURED = "measured.txt"
"""What a group was predicted from, beside its `machine.toml`; no artifact, hence not *.json."""
Report = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A run's schedule and what the simulator says of it."""

    workload: Workload
    machine: Machine
    """With the run's budgets."""
    schedule: Schedule
    steady: SteadyState


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """What a group's predictions rest on, and the shallow model to ask how slow the machine is now."""

    basis: Basis
    stage: Stage
    checks: tuple[float, ...]
    """How far predictions of rehearsals were off, of this group and those before it."""
    seconds: float


def artifact_path(out_dir: str | os.PathLike[str], group: Group, run: Run) -> Path:
    return Path(out_dir) / group.name / f"{run.name}.json"


def run_campaign(
    campaign: Campaign,
    out_dir: str | os.PathLike[str],
    nvme_dir: str | os.PathLike[str],
    *,
    machine_name: str = "",
    device: str = "cpu",
    measure_s: float = 20.0,
    only: str = "",
    report: Report = lambda line: None,
) -> list[Artifact]:
    """The artifacts of all runs, in order; those that are in `out_dir` already are taken from there.

    Parameters
    ----------
    nvme_dir
        Folder on the drive that is the NVMe tier.
    machine_name
        What the machine is called in tables; by default its cores, memory and GPU.
    measure_s
        Seconds that measuring the machine takes, once per group.
    only
        Take up only runs whose `group/name` contains this.

    Raises `CampaignError` where the campaign is for another device.
    """
    if campaign.device == "cuda" and not device.startswith("cuda"):
        raise CampaignError(
            f"campaign {campaign.name!r} is for a CUDA GPU, and the device is {device!r}; run it where there is one, "
            "or choose another campaign"
        )
    if not any(only in name for name in campaign.run_names):
        raise CampaignError(
            f"no run of campaign {campaign.name!r} has {only!r} in its group/name; `tierplan validate --list` names all"
        )
    site = _Site(
        out_dir=Path(out_dir),
        scratch=Path(nvme_dir) / "tierplan-campaign",
        machine_name=machine_name or _machine_name(device),
        device=device,
        measure_s=measure_s,
        report=report,
    )
    paths = [artifact_path(out_dir, group, run) for group in campaign.groups for run in group.runs]
    try:
        for group in campaign.groups:
            left = [
                run
                for run in group.runs
                if only in f"{group.name}/{run.name}" and not artifact_path(out_dir, group, run).exists()
            ]
            if left:
                _run_group(campaign, group, left, site)
    finally:
        shutil.rmtree(site.scratch, ignore_errors=True)
    return [Artifact.load(path) for path in paths if path.exists()]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Site:
    """Where and how a campaign runs."""

    out_dir: Path
    scratch: Path
    machine_name: str
    device: str
    measure_s: float
    report: Report
    checks: list[float] = field(default_factory=list)
    """How far predictions of rehearsals were off, of all groups so far."""


def _run_group(campaign: Campaign, group: Group, runs: Sequence[Run], site: _Site) -> None:
    with ExitStack() as life:
        measured = _measure(group, site, life)
        site.report(f"{group.name}: measured in {measured.seconds:.0f} s, {_checks_line(measured.basis)}")
        for turn in [runs] if campaign.together else [[run] for run in runs]:
            for artifact in _executed(campaign, group, turn, measured, site):
                artifact.save(site.out_dir / group.name / f"{artifact.run}.json")
                site.report(_line(artifact))


def _line(a: Artifact) -> str:
    if not a.answered:
        return f"{a.group}/{a.run}: no answer: {a.why_not}"
    return (
        f"{a.group}/{a.run}: predicted {format_s(a.predicted_step_s)}, measured {format_s(a.measured_step_s)}, "
        f"{format_error(a.error_frac)}"
    )


def _checks_line(basis: Basis) -> str:
    return ", ".join(f"{plan} {format_error(check - 1.0)}" for plan, check in basis.checks.items())


def _measure(group: Group, site: _Site, life: ExitStack) -> _Measured:
    """The group's basis. Its checks are added to those of the groups before it."""
    began = time.monotonic()
    site.scratch.mkdir(parents=True, exist_ok=True)
    description = measure_description(site.scratch, budget_s=site.measure_s, device=site.device, dtypes=(group.dtype,))
    write_atomically(site.out_dir / group.name / "machine.toml", write_description(description))
    stage = Stage(
        config=group.model_config(group.profile_blocks),
        training=_training(group, SHALLOW, site.device),
        machine=build(description),
        nvme_dir=site.scratch,
        device=site.device,
    )
    basis = life.enter_context(stage).rehearse()
    write_atomically(site.out_dir / group.name / MEASURED, json.dumps(basis.record(), indent=1) + "\n")
    site.checks.extend(basis.checks.values())
    return _Measured(basis=basis, stage=stage, checks=tuple(site.checks), seconds=time.monotonic() - began)


def _executed(
    campaign: Campaign, group: Group, runs: Sequence[Run], measured: _Measured, site: _Site
) -> Iterator[Artifact]:
    """Predicts and executes these runs, piece by piece in turns."""
    with ExitStack() as life:
        plays = [_Play(campaign, group, run, measured, site, life) for run in runs]
        pieces = campaign.steps_of_pieces
        for k, steps in enumerate(pieces):
            for play in plays:
                play.play(steps, 1 if k else campaign.warmup_steps)
            if len(plays) > 1 and (k + 1) % REPORT_EVERY == 0:
                site.report(f"{group.name}: {k + 1} of {len(pieces)} pieces")
        paces = [pace for play in plays for pace in play.paces]
        for play in plays:
            yield play.artifact(median(paces) if paces else 1.0)


class _Play:
    """One run: its prediction, its trainer, and what the shallow model said before each piece."""

    def __init__(
        self, campaign: Campaign, group: Group, run: Run, measured: _Measured, site: _Site, life: ExitStack
    ) -> None:
        self._campaign, self._measured = campaign, measured
        config, training = group.model_config(run.blocks), _training(group, run, site.device)
        workload = trace_config(f"{group.name}, {run.blocks} blocks", config, training)
        self._artifact = Artifact(
            campaign=campaign.name,
            group=group.name,
            run=run.name,
            model=f"{workload.model_type}, {run.blocks} blocks, {format_count(workload.num_parameters)} parameters",
            asked={**asdict(run), "batch": group.batch, "seq": group.seq, "dtype": group.dtype, "config": config},
            machine=site.machine_name,
            when=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            versions=_versions(),
            answered=False,
            campaign_runs=campaign.run_names,
        )
        self.paces: list[float] = []
        """How slow the shallow model was, by piece."""
        self._predictions_s: list[float] = []
        self._life = life.enter_context(ExitStack())
        with self._unless_it_fails():
            basis = measured.basis
            self._predicted = predict(run, with_times_of(basis.workload, workload), basis.machine)
            batches = random_batches(config, training, campaign.steps * run.accumulation)
            model, folder = seeded_model(config, training), made_folder(site.scratch / run.name)
            trainer = Trainer(self._predicted.schedule, model, nvme_dir=folder, device=site.device)
            self._pieces = Pieces(self._life.enter_context(trainer), batches)

    @contextmanager
    def _unless_it_fails(self) -> Iterator[None]:
        """After an error the run has no answer, and what it held is given back."""
        try:
            yield
        except FAILURES as error:
            self._artifact = replace(self._artifact, why_not=str(error) or repr(error))
            self._life.close()

    def play(self, steps: int, warmup_steps: int) -> None:
        """Asks how slow the machine is, predicts a step, and executes some; nothing after an error."""
        if self._artifact.why_not:
            return
        basis, predicted = self._measured.basis, self._predicted
        with self._unless_it_fails():
            steps_asked = 1 if self._campaign.together else STEPS_ASKED
            self.paces.append(self._measured.stage.kept_now_s(steps_asked) / basis.kept_s)
            self._predictions_s.append(basis.step_s(predicted.schedule, predicted.machine, self.paces[-1]))
            self._pieces.play(steps, warmup_steps)

    def artifact(self, pace: float) -> Artifact:
        """What came out; the prediction is for a machine of this pace."""
        if self._artifact.why_not:
            return self._artifact
        campaign, measured, predicted = self._campaign, self._measured, self._predicted
        with self._unless_it_fails():
            steady = measured.basis.steady(predicted.schedule, predicted.machine, pace)
            artifact = replace(
                self._artifact,
                predicted_step_s=steady.period_s,
                interval_s=log_interval(steady.period_s, interval_frac(measured.checks)),
                predictions_s=tuple(self._predictions_s),
                paces=tuple(self.paces),
                left_out=tuple(sorted(k for k in self._pieces.left_out if k >= campaign.warmup_steps)),
            )
            self._artifact = _compared(artifact, campaign, replace(predicted, steady=steady), self._pieces.result)
        return self._artifact


def predict(run: Run, workload: Workload, machine: Machine) -> Prediction:
    """The schedule of a run within its budgets, simulated. Raises `PlanError` or `OutOfMemory` where there is none."""
    if run.policy == PLANNER:
        machine = _part_of_plain_training(run, workload, machine)
        # Cut micro-batches would run at sizes that nothing was timed at; without "vertical" none are cut.
        orders = ("horizontal",) if run.accumulation == 1 else ("horizontal", "vertical")
        found = solve(workload, machine, orders=orders, **dict(run.options))  # type: ignore[arg-type]
        held = found.steady.trace.peak_bytes
        schedule = with_room(found.schedule, {tier: held[tier] for tier in (DEVICE, HOST)})
        return Prediction(workload=workload, machine=machine, schedule=schedule, steady=steady_state(schedule, machine))
    ample = with_capacity(machine, {t.name: AMPLE_BYTES for t in machine.tiers})
    decided = decide(run.policy, workload, ample, run.options)
    sizes: dict[str, int] = {}
    for tier, level in ((DEVICE, run.device), (HOST, run.host)):
        sizes[tier] = capacity_for(level, tier, decided, workload, with_capacity(ample, sizes))
    machine, schedule, steady = fitting(decided, workload, with_capacity(machine, sizes))
    return Prediction(workload=workload, machine=machine, schedule=schedule, steady=steady)


def _part_of_plain_training(run: Run, workload: Workload, machine: Machine) -> Machine:
    """The machine with the planner's budgets: parts of the device memory that plain training takes."""
    ample = with_capacity(machine, {t.name: AMPLE_BYTES for t in machine.tiers})
    plain = peak_bytes(DEVICE, decide("in-memory", workload, ample, {}), workload, ample)
    sizes: dict[str, int] = {}
    for tier, part in ((DEVICE, run.device), (HOST, run.host)):
        frac = {"roomy": 1.05}.get(part) or float(part)
        sizes[tier] = int(plain * frac)
    return with_capacity(machine, sizes)


def _compared(artifact: Artifact, campaign: Campaign, predicted: Prediction, result: RunResult) -> Artifact:
    per_step = {stream: moved / campaign.steps for stream, moved in result.moved_bytes.items()}
    comparison = compare(
        predicted.schedule,
        predicted.steady.trace,
        result.trace,
        predicted_step_s=artifact.predicted_step_s,
        interval_s=artifact.interval_s,
        moved_bytes=per_step,
        warmup_steps=campaign.warmup_steps,
        left_out=artifact.left_out,
    )
    largest = sorted(comparison.attribution, key=lambda c: -abs(c.seconds))[:MAX_CAUSES]
    return replace(
        artifact,
        answered=True,
        capacity_bytes={t.name: t.capacity_bytes for t in predicted.schedule.tiers},
        measured_steps_s=comparison.measured_steps_s,
        warmup_steps=comparison.warmup_steps,
        predicted_peak_bytes=dict(predicted.steady.trace.peak_bytes),
        measured_peak_bytes=dict(result.peak_bytes),
        predicted_bytes=predicted.schedule.bytes_moved(),
        measured_bytes=per_step,
        busy_s={s.stream: (s.predicted.busy_s, s.measured.busy_s) for s in comparison.streams},
        kinds_s={f"{k.kind} on {k.stream}": (k.predicted_s, k.measured_s) for k in comparison.kinds},
        causes=tuple((f"{c.kind} on {c.stream}" if c.stream else c.kind, c.seconds) for c in largest),
    )


def _training(group: Group, run: Run, device: str) -> Training:
    settings: dict[str, Any] = {"dtype": group.dtype, "backend": "cuda" if device.startswith("cuda") else "cpu"}
    return Training(
        per_device_train_batch_size=group.batch,
        gradient_accumulation_steps=run.accumulation,
        sequence_length=group.seq,
        master_weights=group.dtype != "fp32",
        max_grad_norm=run.max_grad_norm,
        **settings,
    )


def _versions() -> dict[str, str]:
    return {
        "tierplan": __version__,
        **versions(),
        "Python": platform.python_version(),
    }


def _machine_name(device: str) -> str:
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores, {gib:.0f} GiB, {device_name(device)}"
