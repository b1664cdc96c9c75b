"""The greedy rule that the planner is compared with does what it says."""

from __future__ import annotations

import pytest

from benchmarks.planner import ablation
from benchmarks.planner.ablation import METHODS
from tests.toys import MIB, toy_machine, toy_workload
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.candidates import PlanSimulator


def test_greedy_moves_nothing_where_all_fits_and_finds_a_plan_where_not() -> None:
    workload = toy_workload(6)
    steps_s = {}
    for device_mib in (2000, 200):
        machine = toy_machine(device_bytes=device_mib * MIB)
        steps_s[device_mib] = {name: method(workload, machine) for name, method in METHODS.items()}
    roomy, tight = steps_s[2000], steps_s[200]
    assert roomy["nothing moved"] == roomy["greedy"]
    assert tight["nothing moved"] is None
    assert all(tight[name] is not None for name in ("greedy", "rounded", "best policy"))


def test_what_is_rounded_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first plan that fits is the answer, by order of micro-batches and parts that they are cut into."""
    workload, machine = toy_workload(6), toy_machine(device_bytes=200 * MIB)
    simulate_plan = PlanSimulator(workload, machine, Budget(1e9))
    monkeypatch.setattr(ablation, "_simulator", lambda *_: simulate_plan)
    step_s = ablation.rounded(workload, machine)
    fitting = [c for c in simulate_plan.seen.values() if c.fits]
    assert step_s == min(c.step_s for c in fitting)
    assert len(fitting) == len({(c.plan.order, c.plan.sub_batches) for c in fitting})
