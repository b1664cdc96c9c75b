"""The main job from end to end on this machine, as `tierplan demo --help` says it.

Most optimizer states must go to NVMe. Between steps, a reference piece of work says how slow the machine is. The same
training in memory shows which losses and weights are right.
"""

from __future__ import annotations

import json
import os
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from tierplan.hwmodels.build import build_machine
from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import DEVICE, HOST
from tierplan.hwmodels.scaling import with_ample_memory, with_capacity
from tierplan.planner.plan import UnitPlan
from tierplan.planner.planning import plan
from tierplan.planner.policies import decide
from tierplan.planner.results import PlanResult
from tierplan.runtime.data.synthetic import seeded_model
from tierplan.runtime.data.text import TokenBatches
from tierplan.runtime.measure.machine import measure_description
from tierplan.runtime.measure.reference_work import MOST_FRAC
from tierplan.runtime.optim.adam import OptimizerSettings
from tierplan.runtime.reference import same_weights, train_with_tracked_memory
from tierplan.runtime.trainer import Trainer
from tierplan.sim.output.perfetto import write_perfetto
from tierplan.sim.output.plots import plot_timelines
from tierplan.sim.output.text import format_bytes, format_count, format_frac
from tierplan.sim.schedule_file import save_schedule
from tierplan.sim.trace import Trace, write_atomically
from tierplan.sim.workloads.models import load_workload, workload_of
from tierplan.sim.workloads.workload import Training, Workload
from tierplan.validation.calibration.budgets import capacity_for, peak_bytes
from tierplan.validation.calibration.known import calibration_config
from tierplan.validation.calibration.plans import uniform_plan
from tierplan.validation.calibration.session import CalibrationSession
from tierplan.validation.comparison.compare import Comparison, compare
from tierplan.validation.comparison.words import at_slowdown
from tierplan.validation.report.report import typical_steps, write_report

BATCH, SEQUENCE = 2, 128
LEARNING_RATE = 5e-5
NUM_STEPS = 12
MEASURE_S = 8.0
CALIBRATE_S = 20.0
PLAN_S = 4.0
TEXT_BYTES = 8 << 20
DEVICE_FRAC = 0.25
"""Of what plain in-memory training holds: too little for it and for all optimizer states, enough for a plan."""
STATES_FRAC = 0.1
"""Of all optimizer states find room in host memory beside what must pass through it; others must go to NVMe."""

Progress = Callable[[str, float], None]
"""Called with what is being done and the part of it that is done, 0 to 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """What the demo predicted and what it measured."""

    machine: Machine
    workload: Workload
    planned: PlanResult
    comparison: Comparison
    losses: tuple[float, ...]
    reference_losses: tuple[float, ...]
    weights_equal: bool
    in_memory_device_bytes: int
    """What plain in-memory training holds at its peak, by the simulator."""
    in_memory_measured_bytes: int
    """The same, tracked in the reference run."""
    notes: tuple[str, ...]
    seconds: Mapping[str, float]
    """Wall time by phase."""

    def record(self) -> dict[str, object]:
        """The result as one JSON object: that of `tierplan compare --json`, and what else was found."""
        others = ("losses", "reference_losses", "weights_equal", "in_memory_device_bytes", "in_memory_measured_bytes",
                  "notes", "seconds")  # fmt: skip
        return {
            **self.comparison.record(),
            **{name: getattr(self, name) for name in others},
            "losses_equal": self.losses == self.reference_losses,
            "lower_bound_s": self.planned.lower_bound_s,
            "gap": self.planned.gap,
            "num_parameters": self.workload.num_parameters,
        }


def demo_config() -> Path:
    """The `config.json` of the demo's model."""
    return Path(str(files("tierplan.validation.demo") / "demo_model" / "config.json"))


def byte_tokens(limit_bytes: int = TEXT_BYTES) -> np.ndarray:
    """The standard library's sources on this machine, as bytes (tokens 0 to 255), in order of their paths."""
    parts, held = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text = path.read_bytes()
        parts.append(text)
        held += len(text)
        if held >= limit_bytes:
            break
    if held < 2 * BATCH * (SEQUENCE + 1):
        raise ValueError(
            f"found only {held:,} bytes of Python sources in {sysconfig.get_paths()['stdlib']}; the demo trains on the "
            "standard library's sources, so install Python with them"
        )
    return np.frombuffer(b"".join(parts)[:limit_bytes], dtype=np.uint8).astype(np.int64)


def demo_budgets(workload: Workload, machine: Machine) -> tuple[int, Machine]:
    """What plain in-memory training holds on the device, and the machine with budgets that it does not fit into.

    The device gets `DEVICE_FRAC` of that. Host memory gets what a plan with parameters there and all optimizer states
    on NVMe needs, and room for `STATES_FRAC` of the states.
    """
    roomy = with_ample_memory(machine)
    in_memory = peak_bytes(DEVICE, decide("in-memory", workload, roomy), workload, roomy)
    machine = with_capacity(machine, {DEVICE: _whole_mib(DEVICE_FRAC * in_memory)})
    streamed = UnitPlan(params="host", grads="host", states="nvme", acts="recompute")
    passing = capacity_for("tight", HOST, uniform_plan("all states on NVMe", workload, streamed), workload, machine)
    return in_memory, with_capacity(machine, {HOST: _whole_mib(passing + STATES_FRAC * workload.states_bytes)})


def _whole_mib(size_bytes: float) -> int:
    return int(size_bytes) >> 20 << 20


def run_demo(
    out: Path,
    *,
    nvme_dir: Path | None = None,
    steps: int = NUM_STEPS,
    num_threads: int = 1,
    seed: int = 0,
    measure_s: float = MEASURE_S,
    progress: Progress = lambda what, part: None,
) -> DemoResult:
    """Measures, calibrates, plans, simulates, trains and compares; both trainings take so many steps.

    Leaves `report.html`, `timeline.png`, `timeline.json` (for Perfetto), `result.json`, the schedule and both traces in
    the folder `out`. The model's kernels get `num_threads` cores; the others are left to copies, the optimizer and file
    I/O.
    """
    load = os.getloadavg()[0]
    seconds: dict[str, float] = {}
    nvme = nvme_dir or out / "nvme"
    nvme.mkdir(parents=True, exist_ok=True)
    out.mkdir(parents=True, exist_ok=True)
    training = Training(per_device_train_batch_size=BATCH, sequence_length=SEQUENCE, dtype="fp32", backend="cpu")
    modelled = load_workload(demo_config(), training)
    fewer = workload_of(modelled.name, calibration_config(modelled.config), training)
    batches, optimizer = TokenBatches(byte_tokens(), BATCH, SEQUENCE, seed), OptimizerSettings(lr=LEARNING_RATE)
    with _timed("measure", seconds):
        description = measure_description(
            nvme,
            budget_s=measure_s,
            device="cpu",
            dtypes=("fp32",),
            progress=lambda what, part: progress(f"measuring this machine: {what}", part),
        )
    described = build_machine(description)
    with _timed("calibrate", seconds), ExitStack() as life:
        calibration = CalibrationSession(
            workload=fewer,
            machine=described,
            nvme_dir=nvme / "calibration",
            life=life,
            num_threads=num_threads,
            budget_s=CALIBRATE_S,
            progress=lambda what, part: progress(f"calibrating: {what}", part),
        ).run()
    with _timed("plan", seconds):
        progress("planning", 0.0)
        workload = calibration.timed(modelled, described)
        in_memory_bytes, machine = demo_budgets(workload, calibration.on(described))
        # no sub-batches, which a policy may have, too: they sum gradients in another order than the training in memory
        planned = plan(workload, machine, time_limit_s=PLAN_S, orders=("horizontal",), policies=())
        progress("planning", 1.0)
    settings: dict[str, Any] = {"optimizer": optimizer, "seed": seed, "num_threads": num_threads}
    settings["on_step"] = lambda k, loss: progress(f"training with the plan: loss {loss:.3f}", (k + 1) / steps)
    model = seeded_model(modelled.config, training, seed)
    with (
        _timed("train with the plan", seconds),
        Trainer(planned.schedule, model, nvme_dir=nvme, reference_frac=MOST_FRAC, **settings) as trainer,
    ):
        trainer.run(iter(batches), steps)
        trainer.restore_model()
        run = trainer.result()
    with _timed("train in memory", seconds):
        settings["on_step"] = lambda k, loss: progress(f"training in memory: loss {loss:.3f}", (k + 1) / steps)
        reference = seeded_model(modelled.config, training, seed)
        reference_losses, reference_bytes = train_with_tracked_memory(reference, batches, steps=steps, **settings)
    comparison = compare(
        planned.schedule,
        planned.steady.trace,
        run.trace,
        predicted_step_s=planned.step_s,
        interval_s=planned.prediction.interval_s,
    )
    comparison = over_both_slowdowns(at_slowdown(comparison, planned.schedule, machine, run.trace))
    result = DemoResult(
        machine=machine,
        workload=workload,
        planned=planned,
        comparison=comparison,
        losses=run.losses,
        reference_losses=tuple(reference_losses),
        weights_equal=same_weights(model, reference),
        in_memory_device_bytes=in_memory_bytes,
        in_memory_measured_bytes=reference_bytes,
        notes=(*load_notes(load, os.cpu_count() or 1), *run.notes),
        seconds=seconds,
    )
    _write(out, result, run.trace)
    return result


def over_both_slowdowns(comparison: Comparison) -> Comparison:
    """The comparison with the interval for the machine's slowdown in its calibration, in the run, and between: beside
    other programs a minute makes more difference than all that is predicted."""
    assert comparison.interval_s is not None
    low_s, high_s = comparison.interval_s
    ratio = (comparison.step_s_at_slowdown or comparison.step_s.predicted) / comparison.step_s.predicted
    return replace(comparison, interval_s=(low_s * min(1.0, ratio), high_s * max(1.0, ratio)))


@contextmanager
def _timed(name: str, seconds: dict[str, float]) -> Iterator[None]:
    began = time.monotonic()
    yield
    seconds[name] = time.monotonic() - began


def _write(out: Path, result: DemoResult, measured: Trace) -> None:
    save_schedule(result.planned.schedule, out / "schedule.json")
    predicted = result.planned.steady.trace
    predicted.save(out / "predicted.trace.json")
    measured.save(out / "measured.trace.json")
    write_perfetto({"predicted": predicted, "measured": measured}, out / "timeline.json")
    steps = typical_steps(predicted, measured, result.comparison.warmup_steps)
    plot_timelines(steps).savefig(out / "timeline.png", dpi=120)
    write_report(
        out / "report.html",
        result.comparison,
        predicted,
        measured,
        title="tierplan demo: predicted and measured",
        about=about(result),
        losses=result.losses,
        reference_losses=result.reference_losses,
        notes=result.notes,
        schedule=result.planned.schedule,
    )
    write_atomically(out / "result.json", json.dumps(result.record(), indent=2))


def about(result: DemoResult) -> dict[str, str]:
    training = result.workload.training
    return {
        "Model": f"GPT-2 architecture, {format_count(result.workload.num_parameters)} parameters, "
        f"{len(result.workload.blocks)} blocks, fp32",
        "Batch": f"{training.per_device_train_batch_size} sequences of {training.sequence_length} bytes",
        "Text": "the sources of Python's standard library on this machine",
        "Device budget": f"{format_bytes(result.machine.tier(DEVICE).capacity_bytes)}; plain training in memory holds "
        f"{format_bytes(result.in_memory_measured_bytes)} (tracked), "
        f"{format_bytes(result.in_memory_device_bytes)} (predicted)",
        "Host budget": format_bytes(result.machine.tier(HOST).capacity_bytes),
        "Plan": f"{result.planned.plan.policy}, gap to the lower bound {format_frac(result.planned.gap)}",
        "Date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    }


def load_notes(load: float, cores: int) -> list[str]:
    """That other programs were at work when the demo began, if they were, by the load average of the minute before.

    Installing the demo leaves a load of about 1 behind, which is no reason: it is over when the demo measures.
    """
    if load <= max(1.25, cores / 2):
        return []
    return [f"other programs ran when this began (load {load:.1f} on {cores} cores): times vary with what they do"]
