"""Packs on several devices: the search against brute force and exhaustive balance, the estimate against simulation."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from benchmarks.planner import packs as benchmark
from tierplan.hwmodels import load_machine
from tierplan.hwmodels.machine import Machine
from tierplan.planner.plan import PackPlan, Packs
from tierplan.planner.planning import plan
from tierplan.planner.policies import POLICIES
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.candidates import Candidate, PlanSimulator
from tierplan.planner.several_devices.packs.estimate import STATE_PARTS, PackEstimate
from tierplan.planner.several_devices.packs.search import Borders, balanced, improve_packs, neighbours
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training, Workload
from tierplan.validation.published.workloads import layered_workload

CLEANUP_S = 0.01


def layers(rng: random.Random, num: int) -> Workload:
    """A profile of unequal layers, in the form of Harmony's."""
    entries = []
    for i in range(num):
        forward_ms = rng.choice((10.0, 20.0, 40.0))
        weights, x = rng.choice((20.0, 50.0, 100.0)), 16.0 if i else 0.1
        entries.append(
            {
                "index": str(i),
                "kind": "block" if 0 < i < num - 1 else ("embed", "head")[i > 0],
                "f_ms": forward_ms,
                "b_ms": 3 * forward_ms,
                "w_mib": weights,
                "x_mib": x,
                "peak_b_mib": 2 * weights + 3 * x + rng.choice((200, 400)),
            }
        )
    return layered_workload({"model": "layers", "micro_batch": 1, "layers": entries}, micro_batches=4)


def two_devices(capacity_bytes: int) -> Machine:
    return with_device_bytes(load_machine("harmony-4x1080ti", ["gpu.count=2"]), capacity_bytes)


def with_device_bytes(machine: Machine, capacity_bytes: int) -> Machine:
    tiers = (replace(t, capacity_bytes=capacity_bytes) if t.kind == "device" else t for t in machine.tiers)
    return replace(machine, tiers=tuple(tiers))


def planned(packs: Packs) -> PackPlan:
    return PackPlan(policy="test", packs=packs)


def all_runs(num: int) -> Iterator[tuple[tuple[int, int], ...]]:
    for count in range(num):
        for inner in combinations(range(1, num), count):
            yield tuple(pairwise((0, *inner, num)))


def all_packs(num: int) -> Iterator[Packs]:
    for form in ("pipeline", "data"):
        for backward in all_runs(num):
            end = backward[-1][0]
            for forward in all_runs(end) if end else [()]:
                packs = Packs(form=form, devices=2, forward=forward, backward=backward, cleanup_s=CLEANUP_S)  # type: ignore[arg-type]
                yield packs
                yield from updated_on_devices(packs) if form == "pipeline" else ()


def updated_on_devices(packs: Packs) -> Iterator[Packs]:
    """The same with any of its packs' updates on their devices."""
    for count in range(1, len(packs.backward) + 1):
        for some in combinations(packs.backward, count):
            here = tuple(u for a, b in some for u in range(a, b))
            yield replace(packs, updates_here=here, state_shards=STATE_PARTS)


def worst(simulate_plan: PlanSimulator, num: int) -> Candidate[PackPlan]:
    """One unit per pack, the other way round than it should be started from."""
    runs = tuple((u, u + 1) for u in range(num))
    packs = Packs(form="data", devices=2, forward=runs[:-1], backward=runs, cleanup_s=CLEANUP_S)
    return simulate_plan(planned(packs))


@pytest.mark.parametrize("seed", range(4))
def test_the_search_finds_the_best_of_all_packs(seed):
    workload = layers(random.Random(seed), 5)
    machine = two_devices(1_400_000_000)
    everything = PlanSimulator(workload, machine, Budget(1e9))
    steps = [everything(planned(packs)).step_s for packs in all_packs(5)]
    fitting = [s for s in steps if s is not None]
    assert len(fitting) < len(steps)  # memory excludes some
    simulate_plan = PlanSimulator(workload, machine, Budget(4))
    start = worst(simulate_plan, 5)
    assert start.step_s is not None
    found = improve_packs(start, simulate_plan, spent_frac=1.0)
    assert found.step_s is not None
    assert min(fitting) <= found.step_s <= min(fitting) * 1.01
    assert found.step_s < start.step_s


@pytest.mark.parametrize(("on_devices", "off_frac"), [(False, 0.03), (True, 0.07)])
@pytest.mark.parametrize("seed", range(4))
def test_the_estimate_is_near_the_simulation(seed, on_devices, off_frac):
    """Less near where states come to devices: it has them come as if all devices updated at once."""
    rng = random.Random(seed)
    workload = layers(rng, 8)
    machine = two_devices(4_000_000_000)
    simulate_plan, estimate = PlanSimulator(workload, machine, Budget(1e9)), PackEstimate(workload, machine)
    tried = 0
    every = [p for p in all_packs(8) if p.form == "pipeline" and not p.updates_here]
    for packs in rng.sample(every, 12):
        packs = rng.choice([*updated_on_devices(packs)]) if on_devices else packs
        simulated = simulate_plan(planned(packs)).step_s
        if simulated is not None:
            tried += 1
            assert estimate.step_s(packs) == pytest.approx(simulated, rel=off_frac)
    assert tried > 6


@pytest.mark.parametrize("seed", range(20))
def test_balanced_packs_have_the_least_largest_weight(seed):
    rng = random.Random(seed)
    num, count = rng.randint(3, 9), rng.randint(1, 3)
    weights = [rng.uniform(0.5, 2.0) for _ in range(num)]
    sizes = [rng.choice((1.0, 0.5)) for _ in range(count)]
    reach = [min(num, i + rng.randint(2, 5)) for i in range(num)]
    reach = [max(reach[: i + 1]) for i in range(num)]

    def runs_of(ends: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        return tuple(pairwise((0, *ends)))

    def largest(runs: tuple[tuple[int, int], ...]) -> float:
        return max(sum(weights[a:b]) / size for (a, b), size in zip(runs, sizes, strict=True))

    allowed = [r for r in all_runs(num) if len(r) == count and all(b <= reach[a] for a, b in r)]
    found = balanced(weights, sizes, reach)
    assert (found is None) == (not allowed)
    if found is not None:
        assert runs_of(found) in allowed
        assert largest(runs_of(found)) == pytest.approx(min(map(largest, allowed)), rel=2e-4)


@pytest.mark.parametrize(
    "packs",
    [
        Packs(form="pipeline", devices=2, forward=((0, 2), (2, 5)), backward=((0, 3), (3, 5), (5, 8))),
        Packs(form="data", devices=2, forward=(), backward=((0, 8),)),
        Packs(form="pipeline", devices=3, forward=((0, 6),), backward=((0, 1), (1, 6), (6, 8))),
    ],
)
def test_neighbours_cover_all_units_in_order(packs):
    found = [borders.packs(packs, ()) for borders in neighbours(Borders.of(packs))]
    assert found
    for changed in found:
        assert changed != packs
        end = changed.backward[-1][0]
        for runs, last in ((changed.backward, 8), (changed.forward, end)):
            borders = [0, *(b for _, b in runs)]
            assert [a for a, _ in runs] == borders[:-1]
            assert borders[-1] == last
            assert all(a < b for a, b in pairwise(borders))


@pytest.mark.nightly
def test_bert96_is_quicker_than_by_harmonys_own_search():
    """On the published profile, at the memory and the batch of the published search."""
    found, best, (_, alone_s) = benchmark.answer("bert96", "fixed shares", time_limit_s=8, seed=0)
    assert found.step_s < 0.985 * found.policies[best].step_s
    assert alone_s < 17.6  # what Harmony's estimator says of its own best
    assert found.lower_bound_s < found.step_s
    assert found.plan.policy == "planner"


def test_a_search_for_plans_of_one_device_on_all_ends_with_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them is an answer before it is taken to all devices, which is no reason to search until time is up."""
    monkeypatch.setattr("tierplan.planner.search.budget.DEFAULT_OPS", 30_000)
    workload = load_workload("gpt-6.7b", Training(per_device_train_batch_size=2, sequence_length=1024))
    result = plan(workload, load_machine("desktop-4090", ["gpu.count=2", "link.p2p=10 GB/s"]), batches="each")
    assert (result.status, result.plan.devices) == ("searched", 2)
    assert result.num_simulated < 100


def test_packs_whose_parameters_and_states_have_no_room_are_known_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They live in host memory, whatever the packs."""
    workload = load_workload("gpt-6.7b", Training(gradient_accumulation_steps=4))
    machine = load_machine("desktop-4090", ["gpu.count=2"])
    monkeypatch.setattr(PlanSimulator, "_posed", lambda *_: pytest.fail("simulates"))
    for name in ("harmony-dp", "harmony-pp", "mobius", "roundpipe-sync"):
        tried = PlanSimulator(workload, machine, Budget.of(1.0))(POLICIES[name](workload, machine, {}))
        assert not tried.fits
        assert tried.short_tier == "host"
        assert "bytes of parameters and optimizer states are to be in tier 'host', which has" in tried.reason
