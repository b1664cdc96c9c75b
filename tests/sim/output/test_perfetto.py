"""The Perfetto file, read back by rules taken from the readers: times are cut to ns, what overlaps is dropped."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.toys import toy_machine, toy_workload, uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.sim.analysis.explain import critical_path
from tierplan.sim.analysis.steady import SteadyState, steady_state
from tierplan.sim.output.perfetto import trace_events, write_perfetto
from tierplan.sim.trace import Span, Trace


def toy_steady() -> SteadyState:
    workload = toy_workload(gradient_accumulation_steps=2)
    machine = toy_machine(shared=True)
    choice = UnitPlan(params="host", grads="host", states="nvme", acts=("nvme", "host", "recompute", "keep"))
    return steady_state(lower(uniform_plan(workload, choice), workload, machine), machine)


STEADY = toy_steady()
PATH = [s.key for s in critical_path(STEADY.schedule, STEADY.trace)]


def read(path: Path) -> list[dict]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[dict] = json.loads(text)["traceEvents"]
    return events


def slices(events: list[dict]) -> dict[tuple[int, int], list[tuple[int, int, str]]]:
    """(begin, end, name) in whole ns by thread, as a reader cuts them."""
    found: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
    for e in events:
        if e["ph"] == "X":
            begin_ns = int(e["ts"] * 1000.0)
            found.setdefault((e["pid"], e["tid"]), []).append((begin_ns, begin_ns + int(e["dur"] * 1000.0), e["name"]))
    return found


def test_one_file_holds_several_traces_as_processes(tmp_path: Path) -> None:
    path = tmp_path / "traces.json"
    write_perfetto({"predicted": STEADY.trace, "measured": STEADY.trace}, path, critical_paths={"predicted": PATH})
    events = read(path)
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "predicted", 2: "measured"}
    threads = {(e["pid"], e["args"]["name"]): e["tid"] for e in events if e["name"] == "thread_name"}
    assert len(threads) == len(set(threads.values())) == 2 * len(STEADY.schedule.streams)
    for name, pid in (("predicted", 1), ("measured", 2)):
        per_thread = slices([e for e in events if e["pid"] == pid])
        keys = {key for found in per_thread.values() for _, _, key in found}
        assert keys == {s.key for s in STEADY.trace.spans}, name
    for span in STEADY.trace.spans:
        e = next(e for e in events if e["ph"] == "X" and e["name"] == span.key)
        assert e["tid"] == threads[1, span.stream]
        assert round(e["ts"] * 1000) == span.start_ns
        assert round(e["dur"] * 1000) == max(0, span.duration_ns - 1)


def test_arrows_join_the_critical_path_and_are_tied_to_its_ops() -> None:
    events = list(trace_events({"predicted": STEADY.trace}, critical_paths={"predicted": PATH}))
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert len(starts) == len(ends) == len(PATH) - 1
    assert starts.keys() == ends.keys()
    spans = STEADY.trace.by_key()
    for number, (before, after) in enumerate(pairwise(PATH)):
        start, end = starts[f"1.{number}"], ends[f"1.{number}"]
        assert (
            spans[before].start_ns <= round(start["ts"] * 1000) <= max(spans[before].start_ns, spans[before].end_ns - 1)
        )
        assert round(end["ts"] * 1000) == spans[after].start_ns
        assert start["ts"] <= end["ts"]
    marked = {e["name"] for e in events if e["ph"] == "X" and "critical path" in e["args"]}
    assert marked == set(PATH)


def test_counters_say_what_each_tier_holds() -> None:
    events = list(trace_events({"predicted": STEADY.trace}))
    for tier, peak in STEADY.trace.peak_bytes.items():
        counts = [e for e in events if e["ph"] == "C" and e["name"] == f"{tier} bytes"]
        assert all(a["ts"] < b["ts"] for a, b in pairwise(counts)), "one event per moment"
        totals = [sum(e["args"].values()) for e in counts]
        assert all(0 <= total <= peak for total in totals)
        last = sum(e.delta_bytes for e in STEADY.trace.memory if e.tier == tier)
        assert (totals[-1] if totals else 0) == last


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**13), st.integers(0, 3000)), min_size=1, max_size=20))
def test_ops_never_overlap_however_a_reader_cuts_times(gaps: list[tuple[int, int]]) -> None:
    spans, now = [], 0
    for i, (gap_ns, duration_ns) in enumerate(gaps):
        begin = now + (gap_ns if gap_ns % 2 else 0)
        spans.append(Span(f"o{i}", "s", now, 0, begin, begin + duration_ns))
        now = begin + duration_ns
    trace = Trace(name="x", spans=tuple(spans), memory=(), capacity_bytes={}, peak_bytes={})
    (found,) = slices(list(trace_events({"x": trace}))).values()
    for (_, end_ns, _), (begin_ns, _, _) in pairwise(found):
        assert end_ns <= begin_ns


def test_written_compressed_it_is_the_same(tmp_path: Path) -> None:
    write_perfetto({"a": STEADY.trace}, tmp_path / "a.json")
    write_perfetto({"a": STEADY.trace}, tmp_path / "sub" / "a.json.gz")
    assert read(tmp_path / "a.json") == read(tmp_path / "sub" / "a.json.gz")


def test_a_critical_path_needs_its_trace(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="critical path for 'mesured', but no such trace; have measured"):
        write_perfetto({"measured": STEADY.trace}, tmp_path / "a.json", critical_paths={"mesured": PATH})


def test_holistic_trace_analysis_loads_it(tmp_path: Path) -> None:
    analysis = pytest.importorskip("hta.trace_analysis", reason="HolisticTraceAnalysis is not installed")
    write_perfetto({"predicted": STEADY.trace}, tmp_path / "rank0.json.gz")
    loaded = analysis.TraceAnalysis(trace_dir=str(tmp_path))
    table = loaded.get_temporal_breakdown(visualize=False)
    assert table["compute_time(us)"][0] > 0
