"""The longest path is the engine's makespan to the nanosecond where it says so, and never above it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.sim.evaluator import Evaluator
from tests.sim.random_schedules import costs, durations, schedules
from tests.sim.test_rules import trace_or_none
from tests.toys import toy_machine, toy_workload, uniform_plan
from tierplan.hwmodels.machine import Cost
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.sim.columns import unroll
from tierplan.sim.engine import simulate
from tierplan.sim.pricing import price
from tierplan.sim.schedule import Schedule

seconds_lists = st.lists(durations | st.floats(0, 3), min_size=14, max_size=14)


@settings(max_examples=120, deadline=None)
@given(schedules(roomy=True), seconds_lists)
def test_with_room_it_is_exact(schedule: Schedule, seconds: list[float]) -> None:
    evaluation = Evaluator(schedule).evaluate(costs(schedule, seconds))
    assert evaluation.is_exact
    trace = simulate(schedule, costs(schedule, seconds))
    assert evaluation.makespan_ns == trace.duration_ns
    ends = {s.key: s.end_ns for s in trace.spans}
    assert list(evaluation.end_ns) == [ends[op.key] for op in schedule.ops]


@settings(max_examples=160, deadline=None)
@given(schedules(), seconds_lists)
def test_with_little_memory_it_is_a_bound_and_says_when_it_is_exact(schedule: Schedule, seconds: list[float]) -> None:
    evaluation = Evaluator(schedule).evaluate(costs(schedule, seconds))
    trace = trace_or_none(schedule, costs(schedule, seconds))
    if trace is None:
        assert not evaluation.is_exact
        return
    assert evaluation.makespan_ns <= trace.duration_ns
    if evaluation.is_exact:
        assert evaluation.makespan_ns == trace.duration_ns


@settings(max_examples=100, deadline=None)
@given(
    schedules(),
    st.lists(st.floats(0, 3), min_size=14, max_size=14),
    st.lists(st.sampled_from([0.0, 0.0, 0.5, 1.0, 2.0]), min_size=14, max_size=14),
    st.floats(0.25, 2.0),
)
def test_with_shared_limits_it_is_a_bound(
    schedule: Schedule, seconds: list[float], needs: list[float], limit: float
) -> None:
    prices = {
        op.key: Cost(0.001, seconds[i % 14], {"bus": needs[i % 14]} if needs[i % 14] else {})
        for i, op in enumerate(schedule.ops)
    }
    evaluation = Evaluator(schedule).evaluate(prices, {"bus": limit})
    try:
        trace = simulate(schedule, prices, limits={"bus": limit})
    except RuntimeError:
        assume(False)
        raise
    assert evaluation.makespan_ns <= trace.duration_ns
    load_s = sum(c.work_s * c.demand.get("bus", 0.0) for c in prices.values()) / limit
    assert evaluation.makespan_ns >= load_s * 1e9 - 2 * len(prices) - 1
    if evaluation.is_exact:
        assert evaluation.makespan_ns == trace.duration_ns


@settings(max_examples=100, deadline=None)
@given(schedules(), st.lists(seconds_lists, min_size=1, max_size=5))
def test_many_at_once_are_the_same_as_one_by_one(schedule: Schedule, sets: list[list[float]]) -> None:
    evaluator = Evaluator(schedule)
    one_by_one = [evaluator.evaluate(costs(schedule, seconds)).makespan_ns for seconds in sets]
    table = [[round(seconds[i % 14] * 1e9) for i in range(len(schedule.ops))] for seconds in sets]
    assert evaluator.makespans_ns(np.array(table, dtype=np.int64)).tolist() == one_by_one


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("acts", ["keep", "recompute", "host", "nvme"])
def test_lowered_plans(acts: str, num_steps: int) -> None:
    """Machine with ample memory: exact, though buffers come and go."""
    workload = toy_workload(gradient_accumulation_steps=2)
    machine = toy_machine()
    plan = uniform_plan(workload, UnitPlan(params="host", grads="host", states="nvme", acts=acts))  # type: ignore[arg-type]
    schedule = unroll(lower(plan, workload, machine), num_steps)
    evaluation = Evaluator(schedule).evaluate(price(schedule, machine), machine.limits)
    trace = simulate(schedule, price(schedule, machine))
    if not any(s.waited_memory_ns for s in trace.spans):
        assert evaluation.is_exact
    assert evaluation.makespan_ns == trace.duration_ns


def test_the_wrong_number_of_ops_is_refused() -> None:
    workload, machine = toy_workload(), toy_machine()
    evaluator = Evaluator(lower(uniform_plan(workload, UnitPlan()), workload, machine))
    with pytest.raises(ValueError, match="durations have 3 columns; the schedule has"):
        evaluator.makespans_ns(np.zeros((2, 3), dtype=np.int64))
