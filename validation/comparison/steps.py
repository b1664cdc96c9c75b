"""A trace of several steps, cut into steps.

Keys of several steps are `s<step>/<key>`, as `tierplan.sim.columns.unroll` writes them. A trace without the prefix is
one step. A step lasts from the end of the last op of the step before to the end of its own last op. So the durations of
all steps add up to the whole time, even where work of two steps overlaps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from statistics import median

from tierplan.sim.contents import split_step
from tierplan.sim.trace import Span, Trace

WARMUP_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """The steps of one trace, and which of them count as steady."""

    spans: Mapping[int, Mapping[str, Span]]
    """By step, then by the op's own key."""
    windows_ns: Mapping[int, tuple[int, int]]
    """When each step began and ended."""
    steady: tuple[int, ...]
    """The steps after warm-up: all figures are taken from these."""

    @property
    def durations_s(self) -> dict[int, float]:
        return {k: (end_ns - begin_ns) / 1e9 for k, (begin_ns, end_ns) in self.windows_ns.items()}

    @property
    def step_s(self) -> float:
        """Median duration of the steady steps."""
        durations = self.durations_s
        return median(durations[k] for k in self.steady)

    @property
    def typical(self) -> int:
        """The steady step whose duration is nearest to the median: the one to draw."""
        durations, middle = self.durations_s, self.step_s
        return min(self.steady, key=lambda k: abs(durations[k] - middle))

    @property
    def stretch(self) -> dict[str, float]:
        """By stream: seconds of its ops in a step, from when they could begin but for a core, over those in which their
        threads had one; the median of steps."""
        ratios: dict[str, list[float]] = {}
        for k in self.steady:
            times_ns: dict[str, list[int]] = {}
            for span in self.spans[k].values():
                total_ns = times_ns.setdefault(span.stream, [1, 1])
                total_ns[0] += span.duration_ns + span.delayed_ns
                total_ns[1] += span.worked_ns
            for stream, (busy_ns, worked_ns) in times_ns.items():
                ratios.setdefault(stream, []).append(busy_ns / worked_ns)
        return {stream: median(of_steps) for stream, of_steps in ratios.items()}

    @property
    def busy_s(self) -> dict[str, float]:
        """By stream: seconds that its ops ran in a step; the median of steps, as `step_s` is."""
        busy_ns = {stream: dict.fromkeys(self.steady, 0) for stream in self.by_stream()}
        for k in self.steady:
            for span in self.spans[k].values():
                busy_ns[span.stream][k] += span.duration_ns
        return {stream: median(by_step.values()) / 1e9 for stream, by_step in busy_ns.items()}

    def by_stream(self) -> dict[str, list[tuple[int, Span]]]:
        """The ops of each stream in the order in which they began, each with its step."""
        ops: dict[str, list[tuple[int, Span]]] = {}
        for k, spans in self.spans.items():
            for span in spans.values():
                ops.setdefault(span.stream, []).append((k, span))
        return {stream: sorted(own, key=lambda op: op[1].start_ns) for stream, own in ops.items()}

    def ns_by_key(
        self, what: str = "duration_ns", over_steps: Callable[[list[int]], float] = median
    ) -> dict[str, float]:
        """One field of the spans by the op's own key: the median, or the mean, over the steady steps."""
        values: dict[str, list[int]] = {}
        for k in self.steady:
            for key, span in self.spans[k].items():
                values.setdefault(key, []).append(getattr(span, what))
        return {key: float(over_steps(ns)) for key, ns in values.items()}


def cut_steps(trace: Trace, warmup_steps: int | None = None, skipped_steps: Collection[int] = ()) -> Steps:
    """The steps of `trace`.

    The first `warmup_steps` are not steady; if not given, those are two, as long as one step remains. Nor are
    `skipped_steps`, such as the first step after each pause of a run in turns. Raises `ValueError` for a trace without
    spans, or without such a step.
    """
    if warmup_steps is not None and warmup_steps < 0:
        raise ValueError(f"warmup_steps is {warmup_steps}; give 0 or more")
    if not trace.spans:
        raise ValueError(f"trace {trace.name!r} has no spans; there is nothing to compare")
    spans: dict[int, dict[str, Span]] = {}
    for span in trace.spans:
        op = split_step(span.key)
        spans.setdefault(op.step or 0, {})[op.key] = span
    order = sorted(spans)
    if foreign := sorted({*skipped_steps} - {*order}):
        raise ValueError(
            f"skipped_steps has {foreign[0]}, but trace {trace.name!r} has steps {order[0]} to {order[-1]}; give others"
        )
    windows_ns = {}
    # The trace of a resumed run begins at some step; its clock begins with it.
    before = 0
    for step in order:
        end_ns = max(before, *(s.end_ns for s in spans[step].values()), 0)
        windows_ns[step] = before, end_ns
        before = end_ns
    skipped = min(WARMUP_STEPS, len(order) - 1) if warmup_steps is None else warmup_steps
    if skipped >= len(order):
        raise ValueError(
            f"{skipped} steps of warm-up leave nothing to compare: trace {trace.name!r} has {len(order)} steps; give "
            f"{len(order) - 1} or less"
        )
    steady = tuple(k for k in order[skipped:] if k not in skipped_steps)
    if not steady:
        raise ValueError(f"trace {trace.name!r} has {len(order)} steps, which are all skipped; leave one or more")
    return Steps(spans=spans, windows_ns=windows_ns, steady=steady)


def cut_predicted(trace: Trace, warmup_steps: int | None = None) -> Steps:
    """As `cut_steps` for a simulated trace, which is short: at most half of its steps are warm-up."""
    num_steps = len({split_step(span.key).step for span in trace.spans})
    return cut_steps(trace, min(WARMUP_STEPS if warmup_steps is None else warmup_steps, num_steps // 2))
