"""What to say when no plan fits: which capacity is short and by how much, and the micro-batch that would do.

InfeasiblePlan(PlanError)   no plan fits into memory, or none spares the drives as was asked
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from tierplan.hwmodels.machine import Machine
from tierplan.planner.lowering.tiling import with_batch
from tierplan.planner.milp.amounts import problem
from tierplan.planner.milp.bounds import Shortage, lower_bound
from tierplan.planner.plan import PlanError, plain_semantics
from tierplan.sim.output.text import format_bytes
from tierplan.sim.workloads.workload import Workload

SUB_BATCHES = (1, 2, 4, 8, 16)
"""Parts of a micro-batch with which the largest batch is looked for."""


@dataclass(eq=False)
class InfeasiblePlan(PlanError):
    """No plan fits into memory, or none spares the drives as was asked."""

    workload: Workload = field(repr=False)
    machine: Machine = field(repr=False)
    shortages: tuple[Shortage, ...]
    """Each of them alone would make a plan possible in the fluid relaxation, so the truth is this or somewhat more."""
    reason: str = ""
    endurance: str = ""
    """Why none spares the drives, where memory is not what is short."""

    @cached_property
    def largest_batch(self) -> int:
        """Sequences per micro-batch that would fit, 0 if none. Found when first asked for, which takes a while."""
        below = self.workload.training.per_device_train_batch_size
        return largest_batch(lambda batch: with_batch(self.workload, batch), self.machine, below=below)

    @property
    def what(self) -> str:
        """What is short, without the micro-batch that would do."""
        if self.endurance:
            return f"no plan for {self.workload.name!r} spares the drives of {self.machine.name!r}: {self.endurance}"
        lines = [f"no plan fits {self.workload.name!r} into the memory of {self.machine.name!r}"]
        for s in self.shortages:
            lines.append(
                f"{s.tier} memory is short by at least {format_bytes(s.short_bytes)}: it has "
                f"{format_bytes(s.capacity_bytes)} and needs {format_bytes(s.needed_bytes)} or more"
            )
        if not self.shortages:
            lines.append(self.reason or "no single tier alone would make it possible")
        return "; ".join(lines)

    def __str__(self) -> str:
        if self.endurance:
            return self.what
        fits = f"up to {self.largest_batch}" if self.largest_batch else "none, not even one"
        return f"{self.what}; sequences per micro-batch that fit: {fits}"


def largest_batch(make: Callable[[int], Workload], machine: Machine, *, below: int) -> int:
    """The largest micro-batch, up to `below`, that some schedule could fit by the relaxation; 0 if not even one fits.

    With micro-batches in sub-batches where that helps. By bisection: what fits for a batch also fits for a smaller one.
    """

    def fits(batch: int) -> bool:
        workload = make(batch)
        chosen = plain_semantics(workload.training)
        return any(
            lower_bound(
                problem(workload, machine, semantics=chosen, order="vertical" if t > 1 else "horizontal", sub_batches=t)
            ).feasible
            for t in SUB_BATCHES
            if batch % t == 0
        )

    return bisect_left(range(1, max(below, 1) + 1), True, key=lambda batch: not fits(batch))
