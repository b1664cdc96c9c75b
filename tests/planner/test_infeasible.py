"""How many sequences fit is said as certainly as it is known."""

from __future__ import annotations

from functools import partial

import pytest

from tests.toys import MIB, toy_machine, toy_workload
from tierplan.planner import infeasible
from tierplan.planner.infeasible import LargestBatch, has_room, largest_batch
from tierplan.sim.workloads.workload import Workload


def make(batch: int) -> Workload:
    return toy_workload(2, per_device_train_batch_size=batch)


def test_what_no_bound_excludes_is_not_said_to_fit_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """ "No bound says that there is none" stood beside "none, not even one"."""
    found = partial(largest_batch, make, below=4)
    narrow = toy_machine(device_bytes=MIB, host_bytes=MIB, nvme_bytes=MIB)
    assert not has_room(make(1), narrow)
    assert str(found(narrow)) == "none, not even one"
    monkeypatch.setattr(infeasible, "found_shortly", lambda *asked: False)
    assert has_room(make(1), toy_machine())
    assert str(found(toy_machine())) == "none was found, not even for one"


def test_how_many_fit() -> None:
    assert [str(LargestBatch(3, is_least=is_least)) for is_least in (False, True)] == ["up to 3", "3 or more"]
