"""Whether the compiled engine and the SimPy engine say the same of a schedule: every time, peak and shortage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.random_schedules import LIMITS, cost_lists, costs_in_turn, schedules, turning_schedules
from tierplan.hwmodels.machine import Cost
from tierplan.sim.analysis.completion import OutOfMemory
from tierplan.sim.columns import columns_of, unroll
from tierplan.sim.compiled.graph_columns import graph_columns
from tierplan.sim.compiled.rules import Prices, execute, stuck
from tierplan.sim.compiled.simulation import prices_on
from tierplan.sim.engine import simulate
from tierplan.sim.schedule import Schedule, ScheduleError


def prices_by_key(schedule: Schedule, costs: Mapping[str, Cost], limits: Mapping[str, float]) -> Prices:
    """The prices of ops whose costs are given by key, as `engine.simulate` takes them."""
    ops = [replace(op, work={"number": i}) for i, op in enumerate(schedule.ops)]
    machine: Any = SimpleNamespace(cost=lambda _, work, **__: costs[ops[work["number"]].key], limits=limits)
    return prices_on(columns_of(replace(schedule, ops=tuple(ops))), machine)


def by_simpy(schedule: Schedule, costs: Mapping[str, Cost], limits: Mapping[str, float]) -> object:
    """(free, ready, start, end) in ns by op and peaks by tier; or what is short."""
    try:
        trace = simulate(schedule, costs, limits=limits)
    except OutOfMemory as error:
        return (error.op, error.tier, error.wanted_bytes, error.free_bytes)
    return ({s.key: (s.free_ns, s.ready_ns, s.start_ns, s.end_ns) for s in trace.spans}, dict(trace.peak_bytes))


def by_compiled(schedule: Schedule, costs: Mapping[str, Cost], limits: Mapping[str, float]) -> object:
    columns = columns_of(schedule)
    graph = graph_columns(columns)
    execution = execute(graph, prices_by_key(schedule, costs, limits))
    if short := stuck(graph, execution):
        op = schedule.ops[short.op].key if short.op >= 0 else None
        return (op, schedule.tiers[short.tier].name, short.wanted_bytes, short.free_bytes)
    times = (execution.free_ns, execution.ready_ns, execution.start_ns, execution.end_ns)
    rows = zip(*(x.tolist() for x in times), strict=True)
    peaks = dict(zip((t.name for t in schedule.tiers), execution.peak_bytes.tolist(), strict=True))
    return ({op.key: row for op, row in zip(schedule.ops, rows, strict=True)}, peaks)


def assert_agree(schedule: Schedule, costs: Mapping[str, Cost], limits: Mapping[str, float]) -> None:
    assert by_compiled(schedule, costs, limits) == by_simpy(schedule, costs, limits)


def both_engines_agree(max_examples: int) -> Callable[[], None]:
    """A test of so many random schedules."""
    return settings(max_examples=max_examples, deadline=None)(given(RANDOM, st.integers(1, 4), cost_lists)(agree_on))


RANDOM = schedules() | turning_schedules() | schedules(max_ops=30, streams="abcdefghij", roomy=True)


def agree_on(schedule: Schedule, num_steps: int, costs: list[Cost]) -> None:
    with suppress(ScheduleError):  # with an initial buffer without successor it is one step for good
        schedule = unroll(schedule, num_steps)
    assert_agree(schedule, costs_in_turn(schedule, costs), LIMITS)
