"""The plan file: what is written comes back, and what does not match is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.toys import MIB, toy_machine, toy_workload
from tierplan.planner.plan import PackPlan, Packs, PagedPlan
from tierplan.planner.plan_file import PlanFileError, load_plan, machine_of_plan, save_plan
from tierplan.planner.planning import plan
from tierplan.sim.digest import PLAN_KEY
from tierplan.sim.schedule_file import load_schedule, save_schedule


@pytest.fixture(scope="module")
def planned():
    workload, machine = toy_workload(3), toy_machine(device_bytes=100 * MIB)
    return workload, machine, plan(workload, machine, time_limit_s=2)


@pytest.fixture
def path(tmp_path, planned):
    workload, machine, result = planned
    save_plan(result, workload, machine, tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_a_plan_comes_back(path, planned):
    workload, machine, result = planned
    found = load_plan(path, workload=workload, machine=machine)
    assert replace(found.plan, options={}) == replace(result.plan, options={})
    low_s, high_s = found.prediction["interval_s"]
    assert low_s < found.prediction["step_s"] == result.step_s < high_s
    assert machine_of_plan(found.schedule) == replace(machine, description={}), "whoever compares needs no other"
    assert found.solver["gap"] == result.gap
    assert [op.key for op in found.schedule.ops] == [op.key for op in result.schedule.ops]


@pytest.mark.parametrize(
    "other",
    [
        PackPlan(policy="test", packs=Packs(form="pipeline", devices=2, forward=((0, 2),), backward=((0, 2), (2, 5)))),
        PagedPlan(policy="test", devices=3),
    ],
    ids=lambda other: other.kind,
)
def test_every_kind_of_plan_comes_back(tmp_path, planned, other):
    workload, machine, result = planned
    save_plan(
        replace(result, prediction=replace(result.prediction, plan=other)), workload, machine, tmp_path / "plan.json"
    )
    assert json.loads((tmp_path / "plan.json").read_text())["meta"][PLAN_KEY]["plan"]["kind"] == other.kind
    assert load_plan(tmp_path / "plan.json").plan == other


def test_a_plan_is_a_schedule_file(path, planned):
    assert [op.key for op in load_schedule(path).ops] == [op.key for op in planned[2].schedule.ops]


def test_another_machine_or_model_is_refused(path, planned):
    _, machine, _ = planned
    with pytest.raises(PlanFileError, match="another machine"):
        load_plan(path, machine=toy_machine(device_bytes=101 * MIB))
    with pytest.raises(PlanFileError, match="another model"):
        load_plan(path, workload=toy_workload(3, per_device_train_batch_size=2), machine=machine)


def test_a_file_whose_plan_says_less_than_plans_do_now_is_to_be_planned_again(path):
    """As one written before tied gradients could wait elsewhere."""
    edited(path, lambda r: [unit.pop("tied_grads") for unit in r["meta"][PLAN_KEY]["plan"]["units"]])
    with pytest.raises(PlanFileError, match="lacks the field 'tied_grads', which must be there; plan again"):
        load_plan(path)


def edited(path, change):
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r["meta"].pop(PLAN_KEY), "without a plan"),
        (lambda r: r["meta"][PLAN_KEY].pop("solver"), "lacks the field 'solver'"),
        (lambda r: r["meta"][PLAN_KEY].update(extra=1), "unknown field 'extra'"),
        (lambda r: r["meta"][PLAN_KEY].update(version=99), "version 99"),
        (lambda r: r["meta"][PLAN_KEY]["plan"].pop("order"), "lacks the field 'order'"),
        (lambda r: r["meta"][PLAN_KEY]["plan"].update(packs=None), "unknown field 'packs'"),
        (lambda r: r["meta"][PLAN_KEY]["plan"].update(kind="packs"), "unknown field"),
        (lambda r: r["meta"][PLAN_KEY]["plan"].pop("kind"), "kind is None; it must be unitwise or packs or paged"),
        (lambda r: r["meta"][PLAN_KEY]["plan"]["units"][0].update(colour="red"), "unknown field 'colour'"),
        (lambda r: r["meta"][PLAN_KEY]["plan"].update(units=3), "must be a list"),
        (lambda r: r["ops"][0]["work"].update(bytes=1.0), "not as it was written"),
        (lambda r: r["tiers"][0].update(capacity_bytes=10**12), "not as it was written"),
        (lambda r: r["meta"][PLAN_KEY]["plan"]["units"][0].update(params="nvme"), "not as it was written"),
        (lambda r: r["meta"][PLAN_KEY]["prediction"].update(step_s=1e-3), "not as it was written"),
        (lambda r: r["meta"]["machine_record"]["streams"][0].update(latency_s=1.0), "not as it was written"),
        (lambda r: r["meta"].pop("sha256"), "not as it was written"),
    ],
)
def test_what_does_not_match_is_refused(path, change, message):
    with pytest.raises(PlanFileError, match=message):
        load_plan(edited(path, change))


def test_a_schedule_is_no_plan(tmp_path, planned):
    save_schedule(planned[2].schedule, tmp_path / "schedule.json")
    with pytest.raises(PlanFileError, match="without a plan"):
        load_plan(tmp_path / "schedule.json")
