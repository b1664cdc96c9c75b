"""What each of several ranks executes, and that together they come to one end whatever their timings."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planner.test_plan import devices
from tests.sim.naive import State
from tests.sim.random_schedules import schedules
from tests.toys import toy_workload
from tierplan.planner.lowering import lower
from tierplan.planner.policies import decide
from tierplan.sim.analysis.completion import completes, smallest_capacity_bytes
from tierplan.sim.columns import unroll
from tierplan.sim.pricing import simulate_on
from tierplan.sim.ranks import RankError, ends_of_sends, joined_trace, rank_schedule, stages
from tierplan.sim.schedule import Schedule


def shards_of_ranks(schedule: Schedule, num: int) -> list[Schedule]:
    """The schedule of each rank: later ones have smaller shards."""
    return [
        replace(schedule, buffers=tuple(replace(b, size_bytes=b.size_bytes * (8 - r) // 8) for b in schedule.buffers))
        for r in range(num)
    ]


def execute_together(own: Sequence[Schedule], joint: set[str], seed: int) -> list[set[str]]:
    """By rank, what has ended when nothing goes on: ops end in random order, and messages arrive late; a joint op ends
    when it has started on all ranks."""
    rng, ranks = random.Random(seed), [State(schedule) for schedule in own]
    of = {key: [r for r, schedule in enumerate(own) if key in {op.key for op in schedule.ops}] for key in joint}
    while True:
        for state in rng.sample(ranks, len(ranks)):
            if rng.random() < 0.7:  # others have not heard of it yet
                state.settle()
        running = [set(state.running) for state in ranks]
        ends = [(r, key) for r, keys in enumerate(running) for key in sorted(keys - joint)]
        ends += [(-1, key) for key in sorted(joint) if all(key in running[r] for r in of[key])]
        if not ends:
            before = [list(state.started) for state in ranks]
            for state in ranks:
                state.settle()
            if before == [state.started for state in ranks]:
                return [state.ended for state in ranks]
            continue
        r, key = rng.choice(ends)
        for rank in of[key] if r < 0 else [r]:
            ranks[rank].ended.add(key)


@settings(max_examples=60, deadline=None)
@given(schedules(), st.integers(2, 4), st.sets(st.integers(0, 13)), st.integers(0, 10**6), st.integers(0, 10**6))
def test_ranks_complete_together_if_the_first_one_s_part_does(
    schedule: Schedule, num: int, joint: set[int], one: int, two: int
) -> None:
    """Shards of later ranks are smaller; any ops may be joint, on any streams."""
    own = shards_of_ranks(schedule, num)
    keys = {op.key for k, op in enumerate(schedule.ops) if k in joint}
    first, second = execute_together(own, keys, one), execute_together(own, keys, two)
    assert first == second
    if completes(schedule):
        assert all(len(ended) == len(schedule.ops) for ended in first)


OWN_MEMORY: dict[str, object] = {"host_memory": "own"}


@pytest.mark.parametrize(
    ("policy", "options"),
    [(policy, {}) for policy in ("ddp", "zero-1", "zero-2", "zero-3", "fsdp", "fsdp-offload", "zero-offload")]
    + [("fsdp", {"reshard": "off"}), ("harmony-dp", OWN_MEMORY)],
)
@pytest.mark.parametrize("num", [2, 3])
def test_parts_of_ranks_are_alike_and_whole(policy: str, options: dict[str, object], num: int) -> None:
    """Together they hold what the schedule's buffers do, but for what is rounded up."""
    count = 2 * num if policy.startswith("harmony") else 2
    workload = toy_workload(2, tied=False, gradient_accumulation_steps=count, max_grad_norm=1.0)
    schedule = lower(decide(policy, workload, devices(num), options), workload, devices(num))
    parts = [rank_schedule(schedule, r) for r in range(num)]
    assert all([op.key for op in part.ops] == [op.key for op in parts[0].ops] for part in parts)
    sizes = zip(*([b.size_bytes for b in part.buffers] for part in parts), strict=True)
    assert all(of_ranks[0] == max(of_ranks) for of_ranks in sizes)
    states = [b.size_bytes for part in parts for b in part.buffers if b.kind == "states" and b.initial]
    copies = num if policy == "ddp" else 1
    assert sum(states) == copies * sum(workload.training.states_bytes(unit) for unit in workload.units)
    held, of_all = (sum(b.size_bytes for part in which for b in part.buffers) for which in (parts, [schedule]))
    assert 0 <= held - of_all < num * len(schedule.buffers)


@pytest.mark.parametrize(("policy", "options"), [("megatron-tp", {}), ("harmony", {"devices": 2}), ("mobius", {})])
def test_devices_that_do_not_do_alike_are_refused(policy: str, options: dict[str, object]) -> None:
    workload = toy_workload(4, tied=False, gradient_accumulation_steps=2)
    schedule = lower(decide(policy, workload, devices(2), options), workload, devices(2))
    with pytest.raises(RankError, match="does not do the same on each of its devices"):
        rank_schedule(schedule, 1)


@pytest.mark.sampled
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("policy", "options", "clip"),
    [("megatron-pp", {}, 1.0)]
    + [
        ("harmony-pp", {**OWN_MEMORY, "pack": b, "pack_forward": f}, clip)
        for b, f in [(1, 1), (2, 1), (2, 3)]
        for clip in (None, 1.0)
    ],
)
def test_stages_are_whole_and_complete_together(
    policy: str, options: dict[str, object], clip: float | None, tied: bool
) -> None:
    ring, workload = devices(3), toy_workload(6, tied=tied, gradient_accumulation_steps=4, max_grad_norm=clip)
    names = ("gpu1.p2p.gpu0", "gpu2.p2p.gpu1", "gpu0.p2p.gpu2")  # the other way round
    links = [replace(ring.stream("gpu0.p2p.gpu1"), name=name) for name in names]
    machine = replace(ring, streams=(*ring.streams, *links))
    schedule = lower(decide(policy, workload, machine, options), workload, machine)
    parts, sends = [rank_schedule(schedule, r) for r in range(3)], set(ends_of_sends(schedule))
    keys = [op.key for part in parts for op in part.ops]
    assert set(keys) == {op.key for op in schedule.ops}
    assert all(keys.count(key) == (2 if key in sends else 1) for key in set(keys))
    assert sum(len(part.buffers) for part in parts) == len(schedule.buffers)
    assert set(stages(schedule).values()) == {0, 1, 2}
    joint = sends | {op.key for op in schedule.ops if op.kind == "clip"}
    for seed in range(2):
        for part, ended in zip(parts, execute_together(parts, joint, seed), strict=True):
            assert ended == {op.key for op in part.ops}
    joined = joined_trace([(simulate_on(part, machine), 0) for part in parts])
    assert {span.key: span.stream for span in joined.spans} == {op.key: op.stream for op in schedule.ops}


@pytest.mark.parametrize("tied", [False, True])
def test_stages_share_the_host_by_what_each_needs(tied: bool) -> None:
    """As the search says that executes each part with more and less of it."""
    workload, machine = toy_workload(3, tied=tied, gradient_accumulation_steps=4), devices(2)
    schedule = lower(decide("harmony-pp", workload, machine, {**OWN_MEMORY, "pack": 1}), workload, machine)

    def parts(host_bytes: int) -> list[Schedule]:
        tiers = [replace(t, capacity_bytes=host_bytes) if t.name == "host" else t for t in schedule.tiers]
        return [rank_schedule(replace(schedule, tiers=tuple(tiers)), r) for r in range(2)]

    needs = [smallest_capacity_bytes(unroll(part, 2), "host") or 0 for part in parts(1 << 50)]
    enough = sum(needs) * 101 // 100
    assert max(needs) > enough // 2
    shares = [next(t.capacity_bytes for t in part.tiers if t.name == "host") for part in parts(enough)]
    assert all(need <= share for need, share in zip(needs, shares, strict=True))
    assert sum(shares) <= enough
    with pytest.raises(RankError, match=r"has stages that need .* bytes in tier 'host', .* Raise the capacity"):
        parts(sum(needs) * 99 // 100)


def test_traces_of_ranks_are_one_of_their_schedule() -> None:
    """On one time axis, with the bytes of all."""
    workload = toy_workload(2, gradient_accumulation_steps=2, max_grad_norm=1.0)
    schedule = lower(decide("fsdp-offload", workload, devices(2)), workload, devices(2))
    own = [rank_schedule(schedule, r) for r in range(2)]
    traces = [replace(simulate_on(s, devices(2)), meta={"bytes_per_step": s.bytes_moved()}) for s in own]
    joined = joined_trace([(traces[0], 1_000), (traces[1], 1_500)])
    assert joined.meta["bytes_per_step"] == schedule.bytes_moved()
    assert {span.key: span.stream for span in joined.spans} == {op.key: op.stream for op in schedule.ops}
    assert joined.peak_bytes["gpu1"] == traces[1].peak_bytes["gpu0"]
    own, late = traces[1].by_key(), joined.by_key()
    assert late["fwd/L0/mb0/gpu1"].start_ns == own["fwd/L0/mb0/gpu0"].start_ns + 500
