"""Sliding window (Superpipeline, arXiv 2410.08791): a window of blocks is on the device, the rest waits in host memory.

While the device computes with one block, the next ones arrive and the ones behind leave; forward slides up, backward
slides down. Parameters, gradients and optimizer states live in host memory, and the host updates each block as its
gradients arrive. Activations are recomputed block by block, and the blocks' inputs move with the window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tierplan.hwmodels.machine import Machine
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.planner.policies.options import Options, by_kind, unitwise_plan
from tierplan.sim.workloads.workload import Workload

NAME = "sliding-window"
OPTIONS: Mapping[str, object] = {"window": 3, "semantics": None}


def policy(workload: Workload, machine: Machine, given: Mapping[str, object]) -> UnitwisePlan:
    """All in host memory; `window` blocks on the device, the computing one included."""
    options = Options(NAME, OPTIONS, given)
    window = options.whole_number("window", low=1)
    other = UnitPlan(params="host", grads="host", states="host")
    return unitwise_plan(
        options, workload, machine, "in-backward",
        units=by_kind(workload, replace(other, input="host", acts="recompute"), other),
        prefetch_params_units=window - 1,
        prefetch_acts_units=window - 1,
        strict_windows=True,
    )  # fmt: skip
