"""The best candidates so far, each as a start for another kind of search."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeGuard

from tierplan.planner.milp.amounts import Shape
from tierplan.planner.plan import PackPlan, Plan, UnitwisePlan
from tierplan.planner.plan_rules import Order
from tierplan.planner.search.candidates import Candidate

Batches = Literal["each", "shared"]
"""On several devices: each has micro-batches of its own, or they share those of one step."""


@dataclass
class Incumbents:
    """The quickest candidates for the same work."""

    batches: Batches | None = None
    """Which plans may be the best; None: any."""
    num_micro_batches: int = 0
    """One has no order; 0 where that is not said."""
    devices: int = 1
    """Of plans that local moves can start from."""
    divided: Literal["all", "tensors"] = "all"
    """What they divide, where there are several."""
    best: Candidate[Plan] | None = None
    by_shape: dict[Shape, Candidate[UnitwisePlan]] = field(default_factory=dict)
    """The best of each shape that local moves can start from."""
    packed: Candidate[PackPlan] | None = None
    """The best in packs that visit devices."""
    staged: Candidate[PackPlan] | None = None
    """The best in stages that stay on theirs."""

    @property
    def plain(self) -> Candidate[UnitwisePlan] | None:
        """The best that local moves can start from."""
        return min(self.by_shape.values(), key=per_batch_s, default=None)

    def shape(self, plan: UnitwisePlan) -> Shape:
        """The plan's, as its planning problem says it."""
        order: Order = "horizontal" if plan.sub_batches * self.num_micro_batches == 1 else plan.order
        return Shape(order, plan.sub_batches, plan.sharing.keeps)

    def consider(self, candidate: Candidate[Plan]) -> None:
        """Keeps the candidate if it is the quickest so far."""
        if candidate.step_s is None:
            return
        allowed = self.batches is None or (candidate.plan.num_batches == 1) == (self.batches == "shared")
        if self._is_plain(candidate):
            shape = self.shape(candidate.plan)
            if shape not in self.by_shape or per_batch_s(candidate) < per_batch_s(self.by_shape[shape]):
                self.by_shape[shape] = candidate
        if _is_packed(candidate):
            if candidate.plan.packs.stays:
                self.staged = min((c for c in (self.staged, candidate) if c), key=per_batch_s)
            else:
                self.packed = min((c for c in (self.packed, candidate) if c), key=per_batch_s)
        if not allowed:
            return
        if self.best is None or per_batch_s(candidate) < per_batch_s(self.best):
            self.best = candidate

    def is_start(self, plan: Plan) -> bool:
        """Whether a search can start from this plan: local moves, or a search over packs."""
        if not isinstance(plan, UnitwisePlan):
            return isinstance(plan, PackPlan)
        divides_so = plan.devices == 1 or plan.sharing.divided == self.divided
        return plan.segment_units == 1 and plan.devices == self.devices and divides_so

    def _is_plain(self, candidate: Candidate[Any]) -> TypeGuard[Candidate[UnitwisePlan]]:
        return isinstance(candidate.plan, UnitwisePlan) and self.is_start(candidate.plan)


def _is_packed(candidate: Candidate[Any]) -> TypeGuard[Candidate[PackPlan]]:
    return isinstance(candidate.plan, PackPlan)


def step_s_of(candidate: Candidate[Any] | None) -> float:
    """Its step in seconds; infinite for none, or one that does not fit."""
    return float("inf") if candidate is None or candidate.step_s is None else candidate.step_s


def per_batch_s(candidate: Candidate[Plan]) -> float:
    """Seconds per step for the workload's micro-batches: of those that one device has, where each has its own."""
    return step_s_of(candidate) / candidate.plan.num_batches
