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
from tierplan.planner.policies.options import Options
from tierplan.sim.workloads.workload import Workload

SHARES_BATCHES = True
"""Its devices share the micro-batches of one step."""
ON_ONE_DEVICE = ("virtual-memory",)
NAME = "virtual-memory"


def policy(workload: Workload, machine: Machine, given: Mapping[str, object]) -> PagedPlan:
    """Weights in and out for every use, on all devices."""
    options = Options(NAME, {}, given)
    return PagedPlan(policy=NAME, devices=options.num_devices(machine), options=dict(options))
