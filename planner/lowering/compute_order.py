"""The order of the compute stream: which unit's forward or backward comes when."""

from __future__ import annotations

from tierplan.planner.plan import UnitwisePlan
from tierplan.sim.workloads.workload import Workload


def compute_order(plan: UnitwisePlan, workload: Workload) -> list[tuple[str, int, int]]:
    """Phase (`fwd` or `bwd`), unit and micro-batch: horizontal or vertical, the head's backward behind its forward."""
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
    return turns
