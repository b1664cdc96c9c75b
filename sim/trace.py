"""What happened: a span per op, and bytes by tier over time. Simulator and runtime make the same record."""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tierplan.hwmodels.names import parse_stream
from tierplan.hwmodels.values.records import Amount, Count, RecordError, decode, load_record
from tierplan.hwmodels.values.shown import Shown
from tierplan.sim.contents import split_step

FORMAT = "tierplan-trace"
VERSION = 1
MOST_NS = 2**62
"""What sums of fit into 64 bits; a century and more."""
SLACK_NS = 1_000_000
"""By so much the clocks of a device and of the host may differ."""
META = {"bytes_per_step": Mapping[str, Amount], "reference_s": Mapping[str, list[Amount]], "num_threads": Count}
"""What is counted in a run, by its name in `meta`."""


class TraceError(ValueError):
    """A trace file that is not one, or of another version."""


class Span(NamedTuple):
    """One op's life on its stream. All times are integer nanoseconds since the trace began.

    A named tuple, as `MemoryEvent`: a trace holds some ten thousand, and a frozen dataclass takes three times as long.
    """

    key: str
    stream: str
    free_ns: int
    """The stream reached this op: its predecessor there had ended."""
    ready_ns: int
    """All that the op waits for was complete: what it reads, what it comes after."""
    start_ns: int
    """Memory was granted and the work began; at or after both of the above."""
    end_ns: int
    alone_ns: int = -1
    """What the op would have taken with nothing beside it; -1 where that is not known (measured traces)."""
    granted_ns: int = -1
    """Memory was granted; in a measured trace the op's thread wakes after that. -1: when the work began."""
    coreless_ns: int = 0
    """Of a measured op: its thread could have run, and no core was free."""
    late_ns: int = 0
    """The same since the op before it on the stream."""

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def worked_ns(self) -> int:
        """Its duration without what its thread waited for a core."""
        return max(0, self.duration_ns - self.coreless_ns)

    @property
    def dispatch_ns(self) -> int:
        """How late it began: its stream was free, inputs were complete and memory was granted."""
        return self.start_ns - max(self.free_ns, self.ready_ns) - self.waited_memory_ns

    @property
    def delayed_ns(self) -> int:
        """Of that, what its thread waited for a core."""
        return max(0, min(self.late_ns, self.dispatch_ns))

    @property
    def waited_input_ns(self) -> int:
        """Time that the stream stood idle because an input was not complete."""
        return max(0, self.ready_ns - self.free_ns)

    @property
    def waited_memory_ns(self) -> int:
        """Time that the stream stood idle because memory was not granted, after inputs were complete."""
        granted_ns = self.start_ns if self.granted_ns < 0 else self.granted_ns
        return max(0, granted_ns - max(self.free_ns, self.ready_ns))


class MemoryEvent(NamedTuple):
    """A tier's holdings of one kind of buffer changed."""

    time_ns: int
    tier: str
    kind: str
    delta_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace(Shown):
    """Spans in order of start, and the memory events, with what the tiers held at the beginning."""

    name: str
    spans: tuple[Span, ...]
    memory: tuple[MemoryEvent, ...]
    """The holdings at time 0 are events at time 0."""
    capacity_bytes: Mapping[str, int]
    peak_bytes: Mapping[str, int]
    """Highest holding per tier. Of ops that end at one moment, each grants what it frees before the next one frees its
    own, so it may hold more for no time at all."""
    meta: Mapping[str, object] = field(default_factory=dict)

    @property
    def duration_ns(self) -> int:
        """From the beginning to the end of the last op; 0 for an empty trace."""
        return max((s.end_ns for s in self.spans), default=0)

    @property
    def duration_s(self) -> float:
        return self.duration_ns / 1e9

    def busy_s(self) -> dict[str, float]:
        """Seconds that each stream worked."""
        busy: dict[str, int] = {}
        for s in self.spans:
            busy[s.stream] = busy.get(s.stream, 0) + s.duration_ns
        return {stream: ns / 1e9 for stream, ns in busy.items()}

    def by_key(self) -> dict[str, Span]:
        return {s.key: s for s in self.spans}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the trace as JSON, replacing the file atomically."""
        record = {"format": FORMAT, "version": VERSION, **{f.name: getattr(self, f.name) for f in fields(self)}}
        write_atomically(path, json.dumps(record, separators=(",", ":"), default=dict))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Reads what `save` wrote. Raises `TraceError` with the path and the reason."""
        made_by = "a trace as Trace.save writes it"
        trace = load_record(cls, path, format=FORMAT, version=VERSION, made_by=made_by, error=TraceError)
        if wrong := trace._contradiction():
            raise TraceError(f"{path} is not {made_by}: {wrong}")
        return trace

    def _contradiction(self) -> str:
        """What no execution gives; empty where there is nothing of the kind."""
        for span in self.spans:
            if wrong := _impossible(span):
                return f"op {span.key!r} {wrong}"
        keys = [span.key for span in self.spans]
        if len({*keys}) < len(keys):
            return f"op {next(key for key, num in Counter(keys).items() if num > 1)!r} is there twice"
        steps = sorted({split_step(key).step or 0 for key in keys})
        for step, following in pairwise(steps):
            if following != step + 1:
                return f"it has ops of steps {step} and {following}, and none between; a run leaves out no step"
        of_devices = [s for s in self.spans if parse_stream(s.stream).device is not None]  # ranks share the others
        for span, following_span in pairwise(sorted(of_devices, key=lambda s: (s.stream, s.start_ns, s.end_ns))):
            if span.stream == following_span.stream and following_span.start_ns + SLACK_NS < span.end_ns:
                return (
                    f"op {following_span.key!r} begins at {following_span.start_ns:,} ns on stream {span.stream!r}, "
                    f"where op {span.key!r} ends at {span.end_ns:,} ns; a stream does one op at a time"
                )
        for tier in (*self.peak_bytes, *(event.tier for event in self.memory)):
            if tier not in self.capacity_bytes:
                return f"it has bytes in tier {tier!r}, which capacity_bytes has not"
        held = peaks(self.memory, {event.tier for event in self.memory})
        for tier, peak_bytes in held.items():  # a run may go on when events are kept no more
            if (told := self.peak_bytes.get(tier, 0)) < peak_bytes:
                return f"peak_bytes of tier {tier!r} is {told:,}, but its rows of memory add up to {peak_bytes:,}"
        try:
            for name, kind in META.items():
                if name in self.meta:
                    decode(kind, self.meta[name], f"meta.{name}")
        except RecordError as wrong_meta:
            return str(wrong_meta)
        return ""

    def rows(self) -> Iterator[dict[str, object]]:
        """The ops, in order of start."""
        return (
            {"op": s.key, "stream": s.stream, "start_s": s.start_ns / 1e9, "end_s": s.end_ns / 1e9} for s in self.spans
        )

    def __repr__(self) -> str:
        streams = len({span.stream for span in self.spans})
        return f"<Trace {self.name}: {len(self.spans):,} ops on {streams} streams, {self.duration_s:.4g} s>"


def _impossible(span: Span) -> str:
    """What is wrong with the times of an op; empty where they are possible."""
    if not 0 <= span.start_ns <= span.end_ns <= MOST_NS:
        return f"begins at {span.start_ns:,} ns and ends at {span.end_ns:,} ns"
    for name, least in {"free_ns": 0, "ready_ns": 0, "granted_ns": -1, "coreless_ns": 0, "late_ns": 0}.items():
        if not least <= getattr(span, name) <= span.end_ns + SLACK_NS:
            told = f"has {name} {getattr(span, name):,} and ends at {span.end_ns:,} ns"
            return f"{told}; it must be {least} or more, and not after the end"
    return "" if -1 <= span.alone_ns <= MOST_NS else f"has alone_ns {span.alone_ns:,}; it must be -1 or a duration"


def peaks(memory: Iterable[MemoryEvent], tiers: Iterable[str]) -> dict[str, int]:
    """Highest holding per tier when the events are added up in their order."""
    held = {name: 0 for name in tiers}
    peak = dict(held)
    for event in memory:
        held[event.tier] += event.delta_bytes
        peak[event.tier] = max(peak[event.tier], held[event.tier])
    return peak


@contextlib.contextmanager
def name_in_errors(file: str | os.PathLike[str]) -> Iterator[None]:
    """What the system says here of a file without its name, as that its disk is full, it says of this one."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(file)) from error


def write_atomically(path: str | os.PathLike[str], *parts: str | bytes | memoryview) -> None:
    """Replaces the file's content in one step: a reader sees the old content or the new, never a part.

    What is no file (a pipe, `/dev/stdout`) is written to as it is. Raises `OSError` with the path.
    """
    target, content = Path(path), (part.encode() if isinstance(part, str) else part for part in parts)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        if target.exists() and not target.is_file():
            with target.open("wb") as file:
                file.writelines(content)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:  # follows no link
            file.writelines(content)
        temporary.replace(target)
    except OSError as error:
        raise OSError(error.errno, f"cannot be written: {error.strerror or error}", str(target)) from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
