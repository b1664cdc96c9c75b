"""The benchmark of NVMe-bound plans: its ratios against hand-made traces, its configurations against the simulator."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.models import GIB, gpt2
from benchmarks.records import read
from benchmarks.runtime import nvme_bound
from benchmarks.runtime import page as runtime_page
from benchmarks.runtime.nvme_bound import CONFIGURATIONS, Configuration, Ratios, covered_s, ratios_between
from benchmarks.trainings import machine
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.sim.analysis.explain import stream_times
from tierplan.sim.analysis.steady import steady_state
from tierplan.sim.trace import Span, Trace
from tierplan.validation.comparison.steps import cut_steps

S = 10**9
ROOT = Path(__file__).parents[3]


def span(key: str, stream: str, start_s: float, end_s: float) -> Span:
    start_ns, end_ns = round(start_s * S), round(end_s * S)
    return Span(key, stream, start_ns, start_ns, start_ns, end_ns, end_ns - start_ns)


def test_time_is_counted_once_however_many_spans_cover_it() -> None:
    spans = [span("c", "b", 6, 7), span("a", "a", 0, 3), span("b", "b", 2, 4)]
    assert covered_s(spans) == 5
    assert covered_s(spans, 1 * S, 6.5 * S) == 3.5
    assert covered_s([]) == 0


def test_a_span_across_a_steps_end_counts_in_both_steps() -> None:
    spans = [
        span("s0/read", "nvme.read", 0, 6),
        span("s1/write", "nvme.write", 5, 9),
        span("s1/fwd", "gpu0.compute", 12, 13),
    ]
    ratios = ratios_between(spans, [0, 8 * S, 16 * S])
    assert ratios.busy_s == {"gpu0.compute": [0, 1], "nvme.read": [6, 0], "nvme.write": [3, 1]}
    assert ratios.drive_s == [8, 1]
    assert ratios.busiest == "nvme.read"
    assert ratios.over_drive == [1, 8]
    assert ratios_between(spans[:2], [0, 8 * S]).over_busiest == [8 / 6]


def test_a_record_has_the_median_of_steps_and_the_whole() -> None:
    ratios = Ratios(step_s=[2, 2, 8, 1], busy_s={"nvme.read": [2, 1, 2, 0]}, drive_s=[2, 2, 2, 0])
    record = ratios.record()
    assert record["over_busiest"] == 2
    assert record["over_busiest_whole"] == 13 / 5
    assert record["over_drive"] == 1
    assert record["over_drive_whole"] == 13 / 6


def test_a_step_ends_with_its_last_op_and_not_before_earlier_steps() -> None:
    spans = (span("s0/a", "a", 0, 5), span("s1/a", "a", 1, 2), span("s1/b", "a", 2, 3), span("s10/a", "a", 8, 9))
    trace = Trace(name="t", spans=spans, memory=(), capacity_bytes={}, peak_bytes={})
    assert [end_ns for _, end_ns in cut_steps(trace).windows_ns.values()] == [5 * S, 5 * S, 9 * S]


def test_a_configuration_is_planned_predicted_trained_and_told(tmp_path: Path) -> None:
    tiny = Configuration(
        name="tiny", config=gpt2(64, 1), places=UnitPlan(grads="host", states="nvme"), device_bytes=GIB, host_bytes=GIB
    )
    record = nvme_bound.run(tiny, machine(GIB, GIB), tmp_path, predict_only=False)
    assert len(record["measured"]["over_busiest_by_step"]) == nvme_bound.STEPS
    assert record["measured"]["step_s"] > 0


def test_the_page_shows_what_is_in_the_files_that_it_names() -> None:
    page = (ROOT / "docs" / "runtime.md").read_text(encoding="utf-8")
    part = page.partition(f"<!-- {runtime_page.PART}")[2].partition(f"<!-- end of {runtime_page.PART}")[0]
    names = re.findall(r"`(benchmarks/results/[\w.-]+\.jsonl?)`", part)
    assert len(names) == 2
    runtime, rows = json.loads((ROOT / names[0]).read_text(encoding="utf-8")), read(ROOT / names[1])
    assert part.partition("\n")[2].rstrip() == "\n".join(runtime_page.lines(runtime, rows, names=names))


@pytest.mark.parametrize(
    "configuration",
    [pytest.param(c, marks=() if c.places else pytest.mark.nightly, id=c.name) for c in CONFIGURATIONS],
)
def test_the_drive_limits_each_configuration_by_a_margin(configuration: Configuration) -> None:
    """On the described machine of two cores; kinds of data on the drive are those that the name says."""
    place = configuration.on(machine(1, 1))
    workload = configuration.workload()
    schedule = lower(nvme_bound.quickest(configuration, workload, place), workload, place)
    steady = steady_state(schedule, place)
    begin_s, end_s = steady.window_s
    predicted = ratios_between(steady.trace.spans, [begin_s * S, end_s * S])
    assert nvme_bound.drive_margin(stream_times(steady.trace, steady.window_s)) >= nvme_bound.MARGIN
    assert predicted.busiest in nvme_bound.DRIVE
    assert predicted.over_busiest[0] <= 1.10
    if configuration.places is None:
        return
    writes = [op.key for op in schedule.ops if op.stream == "nvme.write"]
    written = {key.removeprefix("write_").partition("/")[0] for key in writes}
    short = {
        "params": "parameters",
        "grads": "gradients",
        "states": "states",
        "acts": "activations",
        "x": "activations",
    }
    assert {short[kind] for kind in written} == set(configuration.name.replace(" and ", ", ").split(", "))
