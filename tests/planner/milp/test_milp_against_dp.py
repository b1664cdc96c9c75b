"""With nothing to move, keep or recompute is a knapsack along the chain: the program against dynamic programming."""

from __future__ import annotations

import random

import pytest

from tests.planner.instances import MB, chain, small_machine
from tierplan.planner.milp.amounts import problem
from tierplan.planner.milp.model import build, fractions
from tierplan.planner.milp.program import Solver
from tierplan.planner.milp.rounding import round_to_plan
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.candidates import PlanSimulator
from tierplan.sim.workloads.workload import Workload


def keep_or_recompute_s(
    workload: Workload, capacity_mb: int, resident_mb: int, border_mb: int, grads_mb: int
) -> float | None:
    """Least extra seconds of recomputation, by dynamic programming over what is kept so far, in whole MB.

    Written from the schedule's rules, not from the program: forward of unit u holds what is kept of the units before
    it, all that u saves, its input and its output, and the inputs of all units before; backward of u holds what is
    kept up to u, what it makes again, its input, both gradients of borders, and its parameters' gradients.
    """
    units = workload.units
    sizes = [[t.size_bytes // MB for t in u.saved] for u in units]
    costs = [[t.recompute["s"] for t in u.saved] for u in units]
    states: dict[int, float] = {0: 0.0}  # MB kept -> least cost
    last = len(units) - 1
    for u in range(len(units)):
        following: dict[int, float] = {}
        inputs = border_mb * u  # x of units 1 ... u
        for kept, cost in states.items():
            output = border_mb if u < last else 0
            if resident_mb + kept + inputs + sum(sizes[u]) + output > capacity_mb:
                continue
            for mask in range(2 ** len(sizes[u])):
                keeps = sum(s for k, s in enumerate(sizes[u]) if mask >> k & 1)
                again = sum(sizes[u]) - keeps
                seconds = sum(c for k, c in enumerate(costs[u]) if not mask >> k & 1)
                gradients = (border_mb if u < last else 0) + (border_mb if u else 0) + grads_mb
                if resident_mb + kept + keeps + inputs + again + gradients > capacity_mb:
                    continue
                after = kept + keeps
                if cost + seconds < following.get(after, float("inf")):
                    following[after] = cost + seconds
        states = following
    return min(states.values(), default=None)


@pytest.mark.parametrize("seed", range(60))
def test_recompute_choices_against_dynamic_programming(seed):
    rng = random.Random(seed)
    num, slots = rng.choice((2, 3, 4, 5)), rng.choice((1, 2, 3))
    saved = [[rng.randint(1, 12) for _ in range(slots)] for _ in range(num)]
    costs = [[rng.randint(1, 20) / 100 for _ in range(slots)] for _ in range(num)]
    # forward costs the same however it is made again: no discount or surcharge for making everything again
    forward = [sum(c) for c in costs]
    workload = chain(forward_s=forward, parameters=[MB] * num, saved_mb=saved, recompute_s=costs, border_mb=1)
    resident_mb = num * (2 + 12)
    capacity_mb = resident_mb + rng.randint(max(map(sum, saved)) + num, sum(map(sum, saved)) + num + 6)
    machine = small_machine(device_mb=capacity_mb, host_mb=0, nvme_mb=0)
    p = problem(workload, machine, semantics="in-backward")
    expected = keep_or_recompute_s(workload, capacity_mb, resident_mb, border_mb=1, grads_mb=2)
    model = build(p, integral=True)
    found = Solver().solve(model.program, integral=True, gap=0.0)
    if expected is None:
        assert found.status == "infeasible"
        return
    base_s = sum(3 * f for f in forward) + sum(u.update_s for u in p.units)
    shares = fractions(model, found)
    assert shares.step_s - base_s == pytest.approx(expected, abs=1e-6)
    tried = PlanSimulator(workload, machine, Budget(100))(round_to_plan(p, shares))
    assert tried.step_s == pytest.approx(base_s + expected, rel=1e-6), tried.reason
