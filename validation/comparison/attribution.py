"""Which ops the difference comes from: simulations with measured durations instead of predicted ones.

Ops are grouped by stream and kind. One group after the other, those that differ most first, gets its measured
durations, and the schedule is simulated again each time. The change of the step time is the group's contribution. An
op that was slower than predicted but is not on the critical path contributes nothing. What remains between the last
simulation and the measured step is named `dispatch latency and variation`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tierplan.hwmodels.machine import Cost
from tierplan.sim.columns import unroll
from tierplan.sim.contents import split_step
from tierplan.sim.engine import simulate
from tierplan.sim.schedule import Schedule
from tierplan.validation.comparison.steps import cut_steps

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
