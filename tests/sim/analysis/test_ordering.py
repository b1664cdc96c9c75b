"""The readiness order: frozen starts are never beaten by waiting, and the order is as safe as the list it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import cycle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.analysis import readiness_witness
from tests.sim.random_schedules import cost_lists, costs_in_turn, schedules
from tests.sim.test_schedule import buffer, op
from tests.sim.test_schedule import schedule as schedule_of
from tests.toys import MIB, toy_machine, toy_workload
from tierplan.hwmodels.machine import Cost
from tierplan.hwmodels.names import COMPUTE, D2H, H2D, HOST_ADAM, NVME_READ, NVME_WRITE
from tierplan.planner.lowering import lower
from tierplan.planner.policies import POLICIES, decide
from tierplan.sim.analysis.completion import OutOfMemory
from tierplan.sim.analysis.ordering import order_by_readiness, refine_columns
from tierplan.sim.builder import tiers_of
from tierplan.sim.columns import columns_of
from tierplan.sim.engine import simulate
from tierplan.sim.pricing import price, simulate_on
from tierplan.sim.schedule import Schedule, Tier, validate


def by_readiness(schedule: Schedule, costs: Mapping[str, Cost], *, overtakes: bool = False) -> Schedule:
    seconds = np.array([costs[op.key].alone_s for op in schedule.ops])
    return order_by_readiness(columns_of(schedule), seconds, overtakes=overtakes)[0].schedule()


def completes_one_by_one(schedule: Schedule) -> bool:
    return readiness_witness.Ordering(
        schedule, dict.fromkeys((op.key for op in schedule.ops), Cost(0.0, 0.0)), ()
    ).is_safe


@settings(max_examples=300, deadline=None)
@given(schedules(), st.lists(st.integers(0, 9), min_size=14, max_size=14))
def test_the_order_is_safe_and_keeps_each_stream(schedule: Schedule, seconds: list[int]) -> None:
    costs = {op.key: Cost(0.0, float(s)) for op, s in zip(schedule.ops, cycle(seconds), strict=False)}
    ordered = by_readiness(schedule, costs)
    validate(ordered)
    for stream in schedule.streams:
        assert [o.key for o in ordered.ops if o.stream == stream] == [o.key for o in schedule.ops if o.stream == stream]
    if not completes_one_by_one(schedule):
        assert ordered == schedule
        return
    assert {s.key for s in simulate(ordered, costs).spans} == {op.key for op in schedule.ops}  # and does not raise
    _, end_s = order_by_readiness(columns_of(schedule), np.array([costs[op.key].alone_s for op in schedule.ops]))
    assert simulate(ordered, costs).duration_ns <= end_s * 1e9, "executed by the rules, no op is later"


@settings(max_examples=150, deadline=None)
@given(schedules(), st.lists(st.integers(0, 9), min_size=14, max_size=14))
def test_with_room_to_spare_it_is_as_fast_as_unlimited_memory(schedule: Schedule, seconds: list[int]) -> None:
    costs = {op.key: Cost(0.0, float(s)) for op, s in zip(schedule.ops, cycle(seconds), strict=False)}
    wide = replace(schedule, tiers=tuple(replace(t, capacity_bytes=10_000) for t in schedule.tiers))
    free = replace(wide, buffers=tuple(replace(b, size_bytes=0) for b in wide.buffers))
    ordered, end_s = order_by_readiness(columns_of(wide), np.array([costs[op.key].alone_s for op in wide.ops]))
    assert simulate(ordered.schedule(), costs).duration_ns == simulate(free, costs).duration_ns == end_s * 1e9


@settings(max_examples=400, deadline=None)
@given(schedules() | schedules(max_ops=30, streams="abcdefghij"), cost_lists)
def test_it_is_the_order_of_the_witness(schedule: Schedule, choices: list[Cost]) -> None:
    costs = costs_in_turn(schedule, choices)
    assert by_readiness(schedule, costs) == readiness_witness.ordered(schedule, costs)


STREAMS = {"a": H2D, "b": NVME_READ, "c": HOST_ADAM, "d": D2H, "e": NVME_WRITE, "f": COMPUTE}


def on_real_streams(schedule: Schedule) -> Schedule:
    return replace(schedule, ops=tuple(replace(op, stream=STREAMS[op.stream]) for op in schedule.ops))


@settings(max_examples=200, deadline=None)
@given(schedules(max_ops=30, streams="abcdef").map(on_real_streams), cost_lists)
def test_links_drives_and_cores_may_run_what_is_ready(schedule: Schedule, choices: list[Cost]) -> None:
    costs = costs_in_turn(schedule, choices)
    ordered = validate(by_readiness(schedule, costs, overtakes=True))
    assert ordered == readiness_witness.ordered(schedule, costs, {*STREAMS.values()} - {COMPUTE})
    computing = [[op.key for op in found.ops if op.stream == COMPUTE] for found in (ordered, schedule)]
    assert computing[0] == computing[1]


@settings(max_examples=150, deadline=None)
@given(schedules().map(on_real_streams), st.lists(st.integers(0, 9), min_size=14, max_size=14))
def test_running_what_is_ready_is_as_safe(schedule: Schedule, seconds: list[int]) -> None:
    costs = {op.key: Cost(0.0, float(s)) for op, s in zip(schedule.ops, cycle(seconds), strict=False)}
    if completes_one_by_one(schedule):
        spans = simulate(by_readiness(schedule, costs, overtakes=True), costs).spans  # and does not raise
        assert {s.key for s in spans} == {op.key for op in schedule.ops}


def test_a_copy_does_not_wait_behind_one_whose_inputs_are_late() -> None:
    ops = [op("make", writes="made", stream=COMPUTE), op("late", "made", stream=H2D), op("ready", stream=H2D)]
    schedule = validate(schedule_of([buffer("made")], ops))
    costs = {o.key: Cost(0, 3.0) for o in ops}
    starts = [
        simulate(by_readiness(schedule, costs, overtakes=o), costs).by_key()["ready"].start_ns for o in (False, True)
    ]
    assert starts == [6_000_000_000, 0]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("host_mib", [130, 160, 200, 4000])
def test_it_is_the_order_of_the_witness_for_every_policy(policy: str, host_mib: int) -> None:
    workload, machine = toy_workload(8, gradient_accumulation_steps=2), toy_machine(host_bytes=host_mib * MIB)
    schedule = lower(decide(policy, workload, toy_machine()), workload, machine, refine=False)
    costs = price(schedule, machine)
    assert by_readiness(schedule, costs) == readiness_witness.ordered(schedule, costs)


def test_a_prefetch_listed_too_early_no_longer_holds_back_others() -> None:
    """The load of `late` is listed first but its source is slow; in list order it holds back `quick`."""
    buffers = [buffer("source", tier="slow"), buffer("late", tier="fast"), buffer("quick", tier="fast")]
    ops = [
        op("make", writes="source", stream="a"),
        op("load", "source", "late", stream="b"),
        op("compute", writes="quick", stream="c"),
    ]
    tiers = [Tier(name=name, capacity_bytes=8) for name in ("fast", "slow")]
    schedule = validate(schedule_of(buffers, ops, *tiers))
    costs = {"make": Cost(0, 10.0), "load": Cost(0, 1.0), "compute": Cost(0, 5.0)}
    assert simulate(schedule, costs).by_key()["compute"].start_ns == 10_000_000_000
    assert simulate(by_readiness(schedule, costs), costs).by_key()["compute"].start_ns == 0


def test_what_others_slow_down_is_listed_later() -> None:
    """The read takes 3 s alone and 5 s beside the write: `quick` is ready after 4 s, and waits for `late` if that is
    listed first."""
    buffers = [buffer("source"), buffer("made"), buffer("late", tier="gpu0"), buffer("quick", tier="gpu0")]
    ops = [
        op("write", stream=NVME_WRITE, work={"bytes": 6e9}),
        op("read", writes="source", stream=NVME_READ, work={"bytes": 6e9}),
        op("make", writes="made", stream=HOST_ADAM, work={"parameters": 2e9}),
        op("late", "source", "late", stream=H2D, work={"bytes": 5e9}),
        op("quick", "made", "quick", stream=COMPUTE, work={"matmul_bf16_flops": 1e11}),
    ]
    machine = toy_machine(shared=True)
    columns = columns_of(validate(schedule_of(buffers, ops, *tiers_of(machine))))
    alone, _ = order_by_readiness(columns, np.array([6.0, 3.0, 4.0, 1.0, 1.0]))
    for listed, begin_s in ((alone, 5), (refine_columns(columns, machine), 4)):
        trace = simulate_on(listed.schedule(), machine)
        assert trace.by_key()["read"].end_ns == 5_000_000_000
        assert trace.by_key()["quick"].start_ns == begin_s * 1_000_000_000


def test_what_ran_early_and_is_freed_no_longer_counts() -> None:
    """While `a` is busy, `b` runs ahead of what is listed before; each of its ops takes most of the tier in turn."""
    buffers = [buffer(f"b{i}", size_bytes=3) for i in range(3)]
    ops = [*(op(f"a{i}", stream="a") for i in range(2)), *(op(f"b{i}", writes=f"b{i}", stream="b") for i in range(3))]
    schedule = validate(schedule_of(buffers, ops, Tier(name="host", capacity_bytes=4)))
    costs = {o.key: Cost(0.0, 10.0 if o.stream == "a" else 2.0) for o in ops}
    spans = simulate(by_readiness(schedule, costs), costs).by_key()
    assert [spans[f"b{i}"].start_ns / 1e9 for i in range(3)] == [0, 2, 4]


def test_too_small_a_tier_is_left_for_the_simulator_to_report() -> None:
    schedule = schedule_of(
        [buffer("big", size_bytes=3)], [op("make", writes="big")], Tier(name="host", capacity_bytes=2)
    )
    costs = {"make": Cost(0, 1.0)}
    assert by_readiness(schedule, costs) == schedule
    with pytest.raises(OutOfMemory) as caught:
        simulate(schedule, costs)
    assert (caught.value.op, caught.value.tier, caught.value.wanted_bytes) == ("make", "host", 3)
