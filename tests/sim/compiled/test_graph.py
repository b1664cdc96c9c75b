"""The compiled derivation of a schedule's graph is that of its records, op by op."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.graph_witness import Graph, Request, graph_by_records
from tests.sim.random_schedules import schedules
from tierplan.sim.columns import Int32, Lists, columns_of, rows_of, unroll
from tierplan.sim.compiled.graph_columns import graph_columns, held_before
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


def graph_of(schedule: Schedule) -> Graph:
    """The compiled one, as the witness has it: per stream and per tier what lies in chains, and no array."""
    columns = columns_of(schedule)
    graph = graph_columns(columns)
    writes, reads, frees, followers = map(rows_of, (columns.writes, columns.reads, graph.frees, graph.followers))
    reuses, size_bytes, tier_of = columns.buffer_reuses.tolist(), graph.held_bytes.tolist(), graph.buffer_tier.tolist()
    requests: list[list[Request]] = [[] for _ in schedule.tiers]
    for tier, first in enumerate(graph.first_request):
        for r in chain(first, graph.request_next):
            i = int(graph.request_op[r])
            fresh = tuple(b for b in writes[i] if tier_of[b] == tier and reuses[b] < 0 and size_bytes[b] > 0)
            assert graph.requests[i] <= r < graph.requests[i + 1]
            assert graph.request_tier[r] == tier
            requests[tier].append((i, int(graph.request_bytes[r]), fresh))
    inputs: list[list[int]] = [[] for _ in followers]
    for j, row in enumerate(followers):
        for i in row:
            inputs[i].append(j)
    assert graph.num_inputs.tolist() == list(map(len, inputs))
    users = [0] * len(size_bytes)
    for b in (b for row in frees for b in row):
        users[b] += 1
    assert all(graph.users[b] == num for b, num in enumerate(users) if num)
    read_at_all = {b for row in reads for b in row}
    return Graph(
        schedule=schedule,
        streams=[chain(first, graph.next_on_stream) for first in graph.first_on_stream],
        inputs=inputs,
        followers=followers,
        requests=requests,
        needs=rows_of(Lists(graph.requests, graph.request_tier)),
        counts_down=[[b for b in row if b in read] for row, read in zip(frees, reads, strict=True)],
        frees=[sorted(b for b in row if b not in read) for row, read in zip(frees, reads, strict=True)],
        takes_over=[[(reuses[b], b) for b in row if reuses[b] >= 0] for row in writes],
        num_readers=[num if b in read_at_all else 0 for b, num in enumerate(users)],
        size_bytes=size_bytes,
        tier_of=tier_of,
        initial=np.flatnonzero(held_before(columns, graph)).tolist(),
        capacity_bytes=graph.capacity_bytes.tolist(),
    )


def chain(first: int, following: Int32) -> list[int]:
    """From one to the next, to the last."""
    found = []
    while first >= 0:
        found.append(int(first))
        first = following[first]
    return found
