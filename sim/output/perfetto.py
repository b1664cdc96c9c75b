"""Writes traces to one file for Perfetto (ui.perfetto.dev), chrome://tracing, and Holistic Trace Analysis.

The format is Chrome's trace-event JSON, which PyTorch's profiler writes too. Each trace is a process, each stream a
thread of it, each op a complete event, each tier a counter of bytes by kind. Arrows follow the critical path.

Readers of the format take times as floating-point microseconds and truncate them to nanoseconds. So an op that begins
where another ends could seem to begin inside it, and would be dropped. Therefore every op is written 1 ns short.
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from operator import attrgetter
from pathlib import Path

from tierplan.hwmodels.names import display_order, parse_stream
from tierplan.sim.trace import Span, Trace, write_atomically


def write_perfetto(
    traces: Mapping[str, Trace],
    path: str | os.PathLike[str],
    *,
    critical_paths: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Writes the traces, by the name of their process, into one file; compressed if the path ends in `.gz`.

    `critical_paths` gives op keys in order of time, by the name of the trace (`[s.key for s in critical_path(...)]`);
    they are joined by arrows and marked in the arguments of the events.
    """
    events = trace_events(traces, critical_paths=critical_paths)
    lines = ",\n".join(json.dumps(event, separators=(",", ":"), allow_nan=False) for event in events)
    # Holistic Trace Analysis searches the text for `"rank": 0`, with the space.
    text = f'{{"displayTimeUnit": "ms", "distributedInfo": {{"rank": 0}}, "traceEvents": [\n{lines}\n]}}\n'
    is_packed = Path(path).suffix == ".gz"
    write_atomically(path, gzip.compress(text.encode("utf-8"), mtime=0) if is_packed else text)


def trace_events(
    traces: Mapping[str, Trace], *, critical_paths: Mapping[str, Sequence[str]] | None = None
) -> Iterator[dict[str, object]]:
    """The events of the file: names first, then ops in order of time, counters, arrows; process by process."""
    unknown = sorted(set(critical_paths or {}) - set(traces))
    if unknown:
        raise ValueError(f"there is a critical path for {unknown[0]!r}, but no such trace; have {', '.join(traces)}")
    thread = 0  # numbered through the file: Holistic Trace Analysis tells streams by this number alone
    for process, (name, trace) in enumerate(traces.items(), start=1):
        yield _named("process_name", process, 0, name=name)
        yield {**_named("process_sort_index", process, 0), "args": {"sort_index": process}}
        threads: dict[str, int] = {}
        for stream in sorted({s.stream for s in trace.spans}, key=display_order):
            thread += 1
            threads[stream] = thread
            yield _named("thread_name", process, thread, name=stream)
            yield {**_named("thread_sort_index", process, thread), "args": {"sort_index": thread}}
        path = list((critical_paths or {}).get(name, ()))
        on_path = set(path)
        for number, span in enumerate(trace.spans):
            yield _op(span, process, threads[span.stream], number, is_critical=span.key in on_path)
        yield from _counters(trace, process)
        spans = trace.by_key()
        for number, (before, after) in enumerate(pairwise(path)):
            yield from _arrow(spans[before], spans[after], process, threads, f"{process}.{number}")


def _named(what: str, process: int, thread: int, **args: object) -> dict[str, object]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "ts": 0, "args": args}


def _us(time_ns: int) -> float:
    return time_ns / 1000


def _op(span: Span, process: int, thread: int, number: int, *, is_critical: bool) -> dict[str, object]:
    """An event with the category that PyTorch gives: a kernel, a copy over a GPU's link, or anything else."""
    args: dict[str, object] = {
        "waited for input (ms)": span.waited_input_ns / 1e6,
        "waited for memory (ms)": span.waited_memory_ns / 1e6,
    }
    stream = parse_stream(span.stream)
    if stream.device is not None:  # Holistic Trace Analysis takes what has a stream for work of a GPU
        args |= {"stream": thread, "device": stream.device, "correlation": process * 10**7 + number}
    if span.alone_ns >= 0:
        args["slowed by shared limits (ms)"] = max(0, span.duration_ns - span.alone_ns) / 1e6
    if is_critical:
        args["critical path"] = "yes"
    return {
        "ph": "X",
        "name": span.key,
        "cat": "kernel" if stream.is_compute else "gpu_memcpy" if stream.device is not None else "cpu_op",
        "pid": process,
        "tid": thread,
        "ts": _us(span.start_ns),
        "dur": _us(max(0, span.duration_ns - 1)),
        "args": args,
    }


def _counters(trace: Trace, process: int) -> Iterator[dict[str, object]]:
    """One event per tier and moment of change: bytes held by kind, after all changes of that moment."""
    for tier in trace.capacity_bytes:
        held = dict.fromkeys(sorted({e.kind for e in trace.memory if e.tier == tier}), 0)
        for time_ns, events in groupby((e for e in trace.memory if e.tier == tier), attrgetter("time_ns")):
            for event in events:
                held[event.kind] += event.delta_bytes
            at = {"ph": "C", "name": f"{tier} bytes", "pid": process, "tid": 0, "ts": _us(time_ns)}
            yield {**at, "args": dict(held)}


def _arrow(
    before: Span, after: Span, process: int, threads: Mapping[str, int], number: str
) -> Iterable[dict[str, object]]:
    """From inside the end of one op to inside the begin of the next: an arrow is tied to the event that encloses it."""
    common = {"name": "critical path", "cat": "critical_path", "id": number, "pid": process}
    yield {**common, "ph": "s", "tid": threads[before.stream], "ts": _us(max(before.start_ns, before.end_ns - 2))}
    yield {**common, "ph": "f", "bp": "e", "tid": threads[after.stream], "ts": _us(after.start_ns)}
