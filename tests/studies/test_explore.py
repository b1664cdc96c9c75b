"""The controls of a notebook: what they show is what `predict` says of the machine that they describe."""

from __future__ import annotations

import pytest

import tierplan as tp
from tests.toys import toy_machine, toy_workload
from tierplan.hwmodels.scaling import with_capacity, with_faster
from tierplan.planner.prediction import predict


def test_every_control_changes_the_machine_that_is_predicted() -> None:
    pytest.importorskip("ipywidgets")
    machine, workload = toy_machine(), toy_workload(4)
    box = tp.explore(workload, machine)
    controls, figures, picture = box.children
    by_name = {control.description: control for control in controls.children}
    assert list(by_name) == ["method", "gpu0", "host", "GPU", "host links", "drives", "host cores"]
    assert "Prediction planner" in figures.value or "&lt;Prediction" in figures.value
    by_name["method"].value = "fuyou"
    assert figures.value == predict("fuyou", workload, machine)._repr_html_()
    assert bytes(picture.value).startswith(b"\x89PNG")
    by_name["host"].value = 4.0
    by_name["host cores"].value = 0.5
    host = {"host": 4 * machine.tier("host").capacity_bytes}
    changed = with_faster(with_capacity(machine, host), ["host.adam"], 0.5)
    assert figures.value == predict("fuyou", workload, changed)._repr_html_()
    by_name["drives"].value = 2.0
    faster = [s.name for s in machine.streams if s.name.startswith("nvme")]
    faster += [x.name for x in machine.shared_limits if x.name.startswith("nvme")]
    assert figures.value == predict("fuyou", workload, with_faster(changed, faster, 2.0))._repr_html_()
    for name in ("gpu0", "host"):
        by_name[name].value = 0.25
    by_name["method"].value = "in-memory"
    shown = predict("in-memory", workload, with_capacity(machine, {"gpu0": machine.tier("gpu0").capacity_bytes // 4}))
    assert shown.fits or (not picture.value and "does not run" in figures.value)


def test_all_gpus_have_one_slider() -> None:
    pytest.importorskip("ipywidgets")
    machine, workload = tp.load_machine("fsdp-qlora-2x3090"), toy_workload(4)
    controls, figures, _ = tp.explore(workload, machine).children
    by_name = {control.description: control for control in controls.children}
    assert "gpu1" not in by_name
    by_name["gpu0"].value = 0.25
    assert "fits" in figures.value or "tokens" in figures.value
