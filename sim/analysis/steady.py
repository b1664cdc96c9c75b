"""The step time in steady state: several steps in a row, overlapping as the rules allow, until they repeat.

The first steps of a run differ from later ones, since no op of an earlier step is still running. So the schedule is
unrolled and simulated until a step repeats: every op is reached by its stream, starts and ends at the same moments,
relative to the end of the step, as in the step before (or two or three steps before: a delayed update may alternate).
When a stream reaches its first op is when the step before leaves it: two steps of the same starts and ends, beside
others of the steps before them, are followed by other ones. Where steps go round the devices, so do as many in a row as
together use all streams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import starmap
from typing import Any

import numpy as np

from tierplan.hwmodels.machine import Machine
from tierplan.sim.columns import Int64, ScheduleColumns, collector_paused, columns_of
from tierplan.sim.compiled.rules import Prices
from tierplan.sim.compiled.simulation import simulate_columns
from tierplan.sim.pricing import on_machine, simulate_on
from tierplan.sim.schedule import Schedule
from tierplan.sim.trace import Span, Trace

SAME_FRAC = 1e-5
"""Moments count as equal when they differ by less than this part of the step: ends are rounded to nanoseconds."""
MAX_CYCLE, MAX_ROUNDS = 3, 2
"""Longest repetition that is looked for: in steps, or in rounds where the steps go round devices."""
FIRST_STEPS, MAX_STEPS, ROUNDS = 4, 16, 6
"""Steps that are simulated in search of one: at first, and then twice as many, up to the second, until it is found.
Where steps go round devices, up to so many rounds, if that is more."""


@dataclass(frozen=True, kw_only=True)
class SteadyState:
    """Steps that repeat: n of them cost `warmup_s + n * period_s`, for n of at least `warmup_steps`.

    Schedule and trace are made when they are first asked for.
    """

    period_s: float
    """Step time in steady state."""
    warmup_s: float
    """What the first steps add to n periods; below 0 where they were quicker than the later ones."""
    warmup_steps: int
    """Steps before the first one that the later ones repeat."""
    cycle_steps: int
    """Steps after which the timeline repeats: 1, rarely more; 0 when none was found (see `is_periodic`)."""
    mean_steps: int
    """Steps of which the period is the mean: a cycle's; where none was found, about the later half, in whole rounds."""
    num_steps: int
    """Steps that were simulated."""
    step_ends_s: tuple[float, ...]
    """When the last op of each step ended; where steps go round devices, one may end before the step before it."""
    columns: ScheduleColumns = field(repr=False, compare=False)
    """The simulated steps in one; the ops of step k are `sk/...`."""
    peak_bytes: Mapping[str, int]
    """By tier, over all simulated steps."""
    machine: Machine = field(repr=False, compare=False)
    """On which they were simulated."""

    @property
    def is_periodic(self) -> bool:
        """Whether the steps repeat; if not, the period is a mean over about the later half of the steps."""
        return self.cycle_steps > 0

    @property
    def window_s(self) -> tuple[float, float]:
        """Begin and end of one steady cycle (`cycle_steps` steps) in the trace. Where none was found, of a step, or of
        all that the period is the mean of where steps go round devices."""
        first = min(max(self.warmup_steps, 1), self.num_steps - 1)
        num_steps = self.cycle_steps or (self.mean_steps if self.columns.next_devices else 1)
        last = min(first + num_steps - 1, self.num_steps - 1)
        return max(self.step_ends_s[:first], default=0.0), max(self.step_ends_s[: last + 1])

    @property
    def capacity_bytes(self) -> dict[str, int]:
        """By tier."""
        return {tier.name: tier.capacity_bytes for tier in self.columns.tiers}

    @cached_property
    def schedule(self) -> Schedule:
        """What the trace executed: the schedule, unrolled."""
        with collector_paused():
            return self.columns.schedule()

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """Those of the trace in list order, by the compiled engine, without what ops take alone."""
        c, execution = self.columns, simulate_columns(self.columns, self.machine)
        times = (execution.free_ns, execution.ready_ns, execution.start_ns, execution.end_ns)
        streams = [c.works[w].stream for w in c.op_work.tolist()]
        keys = [op.key for op in c.labels().ops]
        return tuple(starmap(Span, zip(keys, streams, *(column.tolist() for column in times), strict=True)))

    @cached_property
    def trace(self) -> Trace:
        """All simulated steps, by SimPy."""
        return simulate_on(self.schedule, self.machine)


def steady_state(
    schedule: Schedule | ScheduleColumns, machine: Machine, *, prices: Prices | None = None
) -> SteadyState:
    """The steady state of `schedule`, repeated step after step on `machine`, with the memory that both have.

    Columns are taken with the memory that they say. `prices` are what their works cost on the machine, if at hand.

    Raises `ScheduleError` when an initial buffer has no successor in the next step (see `columns.unroll`);
    `OutOfMemory` when the steps do not fit; the first may fit alone, where the second needs memory that the first still
    holds.
    """
    columns = columns_of(on_machine(schedule, machine)) if isinstance(schedule, Schedule) else schedule
    if not columns.num_ops:
        raise ValueError(f"schedule {columns.labels().name!r} has no ops; nothing repeats")
    around, in_a_row = columns.steps_around, _steps_of_all_streams(columns)
    num_steps, most = FIRST_STEPS + in_a_row - 1, max(MAX_STEPS, ROUNDS * around)
    while True:
        unrolled = columns.unrolled(num_steps)
        execution = simulate_columns(unrolled, machine, prices if unrolled.works is columns.works else None)
        moments_ns = (execution.free_ns, execution.start_ns, execution.end_ns)
        repetition = _repetition(moments_ns, num_steps, around, in_a_row, machine)
        if repetition["cycle_steps"] or num_steps == most:
            peak_bytes = dict(zip((t.name for t in columns.tiers), execution.peak_bytes.tolist(), strict=True))
            return SteadyState(**repetition, columns=unrolled, peak_bytes=peak_bytes, machine=machine)
        num_steps = 2 * num_steps if 2 * num_steps <= MAX_STEPS else most


def _steps_of_all_streams(columns: ScheduleColumns) -> int:
    """Of steps that go round devices, so many in a row that together they use all streams; else 1."""
    if columns.steps_around == 1:
        return 1
    round_of = columns.once_around
    number = {stream: k for k, stream in enumerate(round_of.streams)}
    stream_of = np.array([number.get(work.stream, 0) for work in round_of.works])
    uses = np.zeros((columns.steps_around, len(number)), np.bool_)
    for step, works in zip(uses, round_of.op_work.reshape(len(uses), -1), strict=True):
        step[stream_of[works]] = True
    return next(n for n in range(1, len(uses) + 1) if uses[-n:].any(axis=0).all())


def _repetition(
    of_ops_ns: Sequence[Int64], num_steps: int, around: int, in_a_row: int, machine: Machine
) -> dict[str, Any]:
    """What a `SteadyState` says of the repetition in `num_steps` steps, whose ops are step after step in these arrays
    of moments; after `around` steps, devices do the same again.

    No op waits for one that is listed later, so the last step is like any other, except under shared limits: the last
    ones have them to themselves while nothing follows. Where steps go round devices, one step says nothing of the
    streams that it leaves out: so many `in_a_row` that leave none out must repeat, and all by the same time.
    """
    moments_ns = np.concatenate([moments.reshape(num_steps, -1) for moments in of_ops_ns], axis=1)
    ends_ns = moments_ns.max(axis=1)
    done_ns = np.maximum.accumulate(ends_ns)
    last = num_steps - 1 - (in_a_row if machine.shared_limits else 0)

    def repeats(k: int, cycle: int) -> bool:
        shift_ns = ends_ns[last] - ends_ns[last - cycle]
        off_ns = np.abs(moments_ns[k] - moments_ns[k - cycle] - shift_ns).max()
        return bool(off_ns <= max(1.0, SAME_FRAC * float(shift_ns) / cycle))

    cycles = range(1, min(MAX_CYCLE if around == 1 else MAX_ROUNDS * around, last + 1 - in_a_row) + 1)
    cycle = next((c for c in cycles if all(repeats(k, c) for k in range(last, last - in_a_row, -1))), 0)
    if cycle:
        first = last - cycle - in_a_row + 1
        while first > 0 and repeats(first + cycle - 1, cycle):
            first -= 1
        mean_steps, period_ns = cycle, float(ends_ns[last] - ends_ns[last - cycle]) / cycle
    else:
        span = last - last // 2
        mean_steps = min(max(span - span % (2 * around), around), last)
        first = last - mean_steps
        period_ns = float(done_ns[last] - done_ns[first]) / mean_steps
    return dict(
        period_s=period_ns / 1e9,
        warmup_s=(float(done_ns[last]) - (last + 1) * period_ns) / 1e9,
        warmup_steps=first,
        cycle_steps=cycle,
        mean_steps=mean_steps,
        num_steps=num_steps,
        step_ends_s=tuple(float(end) / 1e9 for end in ends_ns),
    )
