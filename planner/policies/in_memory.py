"""In memory: everything stays on the device, as plain PyTorch trains. The baseline of every speed-up.

On several devices each has the whole model (`sharing=ddp`), or a shard of it (`sharing=fsdp`).
"""

from __future__ import annotations

from collections.abc import Mapping

from tierplan.hwmodels.machine import Machine
from tierplan.planner.plan import Sharing, UnitPlan, UnitwisePlan
from tierplan.planner.policies.options import WHOLE, bounded_semantics, choice, num_devices, read_options
from tierplan.sim.workloads.workload import Workload

NAME = "in-memory"
OPTIONS: Mapping[str, object] = {"sharing": "ddp", "semantics": None}


def policy(workload: Workload, machine: Machine, given: Mapping[str, object]) -> UnitwisePlan:
    """All on the device, all activations kept."""
    options = read_options(NAME, given, OPTIONS)
    is_whole = choice(NAME, options, "sharing", ("ddp", "fsdp")) == "ddp"
    return UnitwisePlan(
        policy=NAME,
        units=(UnitPlan(),) * len(workload.units),
        semantics=bounded_semantics(NAME, options, workload, "exact-clip"),
        devices=num_devices(NAME, options, machine),
        sharing=WHOLE if is_whole else Sharing(reduces="each", keeps="ends"),
        options=options,
    )
