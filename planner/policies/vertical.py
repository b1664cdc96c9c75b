"""Vertical accumulation (GreedySnake): all micro-batches of a block before the next block.

Parameters are fetched twice a step, whatever the number of micro-batches, and gradients accumulate on the device and
leave once. The price is the traffic of block inputs: every micro-batch's inputs wait between one block and the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tierplan.hwmodels.machine import Machine
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.planner.plan_rules import Place
from tierplan.planner.policies.options import bounded_semantics, by_kind, has_nvme, num_devices, number, read_options
from tierplan.sim.workloads.workload import Workload

NAME = "vertical"
OPTIONS: Mapping[str, object] = {"prefetch": 1, "semantics": None}


def policy(workload: Workload, machine: Machine, given: Mapping[str, object]) -> UnitwisePlan:
    """Everything on NVMe where there is a drive, inputs in host memory, blocks recomputed, vertical order."""
    options = read_options(NAME, given, OPTIONS)
    ahead = int(number(NAME, options, "prefetch", low=0))
    home: Place = "nvme" if has_nvme(machine) else "host"
    other = UnitPlan(params=home, grads="device", states=home)
    return UnitwisePlan(
        policy=NAME,
        units=by_kind(workload, replace(other, input="host", acts="recompute"), other),
        semantics=bounded_semantics(NAME, options, workload, "in-backward"),
        order="vertical",
        prefetch_params_units=ahead,
        prefetch_acts_units=ahead,
        devices=num_devices(NAME, options, machine),
        options=options,
    )
