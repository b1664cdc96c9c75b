"""What pictures of traces share: colours, lanes, what an op does, and what tiers hold.

The colours are those of Okabe and Ito, told apart with any common form of colour blindness.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tierplan.hwmodels.names import display_order
from tierplan.sim.columns import Float64
from tierplan.sim.contents import parse_key, split_step
from tierplan.sim.output.text import format_bytes
from tierplan.sim.trace import Span, Trace

COLOURS = {
    "forward": "#0072b2",
    "recompute": "#56b4e9",
    "backward": "#d55e00",
    "update": "#cc79a7",
    "params": "#009e73",
    "grads": "#e69f00",
    "states": "#cc79a7",
    "acts": "#f0e442",
    "other": "#999999",
}
"""By what an op does on a computing stream, and by what it moves on the others."""
VERBS = {"fwd": "forward", "bwd": "backward", **dict.fromkeys(("accumulate", "cast", "norm", "clip"), "grads")}
VERBS |= {"gather": "params", "reduce": "grads"}
MOVED = {"params": "params", "grads": "grads", "tied": "grads", "states": "states"}
MOVED |= dict.fromkeys(("acts", "x", "dx", "y", "stash"), "acts")
INK = "#1b1f24"
INPUT, MEMORY, SHARING = "waits for input", "waits for memory", "added by sharing (above)"
WAITS = {INPUT: "#c9ced6", MEMORY: INK, SHARING: "#882255"}
TRACE_COLOURS = ("#0072b2", "#d55e00")
"""Of lines: the first trace is dashed, the second one solid."""


class Excerpt(NamedTuple):
    """A stretch of a trace: what is drawn."""

    trace: Trace
    begin_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.begin_s


def streams_of(traces: Sequence[Trace]) -> list[str]:
    """Computing first, then links, drives and the host; by name among equals."""
    for trace in traces:
        if not trace.spans:
            raise ValueError(f"trace {trace.name!r} has no ops; there is nothing to draw")
    return sorted({s.stream for trace in traces for s in trace.spans}, key=display_order)


def what_of(span: Span) -> str:
    """What an op does or moves, as a name in COLOURS, from its key (docs/design.md, Kinds of op)."""
    op = parse_key(span.key)
    if op.verb == "all_reduce":  # of what a block makes, where devices share its products, else of its gradients
        return "acts" if op.where[:1] in (("fwd",), ("recompute",), ("bwd",)) else "grads"
    if not op.moved and (name := VERBS.get(op.verb, op.verb)) in COLOURS:
        return name
    return MOVED.get(op.moved, "other")


def paleness(span: Span) -> float:
    """Alternates from one unit of the model to the next."""
    digits = re.sub(r"\D", "", "".join(parse_key(span.key).where[:1]))
    return 0.62 if digits and int(digits) % 2 else 1.0


def step_ends(trace: Trace) -> Iterable[float]:
    """When each step of a trace of several steps ended, in seconds."""
    ends: dict[int, int] = {}
    for span in trace.spans:
        step = split_step(span.key).step
        if step is not None:
            ends[step] = max(ends.get(step, 0), span.end_ns)
    return [end_ns / 1e9 for end_ns in ends.values()]


def levels_of(trace: Trace, tier: str) -> tuple[Float64, dict[str, Float64]]:
    """Times in seconds, and the bytes held by each kind from then on; the kinds with least change first."""
    events = [e for e in trace.memory if e.tier == tier]
    changes = Counter(e.kind for e in events if e.time_ns > 0)
    kinds = sorted({e.kind for e in events}, key=lambda kind: (changes[kind], kind))
    times_ns = np.array([e.time_ns for e in events], np.int64)
    last = np.flatnonzero(np.diff(times_ns, append=-1))  # of the events of each moment
    held = {kind: np.cumsum([e.delta_bytes if e.kind == kind else 0 for e in events]) for kind in kinds}
    levels = {kind: level[np.append(last, -1)].astype(np.float64) for kind, level in held.items()}
    return np.append(times_ns[last], trace.duration_ns) / 1e9, levels


def capacity_line(capacity_bytes: float, peak_bytes: float) -> tuple[float, str]:
    """Where a line for the capacity is drawn, and what is written at it: so low that the holdings stay readable."""
    text = f"capacity {format_bytes(capacity_bytes)}"
    if capacity_bytes <= 2.5 * peak_bytes:
        return capacity_bytes, text
    return 1.2 * peak_bytes, f"{text}, {capacity_bytes / max(peak_bytes, 1):,.1f} x the peak: far above this line"
