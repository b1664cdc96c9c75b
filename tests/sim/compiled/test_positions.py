"""The list order of wanted positions against its definition, step by step."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.random_schedules import schedules
from tierplan.sim.columns import columns_of, rows_of
from tierplan.sim.compiled.graph_columns import graph_columns
from tierplan.sim.compiled.readiness import consistent_order
from tierplan.sim.schedule import Schedule


def by_definition(wanted: list[int], schedule: Schedule) -> list[int]:
    """Again and again the first op in the wanted order that nothing must come before any more."""
    followers = rows_of(graph_columns(columns_of(schedule)).followers)
    inputs = [{j for j, row in enumerate(followers) if i in row} for i in range(len(wanted))]
    order: list[int] = []
    while len(order) < len(wanted):
        order.append(next(i for i in wanted if i not in order and inputs[i] <= set(order)))
    return order


@settings(max_examples=100, deadline=None)
@given(schedules() | schedules(max_ops=30, streams="abcdefghij", roomy=True), st.randoms(use_true_random=False))
def test_the_first_that_may_come_comes(schedule: Schedule, rng: random.Random) -> None:
    wanted = rng.sample(range(len(schedule.ops)), len(schedule.ops))
    order = consistent_order(np.array(wanted, np.int64), graph_columns(columns_of(schedule)))
    assert order.tolist() == by_definition(wanted, schedule)
