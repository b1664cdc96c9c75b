"""Linear programs by HiGHS against CBC (through PuLP) and against enumeration."""

from __future__ import annotations

import itertools
import random
import warnings
from dataclasses import replace
from math import inf

import numpy as np
import pulp
import pytest

from tests.planner.instances import random_chain, random_machine
from tierplan.hwmodels import load_machine
from tierplan.hwmodels.names import COMPUTE
from tierplan.planner.milp.amounts import problem
from tierplan.planner.milp.model import Margins, build
from tierplan.planner.milp.program import Draft, Program, Solver, extended
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training


def best_by_cbc(program: Program, *, integral: bool) -> float | None:
    """The optimum as another solver finds it, handed over by another layer; None where there is none."""
    model = pulp.LpProblem("program", pulp.LpMinimize)
    whole = set(program.integer.tolist()) if integral else set()
    columns = [
        model.add_variable(f"c{i}", low, None if high == inf else high, "Integer" if i in whole else "Continuous")
        for i, (low, high) in enumerate(zip(program.low, program.high, strict=True))
    ]
    model.setObjective(pulp.lpDot(program.cost.tolist(), columns))
    for row, (low, high) in enumerate(zip(program.row_low.tolist(), program.row_high.tolist(), strict=True)):
        entries = slice(program.starts[row], program.starts[row + 1])
        terms = pulp.lpDot(program.values[entries].tolist(), [columns[c] for c in program.columns[entries]])
        if low > -inf:
            model += terms >= low
        if high < inf:
            model += terms <= high
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 4 will take CBC from a package of its own
        model.solve(pulp.PULP_CBC_CMD(msg=False, threads=1, gapRel=0.0))
    return float(pulp.value(model.objective)) if model.sol_status == pulp.LpSolutionOptimal else None


def random_draft(seed: int) -> Draft:
    """A knapsack of whole numbers 0 to 3 with two rows."""
    rng = random.Random(seed)
    draft = Draft()
    columns = [draft.column(high=3, cost=-rng.randint(1, 9), integer=True) for _ in range(4)]
    for _ in range(2):
        draft.row([(float(rng.randint(1, 5)), c) for c in columns], high=float(rng.randint(6, 20)), family="room")
    return draft


def best_by_enumeration(program: Program) -> float:
    points = (np.array(point, dtype=float) for point in itertools.product(range(4), repeat=4))
    return min(float(program.cost @ point) for point in points if program.violation(point) <= 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_integers_against_enumeration_and_another_solver(seed):
    program = random_draft(seed).program()
    found = Solver().solve(program, integral=True, gap=0.0)
    assert found.status == "optimal"
    assert found.objective == pytest.approx(best_by_enumeration(program))
    assert found.objective == pytest.approx(best_by_cbc(program, integral=True))
    assert found.bound <= found.objective + 1e-6
    assert program.violation(found.values) <= 1e-6


@pytest.mark.parametrize("seed", range(6))
def test_another_solver_agrees_without_integers(seed):
    program = random_draft(seed).program()
    found = Solver().solve(program)
    assert found.objective == pytest.approx(best_by_cbc(program, integral=False))
    assert found.objective <= best_by_enumeration(program) + 1e-9


@pytest.mark.parametrize("semantics", ["in-backward", "exact-clip"])
@pytest.mark.parametrize("seed", range(4))
def test_another_solver_agrees_on_planning_programs(semantics, seed):
    rng = random.Random(seed)
    workload = random_chain(rng, 3, accumulation=rng.choice((1, 3)))
    program = build(problem(workload, random_machine(rng, workload), semantics=semantics)).program
    found, best = Solver().solve(program), best_by_cbc(program, integral=False)
    assert (best is not None) == found.usable
    if best is not None:
        assert found.objective == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("integral", [True, False])
def test_infeasible_is_said(integral):
    draft = random_draft(0)
    draft.row([(1.0, 0)], low=4.0, family="too much")
    found = Solver().solve(draft.program(), integral=integral)
    assert found.status == "infeasible"
    assert not found.usable


@pytest.mark.parametrize("seed", range(10))
def test_a_solver_that_is_given_one_program_after_the_other_is_right_about_each(seed):
    """Bounds, costs, coefficients and shapes change; sometimes it is asked for whole numbers, or for what cannot be."""
    rng = random.Random(seed)
    solver = Solver()
    program = random_draft(seed).program()
    for _ in range(12):
        change = rng.choice(("row_high", "values", "all values", "cost", "other", "impossible"))
        if change == "other":
            program = random_draft(rng.randrange(100)).program()
        elif change == "row_high":
            program = replace(program, row_high=program.row_high * rng.uniform(0.5, 1.5))
        elif change == "cost":
            program = replace(program, cost=program.cost * rng.uniform(0.5, 1.5))
        elif change == "all values":
            program = replace(program, values=program.values * rng.uniform(0.5, 1.5))
        elif change == "values":
            values = program.values.copy()
            values[rng.randrange(len(values))] *= rng.uniform(0.5, 1.5)
            program = replace(program, values=values)
        low = np.full(4, 3.0) if change == "impossible" else program.low
        asked, integral = replace(program, low=low), rng.random() < 0.3
        found, alone = (by.solve(asked, integral=integral, gap=0.0) for by in (solver, Solver()))
        assert found.status == alone.status
        if found.usable:
            assert found.objective == pytest.approx(alone.objective)


def test_a_program_that_was_solved_before_is_not_solved_again() -> None:
    """Whatever was solved in between: from where it ended there is nothing to do."""
    workload = random_chain(random.Random(6), 12)
    posed = problem(workload, random_machine(random.Random(6), workload), semantics="exact-clip")
    programs = [build(posed, margins=Margins(device_gb=frac * posed.device_gb)).program for frac in (0.0, 0.1, 0.2)]
    solver = Solver()
    first = [solver.solve(program) for program in programs]
    assert all(found.status == "optimal" and found.iterations > 0 for found in first)
    for program, before in zip(programs, first, strict=True):
        again = solver.solve(program)
        assert again.iterations == 0
        assert again.objective == pytest.approx(before.objective)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_program_begins_where_that_without_its_optional_columns_ended(accumulation: int) -> None:
    """At a point that costs the same, from which the optimum is nearer; the same optimum as from nothing."""
    shorter = 0
    for seed in range(8):
        rng = random.Random(seed)
        workload = random_chain(rng, 8, accumulation=accumulation)
        wide = problem(workload, random_machine(rng, workload), semantics="exact-clip")
        programs = [build(p).program for p in (replace(wide, brings_states=False), wide)]
        assert not programs[0].optional.any()
        narrower, solver = Solver(), Solver()
        inner = narrower.solve(programs[0])
        found, alone = solver.solve(programs[1], narrower=narrower), Solver().solve(programs[1])
        assert found.status == alone.status
        if not inner.usable:
            continue
        assert found.objective == pytest.approx(alone.objective)
        assert found.objective <= inner.objective * (1 + 1e-9)
        shorter += found.iterations < alone.iterations
        # asked again it begins where it ended itself, which is nearer than the one with less choice
        again = solver.solve(programs[1], narrower=narrower)
        assert again.objective == pytest.approx(alone.objective)
        assert again.iterations == 0
    assert shorter >= 6


def test_a_program_that_is_not_this_one_without_something_is_no_start() -> None:
    drafts = [random_draft(seed).program() for seed in (0, 1)]
    solver = Solver()
    solver.solve(drafts[0])
    assert solver.last_end is not None
    assert extended(*solver.last_end, drafts[0]) is not None
    assert extended(*solver.last_end, drafts[1]) is None


def test_violation_sees_rows_bounds_and_fractions():
    draft = Draft()
    x = draft.column(high=2, integer=True)
    draft.row([(1.0, x)], low=-inf, high=1.0, family="row")
    program = draft.program()
    for value, violation in ((1.0, 0.0), (2.0, 1.0), (0.5, 0.5), (-1.0, 1.0)):
        assert program.violation(np.array([value])) == pytest.approx(violation)
    assert program.violation(np.array([0.5]), integral=False) == 0.0


def test_a_repeated_column_is_summed():
    draft = Draft()
    x = draft.column(cost=-1)
    draft.row([(1.0, x), (1.0, x)], high=4.0, family="twice")
    assert Solver().solve(draft.program()).objective == pytest.approx(-2.0)


@pytest.mark.parametrize("lora", ["", "r=16,targets=all-linear"])
def test_what_one_operation_makes_is_decided_together_and_costs_its_work_once(lora: str) -> None:
    """Attention's output, its statistics and its seeds; and no set of groups costs more than its operations: adapters
    beside each other are made again from one norm."""
    machine = load_machine("desktop-4090")
    workload = load_workload("llama-3.1-8b", Training(sequence_length=4096, lora=lora))
    block = workload.units[3]
    groups = [g for g in problem(workload, machine, semantics="exact-clip").units[3].groups if g.slots]
    attention = {t.index for t in block.saved if "attention_bf16_flops" in t.recompute}
    assert len(attention) == 4
    assert [set(g.slots) & attention for g in groups if attention & set(g.slots)] == [attention]
    for chosen in itertools.chain.from_iterable(itertools.combinations(groups, n) for n in (1, 2, 3, len(groups))):
        work = block.work_again([k for g in chosen for k in g.slots])
        assert sum(g.recompute_s for g in chosen) <= machine.cost(COMPUTE, work).work_s * (1 + 1e-9)
    assert sum(g.recompute_s for g in groups) == pytest.approx(machine.cost(COMPUTE, work).work_s)


def test_where_all_is_dropped_a_tiny_tensor_stays_if_forward_would_run_further_than_needed() -> None:
    """Behind the last tensor that GPT's block saves comes its last product."""
    workload, machine = load_workload("gpt-6.7b", Training()), load_machine("desktop-4090")
    block, unit = workload.units[3], problem(workload, machine, semantics="exact-clip").units[3]
    acts = unit.acts(["recompute"] * len(block.saved))
    (kept,) = [k for k, act in enumerate(acts) if act == "keep"]
    assert block.saved[kept].size_bytes <= 16
    dropped = block.work_again([k for k in range(len(block.saved)) if k != kept])
    assert dropped["matmul_bf16_flops"] * 3 == block.forward["matmul_bf16_flops"] * 2
    assert unit.acts(["keep"] * len(block.saved)) == "keep"
    assert problem(workload, machine, semantics="exact-clip").units[0].stays is None
