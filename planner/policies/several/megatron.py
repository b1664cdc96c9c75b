"""Megatron-LM: operators, or the chain of blocks, cut among the devices.

`megatron-tp` cuts every operator (arXiv 1909.08053): all devices work on the same micro-batches with their share of
every matrix. Activations are summed over devices twice per block, forward, backward and again where a block is
recomputed, and compute waits for that. `megatron-pp` gives each device a stage of the chain (1F1B, arXiv 2104.04473),
which is recomputed; where blocks do not divide evenly, the first and the last stage have fewer. The gradient of a tied
embedding, which the first and the last stage make, is added up once a step (`_allreduce_word_embedding_grads`).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from tierplan.hwmodels.machine import Machine
from tierplan.planner.plan import PackPlan, Packs, Sharing, UnitPlan, UnitwisePlan
from tierplan.planner.plan_rules import PlanError, Runs, refuse_uneven
from tierplan.planner.policies.options import Options, Policy, data_parallel
from tierplan.sim.workloads.workload import Workload

SHARES_BATCHES = True
"""Its devices share the micro-batches of one step."""
OPTIONS: Mapping[str, object] = {"checkpointing": "on", "semantics": None}


def _tensor_parallel(workload: Workload, machine: Machine, given: Mapping[str, object]) -> UnitwisePlan:
    name = "megatron-tp"
    options = Options(name, OPTIONS, given)
    refuse_uneven(f"policy {name!r}", workload, options.num_devices(machine))
    sharing = Sharing(divided="tensors", waits=True)
    return data_parallel(options, workload, machine, UnitPlan(), sharing=sharing)


def _pipeline_parallel(workload: Workload, machine: Machine, given: Mapping[str, object]) -> PackPlan:
    name = "megatron-pp"
    options = Options(name, {}, given)
    devices = options.num_devices(machine)
    if devices > len(workload.blocks):
        raise PlanError(
            f"policy {name!r} on {devices} devices needs at least a block for each, but the model has "
            f"{len(workload.blocks)}; use fewer devices (option 'devices')"
        )
    stages = even_stages(len(workload.blocks), devices)
    several = devices > 1 and workload.training.gradient_accumulation_steps > 1  # of one micro-batch it is the sum
    sums_tied = several and any(unit.shares and unit.adds_to_shared for unit in workload.units)
    packs = Packs(form="resident", devices=devices, forward=stages[:-1], backward=stages, sums_tied=sums_tied)
    return PackPlan(policy=name, packs=packs, options=dict(options))


def even_stages(blocks: int, count: int) -> Runs:
    """As many blocks each; where that does not go, the first and the last stage have fewer, as they have more to do,
    and where that is not enough, others near them have one fewer."""
    each, more = -(-blocks // count), blocks % count
    first = (blocks - (count - 2) * each) // 2 if more and count > 2 else each
    ends = [min(first + each * k, blocks) for k in range(count - 1)]
    if first < 0:
        ends = [(each - 1) * k + min(max(k - (count - more) // 2, 0), more) for k in range(1, count)]
    return tuple(pairwise([0, *(1 + end for end in ends), blocks + 2]))


VARIANTS: Mapping[str, Policy] = {"megatron-tp": _tensor_parallel, "megatron-pp": _pipeline_parallel}
