"""The loop: never worse than a policy, honest about what it lacks, the same twice, and best so far when interrupted."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from tests.planner.instances import MB, chain, random_chain, random_machine, small_machine
from tests.toys import MIB, toy_machine, toy_workload, uniform_plan
from tierplan.hwmodels import load_machine
from tierplan.hwmodels.machine import Machine
from tierplan.planner import infeasible, loop
from tierplan.planner.compared import options_of
from tierplan.planner.infeasible import InfeasiblePlan, largest_batch
from tierplan.planner.lowering.tiling import with_batch
from tierplan.planner.milp.amounts import problem
from tierplan.planner.milp.bounds import compute_s
from tierplan.planner.milp.model import Margins, build, fractions
from tierplan.planner.milp.program import Solver
from tierplan.planner.milp.rounding import round_to_plan
from tierplan.planner.plan import UnitPlan, UnitwisePlan, is_same
from tierplan.planner.plan_rules import PlanError
from tierplan.planner.planning import plan
from tierplan.planner.policies import POLICIES
from tierplan.planner.prediction import predict
from tierplan.planner.search import budget, from_program
from tierplan.planner.search.batches import plan_sequences
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.candidates import Candidate, PlanSimulator
from tierplan.planner.search.from_program import late_updates
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training
from tierplan.studies.evaluate import machine_of, workload_at
from tierplan.studies.study import Point


def compare_with(monkeypatch: pytest.MonkeyPatch, policies: dict[str, Any]) -> None:
    """As if there were no others."""
    for module in ("compared", "loop", "policies"):
        monkeypatch.setattr(f"tierplan.planner.{module}.POLICIES", policies)
    monkeypatch.setattr(infeasible, "TRIED", ())


@pytest.mark.sampled
@pytest.mark.parametrize("device_mib", [80, 160, 400])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_never_slower_than_a_policy(device_mib, accumulation):
    workload = toy_workload(4, gradient_accumulation_steps=accumulation)
    result = plan(workload, toy_machine(device_bytes=device_mib * MIB), time_limit_s=1)
    fitting = [p.step_s for p in result.policies.values() if p.step_s is not None and p.is_rival]
    assert fitting
    assert result.step_s <= min(fitting)
    assert result.lower_bound_s <= result.step_s
    assert 0 <= result.gap < 1
    assert result.schedule.meta["model"] == "toy"


@pytest.mark.parametrize(
    ("asked", "policy"),
    [
        ({"orders": ("horizontal",)}, "vertical"),
        ({"semantics": "exact-clip"}, "sliding-window"),
        ({}, "harmony"),
        ({}, "virtual-memory"),
    ],
)
def test_the_bound_covers_the_shape_of_a_policys_plan_that_wins(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], policy: str
) -> None:
    """Other orders, other semantics of the same numbers, packs and pages: what was searched has bounds of its own."""
    monkeypatch.setattr(loop.Search, "_rounds", lambda *args: iter(()))
    for device_mib in (200, 400):
        workload = toy_workload(4, gradient_accumulation_steps=3)
        machine = toy_machine(device_bytes=device_mib * MIB)
        result = plan(workload, machine, policies=[policy], time_limit_s=1, **asked)
        assert result.plan.policy == policy
        assert compute_s(problem(workload, machine, semantics="in-backward")) * 0.999 < result.lower_bound_s
        assert result.lower_bound_s <= result.step_s
        has_program = policy in ("vertical", "sliding-window")
        assert has_program != any("totals" in note for note in result.notes)


def test_policies_are_compared_on_the_machine_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search leaves out memory that no step uses; zero-infinity's buffers use it before the first step."""
    monkeypatch.setattr(loop.Search, "_rounds", lambda *args: iter(()))
    workload, machine = toy_workload(4), toy_machine(device_bytes=200 * MIB, host_bytes=4096 * MIB)
    alone = predict("zero-infinity", workload, machine)
    assert alone.fits
    assert plan(workload, machine, time_limit_s=1).policies["zero-infinity"].step_s == pytest.approx(alone.step_s)


def test_one_micro_batch_has_one_search_whatever_order_a_policy_says(monkeypatch: pytest.MonkeyPatch) -> None:
    raced: list[int] = []
    monkeypatch.setattr(loop, "race", lambda racers, *_, **__: raced.append(len(racers)) or iter(()))
    found = plan(toy_workload(4), toy_machine(device_bytes=200 * MIB), time_limit_s=1, policies=["vertical"])
    assert isinstance(found.plan, UnitwisePlan)
    assert found.plan.order == "vertical"
    assert raced == [1]


def test_plans_are_the_same_twice():
    rng = random.Random(3)
    workload = random_chain(rng, 2, slots=1)
    machine = random_machine(rng, workload)
    first, second = (plan(workload, machine, time_limit_s=2, policies=["zero-offload"]) for _ in range(2))
    assert first.plan == second.plan
    assert first.step_s == second.step_s


def test_what_is_short_is_said_in_bytes():
    workload = chain(forward_s=[1.0] * 3, parameters=[40 * MB] * 3, saved_mb=[[5]] * 3)
    with pytest.raises(InfeasiblePlan, match="host memory is short by at least") as caught:
        plan(workload, small_machine(device_mb=300, host_mb=500, nvme_mb=0), time_limit_s=5)
    by_tier = {s.tier: s for s in caught.value.shortages}
    assert set(by_tier) == {"device", "host"}
    enough = small_machine(device_mb=300, host_mb=by_tier["host"].needed_bytes / MB * 1.5, nvme_mb=0)
    assert plan(workload, enough, time_limit_s=5).step_s > 0


def test_what_is_short_is_short_however_micro_batches_are_cut():
    workload = chain(forward_s=[1.0] * 3, parameters=[MB] * 3, saved_mb=[[160]] * 3, batch=4)
    with pytest.raises(InfeasiblePlan, match="device memory is short by at least") as caught:
        plan(workload, small_machine(device_mb=40, host_mb=600, nvme_mb=0), time_limit_s=2)
    enough_mb = 60
    assert caught.value.shortages[0].needed_bytes < enough_mb * MB
    assert plan(workload, small_machine(device_mb=enough_mb, host_mb=600, nvme_mb=0), time_limit_s=2).step_s > 0


def test_where_eight_parts_of_a_micro_batch_have_no_room_sixteen_are_tried_before_single_sequences():
    workload = chain(forward_s=[1.0] * 3, parameters=[MB] * 3, saved_mb=[[640]] * 3, batch=32)
    found = plan(workload, small_machine(device_mb=70, host_mb=6000, nvme_mb=0), time_limit_s=1).plan
    assert isinstance(found, UnitwisePlan)
    assert found.sub_batches == 16


def test_a_search_that_the_clock_ended_does_not_say_that_nothing_fits(monkeypatch):
    compare_with(monkeypatch, {})
    monkeypatch.setattr(budget.Budget, "is_out_of_time", True)
    with pytest.raises(InfeasiblePlan, match=r"no plan that fits 'chain of 3' .* was found in 2 s.*\(--time-limit\)$"):
        plan(chain(forward_s=[1.0] * 3, parameters=[MB] * 3, saved_mb=[[5]] * 3), small_machine(), time_limit_s=2)


def test_that_nothing_fits_is_said_where_a_bound_says_so():
    """Parameters of 2 MB never pass through a host of 1 MB, but in amounts as small as a bound's they would."""
    workload = chain(forward_s=[0.03] * 4, parameters=[MB] * 4, saved_mb=[[3]] * 4, border_mb=1)
    with pytest.raises(
        InfeasiblePlan, match=r"^no plan that fits .* was found, and no bound .* the nearest does"
    ) as caught:
        plan(workload, small_machine(device_mb=20, host_mb=1, nvme_mb=1000), time_limit_s=1)
    assert caught.value.may_fit
    assert not caught.value.shortages
    with pytest.raises(InfeasiblePlan, match=r"^no plan fits 'chain of 4'") as caught:
        plan(workload, small_machine(device_mb=4, host_mb=1, nvme_mb=1000), time_limit_s=1)
    assert not caught.value.may_fit
    assert caught.value.shortages


def test_clipping_refuses_updates_in_backward():
    workload = chain(forward_s=[1.0], parameters=[MB], saved_mb=[[5]], max_grad_norm=1.0)
    with pytest.raises(PlanError, match=r"delayed by a step .* are not clipped"):
        plan(workload, small_machine(), semantics="delayed-1")
    with pytest.raises(PlanError, match="exact-clip"):
        plan(workload, small_machine(), semantics="in-backward")
    assert plan(workload, small_machine(), time_limit_s=3).plan.semantics == "exact-clip"


def test_an_interrupted_search_returns_its_best(monkeypatch):
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(from_program, "tune", interrupt)
    result = plan(toy_workload(4), toy_machine(device_bytes=100 * MIB), time_limit_s=5)
    assert result.status == "interrupted"
    assert result.best_policy == result.plan.policy
    assert any("interrupted" in note for note in result.notes)


def test_an_interrupt_before_any_plan_is_an_interrupt(monkeypatch):
    monkeypatch.setattr(from_program, "tune", _interrupt)
    compare_with(monkeypatch, {})
    with pytest.raises(KeyboardInterrupt):
        plan(toy_workload(4), toy_machine(), policies=())


def _interrupt(*args: object, **kwargs: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("seed", range(10))
def test_rounding_stays_within_one_unit_of_the_solution(seed):
    """Over identical units, what every prefix gets of an action is within one unit of the solution's share."""
    rng = random.Random(seed)
    num = 12
    workload = chain(
        forward_s=[0.1] * num, parameters=[MB] * num, saved_mb=[[4, 8]] * num, recompute_s=[[0.01, 0.05]] * num
    )
    machine = small_machine(device_mb=rng.uniform(120, 260), host_mb=400, link_mb_per_s=rng.choice((50, 200)))
    p = problem(workload, machine, semantics="in-backward")
    model = build(p, margins=Margins(device_gb=0.005))
    solution = Solver().solve(model.program)
    shares = fractions(model, solution)
    made = round_to_plan(p, shares)
    for k in range(2):
        group = next(g for g, found in enumerate(p.units[1].groups) if found.slots == (k,))
        for action in ("keep", "recompute", "host", "nvme"):
            got = wanted = 0.0
            for u in range(num):
                g = group if p.units[u].groups[0].slots == () else group - 1
                wanted += shares.action[u][g].get(action, 0.0)
                got += made.units[u].action(k) == action
                assert abs(got - wanted) <= 1 + 1e-6


def test_late_updates_are_those_that_backward_has_no_time_for():
    rng = random.Random(0)
    workload = random_chain(rng, 6)
    p = problem(workload, random_machine(rng, workload), semantics="in-backward")
    model = build(p)
    made = round_to_plan(p, fractions(model, Solver().solve(model.program)))
    nums = [
        sum(unit.late_update for unit in late_updates(p, made, stretch=s).units) for s in (float("inf"), 2.0, 1.0, 0.5)
    ]
    assert nums[0] == 0
    assert nums == sorted(nums)


def test_late_updates_do_not_change_what_is_moved():
    workload = toy_workload(4)
    machine = toy_machine()
    simulate_plan = PlanSimulator(workload, machine, Budget(100))
    p = problem(workload, machine, semantics="in-backward")
    places = UnitPlan(params="host", grads="host", states="nvme", acts="keep")
    found = UnitwisePlan(policy="test", units=(places,) * len(workload.units))
    now, late = (simulate_plan(late_updates(p, found, stretch=s)) for s in (float("inf"), 0.0))
    assert now.fits
    assert late.fits
    assert any(unit.late_update for unit in late.plan.units)
    one, other = (simulate_plan.lowering.columns(candidate.plan) for candidate in (now, late))
    assert one.bytes_moved() == other.bytes_moved()


def make(batch: int, accumulation: int = 1):
    """Saved tensors and compute grow with the batch; parameters do not."""
    return chain(
        forward_s=[0.02 + 0.01 * batch] * 4,
        parameters=[MB] * 4,
        saved_mb=[[3 * batch]] * 4,
        border_mb=batch,
        accumulation=accumulation,
        batch=batch,
    )


def fits(batch: int, machine: Machine) -> bool:
    try:
        return plan(make(batch), machine, time_limit_s=2).step_s > 0
    except InfeasiblePlan:
        return False


@pytest.mark.parametrize(("device_mb", "host_mb"), [(100, 60), pytest.param(60, 200, marks=pytest.mark.nightly)])
def test_the_largest_batch_is_the_last_that_fits(device_mb: int, host_mb: int):
    """By brute force: a plan of it fits, and none of the next eight, one of which can be cut into eight parts."""
    machine = small_machine(device_mb=device_mb, host_mb=host_mb, nvme_mb=0)
    largest = largest_batch(make, machine, below=100).num_sequences
    assert 1 <= largest < 100
    assert [b for b in range(largest, largest + 9) if fits(b, machine)] == [largest]


def test_what_does_not_fit_says_the_largest_batch_that_does():
    """Whatever was asked for: from its workload alone, whose amounts are linear but for seconds."""
    machine = small_machine(device_mb=100, host_mb=60, nvme_mb=0)
    largest = largest_batch(make, machine, below=100)
    for batch in (largest.num_sequences + 1, 1000):
        with pytest.raises(InfeasiblePlan) as caught:
            plan(make(batch), machine, time_limit_s=3)
        assert str(caught.value).endswith(f"; sequences per micro-batch that fit: up to {largest.num_sequences}")
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_the_largest_batch_is_for_the_updates_that_were_asked_for():
    """That one sequence does not fit was said beside "1 or more", which fit with other updates."""
    asked = Point(model="gpt-6.7b", machine="laptop", seq=1024)
    workload, machine = workload_at(asked, machine_of(asked)), machine_of(asked)
    with pytest.raises(InfeasiblePlan) as caught:
        plan(workload, machine, semantics="delayed-1", time_limit_s=3)
    assert str(caught.value).endswith("; sequences per micro-batch that fit: none was found, not even for one")
    assert plan(workload, machine, time_limit_s=1).step_s > 0


def test_in_steps_of_one_micro_batch_more_sequences_may_fit_than_in_each_of_many():
    """Micro-batches of one that lack room for their gradients say nothing of a larger one alone."""
    machine = small_machine(device_mb=100, host_mb=60, nvme_mb=0)
    largest = largest_batch(make, machine, below=100).num_sequences
    assert largest > 1
    assert str(InfeasiblePlan(make(1, accumulation=1000), machine, ())).endswith(
        f"where a step has one (--accumulation 1): up to {largest}"
    )
    few = InfeasiblePlan(make(1, accumulation=2), machine, ())
    assert str(few).endswith("where a step has one (--accumulation 1): 2 or more"), (
        "of a step that has two, three are not looked for"
    )


def test_a_largest_batch_that_the_clock_ended_says_that_more_may_fit(monkeypatch: pytest.MonkeyPatch):
    """A busy computer searches for less: what it has not found is not called impossible."""
    machine = small_machine(device_mb=100, host_mb=60, nvme_mb=0)
    largest = largest_batch(make, machine, below=100)
    assert not largest.is_least
    monkeypatch.setattr(budget.Budget, "is_out_of_time", True)
    hurried = largest_batch(make, machine, below=100)
    assert hurried.num_sequences < largest.num_sequences
    assert str(hurried).endswith("or more")


@pytest.mark.parametrize(("device_mb", "is_slower"), [(100, True), (1, False)])
def test_whether_what_is_known_or_memory_left_no_plan(device_mb: int, is_slower: bool):
    with pytest.raises(InfeasiblePlan) as caught:
        plan(make(1), small_machine(device_mb=device_mb), policies=(), beat_s=1e-6)
    assert caught.value.is_slower == is_slower


def test_a_micro_batch_far_too_large_is_refused_by_arithmetic(monkeypatch: pytest.MonkeyPatch):
    """Nobody spells out in names of ops why a policy does not fit: 4,096 sequences have millions of them."""
    monkeypatch.setattr(Candidate, "reason", property(lambda self: pytest.fail("put in words")))
    with pytest.raises(InfeasiblePlan) as caught:
        plan(make(4096), small_machine(device_mb=100, host_mb=60, nvme_mb=0), time_limit_s=1)
    assert caught.value.shortages


def test_the_largest_batch_is_one_that_a_policy_fits_with_parts_of_its_own():
    """Fuyou cuts a micro-batch of 160 into other parts than those that bounds are looked at for."""
    machine, training = load_machine("laptop"), Training(per_device_train_batch_size=4096)
    workload = load_workload("gpt2", training)
    assert largest_batch(lambda batch: with_batch(workload, batch), machine, below=256).num_sequences >= 160


def test_what_a_policy_fits_by_summing_tied_gradients_apart_fits_in_plain_numbers_too(monkeypatch):
    """13 sequences are cut into 13 parts or none, and 13 tied gradients have no room beside each other."""
    monkeypatch.setattr("tierplan.planner.search.budget.DEFAULT_OPS", 40_000)  # a busy computer finds the same
    machine = load_machine("laptop", ["gpu.capacity=2.1 GiB"])
    workload = load_workload("gpt2", Training(per_device_train_batch_size=13))
    assert predict("fuyou", workload, machine).plan.sums_tied  # type: ignore[union-attr]
    result = plan(workload, machine)
    assert isinstance(result.plan, UnitwisePlan)
    assert not result.plan.sums_tied
    assert result.step_s <= result.policies["fuyou"].step_s  # type: ignore[operator]
    assert not result.policies["fuyou"].is_rival
    assert largest_batch(lambda batch: with_batch(workload, batch), machine, below=13).num_sequences == 13


def test_a_search_begins_with_the_same_whether_or_not_there_is_room_for_deepspeeds_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Which no plan of ours has: without them, this policy's plan is a start, but not this policy's."""
    compare_with(monkeypatch, {"zero-offload": POLICIES["zero-offload"]})
    toy = toy_workload(2, gradient_accumulation_steps=2)
    alone = predict("zero-offload", toy, toy_machine(), {"host_buffers": "none"})
    peaks = alone.steady.peak_bytes  # type: ignore[union-attr]
    least = toy_machine(device_bytes=peaks["gpu0"], host_bytes=peaks["host"])
    search = loop.Search(toy, least, None, Budget(1.0), seed=0)
    search.compare(["zero-offload"])
    assert "DeepSpeed's buffers" in search.compared["zero-offload"]().reason
    best = search.seeds.best
    assert best is not None
    assert (best.plan.policy, best.step_s) == ("planner", alone.step_s)


def test_policies_that_fit_with_other_numbers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    away = UnitPlan(grads="host", states="host")
    asked = uniform_plan(toy := toy_workload(2), away, semantics="delayed-1")
    compare_with(monkeypatch, {"late": lambda *_: asked})
    monkeypatch.setattr("tierplan.planner.planning.check_name", lambda name: None)
    monkeypatch.setattr(loop.Search, "_go_on_with", lambda *_: None)  # finds nothing of its own
    with pytest.raises(InfeasiblePlan, match="with other numbers than plain training's, policies fit: late"):
        plan(toy, toy_machine(), policies=["late"])


def test_with_clipping_no_update_at_the_end_holds_up_the_next_forward():
    """What comes home to the device behind the last updates is listed before the next step's fetches on that link."""
    num_mixed = 0
    for seed in range(12):
        rng = random.Random(seed)
        workload = random_chain(rng, 6)
        p = problem(workload, random_machine(rng, workload), semantics="exact-clip")
        model = build(p)
        solution = Solver().solve(model.program)
        if not solution.usable:
            continue
        units = round_to_plan(p, fractions(model, solution)).units
        fetched = [u for u, choice in enumerate(units) if choice.params != "device"]
        num_mixed += 0 < len(fetched) < len(units)
        for choice in units[fetched[0] :] if fetched else ():
            assert choice.params != "device" or choice.states == "device"
    assert num_mixed > 0


def test_a_step_of_no_sequences_is_refused():
    with pytest.raises(PlanError, match="step of 0 sequences"):
        plan_sequences(make, small_machine(), sequences=0)


@pytest.mark.parametrize("seconds", [0, 0.0, -1, float("nan"), float("inf")])
def test_a_search_without_time_or_end_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match=f"time_limit_s is {seconds}; give a finite number of seconds above 0"):
        plan(make(1), small_machine(), time_limit_s=seconds)
    with pytest.raises(ValueError, match=f"time_limit_s is {seconds}; give a finite number of seconds above 0"):
        plan_sequences(make, small_machine(), sequences=2, time_limit_s=seconds)


def test_more_work_begins_with_all_that_less_work_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a longer search never ends worse."""
    workload = toy_workload(4, per_device_train_batch_size=4)
    machine = toy_machine(device_bytes=160 * MIB)
    tried: list[list[object]] = []
    simulate = PlanSimulator._simulate

    def listed(self: PlanSimulator, made: UnitwisePlan, *beside: Candidate[UnitwisePlan]) -> object:
        tried[-1].append(made)
        return simulate(self, made, *beside)

    monkeypatch.setattr(PlanSimulator, "_simulate", listed)
    monkeypatch.setattr(loop.Search, "_spares_drives", lambda search, best: best)  # after the search, whatever it found
    steps_s = []
    for ops in (10_000, 40_000, 160_000):
        tried.append([])
        monkeypatch.setattr(budget, "OPS_PER_S", ops / 100)
        steps_s.append(plan(workload, machine, time_limit_s=100, policies=["zero-offload"]).step_s)
    assert steps_s == sorted(steps_s, reverse=True)
    assert len(tried[0]) < len(tried[1]) < len(tried[2])
    for less, more in pairwise(tried):
        assert more[: len(less)] == less


def test_activations_in_codes_are_quicker_where_they_have_to_leave_and_no_slower_elsewhere() -> None:
    """Six units of 1 s and 80 MB: a link of 50 MB/s takes longer than they compute, and half as long in codes."""
    made = chain(forward_s=[1.0] * 6, parameters=[MB] * 6, saved_mb=[[40, 40]] * 6, recompute_s=[[10.0, 10.0]] * 6)
    coded = replace(made, training=replace(made.training, activation_format="fp8"))
    of_coding_s = 2 * 1.5 * sum(u.saved_bytes + u.input_bytes for u in made.units) / 1e12
    steps_s = []
    for device_mb in (150, 400, 1000):
        machine = small_machine(device_mb=device_mb, link_mb_per_s=50)
        wide, less = (plan(workload, machine, time_limit_s=2) for workload in (made, coded))
        assert less.lower_bound_s <= less.step_s <= wide.step_s + 1.01 * of_coding_s
        steps_s.append((wide.step_s, less.step_s))
    assert steps_s[0][1] < 0.85 * steps_s[0][0]


@pytest.mark.parametrize(("batch", "accumulation"), [(1, 16), (16, 1), (2, 8)])
def test_where_little_has_room_plans_that_hold_least_fit(batch: int, accumulation: int) -> None:
    """70 billion parameters beside 24 GB: the program's plans do not fit once they are rounded, and what holds less
    does: everything on the drive, and one sequence at a time."""
    point = Point(model="llama-3.3-70b", machine="laptop", batch=batch, accumulation=accumulation)
    machine = machine_of(point)
    found = plan(workload_at(point, machine), machine, time_limit_s=0.2, policies=())
    assert found.step_s < 1.2 * found.lower_bound_s


def test_clipped_gradients_wait_on_the_drive_where_memory_has_no_room() -> None:
    """Those of 13 billion parameters, until their norm is known: they come to the device for the update."""
    overrides = {"host.capacity": "24 GiB"}
    point = Point(model="gpt-13b", machine="desktop-4090", accumulation=4, max_grad_norm=1.0, overrides=overrides)
    machine = machine_of(point)
    workload = workload_at(point, machine)
    found = plan(workload, machine, time_limit_s=0.2, policies=())
    assert (
        sum(u.num_trained for u in workload.units) * workload.training.grad_bytes > machine.tier("host").capacity_bytes
    )
    assert isinstance(found.plan, UnitwisePlan)
    assert any(u.returns_grads and u.grads == "nvme" for u in found.plan.units)


def test_systems_are_compared_in_the_semantics_that_are_asked_for() -> None:
    """As `simulate` and `compare-policies` have them; those that have one way alone, in that."""
    training = Training(sequence_length=512, dtype="bf16")
    workload, machine = load_workload("gpt2-large", training), load_machine("laptop", ["gpu.capacity=4GiB"])
    found = plan(workload, machine, semantics="exact-clip", time_limit_s=0.2)
    for name, reached in found.policies.items():
        own = predict(name, workload, machine, options_of("exact-clip"))
        assert not own.fits or is_same(own.plan, "exact-clip")
        assert (reached.step_s, reached.same_numbers) == (own.step_s, True)


def test_a_model_that_no_machine_is_made_for_is_refused_before_any_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 layers of 10 million kept policies busy for minutes. Of one that lacks less, the program says more."""
    monkeypatch.setattr(loop.Search, "begin", lambda *args: pytest.fail("it was searched"))
    workload = load_workload("gpt-175b", Training(sequence_length=64))
    with pytest.raises(InfeasiblePlan, match=r"host memory is short by at least .* it has .* and needs"):
        plan(workload, load_machine("laptop", ["nvme.drives=0"]))
