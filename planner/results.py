"""What planning gives: the best plan, and what each published policy would reach."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import inf
from typing import Literal

from tierplan.hwmodels.values.shown import Shown
from tierplan.planner.plan import Plan
from tierplan.planner.prediction import Prediction
from tierplan.sim.analysis.steady import SteadyState
from tierplan.sim.output.text import in_short
from tierplan.sim.schedule import Schedule

Status = Literal["within-gap", "searched", "time-limit", "interrupted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """What a published policy would reach on the same workload and machine."""

    step_s: float | None
    reason: str = ""
    """Why it has no step time, in one line."""
    lacks_memory: bool = False
    """Whether that is why."""
    micro_batch: int = 1
    """Sequences in one micro-batch."""
    accumulation: int = 1
    """Micro-batches of one device in a step; where devices share them, of all."""
    num_batches: int = 1
    """How many times these micro-batches its step trains on."""
    same_numbers: bool = True
    """Whether it trains the numbers that were asked for, to the bit."""
    is_rival: bool = True
    """Whether it is the same algorithm, and has room where tied gradients are summed as in plain training, too."""

    @property
    def num_sequences(self) -> int:
        """In one step, over all devices."""
        return self.micro_batch * self.accumulation * self.num_batches

    @property
    def per_sequence_s(self) -> float:
        """Infinite where it does not run."""
        return inf if self.step_s is None else self.step_s / self.num_sequences


@dataclass(frozen=True, kw_only=True)
class PlanResult(Shown):
    """The best plan found, with its schedule, its step time, and how much better any other could be."""

    prediction: Prediction
    """The plan in the figures that all commands show: its step time, what limits it, how long the drives last."""
    lower_bound_s: float
    """No schedule in its micro-batches is quicker; in an answer of `tierplan plan`, none in any that were asked for."""
    solve_s: float
    """Seconds in solvers."""
    total_s: float
    status: Status
    compared: Mapping[str, Callable[[], PolicyResult]] = field(repr=False, compare=False)
    """By name: what a policy would reach; to say why one does not fit takes a while. Not compared: a copy's say
    the same, and are others."""
    bound_shares: Mapping[str, float]
    """Share of the lower bound that each stream or shared limit explains, largest first."""
    s_per_gb: Mapping[str, float]
    """Seconds per step that one more GB of a tier takes off the lower bound, at the margin."""
    num_simulated: int
    solver: str = ""
    seed: int = 0
    notes: tuple[str, ...] = field(default=())
    milp_gap: float | None = None
    """How far whole actions were above the bound of the program without integers; None where that was not solved."""
    tried_fewer: bool = False
    """Whether plans were looked for, too, that leave some of several devices idle: `tierplan plan` and
    `tierplan.studies.evaluate.best_plan` do, `plan` does not."""

    @cached_property
    def policies(self) -> Mapping[str, PolicyResult]:
        """What each policy would reach that was compared with."""
        return {name: result() for name, result in self.compared.items()}

    def __getstate__(self) -> dict[str, object]:  # what says what policies reach holds all that was searched
        return {**self.__dict__, "compared": {name: partial(replace, result) for name, result in self.policies.items()}}

    @property
    def plan(self) -> Plan:
        assert self.prediction.plan is not None
        return self.prediction.plan

    @property
    def schedule(self) -> Schedule:
        """One step, in objects."""
        assert self.prediction.schedule is not None
        return self.prediction.schedule

    @property
    def steady(self) -> SteadyState:
        assert self.prediction.steady is not None
        return self.prediction.steady

    @property
    def step_s(self) -> float:
        """Simulated, in steady state."""
        return self.steady.period_s

    @property
    def limited_by(self) -> str:
        """What would save most of the step if it were twice as good."""
        return self.prediction.limited_by

    @property
    def gap(self) -> float:
        """How much of the step time could be saved at most: (step - bound) / step."""
        return max(0.0, (self.step_s - self.lower_bound_s) / self.step_s)

    @property
    def best_policy(self) -> str | None:
        """The policy that fits, is a rival, and takes least for the same work."""
        fitting = {k: p.per_sequence_s for k, p in self.policies.items() if p.step_s is not None and p.is_rival}
        return min(fitting, key=lambda k: (fitting[k], k)) if fitting else None

    def rows(self) -> list[dict[str, object]]:
        """The plan and the published systems for the same work, the quickest first."""
        same = not self.prediction.other_numbers(self.plan.semantics)
        found: list[tuple[str, float | None, bool, str]] = [("this plan", self.step_s, same, "")]
        found += [(name, self.same_work_s(p), p.same_numbers, p.reason) for name, p in self.policies.items()]
        return [
            {
                "system": name,
                "step_s": step_s,
                "times": step_s and step_s / self.step_s,
                "same_numbers": same if step_s else None,
                "why_not": in_short(reason),
            }
            for name, step_s, same, reason in sorted(found, key=lambda row: row[1] or float("inf"))
        ]

    def same_work_s(self, policy: PolicyResult) -> float | None:
        """What the policy takes for the sequences of the plan's step."""
        p = self.prediction
        num_sequences = p.micro_batch * p.accumulation * self.plan.num_batches
        return policy.step_s and policy.step_s * (num_sequences / policy.num_sequences)

    def __repr__(self) -> str:
        """One line: the whole is what `tierplan plan` prints."""
        p = self.prediction
        num = 1 if p.hardware is None else p.hardware.num_devices
        gpus = f" (for all {num} GPUs; fewer were not tried)" if num > 1 and not self.tried_fewer else ""
        return (
            f"<PlanResult {p.model} on {p.machine}{gpus}: {self.step_s:.4g} s per step, "
            f"{p.tokens_per_s:,.0f} tokens/s, gap {self.gap * 100:.1f} %, limited by {self.limited_by}>"
        )
