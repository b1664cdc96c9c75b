"""ZeRO (arXiv 1910.02054) as DeepSpeed runs it: states, then gradients, then parameters divided among devices.

`zero-1` divides the optimizer states, `zero-2` gradients too, `zero-3` parameters too. Gradients are summed after each
micro-batch but for `zero-1`, where they wait whole on the device for the last. Before `zero-3` DeepSpeed all-reduces
them and drops what is not its own (`use_multi_rank_bucket_allreduce`), and its compute waits for that unless
`overlap=on` (`overlap_comm`, which is off by default but in `zero-3`). `optimizer=host` keeps states in host memory
(ZeRO-Offload), where host cores update all shards, and gradients too but for `zero-1`, whose sum goes there once a
step; `gradients_by_link` says how gradients get there. `params=host` does so with the parameters of `zero-3`. With
NVMe, take `zero-infinity`. DeepSpeed keeps host memory that no step shows (`host_buffers`, `deepspeed_host_bytes`): a
machine with less is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Literal

from tierplan.hwmodels.machine import Machine
from tierplan.planner.plan import Sharing, UnitPlan, UnitwisePlan
from tierplan.planner.plan_rules import Place
from tierplan.planner.policies.options import (
    OptionError,
    Options,
    Policy,
    check_host_memory,
    data_parallel,
    deepspeed_host_bytes,
    gradients_by_link,
)
from tierplan.sim.workloads.workload import Workload

OPTIONS: Mapping[str, object] = {
    "optimizer": "device",
    "params": "device",
    "checkpointing": "on",
    "overlap": None,
    "pin_memory": "on",
    "round_robin": "off",
    "prefetch": 1,
    "host_buffers": "deepspeed",  # or none
    "semantics": None,
}
MODULE_HOOKS = 19.0
"""Of ZeRO-3, whose hooks before and after every module fetch and release its parameters in Python. By
`python -m benchmarks.runtime.hooks` with DeepSpeed 0.19.8 on one core of a quiet EPYC (2026-11-26), a pass of a block
takes 0.47 ms of the host's time without and 2.21 ms with them; with adapters 0.77 and 5.27 ms. That are 0.193 and 0.196
ms for each of its 9 and 23 modules with parameters of their own, or 15.7 and 22 launches of its 38 and 87 kernels: this
is between the two."""
NEVER: Mapping[int, str] = {1: "prefetch", 2: "prefetch", 3: "round_robin"}
"""Options that a stage does not have: parameters stay on the device before stage 3, where all devices copy at once."""
DIVIDED: Mapping[int, Literal["states", "gradients", "all"]] = {1: "states", 2: "gradients", 3: "all"}


def _policy(stage: int, workload: Workload, machine: Machine, given: Mapping[str, object]) -> UnitwisePlan:
    name = f"zero-{stage}"
    options = Options(name, {k: value for k, value in OPTIONS.items() if k != NEVER[stage]}, given)
    options["overlap"] = options["overlap"] or ("on" if stage == 3 else "off")
    params: Place = options.choice("params", "device", "host")
    optimizer: Place = options.choice("optimizer", "device", "host")
    if params == "host" and (stage < 3 or optimizer == "device"):
        raise OptionError(
            f"option 'params' of policy {name!r} is 'host'; parameters leave the device with zero-3 alone, and after "
            "the optimizer: use zero-3 with optimizer=host"
        )
    if params == "device":
        options.refuse_idle("while parameters stay on the device", "prefetch")
    if optimizer == "device":
        options.refuse_idle("while the optimizer is on the device", "pin_memory", "round_robin", "host_buffers")
    else:
        need = sum(deepspeed_host_bytes(workload, workload.units, stage, params))
        check_host_memory(options, machine, need, "throughout, with DeepSpeed's buffers")
    sharing = Sharing(
        divided=DIVIDED[stage],
        reduces="last" if stage == 1 else "each",
        by="all_reduce" if stage < 3 else "reduce",
        waits=options.choice("overlap", "on", "off") == "off",
        module_hooks=MODULE_HOOKS if stage == 3 else 0.0,
    )
    unit = UnitPlan(params=params, grads="device" if stage == 1 else optimizer, states=optimizer)
    by_link = gradients_by_link(options, machine, stage) if optimizer == "host" else None
    return data_parallel(options, workload, machine, unit, sharing=sharing, by_link=by_link, update_order="backward")


VARIANTS: Mapping[str, Policy] = {f"zero-{stage}": partial(_policy, stage) for stage in DIVIDED}
