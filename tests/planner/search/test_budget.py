"""Time that a search has: its programs have no more of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.toys import toy_machine, toy_workload
from tierplan.planner.milp.program import Program, Solution, Solver
from tierplan.planner.planning import plan


def test_a_program_is_solved_in_the_time_that_its_search_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program at which the solver goes round in circles would take a minute of a search of seconds."""
    limits_s: list[float] = []

    class Timed(Solver):
        def solve(self, program: Program, *, time_limit_s: float = 60.0, **options: Any) -> Solution:
            limits_s.append(time_limit_s)
            return super().solve(program, time_limit_s=time_limit_s, **options)

    timed = Timed()
    monkeypatch.setattr("tierplan.planner.search.from_program.solver_of", lambda problem, solver: timed)
    monkeypatch.setattr("tierplan.planner.search.from_program.solve_whole", lambda *args, **options: None)
    plan(toy_workload(10), toy_machine(), time_limit_s=3.0)
    assert limits_s
    assert max(limits_s) <= 3.0
