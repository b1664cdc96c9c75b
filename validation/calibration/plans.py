"""The six plans of a calibration run: together they give every stream work and contain every kind of op."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from tierplan.hwmodels.machine import Machine
from tierplan.planner.plan import Plan, UnitPlan, UnitwisePlan
from tierplan.planner.policies import decide
from tierplan.planner.policies.options import has_nvme
from tierplan.sim.step import Action
from tierplan.sim.workloads.workload import Unit, Workload

IN_MEMORY = "in-memory"
"""Everything stays on the device. This plan also says how fast the machine is at the moment."""
FULL_RECOMPUTE = "full-recompute"
PARTIAL_RECOMPUTE = "partial-recompute"
"""Every other saved tensor of each block is recomputed."""
OFFLOAD = "offload"
"""States on NVMe; parameters, gradients and activations in host memory."""
ON_NVME = "on-nvme"
"""Parameters and states on NVMe; activations are recomputed."""
OPTIMIZER_SWEEP = "optimizer-sweep"
"""ZeRO-Infinity: after backward, the states of all units pass through host memory, one unit after the other."""


def calibration_plans(workload: Workload, machine: Machine) -> dict[str, Plan]:
    """The plans by name, for the calibration model. What a machine without drives cannot have there is on the host."""
    lowest: Literal["host", "nvme"] = "nvme" if has_nvme(machine) else "host"
    offload = UnitPlan(params="host", grads="host", states=lowest, input="host", acts="host")
    on_nvme = UnitPlan(params=lowest, grads="host", states=lowest, input="host", acts="recompute")
    kept = uniform_plan(PARTIAL_RECOMPUTE, workload, UnitPlan())
    halves = [
        replace(c, acts=_every_other(u)) if u.kind == "block" else c
        for c, u in zip(kept.units, workload.units, strict=True)
    ]
    return {
        IN_MEMORY: decide("in-memory", workload, machine),
        FULL_RECOMPUTE: decide("full-recompute", workload, machine),
        PARTIAL_RECOMPUTE: replace(kept, units=tuple(halves)),
        OFFLOAD: uniform_plan(OFFLOAD, workload, offload, first=replace(offload, acts=lowest)),
        ON_NVME: uniform_plan(ON_NVME, workload, on_nvme),
        OPTIMIZER_SWEEP: decide("zero-infinity", workload, machine, {"pipeline": "on"}),
    }


def _every_other(block: Unit) -> tuple[Action, ...]:
    """Blocks save different tensors where what is before the first one is frozen, as with adapters."""
    return tuple("recompute" if k % 2 else "keep" for k in range(len(block.saved)))


def uniform_plan(name: str, workload: Workload, block: UnitPlan, first: UnitPlan | None = None) -> UnitwisePlan:
    """The same for all blocks but the first; embedding and head keep what they save."""
    ends = UnitPlan(params=block.params, grads=block.grads, states=block.states)
    units = [block if u.kind == "block" else ends for u in workload.units]
    units[1] = first or block
    return UnitwisePlan(policy=name, units=tuple(units))
