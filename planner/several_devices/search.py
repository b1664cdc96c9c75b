"""What the planner tries on several devices beside the plans of one, and what it can promise there.

Either the devices share the micro-batches of one step, in packs of units, or each has micro-batches of its own, the
rest cut into shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from tierplan.hwmodels.names import COMPUTE
from tierplan.planner.milp.amounts import Problem
from tierplan.planner.milp.bounds import Bound, compute_s
from tierplan.planner.plan import Packs, Plan, UnitwisePlan
from tierplan.planner.plan_rules import PLANNER
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.candidates import Candidate, PlanSimulator
from tierplan.planner.search.incumbents import Incumbents, per_batch_s
from tierplan.planner.search.moves import with_late_here
from tierplan.planner.search.patterns import Patterns
from tierplan.planner.search.shifts import descend_by_shifts
from tierplan.planner.several_devices.pack_search import improve_packs

SHARE_OF_PACKS, SHARE_OF_PACKS_ALONE = 0.6, 0.95
"""Of the budget, what the search over packs may take: beside other plans, and where only packs are allowed."""
SHARE_OF_ONE = 0.25
"""Of the budget, what plans of one device may take, which are but starts for plans on all."""
SHARE_OF_MOVES, SHARE_OF_PATTERNS = 1.0, 0.5
"""Of a budget, beyond it: what moves of the best plan on all devices may take; and of that, what regular plans may."""
LOOKS = (0.1, 0.25, 0.5)
"""Parts of their share after which the best plan of one device so far is tried on all: the last is not always the best
there, and where it is far behind, the search ends."""
NEAR_ON_ALL = 2.0
"""A plan on all devices is searched and moved where it takes at most so many times the best step."""
WAYS_TO_EXCHANGE: Sequence[tuple[Literal["last", "each"], Literal["nothing", "all"]]] = (
    ("last", "nothing"), ("last", "all"), ("each", "nothing"), ("each", "all"),
)  # fmt: skip
"""Of gradients and parameters: `Sharing.reduces` and `Sharing.keeps`."""


def search_packs(incumbents: Incumbents, simulate_plan: PlanSimulator, *, num_ops: float, seed: int) -> None:
    """Better packs than the best so far, where packs are allowed and a policy's fit, with a share of so much work."""
    if incumbents.packed is not None and incumbents.batches != "each":
        share = SHARE_OF_PACKS_ALONE if incumbents.batches == "shared" else SHARE_OF_PACKS
        budget = simulate_plan.budget
        end = (budget.spent_ops + share * num_ops) / budget.num_ops
        incumbents.consider(improve_packs(incumbents.packed, simulate_plan, spent_frac=end, seed=seed))


def bound_of_packs(problem: Problem, packs: Packs) -> float:
    """No step in packs of this form is shorter, in seconds: compute is shared, and where packs visit devices, every
    parameter is updated in host memory."""
    parameters, adam = sum(unit.gparams for unit in problem.units), problem.rates.adam
    return max(compute_s(problem) / packs.devices, parameters / adam if adam and not packs.stays else 0.0)


def looks_on_all(budget: Budget) -> list[float]:
    """Parts of the budget after which the best plan of one device is tried on all, of what is left of it now."""
    spent = budget.spent_frac
    return [spent + look * SHARE_OF_ONE * (1 - spent) for look in LOOKS]


def on_all_devices(incumbents: Incumbents, simulate_plan: PlanSimulator, num_devices: int) -> None:
    """The best plan of one device on all of them, each with its own micro-batches, the rest cut into shards; and the
    best so far, if it is of this kind, with other ways to exchange the shards."""
    starts = [] if incumbents.plain is None else [incumbents.plain.plan]
    best = incumbents.on_all
    if best is not None and best.plan.sharing.divided == "all":
        starts.append(best.plan)
    for start in starts:
        exchanging(start, incumbents, simulate_plan, num_devices)
        if simulate_plan.budget.is_out_of_time:
            return


def move_on_all(
    start: Candidate[UnitwisePlan], incumbents: Incumbents, simulate_plan: PlanSimulator, problem: Problem, seed: int
) -> None:
    """Moves of a plan on all devices: first of regular plans, then of single units."""
    budget = simulate_plan.budget
    budget.restart()
    best = start = simulate_plan(replace(start.plan, policy=PLANNER, options={}))

    def is_over(share: float) -> bool:
        return budget.spent_frac >= share * SHARE_OF_MOVES or budget.is_out_of_time

    for regular in Patterns(problem, start.plan, simulate_plan, seed).descend() if problem.blocks else ():
        best = min(best, regular, key=per_batch_s)
        if is_over(SHARE_OF_PATTERNS):
            break
    bound = bound_by_compute(problem, start.plan, start.plan.devices)
    for moved in descend_by_shifts(problem, best, simulate_plan, bound=bound, goal_s=0.0, seed=seed):
        incumbents.consider(moved)
        if is_over(1.0):
            break


def exchanging(start: UnitwisePlan, incumbents: Incumbents, simulate_plan: PlanSimulator, num_devices: int) -> None:
    """A plan on all devices, cut into shards that are exchanged in the quickest way."""
    start = with_late_here(start, 0)
    for reduces, keeps in WAYS_TO_EXCHANGE:
        sharing = replace(start.sharing, reduces=reduces, keeps=keeps)
        changed = replace(start, policy=PLANNER, options={}, devices=num_devices, sharing=sharing)
        incumbents.consider(simulate_plan(changed))


def bound_by_compute(problem: Problem, plan: Plan, num_devices: int) -> Bound:
    """The compute, evenly divided: all that is certain where any device may do any op."""
    step_s = compute_s(problem) * plan.num_batches / num_devices
    return Bound(step_s=step_s, shares={COMPUTE: 1.0}, s_per_gb={}, proven=False)
