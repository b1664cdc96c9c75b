"""Which policies' devices share the micro-batches of one step."""

from __future__ import annotations

import pytest

from tierplan.planner.plan_rules import PlanError
from tierplan.planner.policies import POLICIES, SHARED, decide
from tierplan.studies.evaluate import machine_of, workload_at
from tierplan.studies.study import Point


def test_policies_are_as_they_are_named() -> None:
    point = Point(
        model="gpt2", machine="desktop-4090", accumulation=8, overrides={"gpu.count": 2, "link.p2p": "9 GB/s"}
    )
    machine, shared = machine_of(point), set()
    workload = workload_at(point, machine)
    for name in POLICIES:
        try:
            shared |= {name} if decide(name, workload, machine).num_batches == 1 else set()
        except PlanError as error:
            pytest.fail(f"{name}: {error}")
    assert shared == SHARED
