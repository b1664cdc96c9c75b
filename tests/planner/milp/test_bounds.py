"""The lower bound: no plan beats it, closed forms reach it, and it moves the right way."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest

from tests.configs import config_of
from tests.planner.instances import (
    MB,
    chain,
    num_above_bound,
    random_chain,
    random_machine,
    random_plan,
    random_plans,
    small_machine,
)
from tests.random_plans import with_updates_here
from tests.toys import MIB, toy_machine, toy_workload, uniform_plan
from tierplan.hwmodels import load_machine
from tierplan.hwmodels.names import DEVICE, HOST_ADAM, NVME_READ, NVME_WRITE
from tierplan.hwmodels.scaling import with_capacity, with_faster
from tierplan.planner.milp.amounts import Problem, problem
from tierplan.planner.milp.bounds import compute_s, lower_bound, shortages
from tierplan.planner.milp.model import Margins, build
from tierplan.planner.milp.modes import MODES, Mode
from tierplan.planner.milp.program import Solver
from tierplan.planner.milp.totals import bound_of_totals
from tierplan.planner.plan import Plan, UnitPlan, UnitwisePlan
from tierplan.planner.plan_rules import Order
from tierplan.planner.planning import plan
from tierplan.planner.prediction import predict, predict_plan
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.candidates import PlanSimulator
from tierplan.sim.workloads.models import load_workload, workload_of
from tierplan.sim.workloads.workload import Training, Workload


@pytest.mark.sampled
@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize(("semantics", "form"), [("in-backward", ""), ("exact-clip", ""), ("in-backward", "fp8")])
def test_no_plan_that_runs_beats_the_bound(accumulation, semantics, form):
    """Random plans, sensible or not: each that completes takes at least the bound of its order."""
    num_ran = 0
    for seed in range(12):
        rng = random.Random(1000 * accumulation + seed)
        workload = random_chain(rng, rng.choice((2, 3, 4)), accumulation=accumulation)
        workload = replace(workload, training=replace(workload.training, activation_format=form))
        num_ran += num_above_bound(workload, random_machine(rng, workload), semantics, random_plans(rng, 12))
    assert num_ran > 40


def of_matrices(accumulation: int) -> Workload:
    """Blocks of matrices between tables: Muon's update of the ones takes a hundred times that of the others."""
    config = {"model_type": "gpt2", "n_embd": 256, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 4000}
    training = Training(sequence_length=64, gradient_accumulation_steps=accumulation, optimizer="muon")
    return workload_of("x", config, training)


@pytest.mark.parametrize("semantics", ["in-backward", "exact-clip"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_no_plan_beats_the_bound_where_updates_of_some_units_take_longer(accumulation: int, semantics: Any) -> None:
    workload, num_ran, rng = of_matrices(accumulation), 0, random.Random(accumulation)
    machine = load_machine("desktop-4090", ["gpu.reserve=0 GB"])

    def drawn(p: Problem) -> Iterator[Plan]:
        for _ in range(20):
            yield from (random_plan(rng, p), with_updates_here(random_plan(rng, p), rng))

    for device_mib in (40, 60, 200):
        num_ran += num_above_bound(workload, with_capacity(machine, {DEVICE: device_mib * MIB}), semantics, drawn)
    assert num_ran > 20


@pytest.mark.parametrize("link_mb_per_s", [50, 100, 200])
@pytest.mark.parametrize("device_mb", [380, 520, 700])
def test_no_late_updates_on_the_device_with_clipping_beat_the_bound(device_mb: int, link_mb_per_s: int) -> None:
    """They are made within forward, so that their states come while it runs."""
    made = chain(forward_s=[1.0] * 8, parameters=[10 * MB] * 8, saved_mb=[[1]] * 8)
    workload = replace(made, training=replace(made.training, max_grad_norm=1.0))
    machine = small_machine(device_mb=device_mb, host_mb=10**5, link_mb_per_s=link_mb_per_s, adam_m_per_s=0.05)
    choice, steps_s = UnitPlan(states="host", update="device", state_shards=4), list[float]()
    simulate_plan = PlanSimulator(workload, machine, Budget(1e9))
    for num_late in range(9):
        units = tuple(replace(choice, late_update=u >= 8 - num_late) for u in range(8))
        late = UnitwisePlan(policy="late", units=units, semantics="exact-clip", prefetch_states_units=0)
        steps_s += [step_s] if (step_s := simulate_plan(late).step_s) else []
    assert lower_bound(problem(workload, machine, semantics="exact-clip")).step_s <= min(steps_s) * (1 + 1e-6)


def test_updates_that_take_long_are_not_counted_as_the_quickest_ones_are() -> None:
    """Where hardly any of the states have room on the device, the host updates nearly all, block after block."""
    workload = of_matrices(1)
    machine = with_capacity(load_machine("desktop-4090"), {DEVICE: 6 * MIB})
    p = replace(problem(workload, machine, semantics="in-backward"), brings_states=False)
    on_host_s = [machine.cost(HOST_ADAM, workload.training.host_work(u)).alone_s for u in workload.units]
    bound = lower_bound(p)
    assert bound.feasible
    assert bound.step_s == pytest.approx(sum(on_host_s), rel=0.05)
    assert bound.step_s > 5 * sum(u.gparams for u in p.units) / p.rates.adam


@pytest.mark.parametrize("semantics", ["in-backward", "exact-clip", "delayed-1"])
def test_the_widest_program_alone_gives_the_step_of_the_bound(semantics):
    for seed in range(12):
        rng = random.Random(seed)
        workload = random_chain(rng, 4)
        p = problem(workload, random_machine(rng, workload), semantics=semantics)
        model = build(p, margins=Margins(relaxed=True))
        alone_s = model.step_bound_s(Solver().solve(model.program).objective)
        assert lower_bound(p).step_s == pytest.approx(max(alone_s, compute_s(p)))


def test_gradients_that_wait_on_the_drive_take_no_room_in_the_host():
    """With clipping they wait for the norm: a plan that parks them runs in less memory than they take together."""
    workload = chain(forward_s=[0.01] * 8, parameters=[10 * MB] * 8, saved_mb=[[1]] * 8, border_mb=0.1)
    machine = small_machine(device_mb=70, host_mb=90)
    assert 8 * 10 * MB * workload.training.grad_bytes > 90 * MB
    choice = UnitPlan(params="nvme", grads="nvme", states="nvme", state_shards=16)
    parking = UnitwisePlan(policy="parking", units=(choice,) * 8, semantics="exact-clip", update_order="backward")
    step_s = PlanSimulator(workload, machine, Budget(1e9))(parking).step_s
    assert step_s is not None
    p = problem(workload, machine, semantics="exact-clip")
    assert not shortages(p)
    assert lower_bound(p).step_s <= step_s


def test_gradients_that_will_wait_on_the_drive_add_up_in_host_memory_before() -> None:
    """In horizontal order each micro-batch's is added to those of the ones before, in memory: all of them at once."""
    chained = chain(
        forward_s=[0.01] * 8,
        parameters=[10 * MB] * 8,
        saved_mb=[[1]] * 8,
        border_mb=0.1,
        accumulation=3,
    )
    grads_mb = 8 * 10 * chained.training.grad_bytes
    for spare_mb, fits in ((-20, False), (200, True)):
        machine = small_machine(device_mb=70, host_mb=grads_mb - 70 + spare_mb)
        p = problem(chained, machine, semantics="exact-clip")
        assert lower_bound(p).feasible == fits


def test_gradients_that_leave_one_by_one_are_not_added_up_on_the_device() -> None:
    """No plan was said to fit into memory in which this one runs: room was asked for beside sums that it has not."""
    workload = workload_of("x", config_of("gpt2"), Training(gradient_accumulation_steps=2, sequence_length=16))
    machine = load_machine("desktop-4090", ["gpu.reserve=0 GB"])
    choice = UnitPlan(params="host", grads="host", states="host", acts="host", input="host")
    leaving = uniform_plan(workload, choice, semantics="in-backward", order="vertical")
    steady = predict_plan(leaving, workload, machine).steady
    assert steady is not None
    tight = with_capacity(machine, {DEVICE: steady.peak_bytes[DEVICE]})
    step_s = predict_plan(leaving, workload, tight).step_s
    assert step_s is not None
    bound = lower_bound(problem(workload, tight, semantics="in-backward", order="vertical"))
    assert bound.feasible
    assert bound.step_s <= step_s


@pytest.mark.parametrize(("device_mib", "host_mib"), [(80, 150), (80, 200)])
def test_states_that_pass_host_memory_have_no_more_room_there_than_it_has(device_mib: int, host_mib: int) -> None:
    """In horizontal order no update is made between the first backward and the last one. Meanwhile drives write what
    waits in host memory, and the rest of the states' way is beside the first and the last micro-batch."""
    num = 12
    workload = toy_workload(6, tied=False, gradient_accumulation_steps=num)
    machine = toy_machine(device_bytes=device_mib * MIB, host_bytes=host_mib * MIB)
    p = problem(workload, with_faster(machine, [NVME_READ, NVME_WRITE], 0.1), semantics="in-backward")
    write_gb_per_s, in_memory_gb = 0.1, (device_mib + host_mib) * MIB / 1e9
    written_gb = sum(u.states_gb for u in p.units) - in_memory_gb
    assert lower_bound(p).step_s > (num - 2) / num * compute_s(p) + written_gb / write_gb_per_s > 1.05 * compute_s(p)


@pytest.mark.parametrize(("home", "host_mb", "rate_mb_per_s"), [("host", 800, 50), ("nvme", 100, 50)])
def test_with_clipping_compute_waits_for_states_that_come_to_be_updated_and_had_no_room_before(
    home: Literal["host", "nvme"], host_mb: float, rate_mb_per_s: float
):
    """The host updates nothing in time. So all states are on the device between the last backward and the last of the
    next forwards, and no more of them is there before than device memory holds, or from drives, that and host memory.
    """
    workload = chain(
        forward_s=[1.0] * 4, parameters=[10 * MB] * 4, saved_mb=[[1]] * 4, border_mb=0.1, max_grad_norm=1.0
    )
    machine = small_machine(
        device_mb=200,
        host_mb=host_mb,
        link_mb_per_s=rate_mb_per_s,
        read_mb_per_s=50,
        write_mb_per_s=50,
        adam_m_per_s=0.001,
    )
    room_mb = 200 + (host_mb if home == "nvme" else 0)
    passes_s = (4 * 120 - room_mb) / rate_mb_per_s
    bound = lower_bound(problem(workload, machine, semantics="exact-clip"))
    assert bound.step_s > (9.0 + passes_s) * (1 - 1e-3)
    assert 9.0 + passes_s > 12.0
    choice = UnitPlan(params="device", grads="device", states=home, update="device", state_shards=16)
    late = replace(choice, late_update=True)
    for units in ((choice,) * 4, (choice, late, late, late)):
        waiting = UnitwisePlan(policy="waits", units=units, semantics="exact-clip", prefetch_states_units=0)
        step_s = PlanSimulator(workload, machine, Budget(1e9))(waiting).step_s
        assert step_s is not None
        assert bound.step_s <= step_s


def test_with_room_for_everything_the_bound_is_compute():
    workload = chain(forward_s=[1.0, 2.0], parameters=[MB, MB], saved_mb=[[5], [5]])
    bound = lower_bound(problem(workload, small_machine(device_mb=1e6), semantics="in-backward"))
    updates_s = 2 * MB * (2 * 12 + 2 + 2 * 2) / 1e12
    assert bound.step_s == pytest.approx(9.0 + updates_s, rel=1e-3)
    assert next(iter(bound.shares)) == "gpu0.compute"


def test_states_on_drives_alone_take_what_the_drive_takes():
    """12 bytes of states per parameter, read and written each step; parameters stay in host memory."""
    workload = chain(forward_s=[1e-6] * 6, parameters=[10 * MB] * 6, saved_mb=[[0.001]] * 6, border_mb=0.001)
    machine = small_machine(device_mb=50, host_mb=500, read_mb_per_s=50, write_mb_per_s=40, adam_m_per_s=1e6)
    bound = lower_bound(problem(workload, machine, semantics="in-backward"))
    all_states_mb = 12 * 60
    fits_elsewhere_mb = 500 + 50  # less what parameters take, so the truth lies between the two
    assert bound.step_s <= all_states_mb / 40
    assert bound.step_s >= (all_states_mb + 2 * 60 - fits_elsewhere_mb) / 40
    assert next(iter(bound.shares)) == "nvme.write"


def test_a_shared_drive_limit_adds_reads_and_writes():
    workload = chain(forward_s=[1e-6] * 6, parameters=[10 * MB] * 6, saved_mb=[[0.001]] * 6, border_mb=0.001)
    settings = {"device_mb": 50, "host_mb": 300, "adam_m_per_s": 1e6}
    apart = lower_bound(problem(workload, small_machine(**settings), semantics="in-backward"))
    shared = lower_bound(problem(workload, small_machine(**settings, ssd_bonus=0.0), semantics="in-backward"))
    assert shared.step_s == pytest.approx(apart.step_s * (1 / 50 + 1 / 40) / (1 / 40), rel=0.02)
    assert next(iter(shared.shares)) == "ssd"


def test_a_limit_that_reads_and_writes_do_not_use_up_alone_is_not_used_up():
    """All states go through the drive, written for longer than read: a plan takes what the bound's closed form says."""
    workload = chain(forward_s=[1e-6] * 6, parameters=[10 * MB] * 6, saved_mb=[[0.001]] * 6, border_mb=0.001)
    machine = small_machine(
        device_mb=500, host_mb=1000, adam_m_per_s=1e4, read_mb_per_s=80, write_mb_per_s=40, ssd_bonus=0.3
    )
    choice = UnitPlan(params="host", grads="host", states="nvme", state_shards=16)
    step_s = PlanSimulator(workload, machine, Budget(1e9))(
        UnitwisePlan(policy="", units=(choice,) * 6, semantics="in-backward", prefetch_states_units=6)
    ).step_s
    states_mb, at_once = 12 * 60, 0.65
    closed_s = states_mb / 40 + states_mb / 80 * (1 - at_once) / at_once
    assert step_s == pytest.approx(closed_s, rel=0.03)
    assert step_s > 1.05 * (states_mb / 40 + states_mb / 80) / 1.3
    model = build(problem(workload, machine, semantics="in-backward"))
    low = model.program.low.copy()
    low[
        [choice.place[MODES.index(Mode(params="host", states="nvme", grads="host"))] for choice in model.cols.choices]
    ] = 1.0
    found = Solver().solve(replace(model.program, low=low))
    assert closed_s * 0.999 <= model.step_bound_s(found.objective) <= step_s


@pytest.mark.parametrize("seed", range(8))
def test_more_of_anything_never_raises_the_bound(seed):
    rng = random.Random(seed)
    workload = random_chain(rng, 3)
    machine = random_machine(rng, workload)
    base = lower_bound(problem(workload, machine, semantics="in-backward")).step_s
    more = [with_capacity(machine, {t.name: 2 * t.capacity_bytes}) for t in machine.tiers]
    more += [with_faster(machine, [s.name], 2.0) for s in machine.streams]
    for better in more:
        assert lower_bound(problem(workload, better, semantics="in-backward")).step_s <= base * (1 + 1e-6)


def test_shares_explain_the_whole_bound():
    rng = random.Random(5)
    workload = random_chain(rng, 4)
    bound = lower_bound(problem(workload, random_machine(rng, workload), semantics="in-backward"))
    assert sum(bound.shares.values()) == pytest.approx(1.0)


def test_what_the_bound_fits_is_short_of_nothing():
    config = {"model_type": "gpt2", "n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 512, "vocab_size": 1000}
    workload = workload_of("small", config, Training(per_device_train_batch_size=64, sequence_length=512))
    machine = load_machine("laptop", ["gpu.reserve=7.9 GiB"])
    p = problem(workload, machine, semantics="in-backward", order="vertical", sub_batches=8)
    assert lower_bound(p).feasible
    assert not shortages(p)


@pytest.mark.parametrize("semantics", ["in-backward", "exact-clip"])
def test_few_windows_only_say_sooner_what_all_say(semantics):
    """On long chains: what fits nowhere, or takes as long as what is known, by the program of all windows as well."""
    fitted = 0
    for seed in range(12):
        rng = random.Random(seed)
        workload = random_chain(rng, 20, accumulation=rng.choice((1, 3)))
        order: Order = "horizontal" if seed % 2 else "vertical"
        p = problem(workload, random_machine(rng, workload), semantics=semantics, order=order)
        if seed % 3 == 0:
            p = replace(p, has_nvme=False, host_gb=p.host_gb / 5, device_gb=p.device_gb / 2)
        few, bound = lower_bound(p, beat_s=0.0), lower_bound(p)
        everything = Solver().solve(build(p, margins=Margins(relaxed=True)).program)
        assert few.model is None
        assert bound.feasible == (everything.status == "optimal")
        if bound.feasible:
            fitted += 1
            assert few.feasible
            assert few.step_s <= bound.step_s * (1 + 1e-6)
            assert lower_bound(p, beat_s=bound.step_s * (1 + 1e-6)).step_s == bound.step_s
            assert lower_bound(p, beat_s=few.step_s).model is None
    assert 3 < fitted < 12


def test_few_windows_bound_long_chains_of_alike_units_nearly_as_well():
    workload = load_workload("llama-3.1-8b", Training(per_device_train_batch_size=4, sequence_length=1024))
    p = problem(workload, load_machine("desktop-4090"), semantics="in-backward")
    assert lower_bound(p, beat_s=0.0).step_s >= 0.99 * lower_bound(p).step_s


@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_shortage_names_the_least_memory_that_would_do(tier):
    """What it names makes the relaxation feasible; a little less does not."""
    workload = chain(forward_s=[1.0] * 3, parameters=[4 * MB] * 3, saved_mb=[[5]] * 3)
    machine = small_machine(device_mb=5 if tier == "device" else 60, host_mb=400 if tier == "device" else 20, nvme_mb=0)
    assert not lower_bound(problem(workload, machine, semantics="in-backward")).feasible
    short = next(s for s in shortages(problem(workload, machine, semantics="in-backward")) if s.tier == tier)

    assert short.short_bytes == short.needed_bytes - short.capacity_bytes > 0
    for size, is_enough in ((int(short.needed_bytes * 1.001) + 1000, True), (int(short.needed_bytes * 0.98), False)):
        other = with_capacity(machine, {DEVICE if tier == "device" else tier: size})
        assert lower_bound(problem(workload, other, semantics="in-backward")).feasible == is_enough


@pytest.mark.sampled
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("semantics", ["in-backward", "exact-clip"])
def test_no_plan_beats_the_bound_where_backward_reads_no_parameters(accumulation, semantics):
    """Tables of embeddings anywhere in the chain, under any kind, on links that are slow enough to be what binds."""
    num_ran = num_tables = 0
    for seed in range(10):
        rng = random.Random(100 * accumulation + seed)
        workload = with_tables(rng, random_chain(rng, 5, accumulation=accumulation))
        num_tables += sum(not u.saves_parameters for u in workload.units)
        machine = small_machine(
            device_mb=rng.choice((60, 120, 400)),
            link_mb_per_s=rng.choice((20, 50, 100)),
            adam_m_per_s=1000,
            nvme_mb=rng.choice((0, 10_000)),
            read_mb_per_s=200,
            write_mb_per_s=200,
        )
        draw = random_plans(rng, 10)
        num_ran += num_above_bound(workload, machine, semantics, lambda p, draw=draw: map(fetching, draw(p)))
    assert num_ran > 40
    assert num_tables > 15


def with_tables(rng: random.Random, workload: Workload) -> Workload:
    """Some units are only tables and hardly compute, whatever their kind; the ends may be an embed and a head."""
    units = []
    for u, unit in enumerate(workload.units):
        ends: dict[int, Literal["embed", "head"]] = {0: "embed", len(workload.units) - 1: "head"}
        kind = ends.get(u, "block") if rng.random() < 0.5 else "block"
        unit = replace(unit, kind=kind, saved=unit.saved if kind == "block" else ())
        if rng.random() < 0.6:
            quick = {"s": 0.01}
            unit = replace(unit, saves_parameters=False, num_parameters=10 * MB, forward=quick, backward=quick)
        elif kind == "embed":
            unit = replace(unit, saves_parameters=rng.random() < 0.5)
        units.append(unit)
    return replace(workload, units=tuple(units))


def fetching(plan: Plan) -> Plan:
    """The plan with whatever is not needed on the device off it, in host memory: what is fetched then binds."""
    units = (replace(c, params="host", states="host", grads="host") if c.states == "device" else c for c in plan.units)
    return replace(plan, units=tuple(units))


@pytest.mark.sampled
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_no_plan_beats_the_bound_with_an_embedding_and_a_head(tied, accumulation):
    workload = toy_workload(3, tied=tied, slots=2, gradient_accumulation_steps=accumulation)
    rng = random.Random(7)
    machines = (toy_machine(device_bytes=device_mib * MIB) for device_mib in (60, 120, 250))
    assert sum(num_above_bound(workload, m, "in-backward", random_plans(rng, 10)) for m in machines) > 10


def test_inputs_of_recomputed_blocks_take_memory_and_may_leave() -> None:
    """Six blocks whose inputs autograd does not save, as in Llama: made again, each needs its input, 20 MB, once more.

    All saved tensors together have no room on the device, and neither have all inputs: two of them leave, at least.
    """
    blocks = chain(
        forward_s=[0.5] * 6, parameters=[1000] * 6, saved_mb=[[200.0]] * 6, recompute_s=[[0.5]] * 6, border_mb=20
    )
    workload = replace(blocks, units=tuple(replace(unit, saves_input=False) for unit in blocks.units))
    machine = small_machine(device_mb=320, nvme_mb=0, link_mb_per_s=40)
    p = problem(workload, machine, semantics="in-backward")
    slow = small_machine(device_mb=320, nvme_mb=0, link_mb_per_s=4)
    assert p.units[1].groups[0].recomputable
    assert not p.units[1].groups[0].slots
    found = plan(workload, machine, policies=())
    assert isinstance(found.plan, UnitwisePlan)
    assert "host" in {choice.input for choice in found.plan.units}
    slower = lower_bound(problem(workload, slow, semantics="in-backward")).step_s
    assert slower > lower_bound(p).step_s + 0.1
    assert lower_bound(p).step_s <= found.step_s


def test_where_no_other_stream_works_computing_takes_no_longer() -> None:
    """A calibration says how much longer ops of computing take beside others: not where all stays on the device."""
    training = Training(dtype="bf16", sequence_length=128, gradient_accumulation_steps=2)
    workload, machine = load_workload("gpt-0.1b", training), load_machine("desktop-4090")
    streams = (replace(s, beside_s=2e-4) if s.name == "gpu0.compute" else s for s in machine.streams)
    beside = replace(machine, streams=tuple(streams))
    alone_s = predict("in-memory", workload, beside).step_s
    assert alone_s is not None
    assert alone_s == predict("in-memory", workload, machine).step_s
    posed = problem(workload, beside, semantics="in-backward")
    whole_ns = alone_s * (1 + 1e-5)
    assert lower_bound(posed).step_s <= whole_ns
    assert bound_of_totals(posed, 1).step_s <= whole_ns
    host = predict("zero-offload", workload, beside).step_s
    assert host is not None
    assert host > 1.5 * alone_s
