"""What a tied head makes of the embedding's gradient waits for the embedding's backward: on the device or in host
memory."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from math import inf

import pytest

from tests.toys import MIB, toy_machine, toy_workload, uniform_plan
from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import D2H, DEVICE
from tierplan.hwmodels.scaling import with_capacity, with_faster
from tierplan.planner.lowering import lower
from tierplan.planner.milp.amounts import problem
from tierplan.planner.milp.bounds import lower_bound
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.planner.plan_rules import Order, PlanError
from tierplan.planner.planning import plan
from tierplan.planner.prediction import predict_plan
from tierplan.planner.search.local.moves import untied, with_tied
from tierplan.sim.workloads.workload import Workload

TIED_MIB = 20
"""Of the toy's embedding."""


def least_mib(plan: UnitwisePlan, workload: Workload) -> int:
    """Of device memory, with which the plan runs."""

    def fits(mib: int) -> bool:
        return predict_plan(plan, workload, with_capacity(toy_machine(), {"gpu0": mib * MIB})).fits

    return bisect_left(range(1000), True, key=fits)


@pytest.mark.parametrize(("order", "num", "fewer"), [("vertical", 4, 3), ("vertical", 2, 1), ("horizontal", 4, 0)])
def test_a_turn_needs_room_for_one_on_the_device_where_they_wait_in_host_memory(
    order: Order, num: int, fewer: int
) -> None:
    """Rather than for one of each micro-batch: at the head's backward the one it makes, at the embedding's its own."""
    workload = toy_workload(3, gradient_accumulation_steps=num)
    plan = uniform_plan(workload, UnitPlan(params="host", states="host", grads="host", acts="recompute"), order=order)
    plan = replace(plan, prefetch_acts_units=0, prefetch_params_units=0)
    in_host = with_tied(plan, workload, "host")
    assert least_mib(plan, workload) - least_mib(in_host, workload) == pytest.approx(fewer * TIED_MIB, abs=1)
    ops = [op.key for op in lower(in_host, workload, toy_machine()).ops if "tied" in op.key]
    assert sorted(ops) == sorted(
        key for m in range(num) for key in (f"offload_tied/embed/mb{m}/head", f"fetch_tied/embed/mb{m}")
    )


def test_where_they_cannot_wait_is_refused() -> None:
    workload = toy_workload(2, gradient_accumulation_steps=2)
    block = replace(uniform_plan(workload, UnitPlan()), units=(UnitPlan(tied_grads="host"),) * 4)
    with pytest.raises(PlanError, match="'embed' has tied_grads='host', but makes no gradient of another unit's"):
        lower(block, workload, toy_machine())
    summed = uniform_plan(workload, UnitPlan(), order="vertical", sums_tied=True)
    with pytest.raises(PlanError, match=r"sums tied gradients.* leave out sums_tied or tied_grads"):
        lower(with_tied(summed, workload, "host"), workload, toy_machine())
    first, in_host, _ = untied(summed, workload)
    assert first == replace(summed, sums_tied=False)
    assert in_host.units[-1].tied_grads == "host"  # type: ignore[union-attr]


def test_the_planner_has_them_wait_in_host_memory_where_the_device_lacks_room() -> None:
    """So that all micro-batches go through a unit at once, and its parameters and states come once."""
    workload = toy_workload(6, gradient_accumulation_steps=6)
    machine = with_capacity(toy_machine(), {DEVICE: 110 * MIB})
    found = plan(workload, machine, orders=["vertical"]).plan
    assert isinstance(found, UnitwisePlan)
    assert found.units[-1].tied_grads == "host"
    assert least_mib(with_tied(found, workload, "device"), workload) > 110 >= least_mib(found, workload)


def with_second_sharer(*, shares: bool = True, work_mib: int = 1) -> Workload:
    """As in T5, an embedding of the decoder's between blocks; those before it have this work space."""
    embed, *blocks, head = toy_workload(6, gradient_accumulation_steps=6).units
    before = [replace(unit, backward_work_bytes=work_mib * MIB) for unit in blocks[:4]]
    used = head.shares if shares else None
    between = replace(head, name="between", kind="block", shares=used, saved=(), output_bytes=MIB)
    units = (embed, *before, between, *blocks[4:], head)
    return replace(toy_workload(6, gradient_accumulation_steps=6), units=units)


def bound_s(workload: Workload, mib: int, *, of: Machine | None = None) -> float:
    machine = with_capacity(of or toy_machine(), {DEVICE: mib * MIB})
    return lower_bound(problem(workload, machine, semantics="in-backward", order="vertical")).step_s


def test_the_bound_has_the_time_of_their_copies() -> None:
    """Where the device has room for one of them, a further micro-batch takes the link at least its copy's time."""
    slow = with_faster(toy_machine(), [D2H], 0.005)
    copy_s, least_s = TIED_MIB * MIB / slow.stream(D2H).rates["bytes"].points[0][1], list[float]()
    for num in (2, 4):
        workload = toy_workload(3, gradient_accumulation_steps=num)
        each_s = [bound_s(workload, mib, of=slow) for mib in range(40, 50)]
        least_s.append(next(s for s in each_s if s < inf))
    assert least_s[1] - least_s[0] >= 2 * copy_s


def test_plans_whose_decoder_uses_the_embedding_too_are_above_the_bound() -> None:
    workload = with_second_sharer()
    choice = UnitPlan(params="host", states="host", grads="host", acts="recompute")
    plan = uniform_plan(workload, choice, order="vertical", prefetch_acts_units=0, prefetch_params_units=0)
    in_host = with_tied(plan, workload, "host")
    least = least_mib(in_host, workload)
    step_s = predict_plan(in_host, workload, with_capacity(toy_machine(), {DEVICE: least * MIB})).step_s
    assert step_s is not None
    assert bound_s(workload, least) <= step_s


def test_the_bound_has_no_more_room_where_two_units_use_the_embedding() -> None:
    """Each micro-batch has one sum of tied gradients that waits, to which the second unit adds."""
    at_least_s, has_s = (bound_s(with_second_sharer(shares=shares, work_mib=60), 90) for shares in (False, True))
    assert has_s >= at_least_s * (1 - 1e-6)
    assert bound_s(with_second_sharer(work_mib=60), 70) == inf
