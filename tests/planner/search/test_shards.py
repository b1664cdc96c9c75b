"""States in shards: local moves keep plans valid, and a tight host memory makes shards worth their ops."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.toys import MIB, toy_machine, toy_workload, uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.milp.amounts import problem
from tierplan.planner.milp.modes import MODES
from tierplan.planner.plan import UnitPlan
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.candidates import PlanSimulator
from tierplan.planner.search.local.moves import FAMILIES, with_placement, with_shards
from tierplan.planner.search.local.shifts import with_more_in_host


def test_every_move_from_a_plan_in_shards_is_a_plan() -> None:
    workload = toy_workload(3)
    p = problem(workload, toy_machine(), semantics="in-backward")
    plan = with_shards(uniform_plan(workload, UnitPlan(params="host", grads="host", states="nvme")), 4)
    mixed = replace(plan, units=(UnitPlan(params="host", grads="host", states="host"), *plan.units[1:]))
    num_moves = 0
    for start in (plan, mixed):
        for family in FAMILIES:
            for move in family(p, start):
                changed = move(start)
                if changed is not None:
                    changed.check(workload)
                    num_moves += 1
    assert num_moves > 100


def test_a_unit_that_moves_to_nvme_travels_in_shards_like_the_others() -> None:
    workload = toy_workload(3)
    plan = with_shards(uniform_plan(workload, UnitPlan(params="host", grads="host", states="nvme")), 4)
    to_host = next(mode for mode in MODES if (mode.params, mode.states, mode.grads) == ("host", "host", "host"))
    to_nvme = next(mode for mode in MODES if (mode.params, mode.states, mode.grads) == ("host", "nvme", "host"))
    there = with_placement(plan, 1, to_host)
    assert [unit.state_shards for unit in there.units] == [4, 1, 4, 4, 4]
    assert with_placement(there, 1, to_nvme) == plan


def test_parts_make_a_plan_fit_that_does_not_fit_whole() -> None:
    """Embed, the largest unit, has 120 MiB of states; in quarters, two of them fit beside all else."""
    workload = toy_workload(6, tied=False)
    machine = toy_machine(host_bytes=110 * MIB)
    simulate_plan = PlanSimulator(workload, machine, Budget(100.0))
    whole = uniform_plan(workload, UnitPlan(params="device", grads="device", states="nvme"))
    assert not simulate_plan(whole).fits
    assert simulate_plan(with_shards(whole, 4)).fits


def test_shards_in_host_memory_take_what_room_there_is() -> None:
    """With room for half of a unit's states more, half of them stay, and the drive moves so many bytes fewer."""
    workload = toy_workload(3)
    machine = toy_machine()
    plan = with_shards(uniform_plan(workload, UnitPlan(params="host", grads="host", states="nvme")), 4)
    states_gb = problem(workload, machine, semantics="in-backward").units[1].states_gb
    one = replace(plan, units=(plan.units[0], replace(plan.units[1], host_shards=2), *plan.units[2:]))
    more = lower(one, workload, machine)
    moved = [op for op in more.ops if op.kind == "copy" and op.key.startswith(("read_states/L0", "write_states/L0"))]
    assert len(moved) == 2 * 2
    before, after = (
        sum(op.work["bytes"] for op in lower(p, workload, machine).ops if "states" in op.key) for p in (plan, one)
    )
    assert before - after == pytest.approx(2 * states_gb * 1e9 / 2)


def test_room_in_host_memory_is_filled_with_shards() -> None:
    workload = toy_workload(3)
    p = problem(workload, toy_machine(), semantics="in-backward")
    plan = with_shards(uniform_plan(workload, UnitPlan(params="host", grads="host", states="nvme")), 4)
    assert with_more_in_host(plan, p, 0.0) is None
    half = with_more_in_host(plan, p, p.units[0].states_gb / 2 * 1.001)
    assert half is not None
    assert half.units[0].host_shards == 2
    every = with_more_in_host(plan, p, 1e9)
    assert every is not None
    assert {unit.states for unit in every.units} == {"host"}


def test_room_in_host_memory_is_filled_with_parameters_first() -> None:
    """Drives read them twice and write them, states are read once and written."""
    workload = toy_workload(3, tied=False)
    p = problem(workload, toy_machine(), semantics="in-backward")
    plan = with_shards(uniform_plan(workload, UnitPlan(params="nvme", grads="host", states="nvme")), 4)
    params_gb = sum(unit.params_gb for unit in p.units)
    all_params = with_more_in_host(plan, p, params_gb * 1.001)
    assert all_params is not None
    assert {unit.params for unit in all_params.units} == {"host"}
    assert {(unit.states, unit.host_shards) for unit in all_params.units[:-1]} == {("nvme", 0)}
    more = with_more_in_host(plan, p, params_gb + p.units[0].states_gb / 2 * 1.001)
    assert more is not None
    assert sum(unit.host_shards for unit in more.units) > 0
    parked = with_shards(
        uniform_plan(workload, UnitPlan(params="nvme", grads="nvme", states="nvme"), semantics="exact-clip"), 4
    )
    clipped = problem(workload, toy_machine(), semantics="exact-clip")
    filled = with_more_in_host(parked, clipped, 1e9)
    assert filled is not None
    assert {(unit.params, unit.grads, unit.states) for unit in filled.units} == {("host", "nvme", "nvme")}
