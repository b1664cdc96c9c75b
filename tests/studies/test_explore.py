"""The controls of a notebook: what they show is what `predict` says of the machine that they describe."""

from __future__ import annotations

from html import escape
from typing import Any

import pytest

import tierplan as tp
from tests.toys import toy_machine, toy_workload
from tierplan.hwmodels import load_description
from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.scaling import with_capacity, with_faster
from tierplan.planner.planning import plan
from tierplan.planner.prediction import predict
from tierplan.planner.results import PlanResult
from tierplan.sim.digest import digest
from tierplan.sim.workloads.workload import Workload
from tierplan.studies.advise import QUICK_TODAY_S
from tierplan.studies.answer import limited_text, prediction_text
from tierplan.studies.purchases import FORMS


def shown(policy: str, workload: Workload, machine: Machine) -> str:
    """What `tierplan simulate` prints."""
    return f"<pre>{escape(prediction_text(predict(policy, workload, machine)))}</pre>"


def test_every_control_changes_the_machine_that_is_predicted() -> None:
    pytest.importorskip("ipywidgets")
    machine, workload = toy_machine(), toy_workload(4)
    box = tp.explore(workload, machine)
    controls, figures, picture = box.children
    by_name = {control.description: control for control in controls.children}
    assert list(by_name) == ["method", "gpu0", "host", "GPU", "host links", "drives", "host cores"]
    assert figures.value.startswith("<pre>planner: toy on toy\n")
    by_name["method"].value = "fuyou"
    assert figures.value == shown("fuyou", workload, machine)
    assert bytes(picture.value).startswith(b"\x89PNG")
    by_name["host"].value = 4.0
    by_name["host cores"].value = 0.5
    host = {"host": 4 * machine.tier("host").capacity_bytes}
    changed = with_faster(with_capacity(machine, host), ["host.adam"], 0.5)
    assert figures.value == shown("fuyou", workload, changed)
    by_name["drives"].value = 2.0
    faster = [s.name for s in machine.streams if s.name.startswith("nvme")]
    faster += [x.name for x in machine.shared_limits if x.name.startswith("nvme")]
    assert figures.value == shown("fuyou", workload, with_faster(changed, faster, 2.0))
    for name in ("gpu0", "host"):
        by_name[name].value = 0.25
    by_name["method"].value = "in-memory"
    small = with_capacity(machine, {"gpu0": machine.tier("gpu0").capacity_bytes // 4})
    fits = predict("in-memory", workload, small).fits
    assert fits or (not picture.value and "does not fit" in figures.value)


def test_the_planner_answers_by_counted_work_and_says_that_its_search_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is the one for as much work on any computer, in the words of the commands, and is no more than it is
    said to be; the whole search is asked for by name."""
    pytest.importorskip("ipywidgets")
    machine, workload = toy_machine(device_bytes=3 * 2**25), toy_workload(4)
    asked: list[dict[str, Any]] = []

    def recorded(*args: Any, **settings: Any) -> PlanResult:
        asked.append({**settings, "machine": digest(args[1])})
        return plan(*args, **settings)

    monkeypatch.setattr("tierplan.studies.explore.plan", recorded)
    short = tp.explore(workload, machine, time_limit_s=0.02).children[1].value
    found = plan(workload, machine, time_limit_s=0.02, by_clock=False)
    assert found.gap > 0.2, "a search that finds all says nothing of the rest"
    assert f"At least {found.prediction.tokens_per_s:,.0f} tokens/s" in short
    assert "the search was short" in short
    assert "time_limit_s=None" in short
    assert f"no schedule is quicker than {found.lower_bound_s * 1e3:.3g} ms: gap {found.gap * 100:.0f} %" in short
    assert f"decided by   {found.plan.policy}" in short
    assert limited_text(found.prediction.limits) in " ".join(short.split())
    assert "used  twice as good saves" in short
    assert "busy_frac" not in short
    tp.explore(workload, machine)
    whole = tp.explore(workload, machine, time_limit_s=None).children[1].value
    assert "search was short" not in whole
    assert "At least" not in whole
    assert plan(workload, machine).step_s < found.step_s
    assert [one["time_limit_s"] for one in asked] == [0.02, QUICK_TODAY_S, None]
    assert not any(one["by_clock"] for one in asked)
    assert {one["machine"] for one in asked} == {digest(machine)}, "as it is, until a slider is moved"


def test_all_gpus_have_one_slider() -> None:
    pytest.importorskip("ipywidgets")
    machine, workload = tp.load_machine("fsdp-qlora-2x3090"), toy_workload(4)
    controls, figures, _ = tp.explore(workload, machine).children
    by_name = {control.description: control for control in controls.children}
    assert "gpu1" not in by_name
    assert "fewer were not tried" in " ".join(figures.value.split())
    by_name["gpu0"].value = 0.25
    assert "fits" in figures.value or "tokens" in figures.value


@pytest.mark.parametrize("name", ["desktop-4090", "laptop", "docs/campaign/2-cores-no-gpu/llama-384/machine.toml"])
def test_dram_and_drives_are_what_advise_offers_and_plan_is_asked_with(name: str) -> None:
    """Sliders had a quarter of a drive, and 206 GiB of DRAM."""
    pytest.importorskip("ipywidgets")
    machine, workload = tp.load_machine(name), tp.load_workload("gpt2", tp.Training(dtype="fp32"))
    controls, figures, _ = tp.explore(workload, machine, time_limit_s=0.02).children
    by_name = {control.description: control for control in controls.children}
    form = FORMS[load_description(name).quantity("host.form").value]  # type: ignore[union-attr,index]
    by_name["method"].value = "fuyou"
    for number in (text for text, _ in by_name["drives"].options):
        by_name["drives"].label = number
        assert figures.value == shown("fuyou", workload, tp.load_machine(name, [f"nvme.drives={number}"]))
    sizes = [text for text, _ in by_name["host"].options]
    assert {f"{gib} GiB" for gib in form.dram_gib} - {*sizes} <= {"64 GiB", "32 GiB"}, "which are those that it has"
    assert number == f"{form.drives}"
    by_name["host"].label = sizes[-1]
    changes = [f"nvme.drives={number}", f"host.capacity={sizes[-1]}"]
    assert figures.value == shown("fuyou", workload, tp.load_machine(name, changes))
