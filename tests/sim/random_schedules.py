"""Random valid schedules for property tests: three streams, two tight tiers, in-place updates, buffers that stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from tierplan.hwmodels.machine import Cost, held_bytes
from tierplan.sim.schedule import Buffer, Op, Schedule, Tier, validate

STREAMS = ("a", "b", "c")
TIERS = ("fast", "slow")


@st.composite
def schedules(
    draw: st.DrawFn,
    *,
    max_ops: int = 14,
    streams: Sequence[str] = STREAMS,
    roomy: bool = False,
    lasting: bool = True,
) -> Schedule:
    """Random ops that read earlier buffers and write one or two; some write over what they read, some buffers stay.

    With `roomy`, the tiers hold everything at once. With `lasting`, initial buffers have successors, so that the
    schedule unrolls.
    """
    buffers: dict[str, Buffer] = {}
    alive: list[str] = []
    """Buffers that a later op may read: written over by none."""
    roles: dict[str, str] = {}
    """Initial buffer of which a buffer is the latest version."""
    if lasting:
        for k in range(draw(st.integers(0, 3))):
            name = f"w{k}"
            tier, size = draw(st.sampled_from(TIERS)), draw(st.integers(0, 4))
            buffers[name] = Buffer(name=name, tier=tier, size_bytes=size, content=name, kind="params", initial=True)
            alive.append(name)
            roles[name] = name
    ops: list[Op] = []
    for i in range(draw(st.integers(1, 3) | st.integers(5, max_ops))):
        reads = draw(st.lists(st.sampled_from(alive[-6:]), unique=True, max_size=2)) if alive else []
        writes = []
        for k in range(draw(st.sampled_from([0, 1, 1, 1, 2]))):
            name = f"b{i}.{k}"
            over = draw(st.sampled_from([None, None, *reads])) if reads else None
            if over is not None and over in alive:
                buffers[name] = replace(buffers[over], name=name, initial=False, reuses=over)
                alive.remove(over)
                if over in roles:
                    roles[name] = roles.pop(over)
            else:
                tier, size = draw(st.sampled_from(TIERS)), draw(st.sampled_from([0, 1, 2, 3, 4, 5, 5, 5]))
                buffers[name] = Buffer(name=name, tier=tier, size_bytes=size, content=name, kind="work")
            alive.append(name)
            writes.append(name)
        after = draw(st.lists(st.sampled_from([op.key for op in ops]), unique=True, max_size=1)) if ops else []
        stream = draw(st.sampled_from(streams))
        ops.append(
            Op(key=f"op{i}", stream=stream, kind="x", reads=tuple(reads), writes=tuple(writes), after=tuple(after))
        )
    for name, role in roles.items():
        buffers[name] = replace(buffers[name], becomes=role)
    rounding = {t: draw(st.sampled_from(("exact", "exact", "power-of-two"))) for t in TIERS}
    held = {name: held_bytes(b.size_bytes, rounding[b.tier]) for name, b in buffers.items()}
    total = sum(held.values())
    before = {t: sum(held[b.name] for b in buffers.values() if b.tier == t and b.initial) for t in TIERS}
    # Between hopeless and roomy: about half of the schedules complete, many of them with waits for memory.
    capacity = {t: total if roomy else before[t] + draw(st.integers(4, 16)) for t in TIERS}
    return validate(
        Schedule(
            name="random",
            tiers=tuple(Tier(name=t, capacity_bytes=capacity[t], rounding=rounding[t]) for t in TIERS),
            buffers=tuple(buffers.values()),
            ops=tuple(ops),
        )
    )


@st.composite
def turning_schedules(draw: st.DrawFn) -> Schedule:
    """Random ones of three devices, which do other parts in each step, and a host."""
    streams = ("gpu0.compute", "gpu1.compute", "gpu2.compute", "gpu0.p2p.gpu2", "host.adam")
    schedule = draw(schedules(streams=streams, lasting=False))
    names = dict(zip(TIERS, draw(st.permutations(["gpu0", "gpu1", "gpu2", "host"])), strict=False))
    capacity_bytes = max(t.capacity_bytes for t in schedule.tiers)
    return validate(
        replace(
            schedule,
            tiers=tuple(Tier(name=t, capacity_bytes=capacity_bytes) for t in ("gpu0", "gpu1", "gpu2", "host")),
            buffers=tuple(replace(b, tier=names[b.tier]) for b in schedule.buffers),
            next_devices=tuple(draw(st.permutations(range(3)))),
        )
    )


durations = st.integers(0, 9).map(float)


def costs(schedule: Schedule, seconds: list[float]) -> dict[str, Cost]:
    """The same durations over and over, one per op."""
    return {op.key: Cost(0.0, seconds[i % len(seconds)]) for i, op in enumerate(schedule.ops)}


LIMITS = {"bus": 3.0, "drive": 0.7}
"""Shared limits, in units per second."""

seconds = st.one_of(durations, st.sampled_from([0.1, 1 / 3, 0.7e-9, 1.5e-9, 2.5e-9]), st.floats(0, 5))
"""Whole ones, so that much happens at once, and others, so that much is rounded."""
wakes = st.sampled_from([0.0, 0.0, 1.0, 3e-9])
launches = st.sampled_from([0.0, 0.0, 0.5, 3.0])
fixed_costs = st.builds(Cost, st.sampled_from([0.0, 0.0, 1.0, 2e-9, 0.3]), seconds, wake_s=wakes, launch_s=launches)
sharing_costs = st.builds(
    Cost,
    st.sampled_from([0.0, 0.0, 1.0, 2e-9, 0.3]),
    seconds,
    st.dictionaries(st.sampled_from(sorted(LIMITS)), st.sampled_from([0.0, 0.3, 1.0, 2.0, 7.7]), max_size=2),
    st.sampled_from([1.0, 1.0, 2.0, 0.3]),
    wakes,
    launches,
)
"""Ops that run beside each other take of the same limits, more than there is or less."""
cost_lists = st.lists(fixed_costs | sharing_costs, min_size=1, max_size=14)


def costs_in_turn(schedule: Schedule, choices: list[Cost]) -> dict[str, Cost]:
    """The same costs over and over, one per op."""
    return {op.key: choices[i % len(choices)] for i, op in enumerate(schedule.ops)}
