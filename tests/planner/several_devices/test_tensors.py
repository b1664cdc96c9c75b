"""Operators that all devices share: what is kept, against all there is, and what is elsewhere, against its bound."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf

import pytest

from tests.planner.several_devices.test_stages import devices, simulator
from tierplan.planner.milp.amounts import problem
from tierplan.planner.milp.bounds import lower_bound
from tierplan.planner.milp.modes import MODES
from tierplan.planner.plan import Sharing, UnitwisePlan
from tierplan.planner.plan_rules import PLANNER, Order
from tierplan.planner.planning import plan
from tierplan.planner.policies import decide
from tierplan.planner.prediction import predict
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.candidates import PlanSimulator
from tierplan.planner.search.incumbents import Incumbents
from tierplan.planner.search.local.moves import on_its_devices
from tierplan.planner.several_devices import tensors
from tierplan.planner.several_devices.sharded import tensor_parallel
from tierplan.planner.several_devices.tensors import may_cut, search_tensors
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training, Workload
from tierplan.studies.evaluate import best_plan, machine_of, workload_at
from tierplan.studies.study import Point

MIB = 2**20


@pytest.mark.parametrize("mib", [1700, 1800, 1900, 2100])
def test_as_much_is_kept_as_fits(mib: int) -> None:
    """Of all plans whose last blocks keep all and those before them the products, hardly any is quicker; with more
    memory more is kept, in the end all."""
    whole = load_workload("gpt2-large", Training(per_device_train_batch_size=4, sequence_length=512))
    workload, machine = replace(whole, units=(*whole.units[:6], whole.units[-1])), devices(2, mib * MIB)
    simulate_plan, found = simulator(workload, machine), Incumbents("shared", 1, 1)
    search_tensors(found, simulate_plan, "in-backward", beat_s=float("inf"))
    ways = [decide("megatron-tp", workload, machine, {"checkpointing": way}) for way in ("on", "selective", "off")]
    again, products, kept = (way for way in ways if isinstance(way, UnitwisePlan))
    steps_s = [
        simulate_plan(
            replace(again, units=(*again.units[:first], *products.units[first:middle], *kept.units[middle:]))
        ).step_s
        for first in range(1, 7)
        for middle in range(first, 7)
    ]
    best_s = min((step_s for step_s in steps_s if step_s is not None), default=None)
    assert (found.best is None) == (mib == 1700)
    if found.best is not None:
        assert best_s is not None
        assert found.best.step_s is not None
        assert best_s <= found.best.step_s <= 1.03 * best_s
        assert (found.best.step_s == simulate_plan(kept).step_s) == (mib == 2100)


def test_the_planner_keeps_more_than_megatron() -> None:
    """One micro-batch, which no GPU has room for by itself."""
    workload, machine = load_workload("gpt2-large", Training(sequence_length=512)), devices(4, 5 * 1024 * MIB)
    found = plan(workload, machine, batches="shared", time_limit_s=1.0, by_clock=False)
    reached = found.policies["megatron-tp"].step_s
    assert reached is not None
    assert found.step_s < 0.9 * reached


def drawn(seed: int) -> tuple[Workload, PlanSimulator, list[tuple[UnitwisePlan, float]], float]:
    """Random plans that fit, with operators cut, and the bound of their problem."""
    rng = random.Random(seed)
    order: Order = rng.choice(("horizontal", "vertical"))
    accumulation, adapters, num = rng.choice((1, 3)), rng.choice(("", "r=16")), rng.choice((2, 4))
    point = Point(model="gpt2-large", machine="desktop-4090", batch=2, lora=adapters, accumulation=accumulation)
    overrides = {"gpu.count": num, "gpu.capacity": rng.choice(("3 GiB", "6 GiB")), "link.p2p": "25 GB/s"}
    overrides |= {"host.capacity": rng.choice(("18 GiB", "40 GiB"))}
    point = replace(point, overrides=overrides)
    machine = machine_of(point)
    workload = workload_at(point, machine)
    simulate_plan = simulator(workload, machine)
    of_one = tensor_parallel(problem(workload, machine, semantics="in-backward", order=order), num, waits=True)
    found = list[tuple[UnitwisePlan, float]]()
    for _ in range(60):
        modes = [MODES[rng.choice(of_one.modes(u))] for u in range(len(workload.units))]
        acts = [rng.choice(("keep", "recompute", "host")) if u.kind == "block" else "keep" for u in workload.units]
        units = tuple(replace(mode, acts=act) for mode, act in zip(modes, acts, strict=True))
        one = UnitwisePlan(policy=PLANNER, units=units, semantics=of_one.semantics, order=of_one.order)
        tried = simulate_plan(on_its_devices(one, of_one))
        assert tried.plan.sharing == Sharing(divided="tensors", waits=True)
        if tried.step_s is not None:
            found.append((tried.plan, tried.step_s))
    return workload, simulate_plan, found, lower_bound(of_one).step_s


@pytest.mark.parametrize("seed", [1, 3, 6, 12, 16, 26])
def test_no_plan_that_cuts_operators_is_quicker_than_the_bound_of_their_problem(seed: int) -> None:
    _, simulate_plan, found, bound_s = drawn(seed)
    assert len(found) > 5
    assert bound_s <= min(step_s for _, step_s in found) * (1 + 1e-6)
    whole, one_s = found[0]
    assert simulate_plan.in_full(whole).step_s == pytest.approx(one_s, rel=1e-3), "one device stands for all"


def test_what_has_no_room_on_the_devices_comes_when_it_is_needed() -> None:
    """One long sequence with adapters: a device by itself takes as long as it computes, and all together a part of it.
    The search ends near the bound of its problem."""
    few = {"gpu.count": 4, "host.capacity": "256 GiB"}
    point = Point(model="llama-3.3-70b", machine="desktop-4090", sequences=1, seq=2048, lora="r=16", overrides=few)
    found = best_plan(point)
    alone = best_plan(replace(point, overrides={**few, "gpu.count": 1})).result
    assert isinstance(found.result.plan, UnitwisePlan)
    assert found.result.plan.sharing.divided == "tensors"
    assert any(unit.frozen == "host" for unit in found.result.plan.units)
    assert alone.step_s > 1.8 * found.result.step_s
    posed = problem(found.workload, found.machine, semantics="in-backward")
    bound_s = lower_bound(tensor_parallel(posed, 4, waits=True)).step_s
    assert found.result.lower_bound_s < bound_s < found.result.step_s < 1.3 * bound_s


@pytest.mark.parametrize("sequences", [2, 4])
def test_the_search_for_cut_operators_is_beside_that_of_others(sequences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it finds, nothing ends worse than without it. With a sequence for each device it is asked where its
    bound is clearly below what is known."""
    few = {"gpu.count": 4, "gpu.capacity": "3 GiB", "host.capacity": "24 GiB", "link.p2p": "25 GB/s"}
    point = Point(model="gpt2-large", machine="desktop-4090", sequences=sequences, seq=512, overrides=few)
    found = best_plan(point).result
    monkeypatch.setattr(tensors, "to_beat_s", lambda *asked: 0.0)
    without = best_plan(point).result
    assert found.step_s <= without.step_s
    if sequences == 2:
        assert found.step_s < 0.8 * without.step_s


def test_ctrl_c_keeps_what_the_search_for_cut_operators_has_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though nothing else is known yet."""
    few = {"gpu.count": 4, "gpu.capacity": "1.5 GiB", "host.capacity": "24 GiB", "link.p2p": "25 GB/s"}
    point = Point(model="gpt2-large", machine="desktop-4090", sequences=2, seq=512, overrides=few)
    machine = machine_of(point)
    go_on, ended = tensors.go_on_while_promising, list[float]()

    def interrupted(search: tensors.Rounds, known_s: float, told: Incumbents) -> None:
        def rounds(those: Iterator[None]) -> Iterator[None]:
            for each in those:
                yield each
                if search.best_s < inf:
                    ended.append(search.best_s)
                    raise KeyboardInterrupt

        search.in_rounds = rounds(search.in_rounds)
        go_on(search, known_s, told)

    monkeypatch.setattr(tensors, "go_on_while_promising", interrupted)
    found = plan(workload_at(replace(point, batch=2, accumulation=1), machine), machine, batches="shared", policies=())
    assert found.status == "interrupted"
    assert found.step_s == pytest.approx(ended[0], rel=1e-3)


def test_operators_that_are_cut_of_many_sequences_are_searched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where cutting them is quickest already, what is searched for few sequences for each device is for more."""
    few = {"gpu.count": 4, "gpu.capacity": "8 GiB", "host.capacity": "24 GiB", "link.p2p": "25 GB/s"}
    point = Point(model="qwen3-1.7b", machine="desktop-4090", batch=1, seq=8192, lora="r=16", overrides=few)
    machine = machine_of(point)
    workload = workload_at(replace(point, accumulation=8), machine)
    found = plan(workload, machine, batches="shared", time_limit_s=10.0, by_clock=False)
    assert tensors.is_cut(found.plan)
    monkeypatch.setattr(tensors, "is_cut", lambda plan: False)
    without = plan(workload, machine, batches="shared", time_limit_s=10.0, by_clock=False)
    assert found.step_s < 0.98 * without.step_s


@pytest.mark.parametrize("left_frac", [0.1, 1.0])
def test_what_bounds_take_is_beside_the_search_for_cut_operators(left_frac: float) -> None:
    """Else that of long chains, whose bounds take most of the budget, ends before it has found anything."""
    budget = Budget.of(None)

    @dataclass
    class Fruitless:
        in_rounds: Iterator[None]
        budget: Budget
        incumbents: Incumbents
        best_s: float = inf

    def rounds() -> Iterator[None]:
        while True:
            budget.ops_left -= 0.1 * tensors.SHARE * budget.num_ops
            begun.append(budget.ops_left)
            yield

    begun, told = list[float](), Incumbents("shared", 1, 4, "tensors")
    with budget.beside(left_frac * tensors.SHARE * budget.num_ops):
        tensors.go_on_while_promising(Fruitless(rounds(), budget, told), 1.0, told)
    assert len(begun) == round(10 * tensors.FIRST_FRAC)
    assert budget.ops_left == budget.num_ops


def test_heads_have_to_divide() -> None:
    workload = load_workload("gpt2", Training())
    assert [devices for devices in range(2, 8) if may_cut(workload, devices)] == [2, 3, 4, 6]


def test_each_device_launches_all_kernels_of_what_it_has_a_part_of() -> None:
    """An eighth of a product is as many kernels: where launching them takes long, operators that are cut do, too."""
    point = Point(model="qwen3-1.7b", machine="dgx-8xa100-80gb", seq=256, lora="r=16")
    alone, together = (machine_of(replace(point, devices=num)) for num in (1, 8))
    workload = workload_at(point, together)
    launching = predict("in-memory", workload, alone).step_s
    cutting = predict("megatron-tp", workload, together, {"checkpointing": "off"}).step_s
    assert launching is not None
    assert cutting is not None
    assert 0.9 * launching < cutting < 1.2 * launching


@pytest.mark.parametrize("freeze", ["", "model.layers.[0-5].*,model.embed*"])
@pytest.mark.parametrize("launch", ["0 us", "40 us"])
@pytest.mark.parametrize("link", ["2 GB/s", "25 GB/s"])
def test_the_bound_knows_what_goes_on_while_ops_wait_for_sums(freeze: str, launch: str, link: str) -> None:
    """Kernels are launched and updates made meanwhile; blocks below what is trained have no backward and no sums."""
    overrides = {"gpu.count": 4, "gpu.capacity": "60 GiB", "link.p2p": link, "gpu.launch": launch}
    point = Point(model="llama-3.2-1b", machine="desktop-4090", seq=512, freeze=freeze, overrides=overrides)
    machine = machine_of(point)
    workload = workload_at(point, machine)
    of_one = tensor_parallel(problem(workload, machine, semantics="in-backward"), 4, waits=True)
    plain = decide("in-memory", workload, machine_of(replace(point, devices=1)))
    assert isinstance(plain, UnitwisePlan)
    step_s = simulator(workload, machine)(on_its_devices(plain, of_one)).step_s
    assert step_s is not None
    assert 0.6 * step_s < lower_bound(of_one).step_s <= step_s


@pytest.mark.parametrize(("way", "num"), [("off", 50), ("selective", 62), ("on", 74)])
def test_sums_of_activations_are_those_of_products(way: str, num: int) -> None:
    """Two for each pass of 12 blocks and one at each end; with all but the products made again, one: what attention
    gives to the MLP is no product's output but the residual's, and so is its last product made again."""
    workload, machine = load_workload("gpt2", Training()), devices(2, 8 * 1024 * MIB)
    found = predict("megatron-tp", workload, machine, {"checkpointing": way})
    assert found.columns is not None
    sums = [op for op in found.columns.schedule().ops if op.kind == "all_reduce" and op.stream == "gpu0.collective"]
    assert sum(op.work["hops"] for op in sums) == 2 * num, "each goes round a ring of two twice"
