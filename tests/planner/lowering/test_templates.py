"""Templates: a schedule put together from them is what lowering without templates made, and says the same each time."""

from __future__ import annotations

import hashlib
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest

from tests.random_plans import as_first_drawn, random_plan, with_some_in_host, with_updates_here
from tests.toys import MIB, toy_machine, toy_workload
from tierplan.planner.lowering import Lowering, lower, sketch
from tierplan.planner.lowering.sketch import Terms
from tierplan.planner.lowering.templates import Chain
from tierplan.planner.lowering.unitwise import UnitwiseStep
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.planner.plan_rules import PlanError
from tierplan.sim.columns import ScheduleColumns, columns_of
from tierplan.sim.schedule import Schedule, ScheduleError
from tierplan.sim.workloads.workload import Unit, Workload

DIGESTS = {
    (1, None): "099e9dd8fa914baf",
    (1, 1.0): "8ad66f8202be8d38",
    (2, None): "e4ac9f067e32d314",
    (3, 1.0): "8135ce48b78c3d3d",
}
"""Of schedules that the lowering before templates made, by micro-batches and clipping, but for gradients that add up
over the link, which came after it: without them it and this one made the same. It knew neither late updates of exact
clipping nor late writes."""


def random_workload(rng: random.Random, batches: int, clip: float | None) -> Workload:
    """A chain with all that lowering asks a unit about: tied parameters, empty tensors, units without parameters."""
    dtype, has_master, optimizer = rng.choice(
        [("bf16", True, "adamw"), ("fp32", True, "adamw"), ("bf16", False, "sgd"), ("bf16", True, "sgd")]
    )
    workload = toy_workload(
        rng.choice([1, 2, 3, 5]),
        tied=rng.random() < 0.5,
        slots=rng.choice([0, 1, 4]),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=batches,
        max_grad_norm=clip,
        dtype=dtype,
        master_weights=has_master,
        optimizer=optimizer,
    )
    units = tuple(_varied(unit, rng) for unit in workload.units)
    return replace(workload, units=units, shared_bytes=rng.choice([0, 1000]))


def _varied(unit: Unit, rng: random.Random) -> Unit:
    is_block = unit.kind == "block"
    return replace(
        unit,
        num_parameters=rng.choice([0, 1000, 5000, 3 * MIB]) if is_block else unit.num_parameters,
        shares="embed" if is_block and rng.random() < 0.2 else unit.shares,
        saved=tuple(
            replace(t, size_bytes=rng.choice([0, 1, 2]) * MIB, replayable=rng.random() < 0.8) for t in unit.saved
        ),
        saves_input=rng.random() < 0.7,
        saves_parameters=rng.random() < 0.8,
        recompute=rng.choice([None, {"matmul_bf16_flops": 5e8}]),
        forward_work_bytes=rng.choice([0, 7, 100]),
        backward_work_bytes=rng.choice([0, 100]),
        accumulating_work_bytes=rng.choice([100, 200]),
    )


def random_case(number: int, batches: int, clip: float | None) -> tuple[UnitwisePlan, Workload]:
    rng = random.Random(f"{number} {batches} {clip}")
    workload = random_workload(rng, batches, clip)
    plan = random_plan(workload, rng)
    if rng.random() < 0.2:
        plan = replace(plan, sub_batches=rng.choice([2, 4]))
    if rng.random() < 0.2 and plan.segment_units == 1:
        plan = replace(plan, operator_tiles=rng.choice([2, 3]))
    return plan, workload


def written(schedule: Schedule) -> str:
    """Everything but the settings."""
    ops = [
        (*(op.key, op.stream, op.kind, op.unit, op.micro_batch), dict(op.work), op.reads, op.writes, op.after)
        for op in schedule.ops
    ]
    buffers = [
        (*(b.name, b.tier, b.size_bytes, b.content, b.kind), b.initial, b.reuses, b.becomes) for b in schedule.buffers
    ]
    return repr((schedule.name, ops, buffers))


@pytest.mark.parametrize(("batches", "clip"), DIGESTS)
def test_schedules_are_those_of_the_walk_without_templates(
    batches: int, clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which moved each saved tensor by itself."""
    monkeypatch.setattr(sketch, "MOST_TOGETHER_BYTES", 0)

    def digest() -> str:
        found = hashlib.sha256()
        for number in range(60):
            plan, workload = random_case(number, batches, clip)
            found.update(written(lower(as_first_drawn(plan), workload, toy_machine(), refine=False)).encode())
        return found.hexdigest()[:16]

    with ThreadPoolExecutor(1) as thread:  # a thread has templates of its own
        assert thread.submit(digest).result() == DIGESTS[batches, clip]


def test_what_was_drawn_for_other_plans_changes_nothing() -> None:
    rng = random.Random(0)
    workload, machine = random_workload(rng, 2, None), toy_machine()

    def columns() -> ScheduleColumns:
        return Lowering(workload, machine).columns(plan, refine=False)

    for _ in range(40):
        plan = with_updates_here(with_some_in_host(random_plan(workload, rng), rng), rng)
        with ThreadPoolExecutor(1) as thread:  # a thread begins with no templates
            alone = thread.submit(columns).result()
        assert columns().schedule() == alone.schedule()
        assert columns().works == alone.works  # figures are sums over them, in this order


@pytest.mark.parametrize("number", range(20))
def test_a_template_is_what_its_turn_draws_wherever_it_is_placed(number: int) -> None:
    rng = random.Random(number)
    workload = toy_workload(6, slots=2, gradient_accumulation_steps=2)
    plan = random_plan(workload, rng)
    few = plan.units[1:3]
    plan = replace(plan, units=(plan.units[0], *(rng.choice(few) for _ in range(6)), plan.units[-1]))
    terms = Terms(**{name: getattr(plan, name) for name in Terms._fields})
    step = UnitwiseStep(Chain(workload, terms), plan)
    placed = list(step.sketches())
    assert len({template for template, _, _ in placed}) < len(placed)
    for template, draw, _ in placed:
        rows = draw(()).rows()
        assert rows == {name: step.chain.rows_by_name[name].row(template) for name in rows}


def test_columns_have_each_work_once_and_arrays_of_the_types_that_columns_of_a_schedule_have() -> None:
    plan, workload = random_case(3, 2, None)
    columns = Lowering(workload, toy_machine()).columns(plan, refine=False)
    expected = columns_of(lower(plan, workload, toy_machine(), refine=False))
    assert sorted(map(repr, columns.works)) == sorted(map(repr, expected.works))
    for name in ("op_work", "buffer_tier", "buffer_bytes", "buffer_initial", "buffer_reuses", "buffer_becomes"):
        assert getattr(columns, name).dtype == getattr(expected, name).dtype
        assert getattr(columns, name).flags.c_contiguous
    for name in ("reads", "writes", "after"):
        for array, other in zip(getattr(columns, name), getattr(expected, name), strict=True):
            assert array.dtype == other.dtype
            np.testing.assert_array_equal(array, other)


def test_columns_refuse_what_lower_refuses() -> None:
    workload, machine = toy_workload(), toy_machine()
    few = UnitwisePlan(policy="few", units=(UnitPlan(),))
    for refuse in (lambda: lower(few, workload, machine), lambda: Lowering(workload, machine).columns(few)):
        with pytest.raises(PlanError, match="plan 'few' has 1 units"):
            refuse()
    without = replace(machine, tiers=machine.tiers[:2])
    plan = UnitwisePlan(policy="far", units=(UnitPlan(states="nvme", params="host", grads="host"),) * 6)
    with pytest.raises(ScheduleError, match=r"buffer 'states/embed@nvme#0' is in tier 'nvme', which is not declared"):
        Lowering(workload, without).columns(plan)
