"""Why a step takes as long as it does: what each stream waited for, the critical path, and what limits it.

All figures come from a trace and the schedule that it executed. The critical path of a simulated trace is exact, since
its times are whole nanoseconds. In a measured trace, an op's cause is the op whose end is nearest to its start: a good
guess.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Literal, TypeVar

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import alike_name, parse_stream
from tierplan.hwmodels.scaling import with_faster
from tierplan.sim.analysis.completion import OutOfMemory
from tierplan.sim.analysis.steady import steady_state
from tierplan.sim.columns import Lists, ScheduleColumns, columns_of, rows_of
from tierplan.sim.compiled.graph_columns import graph_columns
from tierplan.sim.pricing import on_machine
from tierplan.sim.schedule import Schedule
from tierplan.sim.trace import Span, Trace

if TYPE_CHECKING:
    import networkx as nx

Item = TypeVar("Item")
Reason = Literal["begin", "stream", "input", "memory"]
Kind = Literal["stream", "limit", "part", "memory"]
"""What may be better."""


# ---- what each stream did all the time ----


@dataclass(frozen=True, slots=True)
class StreamTime:
    """How a stream spent a stretch of time. The five parts add up to `total_s`."""

    alone_s: float
    """At work, as long as the work takes with nothing beside it."""
    slowed_s: float
    """At work, what shared limits added."""
    input_s: float
    """Idle until what the next op reads or comes after was complete."""
    memory_s: float
    """Idle until the next op was granted memory; its inputs were complete."""
    idle_s: float
    """Idle for no such reason: after the last op, or (in a measured trace) until the op's thread began it."""

    @property
    def busy_s(self) -> float:
        return self.alone_s + self.slowed_s

    @property
    def total_s(self) -> float:
        return self.busy_s + self.input_s + self.memory_s + self.idle_s


def window_in(trace: Trace, window_s: tuple[float, float] | None) -> tuple[float, float]:
    """Begin and end of a window of the trace; the whole trace, unless given. Raises `ValueError`."""
    begin_s, end_s = window_s or (0.0, trace.duration_s)
    if not (0 <= end_s >= begin_s <= trace.duration_s):
        raise ValueError(
            f"the window is from {begin_s:g} to {end_s:g} s; trace {trace.name!r} is from 0 to {trace.duration_s:g} s"
        )
    return begin_s, end_s


def stream_times(trace: Trace, window_s: tuple[float, float] | None = None) -> dict[str, StreamTime]:
    """How each stream spent the trace, or a window of it (one steady cycle: `SteadyState.window_s`).

    Traces that do not know what ops take alone (measured ones) show all work as `alone_s`. Raises `ValueError` for a
    window outside of the trace.
    """
    begin_s, end_s = window_in(trace, window_s)
    window_ns = begin_s * 1e9, end_s * 1e9
    return times_in_windows(trace.spans, {s.stream: window_ns for s in trace.spans})


def times_in_windows(spans: Iterable[Span], windows_ns: Mapping[str, tuple[float, float]]) -> dict[str, StreamTime]:
    """How each stream spent its window (begin and end in nanoseconds, by stream), according to these spans."""
    parts_ns: dict[str, tuple[float, float, float, float]] = {}
    for s in spans:
        begin_ns, end_ns = windows_ns[s.stream]

        def inside_ns(first: float, last: float, begin_ns: float = begin_ns, end_ns: float = end_ns) -> float:
            return max(0.0, min(last, end_ns) - max(first, begin_ns))

        ready_ns = max(s.free_ns, s.ready_ns)
        busy_ns = inside_ns(s.start_ns, s.end_ns)
        alone_frac = min(1.0, s.alone_ns / s.duration_ns) if s.alone_ns >= 0 and s.duration_ns > 0 else 1.0
        alone_ns, slowed_ns, input_ns, memory_ns = parts_ns.get(s.stream, (0.0, 0.0, 0.0, 0.0))
        parts_ns[s.stream] = (
            alone_ns + alone_frac * busy_ns,
            slowed_ns + (1.0 - alone_frac) * busy_ns,
            input_ns + inside_ns(s.free_ns, ready_ns),
            memory_ns + inside_ns(ready_ns, ready_ns + s.waited_memory_ns),
        )
    times = {}
    for stream, parts in parts_ns.items():
        begin_ns, end_ns = windows_ns[stream]
        times[stream] = StreamTime(*(ns / 1e9 for ns in (*parts, max(0.0, end_ns - begin_ns - sum(parts)))))
    return times


# ---- the critical path ----


@dataclass(frozen=True, slots=True)
class Stretch:
    """One op of the critical path: it ran from the end of the one before it to the start of the next."""

    key: str
    stream: str
    start_ns: int
    end_ns: int
    alone_ns: int
    reason: Reason
    """What it waited for last: nothing (`begin`), its turn on the `stream`, an `input`, or `memory`."""

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True, slots=True)
class _Cause:
    """What an op waited for."""

    op: int
    """Position in the schedule's list."""
    reason: Reason
    slack_ns: int
    """From its end to the op's start. That of slack 0 is what the start waited for."""


class _Causes:
    """What the ops of a trace waited for, op by op."""

    def __init__(self, columns: ScheduleColumns, spans: Sequence[Span]) -> None:
        self.graph, self.spans = graph_columns(columns), spans
        self.before = {i: j for j, i in enumerate(self.graph.next_on_stream.tolist()) if i >= 0}
        """On the op's stream."""
        self.inputs: list[list[int]] = [[] for _ in self.spans]
        for j, followers in enumerate(rows_of(self.graph.followers)):
            for i in followers:
                self.inputs[i].append(j)
        self.needs = rows_of(Lists(self.graph.requests, self.graph.request_tier))
        """Tiers in which the op has a request."""

    def of(self, i: int) -> list[_Cause]:
        """Of one op, each that it waited for once."""
        others: dict[int, Reason] = dict.fromkeys(self.inputs[i], "input")
        if i in self.before:
            others.setdefault(self.before[i], "stream")
        start_ns = self.spans[i].start_ns
        causes = {j: _Cause(j, reason, start_ns - self.spans[j].end_ns) for j, reason in others.items()}
        if self.spans[i].waited_memory_ns > 0:
            # the ends at that moment that gave bytes back in a tier where it has a request. Where none did, it stood
            # behind another one in the order of grants (rule 3), which had waited for some end at that moment
            ended = [j for j in self._ending.get(start_ns, ()) if j != i]
            freed = [j for j in ended if not self._given_back[j].isdisjoint(self.needs[i])]
            for j in freed or ended:
                if j not in causes or causes[j].slack_ns > 0:
                    causes[j] = _Cause(j, "memory", 0)
        return list(causes.values())

    @cached_property
    def _ending(self) -> Mapping[int, Sequence[int]]:
        """Ops by their ends."""
        ending: dict[int, list[int]] = {}
        for i, span in enumerate(self.spans):
            ending.setdefault(span.end_ns, []).append(i)
        return ending

    @cached_property
    def _given_back(self) -> list[set[int]]:
        """Per op: the tiers in which its end freed bytes."""
        tier_of, frees = self.graph.buffer_tier.tolist(), rows_of(self.graph.frees)
        last_user: dict[int, int] = {}
        for i in sorted(range(len(self.spans)), key=lambda i: -self.spans[i].end_ns):
            for b in frees[i]:
                last_user.setdefault(b, i)
        given: list[set[int]] = [set() for _ in self.spans]
        for b, i in last_user.items():
            given[i].add(tier_of[b])
        return given


def cause_graph(schedule: Schedule, trace: Trace) -> nx.DiGraph:
    """What every op waited for, as a graph for networkx.

    Ops are nodes with their `span`. An edge leads from what was waited for, with the `reason` and `slack_ns`; an edge
    of slack 0 is what the op's start waited for. Edges of reason `memory` are there only where an op did wait for
    memory: from the ops whose end freed that memory.
    """
    import networkx as nx

    causes, graph = _Causes(columns_of(schedule), _listed(schedule, trace)), nx.DiGraph()
    keys = [op.key for op in schedule.ops]
    for key, span in zip(keys, causes.spans, strict=True):
        graph.add_node(key, span=span)
    for i, key in enumerate(keys):
        for cause in causes.of(i):
            graph.add_edge(keys[cause.op], key, reason=cause.reason, slack_ns=cause.slack_ns)
    return graph


def critical_path(schedule: Schedule, trace: Trace) -> tuple[Stretch, ...]:
    """The chain of ops that determined the end of the trace, from the first to the last.

    In a simulated trace each op of it starts when the one before it ends, so their durations add up to the whole.
    """
    return path_of(columns_of(schedule), _listed(schedule, trace)) if trace.spans else ()


def _listed(schedule: Schedule, trace: Trace) -> list[Span]:
    by_key = trace.by_key()
    if missing := next((op.key for op in schedule.ops if op.key not in by_key), None):
        raise ValueError(
            f"trace {trace.name!r} has no op {missing!r}, which schedule {schedule.name!r} has; give the trace of this "
            "schedule"
        )
    return [by_key[op.key] for op in schedule.ops]


def path_of(columns: ScheduleColumns, spans: Sequence[Span]) -> tuple[Stretch, ...]:
    """The critical path of ops in list order."""
    causes = _Causes(columns, spans)
    i = max(range(len(spans)), key=lambda i: (spans[i].end_ns, spans[i].duration_ns))
    path: list[Stretch] = []
    seen: set[int] = set()

    def rank(cause: _Cause) -> tuple[int, bool, int]:
        """Of several that ended at the same moment: the one that took time, and rather the own stream's."""
        is_momentary, reasons = spans[cause.op].duration_ns == 0, ("stream", "input", "memory")
        return abs(cause.slack_ns), is_momentary, reasons.index(cause.reason)

    while True:
        seen.add(i)
        span = spans[i]
        cause = min((c for c in causes.of(i) if c.op not in seen), key=rank, default=None)
        reason: Reason = cause.reason if cause is not None and span.start_ns > 0 else "begin"
        path.append(Stretch(span.key, span.stream, span.start_ns, span.end_ns, span.alone_ns, reason))
        if cause is None or reason == "begin":
            return tuple(reversed(path))
        i = cause.op


def time_on_path(path: tuple[Stretch, ...], window_s: tuple[float, float] = (0.0, inf)) -> dict[str, float]:
    """Seconds of the critical path by stream, within a window, the longest first: what the step time is made of."""
    begin_ns, end_ns = (1e9 * moment_s for moment_s in window_s)
    found_ns: dict[str, float] = {}
    for stretch in path:
        if (part_ns := min(stretch.end_ns, end_ns) - max(stretch.start_ns, begin_ns)) > 0:
            found_ns[stretch.stream] = found_ns.get(stretch.stream, 0) + part_ns
    return {stream: ns / 1e9 for stream, ns in sorted(found_ns.items(), key=lambda item: -item[1])}


# ---- what limits ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """One stream, shared limit, part or memory: how much of it is used, and the step time when it is better."""

    name: str
    kind: Kind
    busy_frac: float
    """Of a step: what its ops take alone, of a limit what they take of it; of a memory, how full it is at most."""
    step_s: float
    """Never longer for being better: the plan can run it as slow, or fill it as far, as before. Infinite where less
    memory does not hold the step."""
    gain_frac: float
    """Part of the step time that is saved; below 0 for factors below 1 alone."""

    @property
    def shown_name(self) -> str:
        """A limit may be called as the part that has it."""
        return f"{self.name} (shared limit)" if self.kind == "limit" else self.name


NOTHING = "nothing alone"
"""What limits a step that nothing makes shorter by itself."""
LEAST_GAIN_FRAC = 0.01


def limited_by(tried: Sequence[Sensitivity]) -> str:
    """The name of what saves most of the step when it is twice as good; `nothing alone` where that is below 1 %."""
    return tried[0].name if tried and tried[0].gain_frac >= LEAST_GAIN_FRAC else NOTHING


def sensitivities(
    schedule: Schedule | ScheduleColumns,
    machine: Machine,
    *,
    factor: float = 2.0,
    order: Callable[[ScheduleColumns, Machine], ScheduleColumns] = lambda columns, machine: columns,
) -> tuple[Sensitivity, ...]:
    """What limits this schedule: each stream, shared limit, part and memory, the largest gain first.

    Quicker work may come in the way of other work, and make the step longer. Then the plan runs it as slow as before,
    as it would on a better machine (`UnitwisePlan.parts`), and nothing is gained. A factor below 1 says what a worse
    machine takes, and nothing is left out.

    Latencies and the plan stay as they are. What all devices have is better on all of them. A stream alone cannot
    exceed the limits that it shares (but for cores and kernels, of which a faster one takes no more), nor a limit alone
    the streams. So where all takers of a limit belong to one part (`nvme.read` and `nvme.write` share what the drives
    do), that part is there as a whole too.

    Parameters
    ----------
    schedule, machine
        What is executed, and where.
    factor
        Streams, limits and parts are so many times as fast, memories so many times as large; the rest is as it is.
    order
        Lists the ops for the machine, and for each better one, from the same list. Without it they keep that, in which
        quick ones may stand behind slow ones (rule 3).
    """
    if not factor > 0:
        raise ValueError(f"factor is {factor}; it must be above 0, and 2 means twice as fast")
    columns = columns_of(on_machine(schedule, machine)) if isinstance(schedule, Schedule) else schedule
    now = steady_state(order(columns, machine), machine)
    busy = busy_fracs(columns, machine, now.period_s)

    def one_name(name: str) -> str:
        return alike_name(name, machine.num_devices)

    inside: dict[str, set[str]] = {}
    for limit in machine.shared_limits:
        parts = {one_name(parse_stream(s.name).tier) for s in machine.streams if limit.name in s.takes}
        if len(parts) == 1:
            inside.setdefault(parts.pop(), set()).add(limit.name)
    for part, names in inside.items():
        names |= {s.name for s in machine.streams if one_name(parse_stream(s.name).tier) == part}
    streams, limits = columns.once_around.streams, [limit.name for limit in machine.shared_limits]
    cases: list[tuple[Kind, str, Collection[str]]] = [
        *(("stream", name, alike) for name, alike in grouped(streams, one_name).items()),
        *(("limit", name, alike) for name, alike in grouped(limits, one_name).items()),
        *(("part", name, names) for name, names in inside.items()),
    ]
    tried = []

    def add(name: str, kind: Kind, busy_frac: float, step_s: float) -> None:
        if factor > 1:
            step_s = min(step_s, now.period_s)
        gain_frac = 1.0 - step_s / now.period_s if now.period_s else 0.0
        tried.append(Sensitivity(name=name, kind=kind, busy_frac=busy_frac, step_s=step_s, gain_frac=gain_frac))

    def period_s(columns: ScheduleColumns, machine: Machine) -> float:
        return steady_state(order(columns, machine), machine).period_s

    for kind, name, changed in cases:
        step_s = period_s(columns, with_faster(machine, changed, factor))
        add(name, kind, max((busy.get(n, 0.0) for n in changed), default=0.0), step_s)
    for name, alike in grouped(columns.tiers, lambda tier: one_name(tier.name)).items():
        others = (replace(t, capacity_bytes=int(t.capacity_bytes * factor)) if t in alike else t for t in columns.tiers)
        full = max(now.peak_bytes.get(t.name, 0) / max(t.capacity_bytes, 1) for t in alike)
        try:
            step_s = period_s(replace(columns, tiers=tuple(others)), machine)
        except OutOfMemory:
            step_s = inf
        add(f"{name} memory", "memory", full, step_s)
    return tuple(sorted(tried, key=lambda s: -s.gain_frac))


def grouped(items: Iterable[Item], key: Callable[[Item], str]) -> dict[str, list[Item]]:
    """The items by their keys, in order."""
    groups: dict[str, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def busy_fracs(columns: ScheduleColumns, machine: Machine, step_s: float) -> dict[str, float]:
    """Seconds of work over the step time: per stream what its ops take alone, per limit what they take of it.

    The mean over the steps in which work goes once around, where it goes round devices.
    """
    seconds: dict[str, float] = {}
    limits, around = machine.limits, columns.once_around
    is_alone = len(around.streams) == 1
    for work, num in around.counted_works():
        cost = machine.cost(work.stream, work.amounts, is_alone=is_alone)
        seconds[work.stream] = seconds.get(work.stream, 0.0) + num * cost.alone_s
        for limit, per_s in cost.demand.items():
            seconds[limit] = seconds.get(limit, 0.0) + num * per_s * cost.work_s / limits[limit]
    return {name: busy / (columns.steps_around * step_s) for name, busy in seconds.items() if busy > 0}
