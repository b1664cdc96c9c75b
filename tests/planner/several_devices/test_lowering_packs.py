"""Packs and paged weights on two devices, op by op: what each transfer waits for, and what passes between devices."""

from __future__ import annotations

import itertools
import random
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pytest

from tests.planner.test_plan import devices
from tests.toys import MIB, side_by_side, toy_machine, toy_workload
from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import parse_stream
from tierplan.planner.lowering import lower
from tierplan.planner.plan import PackPlan, Packs, PagedPlan
from tierplan.planner.plan_rules import PlanError, lent_units, updatable_packs
from tierplan.planner.policies import decide
from tierplan.planner.policies.several.megatron import even_stages
from tierplan.planner.prediction import predict_plan
from tierplan.planner.several_devices.packs.estimate import PackEstimate, PackSizes
from tierplan.runtime.execution.executor import Executor
from tierplan.sim.analysis.steady import steady_state
from tierplan.sim.columns import columns_of, unroll
from tierplan.sim.compiled.simulation import simulate_columns
from tierplan.sim.pricing import simulate_on
from tierplan.sim.schedule import Op, Schedule, ScheduleError
from tierplan.sim.workloads.workload import Workload

BLOCK = 3 * MIB
"""Parameters of a block of the toy workload."""
WORKLOAD = toy_workload(4, tied=False, gradient_accumulation_steps=4)
"""embed, L0, L1, L2, L3, head."""


def packed(form: str, forward: Any, backward: Any, **more: Any) -> dict[str, Op]:
    packs = Packs(form=form, devices=2, forward=forward, backward=backward, **more)  # type: ignore[arg-type]
    schedule = lower(PackPlan(policy="test", packs=packs), WORKLOAD, devices(2))
    return {op.key: op for op in schedule.ops}


def test_inputs_come_one_micro_batch_ahead_of_compute() -> None:
    """Two buffers: one is in use, and the other is filled when the micro-batch before the last has left it."""
    ops = packed("pipeline", ((0, 2), (2, 4)), ((0, 2), (2, 4), (4, 6)))
    assert ops["send_y/L1/mb2"].after == ("fwd/L1-L2/mb0",)
    assert ops["send_y/L1/mb3"].after == ("fwd/L1-L2/mb1",)
    assert ops["send_y/L1/mb3"].stream == "gpu0.p2p.gpu1"


@pytest.mark.parametrize("late", [False, True])
def test_frozen_parameters_come_with_a_pack_and_have_neither_gradients_nor_states(late: bool) -> None:
    """A tenth of each block is trained, the ends not at all; each pack's parameters come twice, the last one's once."""
    units = [
        replace(u, num_frozen=u.num_parameters * (9 if u.kind == "block" else 10) // 10, frozen_bytes=u.num_parameters)
        for u in WORKLOAD.units
    ]
    workload = replace(WORKLOAD, units=tuple(units))
    packs = Packs(form="pipeline", devices=2, forward=((0, 2), (2, 4)), backward=((0, 2), (2, 4), (4, 6)), streams=True,
                  late_updates=late)  # fmt: skip
    schedule = lower(PackPlan(policy="test", packs=packs), workload, devices(2))
    whole = [2 * u.num_trained + u.frozen_bytes for u in units]
    moved = {buffer.name: buffer.size_bytes for buffer in schedule.buffers}
    brought = [op for op in schedule.ops if op.key.startswith(("fetch_params", "fetch_frozen"))]
    assert sum(moved[op.writes[0]] for op in brought) == 2 * sum(whole[:4]) + sum(whole[4:])
    trained = [u for u in units if u.num_trained]
    assert sum(op.work["bytes"] for op in schedule.ops if op.key.startswith("offload_grads")) == sum(
        2 * u.num_trained for u in trained
    )
    updates = {op.key: op.work for op in schedule.ops if op.kind == "update"}
    assert updates == {f"update/{u.name}": {"parameters": u.num_trained} for u in trained}
    assert steady_state(columns_of(schedule), devices(2)).period_s > 0


@pytest.mark.parametrize("goes_on", [False, True])
def test_gradients_of_several_rounds_wait_for_a_late_update_whichever_devices_made_them(goes_on: bool) -> None:
    """Five turns a round: each pack is on another device in the second round, whose sums are those of the first."""
    packs = Packs(form="pipeline", devices=2, forward=((0, 2), (2, 4)), backward=((0, 2), (2, 4), (4, 6)), rounds=2,
                  streams=True, late_updates=True, goes_on=goes_on)  # fmt: skip
    schedule = lower(PackPlan(policy="test", packs=packs), WORKLOAD, devices(2))
    sums = [b for b in schedule.buffers if b.kind == "grads" and b.initial]
    assert sorted(b.becomes or "" for b in schedule.buffers if b.kind == "grads" and b.becomes) == sorted(
        b.name for b in sums
    )
    assert len(sums) == 3
    assert steady_state(schedule, devices(2)).period_s > 0


def test_a_stash_that_another_device_will_use_passes_through_host_memory_for_all_devices_at_once() -> None:
    """L0 goes forward on the second device and backward on the first: read and written, at the shared rate."""
    forward, backward = ((0, 1), (1, 3)), ((0, 1), (1, 2), (2, 3), (3, 6))
    ops = packed("pipeline", forward, backward, host_copy_bytes_per_s=1e9)
    assert ops["offload_stash/L0/mb0"].stream == "gpu1.d2h"
    assert ops["fetch_stash/L0/mb0"].stream == "gpu0.h2d"
    assert ops["pass_stash/L0/mb0"].work == {"s": 2 * MIB * 2 / 1e9}
    assert "pass_stash/L1/mb0" not in ops, "the same device takes it both ways"
    assert not any(key.startswith("pass_stash/") for key in packed("pipeline", forward, backward))


def test_gradients_of_data_parallel_packs_are_all_reduced_in_a_ring() -> None:
    """Each device sends 2 (N - 1) / N of the gradients, which is all of them for N = 2."""
    ops = packed("data", ((0, 2), (2, 4)), ((0, 2), (2, 4), (4, 6)))
    for gpu in range(2):
        reduced = ops[f"all_reduce/L1-L2/gpu{gpu}"]
        assert reduced.work == {"ring2_bytes": 2 * BLOCK * 2, "hops": 2}
        assert reduced.stream == f"gpu{gpu}.collective"
    assert ops["update/L1"].work == {"parameters": BLOCK}


def test_paged_weights_are_all_reduced_and_updated_on_every_device() -> None:
    plan = PagedPlan(policy="test", devices=2)
    ops = {op.key: op for op in lower(plan, WORKLOAD, devices(2)).ops}
    for gpu in range(2):
        assert ops[f"all_reduce/L1/gpu{gpu}"].work == {"ring2_bytes": BLOCK * 2, "hops": 2}
        assert ops[f"update/L1/gpu{gpu}"].work == {"elementwise_bytes": 30 * BLOCK}
    used = [key for key in ops if key.startswith("fetch_params/L1/")]
    assert len(used) == 4 * 2 + 2, "once forward and once backward per micro-batch, and once per device to be updated"


ROUNDS: dict[str, Any] = dict(rounds=2, streams=True)
FORWARD, BACKWARD = ((0, 2), (2, 5)), ((0, 2), (2, 4), (4, 5), (5, 6))


def test_rounds_take_their_part_of_the_micro_batches_and_add_gradients_up() -> None:
    ops = packed("pipeline", FORWARD, BACKWARD, **ROUNDS)
    assert ops["fwd/embed-L0/mb2"].stream == "gpu0.compute", "the seventh turn of six per round"
    brought = next(op for key, op in ops.items() if key.startswith("fetch_grads/L1-L2/"))
    assert brought.work == {"bytes": 2 * BLOCK * 2}, "the second round adds to the first one's sum"
    assert sum(key.startswith("update/L1") for key in ops) == 1
    assert sum(key.startswith("offload_grads/L1-L2/") for key in ops) == 2


def test_the_next_packs_parameters_come_while_this_one_computes() -> None:
    ops = packed("pipeline", FORWARD, BACKWARD, **ROUNDS)
    (fetch,) = (op for key, op in ops.items() if key.startswith("fetch_params/L3/bwd/L3-L3/") and key.endswith("mb0"))
    assert fetch.after == ("fwd/L3-L3/mb0",), "when the first micro-batch has gone through"


def test_late_updates_use_the_gradients_of_the_step_before_and_nothing_waits_for_them() -> None:
    packs = Packs(form="pipeline", devices=2, forward=FORWARD, backward=BACKWARD, streams=True, late_updates=True)
    plan = PackPlan(policy="t", packs=packs)
    assert plan.semantics == "delayed-1"
    schedule = lower(plan, WORKLOAD, devices(2))
    buffers = schedule.buffers_by_name()
    update = next(op for op in schedule.ops if op.key == "update/L1")
    assert all(buffers[name].initial for name in update.reads)
    used = {name for op in schedule.ops if op.key.startswith("fetch_params/") for name in op.reads}
    assert all(buffers[name].initial for name in used), "passes use the parameters of before"
    late = steady_state(columns_of(schedule), devices(2)).period_s
    sync = PackPlan(policy="t", packs=replace(plan.packs, late_updates=False))
    assert late < steady_state(columns_of(lower(sync, WORKLOAD, devices(2))), devices(2)).period_s
    with pytest.raises(PlanError, match="late updates need 'pipeline'"):
        replace(plan, packs=replace(plan.packs, form="data")).check(WORKLOAD)
    with pytest.raises(PlanError, match="3 rounds, which do not divide the step's 4"):
        replace(plan, packs=replace(plan.packs, rounds=3)).check(WORKLOAD)


def equal_packs(*, devices: int, num_forward: int = 5, goes_on: bool) -> PackPlan:
    """Of six units that take a second each way; the last of the forward packs has those that are left."""
    ends = [*range(num_forward), 5]
    packs = Packs(
        form="pipeline", devices=devices, forward=tuple(pairwise(ends)), backward=tuple(pairwise(range(7))),
        streams=True, late_updates=True, goes_on=goes_on,
    )  # fmt: skip
    return PackPlan(policy="t", packs=packs)


def seconds_each() -> Workload:
    units = [replace(u, forward={"s": 1.0}, backward={}, num_parameters=1000) for u in WORKLOAD.units]
    return replace(WORKLOAD, units=tuple(units))


@pytest.mark.parametrize("machine", [devices(2), side_by_side(toy_machine(), 2), side_by_side(toy_machine(), 3)])
def test_the_next_step_goes_on_behind_the_device_where_the_last_one_ended(machine: Machine) -> None:
    """Eleven packs of a second with four micro-batches: 44 s by the devices, and not all that the first one begins.

    Without peers, activations pass through host memory, which no update holds back that waits for the last gradient.
    """
    workload, num = seconds_each(), machine.num_devices
    on, anew = (predict_plan(equal_packs(devices=num, goes_on=goes_on), workload, machine) for goes_on in (True, False))
    assert on.schedule is not None
    assert on.steady is not None
    assert on.phases is not None
    assert on.schedule.next_devices == tuple((d + 11) % num for d in range(num))
    assert on.step_s == pytest.approx(11 * 4 / num, rel=0.005)
    assert anew.step_s is not None
    assert anew.step_s >= -(-11 // num) * 4
    for gpu in map("gpu{}".format, range(num)):
        assert on.utilization[f"{gpu}.compute"] == pytest.approx(1.0, rel=0.005)
        assert on.utilization[f"{gpu}.h2d"] == pytest.approx(on.utilization["gpu0.h2d"])
    moved = on.columns.bytes_moved()  # type: ignore[union-attr]
    assert moved["gpu0.h2d"] == pytest.approx(moved[f"gpu{num - 1}.h2d"], abs=1)
    assert sum(moved.values()) == pytest.approx(sum(on.schedule.bytes_moved().values()), abs=len(moved))
    assert sum(asdict(on.phases).values()) == pytest.approx(on.step_s)
    assert on.phases.forward_s == pytest.approx(on.step_s * 5 / 11, rel=0.01)
    assert on.steady.trace.peak_bytes == on.steady.peak_bytes
    ends_ns = [
        max(s.end_ns for s in on.steady.trace.spans if s.key.startswith(f"s{k}/")) for k in range(on.steady.num_steps)
    ]
    assert on.steady.step_ends_s == tuple(ns / 1e9 for ns in ends_ns)


def test_devices_that_a_step_does_not_come_to_work_in_the_next_ones() -> None:
    """One pack and three devices: with all of them twice as fast, a step takes half as long."""
    packs = Packs(
        form="pipeline", devices=3, forward=(), backward=((0, 6),), streams=True, late_updates=True, goes_on=True
    )
    plan = PackPlan(policy="t", packs=packs)
    found = predict_plan(plan, seconds_each(), side_by_side(toy_machine(), 3))
    assert found.schedule is not None
    assert found.schedule.next_devices == (1, 2, 0)
    assert {parse_stream(name).device for name in found.schedule.streams} == {0, None}
    assert found.utilization["gpu0.compute"] == found.utilization["gpu2.compute"] > 0
    by_name = {limit.name: limit for limit in found.limits}
    assert by_name["gpu*.compute"].gain_frac == pytest.approx(0.5, rel=0.02)


def test_packs_that_come_out_even_begin_on_the_first_device_anyhow() -> None:
    workload, machine = seconds_each(), devices(2)
    on, anew = (lower(equal_packs(devices=2, num_forward=4, goes_on=g), workload, machine) for g in (True, False))
    assert on == anew
    assert on.next_devices == ()


def test_going_on_is_for_pipelines_on_one_host_memory_and_is_not_executed() -> None:
    plan = equal_packs(devices=2, goes_on=True)
    with pytest.raises(PlanError, match="goes on where a step ended, but has form 'data' and own_memory=False"):
        replace(plan, packs=replace(plan.packs, form="data", late_updates=False)).check(WORKLOAD)
    with pytest.raises(ScheduleError, match=r"has next_devices, .*: this is simulated, and not executed"):
        Executor(lower(plan, WORKLOAD, devices(2)), body=lambda call: None).run(2)


TIED = toy_workload(4, gradient_accumulation_steps=4)
OWN_HEAD = replace(TIED.units[-1], shares=None, num_parameters=1024 + 10 * MIB)
UNTIED = replace(TIED, units=(*TIED.units[:-1], OWN_HEAD))
"""With a head of its own, whose backward makes as large a gradient."""
LATE: dict[str, Any] = dict(rounds=4, streams=True, late_updates=True, goes_on=True)


@pytest.mark.parametrize(
    ("form", "more", "num_rounds", "clip"),
    [
        ("pipeline", LATE, 4, None),  # which does not clip
        *((form, {}, 1, clip) for form in ("pipeline", "data") for clip in (None, 0.5)),
        *((form, ROUNDS, 2, clip) for form in ("pipeline", "data") for clip in (None, 0.5)),
    ],
)
def test_a_tied_heads_gradient_goes_to_host_memory_and_is_added_there(
    form: Any, more: dict[str, Any], num_rounds: int, clip: float | None
) -> None:
    """Bytes by hand: 2 (P + E) leave in each round, and come again in all but the first. They are those of a head that
    has its own matrix. The estimate knows them, and not that the host adds them up."""
    num, used = TIED.num_parameters + 10 * MIB, 2 if form == "data" and num_rounds == 1 else 1
    packs = Packs(form=form, devices=used if form == "data" else 2, forward=FORWARD, backward=BACKWARD,
                  hold_updates=clip is not None, **more)  # fmt: skip
    for workload in (TIED, UNTIED):
        clipped = replace(workload, training=replace(workload.training, max_grad_norm=clip))
        plan = PackPlan(policy="t", packs=packs)
        schedule = lower(plan, clipped, devices(2))
        gone, come = bytes_of(schedule, "grads", "d2h"), bytes_of(schedule, "grads", "h2d")
        assert (gone, come) == (2 * num * num_rounds * used, 2 * num * (num_rounds - 1) * used)
        reduced = sum(op.work["ring2_bytes"] for op in schedule.ops if op.kind == "all_reduce")
        assert reduced == (2 * num * used if used > 1 else 0)
        estimated_s = PackEstimate(clipped, devices(2)).step_s(packs)
        assert packs.devices == 1 or workload is UNTIED or estimated_s < steady_state(schedule, devices(2)).period_s
        if workload is TIED:
            ops, buffers = {op.key: op for op in schedule.ops}, schedule.buffers_by_name()
            added = ops["accumulate/embed"]
            assert added.work == {"elementwise_bytes": 3 * 2 * 10 * MIB}
            assert sum(buffers[name].content == "tied/embed/mb0" for name in added.reads) == used
            assert added.writes[0] in ops["update/embed"].reads
            assert not clip or added.writes[0] in ops["norm/embed"].reads
            made = [op for op in schedule.ops if op.kind == "backward" and op.unit == "head"]
            held = [[buffers[name].size_bytes for name in op.writes if "tied" in name] for op in made]
            assert held == [[2 * 10 * MIB]] * 4, "one sum, to which each micro-batch adds"
    tied, own = PackSizes(TIED), PackSizes(UNTIED)
    for phase, first in itertools.product(("fwd", "bwd"), range(1, 6)):
        assert tied.held_bytes(phase, first, 6) == own.held_bytes(phase, first, 6)
        assert tied.held_bytes(phase, 0, 6) == own.held_bytes(phase, 0, 6) - 2 * 10 * MIB * (2 if phase == "bwd" else 1)


def test_a_tied_head_pages_the_embeddings_parameters_and_gradients() -> None:
    """Bytes by hand, with 4 micro-batches on 2 devices: P + E twice for each, and P to be updated on each; gradients
    come when something has been added to them, and for the update."""
    num, tied = TIED.num_parameters, TIED.num_parameters + 10 * MIB
    schedule = lower(PagedPlan(policy="test", devices=2), TIED, devices(2))
    params = [bytes_of(schedule, "params", link) for link in ("h2d", "d2h")]
    grads = [bytes_of(schedule, "grads", link) for link in ("h2d", "d2h")]
    assert params == [2 * (4 * 2 * tied + 2 * num)] * 2
    assert grads == [2 * (4 * tied - 2 * num) + 2 * 2 * num, 2 * 4 * tied]


def bytes_of(schedule: Schedule, kind: str, link: str) -> float:
    buffers = schedule.buffers_by_name()
    copies = [op for op in schedule.ops if op.stream.endswith(link) and buffers[op.reads[0]].kind == kind]
    return sum(op.work["bytes"] for op in copies)


@pytest.mark.parametrize("optimizer", ["sgd:momentum=0.9", "sgd:momentum=0"])
def test_late_updates_without_a_master_copy_read_the_parameters_and_make_new_ones(optimizer: str) -> None:
    training = {"optimizer": optimizer, "master_weights": False, "gradient_accumulation_steps": 4}
    workload = toy_workload(4, tied=False, **training)
    schedule = lower(decide("roundpipe", workload, devices(2)), workload, devices(2))
    updates = {op.unit: op for op in schedule.ops if op.kind == "update"}
    assert updates.keys() == {unit.name for unit in workload.units}
    contents = {b.name: b.content for b in schedule.buffers}
    for unit, op in updates.items():
        assert f"params/{unit}" in {contents[name] for name in op.reads}
        assert f"params/{unit}" in {contents[name] for name in op.writes}


@pytest.mark.parametrize("rounds", [2, 4])
def test_rounds_of_data_parallel_packs_are_for_one_device(rounds: int) -> None:
    """On two, a round may be without a micro-batch of one of them, and the sums of both would be in one place."""
    packs = Packs(form="data", devices=2, forward=FORWARD, backward=BACKWARD, rounds=rounds)
    with pytest.raises(PlanError, match=f"{rounds} rounds of data-parallel packs on 2 devices, but rounds add up"):
        lower(PackPlan(policy="t", packs=packs), WORKLOAD, devices(2))
    assert lower(PackPlan(policy="t", packs=replace(packs, devices=1)), WORKLOAD, devices(2)).ops


@pytest.mark.parametrize("policy", ["harmony-dp", "harmony-pp", "mobius", "roundpipe-sync"])
@pytest.mark.parametrize("memory", ["shared", "own"])
def test_with_clipping_updates_wait_for_the_norms_of_all_gradients(policy: str, memory: str) -> None:
    """And the step needs more time and host memory than without."""
    options = {"host_memory": memory, "pack": 2} if policy.startswith("harmony") else {}
    clipped = toy_workload(4, tied=False, gradient_accumulation_steps=4, max_grad_norm=0.5)
    plan = decide(policy, clipped, devices(2), options)
    assert plan.semantics == "exact-clip"
    schedule = lower(plan, clipped, devices(2))
    trace, norms, clips = (
        simulate_on(schedule, devices(2)),
        *({op.key: op for op in schedule.ops if op.kind == kind} for kind in ("norm", "clip")),
    )
    spans = {span.key: span for span in trace.spans}
    assert {op.unit for op in norms.values()} == {unit.name for unit in clipped.units}
    made = {name for op in clips.values() for name in op.writes}
    for op in schedule.ops:
        if op.kind == "update":
            assert made & set(op.reads)
            assert spans[op.key].start_ns >= max(spans[key].end_ns for key in norms)
    free = simulate_on(lower(decide(policy, WORKLOAD, devices(2), options), WORKLOAD, devices(2)), devices(2))
    assert trace.duration_s > free.duration_s
    assert trace.peak_bytes["host"] > free.peak_bytes["host"]


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("more", [{}, {"streams": True}, {"own_memory": True}, {"rounds": 2, "streams": True}])
def test_states_come_to_the_device_of_a_pack_between_the_next_ones_micro_batches(
    clip: float | None, dtype: str, more: dict[str, Any]
) -> None:
    """Bytes by hand: of two packs of three, states come and go, and new parameters go, where old ones come if there is
    no copy of them among the states. Their gradients never leave, or where updates are held, they come back."""
    workload = toy_workload(4, tied=False, gradient_accumulation_steps=4, max_grad_norm=clip, dtype=dtype)
    training, here = workload.training, (0, 1, 2, 3)
    packs = Packs(form="pipeline", devices=2, forward=((0, 2), (2, 4)), backward=((0, 2), (2, 4), (4, 6)),
                  hold_updates=clip is not None, updates_here=here, state_shards=3, **more)  # fmt: skip
    schedule, hosts = (
        lower(PackPlan(policy="t", packs=each), workload, devices(2))
        for each in (packs, replace(packs, updates_here=(), state_shards=1))
    )
    states_bytes = sum(training.states_bytes(workload.units[u]) for u in here)
    params_bytes, grads_bytes = (
        sum(workload.units[u].num_trained for u in here) * each for each in (training.param_bytes, training.grad_bytes)
    )

    def more_of(kind: str, link: str) -> float:
        return bytes_of(schedule, kind, link) - bytes_of(hosts, kind, link)

    assert {more_of("states", link) for link in ("h2d", "d2h")} == {states_bytes}
    old_bytes = 0 if training.has_master else params_bytes
    assert (more_of("params", "h2d"), more_of("params", "d2h")) == (old_bytes, params_bytes)
    assert (more_of("grads", "h2d"), more_of("grads", "d2h")) == ((grads_bytes, 0) if clip else (0, -grads_bytes))
    updates = [op for op in schedule.ops if op.kind == "update"]
    assert {op.unit for op in updates if op.stream == "host.adam"} == {unit.name for unit in workload.units[4:]}
    spans = {span.key: span for span in simulate_on(schedule, devices(2)).spans}
    for d in (0, 1):  # at most two parts of states are there at once
        ended = [spans[op.key].end_ns for op in updates if op.stream == f"gpu{d}.compute"]
        came = [spans[op.key].start_ns for op in schedule.ops if op.stream == f"gpu{d}.h2d" and "states" in op.key]
        assert len(ended) == len(came) == 2 * 3
        assert all(start >= end for start, end in zip(came[2:], ended, strict=False))


@pytest.mark.parametrize("seed", range(20))
def test_random_packs_with_updates_anywhere_take_as_long_in_both_engines(seed: int) -> None:
    rng = random.Random(seed)
    clip, accumulation, blocks = rng.choice((None, 0.5)), rng.choice((2, 4, 6)), rng.randint(2, 6)
    workload = toy_workload(
        blocks, tied=rng.random() < 0.3, gradient_accumulation_steps=accumulation, max_grad_norm=clip,
        dtype=rng.choice(("bf16", "fp32")),
    )  # fmt: skip

    def runs(end: int) -> tuple[tuple[int, int], ...]:
        cuts = sorted(rng.sample(range(1, end), rng.randint(0, end - 1))) if end > 1 else []
        return tuple(pairwise((0, *cuts, end)))

    backward = runs(blocks + 2)
    some = [pack for pack in updatable_packs(backward, lent_units(workload)) if rng.random() < 0.5]
    here = tuple(u for a, b in some for u in range(a, b))
    more: dict[str, Any] = {"own_memory": True}
    if rng.random() < 0.6:
        more = {"streams": rng.random() < 0.7, "rounds": rng.choice((1, 2)), "goes_on": rng.random() < 0.5}
    packs = Packs(form="pipeline", devices=rng.choice((1, 2)), forward=runs(end) if (end := backward[-1][0]) else (),
                  backward=backward, hold_updates=clip is not None, updates_here=here,
                  state_shards=rng.randint(1, 5) if here else 1, **more)  # fmt: skip
    three = unroll(lower(PackPlan(policy="t", packs=packs), workload, devices(2)), 3)
    ends = sorted(span.end_ns for span in simulate_on(three, devices(2)).spans)
    assert ends == sorted(simulate_columns(columns_of(three), devices(2)).end_ns)


def test_packs_hold_updates_where_training_clips_and_never_late_ones() -> None:
    clipped = toy_workload(4, tied=False, gradient_accumulation_steps=4, max_grad_norm=0.5)
    packs = Packs(form="pipeline", devices=2, forward=FORWARD, backward=BACKWARD, streams=True, hold_updates=True)
    for late, workload in [(False, WORKLOAD), (True, clipped)]:
        with pytest.raises(PlanError, match=f"late_updates={late} and max_grad_norm .*; hold updates where training"):
            PackPlan(policy="t", packs=replace(packs, late_updates=late)).check(workload)
    for policy in ("roundpipe", "virtual-memory"):
        with pytest.raises(PlanError, match=r"asks for clipping at norm 0\.5; use .* packs that hold updates"):
            lower(decide(policy, clipped, devices(2)), clipped, devices(2))


def test_one_forward_one_backward_takes_as_long_as_the_papers_say() -> None:
    """(M + n - 1) times a stage's forward, recomputation and backward, where links and updates cost next to nothing."""
    works = {"block": ({"s": 1.0}, {"s": 2.0})}
    units = [
        replace(u, forward=dict(works.get(u.kind, ({}, {}))[0]), backward=dict(works.get(u.kind, ({}, {}))[1]))
        for u in WORKLOAD.units
    ]
    workload = replace(WORKLOAD, units=tuple(units))
    stages = ((0, 3), (3, 6))
    plan = PackPlan(policy="t", packs=Packs(form="resident", devices=2, forward=stages[:-1], backward=stages))
    schedule = lower(plan, workload, devices(2))
    assert simulate_on(schedule, devices(2)).duration_s == pytest.approx((4 + 2 - 1) * 2 * (1 + 1 + 2), rel=0.02)
    keeping = replace(plan, packs=replace(plan.packs, kept=(1, 2, 4)))
    kept = lower(keeping, workload, devices(2))
    assert simulate_on(kept, devices(2)).duration_s == pytest.approx(2 + 4 * (2 * (1 + 2) + 1) + 4, rel=0.02)
    assert {op.unit for op in kept.ops if op.kind == "recompute"} == {workload.units[3].name}
    each_has_two = replace(plan.packs, forward=((0, 2), (2, 3), (3, 4)), backward=((0, 2), (2, 3), (3, 4), (4, 6)))
    interleaved = lower(replace(plan, packs=each_has_two), workload, devices(2))
    fills_s = (2 - 1) * 2 * (1 + 1 + 2) / 2  # a half of the pipeline's, with twice as many stages
    assert simulate_on(interleaved, devices(2)).duration_s == pytest.approx(4 * 2 * (1 + 1 + 2) + fills_s, rel=0.02)
    at_home = replace(plan.packs, forward=((0, 2), (2, 4)), backward=((0, 2), (2, 4), (4, 6)), kept=(1, 2, 3, 4))
    home_s = simulate_on(lower(replace(plan, packs=at_home), workload, devices(2)), devices(2)).duration_s
    assert 4 * 2 * (1 + 2) + 1 + 2 <= home_s < 0.95 * (4 + 2 - 1) * 2 * (1 + 2)  # a block's fill, and less than before
    first = [op.key for op in schedule.ops if op.unit == "embed"]
    assert first[:5] == [
        f"{key}/embed/mb{m}" for key, m in (("fwd", 0), ("fwd", 1), ("bwd", 0), ("fwd", 2), ("bwd", 1))
    ]
    with pytest.raises(PlanError, match="2 stages for 3 devices"):
        replace(plan, packs=replace(plan.packs, devices=3)).check(workload)
    with pytest.raises(PlanError, match=r"5 stages for 3 devices .* at most one stage more"):
        replace(plan, packs=replace(each_has_two, devices=3, backward=tuple((k, k + 1) for k in range(5)))).check(
            workload
        )
    three = replace(WORKLOAD, training=replace(WORKLOAD.training, gradient_accumulation_steps=3))
    with pytest.raises(PlanError, match=r"4 stages for 2 devices and 3 micro-batches; .* a multiple of the devices"):
        replace(plan, packs=each_has_two).check(three)
    for wrong in (replace(keeping.packs, form="pipeline"), replace(keeping.packs, kept=(0,))):
        with pytest.raises(PlanError, match=r"only blocks, in form 'resident', can keep theirs \(4 of 6 units"):
            replace(plan, packs=wrong).check(workload)
    states = {"host_states": (1, 4), "updates_here": (4,)}
    for wrong in (
        replace(plan.packs, form="pipeline", **states),
        replace(plan.packs, host_states=(6,)),
        replace(plan.packs, updates_here=(1,)),
        replace(plan.packs, host_states=(1,), state_shards=2),
        replace(plan.packs, form="pipeline", updates_here=(1,)),
        replace(plan.packs, form="pipeline", updates_here=(3, 4, 5), late_updates=True),
    ):
        with pytest.raises(
            PlanError, match=r"on devices, in [12] parts, in packs of form .*; name some of the 6 units, in form 'res"
        ):
            replace(plan, packs=wrong).check(workload)


def test_a_round_of_mobius_begins_when_the_one_before_has_left() -> None:
    plan = decide("mobius", WORKLOAD, devices(2))
    assert (plan.packs.rounds, plan.packs.flushes) == (2, True)  # type: ignore[union-attr]
    spans = {span.key: span for span in simulate_on(lower(plan, WORKLOAD, devices(2)), devices(2)).spans}
    backward = [span.end_ns for key, span in spans.items() if key.startswith("bwd/") and key[-1] in "01"]
    assert min(s.start_ns for key, s in spans.items() if key.startswith("fwd/") and key[-1] in "23") >= max(backward)


def test_megatrons_stages_have_fewer_blocks_at_the_ends() -> None:
    assert [b - a for a, b in even_stages(28, 8)] == [2 + 1, 4, 4, 4, 4, 4, 4, 2 + 1]
    assert [b - a for a, b in even_stages(32, 8)] == [5, *[4] * 6, 5]
    assert even_stages(4, 2) == ((0, 3), (3, 6))
    assert [b - a for a, b in even_stages(7, 5)] == [1, 2, 2, 2, 2]
    assert [b - a for a, b in even_stages(8, 7)] == [1 + 1, 1, 1, 2, 1, 1, 1 + 1]
    for num, blocks in itertools.combinations(range(1, 50), 2):
        stages = even_stages(blocks, num)
        assert [0, *(b for _, b in stages)] == [*(a for a, _ in stages), blocks + 2]
        assert all(a < b for a, b in stages)
