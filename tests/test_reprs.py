"""What a bare name shows at a prompt is one short line, whatever it holds."""

from __future__ import annotations

import re
from html import escape

import tierplan as tp
from tests.toys import toy_machine, toy_workload
from tierplan.hwmodels.scaling import with_capacity
from tierplan.hwmodels.values.shown import SHOWN_ROWS, Shown
from tierplan.planner.prediction import predict
from tierplan.sim.trace import Trace
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training
from tierplan.validation.comparison.compare import compare


def test_everything_that_people_look_at_fits_two_lines_of_a_terminal() -> None:
    workload, machine = toy_workload(4), toy_machine()
    planned = tp.plan(workload, machine, time_limit_s=1, policies=["in-memory"])
    steady = planned.steady
    shown = [machine, workload, planned, planned.plan, planned.schedule, planned.prediction, steady.trace]
    shown.append(compare(planned.schedule, steady.trace, steady.trace, predicted_step_s=planned.step_s, warmup_steps=1))
    adapters = load_workload("gpt2", Training(lora="r=8"))
    assert "0.126 B parameters in 14 units, 0.00118 B trained;" in repr(adapters)
    shown.append(adapters)
    shown.append(predict("fuyou", workload, toy_machine(device_bytes=2**20)))
    for thing in shown:
        assert len(repr(thing)) <= 200, repr(thing)
        assert "\n" not in repr(thing)
        assert repr(thing).startswith(f"<{type(thing).__name__} ")
        if isinstance(thing, Shown):
            rows = list(thing.rows())
            text = thing._repr_html_()
            assert escape(repr(thing)) in text
            assert text.count("<tr>") == (1 + min(len(rows), SHOWN_ROWS) if rows else 0)
            assert (".table()" in text) == (len(rows) > SHOWN_ROWS)
            assert all(row.keys() == rows[0].keys() for row in rows)
            assert thing.table().shape == (len(rows), len(rows[0]) if rows else 0)
    assert sum(isinstance(thing, Shown) for thing in shown) == len(shown) - 1, "all but the schedule"
    refused = predict("in-memory", workload, toy_machine(device_bytes=3 * 2**20))
    assert re.search(r"holds [\d.]+ MiB in tier 'gpu0'.* \.\.\.>$", repr(refused)), "as commands say it, in whole words"
    small = tp.plan(workload, toy_machine(device_bytes=64 * 2**20), time_limit_s=1, policies=["in-memory"])
    assert "308 MiB of parameters and optimizer states are to be in tier 'gpu0', which has 64 MiB" in str(small.rows())
    assert "limited by" in repr(planned)
    assert f"{len(steady.trace.spans):,} ops" in repr(steady.trace)
    assert isinstance(steady.trace, Trace)


def test_the_table_of_a_result_says_who_trains_other_numbers() -> None:
    """As `tierplan plan` does: a system that is quicker with late updates is not simply quicker."""
    planned = tp.plan(toy_workload(4), toy_machine(), time_limit_s=1, policies=["in-memory", "zenflow", "fuyou"])
    said = {row["system"]: (row["same_numbers"], bool(row["why_not"])) for row in planned.rows()}
    assert said["this plan"] == said["in-memory"] == (True, False)
    assert said["zenflow"] == (False, False)


def test_gpus_that_are_alike_are_named_once() -> None:
    eight = tp.load_machine("desktop-4090", ["gpu.count=8"])
    assert repr(eight).startswith(
        "<Machine desktop-4090: gpu0 to gpu7 23.0 GiB each, host 51.6 GiB, nvme 1,862.6 GiB; "
    )
    assert repr(tp.load_machine("desktop-4090", ["nvme.drives=0"])).endswith("; 4 streams, 1 shared limit>")
    one = tp.load_machine("desktop-4090")
    assert repr(one).startswith("<Machine desktop-4090: gpu0 23.0 GiB, host 51.6 GiB, nvme ")
    unequal = with_capacity(eight, {"gpu1": 2**30})
    assert ": gpu0 23.0 GiB, gpu1 1.0 GiB, gpu2 to gpu7 23.0 GiB each, host " in repr(unequal)
