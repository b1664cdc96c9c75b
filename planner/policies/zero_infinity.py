"""ZeRO-Infinity (arXiv 2104.07857): each of parameters, optimizer and checkpoints on the device, the host or NVMe.

Parameters come through three overlapping stages: NVMe to host, host to device, and compute, each some units ahead of
the next. Gradients go to host memory in backward (`gradients_by_link`), in fp32, and where the optimizer is on NVMe,
they are written there. The optimizer runs after backward, unit by unit. DeepSpeed's default (`pipeline=off`:
`pipeline_read` and `pipeline_write` are false, and the documented four buffers hold the states and the gradient of one
update) reads one unit's states and gradient, updates, writes them home, and only then reads the next. With
`pipeline=on` one is read while the one before is updated and the one before that is written back; buffers for four
updates bound how far that runs ahead. With everything on NVMe a parameter costs 20 bytes of reads (2 + 2 parameters, 12
states, 4 gradient) and 18 of writes (4, 12, 2).

DeepSpeed also takes host memory that no step shows (`host_buffers=deepspeed`, see `startup_bytes`), beside what an
optimizer in host memory has; a machine with less is refused, as it fails there before the first step.

Memory-centric tiling cuts each block's operators into `operator_tiles`, of which one at a time needs the device.

On several devices parameters, gradients and states are partitioned: each device fetches its share over its own link and
gathers the rest from its peers (`devices`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tierplan.hwmodels.machine import Machine, held_bytes
from tierplan.planner.plan import Sharing, UnitPlan, UnitwisePlan
from tierplan.planner.plan_rules import PLACES, Place
from tierplan.planner.policies.options import (
    Options,
    by_kind,
    check_host_memory,
    deepspeed_host_bytes,
    gradients_by_link,
    has_nvme,
    need_nvme,
    unitwise_plan,
)
from tierplan.planner.policies.several.zero import MODULE_HOOKS
from tierplan.sim.workloads.workload import DTYPE_BYTES, Workload

NAME = "zero-infinity"
OPTIONS: Mapping[str, object] = {
    "params": None,  # default: nvme where there is a drive, else host
    "optimizer": None,
    "checkpoints": "host",  # or none: activations are kept
    "prefetch": 2,
    "pipeline": "off",  # or on: reads and writes of the optimizer beside its updates
    "host_buffers": "deepspeed",  # or none
    "pin_memory": None,  # on or off; default: on where parameters are offloaded too, as in DeepSpeed's examples
    "overlap": "on",  # or off: compute waits for every copy of gradients
    "operator_tiles": 1,
    "semantics": None,
}
SUB_GROUP_PARAMETERS = 1_000_000_000
"""DeepSpeed's `sub_group_size`: parameters in one swap of the optimizer."""
OPTIMIZER_BUFFERS, PARAMETER_BUFFERS = 4, 5
"""DeepSpeed's `buffer_count` of `offload_optimizer` and `offload_param`."""
PARAMETER_BUFFER_SIZE, PARAMETERS_IN_HOST = 100_000_000, 1_000_000_000
"""Its `buffer_size` and `max_in_cpu` of `offload_param`, in parameters."""


def policy(workload: Workload, machine: Machine, given: Mapping[str, object]) -> UnitwisePlan:
    """Places as asked for; blocks are recomputed from checkpoints, if any; the optimizer runs after backward."""
    options = Options(NAME, OPTIONS, given)
    lowest = "nvme" if has_nvme(machine) else "host"
    options["params"] = options["params"] or lowest
    options["optimizer"] = options["optimizer"] or lowest
    devices = options.num_devices(machine)
    params, optimizer = (options.choice(name, *PLACES) for name in ("params", "optimizer"))
    checkpoints = options.choice("checkpoints", *PLACES, "none")
    if "nvme" in (params, optimizer, checkpoints):
        need_nvme(NAME, machine)
    ahead = options.whole_number("prefetch", low=0)
    pipelined = options.choice("pipeline", "off", "on") == "on"
    options["pin_memory"] = options["pin_memory"] or ("off" if params == "device" else "on")
    pinned = options.choice("pin_memory", "on", "off") == "on"
    need = startup_bytes(workload, params=params, optimizer=optimizer, devices=devices, pinned=pinned)
    if optimizer == "host":  # the buffer of all gradients comes last
        need += deepspeed_host_bytes(workload, workload.units, 3, params)[0]
    what = "while it starts, for DeepSpeed's pinned buffers and the gradients of all parameters"
    check_host_memory(options, machine, need, what, ", or option pin_memory=off")
    other = UnitPlan(params=params, grads=optimizer, states=optimizer)
    block = other
    if checkpoints != "none":
        block = replace(other, input="keep" if checkpoints == "device" else checkpoints, acts="recompute")  # type: ignore[arg-type]
    return unitwise_plan(
        options, workload, machine, "exact-clip",
        units=by_kind(workload, block, other),
        prefetch_params_units=ahead,
        prefetch_acts_units=ahead,
        prefetch_states_units=1 if pipelined else 0,
        strict_windows=True,
        updates_in_flight=4 if pipelined else 1,
        hold_updates=True,
        update_order="backward",
        by_link=None if optimizer == "device" else gradients_by_link(options, machine, 3),
        operator_tiles=options.whole_number("operator_tiles", low=1),
        sharing=Sharing(reduces="each" if optimizer == "device" else "last", module_hooks=MODULE_HOOKS),
    )  # fmt: skip


def startup_bytes(workload: Workload, *, params: Place, optimizer: Place, devices: int, pinned: bool) -> int:
    """Host memory that DeepSpeed's buffers take while it starts, over all devices.

    An optimizer off the device has one buffer for the 16-bit gradients of all parameters of a rank: zeros, of which
    with `pin_memory` a pinned copy is then made, so both exist at once (`grad_partitions_flat_buffer` in
    `runtime/zero/stage3.py`). PyTorch's allocator of pinned memory rounds up to a power of two. The pinned buffers that
    swapping uses stand beside it (`runtime/swap_tensor`): of fp32 for the optimizer, of 16 bits for parameters, with
    their documented sizes.
    """
    t, own = workload.training, -(-workload.num_trained // devices)
    total = 0
    if optimizer != "device":
        total += own * t.grad_bytes + (held_bytes(own * t.grad_bytes, "power-of-two") if pinned else 0)
    if optimizer == "nvme":
        total += OPTIMIZER_BUFFERS * held_bytes(min(own, SUB_GROUP_PARAMETERS) * DTYPE_BYTES["fp32"], "power-of-two")
    if params == "nvme":
        total += held_bytes(PARAMETER_BUFFERS * min(own, PARAMETER_BUFFER_SIZE) * t.param_bytes, "power-of-two")
        total += held_bytes(min(own, PARAMETERS_IN_HOST) * t.param_bytes, "power-of-two")
    return total * devices
