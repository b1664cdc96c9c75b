"""The greedy rule that the planner is compared with does what it says."""

from __future__ import annotations

from benchmarks.planner.ablation import METHODS
from tests.toys import MIB, toy_machine, toy_workload


def test_greedy_moves_nothing_where_all_fits_and_finds_a_plan_where_not() -> None:
    workload = toy_workload(6)
    steps_s = {}
    for device_mib in (2000, 200):
        machine = toy_machine(device_bytes=device_mib * MIB)
        steps_s[device_mib] = {name: method(workload, machine) for name, method in METHODS.items()}
    roomy, tight = steps_s[2000], steps_s[200]
    assert roomy["nothing moved"] == roomy["greedy"]
    assert tight["nothing moved"] is None
    assert all(tight[name] is not None for name in ("greedy", "rounded", "best policy"))
