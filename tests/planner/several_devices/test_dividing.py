"""Compiled division of a schedule: what it makes of random plans is what it made before."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest

from tests.planner.test_plan import devices
from tests.random_plans import as_first_drawn, random_plan, with_some_in_host, with_updates_here
from tests.toys import toy_workload, uniform_plan
from tierplan.planner.lowering import Lowering, lower
from tierplan.planner.lowering.unitwise import unitwise_step
from tierplan.planner.plan import Sharing, UnitPlan, UnitwisePlan
from tierplan.planner.plan_rules import Divided, PlanError
from tierplan.planner.several_devices.dividing import FORWARD, OF_SHARED, OTHER
from tierplan.planner.several_devices.kinds import kinds_of
from tierplan.sim.columns import ScheduleColumns
from tierplan.sim.contents import States, parse_content, part_of_shard, shard
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training, Workload

DIGESTS = {
    "all": "8a62a49d236579a9",
    "gradients": "db6e64879b63614e",
    "states": "6e5ee95d6888901f",
    "nothing": "48c855c93abbb825",
    "tensors": "218e6fe625a5e36a",
}
"""Of schedules, by what is divided."""
AWAY = ("params", "frozen", "grads", "states")


def drawn(rng: random.Random, divided: str, num: int) -> tuple[UnitwisePlan, Workload]:
    """A plan of so many devices that divide this, and its workload."""
    while True:
        accumulation, is_tied = rng.choice([1, 2, 3]), rng.random() < 0.5
        workload = toy_workload(rng.choice([2, 4]), tied=is_tied, gradient_accumulation_steps=accumulation)
        plan = with_some_in_host(with_updates_here(as_first_drawn(random_plan(workload, rng)), rng), rng)
        if divided in ("gradients", "states", "nothing"):
            stay = AWAY if divided == "nothing" else AWAY[:2]
            plan = replace(plan, units=tuple(replace(u, **dict.fromkeys(stay, "device")) for u in plan.units))
        sharing = Sharing(
            divided=divided,  # type: ignore[arg-type]
            reduces=rng.choice(["last", "each"]),  # type: ignore[arg-type]
            by=rng.choice(["reduce", "all_reduce"]),  # type: ignore[arg-type]
            waits=rng.random() < 0.5,
            keeps=rng.choice(["nothing", "ends", "all"]),  # type: ignore[arg-type]
        )
        plan = replace(plan, devices=num, sharing=sharing)
        try:
            plan.check(workload)
        except PlanError:
            continue
        return plan, workload


def digest(columns: ScheduleColumns) -> bytes:
    lists = [array for of in (columns.reads, columns.writes, columns.after) for array in of]
    of_buffers = (columns.buffer_tier, columns.buffer_bytes, columns.buffer_initial, columns.buffer_reuses)
    arrays = [columns.op_work, *lists, *of_buffers, columns.buffer_becomes]
    works = [(work.stream, dict(work.amounts)) for work in columns.works]
    labels = columns.labels()
    words = repr((columns.tiers, works, labels.name, labels.ops, labels.buffers))
    return b"".join(np.asarray(array, np.int64).tobytes() for array in arrays) + words.encode()


@pytest.mark.parametrize("divided", get_args(Divided))
def test_schedules_of_random_plans_are_what_they_were(divided: str) -> None:
    """On all devices, and on the first that stands for all."""
    rng, found = random.Random(divided), hashlib.sha256()
    for _ in range(25):
        plan, workload = drawn(rng, divided, num := rng.choice([2, 3, 4]))
        lowering = Lowering(workload, devices(num))
        for columns in (lowering.columns(plan, refine=False), lowering.simulated(plan)[0]):
            found.update(digest(columns))
    assert found.hexdigest()[:16] == DIGESTS[divided]


@pytest.mark.parametrize("num", [2, 3, 8])
def test_a_device_has_a_part_of_its_shard_for_each_part_of_the_states(num: int) -> None:
    """As the runtime cuts them: together the shard, and about equal."""
    workload = load_workload("gpt2", Training(dtype="bf16"))
    plan = uniform_plan(
        workload, UnitPlan(params="host", grads="host", states="host", update="device", state_shards=16)
    )
    sharing = Sharing(divided="all")
    schedule = lower(replace(plan, devices=num, sharing=sharing), workload, devices(num), refine=False)
    found: dict[tuple[str, str], list[int]] = {}
    for b in schedule.buffers:
        if b.initial and isinstance(content := parse_content(b.content), States):
            found.setdefault((content.unit, b.name.rpartition("/")[2]), []).append(b.size_bytes)
    each = workload.training.flat_state_bytes
    assert len(found) == num * len([u for u in workload.units if u.num_trained])
    by_unit = {u.name: u.num_trained for u in workload.units}
    for (unit, device_name), sizes in found.items():
        own = len(shard(range(by_unit[unit]), int(device_name.removeprefix("gpu")), num))
        assert sizes == [each * len(part_of_shard(own, k, len(sizes))) for k in range(len(sizes))]
        assert sum(sizes) == each * own
        assert max(sizes) - min(sizes) <= 2 * 32 * each


@pytest.mark.parametrize("divided", ["all", "gradients"])
def test_templates_say_of_ops_and_buffers_what_their_names_say(divided: str) -> None:
    rng = random.Random(1)
    for _ in range(25):
        plan, workload = drawn(rng, divided, 2)
        step = unitwise_step(plan, workload)
        columns = step.columns(devices(2))
        told, named = step.kinds(), kinds_of(columns.labels())
        assert told.op_kind.tolist() == named.op_kind.tolist()
        assert told.kind.tolist() == named.kind.tolist()
        assert told.content.tolist() == named.content.tolist()
        computes = told.op_kind >= FORWARD
        assert told.op_batch[computes].tolist() == named.op_batch[computes].tolist()
        assert told.ends[told.op_unit[computes]].tolist() == named.ends[named.op_unit[computes]].tolist()
        has_unit = (named.content != OTHER) & (named.content != OF_SHARED)
        assert told.lengths[told.unit[has_unit]].tolist() == named.lengths[named.unit[has_unit]].tolist()
