"""Which ops the difference comes from, why they took longer (rate, overhead, contention), and how streams spent a step.

Ops are grouped by stream and kind. One group after the other, those that differ most first, gets its measured
durations, and the schedule is simulated again each time. The change of the step time is the group's contribution. An
op that was slower than predicted but is not on the critical path contributes nothing. What remains between the last
simulation and the measured step is named `dispatch latency and variation`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
from scipy.optimize import nnls

from tierplan.hwmodels.machine import Cost
from tierplan.sim.analysis.explain import StreamTime, times_in_windows
from tierplan.sim.columns import unroll
from tierplan.sim.contents import split_step
from tierplan.sim.engine import simulate
from tierplan.sim.schedule import Schedule
from tierplan.validation.comparison.steps import Steps, cut_steps

NUM_STEPS = 4
MAX_GROUPS = 8
MAX_SIMULATED_OPS = 400_000
"""Ops simulated in one call; beyond it, fewer groups are told apart (about 10 s)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """Seconds of the step, measured minus predicted, that a group of ops accounts for."""

    stream: str
    kind: str
    """Kind of op; `other ops` for all groups not told apart; `dispatch latency and variation` for what the length of no
    op explains."""
    seconds: float


def attribute(
    schedule: Schedule,
    predicted_ns: Mapping[str, float],
    measured_ns: Mapping[str, float],
    predicted_step_s: float,
    measured_step_s: float,
) -> tuple[Contribution, ...]:
    """Contributions that add up to `measured_step_s - predicted_step_s`; durations are by key, in nanoseconds."""
    groups: dict[tuple[str, str], list[str]] = {}
    for op in schedule.ops:
        groups.setdefault((op.stream, op.kind), []).append(op.key)
    order = sorted(groups, key=lambda g: -abs(sum(measured_ns[k] - predicted_ns[k] for k in groups[g])))
    num_groups = min(MAX_GROUPS, max(1, MAX_SIMULATED_OPS // (NUM_STEPS * len(schedule.ops)) - 2))
    parts = [(*group, groups[group]) for group in order[:num_groups]]
    if others := order[num_groups:]:
        parts.append(("", "other ops", [key for group in others for key in groups[group]]))

    repeated = unroll(schedule, NUM_STEPS)
    durations = dict(predicted_ns)
    before = first = _step_s(repeated, durations)
    contributions = []
    for stream, kind, keys in parts:
        durations.update({key: measured_ns[key] for key in keys})
        now = _step_s(repeated, durations)
        contributions.append(Contribution(stream=stream, kind=kind, seconds=now - before))
        before = now
    # The prediction itself may differ from what its own median durations give, by what contention varies over steps.
    rest = (measured_step_s - before) - (predicted_step_s - first)
    contributions.append(Contribution(stream="", kind="dispatch latency and variation", seconds=rest))
    return tuple(contributions)


def _step_s(repeated: Schedule, duration_ns: Mapping[str, float]) -> float:
    costs = {op.key: Cost(duration_ns[split_step(op.key).key] / 1e9, 0.0) for op in repeated.ops}
    return cut_steps(simulate(repeated, costs)).step_s


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
    worked = {}
    for stream, ops in steps.by_stream().items():
        edges = np.array([[s.start_ns, s.end_ns] for _, s in ops], dtype=float)
        lengths = edges[:, 1] - edges[:, 0]
        done = np.cumsum(lengths)
        worked[stream] = (edges.ravel(), np.ravel([done - lengths, done], order="F"))
    total: dict[str, dict[str, float]] = {}
    for k in steps.steady:
        for key, span in steps.spans[k].items():
            beside = total.setdefault(key, {})
            for stream, (at, until) in worked.items():
                if stream != span.stream:
                    before_ns, after_ns = np.interp((span.start_ns, span.end_ns), at, until).tolist()
                    beside[stream] = beside.get(stream, 0.0) + (after_ns - before_ns) / len(steps.steady)
    return total


def mean_stream_times(steps: Steps) -> dict[str, StreamTime]:
    """How each stream spent a step: means over the steady steps.

    A stream's step lasts from the end of its last op of the step before to the end of its own last op.
    """
    times: dict[str, list[StreamTime]] = {}
    last_end_ns: dict[str, int] = {}
    for k in sorted(steps.spans):
        spans = steps.spans[k].values()
        begin_ns = dict(last_end_ns)
        for span in spans:
            last_end_ns[span.stream] = max(last_end_ns.get(span.stream, 0), span.end_ns)
        if k in steps.steady:
            windows_ns = {stream: (begin_ns.get(stream, 0), end_ns) for stream, end_ns in last_end_ns.items()}
            for stream, time in times_in_windows(spans, windows_ns).items():
                times.setdefault(stream, []).append(time)
    parts = [part.name for part in fields(StreamTime)]
    return {
        stream: StreamTime(**{part: sum(getattr(t, part) for t in of_steps) / len(steps.steady) for part in parts})
        for stream, of_steps in times.items()
    }
