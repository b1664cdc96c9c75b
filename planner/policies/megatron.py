"""Megatron-LM: `megatron-tp` cuts every operator among the devices (arXiv 1909.08053).

All devices work on the same micro-batches with their share of every matrix. Activations are summed over devices twice
per block, forward, backward and again where a block is recomputed, and compute waits for that.
"""

from __future__ import annotations

from collections.abc import Mapping

from tierplan.hwmodels.machine import Machine
from tierplan.planner.plan import Sharing, UnitPlan, UnitwisePlan
from tierplan.planner.policies.options import bounded_semantics, number, read_options, with_checkpointing
from tierplan.sim.workloads.workload import Workload

OPTIONS: Mapping[str, object] = {"checkpointing": "on", "devices": None, "semantics": None}


def _tensor_parallel(workload: Workload, machine: Machine, given: Mapping[str, object]) -> UnitwisePlan:
    name = "megatron-tp"
    options = read_options(name, given, OPTIONS)
    options["devices"] = options["devices"] or machine.num_devices
    semantics = bounded_semantics(name, options, workload, "exact-clip")
    return UnitwisePlan(
        policy=name,
        units=with_checkpointing(name, options, workload, UnitPlan()),
        semantics=semantics,
        hold_updates=semantics == "exact-clip",
        devices=int(number(name, options, "devices", low=1, high=machine.num_devices)),
        sharing=Sharing(divided="tensors", waits=True),
        options=options,
    )


VARIANTS = {"megatron-tp": _tensor_parallel}
