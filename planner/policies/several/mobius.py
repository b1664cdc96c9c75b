"""Mobius (ASPLOS 2023): a pipeline whose stages live in host memory and visit the GPUs in turn, as RoundPipe's do.

Stages are the same forward and backward: `stages` of about as many blocks each, by default one per GPU, the embedding
with the first and the head with the last. As many micro-batches as there are GPUs go through all stages and back, then
the pipeline is empty and the next ones begin. The next stage of a GPU comes while one computes; host cores update.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import gcd

from tierplan.hwmodels.machine import Machine
from tierplan.planner.plan import PackPlan, Packs
from tierplan.planner.policies.options import Options
from tierplan.sim.workloads.workload import Workload

SHARES_BATCHES = True
"""Its devices share the micro-batches of one step."""
NAME = "mobius"
OPTIONS: Mapping[str, object] = {"stages": None}


def policy(workload: Workload, machine: Machine, given: Mapping[str, object]) -> PackPlan:
    """Equal stages in rounds of one micro-batch per device, or the nearest number that divides the step's."""
    options = Options(NAME, OPTIONS, given)
    devices = options.num_devices(machine)
    options["stages"] = options["stages"] or min(devices, len(workload.blocks))
    runs = equal_stages(workload, options.whole_number("stages", low=1, high=len(workload.blocks)))
    total = workload.training.gradient_accumulation_steps
    packs = Packs(
        form="pipeline",
        devices=devices,
        forward=runs[:-1],
        backward=runs,
        rounds=max(total // devices, 1) if total % devices == 0 else total // gcd(total, devices),
        flushes=True,
        streams=True,
        hold_updates=workload.training.max_grad_norm is not None,
    )
    return PackPlan(policy=NAME, packs=packs, options=dict(options))


def equal_stages(workload: Workload, count: int) -> tuple[tuple[int, int], ...]:
    """Runs of about as many blocks each, the embedding with the first and the head with the last."""
    num = len(workload.units)
    return tuple(pairwise([0, *(1 + (num - 2) * k // count for k in range(1, count)), num]))
