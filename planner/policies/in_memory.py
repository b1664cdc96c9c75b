"""In memory: everything stays on the device, as plain PyTorch trains. The baseline of every speed-up."""

from __future__ import annotations

from collections.abc import Mapping

from tierplan.hwmodels.machine import Machine
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.planner.policies.options import bounded_semantics, read_options
from tierplan.sim.workloads.workload import Workload

NAME = "in-memory"
OPTIONS: Mapping[str, object] = {"semantics": None}


def policy(workload: Workload, machine: Machine, given: Mapping[str, object]) -> UnitwisePlan:
    """All on the device, all activations kept."""
    options = read_options(NAME, given, OPTIONS)
    return UnitwisePlan(
        policy=NAME,
        units=(UnitPlan(),) * len(workload.units),
        semantics=bounded_semantics(NAME, options, workload, "exact-clip"),
        options=options,
    )
