"""Plans of packs and of paged weights: what contradicts workload, machine or training is refused by name."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from tests.toys import side_by_side, toy_machine, toy_workload
from tierplan.hwmodels.machine import Machine, Rate, Stream
from tierplan.planner.lowering import lower
from tierplan.planner.plan import KINDS, PackPlan, Packs, PagedPlan, Plan, UnitwisePlan
from tierplan.planner.plan_rules import PlanError
from tierplan.planner.planning import plan

WORKLOAD = toy_workload(4, tied=False)
"""embed, L0, L1, L2, L3, head."""
PACKS = Packs(form="data", devices=1, forward=((0, 2), (2, 4)), backward=((0, 2), (2, 4), (4, 6)))
IN_PACKS = PackPlan(policy="test", packs=PACKS)
PAGED = PagedPlan(policy="test", devices=1)


def test_no_field_says_the_same_as_another_kinds() -> None:
    """Each kind has a name of its own, says who decided, and has one number of devices."""
    assert list(KINDS) == ["unitwise", "packs", "paged"]
    shared = set.intersection(*({f.name for f in fields(kind)} for kind in KINDS.values()))
    assert shared == {"policy", "options"}
    assert not {f.name for f in fields(PackPlan)} & ({f.name for f in fields(UnitwisePlan)} - shared)


@pytest.mark.parametrize("plan", [IN_PACKS, PAGED], ids=lambda plan: plan.kind)
def test_what_updates_in_backward_is_refused_where_training_clips(plan: Plan) -> None:
    assert lower(plan, WORKLOAD, toy_machine()).ops
    clipped = toy_workload(4, tied=False, max_grad_norm=0.5)
    with pytest.raises(PlanError, match=r"plan 'test' .*asks for clipping at norm 0\.5; use a unit-wise plan"):
        lower(plan, clipped, toy_machine())


@pytest.mark.parametrize("kind", [PackPlan, PagedPlan])
def test_delayed_updates_cannot_be_asked_of_packs_or_pages(kind: Any) -> None:
    with pytest.raises(TypeError, match="semantics"):
        kind(policy="test", semantics="delayed-1")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"form": "ring"}, "form is 'ring'; it must be one of data, pipeline"),
        ({"devices": 0}, "devices is 0; it must be a whole number >= 1"),
        ({"form": "pipeline", "devices": 2}, "wants 2 devices, but machine 'toy' has 1"),
        ({"cleanup_s": -1.0}, "cleanup_s is -1.0; it must be a number of 0 or more"),
        ({"host_copy_bytes_per_s": float("nan")}, "host_copy_bytes_per_s is nan"),
        ({"backward": ((0, 2), (3, 6))}, "backward packs .* do not cover units 0 to 6"),
        ({"backward": ()}, "backward packs .* do not cover units 0 to 6"),
        ({"forward": ((0, 2),)}, "forward packs .* do not cover units 0 to 4"),
        ({"forward": ((0, 4), (4, 6))}, "forward packs .* do not cover units 0 to 4"),
        ({"forward": ((0, 4), (4, 4))}, "forward packs .* do not cover units 0 to 4"),
    ],
)
def test_packs_that_contradict_themselves_or_what_there_is(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        lower(replace(IN_PACKS, packs=replace(PACKS, **changed)), WORKLOAD, toy_machine())


def test_every_device_of_data_parallel_packs_has_a_micro_batch() -> None:
    """A plan by hand is refused, and the planner looks for others."""
    workload, machine = toy_workload(4, tied=False, gradient_accumulation_steps=2), devices(3)
    packs = replace(PACKS, devices=3)
    with pytest.raises(PlanError, match="data-parallel packs on 3 devices, but the step has 2 micro-batches"):
        lower(replace(IN_PACKS, packs=packs), workload, machine)
    assert lower(replace(IN_PACKS, packs=replace(packs, form="pipeline")), workload, machine).ops
    alone = replace(machine, streams=tuple(s for s in machine.streams if not s.name.endswith(".collective")))
    result = plan(workload, alone, time_limit_s=1, policies=["harmony-pp"], batches="shared")
    assert isinstance(result.plan, PackPlan)
    assert result.plan.packs.form == "pipeline"


def devices(num: int) -> Machine:
    """Toy machines side by side in one host, in a ring of links."""
    peers = [Stream(name=f"gpu{k}.p2p.gpu{(k + 1) % num}", rates={"bytes": Rate.constant(5e9)}) for k in range(num)]
    kinds = (f"ring{num}_bytes", "hops")
    peers += [Stream(name=f"gpu{k}.collective", rates=dict.fromkeys(kinds, Rate.constant(5e9))) for k in range(num)]
    return side_by_side(toy_machine(), num, peers)


def test_packs_on_one_device_are_for_chains_of_blocks() -> None:
    units = tuple(replace(unit, shares="embed") if unit.name == "L2" else unit for unit in WORKLOAD.units)
    with pytest.raises(PlanError, match="units between its blocks that share parameters"):
        lower(IN_PACKS, replace(WORKLOAD, units=units), toy_machine())


@pytest.mark.parametrize(("devices", "message"), [(0, "devices is 0"), (2, "wants 2 devices, but machine 'toy' has 1")])
def test_paging_on_devices_that_there_are_not(devices: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        lower(replace(PAGED, devices=devices), WORKLOAD, toy_machine())
