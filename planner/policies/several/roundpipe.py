"""RoundPipe (arXiv 2604.27085): packs of blocks dispatched to the GPUs round robin, everything in host memory.

A step's micro-batches come in `rounds`; in each, `micro_batches / rounds` of them go through forward packs and then
through backward packs, which have fewer blocks and make activations again from their input. The head is the last
backward pack, forward and backward at once. The next pack of a device comes while one computes, activations pass
through host memory, gradients add up there, and host cores update. `roundpipe-sync` updates before the next step uses
a parameter, `roundpipe` during the next step, one step stale (its asynchronous optimizer, another algorithm).

A step goes on at the GPU behind the one where the step before ended: RoundPipe counts packs and not steps
(`get_next_device`). So `roundpipe` fills no pipeline anew; `roundpipe-sync` empties it, wherever it goes on.

Packs take about as long as each other: as many blocks go backward together as come near the head's time, and as many
forward as come near theirs, fewer where memory is short.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import pairwise

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import COMPUTE, DEVICE
from tierplan.planner.plan import PackPlan, Packs
from tierplan.planner.plan_rules import PlanError, Runs
from tierplan.planner.policies.options import Options, Policy
from tierplan.planner.policies.several.harmony import backward_bytes
from tierplan.planner.several_devices.packs.estimate import PackSizes
from tierplan.sim.workloads.work import total_work
from tierplan.sim.workloads.workload import Unit, Workload

SHARES_BATCHES = True
"""Its devices share the micro-batches of one step."""
OPTIONS: Mapping[str, object] = {"rounds": 1}


def _policy(name: str, workload: Workload, machine: Machine, given: Mapping[str, object]) -> PackPlan:
    options = Options(name, OPTIONS, given)
    forward, backward = equal_packs(name, workload, machine)
    packs = Packs(
        form="pipeline",
        devices=options.num_devices(machine),
        forward=forward,
        backward=backward,
        rounds=options.whole_number("rounds", low=1),
        streams=True,
        late_updates=name == "roundpipe",
        goes_on=True,
        hold_updates=name != "roundpipe" and workload.training.max_grad_norm is not None,
    )
    return PackPlan(policy=name, packs=packs, options=dict(options))


def equal_packs(name: str, workload: Workload, machine: Machine) -> tuple[Runs, Runs]:
    """Forward and backward packs of blocks in numbers near the head's time; embedding and head go with the ends."""
    units, num = workload.units, len(workload.units)

    def seconds(unit: Unit, *, backward: bool) -> float:
        works = (unit.forward, unit.backward) if backward else (unit.forward,)
        return machine.cost(COMPUTE, total_work(works)).work_s

    block, head = workload.blocks[0], units[-1]
    each_s = seconds(block, backward=True)
    per_backward = max(round(seconds(head, backward=True) / each_s), 1)
    capacity = machine.tier(DEVICE).capacity_bytes
    sizes = PackSizes(workload)
    while backward_bytes(sizes, 1, min(1 + per_backward, num)) > capacity:
        per_backward -= 1
        if not per_backward:
            raise PlanError(
                f"policy {name!r} needs {backward_bytes(sizes, 1, 2):,} bytes on a device for one block, but "
                f"it has {capacity:,}; use a smaller micro-batch or a larger device"
            )
    per_forward = max(round(per_backward * each_s / seconds(block, backward=False)), 1)
    last = num - 1
    return _runs(last, per_forward), (*_runs(last, per_backward), (last, num))


def _runs(num: int, size: int) -> Runs:
    """Units 0 to `num` in runs of about equal length, the first (the embedding) with a block's run."""
    count = max(round((num - 1) / size + 0.499), 1)
    borders = [0, *(1 + (num - 1) * k // count for k in range(1, count + 1))]
    return tuple(pairwise(borders))


VARIANTS: Mapping[str, Policy] = {name: partial(_policy, name) for name in ("roundpipe", "roundpipe-sync")}
