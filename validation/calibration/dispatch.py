"""Dispatch latency: how long after its stream is free, and its inputs are complete, an op begins.

It is the time of Python and of the operating system's scheduler between two ops. A machine's description does not have
it; a calibrated machine's streams do (`beside_s` and `wake_s`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import exp, log, sqrt
from statistics import fmean, pstdev
from typing import NamedTuple, TypeVar

from tierplan.hwmodels.machine import Machine, Stream
from tierplan.hwmodels.names import on_first_device, parse_stream
from tierplan.hwmodels.scaling import rates_of, with_rate_factors
from tierplan.sim.analysis.explain import StreamTime
from tierplan.sim.analysis.steady import SteadyState, steady_state
from tierplan.sim.schedule import Schedule
from tierplan.validation.comparison.steps import Steps

T = TypeVar("T")


class DispatchLatency(NamedTuple):
    """Of one stream, in seconds per op."""

    after_op_s: float = 0.0
    """Where the op only waited for the one before it on its stream."""
    after_input_s: float = 0.0
    """Where it waited for an input: another thread has to wake up."""


def measure_dispatch_latency(steps: Steps) -> dict[str, DispatchLatency]:
    """Dispatch latency by stream: means over all ops of the steady steps. Waits for memory or a core are not in it.

    Means, as for durations: beside busy cores a few ops wake up very late, and these make up the sum.
    """
    latency = {}
    for stream, ops in steps.by_stream().items():
        after_op_ns: list[int] = []
        after_input_ns: list[int] = []
        for (_, before), (k, span) in pairwise(ops):
            if k in steps.steady:
                gap_ns = span.start_ns - max(before.end_ns, span.ready_ns) - span.waited_memory_ns - span.delayed_ns
                (after_input_ns if span.ready_ns > before.end_ns else after_op_ns).append(max(0, gap_ns))
        latency[stream] = DispatchLatency(*(fmean(ns) / 1e9 if ns else 0.0 for ns in (after_op_ns, after_input_ns)))
    return latency


def mean_dispatch_latency(measured: Sequence[Mapping[str, DispatchLatency]]) -> dict[str, DispatchLatency]:
    """The mean of several measurements, by stream, over those that have the stream."""
    streams = sorted({stream for one in measured for stream in one})
    of_stream = {stream: [one[stream] for one in measured if stream in one] for stream in streams}
    return {stream: DispatchLatency(*map(fmean, zip(*all_of, strict=True))) for stream, all_of in of_stream.items()}


TIMES_DIFFER = 0.05
"""Relative: by at least so much the reference work's times differ within a run."""
LEAST_TIMES = 8
"""Fewer say nothing: where other streams hardly ever rest, these are moments close to their work."""
OFTEN_OFF = 0.03
"""Relative: so far the reference work is often off beside the ops of the same run. Chosen on 117 rows."""
COLD = 0.15
"""Work takes longer when it gets its core back, since caches are cold: by this power of how much waits stretch it. Of
0 to 0.25, it made two times 24 rows beside three other jobs agree best."""


def typical_reference_s(times_s: Sequence[float]) -> float:
    """Seconds of the reference work: the mean of the middle half, as for steps (`middle_half`). Where a core has two
    speeds, as it shares its units or not, a quartile says the quicker one, however long the other lasts."""
    return fmean(middle(sorted(times_s)))


def middle(ordered: Sequence[T]) -> Sequence[T]:
    """The middle half of what is in order: without outliers."""
    num_outer = len(ordered) // 4
    return ordered[num_outer : len(ordered) - num_outer]


def core_slowdown(times_s: Sequence[float], known_s: float) -> float:
    """How much longer the reference work takes than `known_s`, as far as its times are sure: 1 where chance explains
    it, and much more or less only as far as all of them show it. A factor that is none makes a prediction worse."""
    if len(times_s) < LEAST_TIMES or not known_s:
        return 1.0
    off = log(typical_reference_s(times_s) / known_s)
    chance = max(TIMES_DIFFER, pstdev(map(log, times_s))) / sqrt(len(times_s) - 1)
    off *= max(0.0, 1.0 - (chance / off) ** 2) if off else 0.0
    most = max(OFTEN_OFF, log(min(times_s) / known_s))
    least = min(-OFTEN_OFF, log(max(times_s) / known_s))
    return exp(min(most, max(least, off)))


Slowdown = float | Mapping[str, float]
"""Of the cores, or by stream."""


def slowdown_of(stream: str, slowdown: Slowdown) -> float:
    """The slowdown of a stream: drives do not slow down with the cores."""
    if isinstance(slowdown, Mapping):
        return slowdown.get(stream, 1.0)
    return 1.0 if parse_stream(stream).is_drive else slowdown


Stretches = tuple[Mapping[str, float], Mapping[str, float]]
"""By stream, how much longer waits for a core make its ops (`Steps.stretch`): alone, and beside other streams."""


def slowdown_between(core: float, before: Mapping[str, float], now: Mapping[str, float]) -> dict[str, float]:
    """By stream, where a core is `core` times as slow as before, and ops are stretched so much by waits for one."""
    waits = {stream: own / before.get(stream, before.get(on_first_device(stream), 1.0)) for stream, own in now.items()}
    return {stream: slowdown_of(stream, core * longer**COLD) * longer for stream, longer in waits.items()}


def slowdown_in(
    core: float, typical: Stretches, now: Mapping[str, float], predicted: Mapping[str, StreamTime]
) -> dict[str, float]:
    """As `slowdown_between`, of a schedule whose streams were `predicted` to spend a step so, with typical waits.

    Computation is predicted from what it takes alone, and by the contention that the schedule has: what other streams
    make it wait is no news as long as it is not more than that.
    """
    alone, beside = typical
    if len(now) < 2:
        return slowdown_between(core, alone, now)
    expected = {
        name: alone.get(on_first_device(name), 1.0) * spent.busy_s / spent.alone_s
        for name, spent in predicted.items()
        if parse_stream(name).is_compute and spent.alone_s
    }
    now = {name: max(own, expected.get(name, own)) for name, own in now.items()}
    return slowdown_between(core, {**beside, **expected}, now)


def slowed(machine: Machine, slowdown: Slowdown) -> Machine:
    """The machine, so much slower than it says; at full speed an op takes as much of shared limits as before."""

    def slower(stream: Stream) -> Stream:
        rates = rates_of(stream)
        factors = dict.fromkeys(rates, 1.0 / slowdown_of(stream.name, slowdown))
        return with_rate_factors(replace(stream, rates=rates), factors)

    return replace(machine, streams=tuple(map(slower, machine.streams)))


def steady_at(schedule: Schedule, machine: Machine, slowdown: Slowdown) -> SteadyState:
    """The steady state where the machine is so much slower than when it was calibrated."""
    return steady_state(schedule, slowed(machine, slowdown))
