"""Why the ops of one kind took longer than predicted: rate, overhead, contention; and how streams spent a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from tierplan.sim.trace import Span
from tierplan.validation.comparison.steps import Steps

__all__ = ["StreamTime", "mean_ns", "overlap_ns", "split_difference", "stream_times"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamTime:
    """How one stream spent a step, in seconds; means over the steady steps."""

    busy_s: float
    waiting_input_s: float
    waiting_memory_s: float
    overhead_s: float

    @property
    def step_s(self) -> float:
        """The sum of all parts."""
        return self.busy_s + self.waiting_input_s + self.waiting_memory_s + self.overhead_s


def split_difference(
    predicted: np.ndarray,
    alone: np.ndarray,
    measured: np.ndarray,
    overlap_p: np.ndarray,
    overlap_m: np.ndarray,
) -> tuple[float, float, float]:
    """Nanoseconds of `measured - predicted` due to rate, overhead per op, and contention; all summed over the ops.

    Arrays are by op; the overlaps have a column per stream. What the prediction lost to contention gives the loss per
    second beside each stream, which is applied to what the measured overlaps have more. Then the fit is
    measured = rate * alone + overhead + contention, with factors of at least 0. Overhead is fitted only where ops
    differ in size, and contention anew only where none was predicted and ops differ in overlap; what the ops do not
    determine counts as rate.
    """
    lost = predicted - alone
    if alone.sum() <= 0:
        return 0.0, float((measured - predicted).sum()), 0.0
    loss_per_ns, _ = nnls(overlap_p, lost) if overlap_p.shape[1] and lost.sum() > 1e-3 * alone.sum() else (None, None)
    met = lost if loss_per_ns is None else np.maximum(lost + (overlap_m - overlap_p) @ loss_per_ns, 0.0)
    beside = overlap_m.sum(axis=1)
    columns = [alone]
    enough = len(alone) >= 6
    if has_overhead := enough and bool(np.std(alone) > 0.2 * np.mean(alone)):
        columns.append(np.ones_like(alone))
    if has_slowdown := enough and loss_per_ns is None and bool(np.std(beside / np.maximum(measured, 1.0)) > 0.15):
        columns.append(beside)
    contention = float((met - lost).sum())
    if len(columns) == 1:
        return float((measured - predicted).sum()) - contention, 0.0, contention
    factors, _ = nnls(np.column_stack(columns), np.maximum(measured - met, 0.0))
    rate = float((factors[0] - 1.0) * alone.sum())
    overhead = float(factors[1] * len(alone)) if has_overhead else 0.0
    if has_slowdown:
        contention += float(factors[-1] * beside.sum())
    return rate, overhead, contention


def overlap_ns(steps: Steps) -> dict[str, dict[str, float]]:
    """Mean nanoseconds that each other stream worked while the op ran, by key and stream."""
    by_stream: dict[str, list[Span]] = {}
    for spans in steps.spans.values():
        for span in spans.values():
            by_stream.setdefault(span.stream, []).append(span)
    worked = {}
    for stream, spans_of in by_stream.items():
        spans_of.sort(key=lambda s: s.start_ns)
        edges = np.array([[s.start_ns, s.end_ns] for s in spans_of], dtype=float)
        worked[stream] = (edges.ravel(), np.cumsum(edges[:, 1] - edges[:, 0]))
    total: dict[str, dict[str, float]] = {}
    for k in steps.steady:
        for key, span in steps.spans[k].items():
            beside = total.setdefault(key, {})
            for stream, done in worked.items():
                if stream != span.stream:
                    ns = _worked_until(*done, span.end_ns) - _worked_until(*done, span.start_ns)
                    beside[stream] = beside.get(stream, 0.0) + ns / len(steps.steady)
    return total


def _worked_until(edges: np.ndarray, done: np.ndarray, at_ns: float) -> float:
    """Nanoseconds of work before `at_ns`, of a stream whose ops begin and end at `edges` in turn."""
    k = int(np.searchsorted(edges, at_ns, side="right"))
    before = float(done[k // 2 - 1]) if k >= 2 else 0.0
    return before + (at_ns - float(edges[k - 1]) if k % 2 else 0.0)


def mean_ns(steps: Steps) -> dict[str, float]:
    """Mean duration over the steady steps, by key."""
    total: dict[str, float] = {}
    for k in steps.steady:
        for key, span in steps.spans[k].items():
            total[key] = total.get(key, 0.0) + span.duration_ns
    return {key: ns / len(steps.steady) for key, ns in total.items()}


def stream_times(steps: Steps) -> dict[str, StreamTime]:
    """How each stream spent a steady step.

    A stream's step lasts from the end of its last op of the step before to the end of its own last op. What it was
    idle without waiting for an input or for memory is overhead.
    """
    parts: dict[str, list[int]] = {}
    last_end: dict[str, int] = {}
    steady = set(steps.steady)
    ordered = sorted(
        ((span.start_ns, k, span) for k, spans in steps.spans.items() for span in spans.values()),
        key=lambda entry: entry[:2],
    )
    for start, k, span in ordered:
        before = last_end.get(span.stream, 0)
        last_end[span.stream] = span.end_ns
        if k not in steady:
            continue
        gap = max(0, start - before)
        on_input = min(max(0, span.ready_ns - before), gap)
        rest = gap - on_input
        on_memory = min(span.waited_memory_ns, rest)
        busy, waited_input, waited_memory, overhead = parts.get(span.stream, (0, 0, 0, 0))
        parts[span.stream] = [
            busy + span.duration_ns,
            waited_input + on_input,
            waited_memory + on_memory,
            overhead + rest - on_memory,
        ]
    scale = 1e9 * len(steps.steady)
    return {
        stream: StreamTime(
            busy_s=p[0] / scale, waiting_input_s=p[1] / scale, waiting_memory_s=p[2] / scale, overhead_s=p[3] / scale
        )
        for stream, p in parts.items()
    }
