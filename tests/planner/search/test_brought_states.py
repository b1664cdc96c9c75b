"""Updates on the device with states that come from elsewhere and go back, unit by unit beside Adam on the host."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from tests.planner.instances import MB, chain, small_machine
from tierplan.hwmodels.machine import Machine
from tierplan.planner.milp.amounts import problem
from tierplan.planner.milp.bounds import lower_bound
from tierplan.planner.milp.model import fractions
from tierplan.planner.milp.modes import MODES
from tierplan.planner.milp.rounding import round_to_plan
from tierplan.planner.plan import UnitPlan, UnitwisePlan, plain_semantics
from tierplan.planner.planning import plan
from tierplan.planner.results import PlanResult
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.candidates import PlanSimulator
from tierplan.sim.workloads.workload import Workload


def blocks(num: int) -> Workload:
    return chain(forward_s=[0.1] * num, parameters=[10 * MB] * num, saved_mb=[[5]] * num)


def machine(adam_m_per_s: float, link_mb_per_s: float) -> Machine:
    """With room on the device for one block's states beside all parameters, or for two blocks'."""
    return small_machine(device_mb=350, nvme_mb=0, adam_m_per_s=adam_m_per_s, link_mb_per_s=link_mb_per_s)


def where_updated(result: PlanResult) -> set[str]:
    assert isinstance(result.plan, UnitwisePlan)
    return {u.update for u in result.plan.units if u.states != "device"}


def best_of(workload: Workload, machine: Machine, *, brings: bool = True, **more: Any) -> float:
    """The shortest step of all placements, late updates, and states that come whole or in shards; with everything kept
    that is saved, if `more` says nothing else. Infinite where nothing fits."""
    semantics = plain_semantics(workload.training)
    p, simulate_plan = (
        problem(workload, machine, semantics=semantics),
        PlanSimulator(workload, machine, Budget(1e9)),
    )
    modes = [MODES[k] for k in p.modes(0) if brings or MODES[k].update == "home"]
    choices = [
        UnitPlan(
            params=m.params, states=m.states, grads=m.grads, update=m.update, late_update=late, state_shards=num, **more
        )
        for m in modes
        for late in ((False, True) if m.updated != "device" and m.grads != "nvme" else (False,))
        for num in ((1, 4) if m.updated == "brought" else (1,))
    ]
    made = itertools.product(choices, repeat=len(workload.units))
    plans = (UnitwisePlan(policy="all", units=units, semantics=semantics) for units in made)
    return min((s for s in (simulate_plan(plan).step_s for plan in plans) if s is not None), default=inf)


def test_where_the_host_is_slow_and_the_link_quick_states_come_to_the_device() -> None:
    workload, on = blocks(3), machine(adam_m_per_s=5, link_mb_per_s=1000)
    result, best_s = plan(workload, on), best_of(workload, on)
    assert where_updated(result) == {"device"}
    assert all(other.step_s is None or result.step_s < other.step_s for other in result.policies.values())
    assert result.lower_bound_s <= result.step_s <= best_s * 1.01
    assert best_s < 0.5 * best_of(workload, on, brings=False)


def test_states_come_where_the_host_takes_long_for_one_unit_though_the_bound_does_not_say_so() -> None:
    """All but somewhat more than one block's states have room on the device. In small amounts the host has time for
    that beside computing; for two whole blocks it has not."""
    workload, on = blocks(12), small_machine(device_mb=1600, nvme_mb=0, adam_m_per_s=4, link_mb_per_s=1000)
    bound = lower_bound(problem(workload, on, semantics="in-backward"))
    assert bound.plain is not None
    assert bound.plain.step_s == pytest.approx(bound.step_s, rel=1e-4)
    result = plan(workload, on)
    assert result.step_s < 1.01 * bound.step_s
    assert "device" in where_updated(result)


def test_where_the_host_is_quick_they_stay() -> None:
    workload, on = blocks(3), machine(adam_m_per_s=1000, link_mb_per_s=1000)
    result = plan(workload, on)
    assert where_updated(result) == {"home"}
    assert result.step_s <= best_of(workload, on) * 1.01


def test_some_units_go_each_way_where_neither_host_nor_link_has_time_for_all() -> None:
    posed = problem(blocks(8), machine(adam_m_per_s=15, link_mb_per_s=300), semantics="in-backward")
    bound, without = lower_bound(posed), lower_bound(replace(posed, brings_states=False))
    assert bound.model is not None
    assert bound.solution is not None
    shares = fractions(bound.model, bound.solution)
    brought = sum(share for of in shares.place for k, share in of.items() if MODES[k].updated == "brought")
    rounded = round_to_plan(posed, shares).units
    assert sum(u.states != "device" and u.update == "device" for u in rounded) == pytest.approx(brought, abs=1)
    assert 1 < brought < 7
    assert {u.update for u in rounded if u.states != "device"} == {"home", "device"}
    assert bound.step_s < 0.9 * without.step_s


@pytest.mark.parametrize("device_mb", [40, 70, pytest.param(90, marks=pytest.mark.nightly), 155, 350])
def test_states_come_where_a_shard_of_them_has_room_beside_gradients_and_parameters(device_mb: int) -> None:
    """A sixteenth of 120 MB, 20 and 20. What has no room for that is no plan, and no part of the bound."""
    workload = blocks(3)
    on = small_machine(device_mb=device_mb, nvme_mb=0, adam_m_per_s=5, link_mb_per_s=1000)
    simulate_plan = PlanSimulator(workload, on, Budget(1e9))
    coming = UnitPlan(params="host", states="host", grads="device", update="device", acts="recompute")

    def fits(num_shards: int) -> bool:
        units = (replace(coming, state_shards=num_shards),) * 3
        return simulate_plan(
            UnitwisePlan(policy="all", units=units, prefetch_params_units=0, prefetch_states_units=0)
        ).fits

    assert fits(1) == (device_mb > 160)
    assert fits(16) == (device_mb > 60)
    posed = problem(workload, on, semantics="in-backward")
    bound, without = lower_bound(posed), lower_bound(replace(posed, brings_states=False))
    assert bound.feasible == (device_mb > 60)
    if bound.feasible:
        assert bound.step_s < 0.9 * without.step_s
    assert bound.step_s <= best_of(workload, on, acts="recompute") * (1 + 1e-6)


def clipped(num: int, forward_s: float = 0.1, accumulation: int = 1) -> Workload:
    return chain(
        forward_s=[forward_s] * num, parameters=[10 * MB] * num, saved_mb=[[5]] * num, accumulation=accumulation,
        max_grad_norm=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("accumulation", [1, 4])
def test_gradients_without_room_until_their_norm_is_known_come_back(
    accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of eight blocks are 160 MB. The host would take 16 s for the updates."""
    monkeypatch.setattr("tierplan.planner.search.budget.DEFAULT_OPS", 60_000)
    on = small_machine(device_mb=110, nvme_mb=0, adam_m_per_s=5, link_mb_per_s=1000)
    slow, quick = (plan(clipped(8, forward_s, accumulation), on) for forward_s in (0.1, 0.05))
    for result in (slow, quick):
        assert isinstance(result.plan, UnitwisePlan)
        assert sum(u.returns_grads for u in result.plan.units) >= 4
        assert result.lower_bound_s <= result.step_s < 1.4 * result.lower_bound_s
    assert quick.step_s < slow.step_s


def test_the_best_of_all_plans_with_clipping_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierplan.planner.search.budget.DEFAULT_OPS", 30_000)
    workload, on = clipped(2), small_machine(device_mb=80, nvme_mb=0, adam_m_per_s=5, link_mb_per_s=1000)
    result, best_s = plan(workload, on), best_of(workload, on)
    assert result.lower_bound_s <= result.step_s <= best_s * 1.01
    assert best_s < 0.6 * best_of(workload, on, brings=False)
