"""In memory: everything stays on the device, as plain PyTorch trains. The baseline of every speed-up.

On several devices each has the whole model (`sharing=ddp`), or a shard of it (`sharing=fsdp`).
"""

from __future__ import annotations

from collections.abc import Mapping

from tierplan.hwmodels.machine import Machine
from tierplan.planner.plan import Sharing, UnitPlan, UnitwisePlan
from tierplan.planner.policies.options import WHOLE, Options, unitwise_plan
from tierplan.sim.workloads.workload import Workload

NAME = "in-memory"
OPTIONS: Mapping[str, object] = {"sharing": "ddp", "semantics": None}


def policy(workload: Workload, machine: Machine, given: Mapping[str, object]) -> UnitwisePlan:
    """All on the device, all activations kept."""
    options = Options(NAME, OPTIONS, given)
    if options.num_devices(machine) == 1:
        options.refuse_idle("on one device", "sharing")
    is_whole = options.choice("sharing", "ddp", "fsdp") == "ddp"
    units, sharing = (UnitPlan(),) * len(workload.units), WHOLE if is_whole else Sharing(reduces="each", keeps="ends")
    return unitwise_plan(options, workload, machine, "exact-clip", units=units, sharing=sharing)
