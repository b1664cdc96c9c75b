"""What a group's predictions rest on: a shallow model of the same shape, trained through the runtime.

Its parts are timed first (`tierplan.runtime.measure.units`). Then it is trained under six plans in short turns:
everything kept in device memory, all activations recomputed, some of each block's, everything offloaded, everything
streamed, and the optimizer swept over the drive after backward. Before and after each turn comes one of the first
plan, so that what a plan does is known relative to the machine's speed at that moment (its *pace*). From all turns
follow

- the times of the parts inside a training step, and each stream's latency and rates there;
- what streams lose to each other (one factor on the measured shared limits);
- the hand-over from op to op: how long after its inputs and its stream are there an op begins;
- how far predictions are off: each plan's step is predicted from the other plans' turns alone (`Basis.checks`).

Nothing here knows the configurations that are to be predicted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from math import exp, log, sqrt
from pathlib import Path
from statistics import fmean, median
from types import TracebackType
from typing import Any

from scipy.stats import t as student

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.scaling import with_capacity
from tierplan.planner.lowering.unitwise import lower
from tierplan.planner.plan import Action, Plan, UnitPlan
from tierplan.planner.policies import decide
from tierplan.runtime.data.synthetic import random_batches, seeded_model
from tierplan.runtime.measure.units import profile_workload
from tierplan.runtime.tracing.trace import trace_config
from tierplan.runtime.trainer import RunResult, Trainer
from tierplan.sim.analysis.steady import SteadyState, steady_state
from tierplan.sim.pricing import simulate_on
from tierplan.sim.schedule import Schedule, unroll
from tierplan.sim.workloads.workload import Training, Unit, Workload
from tierplan.validation.calibration.budgets import AMPLE_BYTES, with_room
from tierplan.validation.calibration.fit import (
    HandOver,
    calibrated,
    hand_over,
    pace_of,
    simulate_as_found,
    without_latency,
)
from tierplan.validation.comparison.steps import Steps, cut_steps

__all__ = [
    "Basis",
    "Pieces",
    "Rehearsed",
    "Stage",
    "basis_of",
    "interval_frac",
    "log_interval",
    "rehearsal_plans",
    "usual",
    "with_times_of",
]

KEPT, REPLAYED = "kept", "replayed"
REPLAY = "replay"
"""What a recomputation of some of a unit's saved tensors is called here."""
TURNS = 12
"""Many short ones: where other guests share the cores, their speed changes as much from second to second as from minute
to minute, so turns are what averages it out, and longer turns are not."""
STEPS_PER_TURN = 1
"""Counted; one more comes before them, and three before those of the first turn."""
PROFILE_STEPS = 8
ROOM = 1.3
"""Capacity over predicted peak: no rehearsal waits for memory."""
LEAST_SPREAD = 0.03
"""Of a prediction, relative: a handful of rehearsals does not show that it is better than that."""
MANY = 1 << 30


@dataclass(eq=False)
class Pieces:
    """A schedule that is executed in pieces, with pauses between them."""

    trainer: Trainer
    batches: Iterator[dict[str, Any]]
    left_out: set[int] = field(default_factory=set)
    """Steps that do not count: the first of each piece."""

    def play(self, steps: int, warmup_steps: int = 1) -> tuple[int, ...]:
        """Executes `steps` steps more, of which the first ones do not count; those that count."""
        first = self.trainer.num_steps_done
        self.trainer.run(self.batches, steps)
        self.left_out.update(range(first, first + warmup_steps))
        return tuple(range(first + warmup_steps, first + steps))

    @property
    def result(self) -> RunResult:
        return self.trainer.result()


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """One plan's turns."""

    schedule: Schedule
    turns: tuple[tuple[float, float, float], ...]
    """By turn: seconds per step, and those of the plan that keeps everything, before and after."""
    seconds: Mapping[str, float]
    """By op: how long it took, at the typical pace."""
    hand_over: HandOver

    @property
    def step_s(self) -> float:
        return median(step_s for step_s, _, _ in self.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """What predictions are made from."""

    workload: Workload
    """The shallow model, with the times of its parts."""
    machine: Machine
    """With rates as they are inside a training step. Ops whose time is known cost no latency."""
    hand_over: HandOver
    """Where several streams work."""
    hand_over_alone: HandOver
    """Where nothing but computation goes on: no thread waits for a core."""
    kept_s: float
    """Predicted seconds per step of the shallow model with everything kept, at a pace of 1."""
    checks: Mapping[str, float]
    """By plan: its step as predicted from the other plans' turns, over the one measured."""
    paces: tuple[float, ...]
    """All that were measured while rehearsing."""

    def step_s(self, schedule: Schedule, machine: Machine, pace: float = 1.0) -> float:
        """Seconds per step of a schedule in steady state; `machine` is this one, with other capacities."""
        return self.steady(schedule, machine, pace).period_s

    def steady(self, schedule: Schedule, machine: Machine, pace: float = 1.0) -> SteadyState:
        """As `step_s`, the whole steady state."""
        found = self.hand_over if len(schedule.streams) > 1 else self.hand_over_alone
        return steady_state(schedule, machine, simulate=partial(simulate_as_found, found=found, pace=pace))

    def record(self) -> dict[str, object]:
        """What was found, as JSON values."""
        return {
            "parts": {u.name: {"forward": u.forward, "backward": u.backward, "recompute": u.recompute,
                               "slots": [t.recompute.get("s", 0.0) for t in u.saved]}
                      for u in (self.workload.units[0], self.workload.units[1], self.workload.units[-1])},
            "rates": {f"{s.name} {kind}": list(rate.points) for s in self.machine.streams
                      for kind, rate in s.rates.items()},
            "hand_over_s": {stream: list(pair) for stream, pair in self.hand_over.items()},
            "hand_over_alone_s": {stream: list(pair) for stream, pair in self.hand_over_alone.items()},
            "kept_s": self.kept_s,
            "checks": dict(self.checks),
            "paces": list(self.paces),
        }  # fmt: skip


def interval_frac(checks: Sequence[float]) -> float:
    """Half the width of the 90 % interval, as a logarithm: predictions were off by `checks` in rehearsals."""
    spread = sqrt(fmean(log(x) ** 2 for x in checks)) if checks else LEAST_SPREAD
    return float(student.ppf(0.95, max(2, len(checks)))) * max(spread, LEAST_SPREAD)


@dataclass(eq=False)
class Stage:
    """The shallow model under its plans, ready to be trained piece by piece; a context manager."""

    config: Mapping[str, object]
    training: Training
    machine: Machine
    nvme_dir: str | os.PathLike[str]
    device: str = "cpu"
    _plays: dict[str, Pieces] = field(default_factory=dict)
    _life: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._life.close()

    def rehearse(self) -> Basis:
        """Times the parts, trains under all plans in turns, and draws the conclusions."""
        machine = without_latency(self.machine)
        ample = with_capacity(machine, {t.name: AMPLE_BYTES for t in machine.tiers})
        workload = profile_workload(
            trace_config("shallow", self.config, self.training),
            seeded_model(self.config, self.training),
            random_batches(self.config, self.training, MANY),
            num_steps=PROFILE_STEPS,
            device=self.device,
        )
        schedules = {}
        for name, plan in rehearsal_plans(workload, ample).items():
            schedule = lower(plan, workload, ample)
            peaks = simulate_on(unroll(schedule, 2), ample).peak_bytes
            schedules[name] = with_room(schedule, peaks, ROOM)
            self._plays[name] = self._open(name, schedules[name])
        kept_s = [self.kept_now_s(warmup_steps=3)]
        turns: dict[str, list[tuple[float, float, float]]] = {name: [] for name in schedules}
        steps: dict[str, list[tuple[int, ...]]] = {name: [] for name in schedules}
        for turn in range(TURNS):
            for name in schedules:
                if name == KEPT:
                    continue
                warmup = 1 if turn else 3
                counted = self._plays[name].play(warmup + STEPS_PER_TURN, warmup)
                kept_s.append(self.kept_now_s())
                turns[name].append((_step_s(self._plays[name], counted), kept_s[-2], kept_s[-1]))
                steps[name].append(counted)
        typical_s = median(kept_s)
        turns[KEPT] = [(s, s, s) for s in kept_s]
        kept_steps = sorted(set(range(self._plays[KEPT].trainer.num_steps_done)) - self._plays[KEPT].left_out)
        steps[KEPT] = [tuple(kept_steps[i : i + STEPS_PER_TURN]) for i in range(0, len(kept_steps), STEPS_PER_TURN)]
        rehearsed = {}
        for name, schedule in schedules.items():
            paces = {
                k: (before + after) / 2 / typical_s
                for counted, (_, before, after) in zip(steps[name], turns[name], strict=True)
                for k in counted
            }
            cut = cut_steps(self._plays[name].result.trace, 0, self._plays[name].left_out)
            cut = usual(cut, {} if name == KEPT else paces)  # its paces are its own durations
            rehearsed[name] = Rehearsed(
                schedule=schedule,
                turns=tuple(turns[name]),
                seconds=_mean_seconds(schedule, cut, paces),
                hand_over=hand_over(cut),
            )
        for name in schedules:
            if name != KEPT:
                self._plays.pop(name).trainer.close()
        return basis_of(workload, machine, rehearsed, tuple(s / typical_s for s in kept_s))

    def kept_now_s(self, steps: int = STEPS_PER_TURN, warmup_steps: int = 1) -> float:
        """Seconds per step with everything kept, as it is now: clocks and neighbours change."""
        play = self._plays[KEPT]
        return _step_s(play, play.play(warmup_steps + steps, warmup_steps))

    def _open(self, name: str, schedule: Schedule) -> Pieces:
        model = seeded_model(self.config, self.training)
        trainer = Trainer(schedule, model, nvme_dir=made_folder(Path(self.nvme_dir) / name), device=self.device)
        return Pieces(self._life.enter_context(trainer), random_batches(self.config, self.training, MANY))


def made_folder(folder: Path) -> Path:
    """The folder, which is there then: each trainer needs one of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _step_s(play: Pieces, counted: Sequence[int]) -> float:
    durations = cut_steps(play.result.trace, 0).durations_s
    return median(durations[k] for k in counted)


def usual(steps: Steps, paces: Mapping[int, float]) -> Steps:
    """The half of the steps in the middle, by how long they took at their pace: no step with a hiccup."""
    durations_s = steps.durations_s
    ordered = sorted(steps.steady, key=lambda k: durations_s[k] / paces.get(k, 1.0))
    aside = len(ordered) // 4
    return replace(steps, steady=tuple(sorted(ordered[aside : len(ordered) - aside])))


def _mean_seconds(schedule: Schedule, steps: Steps, paces: Mapping[int, float]) -> dict[str, float]:
    """By op, at the typical pace. Means add up to what a stream took; medians leave the late ones out."""
    return {
        op.key: fmean(steps.spans[k][op.key].duration_ns / pace_of(op.stream, paces[k]) for k in steps.steady) / 1e9
        for op in schedule.ops
    }


def rehearsal_plans(workload: Workload, machine: Machine) -> dict[str, Plan]:
    """Six plans that give every stream work and every kind of op its turn."""
    offloaded = UnitPlan(params="host", grads="host", states="nvme", input="host", acts="host")
    streamed = UnitPlan(params="nvme", grads="host", states="nvme", input="host", acts="recompute")

    def every(policy: str, block: UnitPlan, first: UnitPlan | None = None) -> Plan:
        ends = UnitPlan(params=block.params, grads=block.grads, states=block.states)
        units = [block if u.kind == "block" else ends for u in workload.units]
        units[1] = first or block
        return Plan(policy=policy, units=tuple(units))

    return {
        KEPT: decide("in-memory", workload, machine),
        "recomputed": decide("full-recompute", workload, machine),
        REPLAYED: every(REPLAYED, UnitPlan(acts=_every_other(workload.blocks[0]))),
        "offloaded": every("offloaded", offloaded, replace(offloaded, acts="nvme")),
        "streamed": every("streamed", streamed),
        "swept": decide("zero-infinity", workload, machine, {"pipeline": "on"}),
    }


def _every_other(block: Unit) -> tuple[Action, ...]:
    return tuple("recompute" if k % 2 else "keep" for k in range(len(block.saved)))


def basis_of(
    workload: Workload, machine: Machine, rehearsed: Mapping[str, Rehearsed], paces: tuple[float, ...] = ()
) -> Basis:
    """The conclusions from all turns, and how well they would have predicted each plan without its own turns."""
    basis = _concluded(workload, machine, rehearsed, {}, paces)
    checks = {}
    for name, left_out in rehearsed.items():
        if name == KEPT:
            continue
        others = {n: r for n, r in rehearsed.items() if n != name}
        alone = _concluded(workload, machine, others, {}, paces)
        schedule = _at_times_of(name, left_out.schedule, alone.factors)
        predicted_s = [
            alone.basis.step_s(schedule, _capacities(alone.basis.machine, schedule), before / alone.basis.kept_s)
            for _, before, _ in left_out.turns
        ]
        checks[name] = median(predicted_s) / left_out.step_s
    return replace(basis.basis, checks=checks)


@dataclass(frozen=True, slots=True)
class _Concluded:
    basis: Basis
    factors: Mapping[str, float]
    """By kind of computation: its time inside a step over the one in the profile."""


def _concluded(
    workload: Workload,
    machine: Machine,
    rehearsed: Mapping[str, Rehearsed],
    checks: Mapping[str, float],
    paces: tuple[float, ...],
) -> _Concluded:
    factors = _factors(rehearsed)
    plain = [(_at_times_of(name, r.schedule, factors), r.seconds) for name, r in rehearsed.items()]
    found = calibrated(machine, plain)
    several = [r.hand_over for r in rehearsed.values() if len(r.schedule.streams) > 1]
    basis = Basis(
        workload=_with_factors(workload, factors),
        machine=found,
        hand_over=_mean_hand_over(several),
        hand_over_alone=_mean_hand_over([r.hand_over for r in rehearsed.values() if len(r.schedule.streams) == 1]),
        kept_s=1.0,
        checks=checks,
        paces=paces,
    )
    kept = _at_times_of(KEPT, rehearsed[KEPT].schedule, factors)
    return _Concluded(replace(basis, kept_s=basis.step_s(kept, _capacities(found, kept))), factors)


def _mean_hand_over(found: Sequence[HandOver]) -> HandOver:
    streams = sorted({stream for by_stream in found for stream in by_stream})
    pairs = {stream: [by_stream[stream] for by_stream in found if stream in by_stream] for stream in streams}
    return {stream: (fmean(p[0] for p in of), fmean(p[1] for p in of)) for stream, of in pairs.items()}


def _factors(rehearsed: Mapping[str, Rehearsed]) -> dict[str, float]:
    """By kind of computation, its time in a step over that in the profile.

    Forward and backward come from where nothing runs beside them; a recomputation from the first plan that is there,
    beside its forward, which shares its pace and its contention. A replay (of some of a block's tensors) and the
    recomputation of a whole block are two kinds.
    """

    def slower(name: str, kind: str) -> float:
        timed = [op for op in rehearsed[name].schedule.ops if op.kind == kind]
        profiled_s = sum(op.work.get("s", 0.0) for op in timed)
        measured_s = sum(rehearsed[name].seconds[op.key] for op in timed)
        return measured_s / profiled_s if profiled_s and measured_s else 1.0

    factors = {kind: slower(KEPT, kind) for kind in ("forward", "backward")}
    sources = {"recompute": ("recomputed", "streamed", REPLAYED), REPLAY: (REPLAYED, "recomputed", "streamed")}
    for kind, names in sources.items():
        name = next(name for name in names if name in rehearsed)
        factors[kind] = factors["forward"] * slower(name, "recompute") / slower(name, "forward")
    return factors


def _at_times_of(name: str, schedule: Schedule, factors: Mapping[str, float]) -> Schedule:
    """The rehearsal of that name with the times of its computations as they are inside a step."""
    if name == REPLAYED:
        factors = {**factors, "recompute": factors[REPLAY]}
    ops = [replace(op, work=_scaled(op.work, factors.get(op.kind, 1.0))) for op in schedule.ops]
    return replace(schedule, ops=tuple(ops))


def _scaled(work: Mapping[str, float], factor: float) -> dict[str, float]:
    return {kind: amount * factor if kind == "s" else amount for kind, amount in work.items()}


def _with_factors(workload: Workload, factors: Mapping[str, float]) -> Workload:
    units = tuple(
        replace(
            u,
            forward=_scaled(u.forward, factors["forward"]),
            backward=_scaled(u.backward, factors["backward"]),
            recompute=None if u.recompute is None else _scaled(u.recompute, factors["recompute"]),
            saved=tuple(replace(t, recompute=_scaled(t.recompute, factors[REPLAY])) for t in u.saved),
        )
        for u in workload.units
    )
    return replace(workload, units=units)


def _capacities(machine: Machine, schedule: Schedule) -> Machine:
    return with_capacity(machine, {t.name: t.capacity_bytes for t in schedule.tiers})


def with_times_of(measured: Workload, workload: Workload) -> Workload:
    """The workload with the times of a measured one of other depth: of embedding, first block and head.

    Sizes stay its own; a unit's saved tensors must be those of the measured unit of its kind.
    """
    by_kind = {u.kind: u for u in reversed(measured.units)}
    units = []
    for unit in workload.units:
        like = by_kind[unit.kind]
        if len(like.saved) != len(unit.saved):
            raise ValueError(
                f"unit {unit.name!r} of {workload.name!r} saves {len(unit.saved)} tensors, but {like.name!r} of "
                f"{measured.name!r}, whose times it should take, saves {len(like.saved)}; give the same architecture"
            )
        saved = tuple(replace(t, recompute=k.recompute) for t, k in zip(unit.saved, like.saved, strict=True))
        units.append(
            replace(
                unit,
                forward=like.forward,
                backward=like.backward,
                recompute=like.recompute,
                saved=saved,
                spread=like.spread,
            )
        )
    return replace(workload, units=tuple(units))


def log_interval(predicted_s: float, half_width: float) -> tuple[float, float]:
    """From `exp(-half_width)` to `exp(half_width)` times the prediction."""
    return predicted_s * exp(-half_width), predicted_s * exp(half_width)
