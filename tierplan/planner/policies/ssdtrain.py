"""SSDTrain (arXiv 2408.10013): activations go to NVMe during forward and come back in reverse order for backward.

Parameters, gradients and optimizer states stay on the device. Saved tensors are stored once per storage (a workload
lists them so). The tail of the forward pass is kept: offloading what backward wants next cannot hide. The first module
to be kept is the first that the drive could not have stored in time by SSDTrain's rule,

    (bytes of the modules before it + 2 * its own bytes) / (3 * F - 2 * forward seconds before it) > write bandwidth

with F the seconds of the whole forward pass. What would be forwarded from a store still in flight, or whose store
would be cancelled, is in this tail: a schedule is fixed before the step, so the decision is made here. Drive lifetime
follows from the bytes written and the drive's rated endurance (`tierplan simulate` reports it).
"""

from __future__ import annotations

from collections.abc import Mapping

from tierplan.hwmodels.machine import Machine
from tierplan.planner.plan import Action, Plan, UnitPlan
from tierplan.planner.policies.options import bounded_semantics, choice, need_nvme, number, read_options
from tierplan.sim.workload import Workload

NAME = "ssdtrain"
OPTIONS: Mapping[str, object] = {"tail": "rule", "prefetch": 1, "semantics": None}


def policy(workload: Workload, machine: Machine, given: Mapping[str, object]) -> Plan:
    """Saved tensors and inputs of blocks on NVMe, but for the tail that the drive could not store in time."""
    need_nvme(NAME, machine)
    options = read_options(NAME, given, OPTIONS)
    rule = choice(NAME, options, "tail", ("rule", "none")) == "rule"
    first_kept = first_kept_module(workload, machine) if rule else None
    units: list[UnitPlan] = []
    for u, unit in enumerate(workload.units):
        acts: list[Action] = []
        for tensor in unit.saved:
            kept = unit.kind != "block" or (first_kept is not None and (u, tensor.index) >= first_kept)
            acts.append("keep" if kept else "nvme")
        offload_input = unit.kind == "block" and (first_kept is None or (u, -1) < first_kept)
        units.append(UnitPlan(input="nvme" if offload_input else "keep", acts=tuple(acts)))
    return Plan(
        policy=NAME,
        units=tuple(units),
        semantics=bounded_semantics(NAME, options, workload, "in-backward"),
        prefetch_acts_units=int(number(NAME, options, "prefetch", low=0)),
        strict_windows=True,
        options=options,
    )


def first_kept_module(workload: Workload, machine: Machine) -> tuple[int, int] | None:
    """(unit, slot) of the first tensor that is kept by SSDTrain's rule; slot -1 is the unit's input. None: all leave.

    A module here is one saved tensor of a block, with the part of the block's forward time that its bytes have.
    """
    write_bytes_per_s = machine.stream("nvme.write").rates["bytes"].at(1e9)
    forward = {u.name: machine.cost("gpu0.compute", u.forward).work_s for u in workload.units}
    total_s, before_bytes, before_s = sum(forward.values()), 0.0, 0.0
    for u, unit in enumerate(workload.units):
        if unit.kind != "block":
            before_s += forward[unit.name]
            continue
        modules = [(-1, unit.input_bytes), *((t.index, t.size_bytes) for t in unit.saved)]
        unit_bytes = sum(size for _, size in modules)
        for slot, size in modules:
            left_s = 3 * total_s - 2 * before_s
            if left_s <= 0 or (before_bytes + 2 * size) / left_s > write_bytes_per_s:
                return u, slot
            before_bytes += size
            before_s += forward[unit.name] * size / max(unit_bytes, 1)
    return None
