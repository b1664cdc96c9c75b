"""What a search may spend: its programs have no more time than it, and it goes on as long as that pays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.toys import toy_machine, toy_workload
from tierplan.planner import loop
from tierplan.planner.milp.program import Program, Solution, Solver
from tierplan.planner.planning import plan
from tierplan.planner.results import PlanResult
from tierplan.planner.search import budget
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.race import OrderSearch, Racer


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


def test_a_search_is_stale_when_two_thirds_of_its_work_have_found_nothing_that_counts():
    spent = Budget(1.0, num_ops=1000)
    for left, step_s, is_stale in (
        (900, 2.0, False),
        (701, 1.9999, False),
        (700, 1.9999, True),  # three times what was spent for the step of 2 s
        (600, 1.0, False),
        (-199, 1.0, False),
        (-200, 0.9995, True),
        (-1000, 0.5, False),
    ):
        spent.ops_left = left
        spent.note(step_s)
        assert spent.is_stale(step_s) == is_stale
        assert not spent.is_stale(0.3), "so far from the bound of what is searched it has hardly begun"
    spent.restart()
    spent.note(3.0)
    assert spent.found_s == 3.0


def test_what_is_searched_beside_is_of_no_account() -> None:
    spent = Budget(1.0, num_ops=1000)
    spent.ops_left = 700
    spent.note(2.0)
    spent.ops_left = -100
    with spent.beside(400):
        assert (spent.ops_left, spent.found_s) == (400, float("inf"))
        spent.ops_left = -50
        spent.note(1.0)
    assert (spent.ops_left, spent.found_s, spent.found_ops) == (-100, 2.0, 300)


def test_far_from_the_bound_a_search_goes_on_as_long_as_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "DEFAULT_OPS", 20_000)
    monkeypatch.setattr(budget, "MORE_TIMES", 20.0)
    monkeypatch.setattr(loop, "FAR", 0.0)

    def planned(wait_times: float) -> PlanResult:
        monkeypatch.setattr(budget, "WAIT_TIMES", wait_times)
        return plan(toy_workload(24), toy_machine(device_bytes=200 << 20))

    no_longer, default, to_the_end = map(planned, (0.0, budget.WAIT_TIMES, 1e9))
    assert no_longer.num_simulated < default.num_simulated < to_the_end.num_simulated
    assert no_longer.step_s >= default.step_s >= to_the_end.step_s


def test_beyond_the_default_budget_the_order_of_the_lower_bound_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stayed with the one that had had luck at first, whose bound was near: 6.7B with 64 GiB, without a lesser
    machine's answer to begin with, took 8 % longer."""
    lucky, promising = _order_search(5.2, bound_s=4.3), _order_search(5.4, bound_s=3.6)
    went_on: list[OrderSearch] = []

    def go_on(self: loop.Search, chain: OrderSearch, ops: float) -> None:
        went_on.append(chain)
        chain.is_over = len(went_on) == 2
        self.budget.ops_left -= 1000

    monkeypatch.setattr(loop.Search, "_go_on_with", go_on)
    budgeted = Budget(1.0, num_ops=10_000, more_ops=5000)
    search = loop.Search(toy_workload(10), toy_machine(), None, budgeted, 0)
    search.begin()
    search.chains, search.has_all_orders = [lucky, promising], True
    monkeypatch.setattr(loop, "FAR", 0.0)
    budgeted.note(1.0)
    for _ in search._more():
        budgeted.note(1.0 / (1 + len(went_on)))
    assert went_on == [promising, promising, lucky, lucky, lucky]


def _order_search(best_s: float, *, bound_s: float) -> OrderSearch:
    racer = Racer(iter(()), bound_s, best_s)
    bounds = [cast(Any, SimpleNamespace(searched_s=1e-9))]
    return OrderSearch([], bounds, cast(Any, None), 0.5, 0.0, [racer], iter(()))
