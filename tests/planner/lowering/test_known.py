"""What was made for one machine is the same for the next one, but for its capacities and names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.test_plan import devices
from tests.toys import toy_workload
from tierplan.hwmodels.machine import Machine
from tierplan.planner.lowering import Lowering, known
from tierplan.planner.policies import decide
from tierplan.sim.schedule import Schedule

NUM = 4
WORKLOAD = toy_workload(4, tied=False, gradient_accumulation_steps=NUM)
POLICIES = ("zero-3", "fsdp-offload", "vertical", "megatron-tp", "harmony-dp", "harmony-pp", "mobius", "roundpipe")


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> known._Known:
    kept = known._Known()
    monkeypatch.setattr(known, "_KNOWN", kept)
    return kept


def better(machine: Machine) -> Machine:
    """The same with other rates, more memory and another name."""
    tiers = tuple(replace(t, capacity_bytes=2 * t.capacity_bytes) for t in machine.tiers)
    streams = tuple(replace(s, latency_s=s.latency_s + 1e-3) for s in machine.streams)
    return replace(machine, name="better", tiers=tiers, streams=streams)


def lowered(policy: str, machine: Machine) -> Schedule:
    plan = decide(policy, WORKLOAD, devices(NUM), {})
    return Lowering(WORKLOAD, machine).columns(plan).schedule()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_schedule_is_the_same_whether_it_is_known(policy: str, nothing_kept: known._Known) -> None:
    lowered(policy, devices(NUM))
    num = len(nothing_kept.schedules)
    second = lowered(policy, better(devices(NUM)))
    assert num > 0
    assert len(nothing_kept.schedules) == num
    nothing_kept.schedules.clear()
    assert second == lowered(policy, better(devices(NUM)))
    assert second.meta["machine"] == "better"


def test_other_links_are_another_schedule() -> None:
    lowered("harmony-pp", devices(NUM))
    machine = devices(NUM)
    machine = replace(machine, streams=tuple(s for s in machine.streams if "p2p" not in s.name))
    assert not any("p2p" in op.stream for op in lowered("harmony-pp", machine).ops)


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch, nothing_kept: known._Known) -> None:
    num_ops = len(lowered("zero-3", devices(NUM)).ops)
    monkeypatch.setattr(known, "MOST_OPS", 2 * num_ops - 1)
    lowered("fsdp-offload", devices(NUM))
    assert nothing_kept.num_ops == sum(c.num_ops for c in nothing_kept.schedules.values()) < 2 * num_ops
