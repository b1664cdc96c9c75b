"""What no step of several devices is shorter than: systems with many options, random plans, and what is found."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest

from tierplan.hwmodels.machine import Machine
from tierplan.planner.milp.amounts import problem
from tierplan.planner.milp.bounds import Bound, lower_bound
from tierplan.planner.milp.totals import bound_of_totals
from tierplan.planner.plan import Plan, UnitwisePlan
from tierplan.planner.plan_rules import PlanError
from tierplan.planner.planning import plan
from tierplan.planner.policies import POLICIES, decide
from tierplan.planner.prediction import predict_plan
from tierplan.planner.several_devices.bounds import bound_of_several
from tierplan.planner.several_devices.sharded import sharded
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training, Workload
from tierplan.studies.evaluate import machine_of, workload_at
from tierplan.studies.study import Point

OPTIONS = {
    "reduces": ("each", "last"),
    "reshard": ("on", "off"),
    "checkpointing": ("on", "off"),
    "optimizer": ("device", "host", "nvme"),
    "prefetch": (0, 2),
}


def task(seed: int) -> tuple[Workload, Machine]:
    """A model beside little memory: mostly too little for all of it on the devices together."""
    draw = random.Random(seed)
    devices, name, homes_gib = draw.choice(((2, "gpt2-medium", 4.7), (2, "gpt2-large", 10.1), (4, "gpt2-large", 10.1)))
    point = Point(model=name, machine="desktop-4090", batch=draw.choice((1, 4)), accumulation=draw.choice((1, 3)))
    overrides = {
        "gpu.count": devices,
        "link.p2p": draw.choice(("2 GB/s", "25 GB/s")),
        "gpu.capacity": f"{draw.uniform(0.1, 0.6) * homes_gib / devices + 0.4 + 0.1 * point.batch:.2f} GiB",
        "gpu.reserve": "0 GiB",
        "host.capacity": f"{draw.uniform(0.1, 0.7) * homes_gib + 0.3:.2f} GiB",
        "host.reserve": "0 GiB",
        "nvme.read": draw.choice(("1 GB/s", "4 GB/s")),
        "nvme.write": "1 GB/s",
    }
    machine = machine_of(point := replace(point, overrides=overrides))
    return workload_at(point, machine), machine


def bound_of(workload: Workload, machine: Machine) -> Bound:
    posed = partial(problem, workload, machine, semantics="in-backward")
    num = machine.num_devices
    return bound_of_several([posed(order="horizontal"), posed(order="vertical")], num, num, ())


def systems(workload: Workload, machine: Machine) -> Iterator[Plan]:
    """Those of units, each with all settings that it has of those above, on all devices with micro-batches of their
    own."""

    def decided(name: str, given: dict[str, Any]) -> Plan | str:
        try:
            return decide(name, workload, machine, given)
        except PlanError as error:
            return str(error)

    for name in POLICIES:
        known = {key: values for key, values in OPTIONS.items() if "no option" not in str(decided(name, {key: "?"}))}
        made = [decided(name, dict(zip(known, values, strict=True))) for values in product(*known.values())]
        for one in made:
            if isinstance(one, UnitwisePlan) and one.num_batches == machine.num_devices and one.sub_batches == 1:
                yield one


@pytest.mark.parametrize("seed", [3, 4, 6, 10, 14, 23])
def test_no_plan_is_quicker_than_the_bound(seed: int) -> None:
    """Here neither a device has all parameters, nor packs have room without drives. Where nothing fits uncut, what is
    found is cut, and has the bound of its own shape."""
    workload, machine = task(seed)
    bound = bound_of(workload, machine)
    totals = bound_of_totals(problem(workload, machine, semantics="in-backward"), machine.num_devices)
    planned = plan(workload, machine, time_limit_s=0.3, by_clock=False, batches="each")
    assert 1.5 * totals.step_s < planned.lower_bound_s <= planned.step_s
    steps_s = [predict_plan(made, workload, machine).step_s for made in systems(workload, machine)]
    assert isinstance(planned.plan, UnitwisePlan)
    steps_s += [planned.step_s] if planned.plan.sub_batches == 1 else []
    assert all(bound.step_s <= step_s * (1 + 1e-6) for step_s in steps_s if step_s is not None)


def test_where_only_drives_have_room_the_bound_is_that_of_shards() -> None:
    """Packs and stages use none, and no GPU has room for all parameters: so the totals, which know no order, say
    less."""
    point = Point(model="gpt2-large", machine="desktop-4090", batch=2, accumulation=2)
    few = {"gpu.count": 2, "link.p2p": "25 GB/s", "gpu.capacity": "2.4 GiB", "host.capacity": "14 GiB"}
    machine = machine_of(point := replace(point, overrides=few))
    workload = workload_at(point, machine)
    posed = [problem(workload, machine, semantics="in-backward", order=order) for order in ("horizontal", "vertical")]
    totals = bound_of_totals(posed[0], 2)
    assert not bound_of_totals(replace(posed[0], has_nvme=False), 2).feasible
    found = bound_of(workload, machine)
    assert found.step_s > 1.1 * totals.step_s
    own = min(lower_bound(sharded(p, 2, keeps)).step_s for p in posed for keeps in ("nothing", "all"))
    assert 0.9 * own < found.step_s <= own * (1 + 1e-6)
    planned = plan(workload, machine, time_limit_s=1.0, by_clock=False, batches="each")
    assert totals.step_s < planned.lower_bound_s <= planned.step_s, "cut micro-batches have a bound of their own"


def test_where_all_has_room_on_the_devices_together_totals_are_the_bound() -> None:
    """There operators may be cut, of which programs of one device say nothing."""
    point = Point(model="gpt2", machine="desktop-4090", batch=2, accumulation=2, overrides={"gpu.count": 2})
    machine = machine_of(point)
    workload = workload_at(point, machine)
    assert bound_of(workload, machine) == bound_of_totals(problem(workload, machine, semantics="in-backward"), 2)


def test_the_bound_of_tiles_is_that_of_totals() -> None:
    """Programs have all that a unit gathers on the device at once, and tiles a part of it: the bound was infinite."""
    few = {"gpu.count": 2, "gpu.capacity": "4.548 GiB", "gpu.reserve": "0 GiB"}
    few |= {"host.capacity": "17.52 GiB", "host.reserve": "0 GiB", "nvme.capacity": "4 TB", "link.p2p": "25 GB/s"}
    machine = machine_of(Point(model="gpt-175b", machine="desktop-4090", overrides=few))
    whole = load_workload("gpt-175b", Training(sequence_length=256))
    workload = replace(whole, units=(*whole.units[:5], whole.units[-1]))
    tiles = decide("zero-infinity", workload, machine, {"operator_tiles": 4, "host_buffers": "none"})
    found = plan(workload, machine, batches="each", like=tiles, time_limit_s=0.3, by_clock=False)
    assert isinstance(found.plan, UnitwisePlan)
    assert found.plan.operator_tiles == 4
    assert 0 < found.lower_bound_s <= found.step_s


def test_the_bound_of_cut_micro_batches_is_that_of_their_own_shape() -> None:
    """Whole ones have no room: their programs said that nothing fits, beside a plan that does."""
    few = {"gpu.count": 2, "gpu.capacity": "0.981 GiB", "gpu.reserve": "0 GiB", "host.reserve": "0 GiB"}
    few |= {"host.capacity": "1.531 GiB", "link.p2p": "25 GB/s"}
    machine = machine_of(Point(model="gpt2-xl", machine="desktop-4090", overrides=few))
    whole = load_workload("gpt2-xl", Training(per_device_train_batch_size=4, sequence_length=512))
    workload = replace(whole, units=(*whole.units[:21], whole.units[-1]))
    cut = decide("fuyou", workload, machine, {"sub_batches": 2})
    assert isinstance(cut, UnitwisePlan)
    step_s = predict_plan(cut, workload, machine).step_s
    posed = partial(problem, workload, machine, semantics=cut.semantics)
    both = [posed(order="horizontal"), posed(order="vertical")]
    own = posed(order=cut.order, sub_batches=2)
    assert bound_of_several(both, 2, 2, ()).step_s == float("inf")
    assert step_s is not None
    assert bound_of_totals(both[0], 2).step_s < bound_of_several([*both, own], 2, 2, ()).step_s <= step_s
