"""Moves of many units at once: what a shift changes, what it frees, and where the descent ends."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.planner.instances import MB, chain, small_machine
from tests.toys import MIB, toy_machine, toy_workload, uniform_plan, with_large_embedding
from tierplan.planner.milp.amounts import problem
from tierplan.planner.milp.bounds import lower_bound
from tierplan.planner.plan import UnitPlan
from tierplan.planner.plan_rules import PlanError
from tierplan.planner.search.batches import divisors
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.candidates import PlanSimulator
from tierplan.planner.search.local import shifts as module
from tierplan.planner.search.local.moves import BROUGHT_ONE_IN, with_brought_states
from tierplan.planner.search.local.shifts import (
    NUM_RELIEFS,
    StreamPrices,
    _Descent,
    applied,
    descend_by_shifts,
    reliefs,
    shifts,
)
from tierplan.sim.compiled.simulation import simulate_columns

EVERYTHING_OUT = UnitPlan(params="nvme", grads="host", states="nvme", acts="nvme", input="host")


def test_a_shift_changes_the_units_that_it_is_given_and_no_other():
    workload = toy_workload(12)
    p = problem(workload, toy_machine(), semantics="in-backward")
    plan = uniform_plan(workload, EVERYTHING_OUT)
    seen = 0
    for shift in shifts(p, plan, StreamPrices(p, lower_bound(p).shares)):
        units = shift.units
        changed = applied(plan, shift, units[:3])
        different = [u for u, (a, b) in enumerate(zip(plan.units, changed.units, strict=True)) if a != b]
        assert different == units[:3], shift.name
        seen += bool(different)
    assert seen > 10


@pytest.mark.parametrize("kind", ["device", "host"])
def test_one_of_the_reliefs_that_are_tried_lowers_the_peak(kind: str):
    workload, machine = toy_workload(12), toy_machine()
    p = problem(workload, machine, semantics="in-backward")
    plan = uniform_plan(workload, UnitPlan(acts="keep") if kind == "device" else replace(EVERYTHING_OUT, states="host"))
    evaluate = PlanSimulator(workload, machine, Budget(60))
    tier = {"device": "gpu0", "host": "host"}[kind]

    def peak_bytes(of) -> int:
        columns = evaluate.lowering.columns(of)
        tiers = [t.name for t in columns.tiers]
        return int(simulate_columns(columns, machine).peak_bytes[tiers.index(tier)])

    before = peak_bytes(plan)
    tried = reliefs(p, plan, kind, StreamPrices(p, lower_bound(p).shares))[:NUM_RELIEFS]
    assert any(peak_bytes(applied(plan, shift, shift.units)) < 0.95 * before for shift in tried)


def test_the_descent_is_never_worse_and_ends_where_nothing_in_memory_is_left_out():
    """With room for everything, nothing has to move, and the descent finds that from the other end."""
    workload, machine = toy_workload(12), toy_machine()
    p = problem(workload, machine, semantics="in-backward")
    evaluate = PlanSimulator(workload, machine, Budget(600))
    start = evaluate(uniform_plan(workload, EVERYTHING_OUT))
    *_, best = descend_by_shifts(p, start, evaluate, bound=lower_bound(p))
    in_memory = evaluate(uniform_plan(workload, UnitPlan()))
    assert start.step_s > 1.5 * in_memory.step_s
    assert best.step_s <= in_memory.step_s * 1.01


def test_a_shift_that_is_short_of_memory_is_made_with_another_that_frees_it(monkeypatch: pytest.MonkeyPatch):
    """With little of both memories, what comes to one has to make room for it; without that the descent ends worse."""
    workload = toy_workload(10)
    machine = toy_machine(device_bytes=150 * MIB, host_bytes=200 * MIB)
    p = replace(problem(workload, machine, semantics="in-backward"), brings_states=False)
    evaluate = PlanSimulator(workload, machine, Budget(600))
    start = evaluate(uniform_plan(workload, EVERYTHING_OUT))
    *_, best = descend_by_shifts(p, start, evaluate, bound=lower_bound(p))
    monkeypatch.setattr(module, "reliefs", lambda *args: [])
    *_, alone = descend_by_shifts(p, start, PlanSimulator(workload, machine, Budget(600)), bound=lower_bound(p))
    assert best.step_s < 0.99 * alone.step_s


def test_as_many_small_units_as_it_takes_make_room_for_a_large_one():
    """What they free was estimated by the largest unit, so too few of them were moved."""
    workload, machine = with_large_embedding(16), toy_machine(device_bytes=900 * MIB)
    p, evaluate = problem(workload, machine, semantics="in-backward"), PlanSimulator(workload, machine, Budget(600))
    bound, in_host = lower_bound(p), UnitPlan(params="host", grads="host", states="host")
    plan = uniform_plan(workload, UnitPlan())
    start = evaluate(replace(plan, units=(in_host, *plan.units[1:])))
    assert start.fits
    prices = StreamPrices(p, bound.shares)
    larger = next(s for s in shifts(p, start.plan, prices) if s.units == [0] and s.frees_gb.get("device", 0.0) < -0.5)
    relief = next(s for s in reliefs(p, start.plan, "device", prices) if s.is_placing)
    descent = _Descent(p, evaluate, bound, random.Random(0))
    room_gb = descent._room_gb(start, larger, [0])
    units = descent._enough(start.plan, relief, relief.units, "device", room_gb)
    made = applied(start.plan, larger, [0])
    assert not evaluate(made).fits
    assert evaluate(applied(made, relief, units)).fits
    assert not evaluate(applied(made, relief, units[:-3])).fits
    assert len(units) > 5


def test_states_come_to_the_device_once_the_descent_has_made_room_for_them(monkeypatch: pytest.MonkeyPatch):
    """The host is slow, and what is kept fills the device: no plan beside the start has room for states that come."""
    workload = chain(forward_s=[0.1] * 10, parameters=[10 * MB] * 10, saved_mb=[[20]] * 10)
    machine = small_machine(device_mb=320, nvme_mb=0, adam_m_per_s=10, link_mb_per_s=600)
    p = problem(workload, machine, semantics="in-backward")
    evaluate = PlanSimulator(workload, machine, Budget(1e9))
    kept = UnitPlan(params="host", grads="host", states="host", input="host")
    start = evaluate(replace(uniform_plan(workload, kept), prefetch_states_units=2, prefetch_acts_units=2))
    assert start.fits
    assert not any(evaluate(with_brought_states(start.plan, every)).fits for every in (1, *BROUGHT_ONE_IN))

    def worst_s() -> float:
        """A descent that is lucky may get there without the move of all units."""
        ends = [list(descend_by_shifts(p, start, evaluate, bound=lower_bound(p), seed=seed))[-1] for seed in range(3)]
        return max(end.step_s for end in ends if end.step_s is not None)

    best_s = worst_s()
    monkeypatch.setattr(module, "GENERAL_FAMILIES", module.GENERAL_FAMILIES[:-1])
    assert best_s < 0.6 * worst_s()


def test_a_step_of_too_many_turns_is_refused_by_arithmetic():
    workload = toy_workload(4, gradient_accumulation_steps=2**16)
    with pytest.raises(PlanError, match="use fewer and larger micro-batches"):
        uniform_plan(workload, UnitPlan()).check(workload)


@pytest.mark.parametrize(("number", "expected"), [(1, [1]), (12, [1, 2, 3, 4, 6, 12]), (49, [1, 7, 49])])
def test_divisors(number: int, expected: list[int]):
    assert divisors(number) == expected
