"""Whole actions against branch and bound to the end, and programs that start from each other's basis."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.planner.instances import (
    MB,
    chain,
    num_above_bound,
    random_chain,
    random_machine,
    random_plans,
    small_machine,
)
from tierplan.planner.milp.amounts import Problem, problem
from tierplan.planner.milp.bounds import lower_bound
from tierplan.planner.milp.integral import solve_whole
from tierplan.planner.milp.model import Margins, build, fractions, with_actions, with_margins
from tierplan.planner.milp.program import Solver
from tierplan.planner.milp.rounding import actions_of, round_to_plan


def instance(seed: int, num: int = 6) -> Problem:
    rng = random.Random(seed)
    workload = random_chain(rng, num)
    return problem(workload, random_machine(rng, workload), semantics="in-backward")


@pytest.mark.parametrize("seed", range(20))
def test_whole_actions_are_within_the_gap_of_the_integral_optimum(seed):
    p = instance(seed)
    found = solve_whole(build(p), Margins(), gap=0.02)
    model = build(p, integral=True)
    exact = Solver().solve(model.program, integral=True, gap=0.0)
    assert (found is not None) == exact.usable
    if found is None:
        return
    optimum_s = fractions(model, exact).step_s
    assert found.bound_s <= optimum_s * (1 + 1e-5)
    assert found.step_s <= found.bound_s * (1 + 0.02) + 1e-5 or found.branched
    if not found.branched:
        assert found.step_s <= optimum_s * (1 + 0.02) + 1e-5
    assert found.gap == pytest.approx(found.step_s / found.bound_s - 1, abs=1e-9)


def test_branching_happens_where_rounding_is_not_close():
    """Few large tensors: what the bound splits, whole actions cannot."""
    branched = [
        found.branched for seed in range(20) if (found := solve_whole(build(instance(seed, 3)), Margins(), gap=1e-6))
    ]
    assert any(branched)
    assert not all(branched)


@pytest.mark.parametrize("seed", range(8))
def test_a_start_changes_the_way_and_not_the_optimum(seed):
    p = instance(seed)
    model, solver = build(p), Solver()
    solver.solve(model.program)
    margins = Margins(device_gb=0.02 * p.device_gb, host_gb=0.05 * p.host_gb, rate_frac={"nvme.read": 0.8})
    changed = with_margins(model, margins).program
    cold, warm = Solver().solve(changed), solver.solve(changed)
    assert warm.status == cold.status
    if cold.usable:
        assert warm.objective == pytest.approx(cold.objective, rel=1e-6)


def test_a_start_saves_most_iterations():
    num = 40
    workload = chain(
        forward_s=[0.1] * num, parameters=[MB] * num, saved_mb=[[4, 8]] * num, recompute_s=[[0.01, 0.05]] * num
    )
    p = problem(workload, small_machine(device_mb=300, host_mb=900), semantics="in-backward")
    model, solver = build(p), Solver()
    assert solver.solve(model.program).usable
    changed = with_margins(model, Margins(device_gb=0.003)).program
    cold, warm = Solver().solve(changed), solver.solve(changed)
    assert warm.iterations < cold.iterations / 3
    assert warm.work_ops < cold.work_ops


def test_decided_actions_are_the_ones_that_are_solved():
    p = instance(3)
    model = build(p)
    shares = fractions(model, Solver().solve(model.program))
    made = round_to_plan(p, shares)
    decided = with_actions(model, actions_of(p, made))
    found = Solver().solve(decided.program)
    if found.usable:
        again = round_to_plan(p, fractions(decided, found))
        assert [u.acts for u in again.units] == [u.acts for u in made.units]
        assert [u.input for u in again.units] == [u.input for u in made.units]


@pytest.mark.sampled
@pytest.mark.parametrize("semantics", ["in-backward", "exact-clip"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_windows_of_several_units_only_lower_the_bound(accumulation, semantics):
    """A coarser cut of the same schedules: no plan that runs is below it, and the finer bound is not either."""
    num_ran, coarse = 0, (range(1), range(1, 3), range(3, 6), range(6, 7))
    for seed in range(6):
        rng = random.Random(100 * accumulation + seed)
        workload = random_chain(rng, 7, accumulation=accumulation)
        machine = random_machine(rng, workload)
        for order in ("horizontal", "vertical"):
            fine = problem(workload, machine, semantics=semantics, order=order)
            assert lower_bound(replace(fine, runs=coarse)).step_s <= lower_bound(fine).step_s * (1 + 1e-6)
        num_ran += num_above_bound(workload, machine, semantics, random_plans(rng, 8), runs=coarse)
    assert num_ran > 10
