"""Seconds of a step in forward, in backward and in the update, as logs of training report them.

They are told apart on the device's compute stream: the time from the end of one op to the end of the next belongs to
the next one, since it waited for it; what is left until the next step's first forward is the update's. So the three add
up to the step time, also where micro-batches follow each other and where updates overlap with other work. Where steps
go round the devices, a device is in two steps at once: then it is the mean over all devices and one steady cycle.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from tierplan.hwmodels.names import parse_stream
from tierplan.sim.analysis.steady import SteadyState

PHASE_OF = {
    **dict.fromkeys(("forward", "encode"), "forward_s"),
    **dict.fromkeys(("backward", "recompute", "decode"), "backward_s"),
}
"""By kind of op; everything else that computes is part of the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Of one step in steady state, on the device with the most forward ops, or on all where steps go round them."""

    forward_s: float
    backward_s: float
    update_s: float


def phases(steady: SteadyState) -> Phases:
    """The phases of one steady step. A schedule without forward ops is all update."""
    ops = steady.schedule.ops
    forwards = [op for op in ops if op.kind == "forward" and parse_stream(op.stream).is_compute]
    if not forwards:
        return Phases(forward_s=0.0, backward_s=0.0, update_s=steady.period_s)
    if steady.columns.next_devices:
        return _around(steady, {op.stream for op in forwards})
    [(stream, _)] = Counter(op.stream for op in forwards).most_common(1)
    spans = steady.trace.by_key()
    starts_ns = [spans[op.key].start_ns for op in forwards if op.stream == stream]
    begins_ns = np.reshape(starts_ns, (steady.num_steps, -1)).min(axis=1).tolist()
    cycle = max(steady.cycle_steps, 1)
    first = max(0, min(steady.warmup_steps, steady.num_steps - 1 - cycle))
    last = min(first + cycle, steady.num_steps - 1)
    kinds = {op.key: op.kind for op in ops if op.stream == stream}
    seconds = {"forward_s": 0.0, "backward_s": 0.0, "update_s": 0.0}
    at_ns = begins_ns[first]
    for span in sorted((spans[key] for key in kinds), key=lambda span: span.end_ns):
        if begins_ns[first] < span.end_ns and span.start_ns < begins_ns[last]:
            seconds[PHASE_OF.get(kinds[span.key], "update_s")] += (span.end_ns - at_ns) / 1e9
            at_ns = span.end_ns
    seconds["update_s"] += (begins_ns[last] - at_ns) / 1e9
    num = last - first
    return Phases(**{name: value / num for name, value in seconds.items()})


def _around(steady: SteadyState, streams: set[str]) -> Phases:
    begin_ns, end_ns = (round(moment_s * 1e9) for moment_s in steady.window_s)
    kinds = {op.key: op.kind for op in steady.schedule.ops}
    seconds = {"forward_s": 0.0, "backward_s": 0.0, "update_s": 0.0}
    at_ns = dict.fromkeys(streams, begin_ns)
    for span in sorted(steady.trace.spans, key=lambda span: span.end_ns):
        if span.stream in streams:
            until_ns = min(max(span.end_ns, begin_ns), end_ns)
            seconds[PHASE_OF.get(kinds[span.key], "update_s")] += until_ns - at_ns[span.stream]
            at_ns[span.stream] = until_ns
    seconds["update_s"] += sum(end_ns - at for at in at_ns.values())
    return Phases(**{name: value / sum(seconds.values()) * steady.period_s for name, value in seconds.items()})
