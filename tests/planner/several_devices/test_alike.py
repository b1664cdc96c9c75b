"""One device for several that do the same at once, against all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.test_plan import devices
from tests.toys import toy_workload
from tierplan.hwmodels import load_machine
from tierplan.hwmodels.machine import Machine, SharedLimit
from tierplan.hwmodels.scaling import with_capacity
from tierplan.planner.lowering import Lowering
from tierplan.planner.plan import Packs, UnitwisePlan
from tierplan.planner.policies import decide
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.candidates import PlanSimulator
from tierplan.planner.several_devices.alike import do_the_same, first_for_all
from tierplan.planner.several_devices.packs.estimate import PackEstimate
from tierplan.sim.analysis.steady import SteadyState, steady_state

NUM = 4
WORKLOAD = toy_workload(4, tied=False, gradient_accumulation_steps=2)
POLICIES = (
    "in-memory", "zero-offload", "zero-infinity", "sliding-window", "vertical", "zero-1", "zero-2", "zero-3",
    "ddp", "fsdp", "fsdp-offload", "megatron-tp",
)  # fmt: skip


def sharing_dram(num: int) -> Machine:
    """Devices that slow each other down: links share the host's memory, and each two of them a switch."""
    machine = devices(num)
    streams = [
        replace(s, takes={"dram": {"bytes": 1.0}, f"switch{int(s.name[3]) // 2}": {"bytes": 1.0}})
        if s.name.endswith(("h2d", "d2h"))
        else s
        for s in machine.streams
    ]
    limits = [SharedLimit(name="dram", limit=2e9)]
    limits += [SharedLimit(name=f"switch{k}", limit=1.5e9) for k in range((num + 1) // 2)]
    return replace(machine, streams=tuple(streams), shared_limits=tuple(limits))


def plan_of(policy: str, machine: Machine, *, ahead: bool = False) -> UnitwisePlan:
    plan = decide(policy, WORKLOAD, machine, {"devices": machine.num_devices})
    assert isinstance(plan, UnitwisePlan)
    return replace(plan, sharing=replace(plan.sharing, ahead=ahead))


def in_full_and_by_the_first(policy: str, machine: Machine, *, ahead: bool = False) -> tuple[SteadyState, SteadyState]:
    plan, lowering = plan_of(policy, machine, ahead=ahead), Lowering(WORKLOAD, machine)
    columns, first = lowering.simulated(plan)
    full = lowering.columns(plan, refine=False)
    assert columns.num_ops * 2 < full.num_ops, "one stands for all"
    return steady_state(full, machine), steady_state(columns, first)


@pytest.mark.parametrize(
    ("policy", "ahead"), [(policy, ahead) for policy in POLICIES for ahead in sorted({False, policy != "megatron-tp"})]
)
def test_steps_take_as_long_and_hold_as_much(policy: str, ahead: bool) -> None:
    """What is held on the device is less here: where all end at the same moment, each frees what the others read."""
    full, first = in_full_and_by_the_first(policy, sharing_dram(NUM), ahead=ahead)
    assert first.period_s == pytest.approx(full.period_s, rel=1e-6)
    for tier in ("host", "nvme"):
        assert first.peak_bytes[tier] == pytest.approx(full.peak_bytes[tier], abs=NUM * len(WORKLOAD.units))


def test_devices_slow_each_other_down() -> None:
    """Or the test above says little."""
    machine = sharing_dram(NUM)
    alone = replace(machine, shared_limits=tuple(replace(x, limit=1e12) for x in machine.shared_limits))
    periods_s = [in_full_and_by_the_first("fsdp-offload", m)[1].period_s for m in (alone, machine)]
    assert periods_s[1] > 1.05 * periods_s[0]


@pytest.mark.parametrize(
    ("name", "num", "is_one"),
    [("server-8xh100", 8, True), ("server-8xh100", 3, False), ("harmony-4x1080ti", 4, True)],
)
def test_no_device_stands_for_others_where_one_has_a_switch_to_itself(name: str, num: int, is_one: bool) -> None:
    assert (first_for_all(load_machine(name), num) is not None) == is_one
    machine = sharing_dram(3)
    plan = plan_of("zero-3", machine)
    columns, of = Lowering(WORKLOAD, machine).simulated(plan)
    assert of is machine
    assert columns.num_ops == Lowering(WORKLOAD, machine).columns(plan).num_ops


def test_drives_serve_one_device_after_the_other() -> None:
    plan = plan_of("zero-3", devices(NUM))
    assert do_the_same(plan)
    assert not do_the_same(replace(plan, devices=1))
    for change in ({"acts": "nvme"}, {"acts": ("keep", "nvme", "keep", "keep")}, {"input": "nvme"}):
        units = (replace(plan.units[0], **change), *plan.units[1:])
        assert not do_the_same(replace(plan, units=units))


def least_bytes(tier: str, policy: str, machine: Machine, *, in_full: bool) -> int:
    """What the tiers of a kind must have for a plan to fit, by bisection."""

    def does_not_fit(size: int) -> bool:
        tight = with_capacity(machine, {t.name: size for t in machine.tiers if t.name.startswith(tier)})
        simulate_plan = PlanSimulator(WORKLOAD, tight, Budget(1e9))
        plan = plan_of(policy, machine)
        found = (simulate_plan.in_full if in_full else simulate_plan)(plan)
        assert found.fits or tier in found.reason
        return not found.fits

    low, high = 0, 2**32
    while high - low > 100:
        middle = (low + high) // 2
        low, high = (middle, high) if does_not_fit(middle) else (low, middle)
    return high


@pytest.mark.parametrize("policy", ["zero-infinity", "fsdp-offload"])
@pytest.mark.parametrize("tier", ["gpu", "host"])
def test_a_plan_needs_the_same_memory(policy: str, tier: str) -> None:
    needed = [least_bytes(tier, policy, sharing_dram(NUM), in_full=in_full) for in_full in (True, False)]
    assert needed[1] == pytest.approx(needed[0], abs=200)


def test_packs_are_slowed_down_by_those_with_whom_they_share_a_switch() -> None:
    """Two of four devices have one switch: where it is enough for two, none waits for it."""
    machine = sharing_dram(NUM)
    packs = Packs(form="data", devices=NUM, forward=((0, 3),), backward=((0, 3), (3, 6)))

    def estimated_s(switch: float) -> float:
        limits = tuple(replace(x, limit=switch if "switch" in x.name else 1e12) for x in machine.shared_limits)
        return PackEstimate(WORKLOAD, replace(machine, shared_limits=limits)).step_s(packs)

    assert estimated_s(10e9) == estimated_s(1e12)
    assert estimated_s(5e9) > 1.01 * estimated_s(10e9)
