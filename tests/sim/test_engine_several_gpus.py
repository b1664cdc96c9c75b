"""The engine on cases of several GPUs solved by hand: they need nothing special."""

from __future__ import annotations

import pytest

from tests.sim.test_engine import run
from tests.sim.test_schedule import buffer, op
from tierplan.hwmodels.machine import Cost, Machine, Rate, SharedLimit, Stream
from tierplan.sim.engine import simulate
from tierplan.sim.pricing import simulate_on
from tierplan.sim.schedule import Schedule, Tier, validate


def test_data_parallel_gradients_meet_at_a_barrier() -> None:
    """An all-reduce: one op per GPU on its link stream, each after both backwards; then both updates."""
    buffers = [buffer(f"g{i}") for i in range(2)] + [buffer(f"sum{i}", reuses=f"g{i}") for i in range(2)]
    ops = [op(f"bwd{i}", writes=f"g{i}", stream=f"gpu{i}.compute") for i in range(2)]
    ops += [op(f"reduce{i}", f"g{i}", f"sum{i}", stream=f"gpu{i}.nccl", after=("bwd0", "bwd1")) for i in range(2)]
    ops += [op(f"update{i}", f"sum{i}", stream=f"gpu{i}.compute") for i in range(2)]
    seconds = {"bwd0": 2.0, "bwd1": 3.0, "reduce0": 1.0, "reduce1": 1.0, "update0": 0.5, "update1": 0.5}
    spans = run(buffers, ops, seconds).by_key()
    assert {spans[f"reduce{i}"].start_ns for i in range(2)} == {3 * 10**9}
    assert {spans[f"update{i}"].end_ns for i in range(2)} == {4_500_000_000}


def test_pipeline_parallel_sends_give_the_known_bubble() -> None:
    """GPipe's forward of m micro-batches over p stages takes (m + p - 1) stage times and the p - 1 sends of the first.

    Each GPU is a tier, and a send writes into the memory of the next one.
    """
    p, m, send_s = 4, 6, 0.25
    buffers, ops, costs = [], [], {}
    for mb in range(m):
        for stage in range(p):
            out, arrived = f"x{stage}.{mb}", f"x{stage}.{mb}@{stage + 1}"
            buffers.append(buffer(out, tier=f"gpu{stage}"))
            reads = f"x{stage - 1}.{mb}@{stage}" if stage else ""
            ops.append(op(f"fwd{stage}.{mb}", reads, out, stream=f"gpu{stage}.compute"))
            costs[f"fwd{stage}.{mb}"] = Cost(0.0, 1.0)
            if stage < p - 1:
                buffers.append(buffer(arrived, tier=f"gpu{stage + 1}"))
                ops.append(op(f"send{stage}.{mb}", out, arrived, stream=f"gpu{stage}.p2p.gpu{stage + 1}"))
                costs[f"send{stage}.{mb}"] = Cost(0.0, send_s)
    tiers = tuple(Tier(name=f"gpu{i}", capacity_bytes=100) for i in range(p))
    schedule = validate(Schedule(name="x", tiers=tiers, buffers=tuple(buffers), ops=tuple(ops)))
    trace = simulate(schedule, costs)
    assert trace.duration_s == m + p - 1 + (p - 1) * send_s
    assert {trace.busy_s()[f"gpu{i}.compute"] for i in range(p)} == {float(m)}


def test_gpus_behind_one_switch_share_its_bandwidth() -> None:
    """Four links of 12 GB/s behind a switch of 24 GB/s: two at full speed, four at half."""
    for num_gpus, expected_s in ((2, 1.0), (4, 2.0)):
        machine = Machine(
            name="m",
            tiers=(),
            streams=tuple(
                Stream(name=f"gpu{i}.h2d", rates={"bytes": Rate.constant(12e9)}, takes={"switch": {"bytes": 1.0}})
                for i in range(num_gpus)
            ),
            shared_limits=(SharedLimit(name="switch", limit=24e9),),
        )
        ops = tuple(op(f"fetch{i}", stream=f"gpu{i}.h2d", work={"bytes": 12e9}) for i in range(num_gpus))
        trace = simulate_on(Schedule(name="x", tiers=(), buffers=(), ops=ops), machine)
        assert trace.duration_s == pytest.approx(expected_s)


def test_gpus_share_host_memory() -> None:
    """Two GPUs offload 6 bytes each into a host tier of 10: the second waits until the first has its bytes back."""
    buffers = [buffer(f"act{i}", size_bytes=6) for i in range(2)]
    ops = []
    for i in range(2):
        ops += [
            op(f"offload{i}", writes=f"act{i}", stream=f"gpu{i}.d2h"),
            op(f"fetch{i}", reads=f"act{i}", stream=f"gpu{i}.h2d"),
        ]
    trace = run(buffers, ops, capacity_bytes=10)
    assert trace.by_key()["offload1"].start_ns == trace.by_key()["fetch0"].end_ns
    assert trace.by_key()["offload1"].waited_memory_ns == 2 * 10**9
