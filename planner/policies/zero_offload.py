"""ZeRO-Offload (arXiv 2101.06840): parameters on the device, gradients and the optimizer in host memory.

Gradients leave during backward, as DeepSpeed has it (`gradients_by_link`): compute waits for that unless `overlap=on`,
and with `gradients=streamed`, as the paper and torchao have it, they leave in the dtype of training beside backward,
and the host adds them. CPU Adam starts when backward is done (it needs the norm of all gradients and the check for
overflow); each unit's new parameters are copied back while the next unit is updated. Per parameter and step: 4 bytes
down (streamed: 2), 2 bytes up. The delayed parameter update (`semantics=delayed-1`) overlaps the optimizer with the
next step's compute and is another algorithm, so it is never the default. `device_frac` keeps the optimizer states of
that share of the parameters on the device (Twin-Flow, DeepSpeed's partial offload), last units first. `update=device`
brings states to the GPU and back for an update there, as soon as a unit's gradients are made, instead of CPU Adam
(paged optimizers, torchao's and verl's streamed states). On several devices gradients and states are divided, as in
`zero-2`. DeepSpeed keeps host memory that no step shows (`host_buffers`, `deepspeed_host_bytes`): a machine with less
is refused.
"""

from __future__ import annotations

from collections.abc import Mapping

from tierplan.hwmodels.machine import Machine
from tierplan.planner.plan import Sharing, UnitPlan, UnitwisePlan
from tierplan.planner.policies.options import (
    Options,
    check_host_memory,
    deepspeed_host_bytes,
    gradients_by_link,
    unitwise_plan,
)
from tierplan.sim.workloads.workload import Unit, Workload

NAME = "zero-offload"
OPTIONS: Mapping[str, object] = {
    "device_frac": 0.0,
    "checkpointing": "on",
    "update": "host",
    "gradients": "deepspeed",  # or streamed
    "overlap": "off",
    "pin_memory": "on",
    "round_robin": "off",
    "host_buffers": "deepspeed",  # or none
    "semantics": None,
}
LINK = ("pin_memory", "round_robin", "host_buffers", "overlap")
"""Options of how DeepSpeed brings gradients to the host; on several devices the last is of their sums, too."""


def policy(workload: Workload, machine: Machine, given: Mapping[str, object]) -> UnitwisePlan:
    """The optimizer on the host, but for `device_frac` of it; activations recomputed per block (`checkpointing`)."""
    options = Options(NAME, OPTIONS, given)
    on_device = options.number("device_frac", low=0, high=1) * workload.num_trained
    recompute = options.choice("checkpointing", "on", "off") == "on"
    as_deepspeed = options.choice("gradients", "deepspeed", "streamed") == "deepspeed"
    comes = options.choice("update", "host", "device") == "device"
    idle = LINK if options.num_devices(machine) == 1 else LINK[:-1]
    if comes:
        options.refuse_idle("where states come to the device for the update", "gradients", *idle)
    elif not as_deepspeed:
        options.refuse_idle("where gradients are streamed", *idle)
    units: list[UnitPlan] = []
    on_host: list[Unit] = []
    for unit in reversed(workload.units):
        acts = "recompute" if recompute and unit.kind == "block" else "keep"
        place = "device" if 0 < unit.num_trained <= on_device else "host"
        if place == "device":
            on_device -= unit.num_trained
        else:
            on_host.append(unit)
        streamed = {"grads": "device", "update": "device"} if comes and place == "host" else {"grads": place}
        units.insert(0, UnitPlan(params="device", states=place, acts=acts, **streamed))  # type: ignore[arg-type]
    if as_deepspeed and not comes:
        need = sum(deepspeed_host_bytes(workload, on_host, 2))
        check_host_memory(options, machine, need, "throughout, with DeepSpeed's buffers")
    return unitwise_plan(
        options, workload, machine, "in-backward" if comes else "exact-clip",
        units=tuple(units),
        prefetch_states_units=0 if comes else 1,
        hold_updates=True,
        update_order="backward",
        by_link=gradients_by_link(options, machine, 2) if as_deepspeed else None,
        sharing=Sharing(
            divided="gradients",
            reduces="each",
            by="all_reduce",
            waits=options.choice("overlap", "off", "on") == "off",
        ),
    )  # fmt: skip
