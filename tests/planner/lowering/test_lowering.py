"""Lowering: every combination of places gives a valid schedule that runs, and moves exactly the bytes that it must."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from tests.toys import MIB, toy_machine, toy_workload, uniform_plan, with_blocks
from tierplan.planner.lowering import lower
from tierplan.planner.lowering.listing import compute_order
from tierplan.planner.lowering.tiling import cut_batches, cut_operators
from tierplan.planner.milp.amounts import problem
from tierplan.planner.plan import GradientsByLink, UnitPlan, UnitwisePlan
from tierplan.planner.plan_rules import PlanError
from tierplan.sim.analysis.completion import OutOfMemory
from tierplan.sim.columns import unroll
from tierplan.sim.pricing import simulate_on
from tierplan.sim.schedule import validate
from tierplan.sim.step import Action
from tierplan.sim.workloads.workload import Workload

PLACES = ("device", "host", "nvme")
MIXED = ("keep", "recompute", "host", "nvme")


def combinations() -> list[tuple[str, ...]]:
    return [
        (params, grads, states)
        for params, grads, states in product(PLACES, PLACES, PLACES)
        if states != "device" or (params, grads) == ("device", "device")
    ]


@pytest.mark.parametrize(("params", "grads", "states"), combinations())
@pytest.mark.parametrize("order", ["horizontal", "vertical"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_every_combination_of_places_runs_two_steps(
    params: str, grads: str, states: str, order: str, micro_batches: int
) -> None:
    for dtype, semantics, acts in product(
        ("bf16", "fp32"), ("in-backward", "exact-clip", "delayed-1"), ("host", MIXED)
    ):
        if semantics == "delayed-1" and (states == "device" or grads == "nvme"):
            continue
        workload = toy_workload(
            2,
            dtype="bf16",
            master_weights=dtype == "bf16",
            gradient_accumulation_steps=micro_batches,
            max_grad_norm=1.0 if semantics == "exact-clip" else None,
        )
        choice = UnitPlan(params=params, grads=grads, states=states, acts=acts, input="host")  # type: ignore[arg-type]
        schedule = lower(uniform_plan(workload, choice, semantics=semantics, order=order), workload, toy_machine())
        two = validate(unroll(schedule, 2))
        trace = simulate_on(two, toy_machine())
        assert len(trace.spans) == 2 * len(schedule.ops)


def test_every_initial_buffer_has_a_successor() -> None:
    workload = toy_workload()
    for params, grads, states in combinations():
        choice = UnitPlan(params=params, grads=grads, states=states)  # type: ignore[arg-type]
        schedule = lower(uniform_plan(workload, choice), workload, toy_machine())
        initial = {b.name for b in schedule.buffers if b.initial}
        assert {b.becomes for b in schedule.buffers if b.becomes} == initial


def test_everything_on_nvme_moves_the_bytes_of_the_closed_form() -> None:
    """bf16 with a master copy: 2 + 2 (parameters, twice) and 12 (states) read, 12 + 2 written, 4 up, 2 down."""
    workload = toy_workload(tied=False)
    schedule = lower(
        uniform_plan(workload, UnitPlan(params="nvme", grads="host", states="nvme")), workload, toy_machine()
    )
    blocks = {u.name: u.num_parameters for u in workload.blocks}
    moved: dict[str, float] = {}
    for op in schedule.ops:
        if op.unit in blocks:
            moved[op.stream] = moved.get(op.stream, 0) + op.work.get("bytes", 0)
    total = sum(blocks.values())
    per_parameter = {stream: amount / total for stream, amount in moved.items() if amount}
    assert per_parameter == {"gpu0.h2d": 4, "gpu0.d2h": 2, "nvme.read": 16, "nvme.write": 14}


def test_the_refined_order_keeps_streams_and_never_needs_more_memory() -> None:
    """The refined order completes in whatever memory the plain order needs one op at a time."""
    workload = toy_workload(6)
    choice = UnitPlan(params="nvme", grads="host", states="nvme", acts=MIXED, input="nvme")
    plan = uniform_plan(workload, choice)
    plain = lower(plan, workload, toy_machine(), refine=False)
    refined = lower(plan, workload, toy_machine())
    for stream in plain.streams:
        assert [o.key for o in plain.ops if o.stream == stream] == [o.key for o in refined.ops if o.stream == stream]
    least, completes = MIB, False
    while not completes:  # the least device memory in which the plain order completes
        machine = toy_machine(device_bytes=least)
        try:
            simulate_on(lower(plan, workload, machine, refine=False), machine)
            completes = True
        except OutOfMemory as short:
            least = short.needed_bytes or 2 * least
    trace = simulate_on(lower(plan, workload, machine), machine)
    assert trace.peak_bytes["gpu0"] <= least


def test_compute_visits_each_unit_once_per_micro_batch_and_direction() -> None:
    for is_vertical in (False, True):
        turns = list(zip(*(column.tolist() for column in compute_order(is_vertical, 5, 2, 0)), strict=True))
        assert sorted(turns) == sorted(product((False, True), range(5), range(2)))
    assert turns[:4] == [(False, 0, 0), (False, 0, 1), (False, 1, 0), (False, 1, 1)]
    assert turns[8:12] == [(False, 4, 0), (True, 4, 0), (False, 4, 1), (True, 4, 1)]


@pytest.mark.parametrize(("window", "read_before", "fetch_before"), [(0, 5, 6), (1, 4, 5), (2, 2, 4)])
def test_reads_come_a_window_before_the_fetches_that_need_them(
    window: int, read_before: int, fetch_before: int
) -> None:
    """The link works a window ahead of compute, and the drive as far ahead of the link; at least a unit each."""
    workload = toy_workload(8, tied=False)
    choice = UnitPlan(params="nvme", grads="host", states="host")
    plan = uniform_plan(workload, choice, prefetch_params_units=window)
    keys = [op.key for op in lower(plan, workload, toy_machine(), refine=False).ops]

    def next_forward(key: str) -> str:
        return next(k for k in keys[keys.index(key) :] if k.startswith("fwd/"))

    assert next_forward("read_params/L6/fwd/mb0") == f"fwd/L{read_before}/mb0"
    assert next_forward("fetch_params/L6/fwd/mb0") == f"fwd/L{fetch_before}/mb0"


def test_strict_windows_make_fetches_wait_for_the_turn_before_their_window() -> None:
    workload = toy_workload(8, tied=False)
    choice = UnitPlan(params="nvme", grads="host", states="host")
    plan = uniform_plan(workload, choice, prefetch_params_units=1, strict_windows=True)
    after = {op.key: op.after for op in lower(plan, workload, toy_machine()).ops}
    assert after["fetch_params/L6/fwd/mb0"] == ("fwd/L4/mb0",)
    assert after["read_params/L6/fwd/mb0"] == ("fwd/L3/mb0",)
    assert after["fetch_params/embed/fwd/mb0"] == ()


def test_windows_bound_how_many_units_are_on_the_device_at_once() -> None:
    """With window w, parameters of at most w + 2 units are there: the one that computes, the next, and w more."""
    workload = toy_workload(12, tied=False)
    for window in (0, 1, 3):
        plan = uniform_plan(
            workload, UnitPlan(params="host", grads="host", states="host"), prefetch_params_units=window
        )
        schedule = lower(plan, workload, toy_machine(), refine=False)
        held = peak = 0
        for event in simulate_on(schedule, toy_machine()).memory:
            if (event.tier, event.kind) == ("gpu0", "params") and abs(event.delta_bytes) == 6 * MIB:
                held += event.delta_bytes
                peak = max(peak, held)
        assert peak == 6 * MIB * (window + 2)


AWAY = UnitPlan(grads="host", states="host", late_update=True)


def in_shards(plan: UnitwisePlan, num_shards: int) -> UnitwisePlan:
    return replace(plan, units=tuple(replace(unit, state_shards=num_shards) for unit in plan.units))


@pytest.mark.parametrize("params", PLACES)
@pytest.mark.parametrize("grads", PLACES)
@pytest.mark.parametrize("order", ["horizontal", "vertical"])
def test_states_in_shards_move_the_same_bytes_and_run_two_steps(params: str, grads: str, order: str) -> None:
    for semantics, late, settings in (
        ("in-backward", False, {}),
        ("in-backward", True, {"write_back": "delayed"}),
        ("exact-clip", False, {"hold_updates": True, "strict_windows": True}),
        ("exact-clip", True, {"late_writes": 1}),
        ("exact-clip", False, {"write_back": "awaited", "updates_in_flight": 1, "by_link": GradientsByLink()}),
        ("delayed-1", False, {}),
    ):
        if grads == "nvme" and (late or semantics == "delayed-1"):
            continue
        workload = toy_workload(
            2, gradient_accumulation_steps=2, max_grad_norm=1.0 if semantics == "exact-clip" else None
        )
        choice = UnitPlan(params=params, grads=grads, states="nvme", late_update=late)  # type: ignore[arg-type]
        whole = uniform_plan(workload, choice, semantics=semantics, order=order, **settings)
        split = lower(in_shards(whole, 3), workload, toy_machine())
        assert len(simulate_on(validate(unroll(split, 2)), toy_machine()).spans) == 2 * len(split.ops)
        assert split.bytes_moved() == lower(whole, workload, toy_machine()).bytes_moved()
        assert sum(op.kind == "update" and op.unit == "L1" for op in split.ops) == 3
        assert sum(op.work["parameters"] for op in split.ops if op.kind == "update" and op.unit == "L1") == 3 * MIB


def test_within_a_unit_parts_are_read_updated_and_written_at_once() -> None:
    """Reading takes 18.9 ms, the update 6.3, writing 37.7: one after the other, or all but the ends beside writing."""
    workload = toy_workload(1, tied=False, max_grad_norm=1.0)
    plan = uniform_plan(workload, UnitPlan(), semantics="exact-clip", hold_updates=True)
    read_s, update_s, write_s = (3 * MIB * amount for amount in (12 / 2e9, 1 / 5e8, 12 / 1e9))
    for num_shards in (1, 2, 4):
        on_drive = UnitPlan(grads="host", states="nvme", state_shards=num_shards)
        split = lower(replace(plan, units=(plan.units[0], on_drive, plan.units[2])), workload, toy_machine())
        spans = [s for s in simulate_on(split, toy_machine()).spans if "states/L0" in s.key]
        taken_s = (max(s.end_ns for s in spans) - min(s.start_ns for s in spans)) / 1e9
        assert taken_s == pytest.approx((read_s + update_s) / num_shards + write_s)


@pytest.mark.parametrize("num_shards", [2, 4, 8])
def test_two_shards_at_a_time_are_in_host_memory(num_shards: int) -> None:
    """The one that is updated and the next, beside the unit's gradients and new parameters, which are whole."""
    workload = toy_workload(6, tied=False)
    plan = in_shards(uniform_plan(workload, UnitPlan(params="device", grads="device", states="nvme")), num_shards)
    low, high = 1, 1000
    while low < high:
        middle = (low + high) // 2
        machine = toy_machine(host_bytes=middle * MIB)
        try:
            simulate_on(unroll(lower(plan, workload, machine), 2), machine)
            high = middle
        except RuntimeError:
            low = middle + 1
    states_mib, rest_mib = 10 * 12, 10 * (2 + 2)  # of embed, the largest
    assert low == rest_mib + 2 * states_mib / num_shards


def test_parts_are_for_states_on_nvme() -> None:
    workload = toy_workload()
    with pytest.raises(PlanError, match="only states on 'nvme' travel in shards"):
        lower(uniform_plan(workload, UnitPlan(states="host", state_shards=2)), workload, toy_machine())
    with pytest.raises(PlanError, match="in 0 shards"):
        in_shards(uniform_plan(workload, UnitPlan(states="nvme")), 0).check(workload)


def test_a_plan_that_contradicts_itself_is_refused() -> None:
    workload = toy_workload()
    with pytest.raises(PlanError, match="update on the device needs all three there"):
        lower(uniform_plan(workload, UnitPlan(params="host", states="device")), workload, toy_machine())
    with pytest.raises(PlanError, match="has 6; make the plan"):
        lower(UnitwisePlan(policy="short", units=(UnitPlan(),)), workload, toy_machine())
    clipped = toy_workload(max_grad_norm=1.0)
    with pytest.raises(PlanError, match="exact-clip"):
        lower(uniform_plan(clipped, UnitPlan()), clipped, toy_machine())
    with pytest.raises(PlanError, match="delayed"):
        lower(uniform_plan(workload, UnitPlan(), semantics="delayed-1"), workload, toy_machine())


@pytest.mark.parametrize(
    ("choice", "settings", "message"),
    [
        (UnitPlan(late_update=True), {}, "updated late with gradients in 'device' and states in 'device'"),
        (UnitPlan(grads="nvme", states="nvme", late_update=True), {}, "updated late with gradients in 'nvme'"),
        (AWAY, {"semantics": "delayed-1"}, "updated late, but the plan's semantics are 'delayed-1'"),
        (replace(AWAY, late_update=False), {"semantics": "delayed-1", "hold_updates": True}, "holds updates until"),
        (replace(AWAY, late_update=False), {"hold_updates": True}, "holds updates until"),
        (
            AWAY,
            {"late_writes": 1, "updates_in_flight": 2},
            "late_writes=1, updates_in_flight=2 and write_back='at once'",
        ),
        (AWAY, {"late_writes": 2, "write_back": "awaited"}, "leave out late_writes, or the other two"),
    ],
)
def test_updates_at_two_times_are_refused(choice: UnitPlan, settings: dict[str, object], message: str) -> None:
    workload = toy_workload()
    units = (choice,) * len(workload.units)
    with pytest.raises(PlanError, match=message):
        lower(UnitwisePlan(policy="test", units=units, **settings), workload, toy_machine())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("unit", "whole", "message"),
    [
        ({"params": "nvm"}, {}, "unit 'embed': params is 'nvm'; it must be one of device, host, nvme"),
        ({"grads": "keep"}, {}, "unit 'embed': grads is 'keep'"),
        ({"states": "disk"}, {}, "unit 'embed': states is 'disk'"),
        ({"input": "recompute"}, {}, "input is 'recompute'; it must be one of keep, host, nvme"),
        ({"acts": "drop"}, {}, "acts is 'drop'; it must be one of keep, recompute, host, nvme"),
        ({}, {"semantics": "lazy"}, "semantics is 'lazy'; it must be one of in-backward, exact-clip, delayed-1"),
        ({}, {"order": "diagonal"}, "order is 'diagonal'"),
        ({}, {"write_back": "never"}, "write_back is 'never'"),
        ({}, {"update_order": "random"}, "update_order is 'random'"),
        ({}, {"prefetch_params_units": -1}, "prefetch_params_units is -1; it must be a whole number >= 0"),
        ({}, {"updates_in_flight": 1.5}, "updates_in_flight is 1.5; it must be a whole number"),
        ({}, {"sub_batches": 0}, "sub_batches is 0; it must be a whole number >= 1"),
        ({}, {"segment_units": 0}, "segment_units is 0"),
        ({}, {"devices": 0}, "devices is 0"),
    ],
)
def test_a_word_or_number_that_no_plan_may_have_is_named(
    unit: dict[str, object], whole: dict[str, object], message: str
) -> None:
    workload = toy_workload()
    plan = uniform_plan(workload, UnitPlan(**unit), **whole)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=message):
        lower(plan, workload, toy_machine())


def contents_read(workload: Workload, acts: object, key: str) -> set[str]:
    """Contents of the buffers that an op reads, parameters left out, where blocks have these actions."""
    schedule = lower(uniform_plan(workload, UnitPlan(acts=acts)), workload, toy_machine())  # type: ignore[arg-type]
    buffers = schedule.buffers_by_name()
    (reads,) = [op.reads for op in schedule.ops if op.key == key]
    return {buffers[name].content for name in reads if buffers[name].kind != "params"}


def test_small_tensors_that_go_to_one_place_are_one_copy() -> None:
    """Up to a MiB together; what is larger, or goes elsewhere, is a copy of its own."""
    sizes = [MIB // 4, MIB // 2, MIB, MIB // 4, MIB // 8, MIB // 4, MIB // 2]
    actions: tuple[Action, ...] = ("host", "nvme", "host", "host", "nvme", "host", "host")
    workload = toy_workload(1, slots=len(sizes))
    saved = tuple(replace(t, size_bytes=size) for t, size in zip(workload.blocks[0].saved, sizes, strict=True))
    workload = with_blocks(workload, saved=saved)
    moved = ["0+3+5", "1+4", "2", "6"]
    assert contents_read(workload, actions, "bwd/L0/mb0") >= {f"acts/L0/mb0/{indices}" for indices in moved}
    schedule = lower(uniform_plan(workload, UnitPlan(acts=actions)), workload, toy_machine())
    found = {b.content: b.size_bytes for b in schedule.buffers if b.content.startswith("acts/L0/mb0/")}
    assert found["acts/L0/mb0/0+3+5"] == 3 * MIB // 4
    offloads = [op.key for op in schedule.ops if op.key.startswith("offload_acts/L0")]
    assert offloads == [f"offload_acts/L0/mb0/{indices}" for indices in moved]


def test_an_input_stays_for_backward_or_for_what_is_made_from_it_again() -> None:
    workload = toy_workload(slots=2)
    without = with_blocks(workload, saves_input=False)
    assert "x/L1/mb0" in contents_read(workload, "keep", "bwd/L1/mb0")
    assert "x/L1/mb0" not in contents_read(without, "keep", "bwd/L1/mb0")
    assert "x/L1/mb0" in contents_read(without, "recompute", "recompute/L1/mb0")


def test_segments_are_made_again_as_a_whole_from_their_first_input_the_last_one_shorter() -> None:
    workload = toy_workload(6)
    plan = uniform_plan(workload, UnitPlan(acts="recompute", input="host"), segment_units=4)
    schedule = lower(plan, workload, toy_machine(), refine=False)
    again = [op.key.removesuffix("/mb0") for op in schedule.ops if op.key.startswith(("recompute/", "bwd/L"))]
    assert again == [
        *("recompute/L4", "recompute/L5", "bwd/L5", "bwd/L4"),
        *("recompute/L0", "recompute/L1", "recompute/L2", "recompute/L3"),
        *("bwd/L3", "bwd/L2", "bwd/L1", "bwd/L0"),
    ]
    moved = [op.key for op in schedule.ops if op.key.startswith("offload_x/")]
    assert moved == ["offload_x/L0/mb0", "offload_x/L4/mb0"]


def test_a_whole_block_is_made_again_by_its_forward_unless_less_is_known_to_do() -> None:
    def work(recompute: dict[str, float] | None) -> dict[str, float]:
        workload = with_blocks(toy_workload(2), recompute=recompute)
        schedule = lower(uniform_plan(workload, UnitPlan(acts="recompute")), workload, toy_machine())
        return dict(next(op.work for op in schedule.ops if op.key == "recompute/L1/mb0"))

    assert work(None) == {"matmul_bf16_flops": 1e9}
    assert work({"matmul_bf16_flops": 7e8}) == {"matmul_bf16_flops": 7e8}


def test_forward_holds_what_it_drops_until_it_ends() -> None:
    workload = toy_workload(slots=3)
    schedule = lower(uniform_plan(workload, UnitPlan(acts=("recompute", "keep", "recompute"))), workload, toy_machine())
    sizes = {b.content: b.size_bytes for b in schedule.buffers}
    assert sizes["work/fwd/L1/mb0"] == workload.units[2].forward_work_bytes + 2 * MIB
    assert sizes["acts/L1/mb0/re"] == 2 * MIB


def test_a_tensor_is_made_again_from_those_kept_but_a_whole_block_from_its_input() -> None:
    workload, key = toy_workload(slots=2), "recompute/L1/mb0"
    assert contents_read(workload, ("recompute", "keep"), key) == {"x/L1/mb0", "shared/mb0", "acts/L1/mb0/keep"}
    assert contents_read(workload, ("recompute", "host"), key) == {"x/L1/mb0", "shared/mb0", "acts/L1/mb0/1"}
    assert contents_read(workload, "recompute", key) == {"x/L1/mb0", "shared/mb0"}


def test_what_draws_random_numbers_is_made_by_running_the_whole_block_again() -> None:
    def work(dropped: int) -> dict[str, float]:
        workload = toy_workload(slots=3)
        saved = tuple(replace(t, replayable=t.index != 1) for t in workload.units[1].saved)
        workload = with_blocks(workload, saved=saved)
        acts = tuple("recompute" if k == dropped else "keep" for k in range(3))
        schedule = lower(uniform_plan(workload, UnitPlan(acts=acts)), workload, toy_machine())  # type: ignore[arg-type]
        return dict(next(op.work for op in schedule.ops if op.key == "recompute/L1/mb0"))

    assert work(0) == {"matmul_bf16_flops": 1e8}
    assert work(1) == {"matmul_bf16_flops": 1e9}


@pytest.mark.parametrize("segment_units", [1, 2])
def test_what_is_made_again_needs_the_parameters_even_where_backward_does_not(segment_units: int) -> None:
    workload = with_blocks(toy_workload(4), saves_parameters=False)

    def read_params(acts: Action, **settings: int) -> set[str]:
        plan = uniform_plan(workload, UnitPlan(params="host", states="host", grads="host", acts=acts), **settings)
        schedule = lower(plan, workload, toy_machine())
        on_device = {b.name for b in schedule.buffers if b.content == "params/L1" and b.tier == "gpu0"}
        return {op.kind for op in schedule.ops if op.unit == "L1" and on_device & set(op.reads)}

    assert read_params("keep") == {"forward"}
    assert read_params("recompute", segment_units=segment_units) >= {"forward", "recompute"}


@pytest.mark.parametrize("pieces", [{"order": "vertical", "sub_batches": 4}, {"operator_tiles": 4}])
def test_a_measured_recomputation_is_cut_with_its_unit(pieces: dict[str, object]) -> None:
    """Four pieces recompute what the whole does, in the schedule and in the program: none pays for the unit."""
    workload = toy_workload(per_device_train_batch_size=4)
    saved = tuple(replace(t, recompute={"s": 0.8 / 4}) for t in workload.blocks[0].saved)
    workload = with_blocks(workload, recompute={"s": 0.8}, saved=saved)

    def recomputed_s(**settings: object) -> float:
        schedule = lower(uniform_plan(workload, UnitPlan(acts="recompute"), **settings), workload, toy_machine())
        return sum(op.work["s"] for op in schedule.ops if op.kind == "recompute")

    assert recomputed_s(**pieces) == pytest.approx(recomputed_s()) == pytest.approx(4 * 0.8)
    if "sub_batches" in pieces:
        p = problem(workload, toy_machine(), semantics="in-backward", order="vertical", sub_batches=4)
        by_the_program_s = p.turn * sum(g.recompute_s for u in p.units for g in u.groups if g.recomputable)
        assert by_the_program_s == pytest.approx(recomputed_s(**pieces))


def test_a_recomputation_that_was_not_measured_stays_so_when_it_is_cut() -> None:
    workload = toy_workload(per_device_train_batch_size=2)
    assert all(u.recompute is None for cut in (cut_batches, cut_operators) for u in cut(workload, 2).units)
