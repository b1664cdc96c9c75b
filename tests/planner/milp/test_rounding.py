"""Rounding a unit that is like no other, such as an embedding: one of its size may be too much for the device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.instances import MB, chain, small_machine
from tests.toys import toy_machine, with_large_embedding
from tierplan.planner.milp.amounts import problem
from tierplan.planner.milp.bounds import lower_bound
from tierplan.planner.milp.model import Fractions
from tierplan.planner.milp.modes import MODES
from tierplan.planner.milp.program import Solver
from tierplan.planner.milp.rounding import round_to_plan
from tierplan.planner.search import from_program
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.candidates import PlanSimulator
from tierplan.planner.search.from_program import MOST_TIMES_BLOCKS, ProgramPlans, granules
from tierplan.planner.search.incumbents import Incumbents


def test_less_of_a_lone_unit_is_on_the_device_and_others_stay_where_they_were() -> None:
    workload = with_large_embedding(8)
    p = problem(workload, toy_machine(), semantics="in-backward")
    here = next(k for k in p.modes(0) if (MODES[k].params, MODES[k].states) == ("device", "host"))
    there = next(k for k in p.modes(0) if (MODES[k].params, MODES[k].states) == ("host", "host"))
    groups = tuple(tuple({"keep": 1.0} for _ in unit.groups) for unit in p.units)
    for share in (0.6, 1.0):
        place = ({here: share, there: 1 - share}, *[{here: 0.5, there: 0.5}] * 8, {there: 1.0})
        shares = Fractions(place=place, action=groups, tied=(0.0,) * len(place), step_s=1.0)
        near, sparing = (round_to_plan(p, shares, spares_device=spares) for spares in (False, True))
        assert near.units[0].params == "device"
        assert sparing.units[0].params == ("host" if share < 1 else "device")  # what is decided stays
        assert sparing.units[1:] == near.units[1:]
        assert [unit.params for unit in near.units[1:9]].count("device") == 4


def test_programs_have_plans_where_a_large_unit_rounded_up_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """With margins that would leave room for it, no window of its own is possible."""
    parameters, saved_mb = [100 * MB, *[10 * MB] * 10], [[1.0], *[[8.0, 8.0]] * 10]
    again_s = [[0.001], *[[0.002, 0.01]] * 10]
    workload = chain(forward_s=[0.02] * 11, parameters=parameters, saved_mb=saved_mb, recompute_s=again_s)
    machine = small_machine(device_mb=420, host_mb=8_000, nvme_mb=0, link_mb_per_s=2_000, adam_m_per_s=1_000)
    p = replace(problem(workload, machine, semantics="in-backward"), brings_states=False)
    bound = lower_bound(p)

    def found_s() -> float:
        programs = ProgramPlans(Solver(), PlanSimulator(workload, machine, Budget(1e9)), Incumbents())
        *_, step_s = programs.tried(p, bound, goal_s=0.0)
        return step_s

    best_s, nearest = found_s(), round_to_plan
    monkeypatch.setattr(from_program, "round_to_plan", lambda p, shares, spares_device: nearest(p, shares))
    assert best_s < 0.995 * found_s()


def test_margins_are_not_counted_in_embeddings() -> None:
    p = problem(with_large_embedding(8), toy_machine(), semantics="in-backward")
    device_gb, _ = granules(p)
    assert device_gb == MOST_TIMES_BLOCKS * p.units[1].params_gb < p.units[0].params_gb
