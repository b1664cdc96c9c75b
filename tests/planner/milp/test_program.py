"""Linear programs by HiGHS and by CBC, through PuLP, against enumeration."""

from __future__ import annotations

import itertools
import random
from math import inf

import pytest

from tierplan.planner.milp.program import Program, solve

SOLVERS = ("highs", "cbc")


def random_program(seed: int) -> Program:
    """A knapsack of whole numbers 0 to 3 with two rows."""
    rng = random.Random(seed)
    program = Program()
    columns = [program.column(high=3, cost=-rng.randint(1, 9), integer=True) for _ in range(4)]
    for _ in range(2):
        program.row([(float(rng.randint(1, 5)), c) for c in columns], high=float(rng.randint(6, 20)), family="room")
    return program


def best_by_enumeration(program: Program) -> float:
    points = itertools.product(range(4), repeat=4)
    return min(
        sum(c * x for c, x in zip(program.cost, point, strict=True))
        for point in points
        if program.violation(point) <= 1e-9
    )


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("seed", range(6))
def test_integers_against_enumeration(solver, seed):
    program = random_program(seed)
    found = solve(program, integral=True, gap=0.0, solver=solver)
    assert found.status == "optimal"
    assert found.objective == pytest.approx(best_by_enumeration(program))
    assert found.bound <= found.objective + 1e-6
    assert program.violation(found.values) <= 1e-6


@pytest.mark.parametrize("seed", range(6))
def test_solvers_agree_without_integers(seed):
    program = random_program(seed)
    values = [solve(program, integral=False, solver=solver).objective for solver in SOLVERS]
    assert values[0] == pytest.approx(values[1])
    assert values[0] <= best_by_enumeration(program) + 1e-9


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("integral", [True, False])
def test_infeasible_is_said(solver, integral):
    program = random_program(0)
    program.row([(1.0, 0)], low=4.0, family="too much")
    found = solve(program, integral=integral, solver=solver)
    assert found.status == "infeasible"
    assert not found.usable


def test_violation_sees_rows_bounds_and_fractions():
    program = Program()
    x = program.column(high=2, integer=True)
    program.row([(1.0, x)], low=-inf, high=1.0, family="row")
    assert program.violation([1.0]) == 0
    assert program.violation([2.0]) == pytest.approx(1.0)
    assert program.violation([0.5]) == pytest.approx(0.5)
    assert program.violation([-1.0]) == pytest.approx(1.0)


def test_a_repeated_column_is_summed():
    program = Program()
    x = program.column(cost=-1)
    program.row([(1.0, x), (1.0, x)], high=4.0, family="twice")
    assert solve(program, integral=False).objective == pytest.approx(-2.0)
