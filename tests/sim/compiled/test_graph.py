"""The compiled derivation of a schedule's graph is that of its records, op by op."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.graph_witness import graph_by_records
from tests.sim.random_schedules import schedules
from tierplan.sim.columns import unroll
from tierplan.sim.graph import Graph, graph_of
from tierplan.sim.schedule import Schedule, ScheduleError


@settings(max_examples=150, deadline=None)
@given(schedules() | schedules(max_ops=30, streams="abcdefghij", roomy=True), st.integers(1, 3))
def test_the_graph_is_that_of_the_records(schedule: Schedule, num_steps: int) -> None:
    with suppress(ScheduleError):  # with an initial buffer without successor it is one step for good
        schedule = unroll(schedule, num_steps)
    assert in_lists(graph_of(schedule)) == in_lists(graph_by_records(schedule))


def in_lists(graph: Graph) -> dict[str, object]:
    """All but the schedule; what an op waits for has no order."""
    facts = {f.name: getattr(graph, f.name) for f in fields(graph) if f.name != "schedule"}
    rows = ("followers", "needs", "counts_down", "frees", "takes_over")
    return (
        facts | {name: list(map(list, facts[name])) for name in rows} | {"inputs": list(map(sorted, facts["inputs"]))}
    )
