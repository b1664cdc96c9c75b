"""PyTorch's data parallelism: `ddp` with the whole model on every device, `fsdp` (FSDP2) with all of it in shards.

`fsdp` gathers a block's parameters before its forward and again before its backward, one unit ahead, those of embedding
and head once (they are the root's, which keeps them), and reduces gradients after each backward. Under `no_sync`
(`reduces=last`) gradients gather on the device, whole, and are summed after the last micro-batch; so does `ddp`, as
everybody runs it. `fsdp-offload` (`CPUOffloadPolicy`) keeps shards of parameters, gradients and states in host memory,
where the optimizer runs; with `reduces=last` gradients come there when they have been summed. With a master copy the
shards there are that copy: they cross the link in fp32 and are cast on the GPU before they are gathered, and gradients
are cast before they go down (`fp32_by_link`). In backward it issues the gather for the next block before this one's
reduction (PyTorch 2.13, `FSDPParamGroup.pre_backward`), so that neither waits for the other's compute. `fsdp` issues
them so, too, but here takes its turns one after the other: over links between GPUs, collectives slow down the kernels
beside them (by 19 % on average over A100 and H100, https://arxiv.org/abs/2507.03114), which no stream here knows, and
steps that others measured lie nearer to that. With `reshard=off` (`SHARD_GRAD_OP`, FSDP2's
`reshard_after_forward=False`) `fsdp` gathers all parameters once for a micro-batch.

With `overlap=off` compute waits for each gather and reduction. So it is where FSDP1 wraps every adapter by itself, as
llama-recipes and fsdp_qlora do: it looks one wrapped module ahead, and for the next block that is when the last adapter
of this one begins; before it issues a gather (`limit_all_gathers`) it waits for the last module but one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

from tierplan.hwmodels.machine import Machine
from tierplan.planner.plan import Sharing, UnitPlan, UnitwisePlan
from tierplan.planner.plan_rules import Place
from tierplan.planner.policies.options import Options, Policy, data_parallel
from tierplan.sim.workloads.workload import Workload

OPTIONS: Mapping[str, object] = {
    "checkpointing": "on",
    "reduces": "each",
    "overlap": "on",
    "semantics": None,
}
OWN: Mapping[str, Mapping[str, object]] = {
    "ddp": {"reduces": "last"},
    "fsdp": {"reshard": "on"},
    "fsdp-offload": {"prefetch": 1},
}
"""Options of one policy alone, and defaults that are its own."""

HOOKS = 26.0
"""Of FSDP2, around every block, measured as those of ZeRO-3 (`zero.MODULE_HOOKS`): 0.47 ms without, 0.74 to 0.84 with
them, which are 22 to 30 launches more."""


def _policy(name: str, place: Place, workload: Workload, machine: Machine, given: Mapping[str, object]) -> UnitwisePlan:
    options = Options(name, {**OPTIONS, **OWN[name]}, given)
    reduces: Literal["each", "last"] = options.choice("reduces", "each", "last")
    waits = options.choice("overlap", "on", "off") == "off"
    sharing = Sharing(divided="nothing" if name == "ddp" else "all", reduces=reduces, waits=waits)
    if name != "ddp":
        stay = "reshard" in options and options.choice("reshard", "on", "off") == "off"
        sharing = replace(sharing, keeps="all" if stay else "ends", hooks=HOOKS)
    if place == "host" and not waits:
        sharing = replace(sharing, ahead=True)
    unit = UnitPlan(params=place, grads="device" if reduces == "last" else place, states=place)
    is_wide = place == "host" and workload.training.has_master
    return data_parallel(options, workload, machine, unit, sharing=sharing, fp32_by_link=is_wide)


VARIANTS: Mapping[str, Policy] = {
    "ddp": partial(_policy, "ddp", "device"),
    "fsdp": partial(_policy, "fsdp", "device"),
    "fsdp-offload": partial(_policy, "fsdp-offload", "host"),
}
