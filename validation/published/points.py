"""Steps that others measured (`measured/facts.toml`), each put to the simulator by a rule, and what comes out.

    reproduce_points("points")       rows of several GPUs
    reproduce_points("finetuning")   rows of one GPU that fine-tune: seconds, and peaks of memory

A rule says for the points whose names match which machine, policy, options and batch they are, or why they cannot be
expressed. Nothing in it depends on the measured time, unless it is marked `fitted`: then the row is one of calibration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import lru_cache
from typing import Any

from tierplan.hwmodels import load_machine
from tierplan.hwmodels.machine import Machine, Rate, SharedLimit
from tierplan.hwmodels.names import COMPUTE, DEVICE, parse_stream
from tierplan.planner.plan_rules import PlanError
from tierplan.planner.prediction import Prediction, predict
from tierplan.sim.analysis.steady import SteadyState
from tierplan.sim.workloads.models import read_config, workload_of
from tierplan.sim.workloads.workload import (
    NotCovered,
    Training,
    Unit,
    Workload,
    WorkloadError,
)
from tierplan.validation.published.reproduce import PEAKS, Report, Row, constants_of, peak_of, table_of

Facts = Mapping[str, Any]
POINTS = ("points", "finetuning")
"""The files with rules."""


def measured_s(facts: Facts, sequences: int, length: int) -> float | None:
    """Measured seconds of a step of so many sequences; None where no time was published."""
    if facts.get("seq") == length and "tokens_per_s" in facts:
        return sequences * length / float(facts["tokens_per_s"])
    if "step_s" in facts or "s_per_step" in facts:
        return float(facts.get("step_s", facts.get("s_per_step")))
    if "s_per_sample" in facts:
        return float(facts["s_per_sample"]) * sequences
    return sequences * length / float(facts["tokens_per_s"]) if "tokens_per_s" in facts else None


@dataclass(frozen=True, slots=True)
class Question:
    """What a point asks of the simulator."""

    machine: str
    settings: tuple[str, ...]
    policy: str
    options: Mapping[str, object]
    model: str
    training: Training
    sequences: int
    """In one step, over all devices."""
    block_s: tuple[float, float] | None = None
    """Measured seconds of a block's forward and backward per token, where published; else its modelled work."""
    config: tuple[tuple[str, Any], ...] = ()
    """What the system trained instead of the model's own sizes."""
    launch_s: float = 0.0
    """Of one process that drives all devices, for a block's forward (and, of a block without measured times, for its
    backward); 0 where each device has its own, whose launches are the machine's (`gpu.launch`)."""
    adapters_of_experts: int = 0
    """Trained parameters of each block that are not in the workload, whose experts' adapters are not traced."""

    def workload(self) -> Workload:
        workload = _workload(self.model, self.training, self.config)
        units = [self._timed(u) if u.kind == "block" else u for u in workload.units]
        return replace(workload, units=tuple(units))

    def _timed(self, block: Unit) -> Unit:
        """With the parameters of adapters, measured seconds and launches, where the point has these."""
        block = replace(block, num_parameters=block.num_parameters + self.adapters_of_experts)
        launches = {LAUNCH_S: self.launch_s} if self.launch_s else {}
        if self.block_s:
            tokens = self.training.per_device_train_batch_size * self.training.sequence_length
            forward, backward = ({"s": seconds * tokens} for seconds in self.block_s)
            return replace(block, forward=forward | launches, backward=backward, recompute=None)
        if launches:
            forward, backward = ({**work, **launches} for work in (block.forward, block.backward))
            return replace(block, forward=forward, backward=backward, recompute=None)
        return block

    def answer(self) -> Prediction:
        """Raises `WorkloadError` or `PlanError` where there is no such workload or policy."""
        machine = load_machine(self.machine, self.settings)
        if self.launch_s:
            machine = driven_by_one_process(machine)
        return predict(self.policy, self.workload(), machine, self.options)


LAUNCH_S = "launch_s"
"""Kind of work: seconds of the process that launches kernels."""


def driven_by_one_process(machine: Machine) -> Machine:
    """A machine whose devices compute as fast as one process can launch for all of them."""
    streams = tuple(
        replace(s, rates={**s.rates, LAUNCH_S: Rate.constant(1e9)}, takes={**s.takes, "process": {LAUNCH_S: 1.0}})
        if parse_stream(s.name).task == "compute"
        else s
        for s in machine.streams
    )
    limits = (*machine.shared_limits, SharedLimit(name="process", limit=1.0))
    return replace(machine, streams=streams, shared_limits=limits)


@lru_cache(maxsize=64)
def _workload(model: str, training: Training, changes: tuple[tuple[str, Any], ...]) -> Workload:
    name, config = read_config(model, training)
    try:
        return workload_of(name, {**config, **dict(changes)}, training)
    except NotCovered:
        from tierplan.runtime.tracing.trace import trace_config  # torch, which the closed forms do without

        return trace_config(name, {**config, **dict(changes)}, training)


def _table(name: str) -> dict[str, Any]:
    table = table_of("measured", f"{name}.toml")
    rules = [{**rule, **own} for rule in table.get("rule", ()) for own in rule.get("of", ({},))]
    return {**table, "rule": rules}


@lru_cache(maxsize=1)
def load_points() -> Mapping[str, Facts]:
    """All measured points in the order of the file: what was published, by the point's name."""
    return {own["id"]: {**group, **own} for group in _table("facts")["from"] for own in group.pop("points")}


def question_of(point: Facts, rule: Facts, models: Mapping[str, str]) -> Question:
    """A point as machine, policy, model and batch. What the rule says goes before what was published."""
    facts = {**point, **{name: value for name, value in rule.items() if name not in ("policy", "model")}}
    facts |= rule.get("by_model", {}).get(point["model"], {})
    ranks = 1 if facts.get("shared") else int(facts["gpus"])  # who have sequences of their own
    sequences = int(facts.get("sequences_per_step", facts.get("global_batch", 0)))
    accumulation = int(facts.get("micro_batches", facts.get("accumulation", 1)))
    micro_batch = sequences // (ranks * accumulation)
    if "micro_batch" in facts and "micro_batches" not in facts:
        micro_batch = int(facts["micro_batch"])
        accumulation = max(sequences // (ranks * micro_batch), 1) if sequences else accumulation
    training = Training(
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        sequence_length=int(facts["seq"]),
        dtype=facts.get("dtype", "bf16"),
        **facts.get("training", {}),
    )
    options = dict(facts.get("options", {}))
    if "checkpointing" in facts:
        options.setdefault("checkpointing", "on" if facts["checkpointing"] else "off")
    return Question(
        machine=facts["machine"],
        settings=(f"gpu.count={facts['gpus']}", *facts.get("set", ())),
        policy=rule["policy"],
        options=options,
        model=models.get(point["model"], point["model"]),
        training=training,
        sequences=ranks * micro_batch * accumulation,
        block_s=tuple(facts["block_s"]) if "block_s" in facts else None,
        config=tuple(facts.get("config", {}).items()),
        **{name: facts[name] for name in OF_THE_SYSTEM if name in facts},
    )


OF_THE_SYSTEM = ("launch_s", "adapters_of_experts")
"""What a point or its rule may say of a question, in the question's own words."""


def reproduce_points(name: str, *, only: str = "*", progress: Callable[[str], None] = lambda text: None) -> Report:
    """Every point that a rule of `measured/NAME.toml` matches, the first that does, beside its prediction."""
    table = _table(name)
    rows = []
    for point, facts in load_points().items():
        rule = next((r for r in table["rule"] if any(fnmatch(point, pattern) for pattern in r["ids"])), None)
        if rule is not None and fnmatch(point, only):
            progress(f"{name}: {point}")
            rows += _rows(name, facts, rule, table["models"])
    machines = dict.fromkeys(rule["machine"] for rule in table["rule"] if "machine" in rule)
    return Report(name, table["source"], tuple(rows), tuple(c for machine in machines for c in constants_of(machine)))


def _peak_bytes(question: Question, steady: SteadyState, rule: Facts) -> float:
    """Of a plan, or of what its updates hold where a framework copies gradients for them; and what lies beside both."""
    workload, t = question.workload(), question.training
    peak_bytes = peak_of(steady, without=rule["uncounted"]) if "uncounted" in rule else steady.peak_bytes[DEVICE]
    if "copies_of_gradients" in rule:
        of_trained = workload.num_trained * (t.grad_bytes + rule["copies_of_gradients"])
        peak_bytes = max(peak_bytes, workload.params_bytes + workload.states_bytes + of_trained)
    return peak_bytes + sum(map(float, rule.get("beside_gb", ()))) * 1e9


def _rows(system: str, point: Facts, rule: Facts, models: Mapping[str, str]) -> list[Row]:
    """All that was published of the point: its time, and peaks of one that fine-tunes; each answered, or why not."""
    role = "calibrate" if point["id"] in rule.get("fitted", ()) else "check"
    peaks = [name for name in PEAKS if system == "finetuning" and name in point]
    no_answer = rule.get("no_answer", {})

    def row(quantity: str, value: float | None, told: float | None, why_not: str, **ranked: Any) -> Row:
        note = str(rule.get("note", ""))
        return Row(system, role, quantity, point["id"], value, value, told, why_not, note, **ranked)

    if "cannot" in rule:
        of_peaks = ((name, float(point[name])) for name in peaks)
        why_not = f"cannot be expressed: {rule['cannot']}"
        return [row(name, value, None, why_not) for name, value in (("step_s", None), *of_peaks)]
    question = question_of(point, rule, models)
    steps = int(rule.get("steps", 1))  # theirs in one of ours
    tokens = question.sequences * question.training.sequence_length // steps
    where = (rule["machine"], f"{point['gpus']} GPUs", question.model, str(question.training.sequence_length))
    group, prediction, why_not = ", ".join(where), None, ""
    try:
        prediction = question.answer()
        why_not = prediction.why_not
    except (WorkloadError, PlanError) as error:
        why_not = str(error)
    rows = []
    for quantity in ("step_s", *peaks):
        is_time = quantity == "step_s"
        length = question.training.sequence_length
        value = measured_s(point, question.sequences, length) if is_time else float(point[quantity])
        if quantity in no_answer:
            rows.append(row(quantity, value, None, str(no_answer[quantity])))
        elif is_time:
            told = None if prediction is None or not prediction.step_s else prediction.step_s / steps
            if told is not None and "update_bytes" in rule:  # which an update without fused kernels moves besides
                moved = {"elementwise_bytes": rule["update_bytes"] * question.workload().num_trained}
                told += load_machine(question.machine, question.settings).cost(COMPUTE, moved).alone_s
            rows.append(row(quantity, value, told, why_not, prediction=prediction, group=group, tokens=tokens))
        else:
            steady = None if prediction is None else prediction.steady
            if {"peak_seq", "peak_policy", "peak_loss"} & rule.keys():  # of the longest, of other places or logits
                t = question.training
                length, loss = rule.get("peak_seq", t.sequence_length), rule.get("peak_loss", t.loss)
                training = replace(t, sequence_length=length, loss=loss)
                other = {"policy": rule["peak_policy"], "options": {}} if "peak_policy" in rule else {}
                steady = replace(question, training=training, **other).answer().steady
            told = None if steady is None else _peak_bytes(question, steady, rule) / PEAKS[quantity]
            rows.append(row(quantity, value, told, why_not))
    return rows
