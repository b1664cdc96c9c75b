"""What happens to gradients and updates, op by op: what each waits for, what it costs, and where it is listed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tests.planner.instances import MB, chain, small_machine
from tests.toys import MIB, toy_machine, toy_workload, uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import GradientsByLink, UnitPlan
from tierplan.sim.analysis.completion import smallest_capacity_bytes
from tierplan.sim.analysis.steady import steady_state
from tierplan.sim.schedule import Op

BLOCK = 3 * MIB
"""Parameters of a block of the toy workload."""
AWAY = UnitPlan(grads="host", states="nvme")


def ops_of(choice: UnitPlan, training: dict[str, Any] | None = None, **settings: object) -> dict[str, Op]:
    """Ops by key, in the order of their positions, for blocks with this choice."""
    workload = toy_workload(8, tied=False, **(training or {}))
    schedule = lower(uniform_plan(workload, choice, **settings), workload, toy_machine(), refine=False)
    return {op.key: op for op in schedule.ops}


# ---- what they wait for ----


@pytest.mark.parametrize(("window", "waits_for"), [(0, ("update/L2",)), (1, ("update/L1",)), (2, ("update/L0",))])
def test_strict_windows_let_states_be_read_so_many_updates_ahead(window: int, waits_for: tuple[str, ...]) -> None:
    ops = ops_of(AWAY, semantics="exact-clip", strict_windows=True, prefetch_states_units=window)
    assert ops["read_states/L3"].after == waits_for


@pytest.mark.parametrize(("most", "waits_for"), [(0, ()), (1, ("write_states/L2",)), (3, ("write_states/L0",))])
def test_updates_in_flight_bound_the_states_between_nvme_and_their_return(
    most: int, waits_for: tuple[str, ...]
) -> None:
    assert ops_of(AWAY, semantics="exact-clip", updates_in_flight=most)["read_states/L3"].after == waits_for


def test_an_awaited_write_back_holds_up_the_next_update() -> None:
    assert ops_of(AWAY, semantics="exact-clip", write_back="awaited")["update/L3"].after == ("write_states/L2",)
    assert ops_of(AWAY, semantics="exact-clip")["update/L3"].after == ()


def test_a_delayed_write_back_comes_behind_the_next_read() -> None:
    assert ops_of(AWAY, semantics="exact-clip", write_back="delayed")["write_states/L2"].after == ("read_states/L3",)
    assert ops_of(AWAY, semantics="exact-clip")["write_states/L2"].after == ()


def test_held_updates_wait_for_the_end_of_backward() -> None:
    ops = ops_of(AWAY, semantics="exact-clip", hold_updates=True)
    assert ops["update/L3"].after == ("bwd/embed/mb0",)
    assert ops["read_states/L3"].after == ("bwd/embed/mb0",)


@pytest.mark.parametrize("states", ["device", "host", "nvme"])
def test_with_clipping_every_update_reads_the_coefficient(states: str) -> None:
    grads = "device" if states == "device" else "host"
    choice = UnitPlan(grads=grads, states=states)  # type: ignore[arg-type]
    ops = ops_of(choice, {"max_grad_norm": 1.0}, semantics="exact-clip")
    updates = [op for key, op in ops.items() if key.startswith("update/")]
    assert len(updates) == 10
    assert all("clip@host#0" in op.reads for op in updates)
    assert sorted(ops["clip"].reads) == sorted(op.writes[0] for key, op in ops.items() if key.startswith("norm/"))


# ---- where they are listed ----


@pytest.mark.parametrize(("window", "following"), [(0, "fwd/L6/mb0"), (1, "fwd/L5/mb0"), (3, "fwd/L3/mb0")])
@pytest.mark.parametrize("semantics", ["in-backward", "exact-clip"])
def test_a_late_update_is_listed_in_time_for_the_fetch_of_its_parameters(
    window: int, following: str, semantics: str
) -> None:
    choice = UnitPlan(params="host", grads="host", states="host", late_update=True)
    training = {"max_grad_norm": 1.0 if semantics == "exact-clip" else None}
    ops = ops_of(choice, training, semantics=semantics, prefetch_params_units=window)
    keys = list(ops)
    assert ("clip@host#0" in ops["update/L6"].reads) == (semantics == "exact-clip")
    assert next(k for k in keys[keys.index("update/L6") :] if k.startswith("fwd/")) == following


@pytest.mark.parametrize("num", [1, 3])
def test_a_late_update_on_the_device_is_spread_over_turns_before_its_forward(num: int) -> None:
    choice = UnitPlan(states="host", update="device", late_update=True, state_shards=4)
    keys = list(ops_of(choice, prefetch_params_units=1, update_over_units=num))
    first, last = (keys.index(f"update/L5/{part}of4") for part in (0, 3))
    assert sum(key.startswith("fwd/") for key in keys[first:last]) == num - 1
    assert next(key for key in keys[last:] if key.startswith("fwd/")) == "fwd/L4/mb0"


@pytest.mark.parametrize("order", ["forward", "backward"])
def test_updates_after_backward_come_in_the_order_that_was_chosen(order: str) -> None:
    keys = [k for k in ops_of(AWAY, semantics="exact-clip", update_order=order) if k.startswith("update/")]
    units = ["embed", *(f"L{i}" for i in range(8)), "head"]
    assert keys == [f"update/{name}" for name in (units if order == "forward" else units[::-1])]


def test_parts_of_delayed_updates_are_spread_over_the_step() -> None:
    """Ten units with parameters over twenty turns: two turns for each update, one for each half of it."""
    choice = UnitPlan(grads="host", states="nvme", state_shards=2)
    keys = list(ops_of(choice, semantics="delayed-1"))
    for unit in ("L0", "L3", "L7"):
        first, second = (keys.index(f"update/{unit}/{part}of2") for part in (0, 1))
        assert sum(key.startswith(("fwd/", "bwd/")) for key in keys[first:second]) == 1


@pytest.mark.parametrize(("num", "turns"), [(1, 0), (2, 1), (3, 2)])
def test_an_update_whose_states_come_is_spread_over_so_many_turns(num: int, turns: int) -> None:
    choice = UnitPlan(states="host", update="device", state_shards=4)
    keys = list(ops_of(choice, update_over_units=num))
    first, last = (keys.index(f"update/L5/{part}of4") for part in (0, 3))
    assert sum(key.startswith("bwd/") for key in keys[first:last]) == turns


# ---- what they cost ----


def test_an_update_on_the_device_reads_and_writes_thirty_bytes_per_parameter() -> None:
    """bf16 with a master copy: 12 of states and 2 of parameters both ways, 2 of gradient."""
    assert ops_of(UnitPlan())["update/L3"].work == {"elementwise_bytes": 30 * BLOCK}


def test_an_accumulation_reads_two_gradients_and_writes_one() -> None:
    ops = ops_of(UnitPlan(grads="host", states="host"), {"gradient_accumulation_steps": 2})
    assert ops["accumulate/L3/mb1"].work == {"elementwise_bytes": 3 * 2 * BLOCK}
    assert "accumulate/L3/mb0" not in ops


def test_a_gradient_is_widened_only_where_it_is_not_fp32() -> None:
    choice = UnitPlan(grads="nvme", states="nvme")
    ops = ops_of(choice, semantics="exact-clip", by_link=GradientsByLink())
    assert ops["cast/L3"].work == {"elementwise_bytes": (2 + 4) * BLOCK}
    assert ops["write_grads/L3"].work == {"bytes": 4 * BLOCK}
    in_fp32 = ops_of(choice, {"dtype": "fp32"}, semantics="exact-clip", by_link=GradientsByLink())
    assert "cast/L3" not in in_fp32
    assert in_fp32["write_grads/L3"].work == {"bytes": 4 * BLOCK}


def test_a_copy_that_moves_fp32_takes_as_long_as_one_of_twice_the_bytes() -> None:
    """With one latency, not with one for its bytes and another for those that it holds the link for."""
    workload, toy = toy_workload(8, tied=False), toy_machine()
    machine = replace(toy, streams=tuple(replace(s, latency_s=0.001) for s in toy.streams))
    plan = uniform_plan(workload, UnitPlan(grads="host", states="host"), fp32_by_link=True)
    op = next(op for op in lower(plan, workload, machine).ops if op.key == "offload_grads/L3/mb0")
    wide = machine.cost(op.stream, {"bytes": 2 * op.work["bytes"]})
    assert machine.cost(op.stream, op.work).alone_s == pytest.approx(wide.alone_s, rel=1e-9)


def test_a_norm_reads_the_gradient_where_it_is() -> None:
    clipped = {"max_grad_norm": 1.0}
    for grads, stream in (("device", "gpu0.compute"), ("host", "host.adam")):
        choice = UnitPlan(grads=grads, states="host" if grads == "host" else "device")  # type: ignore[arg-type]
        norm = ops_of(choice, clipped, semantics="exact-clip")["norm/L3"]
        assert (norm.stream, norm.work) == (stream, {"elementwise_bytes": 2 * BLOCK})


# ---- gradients that add up over the link, as DeepSpeed has it ----


@pytest.mark.parametrize(("accumulation", "returns_first", "up", "down"), [
    (1, False, 0, 4), (3, False, 2 * 2, 3 * 2 + 4), (1, True, 2, 2 + 4), (3, True, 3 * 2, 3 * 2 + 4),
])  # fmt: skip
def test_gradients_that_add_up_over_the_link(accumulation: int, returns_first: bool, up: int, down: int) -> None:
    """Bytes per parameter of `stage_1_and_2.py` (copy_grads_in_partition) and `stage3.py` (partition_grads)."""
    choice, by_link = UnitPlan(grads="host", states="host"), GradientsByLink(returns_first=returns_first)
    ops = ops_of(choice, {"gradient_accumulation_steps": accumulation}, semantics="exact-clip", by_link=by_link)
    moved = {
        stream: sum(op.work["bytes"] for key, op in ops.items() if "grads/L3" in key and op.stream == stream)
        for stream in ("gpu0.h2d", "gpu0.d2h")
    }
    assert moved == {"gpu0.h2d": up * BLOCK, "gpu0.d2h": down * BLOCK}
    assert {op.stream for key, op in ops.items() if key.startswith(("accumulate/", "cast/"))} == {"gpu0.compute"}


@pytest.mark.parametrize(("waits", "waiting"), [
    ("always", {"L3/mb0", "L3/mb1", "embed/mb0", "embed/mb1"}), ("in the last", {"L3/mb1", "embed/mb0", "embed/mb1"}),
    ("at the end", {"embed/mb0", "embed/mb1"}),
])  # fmt: skip
def test_compute_waits_for_gradients_where_the_plan_says(waits: str, waiting: set[str]) -> None:
    choice, by_link = UnitPlan(grads="host", states="host"), GradientsByLink(waits=waits)  # type: ignore[arg-type]
    ops = ops_of(choice, {"gradient_accumulation_steps": 2}, semantics="exact-clip", by_link=by_link)
    found = {key.removeprefix("wait/") for key, op in ops.items() if op.kind == "wait"}
    assert {name for name in found if name.startswith(("L3/", "embed/"))} == waiting


def test_a_slower_copy_of_gradients_holds_the_link_for_longer() -> None:
    """In seconds beside its bytes, which stay as many."""
    choice = UnitPlan(grads="host", states="host")
    quick, slow = (
        ops_of(choice, semantics="exact-clip", by_link=GradientsByLink(slowdown=slowdown))["offload_grads/L3"]
        for slowdown in (1.0, 2.5)
    )
    assert quick.work == {"bytes": 4 * BLOCK}
    assert slow.work == {"bytes": 4 * BLOCK, "s": pytest.approx(1.5 * 4 * BLOCK / 5e9)}


@pytest.mark.parametrize("params", ["device", "host"])
def test_forward_does_not_wait_for_memory_behind_late_updates_that_clip(params: str) -> None:
    """Nor is there so much to hold at once: all gradients, or states of units whose turn is far away."""
    workload = toy_workload(8, gradient_accumulation_steps=2, max_grad_norm=1.0)
    choice = UnitPlan(params=params, grads="host", states="nvme", input="host")  # type: ignore[arg-type]
    found = []
    for is_late in (False, True):
        plan = uniform_plan(workload, replace(choice, late_update=is_late), semantics="exact-clip", order="vertical")
        schedule = lower(plan, workload, toy_machine())
        found.append((steady_state(schedule, toy_machine()).period_s, smallest_capacity_bytes(schedule, "host")))
    (behind_s, behind_bytes), (late_s, late_bytes) = found
    assert behind_bytes is not None
    assert late_bytes is not None
    assert late_s < 0.85 * behind_s
    assert late_bytes < 0.6 * behind_bytes


def test_late_writes_leave_the_drive_to_what_forward_waits_for() -> None:
    """Reads and writes take turns: 1.2 s for the states of a unit, of which writing is half."""
    workload = chain(forward_s=[1.0] * 6, parameters=[10 * MB] * 6, saved_mb=[[5]] * 6, max_grad_norm=1.0)
    machine = small_machine(
        device_mb=100_000, host_mb=100_000, link_mb_per_s=4000, read_mb_per_s=100, write_mb_per_s=100,
        adam_m_per_s=1000, ssd_bonus=0.0,
    )  # fmt: skip
    choice = UnitPlan(grads="host", states="nvme", late_update=True, state_shards=4)
    plan = uniform_plan(workload, choice, semantics="exact-clip")
    steps_s = [
        steady_state(lower(replace(plan, late_writes=num), workload, machine), machine).period_s for num in range(1, 7)
    ]
    assert [before_s - step_s for before_s, step_s in pairwise(steps_s)] == pytest.approx([1.2] * 5, abs=0.01)
