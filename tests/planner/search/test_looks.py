"""A plan that looks slower than another one is an estimate; by itself every plan is simulated to its steady state."""

from __future__ import annotations

import random
from itertools import pairwise, permutations

import pytest

from tests.random_plans import random_plan
from tests.toys import MIB, toy_machine, toy_workload
from tierplan.planner.plan import UnitwisePlan
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.candidates import LOOKS_FRAC, Candidate, PlanSimulator

NUM_PLANS = 120


def simulator() -> PlanSimulator:
    machine = toy_machine(device_bytes=400 * MIB, shared=True)
    return PlanSimulator(toy_workload(4, gradient_accumulation_steps=2), machine, Budget(1e9))


@pytest.fixture(scope="module")
def plans() -> list[Candidate[UnitwisePlan]]:
    """Random plans that run, each simulated by itself, of one order of micro-batches."""
    simulate_plan, rng = simulator(), random.Random(0)
    made = (random_plan(simulate_plan.workload, rng) for _ in range(NUM_PLANS))
    found = [simulate_plan(plan) for plan in made if plan.order == "vertical" and plan.sub_batches == 1]
    return [candidate for candidate in found if candidate.fits]


def test_what_looks_slower_is_an_estimate_and_all_else_is_simulated(plans: list[Candidate[UnitwisePlan]]) -> None:
    simulate_plan = simulator()
    nums = {False: 0, True: 0}
    for best, alone in pairwise(plans):
        if alone.plan in (candidate.plan for candidate in simulate_plan.seen.values()):
            continue
        tried = simulate_plan(alone.plan, best)
        nums[tried.is_estimate] += 1
        if not tried.is_estimate:
            assert tried == alone
            continue
        assert tried.fits
        assert tried.looks_s == alone.looks_s[: len(tried.looks_s)]
        times = tried.looks_s[-1] / best.looks_s[len(tried.looks_s) - 1]
        assert times > 1 + LOOKS_FRAC[len(tried.looks_s) - 1]
        assert tried.step_s == pytest.approx(best.step_s * times, rel=1e-12)
        assert simulate_plan(alone.plan) == alone, "by itself it is simulated"
    assert min(nums.values()) > 10


def test_looks_hide_little_of_what_is_quicker(plans: list[Candidate[UnitwisePlan]]) -> None:
    gains, hidden = list[float](), list[float]()
    for best, other in permutations(plans, 2):
        gain = best.step_s - other.step_s
        if gain > 0:
            gains.append(gain)
            looks = (other.looks_s[:num] for num in range(1, len(other.looks_s) + 1))
            hidden += [gain] * any(best.slower_s(look) for look in looks)
    assert len(gains) > 1000
    assert 0 < sum(hidden) < 0.01 * sum(gains), "a look is no proof"
