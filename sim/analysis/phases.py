"""Seconds of a step in forward, in backward and in the update, as logs of training report them.

They are told apart on the device's compute stream: the time from the end of one op to the end of the next belongs to
the next one, since it waited for it; what is left until the next step's first forward is the update's. So the three add
up to the step time, also where micro-batches follow each other and where updates overlap with other work. They are the
mean over the steps that the step time is the mean of. Where steps go round the devices, a device is in two steps at
once: then it is the mean over all devices too, as it is where the device with the most forward ops has no backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tierplan.hwmodels.names import parse_stream
from tierplan.sim.analysis.steady import SteadyState
from tierplan.sim.trace import Span

PHASE_OF = {
    **dict.fromkeys(("forward", "encode"), "forward_s"),
    **dict.fromkeys(("backward", "recompute", "decode"), "backward_s"),
}
"""By kind of op; everything else that computes is part of the update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phases:
    """Of one step in steady state, on the device with the most forward ops, or on all where steps go round them or it
    only goes forward.
    """

    forward_s: float
    backward_s: float
    update_s: float


def phases(steady: SteadyState) -> Phases:
    """The phases of one steady step. A schedule without forward ops is all update."""
    kinds = [op.kind for op in steady.columns.labels().ops]
    does = list(zip(steady.spans, kinds, strict=True))
    forwards = [span for span, kind in does if kind == "forward" and parse_stream(span.stream).is_compute]
    if not forwards:
        return Phases(forward_s=0.0, backward_s=0.0, update_s=steady.period_s)
    if steady.columns.next_devices:
        streams = {span.stream for span in forwards}
        begin_ns, end_ns = (round(moment_s * 1e9) for moment_s in steady.window_s)
    else:
        [(stream, _)] = Counter(span.stream for span in forwards).most_common(1)
        backward = {span.stream for span, kind in does if PHASE_OF.get(kind) == "backward_s"}
        streams = {stream} if stream in backward else {span.stream for span in forwards} | backward
        starts_ns = [span.start_ns for span in forwards if span.stream == stream]
        begins_ns = np.reshape(starts_ns, (steady.num_steps, -1)).min(axis=1).tolist()
        first = max(0, min(steady.warmup_steps, steady.num_steps - 1 - steady.mean_steps))
        begin_ns, end_ns = begins_ns[first], begins_ns[min(first + steady.mean_steps, steady.num_steps - 1)]
        does = [(span, kind) for span, kind in does if span.start_ns < end_ns]
    spent_ns = _spent(does, streams, begin_ns, end_ns)
    return Phases(**{name: ns / sum(spent_ns.values()) * steady.period_s for name, ns in spent_ns.items()})


def _spent(does: Iterable[tuple[Span, str]], streams: set[str], begin_ns: int, end_ns: int) -> dict[str, int]:
    """Nanoseconds that these streams spent in each phase between two moments."""
    spent = {"forward_s": 0, "backward_s": 0, "update_s": 0}
    at_ns = dict.fromkeys(streams, begin_ns)
    for span, kind in sorted(does, key=lambda d: (d[0].end_ns, d[0].start_ns)):
        if span.stream in streams:
            until_ns = min(max(span.end_ns, begin_ns), end_ns)
            spent[PHASE_OF.get(kind, "update_s")] += until_ns - at_ns[span.stream]
            at_ns[span.stream] = until_ns
    spent["update_s"] += sum(end_ns - at for at in at_ns.values())
    return spent
