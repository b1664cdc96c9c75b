"""The order of the compute stream: which unit's forward or backward comes when."""

from __future__ import annotations

from typing import NamedTuple

from tierplan.planner.plan import UnitwisePlan
from tierplan.sim.workloads.workload import Workload


class UnitPass(NamedTuple):
    """One unit's turn on the compute stream."""

    phase: str
    """`fwd` or `bwd`."""
    unit: int
    micro_batch: int


def compute_order(plan: UnitwisePlan, workload: Workload) -> list[UnitPass]:
    """The order of the compute stream: horizontal or vertical, the head's backward right behind its forward."""
    num_units, batches = len(workload.units), range(workload.training.gradient_accumulation_steps)
    head = num_units - 1
    turns: list[tuple[str, int, int]] = []
    if plan.order == "horizontal":
        for m in batches:
            turns += [("fwd", u, m) for u in range(num_units)]
            turns += [("bwd", u, m) for u in reversed(range(num_units))]
    else:
        turns += [("fwd", u, m) for u in range(head) for m in batches]
        turns += [(phase, head, m) for m in batches for phase in ("fwd", "bwd")]
        turns += [("bwd", u, m) for u in reversed(range(head)) for m in batches]
    return [UnitPass(*turn) for turn in turns]
