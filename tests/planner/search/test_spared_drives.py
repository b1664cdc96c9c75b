"""What fits into host memory at no cost in time stays off the drives."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf

import pytest

from tests.planner.instances import MB, chain, small_machine
from tests.random_plans import random_plan
from tests.toys import toy_machine, toy_workload
from tierplan.hwmodels import load_machine
from tierplan.hwmodels.names import NVME
from tierplan.planner import loop
from tierplan.planner.lowering import lower
from tierplan.planner.milp.amounts import problem
from tierplan.planner.milp.bounds import lower_bound
from tierplan.planner.planning import plan
from tierplan.planner.search.lesser import WORTH_DRIVES, off_idle_drives
from tierplan.planner.search.local.moves import off_drives
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training


def test_whatever_is_on_drives_lies_in_host_memory_instead() -> None:
    workload, rng, num = toy_workload(4), random.Random(0), 0
    for _ in range(60):
        before = random_plan(workload, rng)
        after = off_drives(before)
        after.check(workload)
        on_drives = [any(b.tier == NVME for b in lower(p, workload, toy_machine()).buffers) for p in (before, after)]
        assert not on_drives[1]
        assert on_drives[0] or after == before
        num += on_drives[0]
    assert num > 30


def test_what_would_be_as_quick_without_drives_is_planned_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model, whose search ends as soon as compute binds, with a unit's few bytes on a drive.

    Host memory has room for what is there, but not for all that a step makes."""
    workload = load_workload("gpt2", Training(per_device_train_batch_size=16, sequence_length=1024))
    machine = load_machine("desktop-4090", ["host.capacity=10 GB"])
    spared = plan(workload, machine)
    monkeypatch.setattr(loop.Search, "_spares_drives", lambda search, best: best)
    monkeypatch.setattr(loop, "off_idle_drives", lambda p, bound, bounded: (p, bound))
    found = plan(workload, machine)
    assert [any(b.tier == NVME for b in each.schedule.buffers) for each in (found, spared)] == [True, False]
    assert spared.step_s == found.step_s


def test_what_would_be_quicker_without_drives_is_planned_without() -> None:
    """By microseconds: few bytes lay on the drive, and days of training would have worn it."""
    training = Training(per_device_train_batch_size=4, sequence_length=1024, lora="r=8")
    result = plan(load_workload("llama-3.1-8b", training), load_machine("desktop-4090"))
    assert not result.steady.peak_bytes[NVME]


def test_drives_are_searched_where_host_memory_is_short_and_nowhere_else() -> None:
    """By the bound: with room for all that a plan moves, they are a longer way there and more to search."""
    workload = chain(forward_s=[0.1] * 12, parameters=[10 * MB] * 12, saved_mb=[[4, 8]] * 12)
    for host_mb in (400, 8_000):
        p = problem(workload, small_machine(device_mb=300, host_mb=host_mb), semantics="in-backward")
        bound, without = (lower_bound(each) for each in (p, replace(p, has_nvme=False)))
        searched, searched_bound = off_idle_drives(p, bound, lower_bound)
        assert p.has_nvme
        assert searched.has_nvme == (host_mb == 400)
        assert searched_bound.step_s == pytest.approx(bound.step_s, rel=WORTH_DRIVES)
        assert without.step_s == pytest.approx(inf if host_mb == 400 else bound.step_s, rel=WORTH_DRIVES)
