"""Traces are files too: what is written is read back, other files are refused, a reader never sees half of one."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.sim.random_schedules import costs, durations, schedules
from tests.sim.test_rules import trace_or_none
from tierplan.sim.schedule import Schedule
from tierplan.sim.trace import MemoryEvent, Span, Trace, TraceError, peaks, write_atomically

TRACE = Trace(
    name="one",
    spans=(Span("o", "s", 0, 5, 7, 10, 2),),
    memory=(MemoryEvent(0, "m", "params", 3), MemoryEvent(7, "m", "acts", 4), MemoryEvent(10, "m", "acts", -4)),
    capacity_bytes={"m": 9},
    peak_bytes={"m": 7},
    meta={"model": "x"},
)

ONE = TRACE.spans[0]


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(schedules(), st.lists(durations, min_size=14, max_size=14))
def test_round_trip(tmp_path: Path, schedule: Schedule, seconds: list[float]) -> None:
    trace = trace_or_none(schedule, costs(schedule, seconds))
    assume(trace is not None)
    assert trace is not None
    trace.save(tmp_path / "t.json")
    assert Trace.load(tmp_path / "t.json") == trace


def test_a_span_says_what_it_waited_for() -> None:
    (span,) = TRACE.spans
    assert (span.duration_ns, span.waited_input_ns, span.waited_memory_ns) == (3, 5, 2)
    late = Span("o", "s", 5, 0, 7, 10)
    assert (late.waited_input_ns, late.waited_memory_ns) == (0, 2)
    assert late._replace(granted_ns=6).waited_memory_ns == 1, "the rest is the op's thread waking up"
    assert late._replace(granted_ns=4).waited_memory_ns == 0
    assert (TRACE.duration_ns, TRACE.duration_s, TRACE.busy_s()) == (10, 1e-8, {"s": 3e-9})


def test_peaks_add_up_events_in_their_order() -> None:
    assert peaks(TRACE.memory, ["m", "n"]) == {"m": 7, "n": 0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a trace"),
        ("[]", "is not a trace"),
        ('{"format": "tierplan-trace"}', "is not a trace"),
        ('{"format": "other", "version": 1}', "has format 'other' version 1; this reader takes 'tierplan-trace'"),
        ('{"format": "tierplan-trace", "version": 9}', "version 9; this reader takes"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(TraceError, match=message):
        Trace.load(tmp_path / "t.json")


@pytest.mark.parametrize("num", [9, 11])
def test_a_span_of_the_wrong_length_is_refused(tmp_path: Path, num: int) -> None:
    TRACE.save(tmp_path / "t.json")
    record = json.loads((tmp_path / "t.json").read_text())
    record["spans"][0] = [*record["spans"][0], 1][:num]
    (tmp_path / "t.json").write_text(json.dumps(record))
    with pytest.raises(TraceError, match=r"is not a trace .*it must be a list of length 10"):
        Trace.load(tmp_path / "t.json")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"spans": (TRACE.spans[0]._replace(end_ns=-7),)}, "op 'o' begins at 7 ns and ends at -7 ns"),
        ({"spans": (TRACE.spans[0]._replace(start_ns=-7),)}, "op 'o' begins at -7 ns and ends at 10 ns"),
        ({"spans": TRACE.spans * 2}, "op 'o' is there twice"),
        ({"peak_bytes": {"m": 6}}, "peak_bytes of tier 'm' is 6, but its rows of memory add up to 7"),
        ({"peak_bytes": {}}, "peak_bytes of tier 'm' is 0, but its rows of memory add up to 7"),
        ({"spans": (ONE._replace(end_ns=10**30),)}, "op 'o' begins at 7 ns and ends at 1,000,000,000,"),
        ({"spans": (ONE._replace(ready_ns=10**9),)}, "op 'o' has ready_ns 1,000,000,000 and ends at 10 ns; it must be"),
        ({"spans": (ONE._replace(free_ns=-1),)}, "op 'o' has free_ns -1 and ends at 10 ns; it must be 0 or more"),
        ({"spans": (ONE._replace(granted_ns=10**9),)}, "op 'o' has granted_ns 1,000,000,000 and ends at 10 ns"),
        ({"spans": (ONE._replace(alone_ns=-2),)}, "op 'o' has alone_ns -2; it must be -1 or a duration"),
        ({"spans": (ONE._replace(coreless_ns=-1),)}, "op 'o' has coreless_ns -1 and ends at 10 ns"),
        ({"spans": (ONE._replace(late_ns=10**9),)}, "op 'o' has late_ns 1,000,000,000 and ends at 10 ns"),
        (
            {"spans": tuple(ONE._replace(key=f"{key}/o") for key in ("s3", "s4", "s6"))},
            "it has ops of steps 4 and 6, and none between; a run leaves out no step",
        ),
        (
            {"spans": (ONE._replace(stream="gpu0.h2d", end_ns=10**9), Span("p", "gpu0.h2d", 0, 0, 9, 11))},
            "op 'p' begins at 9 ns on stream 'gpu0.h2d', where op 'o' ends at 1,000,000,000 ns; a stream does one op",
        ),
        ({"peak_bytes": {"m": 7, "n": 0}}, "it has bytes in tier 'n', which capacity_bytes has not"),
        ({"capacity_bytes": {"n": 9}}, "it has bytes in tier 'm', which capacity_bytes has not"),
        (
            {"meta": {"bytes_per_step": {"s": "x"}}},
            "meta.bytes_per_step.'s'. is 'x'; it must be a whole num",
        ),
        ({"meta": {"bytes_per_step": None}}, "meta.bytes_per_step is None; it must be an object"),
        ({"meta": {"reference_s": {"0": 1.0}}}, "meta.reference_s.'0'. is 1.0; it must be a list"),
    ],
)
def test_what_no_execution_gives_is_refused(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    replace(TRACE, **changed).save(tmp_path / "t.json")
    with pytest.raises(TraceError, match=f"is not a trace as Trace.save writes it: {message}"):
        Trace.load(tmp_path / "t.json")
    replace(TRACE, peak_bytes={"m": 8}).save(tmp_path / "t.json")
    Trace.load(tmp_path / "t.json")  # a run whose last steps were not traced
    other = Span("p/gpu1", "host.adam", 0, 0, 9, 11)
    replace(TRACE, spans=(ONE._replace(stream="host.adam"), other)).save(tmp_path / "t.json")
    Trace.load(tmp_path / "t.json")  # two ranks, whose updates the host makes at once


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_atomically(tmp_path / "pipe", "one ", b"two")
    assert os.read(reader, 100) == b"one two"
    assert (tmp_path / "pipe").is_fifo()


def test_a_full_disk_is_said_with_the_files_name() -> None:
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'"):
        write_atomically("/dev/full", "x" * 100)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "sub" / "t.json"
    TRACE.save(path)
    before = path.read_bytes()

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match=r"t\.json") as caught:
        write_atomically(path, "other")
    assert caught.value.strerror == "cannot be written: No space left on device"
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["t.json"]
