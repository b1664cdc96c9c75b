"""The compiled engine against the SimPy engine: the same nanosecond for everything, or the same lack of memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.sim.compiled.agreement import assert_agree, both_engines_agree, prices_by_key
from tests.toys import MIB, toy_machine, toy_workload
from tierplan.hwmodels.machine import Cost, Machine
from tierplan.planner.lowering import lower
from tierplan.planner.policies import POLICIES, decide
from tierplan.sim.analysis.completion import SimulationError
from tierplan.sim.columns import columns_of, unroll
from tierplan.sim.compiled.graph_columns import graph_columns
from tierplan.sim.compiled.rules import execute
from tierplan.sim.compiled.simulation import prices_on
from tierplan.sim.engine import simulate
from tierplan.sim.pricing import price
from tierplan.sim.schedule import Buffer, Op, Schedule, ScheduleError, Tier

test_random_schedules = both_engines_agree(400)
test_ten_thousand_random_schedules = pytest.mark.nightly(both_engines_agree(10_000))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("shared", [False, True])
def test_every_policy(policy: str, shared: bool) -> None:
    workload, machine = toy_workload(6, gradient_accumulation_steps=2), with_latencies(toy_machine(shared=shared))
    schedule = lower(decide(policy, workload, machine), workload, machine)
    steps = unroll(schedule, 3)
    assert_agree(steps, price(steps, machine), machine.limits)
    peaks = simulate(steps, price(steps, machine), limits=machine.limits).peak_bytes
    for short in peaks:  # just too small, tier by tier
        tiers = [replace(t, capacity_bytes=peaks[t.name] * 2 // 3 if t.name == short else 10**12) for t in steps.tiers]
        tight = replace(steps, tiers=tuple(tiers))
        assert_agree(tight, price(tight, machine), machine.limits)


def with_latencies(machine: Machine) -> Machine:
    streams = [replace(s, latency_s=k * 1e-5) for k, s in enumerate(machine.streams)]
    return replace(machine, streams=tuple(streams))


@pytest.mark.parametrize("shared", [False, True])
def test_prices_on_a_machine_are_those_of_each_op(shared: bool) -> None:
    workload, machine = toy_workload(), with_latencies(toy_machine(shared=shared))
    schedule = unroll(lower(decide("zero-infinity", workload, machine), workload, machine), 2)
    columns = columns_of(schedule)
    one, other = prices_on(columns, machine), prices_by_key(schedule, price(schedule, machine), machine.limits)
    assert len(one.alone_s) == len(columns.works)
    for a, b in zip(one[1:-1], other[1:-1], strict=True):
        assert (a[one.op_price] == b[other.op_price]).all()


def test_more_streams_share_a_limit_than_any_machine_has() -> None:
    streams = 300
    ops = [Op(key=f"o{i}", stream=f"s{i % streams}", kind="x") for i in range(3 * streams)]
    schedule = Schedule(name="wide", tiers=(), buffers=(), ops=tuple(ops))
    costs = {op.key: Cost(0.0, 0.1 + i % 7, {"bus": 1.0 + i % 3}) for i, op in enumerate(ops)}
    assert_agree(schedule, costs, {"bus": 50.0})


@pytest.mark.parametrize(
    ("cost", "limits"),
    [
        (Cost(float("nan"), 1.0), {}),
        (Cost(-1.0, 1.0), {}),
        (Cost(0.0, float("inf")), {}),
        (Cost(0.0, 1.0, {"bus": 1.0}), {}),
        (Cost(0.0, 1.0, {"bus": 1.0}), {"bus": 0.0}),
        (Cost(0.0, 1.0, {"bus": float("inf")}), {"bus": 1.0}),
        (Cost(0.0, 1.0, {}, 0.0), {}),
    ],
)
def test_what_no_op_can_cost_is_refused_with_the_same_words(cost: Cost, limits: dict[str, float]) -> None:
    schedule = Schedule(name="x", tiers=(), buffers=(), ops=(Op(key="o", stream="a", kind="x"),))
    messages = []
    for run in (
        lambda: simulate(schedule, {"o": cost}, limits=limits),
        lambda: prices_by_key(schedule, {"o": cost}, limits),
    ):
        with pytest.raises(SimulationError) as caught:
            run()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


def test_centuries_are_refused_rather_than_counted_wrongly() -> None:
    schedule = Schedule(name="x", tiers=(), buffers=(), ops=(Op(key="o", stream="a", kind="x"),))
    with pytest.raises(SimulationError, match=r"op 'o' takes 1e\+10 s, and nothing is simulated beyond 2.31e\+09 s"):
        prices_by_key(schedule, {"o": Cost(0.0, 1e10)}, {})
    long = Schedule(name="x", tiers=(), buffers=(), ops=tuple(Op(key=f"o{i}", stream="a", kind="x") for i in range(9)))
    columns = columns_of(long)
    for cost in (Cost(0.0, 1e9), Cost(0.0, 1e3, {"bus": 1e30})):
        costs = {op.key: cost for op in long.ops}
        assert execute(graph_columns(columns), prices_by_key(long, costs, {"bus": 1.0})).is_too_late


def test_more_bytes_than_anybody_has_are_refused_rather_than_counted_wrongly() -> None:
    tier = Tier(name="host", capacity_bytes=10**30)
    buffers = [
        Buffer(name=f"b{k}", tier="host", size_bytes=2**58, content="x", kind="x", initial=True) for k in range(5)
    ]
    schedule = Schedule(name="huge", tiers=(tier,), buffers=tuple(buffers[:4]), ops=())
    assert graph_columns(columns_of(schedule)).capacity_bytes.tolist() == [2**61]
    with pytest.raises(ScheduleError, match=r"schedule 'huge' has buffers of 1.44e\+18 bytes in all"):
        graph_columns(columns_of(replace(schedule, buffers=tuple(buffers))))


def test_an_empty_schedule_ends_at_once() -> None:
    none = Schedule(name="none", tiers=(), buffers=(), ops=())
    execution = execute(graph_columns(columns_of(none)), prices_by_key(none, {}, {}))
    assert execution.end_ns.tolist() == []
    assert not execution.is_too_late


def test_columns_are_not_written_to() -> None:
    workload, machine = toy_workload(), toy_machine(device_bytes=500 * MIB)
    columns = columns_of(lower(decide("zero-offload", workload, machine), workload, machine))
    graph, prices = graph_columns(columns), prices_on(columns, machine)
    one, other = execute(graph, prices), execute(graph, prices)
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
