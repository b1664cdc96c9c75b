"""What devices exchange and hold under each way of dividing a model, against sums made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from tests.planner.test_plan import devices
from tests.toys import toy_workload, uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import Sharing, UnitPlan, UnitwisePlan
from tierplan.planner.plan_rules import Divided, PlanError
from tierplan.planner.policies import decide
from tierplan.planner.prediction import predict
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.candidates import PlanSimulator
from tierplan.sim.pricing import simulate_on
from tierplan.sim.schedule import Op, Schedule

NUM, BATCHES = 4, 3
WORKLOAD = toy_workload(4, tied=False, gradient_accumulation_steps=BATCHES)
PARAMS = sum(unit.num_parameters for unit in WORKLOAD.units)
SIZE = 2 * PARAMS
"""Bytes of all parameters, and of all gradients."""
BORDER = WORKLOAD.blocks[1].input_bytes


def schedule_of(policy: str, **options: object) -> Schedule:
    return lower(decide(policy, WORKLOAD, devices(NUM), options), WORKLOAD, devices(NUM))


def of_one(schedule: Schedule) -> list[Op]:
    """The collectives of one device."""
    return [op for op in schedule.ops if op.stream == "gpu1.collective"]


@pytest.mark.parametrize(
    ("policy", "options", "passes"),
    [
        ("ddp", {}, 2),  # one all-reduce of all gradients
        ("zero-1", {}, 2 + 1),  # gradients all-reduced once, new parameters gathered
        ("zero-1", {"optimizer": "host"}, 2 + 1),
        ("zero-2", {}, 2 * BATCHES + 1),  # all-reduced after each micro-batch
        ("zero-2", {"optimizer": "host"}, 2 * BATCHES + 1),
        ("zero-3", {}, 3 * BATCHES),  # gathered forward and backward, reduced
        ("zero-3", {"optimizer": "host", "params": "host"}, 3 * BATCHES),
        ("fsdp", {}, 3 * BATCHES),
        ("fsdp", {"reduces": "last"}, 2 * BATCHES + 1),
        ("fsdp", {"reshard": "off"}, 2 * BATCHES),  # gathered once for forward and backward
        ("fsdp-offload", {}, 3 * BATCHES),
        ("fsdp", {"reshard": "off", "reduces": "last"}, BATCHES + 1),
        ("in-memory", {}, 2),
        ("in-memory", {"sharing": "fsdp"}, 3 * BATCHES),
        ("zero-offload", {}, 2 * BATCHES + 1),
        ("sliding-window", {}, 2 * BATCHES + BATCHES),
        ("vertical", {}, 3),  # a unit's parameters stay for all micro-batches
    ],
)
def test_each_device_sends_what_the_papers_count(policy: str, options: dict[str, object], passes: int) -> None:
    """`passes` over all parameters, of each of which a device sends the others' share. Embeddings have no backward
    that reads them: their second gather is left out. FSDP's root keeps those of the head, too, for its backward."""
    ops = of_one(schedule_of(policy, **options))
    whole = policy in ("ddp", "zero-1", "zero-2", "zero-offload") or (policy == "in-memory" and not options)
    whole = whole or options.get("reshard") == "off"
    second_gathers = 0 if whole else 1 if policy == "vertical" else BATCHES
    kept = WORKLOAD.units[:1] if policy in ("zero-3", "sliding-window", "vertical") else WORKLOAD.units[:: NUM + 1]
    once = 2 * sum(unit.num_parameters for unit in kept) * second_gathers
    assert sum(op.work[f"ring{NUM}_bytes"] for op in ops) == pytest.approx(
        (passes * SIZE - once) * (NUM - 1) / NUM, 1e-9
    )


def test_tensor_parallel_devices_do_their_share_and_sum_activations_twice_per_half() -> None:
    """Forward, recomputation and backward of a block sum two times each; embedding and head once each."""
    schedule = schedule_of("megatron-tp")
    sums = BATCHES * (3 * 2 * len(WORKLOAD.blocks) + 2)
    ops = of_one(schedule)
    assert sum(op.work[f"ring{NUM}_bytes"] for op in ops) == pytest.approx(2 * sums * BORDER * (NUM - 1) / NUM)
    assert sum(op.work["hops"] for op in ops) == 2 * sums * (NUM - 1)
    one = next(op for op in schedule.ops if op.key == "fwd/L1/mb0/gpu2")
    assert one.work["matmul_bf16_flops"] == WORKLOAD.blocks[1].forward["matmul_bf16_flops"] / NUM
    found = predict("megatron-tp", WORKLOAD, devices(NUM))
    assert found.tokens == WORKLOAD.training.tokens_per_step, "all work on the same micro-batches"


def held(policy: str, kind: str, **options: object) -> int:
    """Bytes of a kind that one device holds before the step."""
    schedule = schedule_of(policy, **options)
    return sum(b.size_bytes for b in schedule.buffers if b.kind == kind and b.tier == "gpu1" and b.initial)


@pytest.mark.parametrize(
    ("policy", "params", "states"),
    [("ddp", 1, 1), ("zero-1", 1, NUM), ("zero-2", 1, NUM), ("zero-3", NUM, NUM), ("fsdp", NUM, NUM),
     ("megatron-tp", NUM, NUM)],
)  # fmt: skip
def test_each_device_holds_its_share(policy: str, params: int, states: int) -> None:
    assert held(policy, "params") == pytest.approx(SIZE / params, abs=NUM * 10)
    assert held(policy, "states") == pytest.approx(12 * PARAMS / states, abs=NUM * 10)


FROZEN_BYTES = 1_000_000


@pytest.mark.parametrize(
    ("policy", "share", "passes"),
    [("ddp", 1, 0), ("zero-2", 1, 0), ("zero-3", NUM, 2), ("fsdp", NUM, 2), ("fsdp-offload", NUM, 2)],
)
def test_a_frozen_base_is_gathered_like_parameters_and_reduced_nowhere(policy: str, share: int, passes: int) -> None:
    """As fsdp_qlora does it: codes lie in shards and are gathered before each forward and backward."""
    units = [
        replace(unit, num_parameters=unit.num_parameters + 10**6, num_frozen=10**6, frozen_bytes=FROZEN_BYTES)
        if unit.kind == "block" else unit
        for unit in WORKLOAD.units
    ]  # fmt: skip
    workload, machine = replace(WORKLOAD, units=tuple(units)), devices(NUM)
    whole, old = (lower(decide(policy, w, machine, {}), w, machine) for w in (workload, WORKLOAD))
    frozen = [b for b in whole.buffers if b.content.startswith("frozen/") and b.initial and b.name.endswith("gpu1")]
    assert sum(b.size_bytes for b in frozen) == len(workload.blocks) * FROZEN_BYTES // share
    moved, before = (sum(op.work[f"ring{NUM}_bytes"] for op in of_one(s)) for s in (whole, old))
    wanted = passes * BATCHES * len(workload.blocks) * FROZEN_BYTES * (NUM - 1) / NUM
    assert moved - before == pytest.approx(wanted)
    assert simulate_on(whole, machine).duration_s > 0


def test_frozen_parameters_off_the_device_are_divided_or_refused() -> None:
    plan = decide("ddp", WORKLOAD, devices(NUM), {})
    assert isinstance(plan, UnitwisePlan)
    away = replace(plan, units=tuple(replace(choice, frozen="host") for choice in plan.units))
    with pytest.raises(PlanError, match="fetches its share alone"):
        lower(away, WORKLOAD, devices(NUM))


@pytest.mark.parametrize("policy", ["zero-2", "zero-3", "fsdp", "fsdp-offload"])
def test_compute_waits_for_collectives_unless_they_overlap(policy: str) -> None:
    waits, beside = (simulate_on(schedule_of(policy, overlap=word), devices(NUM)) for word in ("off", "on"))
    assert waits.duration_s > 1.01 * beside.duration_s


@pytest.mark.parametrize("policy", ["ddp", "zero-1", "zero-2", "zero-3", "fsdp", "fsdp-offload", "megatron-tp"])
def test_several_steps_follow_each_other(policy: str) -> None:
    found = predict(policy, WORKLOAD, devices(NUM))
    assert found.fits, found.why_not
    assert found.devices == NUM


@pytest.mark.parametrize("num", [1, NUM])
def test_zero_infinity_that_offloads_nothing_is_zero_3(num: int) -> None:
    given = {"params": "device", "optimizer": "device", "checkpoints": "device"}
    zero_3, found = (predict(*asked) for asked in (
        ("zero-3", WORKLOAD, devices(num)), ("zero-infinity", WORKLOAD, devices(num), given),
    ))  # fmt: skip
    assert zero_3.steady is not None
    assert found.steady is not None
    assert (found.step_s, found.steady.peak_bytes) == (zero_3.step_s, zero_3.steady.peak_bytes)


def test_parameters_leave_the_device_after_the_optimizer_and_where_they_are_divided() -> None:
    with pytest.raises(PlanError, match="use zero-3 with optimizer=host"):
        decide("zero-2", WORKLOAD, devices(NUM), {"params": "host"})


@pytest.mark.parametrize("divided", get_args(Divided))
def test_what_arithmetic_refuses_does_not_fit_on_several_devices_either(
    monkeypatch: pytest.MonkeyPatch, divided: Divided
) -> None:
    """And what each device has of a model that lies on devices alone is what arithmetic counts: to a byte."""
    plain = decide("in-memory", WORKLOAD, devices(NUM))
    assert isinstance(plain, UnitwisePlan)
    plan = replace(plain, devices=NUM, sharing=Sharing(divided=divided))
    held = [b for b in lower(plan, WORKLOAD, devices(NUM)).buffers if b.initial]
    least = max(sum(b.size_bytes for b in held if b.tier == f"gpu{r}") for r in range(NUM))
    assert least >= WORKLOAD.num_parameters * 14 // NUM
    for device_bytes, is_refused in ((least - 4 * NUM * len(WORKLOAD.units), True), (least, False)):
        tiers = tuple(replace(t, capacity_bytes=device_bytes) if t.kind == "device" else t for t in devices(NUM).tiers)
        simulate_plan = PlanSimulator(WORKLOAD, replace(devices(NUM), tiers=tiers), Budget(1.0))
        assert (simulate_plan._too_large(plan) is not None) == is_refused
        with monkeypatch.context() as patched:
            patched.setattr(simulate_plan, "_too_large", lambda plan: None)
            assert not simulate_plan(plan).fits


def test_parameters_that_are_gathered_ahead_come_beside_the_backward_before() -> None:
    """The same collectives and bytes: but each gather of backward goes before the sum of the gradients of the unit
    behind it, and need not wait for that one's backward."""
    plan = decide("fsdp", WORKLOAD, devices(NUM))
    assert isinstance(plan, UnitwisePlan)
    in_turn, ahead = (
        lower(replace(plan, sharing=replace(plan.sharing, ahead=is_ahead)), WORKLOAD, devices(NUM), refine=False)
        for is_ahead in (False, True)
    )
    assert sorted((op.key, str(op.work), op.after) for op in in_turn.ops) == sorted(
        (op.key, str(op.work), op.after) for op in ahead.ops
    )

    def first_of_two(schedule: Schedule) -> list[str]:
        """Of what L1's gradients and L0's parameters are for, in each micro-batch, which comes first."""
        keys = [op.key for op in of_one(schedule)]
        turns = [f"gather_params/L0/L0/bwd/mb{m}/gpu1" for m in range(BATCHES)]
        sums = [key for key in keys if "reduce" in key and "L1" in key]
        assert len(sums) == BATCHES
        return [min(pair, key=keys.index) for pair in zip(turns, sums, strict=True)]

    assert all("reduce" in key for key in first_of_two(in_turn))
    assert all("gather" in key for key in first_of_two(ahead))
    durations = [simulate_on(schedule, devices(NUM)).duration_s for schedule in (in_turn, ahead)]
    assert durations[1] < durations[0]
    assert simulate_on(ahead, devices(NUM)).peak_bytes["gpu0"] >= simulate_on(in_turn, devices(NUM)).peak_bytes["gpu0"]


def test_only_fsdp_with_shards_in_host_memory_gathers_beside_the_backward_before() -> None:
    """As PyTorch issues it; compute that waits for collectives has nothing to gather beside."""
    given: list[tuple[str, dict[str, object]]] = [
        ("fsdp-offload", {}),
        ("fsdp-offload", {"reduces": "last"}),
        ("fsdp-offload", {"overlap": "off"}),
        ("fsdp", {}),
    ]
    is_ahead = []
    for policy, options in given:
        keys = [op.key for op in of_one(lower(decide(policy, WORKLOAD, devices(NUM), options), WORKLOAD, devices(NUM)))]
        gathered = keys.index("gather_params/L0/L0/bwd/mb0/gpu1")
        is_ahead.append(gathered < min(keys.index(key) for key in keys if "reduce" in key and "L1" in key))
    assert is_ahead == [True, True, False, False]


def test_an_update_on_a_device_comes_behind_the_next_units_turn_beside_which_gradients_are_summed() -> None:
    """Where they are summed at last. On one device nothing is summed, and the update comes at once."""
    plan = uniform_plan(WORKLOAD, UnitPlan())
    several = replace(plan, devices=NUM, sharing=Sharing(ahead=True))
    schedule = lower(several, WORKLOAD, devices(NUM), refine=False)
    keys = [op.key for op in schedule.ops if op.stream in ("gpu1.compute", "gpu1.collective")]
    last = BATCHES - 1
    order = [f"bwd/L1/mb{last}/gpu1", "reduce_grads/L1/mb0/gpu1", f"bwd/L0/mb{last}/gpu1", "update/L1/gpu1"]
    assert [key for key in keys if key in order] == order
    one = [op.key for op in lower(plan, WORKLOAD, devices(NUM), refine=False).ops]
    assert one.index("update/L1") < one.index(f"bwd/L0/mb{last}")
    waiting = lower(replace(several, sharing=Sharing()), WORKLOAD, devices(NUM))
    assert simulate_on(schedule, devices(NUM)).duration_s < simulate_on(waiting, devices(NUM)).duration_s


def test_operators_that_are_cut_gather_nothing_ahead() -> None:
    plan = decide("megatron-tp", WORKLOAD, devices(NUM))
    with pytest.raises(PlanError, match=r"cuts operators, which gather nothing ahead; leave out sharing\.ahead"):
        replace(plan, sharing=replace(plan.sharing, ahead=True)).check(WORKLOAD)  # type: ignore[union-attr,call-arg]
