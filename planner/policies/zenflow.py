"""ZenFlow (arXiv 2505.12242): ZeRO-Offload whose CPU Adam runs beside the next steps.

Gradients add up in host memory and are applied there every few steps, while the next ones run: one such interval late,
which is another algorithm. Here a step is an interval: its micro-batches are what ZenFlow calls steps, and DeepSpeed,
too, counts them as accumulated. The few gradients that it finds important, and applies on the GPU at once, are left
out: a tenth of an update there takes a thousandth of a step, and a tenth of its states. A share of the host's cores
(`cores`) is the update's, which a process of its own makes, and the others are training's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import HOST_ADAM
from tierplan.planner.plan import UnitwisePlan
from tierplan.planner.policies import zero_offload
from tierplan.planner.policies.options import Options, bounded_semantics
from tierplan.sim.workloads.workload import Workload

NAME = "zenflow"
OPTIONS: Mapping[str, object] = {"checkpointing": "off", "cores": 0.5, "semantics": None}


def policy(workload: Workload, machine: Machine, given: Mapping[str, object]) -> UnitwisePlan:
    """ZeRO-Offload with delayed updates, and without checkpointing, as in its example."""
    options = Options(NAME, OPTIONS, given)
    own = {"gradients": "streamed", **{name: options[name] for name in ("checkpointing", "devices")}}
    own["semantics"] = bounded_semantics(options, workload, "delayed-1")
    plan = zero_offload.policy(workload, machine, own)
    part = (HOST_ADAM, "parameters", options.number("cores", low=0.01, high=1))
    return replace(plan, policy=NAME, parts=(part,), options={**options, "devices": plan.devices})
