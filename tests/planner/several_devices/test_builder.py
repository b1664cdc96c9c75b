"""Schedules of several devices as columns: the same as from objects, without names and without leftovers."""

from __future__ import annotations

import weakref
from dataclasses import fields

import numpy as np
import pytest

from tests.planner.several_devices.test_lowering_packs import WORKLOAD
from tests.planner.test_plan import devices
from tierplan.planner.lowering import Lowering
from tierplan.planner.plan import PackPlan, Packs, PagedPlan, Plan
from tierplan.sim import builder
from tierplan.sim.analysis.steady import steady_state
from tierplan.sim.columns import collector_paused, columns_of
from tierplan.sim.schedule import validate

RUNS = ((0, 2), (2, 4), (4, 6))
PLANS: dict[str, Plan] = {
    "pipeline": PackPlan(policy="p", packs=Packs(form="pipeline", devices=2, forward=RUNS[:2], backward=RUNS)),
    "data": PackPlan(policy="p", packs=Packs(form="data", devices=2, forward=RUNS[:2], backward=RUNS)),
    "unit by unit": PackPlan(
        policy="p", packs=Packs(form="pipeline", devices=2, forward=RUNS[:2], backward=RUNS, own_memory=True)
    ),
    "resident": PackPlan(
        policy="p", packs=Packs(form="resident", devices=2, forward=((0, 3),), backward=((0, 3), (3, 6)))
    ),
    "paged": PagedPlan(policy="p", devices=2),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_columns_are_those_of_the_schedule_with_names(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a plan is simulated without one name being made."""
    with monkeypatch.context() as without:
        without.setattr(builder, "said", lambda text: pytest.fail(f"{text} was asked for"))
        columns = Lowering(WORKLOAD, devices(2)).columns(plan)
        assert steady_state(columns, devices(2)).period_s > 0
    again = columns_of(validate(Lowering(WORKLOAD, devices(2)).columns(plan, refine=False).schedule()))
    made = Lowering(WORKLOAD, devices(2)).columns(plan, refine=False)
    assert again.works == made.works
    for name in (f.name for f in fields(made) if f.name not in ("labels", "works", "tiers", "next_devices")):
        one, other = getattr(made, name), getattr(again, name)
        pairs = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
        assert all(np.array_equal(*pair) for pair in pairs), name


def test_what_made_a_schedule_goes_with_it() -> None:
    """Of thousands that a search makes, none waits for the collector of cycles, which would take as long as they do."""
    packs = Packs(form="data", devices=2, forward=RUNS[:2], backward=RUNS, rounds=1, cleanup_s=0.125)
    with collector_paused():
        columns = Lowering(WORKLOAD, devices(2)).columns(PackPlan(policy="p", packs=packs), refine=False)
        maker = weakref.ref(columns.labels.func.__self__)  # type: ignore[attr-defined]
        assert maker() is not None
        del columns
        assert maker() is None


def test_the_same_work_is_one_object_in_all_schedules() -> None:
    """So what it costs on a machine need not be found again, which a search keeps by identity."""
    plans = [PLANS["pipeline"], PLANS["unit by unit"]]
    one, other = ({id(w): w for w in Lowering(WORKLOAD, devices(2)).columns(plan).works} for plan in plans)
    copies = {work.stream for number, work in one.items() if number in other}
    assert {"gpu0.h2d", "gpu1.h2d", "host.adam"} <= copies
