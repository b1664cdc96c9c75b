"""Vertical accumulation (GreedySnake): all micro-batches of a block before the next block.

Parameters are fetched twice a step, whatever the number of micro-batches, and gradients accumulate on the device and
leave once. The price is the traffic of block inputs: every micro-batch's inputs wait between one block and the next.
`late` is the share of the blocks, the last ones, whose update overlaps the next step's forward, in time for it: the
numbers are the same. GreedySnake delays that share of each block's update, as large as its linear program says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tierplan.hwmodels.machine import Machine
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.planner.plan_rules import Place
from tierplan.planner.policies.options import Options, by_kind, has_nvme, unitwise_plan
from tierplan.sim.workloads.workload import Workload

NAME = "vertical"
OPTIONS: Mapping[str, object] = {"prefetch": 1, "late": 0.0, "semantics": None}


def policy(workload: Workload, machine: Machine, given: Mapping[str, object]) -> UnitwisePlan:
    """Everything on NVMe where there is a drive, inputs in host memory, blocks recomputed, vertical order."""
    options = Options(NAME, OPTIONS, given)
    ahead = options.whole_number("prefetch", low=0)
    late = options.number("late", low=0, high=1)
    home: Place = "nvme" if has_nvme(machine) else "host"
    other = UnitPlan(params=home, grads="device", states=home)
    units = list(by_kind(workload, replace(other, input="host", acts="recompute"), other))
    blocks = [u for u, unit in enumerate(workload.units) if unit.kind == "block"]
    for u in blocks[round(len(blocks) * (1 - late)) :]:  # the next forward needs these last
        units[u] = replace(units[u], late_update=True)
    return unitwise_plan(
        options, workload, machine, "in-backward",
        units=tuple(units),
        order="vertical",
        prefetch_params_units=ahead,
        prefetch_acts_units=ahead,
    )  # fmt: skip
