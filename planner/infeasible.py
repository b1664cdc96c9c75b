"""What to say when no plan fits: which capacity is short and by how much, and the micro-batch that would do.

InfeasiblePlan(PlanError)   no plan fits into memory, or none spares the drives as was asked
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property

from tierplan.hwmodels.machine import Machine, MachineError
from tierplan.planner.lowering.tiling import with_batch
from tierplan.planner.milp.amounts import problem
from tierplan.planner.milp.bounds import Shortage, lower_bound
from tierplan.planner.plan import UnitwisePlan, plain_semantics
from tierplan.planner.plan_rules import Order, PlanError
from tierplan.planner.search.budget import Budget
from tierplan.sim.output.text import format_bytes
from tierplan.sim.workloads.workload import Workload, WorkloadError

SUB_BATCHES = (2, 4, 8, 16)
"""Parts of a micro-batch with which the largest batch is looked for, beside as many as it has sequences."""
MANY = 256
"""Larger ones are not looked for."""
TRIED, TRY_S = ("fuyou", "zero-infinity", "sliding-window"), 0.4
"""How each is looked for: policies that make room, and the planner for a moment."""


@dataclass(eq=False)
class InfeasiblePlan(PlanError):
    """No plan fits into memory, or none spares the drives as was asked."""

    workload: Workload = field(repr=False)
    machine: Machine = field(repr=False)
    shortages: tuple[Shortage, ...]
    """Each of them alone would make a plan possible in the fluid relaxation, so the truth is this or somewhat more;
    for micro-batches that are cut where that takes less."""
    reason: str = ""
    endurance: str = ""
    """Why none spares the drives, where memory is not what is short."""
    not_found: str = ""
    """How long was searched, where the clock ended that and a plan may fit."""

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
        if self.not_found:
            where = f"into the memory of {self.machine.name!r}"
            return f"no plan that fits {self.workload.name!r} {where} was found {self.not_found}"
        lines = [f"no plan fits {self.workload.name!r} into the memory of {self.machine.name!r}"]
        for s in self.shortages:
            lines.append(
                f"{s.tier} memory is short by at least {format_bytes(s.short_bytes)}: it has "
                f"{format_bytes(s.capacity_bytes)} and needs {format_bytes(s.needed_bytes)} or more"
            )
            if s.tier == "device" and (note := logits_note(self.workload, s.needed_bytes)):
                lines[-1] += f"; of a whole micro-batch {note}"
        if not self.shortages:
            lines.append(self.reason or "no single tier alone would make it possible")
        return "; ".join(lines)

    def __str__(self) -> str:
        if self.endurance or self.not_found:
            return self.what
        more = " or more" if self.largest_batch == MANY else ""
        fits = f"up to {self.largest_batch}{more}" if self.largest_batch else "none, not even one"
        return f"{self.what}; sequences per micro-batch that fit: {fits}"


def logits_note(workload: Workload, of_bytes: int) -> str:
    """What to do about logits and loss, where they take more than half of so many bytes on the device; else nothing."""
    head, chunks = workload.units[-1], workload.training.loss_chunks
    loss_bytes = head.saved_bytes + max(head.forward_work_bytes, head.backward_work_bytes)
    if head.kind != "head" or 2 * loss_bytes <= of_bytes:
        return ""
    note = f"{format_bytes(loss_bytes)} are logits and loss: fewer tokens in a micro-batch need less (--seq, --batch)"
    return f"{note}, and so does a loss in chunks (--loss-chunks {8 * chunks})" if chunks < 64 else note


def largest_batch(make: Callable[[int], Workload], machine: Machine, *, below: int) -> int:
    """The largest micro-batch, up to `below` and `MANY`, that a plan was found for; 0 if not even one sequence fits.

    Bit by bit from the highest: what fits does not always with one sequence less, which cannot be cut as evenly.
    """
    from tierplan.planner.planning import plan  # whose error this belongs to
    from tierplan.planner.policies import POLICIES
    from tierplan.planner.search.candidates import PlanSimulator

    def fits(batch: int) -> bool:
        workload = make(batch)
        simulate_plan = PlanSimulator(workload, machine, Budget.of(TRY_S))
        for name in TRIED:
            with suppress(PlanError, MachineError, WorkloadError):
                tried = POLICIES[name](workload, machine, {})
                if isinstance(tried, UnitwisePlan):
                    tried = replace(tried, sums_tied=False)  # as `plan` asks them
                if simulate_plan(tried).fits:
                    return True
        chosen = plain_semantics(workload.training)
        parts: set[tuple[Order, int]] = {("vertical", t) for t in (*SUB_BATCHES, batch) if batch % t == 0}
        problems = (
            problem(workload, machine, semantics=chosen, order=order, sub_batches=t)
            for order, t in (("horizontal", 1), *parts)
        )
        if not any(lower_bound(p).feasible for p in problems):
            return False
        with suppress(InfeasiblePlan):
            return plan(workload, machine, time_limit_s=TRY_S, policies=()).step_s > 0
        return False

    largest = 0
    below = min(below, MANY)
    for bit in reversed(range(below.bit_length())):
        batch = largest + 2**bit
        if batch <= below and fits(batch):
            largest = batch
    return largest
