"""What is better has the answers of what is less: by construction, whatever the search finds."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from tests.planner.instances import random_chain, random_machine, random_plan
from tierplan.hwmodels import load_machine
from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import COMPUTE, HOST_ADAM, NVME_READ, NVME_WRITE
from tierplan.hwmodels.scaling import lesser, parts_of, with_ample_memory, with_capacity, with_faster, with_parts
from tierplan.planner import loop, planning
from tierplan.planner.infeasible import InfeasiblePlan
from tierplan.planner.lowering import Lowering
from tierplan.planner.milp.amounts import problem
from tierplan.planner.milp.bounds import lower_bound
from tierplan.planner.plan import UnitwisePlan
from tierplan.planner.plan_rules import PlanError
from tierplan.planner.planning import plan
from tierplan.planner.prediction import predict
from tierplan.planner.search import budget
from tierplan.planner.search.lesser import Known, lesser_of_catalog, most_bytes, needs_no_drives, without_excess
from tierplan.sim.analysis.completion import OutOfMemory
from tierplan.sim.analysis.steady import steady_state
from tierplan.sim.compiled import compiler
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training, Workload
from tierplan.studies.evaluate import machine_of, workload_at
from tierplan.studies.study import Point

GPT = dict(
    architectures=["GPT2LMHeadModel"],
    model_type="gpt2",
    n_embd=1024,
    n_layer=6,
    n_head=16,
    n_positions=1024,
    vocab_size=50304,
)


@pytest.fixture
def gpt(tmp_path: Path) -> Workload:
    (tmp_path / "config.json").write_text(json.dumps(GPT))
    training = Training(per_device_train_batch_size=4, sequence_length=1024, dtype="bf16")
    return load_workload(tmp_path / "config.json", training)


def better(machine: Machine, rng: random.Random) -> Machine:
    """The machine with more of some things."""
    sizes = {t.name: int(t.capacity_bytes * rng.choice((1.0, 1.3, 4.0))) for t in machine.tiers}
    names = [s.name for s in machine.streams if rng.random() < 0.5]
    return with_faster(with_capacity(machine, sizes), names, rng.choice((1.1, 2.0, 4.0)))


def step_s(made: UnitwisePlan, workload: Workload, machine: Machine) -> float | None:
    try:
        return steady_state(Lowering(workload, machine).columns(made), machine).period_s
    except OutOfMemory:
        return None


def test_a_plan_that_leaves_the_rest_unused_runs_as_on_the_lesser_machine() -> None:
    num_slower = num_fitting = 0
    for seed in range(30):
        rng = random.Random(seed)
        workload = random_chain(rng, 4)
        less = random_machine(rng, workload)
        more = better(less, rng)
        made = random_plan(rng, problem(workload, less, semantics="in-backward"))
        before_s = step_s(made, workload, less)
        held_s = step_s(replace(made, parts=parts_of(more, less)), workload, more)
        assert held_s == (before_s and pytest.approx(before_s, rel=1e-7)), seed
        after_s = step_s(made, workload, more)
        num_fitting += before_s is not None
        num_slower += before_s is not None and (after_s is None or after_s > before_s * (1 + 1e-6))
    assert num_fitting > 9
    assert num_slower > 0, "more is never in the way here, so nothing is shown"


def test_parts_of_a_machine_are_the_lesser_one() -> None:
    base = load_machine("desktop-4090")
    more = load_machine("desktop-4090", ["gpu.part=h100-sxm-80gb", "nvme.drives=2", "host.adam=3.6 G/s"])
    less = lesser(more, base)
    assert lesser(less, base) == less
    held = with_parts(more, parts_of(more, less))
    assert [t.capacity_bytes for t in held.tiers] == [t.capacity_bytes for t in less.tiers]
    for stream, slower in zip(held.streams, less.streams, strict=True):
        for kind, rate in slower.rates.items():
            if stream.name == COMPUTE:  # GPUs' curves differ in shape, and a part is one number
                assert all(stream.rates[kind].at(amount) <= rate.at(amount) * (1 + 1e-12) for amount, _ in rate.points)
            else:
                assert stream.rates[kind].at(1e9) == pytest.approx(rate.at(1e9), rel=1e-12)


def test_the_catalog_has_lesser_machines_of_its_own_names_only() -> None:
    base = load_machine("laptop")
    assert lesser_of_catalog(base) is None
    assert lesser_of_catalog(load_machine("laptop", ["host.capacity=16 GB"])) is None
    assert lesser_of_catalog(replace(with_faster(base, ["host.adam"], 2.0), name="mine")) is None
    assert lesser_of_catalog(load_machine("fuyou-4090", ["nvme.drives=3"])) is None
    mixed = load_machine("laptop", ["host.capacity=16 GB", "host.adam=2 G/s"])
    less = lesser_of_catalog(mixed)
    assert less is not None
    assert less.tier("host") == mixed.tier("host")
    assert less.stream("host.adam").rates == base.stream("host.adam").rates


def test_a_machine_without_drives_is_less_than_one_with_them() -> None:
    base = load_machine("fsdp-qlora-a100", ["gpu.count=2"])
    more = ["gpu.count=2", "nvme.drives=2", "nvme.part=990-pro"]
    less = lesser(load_machine("fsdp-qlora-a100", more), base)
    assert (less.tiers, less.streams, less.shared_limits) == (base.tiers, base.streams, base.shared_limits)
    catalogs = load_machine("fsdp-qlora-2x4090")
    found = lesser_of_catalog(load_machine("fsdp-qlora-2x4090", [*more, "host.capacity=96 GiB"]))
    assert found is not None
    assert (found.streams, found.shared_limits) == (catalogs.streams, catalogs.shared_limits)
    assert [t.kind for t in found.tiers] == ["device", "device", "host"]
    parts = parts_of(load_machine("fsdp-qlora-2x4090", more), catalogs)
    assert not any(name.startswith("nvme") for name, _, _ in parts)


def test_drives_beside_those_that_had_none_are_never_worse(gpt: Workload) -> None:
    settings = ["gpu.count=1", "gpu.capacity=3 GiB", "host.capacity=16 GiB"]
    less = load_machine("fsdp-qlora-a100", settings)
    more = load_machine("fsdp-qlora-a100", [*settings, "nvme.drives=1", "nvme.part=990-pro"])
    found = plan(gpt, less, time_limit_s=0.5)
    known = Known.of(less, gpt, found)
    assert plan(gpt, more, time_limit_s=0.01, known=known).step_s <= found.step_s * (1 + 1e-9)


def test_beside_a_card_that_mixes_with_none_the_rest_is_still_less() -> None:
    """An L40S is quicker than an RTX 4090 at small products and slower at others: no card has the lesser of both."""
    base = load_machine("desktop-4090")
    less = lesser(card := load_machine("desktop-4090", ["gpu.part=l40s"]), base)
    assert any(
        rate not in (card.stream(COMPUTE).rates[kind], base.stream(COMPUTE).rates.get(kind))
        for kind, rate in less.stream(COMPUTE).rates.items()
    )
    found = lesser_of_catalog(load_machine("desktop-4090", ["gpu.part=l40s", "nvme.drives=2", "host.adam=9 G/s"]))
    assert found is not None
    assert (found.tier("gpu0"), found.stream(COMPUTE)) == (card.tier("gpu0"), card.stream(COMPUTE))
    for name in (HOST_ADAM, NVME_READ, NVME_WRITE):
        assert found.stream(name) == base.stream(name)
    assert found.tier("nvme") == base.tier("nvme")
    assert lesser_of_catalog(found) is None


def test_no_card_has_the_lesser_of_two_at_each_kind_of_work() -> None:
    """An RTX Pro 6000 is slower than an H100 in bf16, and quicker in fp32."""
    assert lesser_of_catalog(load_machine("server-8xh100", ["gpu.part=rtx-pro-6000"])) is None
    better = load_machine("server-8xh100", ["gpu.peak_fp32=100 TFLOPS"])
    less, base = lesser_of_catalog(better), load_machine("server-8xh100")
    assert less is not None
    assert (less.tiers, less.streams) == (base.tiers, base.streams)


def test_a_lesser_machine_has_equal_cards_where_the_catalogs_has_fewer() -> None:
    """Two RTX 5090 in place of the RTX 4090 were not planned at all: the first had the memory of an RTX 4090."""
    settings = ["gpu.count=2", "gpu.part=rtx-5090", "gpu.capacity=32 GiB", "link.both=60 GB/s"]
    assert lesser_of_catalog(load_machine("desktop-4090", settings)) is None
    more = load_machine("desktop-4090", [*settings, "nvme.drives=2", "host.adam=9 G/s"])
    found, base = lesser_of_catalog(more), load_machine("desktop-4090")
    assert found is not None
    assert [t for t in found.tiers if t.kind == "device"] == [t for t in more.tiers if t.kind == "device"]
    assert [s for s in found.streams if "gpu" in s.name] == [s for s in more.streams if "gpu" in s.name]
    assert (found.tier("nvme"), found.stream(HOST_ADAM)) == (base.tier("nvme"), base.stream(HOST_ADAM))


def test_a_part_is_above_0_and_at_most_1(gpt: Workload) -> None:
    machine = load_machine("laptop")
    made = plan(gpt, machine, time_limit_s=0.01).plan
    assert isinstance(made, UnitwisePlan)
    with pytest.raises(PlanError, match="above 0 and at most 1"):
        Lowering(gpt, machine).columns(replace(made, parts=(("host.adam", "parameters", 0.0),)))


def test_more_of_what_the_catalog_has_is_never_slower(gpt: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "OPS_PER_S", 600)
    base = load_machine("laptop", ["host.capacity=10 GB", "gpu.capacity=3 GB"])
    base_s = plan(gpt, base, time_limit_s=50).step_s
    more = with_faster(base, ["nvme.read"], 1.5)
    found = plan(gpt, more, time_limit_s=100)
    assert found.step_s <= base_s * (1 + 1e-9)
    monkeypatch.setattr("tierplan.planner.planning.lesser_of_catalog", lambda machine: None)
    assert plan(gpt, more, time_limit_s=50).step_s > base_s, "no witness: it is as quick without the lesser machine"


def test_memory_beyond_all_that_a_step_holds_changes_nothing(gpt: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "OPS_PER_S", 200)
    base = replace(with_capacity(load_machine("laptop"), {"host": 10**12}), name="mine")
    ample = with_ample_memory(base)
    assert without_excess(base, gpt).tier("host") == without_excess(ample, gpt).tier("host")
    some, plenty = (plan(gpt, with_capacity(base, {"host": size}), time_limit_s=20) for size in (10**12, 10**13))
    assert (some.plan, some.step_s) == (plenty.plan, plenty.step_s)
    assert plenty.steady.capacity_bytes["host"] == 10**13


def test_drives_are_left_out_where_host_memory_has_room_for_all(gpt: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is the same without them: they are no more than a longer way into host memory."""
    monkeypatch.setattr(budget, "OPS_PER_S", 200)
    ample = replace(with_capacity(load_machine("laptop"), {"host": most_bytes(gpt, 1)}), name="mine")
    assert needs_no_drives(ample, gpt)
    assert not needs_no_drives(with_capacity(ample, {"host": most_bytes(gpt, 1) - 1}), gpt)
    for adam in (0.1, 10.0):
        on = with_faster(ample, [HOST_ADAM], adam)
        posed = problem(gpt, on, semantics="in-backward")
        bounds_s = [lower_bound(p).step_s for p in (posed, replace(posed, has_nvme=False))]
        assert bounds_s[1] == pytest.approx(bounds_s[0], rel=1e-6)
    found = plan(gpt, with_faster(ample, [NVME_READ, NVME_WRITE], 100.0), time_limit_s=20)
    assert found.schedule.bytes_moved().get(NVME_READ, 0) == 0


def test_the_lesser_machine_is_searched_once_for_all_that_are_better(
    gpt: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "OPS_PER_S", 20)
    base = load_machine("laptop", ["host.capacity=12 GB", "gpu.capacity=3 GB"])
    more = [with_faster(base, ["host.adam"], factor) for factor in (2.0, 4.0)]
    simulated = [plan(gpt, machine, time_limit_s=100, policies=["vertical"]) for machine in more]
    planning._ANSWERS.clear()
    again = plan(gpt, more[1], time_limit_s=100, policies=["vertical"])
    assert (again.plan, again.step_s) == (simulated[1].plan, simulated[1].step_s)
    known = len(planning._ANSWERS)
    plan(gpt, more[0], time_limit_s=100, policies=["vertical"])
    assert (known, len(planning._ANSWERS)) == (2, 3)


def test_an_interrupt_ends_both_searches(gpt: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[str] = []

    def search(loop: planning.Search) -> Iterator[None]:
        searched.append(loop.machine.name)
        if len(searched) == 1:
            raise KeyboardInterrupt
        assert loop._to_beat_s() == 0.0
        yield from ()

    monkeypatch.setattr(planning.Search, "_rounds", search)
    planning._ANSWERS.clear()
    found = plan(gpt, load_machine("laptop", ["host.adam=4 G/s"]), policies=["vertical"])
    assert (found.status, len(searched), planning._ANSWERS) == ("interrupted", 2, {})
    assert "interrupted" in found.notes[-1]


def test_a_search_for_plans_of_one_kind_begins_with_what_is_known(tmp_path: Path) -> None:
    """Cut in two, micro-batches of twice the size are about the same work: what is known is the first that it has."""
    (tmp_path / "config.json").write_text(json.dumps(GPT))

    def divided(batch: int, accumulation: int) -> Workload:
        training = Training(
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulation,
            sequence_length=1024,
            dtype="bf16",
        )
        return load_workload(tmp_path / "config.json", training)

    machine = load_machine("desktop-4090")
    result = plan(divided(1, 4), machine, orders=["vertical"], policies=(), time_limit_s=2)
    known = Known.of(machine, divided(1, 4), result).divided(2, 2, 2)
    assert isinstance(known.plan, UnitwisePlan)
    assert (known.batch, known.accumulation, known.plan.sub_batches) == (2, 2, 2)
    cut_s = step_s(known.plan, divided(2, 2), machine)
    assert cut_s == pytest.approx(result.step_s, rel=0.01)
    more = load_machine("desktop-4090", ["host.capacity=128 GiB"])
    found = plan(divided(2, 2), more, time_limit_s=1e-4, policies=(), like=known.plan, known=known)
    assert found.step_s <= cut_s * (1 + 1e-9)
    assert isinstance(found.plan, UnitwisePlan)
    assert found.plan.order == "vertical"


def test_that_nothing_fits_the_lesser_machine_is_found_once(gpt: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    planning._ANSWERS.clear()
    less, begun = ["gpu.capacity=1.2 GiB"], list[int]()
    with pytest.raises(InfeasiblePlan):
        plan(gpt, load_machine("laptop", less), time_limit_s=0.1)
    begin = loop.Search.begin

    def noted(search: loop.Search, *args: Any, **options: Any) -> None:
        begun.append(search.machine.tier("host").capacity_bytes)
        begin(search, *args, **options)

    monkeypatch.setattr(loop.Search, "begin", noted)
    for host in ("64 GiB", "96 GiB"):
        with pytest.raises(InfeasiblePlan):
            plan(gpt, load_machine("laptop", [*less, f"host.capacity={host}"]), time_limit_s=0.1)
    assert len(begun) == 2, "the catalog's has answered already"


def test_the_lesser_machines_search_takes_none_of_the_clock(gpt: Workload, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long that took: a search with the clock at its end would say what the lesser machine can do."""
    now_s = [0.0]

    def slowly(*args: object) -> None:
        now_s[0] += 3600.0

    monkeypatch.setattr(budget, "computing_s", lambda: now_s[0])
    monkeypatch.setattr(planning, "known_of_lesser", slowly)
    assert plan(gpt, load_machine("laptop", ["host.capacity=64 GiB"]), policies=[]).status != "time-limit"


def test_a_new_installation_on_a_busy_core_takes_none_of_the_clock(
    gpt: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Making machine code took longer than the wall's clock allows a search, which then ended after a few plans."""
    monkeypatch.setattr(budget, "wall_s", compiler.wall_s)
    spent = budget.Budget(1.0)
    waited_s, now_s = 3600.0, time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: now_s() + waited_s)
    assert spent.is_out_of_time
    monkeypatch.setattr(compiler._compilation, "total_wall_s", compiler._compilation.total_wall_s + waited_s)
    assert not spent.is_out_of_time


@pytest.mark.parametrize("sizes", [{"host.capacity": "4096 GiB", "nvme.drives": 0}, {}])
def test_a_tier_that_rounds_keeps_all_that_it_has(sizes: dict[str, object]) -> None:
    """As many bytes as the buffers have are not enough there: no plan fitted where a published one does."""
    changes = {"host.rounding": "power-of-two", "gpu.capacity": "4 GiB", **sizes}
    point = Point(model="gpt-6.7b", machine="fuyou-4090", overrides=changes, accumulation=1)
    machine = machine_of(point)
    workload = workload_at(point, machine)
    assert without_excess(machine, workload).tier("host") == machine.tier("host")
    assert not needs_no_drives(machine, workload)
    found = plan(workload, machine, time_limit_s=0.5)
    least_s = min(predict(name, workload, machine).step_s or inf for name in ("vertical", "sliding-window", "harmony"))
    assert found.step_s <= least_s < inf


def test_paged_devices_have_all_states_each() -> None:
    point = Point(
        model="gpt2", machine="desktop-4090", seq=8, accumulation=1, overrides={"gpu.count": 2, "link.p2p": "9 GB/s"}
    )
    workload = workload_at(point, machine := machine_of(point))
    found = predict("virtual-memory", workload, machine)
    assert found.steady is not None
    assert found.steady.peak_bytes["host"] <= most_bytes(workload, 2)
