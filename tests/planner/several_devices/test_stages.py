"""Stages that stay on their devices: the search against all there are, the estimate against simulation."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain, combinations, product

import pytest

from tests.planner.several_devices.test_packs import with_device_bytes
from tierplan.hwmodels import load_machine
from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import d2h, h2d
from tierplan.hwmodels.scaling import with_capacity
from tierplan.planner.lowering import lower
from tierplan.planner.plan import PackPlan, Packs, other_numbers
from tierplan.planner.plan_rules import PlanError
from tierplan.planner.planning import plan
from tierplan.planner.prediction import predict
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.candidates import Candidate, PlanSimulator
from tierplan.planner.search.incumbents import Incumbents
from tierplan.planner.search.local.moves import untied as untied_plans
from tierplan.planner.several_devices.packs.search import runs_to
from tierplan.planner.several_devices.packs.stages import STATE_PARTS, StageEstimate, Stages, search_stages
from tierplan.sim.analysis.steady import steady_state
from tierplan.sim.ranks import SEND
from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training, Workload

MIB, GIB = 2**20, 2**30


def unequal(seed: int, num_blocks: int = 5, accumulation: int = 5, clip: float | None = None) -> Workload:
    """Blocks that take times and save bytes of their own."""
    training = Training(
        per_device_train_batch_size=2, gradient_accumulation_steps=accumulation, sequence_length=512, max_grad_norm=clip
    )
    rng, whole = random.Random(seed), load_workload("gpt2-large", training)
    blocks = []
    for block in whole.blocks[:num_blocks]:
        times, size = rng.choice((1, 2, 3)), rng.choice((1, 2))
        longer = {name: {k: times * v for k, v in getattr(block, name).items()} for name in ("forward", "backward")}
        blocks.append(replace(block, **longer, saved=block.saved * size, recompute=None))
    return replace(whole, units=(whole.units[0], *blocks, whole.units[-1]))


def devices(num: int, capacity_bytes: int) -> Machine:
    return with_device_bytes(load_machine("fsdp-qlora-6000-ada", [f"gpu.count={num}"]), capacity_bytes)


def resident(num: int, ends: tuple[int, ...], kept: tuple[int, ...] = (), **states: tuple[int, ...]) -> PackPlan:
    """`states` says where those are, and where they are updated, that do not stay."""
    runs, parts = runs_to(ends), STATE_PARTS if states.get("updates_here") else 1
    packs = Packs(form="resident", devices=num, forward=runs[:-1], backward=runs, kept=kept, state_shards=parts)
    return PackPlan(policy="t", packs=replace(packs, **states))


def simulator(workload: Workload, machine: Machine) -> PlanSimulator:
    return PlanSimulator(workload, machine, Budget.of(None))


def staged(workload: Workload, machine: Machine) -> Candidate[PackPlan] | None:
    found, simulate_plan = Incumbents("shared", 5, 1), simulator(workload, machine)
    search_stages(found, simulate_plan, num_ops=simulate_plan.budget.ops_left)
    return found.staged


def searched(workload: Workload, machine: Machine) -> float | None:
    found = staged(workload, machine)
    return found.step_s if found else None


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(n, marks=pytest.mark.nightly) for n in range(3, 6))])
def test_hardly_any_stages_are_quicker(seed: int) -> None:
    """Of all borders, with one stage more than devices too, and all sets of blocks that keep their activations, which
    may be of any size; what is found may have states in host memory, too."""
    workload, num = unequal(seed, clip=0.5 if seed % 3 == 0 else None), 2 + seed % 2
    machine = devices(num, (1500 + 400 * seed) * MIB)
    simulate_plan, units = simulator(workload, machine), len(workload.units)
    steps = [
        simulate_plan(resident(num, (*borders, units), kept)).step_s
        for more in (0, 1)
        for borders in combinations(range(1, units), num - 1 + more)
        for number in range(units - 1)
        for kept in combinations(range(1, units - 1), number)
    ]
    best_s = min((step_s for step_s in steps if step_s is not None), default=None)
    found = staged(workload, machine)
    assert best_s is None or (found is not None and found.step_s is not None and found.step_s <= 1.02 * best_s)
    if found is not None and not found.plan.packs.host_states:
        assert (best_s or 0.0) <= (found.step_s or 0.0)


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("mib", [1100, 1400, 1800])
def test_hardly_any_places_of_states_are_quicker(mib: int, clip: float | None) -> None:
    """Of all borders and sets of blocks that keep their activations, with each unit's states on its device, or in host
    memory and updated there or here."""
    workload, machine = unequal(1, num_blocks=2, accumulation=4, clip=clip), devices(2, mib * MIB)
    simulate_plan, units = simulator(workload, machine), range(4)
    steps = []
    for places in product(("stays", "host", "here"), repeat=4):
        away = tuple(k for k in units if places[k] != "stays")
        states = {"host_states": away, "updates_here": tuple(k for k in away if places[k] == "here")}
        steps += [
            simulate_plan(resident(2, (*ends, 4), kept, **states)).step_s
            for ends in [(1,), (2,), (3,), (1, 2), (1, 3), (2, 3), (1, 2, 3)]
            for kept in [(), (1,), (2,), (1, 2)]
        ]
    best_s = min((step_s for step_s in steps if step_s is not None), default=None)
    found_s = searched(workload, machine)
    assert (found_s is None) == (best_s is None)
    assert found_s is None or best_s is None or best_s <= found_s <= 1.05 * best_s


@pytest.mark.parametrize(
    ("seed", "num", "blocks", "accumulation", "mib", "clip", "host"),
    [
        (0, 2, 8, 12, 1000, None, 4.0),  # no estimate has room
        (1, 2, 12, 8, 1500, None, 1.01),  # the host has it for states alone
        (2, 4, 8, 8, 800, 0.5, 4.0),  # those of the embedding have none on its device
        (4, 2, 8, 2, 1500, 0.5, 4.0),
        (15, 2, 4, 2, 1000, None, 4.0),  # what is quickest nearly has it, by the estimate
        (3, 3, 8, 1, 1200, None, 4.0),  # one device after the other
    ],
)
def test_random_stages_are_not_quicker_than_what_is_found(
    seed: int, num: int, blocks: int, accumulation: int, mib: int, clip: float | None, host: float
) -> None:
    """Not by more than a twentieth, on longer chains than have all their places tried, mostly with all states in host
    memory."""
    workload, rng = unequal(seed, blocks, accumulation, clip), random.Random(seed)
    machine = with_capacity(devices(num, mib * MIB), {"host": int(host * workload.states_bytes)})
    found_s, simulate_plan, units = searched(workload, machine), simulator(workload, machine), range(blocks + 2)
    steps = []
    for _ in range(200):
        ends = (*sorted(rng.sample(units[1:], num - rng.choice((0, 1)))), len(units))
        sizes = (rng.choice((0, 0.5, 1)), rng.choice((0.5, 1, 1)), rng.choice((0, 0.5, 1)))
        kept, away, here = (tuple(k for k in units if rng.random() < size) for size in sizes)
        states = {"host_states": away, "updates_here": tuple(k for k in here if k in away)}
        steps.append(simulate_plan(resident(num, ends, tuple(k for k in kept if k in units[1:-1]), **states)).step_s)
    best_s = min(step_s for step_s in steps if step_s is not None)
    assert found_s is not None
    assert found_s <= 1.06 * best_s


@pytest.mark.parametrize(
    ("num", "at_home", "accumulation"), [(2, False, 5), (3, False, 5), (2, True, 5), (3, True, 5), (3, False, 1)]
)
def test_the_estimate_is_what_is_simulated(num: int, at_home: bool, accumulation: int) -> None:
    """Where nothing is shared by two devices, and no link by two transfers."""
    workload, machine = unequal(7, accumulation=accumulation), devices(num, 12 * GIB)
    if not at_home:
        head = replace(workload.units[-1], shares=None, num_parameters=workload.units[0].num_parameters)
        workload = replace(workload, units=(*workload.units[:-1], head))
    simulate_plan, rng = simulator(workload, machine), random.Random(num)
    estimate = StageEstimate(simulate_plan, machine.tier("gpu0").capacity_bytes)
    for _ in range(8):
        ends = (*sorted(rng.sample(range(1, len(workload.units)), num - 1 + at_home)), len(workload.units))
        stages = Stages(ends, away=(0,) * num, here=(0,) * num)
        kept = tuple(sorted(k for share in estimate.shares(stages) for k in share.kept))
        assert kept == tuple(range(1, len(workload.units) - 1)), "there is room for all"
        lacking_bytes, step_s = estimate.of(stages)
        assert not lacking_bytes
        tolerance = 0.003 if accumulation > 1 else 0.005  # what is sent last has nothing else beside it
        assert simulate_plan(resident(num, ends, kept)).step_s == pytest.approx(step_s, rel=tolerance)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_the_estimate_is_about_what_is_simulated_where_states_leave(clip: float | None) -> None:
    """To about a tenth: what the host updates is copied, which is left out, and states that come do so earlier."""
    training = Training(gradient_accumulation_steps=32, sequence_length=1024, dtype="bf16", backend="cuda")
    workload = load_workload("gpt-13b", replace(training, max_grad_norm=clip))
    simulate_plan = simulator(workload, load_machine("roundpipe-8x4090"))
    estimate = StageEstimate(simulate_plan, simulate_plan.machine.tier("gpu0").capacity_bytes)
    for here in (0, 1, 9):
        stages = Stages((6, 11, 16, 21, 26, 31, 36, 42), away=(1,) * 8, here=(here,) * 8)
        kept, away, updated = (
            tuple(sorted(chain(*units)))
            for units in zip(*((s.kept, s.host_states, s.updates_here) for s in estimate.shares(stages)), strict=True)
        )
        tried = simulate_plan(resident(8, stages.ends, kept, host_states=away, updates_here=updated))
        assert (len(away) - len(updated) > 0) == (here < 9)
        assert tried.step_s == pytest.approx(estimate.of(stages)[1], rel=0.12)


def test_fewer_micro_batches_than_devices_go_through_stages() -> None:
    """One after the other: all devices' memory is there for one micro-batch, which no device alone has room for; packs
    that go round fetch everything anew."""
    workload, machine = load_workload("gpt2-large", Training(sequence_length=512)), devices(3, 6 * GIB)
    found = plan(workload, machine, batches="shared")
    assert isinstance(found.plan, PackPlan)
    assert found.plan.packs.stays
    packed = predict("harmony-pp", workload, machine).step_s
    assert packed is not None
    assert found.step_s < 0.5 * packed
    assert predict("megatron-pp", workload, machine).step_s is not None


def test_states_that_come_to_a_device_do_not_wait_for_what_the_host_updates() -> None:
    """Both go through one link: states come when gradients are there, and the host's new parameters when they are."""
    workload, machine = unequal(1, clip=0.5), devices(2, 4 * GIB)
    schedule = lower(resident(2, (3, 7), host_states=(0, 1, 2), updates_here=(0,)), workload, machine)
    spans = steady_state(schedule, machine).trace.by_key()
    assert spans["s1/fetch_states/embed/1of4"].start_ns < spans["s1/update/L0/gpu0"].end_ns
    assert spans["s1/fetch_params/L0/update"].start_ns >= spans["s1/update/L0/gpu0"].end_ns


def test_what_is_frozen_stays_where_the_host_updates_adapters() -> None:
    """Adapters are in fp32, with no other copy: 4 bytes of each, and 4 of its gradient, go to the host, and 4 come."""
    training = Training(gradient_accumulation_steps=4, sequence_length=512, lora="r=8,targets=all-linear")
    whole = load_workload("qwen3-4b", training)
    workload = replace(whole, units=(whole.units[0], *whole.blocks[:4], whole.units[-1]))
    schedule = lower(resident(2, (3, 6), host_states=(1, 3)), workload, devices(2, 40 * GIB))
    num = sum(workload.units[k].num_trained for k in (1, 3))
    moved = schedule.bytes_moved()
    assert [(moved[h2d(d)], moved[d2h(d)]) for d in range(2)] == [(4 * num // 2, 8 * num // 2)] * 2
    assert 8 * num < workload.units[1].frozen_bytes
    held = [b for b in schedule.buffers if b.initial and b.content.startswith("frozen/")]
    assert sum(b.size_bytes for b in held) >= sum(unit.frozen_bytes for unit in workload.units)


def test_stages_whose_states_have_no_room_are_quicker_than_what_was_published() -> None:
    """13B on eight GPUs of 24 GB, which hold its parameters and gradients: packs that go round, as Harmony's and
    RoundPipe's do, leave all updates to the host."""
    training = Training(gradient_accumulation_steps=64, sequence_length=1024, dtype="bf16", backend="cuda")
    workload, machine = load_workload("gpt-13b", training), load_machine("roundpipe-8x4090")
    found = plan(workload, machine, batches="shared", time_limit_s=0.5)
    assert isinstance(found.plan, PackPlan)
    assert found.plan.packs.stays
    assert set(found.plan.packs.updates_here) <= set(found.plan.packs.host_states)
    assert found.plan.packs.host_states
    for name in ("roundpipe-sync", "harmony-pp"):
        published = predict(name, workload, machine).step_s
        assert published is None or found.step_s < 0.7 * published
    assert found.step_s >= found.lower_bound_s


@pytest.mark.parametrize("accumulation", [4, 12])
def test_megatron_sends_a_tied_heads_gradient_once_a_step(accumulation: int) -> None:
    """Bytes by hand: 2 E to the first stage, and the new parameters back; so a step is about as long as with a head of
    its own, whose update is on its own stage. The planner's stages send it for each micro-batch, as plain training adds
    it up, or have it at home; and what is a candidate of theirs has those sums, too."""
    training = Training(gradient_accumulation_steps=accumulation, sequence_length=512, dtype="bf16", backend="cuda")
    tied, machine = load_workload("gpt2-large", training), devices(4, 40 * GIB)
    num = tied.units[0].num_parameters
    head = replace(tied.units[-1], shares=None, num_parameters=num + tied.units[-1].num_parameters)
    untied = replace(tied, units=(*tied.units[:-1], head))
    ours, own = (predict("megatron-pp", w, machine) for w in (tied, untied))
    assert isinstance(ours.plan, PackPlan)
    assert isinstance(own.plan, PackPlan)
    assert (ours.plan.sums_tied, own.plan.sums_tied) == (True, False)
    assert other_numbers(ours.plan, None)
    assert not other_numbers(own.plan, None)
    (each,) = untied_plans(ours.plan, tied)
    assert each == replace(ours.plan, packs=replace(ours.plan.packs, sums_tied=False))
    assert [sent_bytes(lower(p, tied, machine), "tied/embed/") for p in (ours.plan, each)] == [
        2 * num, 2 * num * accumulation
    ]  # fmt: skip
    assert sent_bytes(lower(ours.plan, tied, machine), "params/embed") == 2 * num
    assert ours.step_s is not None
    assert own.step_s is not None
    assert ours.step_s == pytest.approx(own.step_s, rel=0.1)
    single = replace(tied, training=replace(training, gradient_accumulation_steps=1), computed_for=None)
    alone = predict("megatron-pp", single, machine).plan
    assert alone is not None
    assert not other_numbers(alone, None), "of one micro-batch it is the sum"
    stays = replace(ours.plan, packs=replace(ours.plan.packs, form="pipeline"))
    with pytest.raises(PlanError, match="says how tied gradients of stages are summed, but has form 'pipeline'"):
        stays.check(tied)


def sent_bytes(schedule: Schedule, content: str) -> float:
    contents = {b.name: b.content for b in schedule.buffers}
    sends = [op for op in schedule.ops if op.kind == SEND and contents[op.reads[0]].startswith(content)]
    return sum(amount for op in sends for name, amount in op.work.items() if name.endswith("bytes"))


def test_what_the_planner_finds_is_quicker_than_megatrons_stages() -> None:
    """8B in bf16 on eight GPUs of 24 GB: all of it fits in stages, and most activations need not be made again."""
    training = Training(gradient_accumulation_steps=16, sequence_length=1024, dtype="bf16", backend="cuda")
    workload, machine = load_workload("llama-3.1-8b", training), load_machine("fsdp-qlora-a5000")
    megatrons = predict("megatron-pp", workload, machine).step_s
    found = plan(workload, machine, batches="shared", time_limit_s=0.5)
    assert isinstance(found.plan, PackPlan)
    assert found.plan.packs.stays
    assert megatrons is not None
    assert found.step_s < 0.7 * megatrons


def test_the_best_stages_are_tried_though_all_work_is_spent() -> None:
    """As it is by others that did not fit: the estimate has taken its time already."""
    found, simulate_plan = Incumbents("shared", 5, 1), simulator(unequal(0), devices(2, 12 * GIB))
    search_stages(found, simulate_plan, num_ops=-1.0)
    assert found.staged is not None
    assert simulate_plan.num_simulated == 1


def test_a_tied_head_costs_a_pipeline_next_to_nothing() -> None:
    """Its stage comes home to the embedding, so no gradients of a vocabulary of 152,000 are sent."""
    training = Training(gradient_accumulation_steps=16, sequence_length=1024, dtype="bf16", backend="cuda")
    tied, machine = load_workload("qwen3-4b", training), load_machine("roundpipe-8x4090")
    head = replace(tied.units[-1], shares=None, num_parameters=tied.units[0].num_parameters)
    own = replace(tied, units=(*tied.units[:-1], head))
    found, wanted = (plan(w, machine, batches="shared", time_limit_s=0.5) for w in (tied, own))
    assert isinstance(found.plan, PackPlan)
    assert len(found.plan.packs.backward) % 8 == 1
    assert found.step_s < 1.03 * wanted.step_s
