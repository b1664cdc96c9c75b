"""What fits into host memory at no cost in time stays off the drives."""

from __future__ import annotations

import random

import pytest

from tests.random_plans import random_plan
from tests.toys import MIB, toy_machine, toy_workload
from tierplan.hwmodels.names import NVME
from tierplan.planner import loop
from tierplan.planner.lowering import lower
from tierplan.planner.planning import plan
from tierplan.planner.search.moves import off_drives


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


@pytest.mark.parametrize(("host_mib", "is_spared"), [(4000, True), (250, False)])
def test_a_plan_uses_drives_only_where_that_is_quicker(
    monkeypatch: pytest.MonkeyPatch, host_mib: int, is_spared: bool
) -> None:
    """One that keeps all states there, although host memory has room for them, does not come out of a search."""
    workload, machine = toy_workload(4), toy_machine(device_bytes=100 * MIB, host_bytes=host_mib * MIB)
    monkeypatch.setattr(loop.Search, "_rounds", lambda *args: iter(()))
    found = plan(workload, machine, policies=["zero-infinity", "fuyou"])
    assert any(b.tier == NVME for b in found.schedule.buffers) != is_spared
