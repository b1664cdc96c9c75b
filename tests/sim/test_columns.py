"""Columns are the schedule: nothing is lost on the way to arrays and back."""

from __future__ import annotations

import pickle
import random
import re
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.random_schedules import schedules, turning_schedules
from tests.sim.unrolled import unrolled_by_objects
from tests.toys import toy_machine, toy_workload
from tierplan.planner.lowering import lower
from tierplan.planner.policies import POLICIES, decide
from tierplan.sim.columns import Lists, ScheduleColumns, columns_of
from tierplan.sim.schedule import Buffer, Op, Schedule, ScheduleError, Tier, validate


def _text(schedule: Schedule) -> str:
    return repr([getattr(schedule, field.name) for field in fields(schedule)])


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_columns_give_back_the_schedule(schedule: Schedule) -> None:
    assert columns_of(schedule).schedule() == schedule


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_columns_give_back_the_schedule_of_every_policy(policy: str) -> None:
    workload, machine = toy_workload(), toy_machine()
    schedule = lower(decide(policy, workload, machine), workload, machine)
    columns = columns_of(schedule)
    assert _text(columns.schedule()) == _text(schedule), "as text, amounts keep their type: 1 is not 1.0"
    assert columns.unrolled(3).schedule() == unrolled_by_objects(schedule, 3)
    assert columns.bytes_moved() == schedule.bytes_moved()
    assert len(columns.works) < len(schedule.ops), "ops of one work are priced once"


@settings(max_examples=150, deadline=None)
@given(schedules(), st.integers(0, 10**6))
def test_reordered_columns_are_those_of_the_reordered_schedule(schedule: Schedule, seed: int) -> None:
    order = list(range(len(schedule.ops)))
    random.Random(seed).shuffle(order)
    expected = replace(schedule, ops=tuple(schedule.ops[i] for i in order))
    columns = columns_of(schedule).reordered(np.array(order, np.int32))
    assert columns.schedule() == expected
    assert pickle.loads(pickle.dumps(columns)).schedule() == expected, "names go along"


@settings(max_examples=200, deadline=None)
@given(schedules() | turning_schedules(), st.integers(0, 5))
def test_unrolled_columns_are_those_of_the_unrolled_schedule(schedule: Schedule, num_steps: int) -> None:
    try:
        expected = unrolled_by_objects(schedule, num_steps)
    except ScheduleError as error:
        with pytest.raises(ScheduleError, match=f"^{re.escape(str(error))}$"):
            columns_of(schedule).unrolled(num_steps)
        return
    unrolled = columns_of(schedule).unrolled(num_steps)
    assert unrolled.schedule() == expected
    assert numbers(unrolled) == numbers(columns_of(expected))


def numbers(columns: ScheduleColumns) -> dict[str, list[list[int]]]:
    arrays = {f.name: getattr(columns, f.name) for f in fields(columns)}
    return {name: np.atleast_2d(x).tolist() for name, x in arrays.items() if isinstance(x, np.ndarray)} | {
        name: [x.begins.tolist(), x.items.tolist()] for name, x in arrays.items() if isinstance(x, Lists)
    }


def test_initial_buffers_may_change_places_from_step_to_step() -> None:
    """What is `new` at the end of a step is `old` in the next: two buffers that take turns, as in a delayed update."""
    tier = Tier(name="host", capacity_bytes=100)
    buffers = (
        Buffer(name="old", tier="host", size_bytes=1, content="x", kind="params", initial=True),
        Buffer(name="new", tier="host", size_bytes=1, content="x", kind="params", initial=True, becomes="old"),
        Buffer(name="newer", tier="host", size_bytes=1, content="x", kind="params", becomes="new"),
    )
    op = Op(key="update", stream="a", kind="x", reads=("old", "new"), writes=("newer",))
    schedule = validate(Schedule(name="s", tiers=(tier,), buffers=buffers, ops=(op,)))
    assert columns_of(schedule).unrolled(4).schedule() == unrolled_by_objects(schedule, 4)


def test_an_empty_schedule_has_empty_columns() -> None:
    schedule = Schedule(name="none", tiers=(), buffers=(), ops=())
    columns = columns_of(schedule)
    assert (columns.num_ops, columns.num_buffers) == (0, 0)
    assert columns.reordered(np.zeros(0, np.int32)).schedule() == schedule
