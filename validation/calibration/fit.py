"""The machine as it is inside a training step: rates, contention, hand-over, from measured steps of known schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from tierplan.hwmodels.costs import Cost
from tierplan.hwmodels.machine import Machine, Stream
from tierplan.hwmodels.names import COMPUTE, parse_stream
from tierplan.hwmodels.scaling import with_demand, with_rate_factors
from tierplan.sim.engine import simulate
from tierplan.sim.pricing import price, simulate_on
from tierplan.sim.schedule import Schedule, unroll
from tierplan.sim.trace import Span, Trace
from tierplan.validation.comparison.steps import Steps, cut_predicted

__all__ = ["COMPUTE", "TIMED", "HandOver", "calibrated", "hand_over", "pace_of", "simulate_as_found", "without_latency"]

TIMED = ("forward", "backward", "recompute")
ROUNDS = 6
"""Of calibration: contention changes when rates do."""
FACTOR_LIMIT = 10.0
LEAST_WORK = 0.05
"""Of a stream's mean op: shorter ones weigh no more than that."""
MOST_PRESSURE = 3.0
LEAST_LOSS = 0.002
"""Of computation, for its loss to say something about contention."""

HandOver = Mapping[str, tuple[float, float]]
"""By stream, seconds before an op begins: after the op before it, and after the last of its inputs, if it waited for
that."""


def hand_over(steps: Steps) -> dict[str, tuple[float, float]]:
    """Means over all ops of the steady steps; waits for memory are not in them.

    Means, as for durations (`mean_ns`): beside busy cores a few ops wake up very late, and these make up the sum.
    """
    by_stream: dict[str, list[tuple[int, Span]]] = {}
    for k, spans in steps.spans.items():
        for span in spans.values():
            by_stream.setdefault(span.stream, []).append((k, span))
    found = {}
    for stream, spans_of in by_stream.items():
        spans_of.sort(key=lambda entry: entry[1].start_ns)
        gaps_ns: dict[bool, list[int]] = {False: [], True: []}
        for (_, before), (k, span) in pairwise(spans_of):
            if k in steps.steady:
                waited = span.ready_ns > before.end_ns
                gap_ns = span.start_ns - max(before.end_ns, span.ready_ns) - span.waited_memory_ns
                gaps_ns[waited].append(max(0, gap_ns))
        after_op, after_input = (fmean(gaps) / 1e9 if gaps else 0.0 for gaps in gaps_ns.values())
        found[stream] = (after_op, after_input)
    return found


def pace_of(stream: str, pace: float) -> float:
    """The pace of the cores is that of all streams but drives."""
    return 1.0 if parse_stream(stream).is_drive else pace


def simulate_as_found(schedule: Schedule, machine: Machine, *, found: HandOver, pace: float = 1.0) -> Trace:
    """The trace with hand-over before each op, and all streams but drives `pace` times as slow.

    Simulated twice: the first time says which ops wait for an input.
    """
    costs = price(schedule, machine)
    known: dict[tuple[int, str, bool], Cost] = {}

    def dear(waiting: set[str]) -> dict[str, Cost]:
        priced = {}
        for op in schedule.ops:
            cost, waits = costs[op.key], op.key in waiting
            if (id(cost), op.stream, waits) not in known:
                extra_s = found.get(op.stream, (0.0, 0.0))[waits]
                work_s = cost.work_s * pace_of(op.stream, pace)
                known[id(cost), op.stream, waits] = Cost(cost.latency_s + extra_s, work_s, cost.demand, cost.share)
            priced[op.key] = known[id(cost), op.stream, waits]
        return priced

    first = simulate(schedule, dear(set()), limits=machine.limits)
    waiting = {span.key for span in first.spans if span.ready_ns > span.free_ns}
    return simulate(schedule, dear(waiting), limits=machine.limits)


def without_latency(machine: Machine) -> Machine:
    """The machine whose computations cost no latency: where times are measured, it is in them."""
    streams = tuple(replace(s, latency_s=0.0) if s.name == COMPUTE else s for s in machine.streams)
    return replace(machine, streams=streams)


def calibrated(machine: Machine, rehearsed: Sequence[tuple[Schedule, Mapping[str, float]]]) -> Machine:
    """The machine on which the simulated ops take as long as the measured ones did, in sum over all schedules.

    `rehearsed`: schedules, whose forward, backward and recompute ops have the seconds that they take with nothing
    beside them (work `s`), each with the measured seconds by key. Each stream gets a latency, each of its kinds of work
    a factor on its rate; computation has its latency in its times. What a stream takes of a shared limit stays the same
    fraction of it, but for one factor on what all other streams take of the limits of computation: it makes the time
    that computation loses to them what was measured.
    """
    steps = [(schedule, unroll(schedule, 3), measured) for schedule, measured in rehearsed]
    latency_s = machine.stream(COMPUTE).latency_s
    timed = [
        (s, op)
        for s, (schedule, _, _) in enumerate(steps)
        for op in schedule.ops
        if op.kind in TIMED and len(schedule.streams) > 1
    ]
    alone_s = sum(op.work.get("s", 0.0) + latency_s for _, op in timed)
    lost_m = sum(steps[s][2][op.key] for s, op in timed) - alone_s
    pressure = 1.0
    for _ in range(ROUNDS):
        seen: dict[str, list[_Seen]] = {}
        lost_p = -alone_s
        for schedule, unrolled, measured in steps:
            predicted = cut_predicted(simulate_on(unrolled, machine)).median_ns()
            for op in schedule.ops:
                if op.kind in TIMED and len(schedule.streams) > 1:
                    lost_p += predicted[op.key] / 1e9
                kinds = [kind for kind, amount in op.work.items() if amount and kind != "s"]
                if len(kinds) == 1:
                    work_s = predicted[op.key] / 1e9 - machine.stream(op.stream).latency_s
                    seen.setdefault(op.stream, []).append(_Seen(kinds[0], max(0.0, work_s), measured[op.key]))
        machine = replace(machine, streams=tuple(_fitted(s, seen.get(s.name, ())) for s in machine.streams))
        if lost_p > LEAST_LOSS * alone_s:
            wanted = pressure * (max(lost_m, 0.0) / lost_p) ** 0.5
            wanted = min(MOST_PRESSURE, max(1 / MOST_PRESSURE, wanted))
            shared = machine.stream(COMPUTE).takes
            machine = replace(
                machine,
                streams=tuple(
                    s if s.name == COMPUTE else with_demand(s, shared, wanted / pressure) for s in machine.streams
                ),
            )
            pressure = wanted
    return machine


class _Seen(NamedTuple):
    """One op: its predicted seconds without latency, and its measured ones."""

    kind: str
    work_s: float
    measured_s: float


def _fitted(stream: Stream, seen: Sequence[_Seen]) -> Stream:
    """The stream with the latency, and the factors on its rates, under which its ops take as long as measured.

    Least squares of `latency + slower[kind] * work`, none negative. An op weighs as the inverse of its work, as if
    errors grew with its root: then sums over a stream come out, and short ops say what the latency is.
    """
    kinds = sorted({op.kind for op in seen if op.work_s > 0})
    if not kinds:
        return stream
    mean_s = fmean(op.work_s for op in seen)
    weights = np.array([(op.work_s + LEAST_WORK * mean_s) ** -0.5 for op in seen])
    by_kind = np.array([[op.work_s if op.kind == kind else 0.0 for kind in kinds] for op in seen])
    latency = np.full((len(seen), 1), 0.0 if stream.name == COMPUTE else 1.0)
    wanted = np.array([op.measured_s for op in seen])
    (latency_s, *slower), _ = nnls(np.hstack([latency, by_kind]) * weights[:, None], wanted * weights)
    factors = {
        kind: min(FACTOR_LIMIT, max(1 / FACTOR_LIMIT, 1 / f)) for kind, f in zip(kinds, slower, strict=True) if f > 0
    }
    return replace(
        with_rate_factors(stream, factors),
        latency_s=stream.latency_s if stream.name == COMPUTE else float(latency_s),
    )
