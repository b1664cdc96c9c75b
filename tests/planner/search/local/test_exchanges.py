"""Exchanges keep what a plan has in all, and come to every unit."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.planner.search.local import exchanges
from tierplan.planner.search.local.exchanges import exchanged

CHOICES = [
    UnitPlan(params="host" if u % 3 else "device", states="host", acts="recompute" if u % 2 else "host", input="host")
    for u in range(8)
]
PLAN = UnitwisePlan(policy="any", semantics="in-backward", order="horizontal", units=tuple(CHOICES))
UNITS = range(1, 7)


def test_an_exchange_keeps_amounts_and_leaves_other_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchanges, "ONE_WAY", 0.0)
    rng, changed = random.Random(0), 0
    for _ in range(300):
        plan = exchanged(PLAN, UNITS, rng)
        if plan is None:
            continue
        changed += 1
        assert (plan.units[0], plan.units[7]) == (PLAN.units[0], PLAN.units[7])
        for name in ("params", "acts"):
            assert Counter(getattr(c, name) for c in plan.units) == Counter(getattr(c, name) for c in CHOICES)
        assert replace(plan, units=PLAN.units) == PLAN
    assert changed > 150


def test_one_way_a_choice_spreads() -> None:
    rng = random.Random(0)
    plans = [exchanged(PLAN, UNITS, rng) for _ in range(300)]
    params = {sum(c.params == "device" for c in plan.units) for plan in plans if plan is not None}
    assert params == {2, 3, 4}  # PLAN has 3


def test_where_all_units_are_alike_nothing_changes() -> None:
    plan = replace(PLAN, units=(UnitPlan(),) * 8)
    assert all(exchanged(plan, UNITS, random.Random(seed)) is None for seed in range(50))


def test_any_order_can_be_reached() -> None:
    """From one end to the other, by exchanges alone: what is at the first unit comes to the last."""
    first = replace(PLAN, units=(UnitPlan(params="host", states="host"),) + (UnitPlan(),) * 7)
    rng, plan, reached = random.Random(1), first, set()
    for _ in range(400):
        plan = exchanged(plan, range(8), rng) or plan
        reached |= {u for u, c in enumerate(plan.units) if c.params == "host"}
    assert reached == set(range(8))
