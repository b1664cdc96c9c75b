"""What a group of runs is predicted from: a shallow model of the same shape, trained through the runtime.

A model of two blocks is trained under three plans: all activations kept, all recomputed, and everything offloaded. The
first two say what embedding, block and head take on this machine; these times then stand in the workload of a deeper
model (`with_times`). All three say by how much each stream is quicker or slower inside a training step than where the
machine was measured (`calibrated`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from statistics import median, stdev

from tierplan.hwmodels.machine import Machine, Rate, Stream
from tierplan.planner.lowering import lower
from tierplan.planner.plan import Plan, UnitPlan
from tierplan.planner.policies import decide
from tierplan.runtime.environment import random_batches, seeded_model
from tierplan.runtime.tracing import trace_config
from tierplan.runtime.trainer import train
from tierplan.sim.pricing import simulate_on
from tierplan.sim.schedule import Schedule, unroll
from tierplan.sim.trace import Trace
from tierplan.sim.workload import SavedTensor, Training, Unit, Workload
from tierplan.validation.budgets import AMPLE_BYTES, ROOM, with_capacity
from tierplan.validation.steps import Steps, cut_predicted, cut_steps

__all__ = [
    "PartTimes",
    "Shallow",
    "calibrated",
    "measure_shallow",
    "scaled",
    "step_now_s",
    "with_room",
    "with_times",
]

COMPUTE = "gpu0.compute"
ROUNDS = 6
"""Of calibration: contention changes when rates do."""
FACTOR_LIMIT = 10.0
MOST_PRESSURE = 1.4
LEAST_LOSS = 0.002
"""Of computation, for its loss to say something about contention."""
TIMED = ("forward", "backward", "recompute")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTimes:
    """Seconds of one part of the model for one micro-batch."""

    forward_s: float
    backward_s: float
    recompute_s: float
    """Of everything it saves."""
    spread: float
    """Relative standard deviation of forward and backward over steps, without the slowest tenth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shallow:
    """What the shallow model told."""

    parts: Mapping[str, PartTimes]
    """By kind of unit: `embed`, `block`, `head`."""
    machine: Machine
    """With rates as they are inside a training step."""
    factors: Mapping[str, float]
    """By stream and kind of work (`nvme.read bytes`): the rate inside a training step over the one measured alone."""
    spreads: Mapping[str, float]
    """Relative standard deviation of a stream's busy time from step to step, by stream."""
    step_s: float
    """Of the shallow model with everything kept: `step_now_s` says the same later."""


def measure_shallow(
    config: Mapping[str, object],
    training: Training,
    machine: Machine,
    *,
    nvme_dir: str | os.PathLike[str],
    steps: int = 10,
    warmup_steps: int = 2,
    device: str = "cpu",
) -> Shallow:
    """Trains the shallow model of `config` for `steps` steps under each of the three plans."""
    ample = with_capacity(machine, {t.name: AMPLE_BYTES for t in machine.tiers})
    workload = trace_config("shallow", config, training)
    part_of = {u.name: u.kind for u in workload.units}
    plans = {
        "kept": decide("in-memory", workload, ample),
        "recomputed": decide("full-recompute", workload, ample),
        "offloaded": _everything_offloaded(workload),
    }
    runs: dict[str, tuple[Schedule, Steps]] = {}
    for name, plan in plans.items():
        schedule = lower(plan, workload, ample)
        schedule = with_room(schedule, simulate_on(unroll(schedule, 2), ample).peak_bytes)
        runs[name] = schedule, _run(schedule, config, training, nvme_dir, steps, warmup_steps, device)
    spans: dict[str, dict[str, list[list[float]]]] = {}
    for name, kinds in (("kept", ("forward", "backward")), ("recomputed", ("recompute",))):
        schedule, cut = runs[name]
        for op in schedule.ops:
            if op.kind in kinds:
                seconds = [cut.spans[k][op.key].duration_ns / 1e9 for k in cut.steady]
                spans.setdefault(part_of[op.unit], {}).setdefault(op.kind, []).append(seconds)
    parts = {part: _part_times(times) for part, times in spans.items()}
    found = machine
    for name in ("kept", "offloaded"):
        schedule, cut = runs[name]
        found = calibrated(found, schedule, cut, _alone_s(schedule, part_of, parts))
    return Shallow(
        parts=parts,
        machine=found,
        factors=_factors(machine, found),
        spreads=_spreads(runs["offloaded"][1]),
        step_s=runs["kept"][1].step_s,
    )


def _run(
    schedule: Schedule,
    config: Mapping[str, object],
    training: Training,
    nvme_dir: str | os.PathLike[str] | None,
    steps: int,
    warmup_steps: int,
    device: str,
) -> Steps:
    batches = random_batches(config, training, steps * training.gradient_accumulation_steps)
    result = train(schedule, seeded_model(config, training), batches, steps=steps, nvme_dir=nvme_dir, device=device)
    return cut_steps(result.trace, warmup_steps)


def step_now_s(
    config: Mapping[str, object], training: Training, machine: Machine, *, steps: int = 8, device: str = "cpu"
) -> float:
    """Seconds per step of the shallow model with everything kept, as it is now: clocks and neighbours change."""
    ample = with_capacity(machine, {t.name: AMPLE_BYTES for t in machine.tiers})
    workload = trace_config("shallow", config, training)
    schedule = lower(decide("in-memory", workload, ample), workload, ample)
    schedule = with_room(schedule, simulate_on(unroll(schedule, 2), ample).peak_bytes)
    return _run(schedule, config, training, None, steps, 2, device).step_s


def scaled(parts: Mapping[str, PartTimes], factor: float) -> dict[str, PartTimes]:
    """All times multiplied by `factor`."""
    return {
        part: replace(
            t,
            forward_s=t.forward_s * factor,
            backward_s=t.backward_s * factor,
            recompute_s=t.recompute_s * factor,
        )
        for part, t in parts.items()
    }


def _everything_offloaded(workload: Workload) -> Plan:
    """Work for every stream: states on NVMe, parameters and gradients in host memory, activations in both."""
    block = UnitPlan(params="host", grads="host", states="nvme", input="host", acts="host")
    ends = UnitPlan(params="host", grads="host", states="nvme")
    units = [block if u.kind == "block" else ends for u in workload.units]
    units[1] = replace(block, acts="nvme")
    return Plan(policy="calibration", units=tuple(units))


def _alone_s(schedule: Schedule, part_of: Mapping[str, str], parts: Mapping[str, PartTimes]) -> dict[str, float]:
    """What forward, backward and recomputation take with nothing beside them, by key."""
    found = {}
    for op in schedule.ops:
        if op.kind in TIMED:
            times = parts[part_of[op.unit]]
            found[op.key] = {
                "forward": times.forward_s,
                "backward": times.backward_s,
                "recompute": times.recompute_s,
            }[op.kind]
    return found


def calibrated(machine: Machine, schedule: Schedule, measured: Steps, alone_s: Mapping[str, float]) -> Machine:
    """The machine on which the simulated ops take as long as the measured ones did, in sum.

    One factor per stream and kind of work; ops of `alone_s` take that long with nothing beside them. What a stream
    takes of a shared limit stays the same fraction of it, but for one factor on what all other streams take of the
    limits of computation: it makes the time that computation loses to them what was measured.
    """
    seconds_m = measured.median_ns()
    latency_s = machine.stream(COMPUTE).latency_s
    ops = [
        replace(op, work={"s": max(alone_s[op.key] - latency_s, 0.0)}) if op.key in alone_s else op
        for op in schedule.ops
    ]
    schedule = replace(schedule, ops=tuple(ops))
    alone_ns = sum(alone_s.values()) * 1e9
    lost_m = sum(seconds_m[key] for key in alone_s) - alone_ns
    pressure = 1.0
    for _ in range(ROUNDS):
        trace: Trace = simulate_on(unroll(schedule, 3), machine)
        seconds_p = cut_predicted(trace).median_ns()
        sums: dict[tuple[str, str], list[float]] = {}
        for op in schedule.ops:
            kinds = [kind for kind, amount in op.work.items() if amount and kind != "s"]
            if len(kinds) == 1:
                both = sums.setdefault((op.stream, kinds[0]), [0.0, 0.0])
                both[0] += seconds_p[op.key]
                both[1] += seconds_m[op.key]
        factors = {key: p / m for key, (p, m) in sums.items() if p > 0 and m > 0}
        machine = replace(machine, streams=tuple(_scaled(stream, factors) for stream in machine.streams))
        lost_p = sum(seconds_p[key] for key in alone_s) - alone_ns
        if lost_p > LEAST_LOSS * alone_ns:
            wanted = pressure * (max(lost_m, 0.0) / lost_p) ** 0.5
            wanted = min(MOST_PRESSURE, max(1 / MOST_PRESSURE, wanted))
            machine = replace(machine, streams=tuple(_pressing(s, machine, wanted / pressure) for s in machine.streams))
            pressure = wanted
    return machine


def _pressing(stream: Stream, machine: Machine, factor: float) -> Stream:
    """The stream with what it takes of the limits of computation multiplied; computation itself stays as it is."""
    if stream.name == COMPUTE:
        return stream
    shared = machine.stream(COMPUTE).takes
    takes = {
        limit: {k: w * factor for k, w in weights.items()} if limit in shared else weights
        for limit, weights in stream.takes.items()
    }
    return replace(stream, takes=takes)


def _scaled(stream: Stream, factors: Mapping[tuple[str, str], float]) -> Stream:
    """The stream with the rates of some kinds of work multiplied."""
    rates = {}
    takes = {limit: dict(weights) for limit, weights in stream.takes.items()}
    for kind, rate in stream.rates.items():
        factor = min(FACTOR_LIMIT, max(1 / FACTOR_LIMIT, factors.get((stream.name, kind), 1.0)))
        rates[kind] = Rate(tuple((amount, per_s * factor) for amount, per_s in rate.points))
        for weights in takes.values():
            if kind in weights:
                weights[kind] /= factor
    return replace(stream, rates=rates, takes=takes)


def _spreads(steps: Steps) -> dict[str, float]:
    """How much each stream's work varies from step to step, without the slowest tenth of the steps."""
    busy: dict[str, list[float]] = {}
    for k in steps.steady:
        sums: dict[str, float] = {}
        for span in steps.spans[k].values():
            sums[span.stream] = sums.get(span.stream, 0.0) + span.duration_ns
        for stream, ns in sums.items():
            busy.setdefault(stream, []).append(ns)
    found = {}
    for stream, values in busy.items():
        kept = sorted(values)[: max(2, len(values) * 9 // 10)]
        found[stream] = stdev(kept) / median(kept) if len(kept) > 1 and median(kept) > 0 else 0.0
    return found


def _factors(before: Machine, after: Machine) -> dict[str, float]:
    found = {}
    for old, new in zip(before.streams, after.streams, strict=True):
        for kind, rate in old.rates.items():
            factor = new.rates[kind].points[0][1] / rate.points[0][1]
            if factor != 1.0:
                found[f"{old.name} {kind}"] = factor
    return found


def with_room(schedule: Schedule, peak_bytes: Mapping[str, int]) -> Schedule:
    """The schedule with capacities that hold the peaks and 2 % more."""
    tiers = tuple(replace(t, capacity_bytes=ceil(peak_bytes[t.name] * ROOM)) for t in schedule.tiers)
    return replace(schedule, tiers=tiers)


def _part_times(times: Mapping[str, list[list[float]]]) -> PartTimes:
    """Medians over steps, averaged over the ops of one kind; `times` holds a list of seconds per op."""

    def typical(kind: str) -> float:
        found = times.get(kind, [])
        return sum(median(seconds) for seconds in found) / len(found) if found else 0.0

    relative = sorted(
        seconds / median(series)
        for kind in ("forward", "backward")
        for series in times.get(kind, [])
        for seconds in series
        if median(series) > 0
    )
    kept = relative[: max(2, len(relative) * 9 // 10)]
    return PartTimes(
        forward_s=typical("forward"),
        backward_s=typical("backward"),
        recompute_s=typical("recompute"),
        spread=stdev(kept) if len(kept) > 1 else 0.0,
    )


def with_times(workload: Workload, times: Mapping[str, PartTimes], machine: Machine) -> Workload:
    """The workload with measured times of its parts. What recomputing one tensor takes is its modelled share."""
    return replace(workload, units=tuple(_with_times(u, times[u.kind], machine) for u in workload.units))


def _with_times(unit: Unit, times: PartTimes, machine: Machine) -> Unit:
    latency_s = machine.stream(COMPUTE).latency_s
    modelled = [machine.cost(COMPUTE, tensor.recompute).work_s for tensor in unit.saved]
    total = sum(modelled)
    saved: list[SavedTensor] = []
    for tensor, seconds in zip(unit.saved, modelled, strict=True):
        share = seconds / total if total else 1 / len(unit.saved)
        saved.append(replace(tensor, recompute={"s": max(times.recompute_s - latency_s, 0.0) * share}))
    return replace(
        unit,
        forward={"s": max(times.forward_s - latency_s, 0.0)},
        backward={"s": max(times.backward_s - latency_s, 0.0)},
        recompute={"s": max(times.recompute_s - latency_s, 0.0)} if unit.kind == "block" else None,
        saved=tuple(saved),
        spread=times.spread,
    )
