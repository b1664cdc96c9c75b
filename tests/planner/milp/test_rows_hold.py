"""Every row of the program holds for every plan that runs: with its own decisions, in no more memory than it needs.

The bound alone would not show a wrong row, since the optimum mostly takes other decisions than a random plan. Here the
program has no choice left, and the machine nothing to spare: a row that asks for more than a schedule does makes it
infeasible, or longer than the simulated step.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.planner.instances import MB, chain, random_chain, random_plan, small_machine
from tests.random_plans import with_some_in_host
from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.scaling import with_capacity
from tierplan.planner.lowering import lower
from tierplan.planner.milp.amounts import Problem, problem
from tierplan.planner.milp.bounds import lower_bound
from tierplan.planner.milp.model import Margins, Model, build, with_actions
from tierplan.planner.milp.modes import MODES, Mode
from tierplan.planner.milp.program import Solver
from tierplan.planner.milp.rounding import actions_of
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.planner.plan_rules import Order, Place, PlanError
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.candidates import PlanSimulator
from tierplan.sim.analysis.completion import smallest_capacity_bytes
from tierplan.sim.step import Semantics
from tierplan.sim.workloads.work import CommonWork
from tierplan.sim.workloads.workload import Unit, Workload

ROOMY_MB = 100_000
RUNS = (range(1), range(1, 4), range(4, 5))
"""Of units that are alike, where there are five."""


def varied(rng: random.Random, accumulation: int) -> Workload:
    """A chain with all that takes memory or time on the way: work spaces, tables, tied gradients, masks, dropout."""
    chain = random_chain(rng, rng.choice((2, 3, 5)), slots=4, accumulation=accumulation)
    units = [_varied_unit(rng, unit) for unit in chain.units]
    if rng.random() < 0.6:
        units[0] = replace(
            units[0], kind="embed", saved=(), common=(), saves_input=False, saves_parameters=rng.random() < 0.5
        )
        units[-1] = replace(units[-1], kind="head")
        if rng.random() < 0.7:
            units[-1] = replace(units[-1], shares=units[0].name, num_parameters=rng.choice((1000, MB)))
    training = replace(chain.training, per_device_train_batch_size=4)
    return replace(
        chain, units=tuple(units), training=training, computed_for=None, shared_bytes=rng.choice((0, 0, 3 * MB))
    )


def _varied_unit(rng: random.Random, unit: Unit) -> Unit:
    work_bytes = rng.choice((0, 2 * MB, 10 * MB))
    saved = tuple(replace(t, replayable=rng.random() < 0.8) for t in unit.saved)
    indices = tuple(sorted(rng.sample(range(len(saved)), rng.randint(0, len(saved)))))
    least_s = min((saved[k].recompute["s"] for k in indices), default=0.0)
    common = CommonWork(tensors=indices, work={"s": rng.choice((0.5, 1.0)) * least_s})
    return replace(
        unit,
        saved=saved,
        common=(common,) if len(indices) > 1 else (),
        forward_work_bytes=rng.choice((0, 5 * MB)),
        backward_work_bytes=work_bytes,
        accumulating_work_bytes=work_bytes + rng.choice((0, 4 * MB)),
        recompute=rng.choice((None, {"s": 0.4 * unit.forward["s"]})),
        saves_input=rng.random() < 0.8,
    )


def snug(plan: UnitwisePlan, workload: Workload, machine: Machine) -> Machine | None:
    """The machine with what the plan needs of device and host memory; None where even a roomy one does not run it."""
    capacity_bytes = {}
    for tier in machine.tiers[:2]:
        try:
            least = smallest_capacity_bytes(lower(plan, workload, machine), tier.name)
        except PlanError:
            return None
        if least is None:
            return None
        capacity_bytes[tier.name] = least
    return with_capacity(machine, capacity_bytes)


def decided(p: Problem, plan: UnitwisePlan) -> Model:
    """The bound's program with the plan's placements and actions."""
    model = with_actions(build(p, margins=Margins(relaxed=True)), actions_of(p, plan))
    low, high = model.program.low.copy(), model.program.high.copy()
    for unit, choice, columns in zip(p.units, plan.units, model.cols.choices, strict=True):
        for k, column in columns.place.items():
            mode = Mode(params=choice.params, states=choice.states, grads=choice.grads, update=choice.update)
            in_host = {replace(mode, states="host"): choice.host_frac, mode: 1 - choice.host_frac}
            if choice.states != "nvme":
                in_host = {mode: 1.0}
            low[column] = high[column] = in_host.get(MODES[k], 0.0) if unit.gparams else 1.0
    return replace(model, program=replace(model.program, low=low, high=high))


@pytest.mark.parametrize(("semantics", "runs"), [("in-backward", None), ("exact-clip", RUNS), ("delayed-1", None)])
def test_rows_hold_for_random_plans(semantics: Semantics, runs: Sequence[range] | None) -> None:
    assert num_that_hold(semantics, runs, range(60)) > 20


@pytest.mark.parametrize("semantics", ["in-backward", "exact-clip"])
def test_rows_hold_where_activations_leave_in_codes(semantics: Semantics) -> None:
    assert num_that_hold(semantics, None, range(60), form="fp8") > 20


@pytest.mark.parametrize(("semantics", "runs"), [("in-backward", None), ("exact-clip", RUNS)])
def test_rows_hold_where_two_units_use_the_embeddings_parameters(
    semantics: Semantics, runs: Sequence[range] | None
) -> None:
    """As in T5, whose decoder has an embedding of its own beside the head."""
    assert num_that_hold(semantics, runs, range(60), shared_twice=True) > 20


@pytest.mark.nightly
@pytest.mark.parametrize("runs", [None, RUNS])
@pytest.mark.parametrize("semantics", ["in-backward", "exact-clip", "delayed-1"])
def test_rows_hold_for_many_random_plans(semantics: Semantics, runs: Sequence[range] | None) -> None:
    assert num_that_hold(semantics, runs, range(120)) > 50


def in_codes(workload: Workload, form: str) -> Workload:
    """Some saved tensors are of other types, of which integers are not coded."""
    types = ("bf16", "bf16", "fp32", "int64")
    units = tuple(
        replace(u, saved=tuple(replace(t, dtype=types[(k + t.index) % 4]) for t in u.saved))
        for k, u in enumerate(workload.units)
    )
    return replace(workload, units=units, training=replace(workload.training, activation_format=form))


def with_second_sharer(workload: Workload) -> Workload:
    """The head and the unit in the middle use the embedding's parameters, which take most of the device."""
    units = list(workload.units)
    units[0] = replace(units[0], num_parameters=50 * MB)
    for u in (len(units) // 2, len(units) - 1):
        units[u] = replace(units[u], shares=units[0].name)
    return replace(workload, units=tuple(units))


def with_one_in_each_group(plan: UnitwisePlan, p: Problem) -> UnitwisePlan:
    """What the program decides together has one action: that of the largest tensor."""
    units = []
    for choice, amounts in zip(plan.units, p.units, strict=True):
        first = {k: group.slots[0] for group in amounts.groups for k in group.slots}
        units.append(replace(choice, acts=tuple(choice.action(first[k]) for k in sorted(first)) or "keep"))
    return replace(plan, units=tuple(units))


@pytest.mark.parametrize("semantics", ["in-backward", "exact-clip"])
def test_the_bound_holds_where_each_tensor_is_decided_by_itself(semantics: Semantics) -> None:
    """Also within what the program decides together, and where several tensors are made again from the same work."""
    num = 0
    for seed in range(60):
        rng = random.Random(seed)
        workload = varied(rng, rng.choice((1, 2)))
        roomy = small_machine(device_mb=ROOMY_MB, host_mb=ROOMY_MB, link_mb_per_s=rng.choice((5, 50, 400)))
        plan = random_plan(rng, problem(workload, roomy, semantics=semantics))
        machine = snug(plan, workload, roomy)
        step_s = machine and PlanSimulator(workload, machine, Budget(1e9))(plan).step_s
        if machine and step_s:
            p = problem(workload, machine, semantics=semantics)
            num += any(
                len({choice.action(k) for k in group.slots}) > 1
                for choice, unit in zip(plan.units, p.units, strict=True)
                for group in unit.groups
            )
            assert lower_bound(p).step_s <= step_s * (1 + 1e-6), seed
    assert num > 5


def num_that_hold(
    semantics: Semantics, runs: Sequence[range] | None, seeds: range, *, form: str = "", shared_twice: bool = False
) -> int:
    """How many of the random plans of these seeds ran; each had to hold every row."""
    num_ran = 0
    for seed in seeds:
        rng = random.Random(1000 * len(semantics) + seed)
        order: Order = rng.choice(("horizontal", "vertical"))
        workload = varied(rng, rng.choice((1, 1, 2, 4)))
        if form:
            workload = in_codes(workload, form)
        if shared_twice:
            workload = with_second_sharer(workload)
        if semantics == "exact-clip":
            workload = replace(workload, training=replace(workload.training, max_grad_norm=1.0))
        roomy = small_machine(
            device_mb=ROOMY_MB,
            host_mb=ROOMY_MB,
            link_mb_per_s=rng.choice((50, 400, 4000)),
            adam_m_per_s=rng.choice((5, 100)),
            read_mb_per_s=rng.choice((20, 100)),
            ssd_bonus=rng.choice((None, 0.0, 0.3)),
        )
        sub_batches = rng.choice((1, 1, 2, 4)) if order == "vertical" else 1
        p = problem(workload, roomy, semantics=semantics, order=order, sub_batches=sub_batches)
        plan = replace(with_one_in_each_group(random_plan(rng, p), p), sub_batches=sub_batches)
        if seed % 2:
            plan = with_some_in_host(plan, rng)
        machine = snug(plan, workload, roomy)
        if machine is None:
            continue
        step_s = PlanSimulator(workload, machine, Budget(1e9))(plan).step_s
        if step_s is None:
            continue  # device and host are short at once
        num_ran += 1
        p = problem(workload, machine, semantics=semantics, order=order, sub_batches=sub_batches)
        if runs is not None and len(p.units) == 5:
            p = replace(p, runs=runs)
        model = decided(p, plan)
        found = Solver().solve(model.program)
        assert found.status == "optimal", (seed, plan)
        assert model.step_bound_s(found.objective) <= step_s * (1 + 1e-6), (seed, plan)
    return num_ran


@pytest.mark.parametrize("semantics", ["in-backward", "exact-clip"])
@pytest.mark.parametrize("states", ["host", "device"])
def test_gradients_that_are_complete_leave_room_for_those_that_follow(states: Place, semantics: Semantics) -> None:
    """The first unit needs most room where its gradients are added up, when all others' are updated or have left."""
    made = chain(forward_s=[10.0] * 4, parameters=[10 * MB] * 4, saved_mb=[[200], [1], [1], [1]], accumulation=2)
    units = (replace(made.units[0], accumulating_work_bytes=900 * MB), *made.units[1:])
    norm = 1.0 if semantics == "exact-clip" else None
    workload = replace(made, units=units, training=replace(made.training, max_grad_norm=norm))
    choice = UnitPlan(params=states, grads="device", states=states, input="keep", acts="recompute")
    plan = UnitwisePlan(policy="adding up", units=(choice,) * 4, semantics=semantics)
    roomy = small_machine(device_mb=ROOMY_MB, host_mb=ROOMY_MB, link_mb_per_s=4000, adam_m_per_s=1000)
    machine = snug(plan, workload, roomy)
    assert machine is not None
    step_s = PlanSimulator(workload, machine, Budget(1e9))(plan).step_s
    assert step_s is not None
    model = decided(problem(workload, machine, semantics=semantics), plan)
    found = Solver().solve(model.program)
    assert found.status == "optimal"
    assert model.step_bound_s(found.objective) <= step_s * (1 + 1e-6)
