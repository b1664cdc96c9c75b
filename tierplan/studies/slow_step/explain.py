"""What a step should take, where the difference to the measured one probably lies, and what to change first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import exp, log
from typing import Any, NamedTuple

from scipy.optimize import brentq

from tierplan.hwmodels.machine import Machine, MachineError
from tierplan.hwmodels.scaling import with_faster
from tierplan.planner.infeasible import InfeasiblePlan
from tierplan.planner.plan import Plan
from tierplan.planner.plan_rules import PLANNER, PlanError
from tierplan.planner.policies import SHARED
from tierplan.planner.prediction import Prediction, predict, predict_plan
from tierplan.planner.training_files.configured import Configured
from tierplan.sim.output.text import format_frac
from tierplan.sim.workloads.workload import Workload, WorkloadError
from tierplan.studies.defaults import load_or_trace
from tierplan.studies.evaluate import best_plan, machine_of, place_of
from tierplan.studies.slow_step.measured import MeasuredStep
from tierplan.studies.slow_step.setups import (
    COMPUTE,
    CORES,
    DRIVES,
    LINKS,
    PEERS,
    Setup,
    changes,
    part_of,
    setup_of,
    with_checkpoints,
)
from tierplan.studies.study import OF_TRAINING, Point
from tierplan.validation.calibration.known import CalibratedPlace

CALIBRATED_FRAC, DATA_SHEET_FRAC = 0.15, 0.3
"""Within which a step is normal: published steps are met within 14 % on machines that were calibrated
(docs/validation.md), and rates from data sheets are worse."""
MOST_FACTOR = 256.0
LEAST_GAIN_FRAC = 0.01


class Cause(NamedTuple):
    """Why a part of a machine is often slower than its data sheet says."""

    what: str
    factor: float
    """How many times slower, about; published where there is a source."""
    source: str = ""


CAUSES: Mapping[str, tuple[Cause, ...]] = {
    CORES: (
        Cause("Adam in PyTorch, or DeepSpeed's compiled without AVX", 6.5, "DeepSpeed pull request 735"),
        Cause("OMP_NUM_THREADS=1 (torchrun's), or ranks on few cores", 10, "ISEEKYAN/Megatron-LM issue 188"),
        Cause("cores not bound to ranks (--bind_cores_to_rank)", 1.3, "DeepSpeed pull request 7474"),
        Cause("one DIMM, or channels left empty", 2, "DeepSpeed issue 6695"),
        Cause("host memory that the system has swapped out", 30),
    ),
    LINKS: (
        Cause("copies from memory that is not pinned (pin_memory: true)", 2),
        Cause("a slot with 4 or 8 lanes, or one generation older", 2),
        Cause("GPUs that share the host's link, all copying", 2, "Mist's measurements of 8x A10G"),
        Cause("memory of the other socket", 2.9, "torchtitan issue 3519"),
        Cause("copies that wait for each other", 10, "DeepSpeed issue 1130"),
    ),
    DRIVES: (
        Cause("writes beyond the drive's cache", 4, "WD SN850X: 6.3 GB/s, then 0.9 to 1.8"),
        Cause("a drive shared with the system, or a file system without O_DIRECT", 2),
        Cause("too few requests in flight (aio: queue_depth, block_size, intra_op_parallelism)", 3),
    ),
    COMPUTE: (
        Cause("the GPU's limit of power or heat, or another program on it", 1.5),
        Cause("attention that is not fused (attn_implementation: flash_attention_2 or sdpa)", 2),
        Cause("fp32 kernels where 16 bits were meant", 4),
        Cause("small kernels that Python launches too slowly, or a GPU that waits for data", 3),
    ),
    PEERS: (Cause("GPUs that exchange through host memory, without peer-to-peer access", 4),),
}
ON_CPU = (
    CAUSES[CORES][1],
    Cause("other programs on the cores, or a limit of the container's", 2),
    CAUSES[CORES][-1],
)
"""Where the host's own cores compute."""
OF_TRACES = (
    (LINKS, ("h2d", "d2h"), "copies between host and GPU"),
    (PEERS, ("p2p",), "collectives, or copies between GPUs"),
)
"""What a trace has of parts of a machine that a setup may leave alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A part of the machine that explains the difference where it is slower (or faster) than the machine says."""

    part: str
    factor: float
    """Times slower; below 1 for faster."""
    step_s: float
    """Simulated with that."""
    misfit_frac: float
    """Of the measured step: what it leaves unexplained, phase by phase where phases were measured."""
    rates: Mapping[str, float]
    """What its streams then reach at most, by stream: units per second of their main work."""
    causes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """A change of the setup, with the step that it gives."""

    what: str
    why: str
    step_s: float
    gain_frac: float
    assumed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Is the step normal, and what to do."""

    model: str
    machine: str
    setup: Setup
    measured: MeasuredStep
    expected: Prediction
    expected_s: float | None
    """None where the setup cannot run here, by the simulation."""
    normal_frac: float
    suspects: tuple[Suspect, ...] = ()
    gains: tuple[Gain, ...] = ()
    best: Prediction | None = None
    """What the planner reaches for the same sequences, or why it has no answer; None where nothing fits."""
    notes: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()

    @property
    def ratio(self) -> float | None:
        return None if self.expected_s is None else self.measured.step_s / self.expected_s

    @property
    def verdict(self) -> str:
        """`normal`, `slow`, `fast`, or `does not fit`."""
        if self.ratio is None:
            return "does not fit"
        if abs(self.ratio - 1.0) <= self.normal_frac:
            return "normal"
        return "slow" if self.ratio > 1 else "fast"

    def record(self) -> dict[str, object]:
        """The explanation as JSON values."""
        phases, best = self.expected.phases, self.best
        return {
            "model": self.model,
            "machine": self.machine,
            **{name: getattr(self.expected, name) for name in ("devices", "devices_of_machine")},
            "setup": asdict(self.setup),
            "verdict": self.verdict,
            "measured_s": self.measured.step_s,
            "expected_s": self.expected_s,
            "ratio": self.ratio,
            "normal_within_frac": self.normal_frac,
            "phases": {
                "measured": asdict(self.measured.phases) if self.measured.phases else None,
                "expected": asdict(phases) if phases else None,
            },
            "measured_busy_s": dict(self.measured.busy_s),
            "why_not": self.expected.why_not or None,
            "limits": [asdict(limit) for limit in self.expected.limits],
            "suspects": [asdict(s) for s in self.suspects],
            "changes": [asdict(g) for g in self.gains],
            "best": None if best is None else best.record(),
            "notes": list(self.notes),
            "assumptions": list(self.assumptions),
        }


class _Simulator:
    """Setups on one machine, each simulated once."""

    def __init__(self, model: str, place: CalibratedPlace, exact: bool) -> None:
        self.model, self.place, self.machine, self.exact = model, place, place.machine, exact
        self.streams: dict[str, set[str]] = {}
        for stream in self.machine.streams:
            self.streams.setdefault(part_of(stream.name), set()).add(stream.name)

    def workload(self, setup: Setup) -> Workload:
        return self.place.timed(load_or_trace(self.model, setup.training, exact=self.exact))

    def slowed(self, factors: Mapping[str, float]) -> Machine:
        machine = self.machine
        for part, factor in factors.items():
            machine = with_faster(machine, self.streams.get(part, set()), 1.0 / factor)
        return machine

    def predict(self, setup: Setup) -> Prediction:
        return predict(setup.policy, self.workload(setup), self.slowed(setup.slower), setup.options)

    def predict_for(self, tokens: int, setup: Setup) -> Prediction | None:
        """The same for so many tokens, in fewer or more micro-batches where devices share them or have their own; None
        where that cannot be."""
        prediction, training = self.predict(setup), setup.training
        if not prediction.tokens or prediction.tokens == tokens:
            return prediction
        num, rest = divmod(training.gradient_accumulation_steps * tokens, prediction.tokens)
        if rest or not num:
            return None
        return self.predict(replace(setup, training=replace(training, gradient_accumulation_steps=num)))

    def with_part(self, setup: Setup, plan: Plan, part: str, factor: float) -> Prediction:
        """The same plan where one part is slower still."""
        slower = {**setup.slower, part: setup.slower.get(part, 1.0) * factor}
        return predict_plan(plan, self.workload(setup), self.slowed(slower))


def explain_run(point: Point, configured: Configured, measured: MeasuredStep) -> Explanation:
    """The explanation of a measured step of a configuration; `point` says model, machine and the planner's limit."""
    machine, configured = machine_of(point), _as_described(point, configured)
    setup, assumed = setup_of(configured, machine)
    place = place_of(_asked(point, setup))
    simulator = _Simulator(point.model, place, point.exact)
    workload = simulator.workload(setup)
    if measured.phases is None and not measured.busy_s:
        setup = with_checkpoints(setup, configured.says, machine, workload)
    expected = simulator.predict(setup)
    expected_s = None if expected.step_s is None else expected.step_s + setup.extra_s
    own = 1 if setup.policy in SHARED else int(setup.options.get("devices") or machine.num_devices)
    tokens = expected.tokens or own * setup.training.tokens_per_step  # none where there is no plan
    notes = (*configured.notes, *filter(None, [expected.devices_note]))
    explanation = Explanation(
        model=workload.name,
        machine=machine.name,
        setup=setup,
        measured=measured,
        expected=expected,
        expected_s=expected_s,
        normal_frac=DATA_SHEET_FRAC if place.calibration is None and _is_rough(machine) else CALIBRATED_FRAC,
        gains=_gains(simulator, setup, configured, expected_s, tokens),
        best=_best(point, setup, tokens),
        notes=notes,
        assumptions=(*assumed, *_always(machine, setup, expected)),
    )
    if expected_s is None or explanation.verdict == "normal":
        return explanation
    hints = _hints(explanation)
    return replace(explanation, suspects=_suspects(simulator, setup, explanation), notes=(*notes, *hints))


def _as_described(point: Point, configured: Configured) -> Configured:
    """The configuration, without compiled kernels of its file where those are not described of the model."""
    if configured.plain is None:
        return configured
    try:
        load_or_trace(point.model, configured.training, exact=point.exact)
    except ValueError as error:  # of closed forms, or of the model that is traced
        return configured.plain.noting(f"compiled kernels that the file asks for are not simulated: {error}")
    return configured


def _asked(point: Point, setup: Setup) -> Point:
    """The point with what the setup trains."""
    t = setup.training
    trained: dict[str, Any] = {name: getattr(t, its) for name, its in OF_TRAINING.items()}
    # with an fp32 copy; neither a fused loss nor compiled blocks are executed
    executed: dict[str, Any] = {"dtype": t.autocast or t.dtype, "autocast": "", "loss": "plain", "torch_compile": False}
    if t.loss == "fused":
        executed["loss_chunks"] = point.loss_chunks  # those of a fused one make nothing again
    return replace(point, **trained | executed)


def _is_rough(machine: Machine) -> bool:
    """Whether a rate that matters comes from a data sheet, or was assumed."""
    numbers: list[Any] = [machine.description.get(key) for key in ("link.h2d", "link.d2h")]
    return bool(machine.nameplate) or any(n and n["basis"] in ("nameplate", "assumed") for n in numbers)


def _always(machine: Machine, setup: Setup, expected: Prediction) -> tuple[str, ...]:
    lines = ["data loading, evaluation and logging take no time"]
    if setup.extra_s:
        lines.append("checkpoints are written at the drives' rate while training waits")
    else:
        lines = ["data loading, evaluation, logging and checkpoints take no time"]
    if names := machine.nameplate if setup.extra_s else expected.nameplate:
        lines.append(f"from data sheets rather than measured: {', '.join(names)} (`tierplan machine measure`)")
    return tuple(lines)


def _hints(explanation: Explanation) -> tuple[str, ...]:
    """What else than a slow part may be behind the figure."""
    measured, setup, expected_s = explanation.measured, explanation.setup, explanation.expected_s
    assert expected_s is not None
    steps = setup.training.gradient_accumulation_steps
    lines = []
    if steps > 1 and abs(measured.step_s * steps / expected_s - 1.0) <= explanation.normal_frac:
        lines.append(
            f"{steps} times the measured time is what one optimizer step should take: was it one micro-batch's?"
        )
    if measured.phases is not None:
        timed = sum(asdict(measured.phases).values())
        if measured.step_s > 1.15 * timed:
            lines.append(
                f"{measured.step_s - timed:.3g} s of the step lie outside of forward, backward and update: data "
                "loading, logging, evaluation or checkpoints"
            )
    idle_s = measured.step_s - sum(measured.busy_s.values())
    if measured.busy_s and idle_s > 0.15 * measured.step_s:
        lines.append(
            f"{idle_s:.3g} s of the step or more have no kernel, copy or update in the trace: data loading, logging, "
            "Python, or drives"
        )
    simulated = _busy(explanation.expected)
    for part, kinds, what in OF_TRACES:
        traced_s = max(measured.busy_s.get(kind, 0.0) for kind in kinds)
        if part not in simulated and traced_s > 0.05 * measured.step_s:
            lines.append(f"the trace has {traced_s:.3g} s of {what}, and this setup has none: is it what was run?")
    if measured.pageable_frac > 0.05:
        part = format_frac(measured.pageable_frac)
        lines.append(f"{part} of the copied bytes lie in memory that is not pinned; set pin_memory: true")
    return tuple(lines)


def _suspects(simulator: _Simulator, setup: Setup, explanation: Explanation) -> tuple[Suspect, ...]:
    """One part after the other, slowed until the step is the measured one; those that explain most first."""
    measured, plan = explanation.measured, explanation.expected.plan
    assert plan is not None
    target_s = measured.step_s - setup.extra_s
    busy = _busy(explanation.expected)
    found = []
    for part in simulator.streams:
        if part not in busy or target_s <= 0:
            continue

        def step_s(log_factor: float, part: str = part) -> float:
            prediction = simulator.with_part(setup, plan, part, exp(log_factor))
            return (prediction.step_s or 0.0) - target_s

        direct = _measured_busy(measured, part)
        if direct is not None:
            factor = min(max(direct / busy[part], 1 / MOST_FACTOR), MOST_FACTOR)
        else:
            ends = (0.0, log(MOST_FACTOR)) if target_s > explanation.expected.step_s else (-log(MOST_FACTOR), 0.0)  # type: ignore[operator]
            if step_s(ends[0]) > 0 or step_s(ends[1]) < 0:
                continue
            factor = exp(float(brentq(step_s, *ends, xtol=0.02)))
        prediction = simulator.with_part(setup, plan, part, factor)
        is_cpu = part == COMPUTE and setup.training.backend == "cpu"
        causes = tuple(
            c.what + (f" ({c.factor:g} times slower: {c.source})" if c.source else "")
            for c in sorted(ON_CPU if is_cpu else CAUSES[part], key=lambda c: abs(log(c.factor / max(factor, 1.0))))
            if factor > 1
        )
        rates = {
            s.name: max(next(iter(s.rates.values())).points)[1] / factor / setup.slower.get(part, 1.0)
            for s in simulator.machine.streams
            if s.name in simulator.streams[part] and (part != COMPUTE)
        }
        found.append(
            Suspect(
                part=part,
                factor=factor,
                step_s=(prediction.step_s or 0.0) + setup.extra_s,
                misfit_frac=_misfit(prediction, measured, target_s),
                rates=rates,
                causes=causes,
            )
        )
    return tuple(sorted(found, key=lambda s: (round(s.misfit_frac, 1), abs(log(s.factor)))))


def _busy(prediction: Prediction) -> dict[str, float]:
    """Predicted seconds at work by part, of its busiest stream."""
    busy: dict[str, float] = {}
    streams = {s.name for s in prediction.hardware.streams} if prediction.hardware else set()
    for stream, share in prediction.utilization.items():
        if stream in streams:
            part = part_of(stream)
            busy[part] = max(busy.get(part, 0.0), share * (prediction.step_s or 0.0))
    return busy


def _measured_busy(measured: MeasuredStep, part: str) -> float | None:
    kinds = {COMPUTE: ("compute",), LINKS: ("h2d", "d2h"), CORES: ("update",)}.get(part, ())
    found = [measured.busy_s[kind] for kind in kinds if kind in measured.busy_s]
    return max(found) if found else None


def _misfit(prediction: Prediction, measured: MeasuredStep, target_s: float) -> float:
    """What is not explained, over the measured step: of phases or of parts at work, where they were measured."""
    if prediction.step_s is None or prediction.phases is None:
        return 1.0
    left_s = [abs(prediction.step_s - target_s)]
    if measured.phases is not None:
        simulated, timed = asdict(prediction.phases), asdict(measured.phases)
        left_s = [abs(simulated[name] - timed[name]) for name in timed]
    for part, busy_s in _busy(prediction).items():
        if (worked_s := _measured_busy(measured, part)) is not None:
            left_s.append(abs(worked_s - busy_s))
    return sum(left_s) / measured.step_s


def _gains(
    simulator: _Simulator, setup: Setup, configured: Configured, expected_s: float | None, tokens: int
) -> tuple[Gain, ...]:
    """Changes that fit and save time for the same tokens, most first; of larger micro-batches only the best."""
    found: dict[str, Gain] = {}
    for change in changes(setup, configured.says, simulator.machine.num_devices):
        try:
            prediction = simulator.predict_for(tokens, change.setup)
        except ValueError:  # of a policy, or of a model that cannot be trained so
            continue
        if prediction is None or prediction.step_s is None:
            continue
        step_s = prediction.step_s + change.setup.extra_s
        gain_frac = 1.0 if expected_s is None else 1.0 - step_s / expected_s
        gain = Gain(what=change.what, why=change.why, step_s=step_s, gain_frac=gain_frac, assumed=change.assumed)
        kind = "micro-batch" if change.what.startswith("micro-batches") else change.what
        if gain.gain_frac >= LEAST_GAIN_FRAC and (kind not in found or gain.step_s < found[kind].step_s):
            found[kind] = gain
    return tuple(sorted(found.values(), key=lambda g: g.step_s))


def _best(point: Point, setup: Setup, tokens: int) -> Prediction | None:
    """What `tierplan plan` says of the same sequences on the same machine."""
    sequences = tokens // setup.training.sequence_length
    try:
        return best_plan(replace(_asked(point, setup), sequences=sequences)).result.prediction
    except InfeasiblePlan:
        return None
    except (PlanError, MachineError, WorkloadError) as error:  # which says nothing of the step that was measured
        name = machine_of(point).name
        return Prediction(policy=PLANNER, model=point.model, machine=name, plan=None, reason=str(error))
