"""A small training step in the schedule language, and traces of it, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tierplan.hwmodels.machine import Cost
from tierplan.sim.columns import unroll
from tierplan.sim.engine import simulate
from tierplan.sim.schedule import Buffer, Op, Schedule, Tier, validate
from tierplan.sim.trace import Trace

MIB = 2**20
LIMITS = {"drive": 1.0}
"""One drive that reads or writes at full speed, or shares its time."""
RATES = {"gpu0.compute": 1e12, "gpu0.h2d": 10e9, "gpu0.d2h": 8e9, "nvme.read": 2e9, "nvme.write": 1e9, "host.adam": 5e8}


def toy_schedule(num_blocks: int = 4, *, gpu_bytes: int = 400 * MIB, state_bytes: int = 96 * MIB) -> Schedule:
    """Parameters in host memory, states on the drive, activations kept: fetch, forward, backward, update.

    Blocks are of different sizes: block i has (i + 2) / 2 times the parameters of a block of 16 MiB.
    """
    sizes = [(i + 2) * 8 * MIB for i in range(num_blocks)]
    buffers: list[Buffer] = []
    ops: list[Op] = []

    def buffer(content: str, tier: str, size: int, version: int = 0, **more: object) -> str:
        name = f"{content}@{tier}#{version}"
        kind = content.partition("/")[0]
        buffers.append(Buffer(name=name, tier=tier, size_bytes=size, content=content, kind=kind, **more))  # type: ignore[arg-type]
        return name

    host, disk = {}, {}
    for i, size in enumerate(sizes):
        host[i] = buffer(f"params/L{i}", "host", size, initial=True)
        disk[i] = buffer(f"states/L{i}", "nvme", size * state_bytes // (16 * MIB), initial=True)
    acts, grads = {}, {}
    for i, size in enumerate(sizes):
        here = buffer(f"params/L{i}", "gpu0", size)
        ops.append(Op(key=f"fetch_params/L{i}/fwd", stream="gpu0.h2d", kind="copy", work={"bytes": size},
                      reads=(host[i],), writes=(here,)))  # fmt: skip
        acts[i] = buffer(f"acts/L{i}", "gpu0", 32 * MIB)
        inputs = (here, acts[i - 1]) if i else (here,)
        ops.append(Op(key=f"fwd/L{i}", stream="gpu0.compute", kind="forward", unit=f"L{i}", work={"flops": size * 500},
                      reads=inputs, writes=(acts[i],)))  # fmt: skip
    before = None
    for i in reversed(range(num_blocks)):
        size = sizes[i]
        here = buffer(f"params/L{i}", "gpu0", size, 1)
        ops.append(Op(key=f"fetch_params/L{i}/bwd", stream="gpu0.h2d", kind="copy", work={"bytes": size},
                      reads=(host[i],), writes=(here,)))  # fmt: skip
        grads[i] = buffer(f"grads/L{i}", "gpu0", size)
        ops.append(Op(key=f"bwd/L{i}", stream="gpu0.compute", kind="backward", unit=f"L{i}", work={"flops": size * 1e3},
                      reads=(here, acts[i], *((before,) if before else ())), writes=(grads[i],)))  # fmt: skip
        before = grads[i]
        states_size = size * state_bytes // (16 * MIB)
        arrived = buffer(f"grads/L{i}", "host", size)
        ops.append(Op(key=f"offload_grads/L{i}", stream="gpu0.d2h", kind="copy", work={"bytes": size},
                      reads=(grads[i],), writes=(arrived,)))  # fmt: skip
        old = buffer(f"states/L{i}", "host", states_size)
        ops.append(Op(key=f"load_states/L{i}", stream="nvme.read", kind="copy", work={"bytes": states_size},
                      reads=(disk[i],), writes=(old,)))  # fmt: skip
        new = buffer(f"states/L{i}", "host", states_size, 1, reuses=old)
        params = buffer(f"params/L{i}", "host", size, 2, reuses=host[i], becomes=host[i])
        ops.append(Op(key=f"update/L{i}", stream="host.adam", kind="update", unit=f"L{i}",
                      work={"parameters": size // 4}, reads=(arrived, old, host[i]), writes=(new, params)))  # fmt: skip
        kept = buffer(f"states/L{i}", "nvme", states_size, 1, reuses=disk[i], becomes=disk[i])
        ops.append(Op(key=f"store_states/L{i}", stream="nvme.write", kind="copy", work={"bytes": states_size},
                      reads=(new, disk[i]), writes=(kept,)))  # fmt: skip
    return validate(
        Schedule(
            name="toy",
            tiers=(
                Tier(name="gpu0", capacity_bytes=gpu_bytes),
                Tier(name="host", capacity_bytes=2000 * MIB),
                Tier(name="nvme", capacity_bytes=8000 * MIB),
            ),
            buffers=tuple(buffers),
            ops=tuple(ops),
            meta={"policy": "toy"},
        )
    )


def toy_costs(schedule: Schedule, rates: Mapping[str, float] = RATES, latency_s: float = 0.0) -> dict[str, Cost]:
    """Costs by the rates of the toy machine; reads and writes share the drive."""
    costs = {}
    for op in schedule.ops:
        demand = {"drive": 1.0} if op.stream.startswith("nvme.") else {}
        costs[op.key] = Cost(latency_s, sum(op.work.values()) / rates[op.stream], demand)
    return costs


def toy_trace(
    schedule: Schedule,
    num_steps: int = 8,
    *,
    rates: Mapping[str, float] = RATES,
    latency_s: float = 0.0,
    change: Callable[[str, Cost], Cost] = lambda key, cost: cost,
) -> Trace:
    """The trace of several steps; `change` perturbs the costs by key (`s<step>/<key>`)."""
    repeated = unroll(schedule, num_steps)
    costs = {key: change(key, cost) for key, cost in toy_costs(repeated, rates, latency_s).items()}
    return simulate(repeated, costs, limits=LIMITS)
