"""Regular plans: how units are spread, what a pattern changes, and that being spread is worth it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tests.planner.instances import MB, chain, small_machine
from tests.toys import MIB, toy_machine, toy_workload, uniform_plan, with_large_embedding
from tierplan.hwmodels.names import HOST_ADAM
from tierplan.hwmodels.scaling import with_faster
from tierplan.planner.milp.amounts import problem
from tierplan.planner.milp.bounds import lower_bound
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.candidates import PlanSimulator
from tierplan.planner.search.local import patterns as module
from tierplan.planner.search.local.patterns import SLOPES, Pattern, Patterns, Spread

IN_HOST = UnitPlan(params="host", grads="host", states="host")
ON_DRIVE = replace(IN_HOST, states="nvme")
LATE = replace(ON_DRIVE, late_update=True)


@pytest.mark.parametrize("slope", SLOPES)
def test_the_half_behind_the_middle_has_its_share_of_the_density(slope: float) -> None:
    """The integral of 1 - slope + 2 * slope * x from the middle to the end."""
    wanted = Spread(1000, slope).wanted(1000)
    assert wanted == sorted(wanted)
    assert sum(at >= 500 for at in wanted) == pytest.approx(500 * (1 + slope / 2), abs=2)


def test_units_stand_on_their_stretch() -> None:
    wanted = Spread(10, 0.5, begin=0.4, end=0.7).wanted(100)
    assert all(40 <= at < 70 for at in wanted)
    assert Spread(0).wanted(100) == []


def test_a_pattern_places_as_many_blocks_as_it_says_and_changes_nothing_else() -> None:
    workload = toy_workload(12)
    plan = uniform_plan(workload, replace(IN_HOST, acts="recompute"))
    blocks = [u for u, unit in enumerate(workload.units) if unit.kind == "block"]
    made = Pattern(IN_HOST, {ON_DRIVE: Spread(4), LATE: Spread(3, begin=0.5)}).made_of(plan, blocks)
    assert Counter(made.units[u].states for u in blocks) == {"nvme": 7, "host": 5}
    late = [u for u in blocks if made.units[u].late_update]
    assert len(late) == 3
    assert sum(made.units[u].late_update for u in blocks[6:]) == 3
    assert all(made.units[u].acts == "recompute" for u in blocks)
    assert [made.units[u] for u in range(len(plan.units)) if u not in blocks] == [
        plan.units[u] for u in range(len(plan.units)) if u not in blocks
    ]
    full = Pattern(IN_HOST, {ON_DRIVE: Spread(50)}).made_of(plan, blocks)  # more than there are: all
    assert all(full.units[u].states == "nvme" for u in blocks)


def test_the_first_pattern_has_the_plans_placements_evenly_spread() -> None:
    workload, machine = toy_workload(12), toy_machine()
    plan = uniform_plan(workload, IN_HOST)
    blocks = [u for u, unit in enumerate(workload.units) if unit.kind == "block"]
    units = list(plan.units)
    for u in blocks[:4]:
        units[u] = ON_DRIVE
    p = problem(workload, machine, semantics="in-backward")
    first = Patterns(p, replace(plan, units=tuple(units)), PlanSimulator(workload, machine, Budget(60)), {}, 0).best
    there = [k for k, u in enumerate(blocks) if first.plan.units[u].states == "nvme"]
    assert there == [int((i + 0.5) * len(blocks) / 4) for i in range(4)]


def question() -> tuple[PlanSimulator, Patterns]:
    """The drive has time for some units' states beside the others' computing, and they stand side by side."""
    num = 24
    workload = chain(forward_s=[0.02] * num, parameters=[10 * MB] * num, saved_mb=[[2]] * num)
    rates = {"read_mb_per_s": 2_000, "write_mb_per_s": 1_000, "adam_m_per_s": 400, "link_mb_per_s": 4_000}
    machine = small_machine(device_mb=160, host_mb=3_000, nvme_mb=8_000, **rates)
    simulate_plan = PlanSimulator(workload, machine, Budget(1e9))
    blocks = [u for u, unit in enumerate(workload.units) if unit.kind == "block"]
    units = [ON_DRIVE if u in blocks[:8] else IN_HOST for u in range(len(workload.units))]
    plan = UnitwisePlan(policy="planner", units=tuple(units))
    return simulate_plan, Patterns(problem(workload, machine, semantics="in-backward"), plan, simulate_plan, {}, 3)


def test_spread_over_the_chain_is_quicker_than_side_by_side() -> None:
    simulate_plan, patterns = question()
    side_by_side = simulate_plan(patterns.plan)
    assert side_by_side.step_s is not None
    assert patterns.best.step_s is not None
    assert patterns.best.step_s < 0.99 * side_by_side.step_s


def test_the_descent_ends_quicker_than_it_began_and_repeats_itself() -> None:
    ends = []
    for _ in range(2):
        _, patterns = question()
        first = patterns.best
        steps_s = [best.step_s for best in patterns.descend()]
        assert first.step_s is not None
        assert None not in steps_s
        assert steps_s == sorted(steps_s, key=lambda step_s: -(step_s or 0.0))
        assert patterns.best.step_s == steps_s[-1]
        assert (steps_s[-1] or 0.0) < 0.95 * first.step_s
        ends.append((steps_s, patterns.best.plan))
    assert ends[0] == ends[1]
    _, patterns = question()
    assert next(patterns.descend(goal_s=1e9)) is patterns.best  # near enough at once


def test_what_a_pattern_has_freed_on_the_device_is_filled_with_units() -> None:
    """Recomputing frees memory and takes longer; with as many states there as it has room for, it pays."""
    num = 24
    workload = chain(forward_s=[0.02] * num, parameters=[10 * MB] * num, saved_mb=[[30]] * num)
    machine = small_machine(device_mb=1_200, host_mb=8_000, nvme_mb=0, adam_m_per_s=100, link_mb_per_s=1_000)
    p, simulate_plan = (
        problem(workload, machine, semantics="in-backward"),
        PlanSimulator(workload, machine, Budget(1e9)),
    )
    plan = uniform_plan(workload, IN_HOST)
    patterns = Patterns(p, plan, simulate_plan, {"device": 10.0}, 0)
    kept = patterns.best
    made = replace(patterns.pattern, actions=UnitPlan(acts="recompute"))
    tried = simulate_plan(made.made_of(plan, patterns.blocks))
    assert kept.step_s is not None
    assert tried.step_s is not None
    assert tried.step_s > kept.step_s
    assert tried.room_gb["device"] > kept.room_gb["device"]
    _, filled, *_ = patterns._with_filled(made)
    more = simulate_plan(filled.made_of(plan, patterns.blocks))
    there = sum(unit.states == "device" for unit in more.plan.units)
    unit = p.units[patterns.blocks[0]]
    freed_gb = tried.room_gb["device"] - kept.room_gb["device"]
    assert there == int(freed_gb / (unit.params_gb + unit.states_gb))
    assert there > 2
    assert more.step_s is not None
    assert more.step_s < kept.step_s


def test_blocks_make_room_for_a_unit_that_is_as_large_as_many_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updated on the slow host, the embedding alone takes half the step; and the device is full of blocks."""
    workload, machine = with_large_embedding(16), with_faster(toy_machine(device_bytes=720 * MIB), [HOST_ADAM], 0.15)
    simulate_plan, num = PlanSimulator(workload, machine, Budget(1e9)), len(workload.units)
    p = problem(workload, machine, semantics="in-backward")
    s_per_gb = lower_bound(p).s_per_gb
    units = [(IN_HOST, *(UnitPlan() if u <= k else IN_HOST for u in range(1, num))) for k in range(num - 1)]
    plans = [UnitwisePlan(policy="planner", units=choices) for choices in units]
    full = [plan for plan in plans if simulate_plan(plan).fits][-1]

    def ends_s() -> list[float]:
        searches = [Patterns(p, full, PlanSimulator(workload, machine, Budget(1e9)), s_per_gb, k) for k in range(3)]
        return [min(best.step_s for best in search.descend() if best.step_s is not None) for search in searches]

    found_s = ends_s()
    monkeypatch.setattr(module, "LONE", 0.0)
    assert max(found_s) < 0.7 * min(ends_s())
