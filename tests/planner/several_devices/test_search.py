"""Plans of several devices: whose micro-batches are shared, and how shards are exchanged."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from math import inf
from typing import Any

import pytest

from tests.planner.several_devices.test_packs import with_device_bytes
from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.scaling import with_capacity
from tierplan.planner import loop
from tierplan.planner.infeasible import InfeasiblePlan, largest_batch
from tierplan.planner.lowering.tiling import with_batch
from tierplan.planner.milp.amounts import problem
from tierplan.planner.milp.bounds import compute_s, lower_bound
from tierplan.planner.milp.modes import MODES
from tierplan.planner.milp.totals import bound_of_totals
from tierplan.planner.plan import Keeps, PackPlan, Plan, Sharing, UnitwisePlan, is_same, plain_semantics
from tierplan.planner.plan_rules import PLANNER, Order, PlanError
from tierplan.planner.planning import plan
from tierplan.planner.policies import POLICIES, SHARED, decide
from tierplan.planner.prediction import predict
from tierplan.planner.search.batches import plan_sequences
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.candidates import Candidate, PlanSimulator
from tierplan.planner.search.incumbents import Batches
from tierplan.planner.search.lesser import Known
from tierplan.planner.search.local.moves import on_its_devices, with_late_here
from tierplan.planner.several_devices.packs.estimate import PackEstimate, PackSizes
from tierplan.planner.several_devices.packs.search import bound_of_packs
from tierplan.planner.several_devices.sharded import sharded
from tierplan.sim.workloads.workload import Workload
from tierplan.studies.evaluate import best_plan, machine_of, workload_at
from tierplan.studies.study import Point


def task_of(point: Point) -> tuple[Workload, Machine]:
    machine = machine_of(point)
    return workload_at(point, machine), machine


def divided(point: Point, machine: Machine) -> Callable[[int, int], Workload]:
    """The workload of a point by its micro-batches."""
    return lambda batch, accumulation: workload_at(replace(point, batch=batch, accumulation=accumulation), machine)


def test_policies_are_as_they_are_named() -> None:
    point = Point(
        model="gpt2", machine="desktop-4090", accumulation=8, overrides={"gpu.count": 2, "link.p2p": "9 GB/s"}
    )
    workload, machine = task_of(point)
    shared = set[str]()
    for name in POLICIES:
        try:
            shared |= {name} if decide(name, workload, machine).num_batches == 1 else set()
        except PlanError as error:
            pytest.fail(f"{name}: {error}")
    assert shared == SHARED


def test_no_way_to_exchange_shards_is_quicker_than_the_plan() -> None:
    """Where the whole model has no room on a device, and shards of it have: whatever FSDP is told."""
    point = Point(
        model="gpt2-large", machine="ssdtrain-a100", batch=2, accumulation=1, overrides={"gpu.capacity": "14 GiB"}
    )
    workload, machine = task_of(point)
    assert not predict("in-memory", workload, machine).fits
    planned = plan(workload, machine, time_limit_s=0.2, batches="each")
    for reduces, reshard, checkpointing in product(("each", "last"), ("on", "off"), ("on", "off")):
        options = {"reduces": reduces, "reshard": reshard, "checkpointing": checkpointing}
        step_s = predict("fsdp", workload, machine, options).step_s
        assert step_s is None or planned.step_s <= step_s, options


def test_each_system_of_several_devices_has_a_time_for_the_same_work_or_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The systems that give each device micro-batches of its own are compared in divisions that do so, and the others
    in those that share."""
    monkeypatch.setattr("tierplan.planner.search.budget.DEFAULT_OPS", 3_000)
    point = Point(
        model="gpt2", machine="desktop-4090", overrides={"gpu.count": 2, "link.p2p": "9 GB/s", "gpu.capacity": "3 GiB"}
    )
    machine = machine_of(point)
    found = plan_sequences(divided(point, machine), machine, sequences=4)
    policies = found.result.policies
    assert all(p.step_s is not None or p.reason for p in policies.values())
    assert {p.num_sequences for p in policies.values() if p.step_s is not None} == {4}
    assert {"ddp", "megatron-pp"} & {name for name, p in policies.items() if p.step_s is None}
    assert {"zero-infinity", "roundpipe"} <= {name for name, p in policies.items() if p.step_s is not None}


def test_no_system_is_shown_with_other_work_where_there_was_time_for_few_divisions() -> None:
    """36 sequences in micro-batches of 4 or of 6, as are tried first, are not divided among 4 GPUs."""
    point = Point(model="gpt2", machine="desktop-4090", seq=64, overrides={"gpu.count": 4, "link.p2p": "9 GB/s"})
    machine = machine_of(point)
    found = plan_sequences(divided(point, machine), machine, sequences=36, time_limit_s=0.1)
    policies = found.result.policies
    assert {p.num_sequences for p in policies.values() if p.step_s is not None} == {36}
    assert re.fullmatch(r"in this time it was tried in steps of 144 .*--time-limit\)", policies["in-memory"].reason)


def in_shards(capacity: str = "8 GiB", num: int = 2) -> tuple[Workload, Machine]:
    """Several devices keep in shards what one of them would have to send away."""
    overrides = {"gpu.count": num, "link.p2p": "25 GB/s", "gpu.capacity": capacity}
    return task_of(Point(model="gpt2-large", machine="desktop-4090", batch=4, overrides=overrides))


def test_plans_on_all_devices_are_searched_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of one device, put on all, is not the best one for them."""
    monkeypatch.setattr("tierplan.planner.search.budget.DEFAULT_OPS", 700_000)
    workload, machine = in_shards()
    found = plan(workload, machine, batches="each")
    alone = plan(*in_shards(num=1))
    assert isinstance(alone.plan, UnitwisePlan)
    simulate_plan = PlanSimulator(workload, machine, Budget.of(None))
    ways = [Sharing(reduces=reduces, keeps=keeps) for reduces, keeps in product(("last", "each"), ("nothing", "all"))]
    on_all = [simulate_plan(replace(with_late_here(alone.plan, 0), devices=2, sharing=way)).step_s for way in ways]
    assert found.step_s < 0.95 * min(step_s for step_s in on_all if step_s is not None)
    assert (found.plan.policy, found.plan.devices) == (PLANNER, 2)
    reached = [p.step_s for p in found.policies.values() if p.step_s is not None and p.num_batches == 2]
    assert len(reached) > 3
    assert found.step_s <= min(reached)


def test_a_short_search_on_several_devices_tries_plans_of_its_own() -> None:
    """Bounds there take more work than a short search has; it had tried nothing but published systems then."""
    point = Point(model="gpt-1.3b", machine="laptop", batch=8, accumulation=1, overrides={"gpu.count": 2})
    machine = machine_of(point)
    found = plan(workload_at(point, machine), machine, time_limit_s=1, by_clock=False)
    assert found.plan.policy == PLANNER
    assert found.step_s < 0.9 * min(result.step_s for result in found.policies.values() if result.step_s is not None)


def test_the_largest_batch_of_several_devices_is_one_that_fits_in_their_shards() -> None:
    """One of them has no room for the model, beside whatever micro-batch; nor has each for more than five sequences of
    its own, and operators that both cut are told of."""
    workload, machine = in_shards()
    machine = with_capacity(machine, {"host": 10**6, "nvme": 10**6})
    largest = largest_batch(partial(with_batch, workload), machine, below=16)
    assert 1 <= largest.num_sequences < 16

    def fits(batch: int) -> bool:
        try:
            return plan(with_batch(workload, batch), machine, time_limit_s=1).step_s > 0
        except InfeasiblePlan:
            return False

    assert [b for b in range(largest.num_sequences, largest.num_sequences + 3) if fits(b)] == [largest.num_sequences]


@pytest.mark.parametrize("order", ["horizontal", "vertical"])
def test_what_has_no_room_has_none_for_gathered_parameters_to_stay_either(order: Order) -> None:
    """So the search asks no program of the ones that keep them."""
    workload, machine = in_shards()
    workload = replace(workload, training=replace(workload.training, gradient_accumulation_steps=2), computed_for=None)
    has_room: dict[Keeps, list[bool]] = {"nothing": [], "all": []}
    for gigabytes in (1, 2, 4, 6, 8, 12):
        sizes = {"gpu0": gigabytes * 10**9, "gpu1": gigabytes * 10**9, "host": 6 * 10**9}
        posed = problem(
            workload, with_capacity(machine, sizes), semantics=plain_semantics(workload.training), order=order
        )
        for keeps, found in has_room.items():
            found.append(lower_bound(replace(sharded(posed, 2, keeps), has_nvme=False)).feasible)
    assert 0 < sum(has_room["all"]) < sum(has_room["nothing"]) < 6
    assert all(here or not there for here, there in zip(has_room["nothing"], has_room["all"], strict=True))


@pytest.mark.parametrize("keeps", ["nothing", "all"])
def test_no_plan_of_all_devices_beats_the_program_of_one_of_them(keeps: Keeps) -> None:
    """Random plans, on a machine where every stream and tier may bind."""
    workload, machine = in_shards("12 GiB")
    rng, simulate_plan = random.Random(0), PlanSimulator(workload, machine, Budget.of(None))
    posed = problem(workload, machine, semantics=plain_semantics(workload.training))
    of_one = sharded(posed, 2, keeps)
    bound = lower_bound(of_one)
    assert keeps == "all" or bound.step_s < lower_bound(posed).step_s
    assert bound_of_totals(posed, 2).step_s <= bound.step_s * (1 + 1e-6)
    fits = 0
    for _ in range(60):
        modes = [MODES[rng.choice(of_one.modes(u))] for u in range(len(workload.units))]
        acts = [rng.choice(("keep", "recompute", "host")) if u.kind == "block" else "keep" for u in workload.units]
        units = tuple(replace(mode, acts=act) for mode, act in zip(modes, acts, strict=True))
        drawn = UnitwisePlan(policy=PLANNER, units=units, semantics=of_one.semantics)
        step_s = simulate_plan(on_its_devices(drawn, of_one)).step_s
        fits += step_s is not None
        assert step_s is None or step_s >= bound.step_s * (1 - 1e-6)
    assert fits > 10


def test_units_that_packs_compute_at_once_have_the_rates_of_their_own_amounts() -> None:
    """One op had all that a pack computes, at the rate of so large a product: data-parallel packs of a whole model were
    quicker than the model by itself, and than the bound."""
    point = Point(model="qwen3-4b", machine="fsdp-qlora-2x4090", seq=1024, lora="r=16", batch=1, accumulation=16)
    workload, machine = task_of(point)
    assert len(machine.stream("gpu0.compute").rates["matmul_bf16_flops"].points) > 1
    sizes, num = PackSizes(workload), len(workload.units)
    together = machine.cost("gpu0.compute", sizes.work(0, num).forward)
    each = [machine.cost("gpu0.compute", unit.forward) for unit in workload.units]
    assert together.work_s == pytest.approx(sum(cost.work_s for cost in each), rel=0.01)
    assert sizes.work(1, 2).forward == workload.units[1].forward
    bound = bound_of_totals(problem(workload, machine, semantics="in-backward"), 1)
    found = predict("harmony-dp", workload, machine).step_s
    assert found is not None
    assert bound.step_s <= found


def test_packs_that_visit_devices_with_late_updates_are_bound_by_the_host() -> None:
    """Others may be updated where their gradients are made, and so are those that stay."""
    point = Point(model="gpt2-large", machine="fsdp-qlora-2x4090", overrides={"host.adam": "0.1 G/s"}, accumulation=8)
    workload, machine = task_of(point)
    posed = problem(workload, machine, semantics=plain_semantics(workload.training))
    visiting, at_once = (decide(name, workload, machine, {}) for name in ("roundpipe", "roundpipe-sync"))
    assert isinstance(visiting, PackPlan)
    assert isinstance(at_once, PackPlan)
    bound_s = bound_of_packs(posed, visiting.packs)
    assert bound_s == pytest.approx(sum(u.num_trained for u in workload.units) / 1e8, 1e-3)
    latencies_s = 8 * 2 * len(workload.units) * machine.stream("gpu0.compute").latency_s  # of packs there is one
    assert bound_of_packs(posed, at_once.packs) == pytest.approx((compute_s(posed) - latencies_s) / 2), "one has room"
    small = with_device_bytes(machine, 2 * 10**9)
    tight = problem(workload, small, semantics=plain_semantics(workload.training))
    num, fits = len(workload.units), PackEstimate(workload, small).fits
    last = next(u for u in range(num) if fits("bwd", u, num))
    assert 0 < last < num - 1
    again_s = workload.training.gradient_accumulation_steps * sum(u.fwd_s for u in tight.units[:last])
    assert bound_of_packs(tight, at_once.packs) == pytest.approx((compute_s(tight) - latencies_s + again_s) / 2)
    quick = replace(posed, rates=replace(posed.rates, adam=inf))
    assert bound_of_packs(quick, visiting.packs) == pytest.approx((compute_s(posed) - latencies_s) / 2)
    result = predict("megatron-pp", workload, machine)
    assert result.step_s is not None
    assert result.step_s < bound_s


def test_more_than_a_lesser_machine_has_is_searched_in_its_division(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are compared with the policies there, and searched where one of these does better."""
    point = Point(model="gpt2", machine="fsdp-qlora-2x4090", overrides={"gpu.capacity": "2 GiB"})
    less = machine_of(point)
    more, make = machine_of(replace(point, overrides={**point.overrides, "host.adam": "6 G/s"})), divided(point, less)
    found = plan_sequences(make, less, sequences=8, time_limit_s=4.0)
    begun: list[tuple[int, int, Batches | None]] = []
    begin = loop.Search.begin

    def noted(search: loop.Search, *args: Any, **options: Any) -> None:
        training = search.workload.training
        begun.append((training.per_device_train_batch_size, training.gradient_accumulation_steps, search.batches))
        begin(search, *args, **options)

    monkeypatch.setattr(loop.Search, "begin", noted)
    known = Known.of(less, found.workload, found.result)
    again = plan_sequences(make, more, sequences=8, time_limit_s=4.0, known=known)
    assert again.result.step_s <= found.result.step_s
    assert begun[0][:2] == (known.batch, known.accumulation)
    assert len(begun) <= 2


@pytest.mark.parametrize("time_limit_s", [0.1, 1.0])
def test_where_nothing_fits_all_divisions_are_searched(time_limit_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """However short the limit is, by which fewer of them are compared."""
    point = Point(model="gpt2", machine="fsdp-qlora-2x4090", overrides={"gpu.capacity": "1.1 GiB"})
    machine, begun = machine_of(point), set[tuple[int, int]]()

    def begin(search: loop.Search, *_: Any, **__: Any) -> None:
        training = search.workload.training
        begun.add((training.per_device_train_batch_size, training.gradient_accumulation_steps))

    monkeypatch.setattr(loop.Search, "begin", begin)
    monkeypatch.setattr(loop.Search, "go_on", lambda _: None)
    monkeypatch.setattr(loop.Search, "best_s", float("inf"))
    with pytest.raises(InfeasiblePlan):
        plan_sequences(divided(point, machine), machine, sequences=4, time_limit_s=time_limit_s)
    assert begun >= {(1, 4), (1, 2), (2, 2), (2, 1), (4, 1)}


@pytest.mark.parametrize("batches", ["each", "shared"])
def test_plans_of_one_kind_begin_with_the_plan_that_is_given(batches: Batches) -> None:
    overrides = {"gpu.count": 2, "link.p2p": "9 GB/s"}
    point = Point(model="gpt2", machine="desktop-4090", batch=1, accumulation=2, overrides=overrides)
    workload, machine = task_of(point)
    known = plan(workload, machine, batches=batches, time_limit_s=0.2)
    again = plan(workload, machine, batches=batches, time_limit_s=0.2, policies=(), like=known.plan)
    assert again.step_s <= known.step_s
    assert type(again.plan) is type(known.plan)
    assert again.plan.num_batches == known.plan.num_batches
    assert again.num_simulated < known.num_simulated


def own_micro_batches() -> tuple[Workload, Machine]:
    return task_of(Point(model="gpt2", machine="desktop-4090", overrides={"gpu.count": 2, "link.p2p": "9 GB/s"}))


def decisions(plan: Plan) -> Plan:
    return replace(plan, policy="", options={})


def test_what_takes_longer_with_all_devices_gives_way_to_what_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """And that is the same algorithm, whatever else was simulated meanwhile."""
    workload, machine = own_micro_batches()
    asked = {"batches": "each", "time_limit_s": 0.2}
    best = plan(workload, machine, **asked)  # type: ignore[arg-type]
    in_full, of_all = PlanSimulator.in_full, loop.Search.hold

    def longer(self: PlanSimulator, tried: Plan) -> Candidate[Plan]:
        found = in_full(self, tried)
        if tried.policy == "late":
            return replace(found, step_s=best.step_s / 2)
        return replace(found, step_s=2 * best.step_s) if decisions(tried) == decisions(best.plan) else found

    def late(self: loop.Search) -> None:
        of_all(self)
        late = replace(best.plan, semantics="delayed-1", policy="late")
        self.simulate_plan.seen[("late",)] = replace(self.simulate_plan(best.plan), plan=late)

    monkeypatch.setattr(PlanSimulator, "in_full", longer)
    monkeypatch.setattr(loop.Search, "hold", late)
    other = plan(workload, machine, **asked)  # type: ignore[arg-type]
    assert decisions(other.plan) != decisions(best.plan)
    assert is_same(other.plan, best.plan.semantics)
    assert best.step_s <= other.step_s < 2 * best.step_s


def test_where_all_that_are_nearly_as_quick_take_longer_too_one_further_behind_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """32B on eight A5000 ended with 24.6 s, with each device drawn, where a plan 0.2 % behind has 21.7 s."""
    workload, machine = own_micro_batches()
    in_full, num_failing = PlanSimulator.in_full, 10

    def longer(self: PlanSimulator, tried: Plan) -> Candidate[Plan]:
        found = in_full(self, tried)
        steps_s = sorted(c.step_s for c in self.seen.values() if c.step_s is not None)
        own_s = self(tried).step_s
        assert len(steps_s) > 2 * num_failing
        is_failing = found.step_s is not None and own_s is not None and own_s <= steps_s[num_failing - 1]
        return replace(found, step_s=2 * found.step_s) if is_failing and found.step_s else found

    best = plan(workload, machine, batches="each", time_limit_s=0.4)
    monkeypatch.setattr(PlanSimulator, "in_full", longer)
    other = plan(workload, machine, batches="each", time_limit_s=0.4)
    assert decisions(other.plan) != decisions(best.plan)
    assert other.step_s < 1.5 * best.step_s


def test_what_several_devices_cannot_hold_is_refused_before_any_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device needs its part of what is short, and not all of it, as one device by itself would."""
    overrides = {"host.capacity": "700 GiB"}
    point = Point(model="llama-3.3-70b", machine="roundpipe-8x4090", sequences=16, overrides=overrides)
    machine = machine_of(point)
    monkeypatch.setattr(loop.Search, "compare", lambda *_: pytest.fail("searches"))
    workload = (make := divided(point, machine))(1, 2)
    held_bytes = workload.states_bytes + sum(u.num_parameters * 2 for u in workload.units)
    short_bytes = held_bytes - sum(t.capacity_bytes for t in machine.tiers)
    assert short_bytes > 0
    for ask in (lambda: plan(workload, machine), lambda: plan_sequences(make, machine, sequences=16)):
        with pytest.raises(InfeasiblePlan) as caught:
            ask()
        short = {s.tier: s.short_bytes for s in caught.value.shortages}
        assert short == {"device": -(-short_bytes // 8), "host": short_bytes}
        assert caught.value.largest_batch.num_sequences == 0


def test_logits_of_long_sequences_are_named_where_nothing_fits_several_devices() -> None:
    """Of one sequence they are more than a GPU has, even cut: what the nearest plan lacked says nothing of that."""
    overrides = {"gpu.count": 2, "gpu.capacity": "4 GiB"}
    point = Point(model="qwen3-1.7b", machine="desktop-4090", sequences=2, seq=16384, lora="r=16", overrides=overrides)
    with pytest.raises(InfeasiblePlan, match=r"which 2 GPUs cut, .* are logits and loss: .*--loss-chunks 8") as caught:
        best_plan(point)
    assert caught.value.may_fit
    assert caught.value.largest_batch.num_sequences == 0


def test_what_fits_by_one_device_for_all_and_never_with_each_drawn_is_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    workload, machine = own_micro_batches()
    fails = Candidate(plan(workload, machine, time_limit_s=0.1).plan, None)
    monkeypatch.setattr(PlanSimulator, "in_full", lambda *_: fails)
    with pytest.raises(InfeasiblePlan):
        plan(workload, machine, batches="each", time_limit_s=0.2)


def test_gpus_with_unequal_memory_are_refused() -> None:
    """One of them stands for all: plans that had no room on the smaller one ended in the simulator's error."""
    workload, machine = own_micro_batches()
    least = with_capacity(machine, {"gpu1": machine.tier("gpu0").capacity_bytes // 2})
    with pytest.raises(PlanError, match=r"unequal memory \(gpu0 .* gpu1 .*equal ones"):
        plan(workload, least)
