"""The bound of a step's totals: closed forms, and no plan of any kind is quicker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.toys import MIB, toy_machine, toy_workload
from tierplan.hwmodels.names import COMPUTE, HOST_ADAM
from tierplan.hwmodels.scaling import with_capacity, with_faster
from tierplan.planner.milp.amounts import problem
from tierplan.planner.milp.bounds import compute_s, lower_bound
from tierplan.planner.milp.totals import bound_of_totals
from tierplan.planner.plan import is_same, plain_semantics
from tierplan.planner.policies import POLICIES
from tierplan.planner.prediction import predict
from tierplan.studies.evaluate import machine_of, most_tokens_per_s, workload_at
from tierplan.studies.study import Point

NUM_TRAINED = 10 * MIB + 4 * 3 * MIB + 1024


def test_with_room_for_all_it_is_computing_and_updates() -> None:
    """Without a host, each device has all states, and updates them."""
    p = replace(problem(toy_workload(), toy_machine(), semantics="in-backward"), host_gb=0.0, has_nvme=False)
    found = bound_of_totals(p, 1)
    assert found.step_s == pytest.approx(compute_s(p) + sum(u.update_s for u in p.units), rel=1e-5)
    assert found.shares == {"gpu0.compute": pytest.approx(1.0)}


@pytest.mark.parametrize(("adam_factor", "binds"), [(0.01, HOST_ADAM), (100.0, "gpu0.compute")])
def test_without_room_for_states_the_host_updates_all(adam_factor: float, binds: str) -> None:
    machine = with_faster(toy_machine(device_bytes=0), [HOST_ADAM], adam_factor)
    p = replace(problem(toy_workload(), machine, semantics="in-backward"), brings_states=False)
    found = bound_of_totals(p, 1)
    assert found.step_s == pytest.approx(max(compute_s(p), NUM_TRAINED / (5e8 * adam_factor)), rel=1e-5)
    assert next(iter(found.shares)) == binds


def test_what_the_host_has_no_room_for_is_read_and_written_in_each_step() -> None:
    """All states are 12 bytes a parameter; the drive writes them at 1 GB/s."""
    free_bytes = 100 * MIB
    machine = toy_machine(device_bytes=0, host_bytes=free_bytes)
    p = replace(problem(toy_workload(), machine, semantics="in-backward"), brings_states=False)
    found = bound_of_totals(p, 1)
    on_drive = (12 + 2) * NUM_TRAINED - free_bytes
    assert found.step_s == pytest.approx(on_drive / 1e9, rel=1e-5)
    assert found.s_per_gb["host"] == pytest.approx(1.0)


def test_gradients_that_wait_for_their_norm_need_room_too() -> None:
    """2 bytes a parameter more; without clipping each may go before the next one comes."""
    free_bytes = 100 * MIB
    machine = toy_machine(device_bytes=0, host_bytes=free_bytes)
    workload = toy_workload()
    clipped = replace(workload, training=replace(workload.training, max_grad_norm=1.0), computed_for=None)
    p = replace(problem(clipped, machine, semantics="exact-clip"), brings_states=False)
    on_drive = (12 + 2 + 2) * NUM_TRAINED - free_bytes
    assert bound_of_totals(p, 1).step_s == pytest.approx(on_drive / 1e9, rel=1e-5)


def test_what_all_tiers_together_have_no_room_for_has_none() -> None:
    for nvme_bytes, fits in ((250 * MIB, False), (350 * MIB, True)):
        machine = toy_machine(device_bytes=0, host_bytes=10 * MIB, nvme_bytes=nvme_bytes)
        found = bound_of_totals(problem(toy_workload(), machine, semantics="in-backward"), 1)
        assert (found.feasible, found.step_s < float("inf")) == (fits, fits)


def test_without_a_rate_for_updates_of_the_host_there_is_a_bound() -> None:
    """Some plans take states to the device for them."""
    posed = problem(toy_workload(), toy_machine(device_bytes=0), semantics="in-backward")
    found = bound_of_totals(replace(posed, rates=replace(posed.rates, adam=0.0)), 1)
    assert found.step_s == pytest.approx(compute_s(posed), rel=1e-5)


@pytest.mark.parametrize("beside_s", [0.0, 1e-6])
def test_where_the_device_has_no_rate_for_an_update_the_host_makes_it(beside_s: float) -> None:
    """Muon's products are bf16, which a V100 has not: they took no time in the bound, which was 1 % of any step."""
    point = Point(model="gpt-0.1b", machine="zero-offload-v100", batch=2, seq=64, optimizer="muon")
    machine = machine_of(point)
    slower_beside = replace(machine.stream(COMPUTE), beside_s=beside_s)  # else nothing asks for computing alone
    streams = [slower_beside if s.name == COMPUTE else s for s in machine.streams]
    machine = replace(machine, streams=tuple(streams))
    workload = workload_at(point, machine)
    blocks = [u for u in workload.units if u.kind == "block"]
    adam_per_s = machine.stream(HOST_ADAM).rates["parameters"].at(1e9)
    least_s = sum(workload.training.host_work(u)["parameters"] for u in blocks) / adam_per_s
    posed = problem(workload, machine, semantics="in-backward")
    quickest_s = min(step_s for name in POLICIES if (step_s := predict(name, workload, machine).step_s))
    for bound in (bound_of_totals(posed, 1), lower_bound(posed)):
        assert 0.99 * least_s <= bound.step_s <= quickest_s
    adam = workload_at(replace(point, optimizer="adamw"), machine)
    assert lower_bound(problem(adam, machine, semantics="in-backward")).step_s < 0.1 * least_s


def test_no_plan_of_any_kind_is_quicker() -> None:
    """All systems, on two devices that have no room for states: the bound is far above that of compute alone."""
    point = Point(
        model="gpt2-large",
        machine="fsdp-qlora-2x4090",
        sequences=8,
        overrides={"host.adam": "0.1 G/s", "link.h2d": "1 GB/s", "link.d2h": "1 GB/s", "gpu.capacity": "3 GiB"},
    )
    machine, num = machine_of(point), 0
    most = most_tokens_per_s(point)
    for batch, accumulation in ((1, 8), (1, 4), (2, 4), (2, 2), (4, 1)):
        workload = workload_at(replace(point, batch=batch, accumulation=accumulation), machine)
        posed = problem(workload, machine, semantics=plain_semantics(workload.training))
        for name in POLICIES:
            found = predict(name, workload, machine)
            if found.plan is None or found.step_s is None or not is_same(found.plan, posed.semantics):
                continue
            bound = bound_of_totals(posed, found.plan.num_batches)
            assert found.step_s >= bound.step_s > 2 * compute_s(posed) * found.plan.num_batches / 2
            if batch * accumulation * found.plan.num_batches == point.sequences:
                assert found.tokens_per_s is not None
                assert found.tokens_per_s <= most
            num += 1
    assert num > 15


def test_more_of_anything_never_lifts_it() -> None:
    less = machine_of(Point(model="gpt2-xl", machine="fsdp-qlora-2x4090", overrides={"gpu.capacity": "6 GiB"}))
    workload = workload_at(Point(model="gpt2-xl", machine=less.name, accumulation=4), less)

    def bound_s(machine: object) -> float:
        return bound_of_totals(problem(workload, machine, semantics="in-backward"), 2).step_s  # type: ignore[arg-type]

    least_s = bound_s(less)
    for tier in less.tiers:
        assert bound_s(with_capacity(less, {tier.name: 2 * tier.capacity_bytes})) <= least_s * (1 + 1e-6)
    for stream in less.streams:
        assert bound_s(with_faster(less, [stream.name], 2.0)) <= least_s * (1 + 1e-6)


def test_packs_wait_once_for_all_their_units() -> None:
    """One op stands for a whole pack, so that it has one latency."""
    overrides: dict[str, object] = {"gpu.count": 2, "gpu.latency": "2 ms"}
    point = Point(model="gpt-0.1b", machine="roundpipe-8x4090", accumulation=8, seq=64, overrides=overrides)
    machine = machine_of(point)
    workload = workload_at(point, machine)
    bound_s = bound_of_totals(problem(workload, machine, semantics=plain_semantics(workload.training)), 1).step_s
    steps = [predict(name, workload, machine).step_s for name in ("mobius", "harmony-pp", "roundpipe-sync")]
    assert all(step_s is None or bound_s <= step_s for step_s in steps)
    assert any(steps)
