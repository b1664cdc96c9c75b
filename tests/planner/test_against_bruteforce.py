"""The whole loop against brute force: every placement and action of small chains, each simulated.

`benchmarks/planner_bruteforce.py` does the same for 200 instances.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from tests.planner.instances import random_chain, random_machine
from tierplan.hwmodels.machine import Machine
from tierplan.planner.fluid import MODES, problem
from tierplan.planner.plan import Plan, UnitPlan
from tierplan.planner.search import WINDOWS, Budget, Evaluator, with_windows
from tierplan.planner.solve import InfeasiblePlan, plan
from tierplan.sim.workload import Workload


def best_of_all(workload: Workload, machine: Machine) -> float | None:
    """The shortest step over all plans with one action per unit's saved tensors, late updates or not, and windows."""
    p = problem(workload, machine, semantics="in-backward")
    evaluate = Evaluator(workload, machine, Budget(1e9))
    choices = []
    for u in range(len(p.units)):
        found = []
        for k, action in itertools.product(p.modes(u), ("keep", "recompute", "host", "nvme")):
            mode = MODES[k]
            if not p.has_nvme and action == "nvme":
                continue
            for late in (False, True) if mode.states != "device" else (False,):
                found.append(
                    UnitPlan(params=mode.params, states=mode.states, grads=mode.grads, acts=action, late_update=late)
                )
        choices.append(found)
    best: float | None = None
    quick: list[tuple[float, Plan]] = []
    for units in itertools.product(*choices):
        tried = evaluate(Plan(policy="all", units=units))
        if tried.step_s is not None:
            quick.append((tried.step_s, tried.plan))
    for step_s, made in sorted(quick, key=lambda item: item[0])[:30]:
        best = step_s if best is None else min(best, step_s)
        for windows in WINDOWS:
            again = evaluate(with_windows(made, windows))
            if again.step_s is not None:
                best = min(best, again.step_s)
    return best


def check(seed: int, *, drives: bool) -> None:
    rng = random.Random(seed)
    workload = random_chain(rng, 2, slots=1)
    machine = random_machine(rng, workload)
    if not drives:
        machine = without_drives(machine)
    best = best_of_all(workload, machine)
    try:
        result = plan(workload, machine, time_limit_s=20)
    except InfeasiblePlan:
        assert best is None
        return
    assert best is None or result.step_s <= best * 1.01, f"seed {seed}: {result.step_s} against {best}"
    assert result.lower_bound_s <= result.step_s


def without_drives(machine: Machine) -> Machine:
    """The machine with device and host only, with twice the memory to make up for it."""
    return replace(
        machine,
        tiers=tuple(replace(t, capacity_bytes=2 * t.capacity_bytes) for t in machine.tiers if t.kind != "nvme"),
        streams=tuple(s for s in machine.streams if not s.name.startswith("nvme")),
        shared_limits=(),
    )


@pytest.mark.parametrize("seed", range(5))
def test_the_loop_finds_the_best_plan(seed):
    check(seed, drives=False)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_loop_finds_the_best_plan_with_drives(seed):
    check(seed, drives=True)
