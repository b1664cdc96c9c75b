"""Tuning, with step times that are made up."""

from __future__ import annotations

from dataclasses import replace

from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.planner.search.candidates import Candidate
from tierplan.planner.search.knobs import Knobs, tune

PLAN = UnitwisePlan(policy="made up", units=(UnitPlan(),), semantics="in-backward")


def test_tuning_walks_on_over_settings_that_make_the_same_updates_late() -> None:
    """Between two settings of `stretch` there may be no update more that is late: what comes after may still help."""

    def trial(knobs: Knobs) -> Candidate[UnitwisePlan]:
        if replace(knobs, stretch=1.5) != Knobs():
            return Candidate(PLAN, 2.0)
        return Candidate(PLAN, 1.0 if knobs.stretch > 0.65 else 0.9 + abs(knobs.stretch - 0.4) / 10)

    *_, found = tune(trial, goal_s=0.0)
    assert found == (replace(Knobs(), stretch=0.4), 0.9)
