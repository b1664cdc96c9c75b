"""Full recompute: everything stays on the device, and backward makes activations again from a few kept inputs.

With `every=1` each block is a segment: the blocks' inputs are kept and backward runs each block's forward once more.
With `every=k` only each k-th input is kept, and a segment's k-1 other inputs are made again too when backward
reaches it (Chen et al., arXiv 1604.06174): less memory for inputs, k blocks of activations at once. With `inputs=host`
kept inputs wait in host memory (DeepSpeed's `cpu_checkpointing`, torchtune's activation offloading).
"""

from __future__ import annotations

from collections.abc import Mapping

from tierplan.hwmodels.machine import Machine
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.planner.policies.options import WHOLE, Options, by_kind, unitwise_plan
from tierplan.sim.workloads.workload import Workload

NAME = "full-recompute"
OPTIONS: Mapping[str, object] = {"every": 1, "inputs": "device", "semantics": None}


def policy(workload: Workload, machine: Machine, given: Mapping[str, object]) -> UnitwisePlan:
    """All on the device; blocks are recomputed in segments of `every`."""
    options = Options(NAME, OPTIONS, given)
    every = options.whole_number("every", low=1)
    leaves = options.choice("inputs", "device", "host") == "host"
    units = by_kind(workload, UnitPlan(acts="recompute", input="host" if leaves else "keep"), UnitPlan())
    return unitwise_plan(
        options, workload, machine, "exact-clip",
        units=units,
        segment_units=every,
        prefetch_acts_units=1 if leaves else 0,
        strict_windows=leaves,
        sharing=WHOLE,
    )  # fmt: skip
