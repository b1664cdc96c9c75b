"""A wider search begins with exactly what each narrower one does: never worse by construction, not by luck."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.planner.instances import MB, chain, random_machine
from tierplan.hwmodels.machine import Machine
from tierplan.planner import loop
from tierplan.planner.infeasible import InfeasiblePlan
from tierplan.planner.planning import plan
from tierplan.planner.policies import POLICIES
from tierplan.planner.search import budget
from tierplan.planner.search.candidates import PlanSimulator
from tierplan.sim.workloads.workload import Workload

INSTANCES = [0, 1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 40))]


def drawn(seed: int) -> tuple[Workload, Machine]:
    """A chain short or long enough for shifts, with micro-batches and sub-batches."""
    rng = random.Random(seed)
    num = rng.choice((4, 10))
    workload = chain(
        forward_s=[rng.uniform(0.002, 0.02)] * num,
        parameters=[rng.randint(1, 6) * MB] * num,
        saved_mb=[[rng.uniform(2, 20), rng.uniform(1, 10)]] * num,
        recompute_s=[[0.001, 0.004]] * num,
        border_mb=4,
        accumulation=rng.choice((1, 2)),
        batch=4,
    )
    return workload, random_machine(rng, workload)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every plan that is simulated."""
    monkeypatch.setattr(budget, "OPS_PER_S", 1_000)
    found: list[Any] = []
    simulate = PlanSimulator._simulate

    def listed(self: PlanSimulator, made: object, *beside: Any) -> object:
        found.append(made)
        return simulate(self, made, *beside)

    monkeypatch.setattr(PlanSimulator, "_simulate", listed)
    monkeypatch.setattr(loop.Search, "_spares_drives", lambda search, best: best)  # after the search, whatever it found
    return found


@pytest.mark.parametrize("seed", INSTANCES)
def test_both_orders_begin_with_all_that_one_does(seed: int, tried: list[Any]) -> None:
    workload, machine = drawn(seed)

    def searched(**asked: object) -> tuple[float, list[Any]]:
        tried.clear()
        try:
            step_s = plan(workload, machine, time_limit_s=100, **asked).step_s  # type: ignore[arg-type]
        except InfeasiblePlan:
            step_s = float("inf")
        return step_s, list(tried)

    both_s, of_both = searched()
    for order in ("horizontal", "vertical"):
        alone_s, alone = searched(orders=(order,))
        assert both_s <= alone_s
        is_needless = not any(made.policy == "planner" and made.order == order for made in of_both)
        assert is_needless or [made for made in alone if made not in of_both] == []


@pytest.mark.parametrize("seed", INSTANCES)
def test_far_from_the_bound_a_search_of_no_given_length_goes_on(
    seed: int, tried: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    workload, machine = drawn(seed)
    monkeypatch.setattr(budget, "DEFAULT_OPS", 50_000)

    def searched(far: float, time_limit_s: float | None = None) -> tuple[float, list[Any]]:
        monkeypatch.setattr(loop, "FAR", far)
        tried.clear()
        step_s = plan(workload, machine, time_limit_s=time_limit_s).step_s
        return step_s, list(tried)

    (near_s, near), (far_s, far) = searched(float("inf")), searched(0.0)
    assert far_s <= near_s
    more = [made for made in far if made not in near]
    assert more
    of_search = [[made for made in some if made.policy == "planner"] for some in (near, far)]
    assert of_search[1][: len(of_search[0])] == of_search[0]  # others are looked at again to be shown
    assert searched(0.0, 100) == searched(float("inf"), 100)


@pytest.mark.parametrize("seed", INSTANCES)
def test_what_is_compared_with_does_not_change_the_search(seed: int, tried: list[Any]) -> None:
    workload, machine = drawn(seed)
    steps_s, plans = [], []
    for policies in ((), ("zero-offload",), ("zero-offload", "fuyou"), tuple(POLICIES)):
        tried.clear()
        try:
            found = plan(workload, machine, time_limit_s=100, policies=policies)
        except InfeasiblePlan:
            assert not steps_s or steps_s[-1] == float("inf")
            steps_s.append(float("inf"))
        else:
            assert set(found.policies) == set(policies)
            steps_s.append(found.step_s)
        plans.append(list(tried))
    assert steps_s == sorted(steps_s, reverse=True)
    own = [[made for made in some if made.policy == "planner"][:10] for some in plans]
    assert all(some == own[0] for some in own)  # later ones may be needless beside a policy's
    assert len(own[0]) > 1
