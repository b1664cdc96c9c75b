"""The benchmark of pairs of machines says where the clock, and not the search, gave an answer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks.planner import monotone

OF_MACHINES = 39
"""A pair of machines, thirteen billion parameters beside half of the host's memory and all of it."""


@pytest.mark.parametrize(
    "statuses", [("searched", "within-gap"), ("time-limit", "searched"), ("searched", "time-limit")]
)
def test_a_pair_that_the_clock_has_cut_says_so(monkeypatch: pytest.MonkeyPatch, statuses: tuple[str, str]) -> None:
    results = iter([SimpleNamespace(step_s=2.0, status=statuses[0]), SimpleNamespace(step_s=3.0, status=statuses[1])])
    monkeypatch.setattr(monotone, "plan", lambda workload, machine, **asked: next(results))
    record = monotone.pair(OF_MACHINES)
    is_cut = "time-limit" in statuses
    assert (record["less_s"], record["more_s"], record["cut_by_clock"]) == (2.0, 3.0, is_cut)
    written = monotone.table([record | {"version": "1"}])
    assert "| all | 1 | 0 | 1 | 1 | 50.0 % |" in written, "it counts as slower all the same"
    assert ("In 1 of them the clock ended a search" in written) is is_cut
