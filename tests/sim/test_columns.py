"""Columns are the schedule: nothing is lost on the way to arrays and back."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.random_schedules import schedules
from tests.toys import toy_machine, toy_workload
from tierplan.planner.lowering import lower
from tierplan.planner.policies import POLICIES, decide
from tierplan.sim.columns import columns_of
from tierplan.sim.schedule import Schedule


@settings(max_examples=150, deadline=None)
@given(schedules())
def test_columns_give_back_the_schedule(schedule: Schedule) -> None:
    assert columns_of(schedule).schedule() == schedule


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_columns_give_back_the_schedule_of_every_policy(policy: str) -> None:
    workload, machine = toy_workload(), toy_machine()
    schedule = lower(decide(policy, workload, machine), workload, machine)
    columns = columns_of(schedule)
    assert repr(columns.schedule()) == repr(schedule), "as text, amounts keep their type: 1 is not 1.0"
    assert len(columns.works) < len(schedule.ops), "ops of one work are priced once"


@settings(max_examples=150, deadline=None)
@given(schedules(), st.integers(0, 10**6))
def test_reordered_columns_are_those_of_the_reordered_schedule(schedule: Schedule, seed: int) -> None:
    order = list(range(len(schedule.ops)))
    random.Random(seed).shuffle(order)
    expected = replace(schedule, ops=tuple(schedule.ops[i] for i in order))
    assert columns_of(schedule).reordered(np.array(order, np.int32)).schedule() == expected


def test_an_empty_schedule_has_empty_columns() -> None:
    schedule = Schedule(name="none", tiers=(), buffers=(), ops=())
    columns = columns_of(schedule)
    assert (columns.num_ops, columns.num_buffers) == (0, 0)
    assert columns.reordered(np.zeros(0, np.int32)).schedule() == schedule
