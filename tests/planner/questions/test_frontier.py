"""The frontier asks `plan` for each point, with the settings that were given."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.toys import MIB, toy_machine, toy_workload
from tierplan.hwmodels.names import DEVICE
from tierplan.hwmodels.scaling import with_capacity
from tierplan.planner.plan_rules import PlanError
from tierplan.planner.planning import plan
from tierplan.planner.questions.frontier import frontier, plot_frontier


def test_its_points_are_plans_and_never_rise(tmp_path: Path) -> None:
    workload, machine = toy_workload(3), with_capacity(toy_machine(), {DEVICE: 80 * MIB})
    points = frontier(workload, machine, fracs=(0.05, 1.0, 2.0), time_limit_s=1)
    assert [p.device_bytes for p in points] == [4 * MIB, 80 * MIB, 160 * MIB]
    nothing_fits, here, roomy = points
    assert nothing_fits.step_s is None
    assert here.step_s == plan(workload, machine, time_limit_s=1).step_s
    assert roomy.step_s is not None
    assert roomy.step_s <= here.step_s
    assert roomy.lower_bound_s is not None
    assert roomy.lower_bound_s <= roomy.step_s
    plot_frontier(points, tmp_path / "frontier.svg", workload, machine)
    assert "does not fit" in (tmp_path / "frontier.svg").read_text()


def test_settings_are_those_of_plan() -> None:
    with pytest.raises(PlanError, match="time_limit_s is 0"):
        frontier(toy_workload(2), toy_machine(), fracs=(1.0,), time_limit_s=0)
