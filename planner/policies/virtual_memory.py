"""Per-GPU memory virtualisation with data parallelism: the baseline that Harmony beats.

Each GPU pretends to have memory for the whole model: every micro-batch brings each unit's weights in for forward and
again for backward, and each time they are evicted they are written back, since virtualisation does not know that they
are clean. The update on the GPU brings them in and out once more. Per iteration (4 m + 2) N W bytes of weights move,
for m micro-batches on each of N GPUs. Gradients and states are paged the same way.
"""

from __future__ import annotations

from collections.abc import Mapping

from tierplan.hwmodels.machine import Machine
from tierplan.planner.plan import PagedPlan
from tierplan.planner.policies.options import number, read_options
from tierplan.sim.workloads.workload import Workload

NAME = "virtual-memory"
OPTIONS: Mapping[str, object] = {"devices": 0}


def policy(workload: Workload, machine: Machine, given: Mapping[str, object]) -> PagedPlan:
    """Weights in and out for every use, on all devices (`devices`, 0: all that the machine has)."""
    options = read_options(NAME, given, OPTIONS)
    have = machine.num_devices
    devices = int(number(NAME, options, "devices", low=0, high=have)) or have
    return PagedPlan(policy=NAME, devices=devices, options={**options, "devices": devices})
