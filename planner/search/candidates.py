"""Search by simulation: every candidate plan is lowered and simulated to its steady state, and the quickest is kept.

The fluid program cannot see that buffers are whole, that grants come in list order, or that a stream serves one op at
a time. So its plans are rounded with several margins, given several windows and several choices of late updates, and
then improved by local moves. The budget is counted in simulated ops, not in seconds, so a result does not depend on
the clock unless the time limit is reached."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, Generic, TypeVar

from tierplan.hwmodels.machine import Machine, MachineError
from tierplan.hwmodels.names import HOST_ADAM, NVME_READ, NVME_WRITE
from tierplan.planner.lowering import Lowering
from tierplan.planner.milp.amounts import GB, Problem
from tierplan.planner.plan import PackPlan, PagedPlan, Plan, PlanError, UnitwisePlan
from tierplan.planner.questions.endurance import written_bytes
from tierplan.planner.search.moves import FAMILIES
from tierplan.sim.analysis.completion import OutOfMemory, check_memory
from tierplan.sim.analysis.steady import steady_step
from tierplan.sim.schedule import ScheduleError
from tierplan.sim.workloads.workload import Workload

__all__ = [
    "Budget",
    "Candidate",
    "Evaluator",
    "improve",
    "late_updates",
]

OPS_PER_S = 36_000
"""Simulated ops (steps included) that a second of search is taken to buy; sets the budget, measured on two cores."""
WALL_TIMES = 5
LONG_CHAIN = 8
PATIENCE = 5
"""Moves of one family without success after which it is left, on chains longer than `LONG_CHAIN`."""
BETTER = 1 - 1e-4
"""A move counts as an improvement when it shortens the step by more than this."""


PlanT = TypeVar("PlanT", bound=Plan)
PlanT_co = TypeVar("PlanT_co", bound=Plan, covariant=True)


@dataclass(frozen=True, slots=True)
class Candidate(Generic[PlanT_co]):
    """A plan that was simulated, or the reason why it does not run."""

    plan: PlanT_co
    step_s: float | None
    why: Callable[[], str] = str
    """Says why it does not run: names and sizes, which take longer to put together than a simulation."""
    short_tier: str = ""
    short_bytes: int = 0
    wear: float = 0.0
    """What it writes to NVMe per second, over what it may for the drives to last; above 1 it has no step time."""

    @property
    def fits(self) -> bool:
        return self.step_s is not None

    @property
    def reason(self) -> str:
        """Why it does not run; empty if it does."""
        return self.why()


@dataclass
class Budget:
    """What a search may spend: simulated ops, and seconds of computing.

    Seconds are those of this process, so that a busy computer changes how long a search takes, but not what it finds;
    with the wall's clock at `WALL_TIMES` the limit, whatever happens.
    """

    time_limit_s: float
    started: float = field(default_factory=time.perf_counter)
    started_cpu: float = field(default_factory=time.process_time)
    ops_left: float = 0.0
    last_s: float = 0.0
    """Seconds of computing that the last simulation took: no other is begun when that much is not left."""

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Nothing is spent."""
        self.started, self.started_cpu = time.perf_counter(), time.process_time()
        self.ops_left = self.time_limit_s * OPS_PER_S

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    @property
    def is_spent(self) -> bool:
        return self.ops_left <= 0 or self.is_late

    @property
    def spent_frac(self) -> float:
        """The larger of what is spent of the ops and of the seconds."""
        computed_s = time.process_time() - self.started_cpu
        ops = self.time_limit_s * OPS_PER_S
        return max(1 - self.ops_left / ops, computed_s / self.time_limit_s)

    @property
    def is_late(self) -> bool:
        """The clock ran out before the budget did: only then the result depends on how quick this computer is."""
        computed_s = time.process_time() - self.started_cpu + self.last_s
        return computed_s >= self.time_limit_s or self.seconds >= WALL_TIMES * self.time_limit_s


class Evaluator:
    """Lowers and simulates plans, each one once. With a limit on writing to NVMe, plans that exceed it do not fit."""

    def __init__(
        self, workload: Workload, machine: Machine, budget: Budget, *, write_limit_bytes_per_s: float = float("inf")
    ) -> None:
        self.workload, self.machine, self.budget = workload, machine, budget
        self.write_limit_bytes_per_s = write_limit_bytes_per_s
        self.lowering = Lowering(workload, machine)
        self.seen: dict[tuple[object, ...], Candidate[Any]] = {}
        self.num_simulated = 0

    def __call__(self, plan: PlanT) -> Candidate[PlanT]:
        """The candidate of a plan. A plan that contradicts itself or does not fit becomes one with a reason."""
        decisions = (getattr(plan, f.name) for f in fields(plan) if f.name not in ("policy", "options"))
        key = (type(plan), *decisions)
        known = self.seen.get(key)
        if known is None:
            began_s = time.process_time()
            known = self.seen[key] = self._simulate(plan)
            self.budget.last_s = time.process_time() - began_s
        return replace(known, plan=plan)

    def _simulate(self, plan: PlanT) -> Candidate[PlanT]:
        self.num_simulated += 1
        if too_large := self._too_large(plan):
            return too_large
        try:
            columns = self.lowering.columns(plan)
            self.budget.ops_left -= 2 * columns.num_ops  # what the ordering costs
            check_memory(columns)  # known for one step without simulating several
            self.budget.ops_left -= 4 * columns.num_ops
            step_s = steady_step(columns, self.machine).period_s
        except OutOfMemory as error:
            short = error.wanted_bytes - error.free_bytes
            return Candidate(plan, None, partial(self._what_is_short, plan), short_tier=error.tier, short_bytes=short)
        except (PlanError, ScheduleError, MachineError) as error:
            self.budget.ops_left -= 100
            return Candidate(plan, None, partial(str, error))
        written = written_bytes(columns)
        wear = written / step_s / self.write_limit_bytes_per_s
        if wear > 1:
            reason = (
                f"writes {written / GB:.1f} GB to NVMe in a step of {step_s:.3g} s, {wear:.3g} times what the "
                "drives may take to last as long as was asked"
            )
            return Candidate(plan, None, partial(str, reason), wear=wear)
        return Candidate(plan, step_s, wear=wear)

    def _what_is_short(self, plan: Plan) -> str:
        """Why a plan runs out of memory, found once more: schedules are not kept."""
        columns = self.lowering.columns(plan)
        try:
            check_memory(columns)
            steady_step(columns, self.machine)
        except OutOfMemory as error:
            # not str(error), which looks for the capacity that would do by executing the schedule some tens of times
            return error.what
        raise AssertionError(f"plan {plan.policy!r} ran out of memory when it was tried, and does not now")

    def _too_large(self, plan: PlanT) -> Candidate[PlanT] | None:
        """What parameters and states alone say, at once: the commonest reason why a plan does not fit."""
        training = self.workload.training
        held = {"device": 0, "host": 0, "nvme": 0}
        match plan:
            case UnitwisePlan(devices=1, units=choices) if len(choices) == len(self.workload.units):
                for unit, choice in zip(self.workload.units, choices, strict=True):
                    held[choice.params] += unit.num_parameters * training.param_bytes
                    held[choice.states] += unit.num_parameters * training.state_bytes
            case PagedPlan():
                for unit in self.workload.units:
                    held["host"] += plan.devices * unit.num_parameters * (training.param_bytes + training.state_bytes)
            case UnitwisePlan() | PackPlan():
                return None
        capacity = {t.kind: t for t in reversed(self.machine.tiers)}
        for kind, size in held.items():
            if kind in capacity and size > capacity[kind].capacity_bytes:
                tier = capacity[kind]
                reason = (
                    f"parameters and optimizer states need {size:,} bytes in tier {tier.name!r}, which has "
                    f"{tier.capacity_bytes:,}; place fewer there or raise its capacity"
                )
                return Candidate(
                    plan,
                    None,
                    partial(str, reason),
                    short_tier=tier.name,
                    short_bytes=size - tier.capacity_bytes,
                )
        return None


def late_updates(problem: Problem, plan: UnitwisePlan, *, stretch: float) -> UnitwisePlan:
    """The plan with the updates late that backward has no time for.

    Updates are nested: the unit whose gradients come last is needed first. So whenever the host is free, the latest
    gradients are served first; what is left when backward ends is late, and runs beside the next forward in order of
    need. `stretch` scales the time that backward takes: 0 makes all updates late, infinity none.
    """
    if plan.semantics != "in-backward":
        return plan
    if stretch == float("inf"):
        return replace(plan, units=tuple(replace(choice, late_update=False) for choice in plan.units))
    rates = problem.rates
    units = problem.units
    seconds = []
    for unit, choice in zip(units, plan.units, strict=True):
        if choice.states == "device" or not unit.gparams:
            seconds.append(0.0)
            continue
        loads = [unit.gparams / rates.adam] if rates.adam else [0.0]
        if choice.states == "nvme":
            read, write = unit.states_gb / rates.read["states"], unit.states_gb / rates.write["states"]
            loads += [read, write]
            for per in problem.loads.values():
                streams = ((NVME_READ, unit.states_gb), (NVME_WRITE, unit.states_gb), (HOST_ADAM, unit.gparams))
                loads.append(sum(per.get(stream, 0.0) * amount for stream, amount in streams))
        seconds.append(max(loads))
    late = {u for u, s in enumerate(seconds) if s > 0}
    released: dict[int, float] = {}
    now = busy_until = 0.0
    for u in reversed(range(len(units))):
        now += stretch * _backward_s(problem, plan, u)
        while released and busy_until < now:
            chosen = min(released)
            busy_until = max(busy_until, released.pop(chosen)) + seconds[chosen]
            late.discard(chosen)
        if seconds[u] > 0:
            released[u] = now
    if released:
        late.discard(min(released))  # the last gradients' update is needed at once
    return replace(plan, units=tuple(replace(choice, late_update=u in late) for u, choice in enumerate(plan.units)))


def _backward_s(problem: Problem, plan: UnitwisePlan, u: int) -> float:
    unit, choice = problem.units[u], plan.units[u]
    again = sum(g.recompute_s for g in unit.groups if g.slots and choice.action(g.slots[0]) == "recompute")
    update = unit.update_s if choice.states == "device" else 0.0
    return (unit.bwd_s + again) * problem.turn + update


def improve(
    problem: Problem,
    start: Candidate[UnitwisePlan],
    evaluate: Evaluator,
    *,
    bound_s: float,
    good_frac: float,
    of_several_units: bool = True,
) -> Candidate[UnitwisePlan]:
    """The best that local moves reach from `start` within the budget, or once it is within `good_frac` of the bound.

    Goes round the families of moves. On long chains, where neighbours are much alike, a family is left after a few
    moves without success; on short ones every move is tried, with `of_several_units` those that change two at once too.
    """
    families = FAMILIES if of_several_units else FAMILIES[:-1]
    best = start
    patience = PATIENCE if len(problem.units) > LONG_CHAIN else 10**9
    stale = 0
    while stale < len(families):
        for family in families:
            failures, before = 0, best
            for move in family(problem, best.plan):
                if evaluate.budget.is_spent or _close(best, bound_s, good_frac):
                    return best
                changed = move(best.plan)
                if changed is None or changed == best.plan:
                    continue
                tried = evaluate(changed)
                if tried.step_s is not None and best.step_s is not None and tried.step_s < best.step_s * BETTER:
                    best, failures = tried, 0
                else:
                    failures += 1
                    if failures >= patience:
                        break
            stale = 0 if best is not before else stale + 1
            if stale >= len(families):
                break
    return best


def _close(candidate: Candidate[Plan], bound_s: float, good_frac: float) -> bool:
    return candidate.step_s is not None and candidate.step_s <= bound_s * (1 + good_frac)
