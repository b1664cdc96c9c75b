"""The plan of a workload on a machine: what the search finds there, or on the lesser machine that it contains.

    result = plan(workload, machine, time_limit_s=10)
    result.step_s, result.lower_bound_s, result.gap, result.limited_by

Errors:

    InfeasiblePlan(PlanError)   nothing fits: says which capacity is short, by how much, and what would do
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from typing import Any, get_args

from tierplan.hwmodels.machine import Machine
from tierplan.planner.infeasible import InfeasiblePlan, lacking_in_all, short_bytes_of_all
from tierplan.planner.loop import Search
from tierplan.planner.plan import Plan, UnitwisePlan
from tierplan.planner.plan_rules import Order, PlanError
from tierplan.planner.policies import check_name
from tierplan.planner.questions.endurance import allowed_bytes_per_s
from tierplan.planner.results import PlanResult
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.incumbents import Batches
from tierplan.planner.search.lesser import Known, lesser_of_catalog
from tierplan.sim.digest import digest
from tierplan.sim.output.text import format_bytes
from tierplan.sim.step import Semantics
from tierplan.sim.workloads.workload import Workload

Question = tuple[object, ...]
NUM_ANSWERS = 16
_ANSWERS: dict[Question, Known | None] = {}
"""The last that were not cut short by the clock: whoever asks for better and better machines has the lesser one's. None
where nothing fits."""


def plan(
    workload: Workload,
    machine: Machine,
    *,
    semantics: Semantics | None = None,
    time_limit_s: float | None = None,
    by_clock: bool = True,
    seed: int = 0,
    policies: Iterable[str] | None = None,
    orders: Iterable[Order] | None = None,
    like: Plan | None = None,
    batches: Batches | None = None,
    drive_lifetime_years: float | None = None,
    beat_s: float = inf,
    known: Known | None = None,
) -> PlanResult:
    """The best plan for one optimizer step of `workload` on `machine`.

    Of several devices, one that was found for all of them: `tierplan plan` also asks whether fewer train as many tokens
    per second, as `tierplan.studies.evaluate.best_plan` does; the result's `tried_fewer` says which it is. To ask here,
    plan for `load_machine(name, ["gpu.count=1"])` as well.

    Parameters
    ----------
    semantics
        When updates happen. By default what gives the numbers of plain training: `exact-clip` where gradients are
        clipped, else `in-backward`.
    time_limit_s
        Of the whole call; on several devices, from when the policies have been compared. The search has a budget of
        simulated ops that this usually buys, so the answer is the same wherever the clock does not cut it short;
        `status` says if it did. By default a budget that is spent in 2 to 10 s, and as much time as a slow computer
        needs for it. A machine that has more than the catalog's of its name takes as much again for the lesser one,
        whose answer it then also has. Searching one order alone spends that order's share of it.
    by_clock
        Whether the clock ends it at the limit; if not, the work does that this usually buys.
    policies
        Names of the policies to compare with; all by default.
    orders
        Orders of micro-batches to try; both by default where there are several.
    like
        Try plans of its kind alone, for an answer in a moment: in its order, and with updates at home if it has none
        elsewhere; of micro-batches that are cut, only those that something known cuts. The bound is theirs. Of packs,
        moves of their borders.
    batches
        On several devices: whether each has as many micro-batches as the workload says, or they share them. By default
        either, whichever takes least time for the same work.
    drive_lifetime_years
        Years of training without pause that the drives are to last: plans that write more are no candidates.
    beat_s
        A step of what is known already: the search ends where nothing that is left can be quicker. Until then it is the
        search that there is without this.
    known
        The answer for the lesser machine, where it is at hand.

    Raises
    ------
    InfeasiblePlan
        When nothing fits, with what is missing; or when nothing that fits spares the drives.
    PlanError
        For a policy or an order that there is not.
    """
    write_limit = allowed_bytes_per_s(machine, drive_lifetime_years)
    asked: dict[str, Any] = {
        "semantics": semantics,
        "seed": (seed := int(seed)),  # of numpy too, which `random` refuses
        "policies": None if policies is None else tuple(policies),
        "orders": None if orders is None else tuple(orders),
        "batches": batches,
        "drive_lifetime_years": drive_lifetime_years,
        "beat_s": beat_s,
    }
    orders = asked["orders"]
    for name in asked["policies"] or ():
        check_name(name)
    if unknown := sorted({*(orders or ())} - {*get_args(Order)}):
        raise PlanError(f"orders has {unknown[0]!r}; choose of {', '.join(get_args(Order))}")
    limit: dict[str, Any] = {"time_limit_s": time_limit_s, "by_clock": by_clock}
    started, budget = time.perf_counter(), budget_of(**limit)
    refuse_lacking(workload, machine)

    def planned(less: Machine) -> tuple[Workload, PlanResult]:
        return workload, plan(workload, less, like=like, **limit, **asked)

    kind = None if like is None else repr(like)
    question = (digest(workload), budget.num_ops, budget.more_ops, kind, *asked.values())
    known = known_of_lesser(workload, machine, question, planned, known)
    budget.restart()  # the lesser machine's search had a clock of its own
    is_cut = known is not None and known.is_cut
    search = Search(workload, machine, semantics, budget, seed, batches, write_limit, 0.0 if is_cut else beat_s, known)
    search.started = started
    search.like = like
    if like is not None:
        orders = (like.order,) if isinstance(like, UnitwisePlan) else ()
    search.begin(asked["policies"], orders)
    if machine.num_devices > 1:
        budget.restart()  # to decide some policies there takes simulations
    search.go_on()
    search.hold()
    with remembering(machine, question):
        result = search.result()
    remember(machine, question, workload, result)
    return result


def refuse_lacking(workload: Workload, machine: Machine) -> None:
    """Raises `InfeasiblePlan` where several devices have no room for parameters and states, before any search, and
    `PlanError` where they are unequal: one stands for all."""
    sizes = {t.name: t.capacity_bytes for t in machine.tiers if t.kind == "device"}
    if len(set(sizes.values())) > 1:
        have = ", ".join(f"{name} {format_bytes(size)}" for name, size in sizes.items())
        raise PlanError(
            f"the GPUs of machine {machine.name!r} have unequal memory ({have}), and plans are made for equal ones: "
            "give all of them the memory of the smallest (with_capacity)"
        )
    if lacking := lacking_in_all(workload, machine):
        raise InfeasiblePlan(workload, machine, lacking)


def known_of_lesser(
    workload: Workload,
    machine: Machine,
    question: Question,
    planned: Callable[[Machine], tuple[Workload, PlanResult]],
    known: Known | None = None,
) -> Known | None:
    """The answer of the machine without what it has more of than the catalog's, where there is one: `known` if it is
    that, one that is remembered, or what is planned for it."""
    if (less := lesser_of_catalog(machine)) is None or short_bytes_of_all(workload, less) > 0:
        return None
    if known is not None and known.is_of(less):
        return known
    if (asked := (digest(less), *question)) in _ANSWERS:
        return _ANSWERS[asked]
    with suppress(InfeasiblePlan):  # this machine may do better
        return Known.of(less, *planned(less))
    return None


@contextmanager
def remembering(machine: Machine, question: Question) -> Iterator[None]:
    """Keeps for better machines that nothing fits, where it is so."""
    try:
        yield
    except InfeasiblePlan as error:
        if not error.not_found:
            _keep((digest(machine), *question), None)
        raise


def remember(machine: Machine, question: Question, workload: Workload, result: PlanResult) -> None:
    """Keeps the answer for better machines, where the clock did not cut it short."""
    if result.status in ("within-gap", "searched"):
        _keep((digest(machine), *question), Known.of(machine, workload, result))


def _keep(question: Question, answer: Known | None) -> None:
    if len(_ANSWERS) == NUM_ANSWERS:
        del _ANSWERS[next(iter(_ANSWERS))]
    _ANSWERS[question] = answer


def budget_of(time_limit_s: float | None, *, by_clock: bool = True, divides: bool = False) -> Budget:
    """Of a search with this limit. Raises `PlanError` where it is none."""
    if time_limit_s is not None and not 0 < time_limit_s < inf:
        raise PlanError(f"time_limit_s is {time_limit_s}; give a finite number of seconds above 0")
    return Budget.of(time_limit_s, divides=divides, by_clock=by_clock)
