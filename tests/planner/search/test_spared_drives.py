"""What fits into host memory at no cost in time stays off the drives."""

from __future__ import annotations

import random

import pytest

from tests.random_plans import random_plan
from tests.toys import toy_machine, toy_workload
from tierplan.hwmodels import load_machine
from tierplan.hwmodels.names import NVME
from tierplan.planner import loop
from tierplan.planner.lowering import lower
from tierplan.planner.planning import plan
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
    workload = load_workload("gpt2", Training(per_device_train_batch_size=8, sequence_length=1024))
    machine = load_machine("desktop-4090", ["host.capacity=10 GB"])
    spared = plan(workload, machine)
    monkeypatch.setattr(loop.Search, "_spares_drives", lambda search, best: best)
    found = plan(workload, machine)
    assert [any(b.tier == NVME for b in each.schedule.buffers) for each in (found, spared)] == [True, False]
    assert spared.step_s == found.step_s


def test_what_would_be_quicker_without_drives_is_planned_without() -> None:
    """By microseconds: few bytes lay on the drive, and days of training would have worn it."""
    training = Training(per_device_train_batch_size=4, sequence_length=1024, lora="r=8")
    result = plan(load_workload("llama-3.1-8b", training), load_machine("desktop-4090"))
    assert not result.steady.peak_bytes[NVME]
