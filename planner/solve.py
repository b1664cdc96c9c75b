"""The planner's loop: bound, solve, round, lower, simulate, refine; every published policy is a candidate too.

    result = plan(workload, machine, time_limit_s=10)
    result.step_s, result.lower_bound_s, result.gap, result.bound_by

Errors:

    InfeasiblePlan(PlanError)   nothing fits: says which capacity is short, by how much, and what would do
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeGuard

from tierplan.hwmodels.machine import Machine, MachineError
from tierplan.hwmodels.names import COMPUTE
from tierplan.planner.infeasible import InfeasiblePlan
from tierplan.planner.milp.amounts import Problem, problem
from tierplan.planner.milp.bounds import Bound, compute_s, lower_bound, shortages
from tierplan.planner.milp.integral import solve_whole
from tierplan.planner.milp.model import Margins, Model, fractions, with_margins
from tierplan.planner.milp.program import SOLVER, Solver
from tierplan.planner.milp.rounding import round_to_plan
from tierplan.planner.plan import Order, PackPlan, Plan, PlanError, Semantics, UnitwisePlan, plain_semantics
from tierplan.planner.policies import POLICIES
from tierplan.planner.questions.endurance import allowed_bytes_per_s, lifetime_s, written_bytes
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.candidates import Candidate, PlanSimulator
from tierplan.planner.search.descent import descend
from tierplan.planner.search.knobs import Knobs, tune
from tierplan.planner.search.late_updates import late_updates
from tierplan.planner.search.moves import with_shards, with_windows
from tierplan.planner.search.restarts import descend_with_restarts
from tierplan.planner.several_devices.pack_search import improve_packs
from tierplan.sim.analysis.steady import SteadyState, steady_state
from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.workload import Workload, WorkloadError

__all__ = ["InfeasiblePlan", "PlanResult", "PolicyResult", "plan"]

Batches = Literal["each", "shared"]
Status = Literal["within-gap", "searched", "time-limit", "interrupted"]
GOOD_FRAC = 0.003
"""The search stops when the step is this close to the bound."""
SOLVER_FRAC = 1e-6
"""By so much a solver's bound may exceed a step that reaches it. What is more would be a wrong bound, and is shown."""
WRITE_FRACS = (0.8, 0.5, 0.25, 0.1, 0.03, 0.01)
"""Shares of the drives' endurance that are planned with, one after the other, while simulated plans exceed it."""
NEED_SEVERAL_DEVICES = ("harmony-dp", "harmony-pp")
SHARE_OF_PACKS = 0.6
"""Of the budget, what the search over packs of several devices may take."""
SUB_BATCHES = (2, 4, 8)
"""Parts of a micro-batch that are tried, in vertical order."""
SUB_BATCH_PENALTY = 1.005
"""What one more sub-batch has to be worth in the bound for it to be tried first: it means more ops to search over."""
MANY_UNITS, SUB_BATCHES_OF_MANY = 48, (4,)
"""Long chains, whose programs take about a second each, try fewer."""
SHARES_OF_TUNING = (0.45, 0.6, 0.65)
"""Parts of the budget that are spent when the first, the second and the later shapes end; local moves have the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """What a published policy would reach on the same workload and machine."""

    step_s: float | None
    reason: str = ""
    """Why it has no step time, in one line."""
    num_batches: int = 1
    """How many times the workload's micro-batches its step trains on."""
    same_numbers: bool = True
    """Whether it trains the numbers that were asked for; only then it is a candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """The best plan found, with its schedule, its step time, and how much better any other could be."""

    plan: Plan
    schedule: Schedule
    steady: SteadyState
    step_s: float
    """Simulated, in steady state."""
    lower_bound_s: float
    solve_s: float
    """Seconds in solvers."""
    total_s: float
    status: Status
    policies: Mapping[str, PolicyResult]
    bound_by: Mapping[str, float]
    """Share of the lower bound that each stream or shared limit explains, largest first."""
    s_per_gb: Mapping[str, float]
    """Seconds per step that one more GB of a tier takes off the lower bound, at the margin."""
    num_simulated: int
    solver: str = ""
    seed: int = 0
    notes: tuple[str, ...] = field(default=())
    milp_gap: float | None = None
    """How far whole actions were above the bound of the program without integers; None where that was not solved."""
    drive_lifetime_s: float | None = None
    """Seconds of training until the drives have taken what they are rated for; None where nothing wears them."""

    @property
    def gap(self) -> float:
        """How much of the step time could be saved at most: (step - bound) / step."""
        return max(0.0, (self.step_s - self.lower_bound_s) / self.step_s)

    @property
    def best_policy(self) -> str | None:
        """The policy that fits, trains the same numbers, and takes least for the work of one device's micro-batches."""
        fitting = {
            k: p.step_s / p.num_batches for k, p in self.policies.items() if p.step_s is not None and p.same_numbers
        }
        return min(fitting, key=lambda k: (fitting[k], k)) if fitting else None


def plan(
    workload: Workload,
    machine: Machine,
    *,
    semantics: Semantics | None = None,
    time_limit_s: float = 10.0,
    seed: int = 0,
    policies: Iterable[str] | None = None,
    orders: Iterable[Order] | None = None,
    batches: Batches | None = None,
    drive_lifetime_years: float | None = None,
) -> PlanResult:
    """The best plan for one optimizer step of `workload` on `machine`.

    Parameters
    ----------
    semantics
        When updates happen. By default what gives the numbers of plain training: `exact-clip` where gradients are
        clipped, else `in-backward`.
    time_limit_s
        Of the whole call; on several devices, from when the policies have been compared. The search has a budget of
        simulated ops that this usually buys, so the answer is the same wherever the clock does not cut it short;
        `status` says if it did.
    policies
        Names of the policies to compare with; all by default.
    orders
        Orders of micro-batches to try; both by default where there are several.
    batches
        On several devices: whether each has as many micro-batches as the workload says, or they share them. By default
        either, whichever takes least time for the same work.
    drive_lifetime_years
        Years of training without pause that the drives are to last: plans that write more are no candidates.

    Raises
    ------
    InfeasiblePlan
        When nothing fits, with what is missing; or when nothing that fits spares the drives.
    """
    write_limit = float("inf")
    if drive_lifetime_years is not None:
        write_limit = allowed_bytes_per_s(machine, drive_lifetime_years)
    return _Loop(workload, machine, semantics, time_limit_s, seed, batches, write_limit).run(policies, orders)


class _Loop:
    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        semantics: Semantics | None,
        time_limit_s: float,
        seed: int,
        batches: Batches | None = None,
        write_limit_bytes_per_s: float = float("inf"),
    ) -> None:
        if not 0 < time_limit_s < float("inf"):
            raise PlanError(f"time_limit_s is {time_limit_s}; give a finite number of seconds above 0")
        self.workload, self.machine, self.seed = workload, machine, seed
        self.semantics: Semantics = semantics or plain_semantics(workload.training)
        if workload.training.max_grad_norm is not None and self.semantics == "in-backward":
            raise PlanError(
                f"training clips gradients at norm {workload.training.max_grad_norm}, which semantics 'in-backward' "
                "cannot do; ask for 'exact-clip' or set no max_grad_norm"
            )
        self.num_devices = machine.num_devices
        self.batches = batches if self.num_devices > 1 else None
        self.started = time.perf_counter()
        self.budget = Budget(time_limit_s)
        self.write_limit_bytes_per_s = write_limit_bytes_per_s
        self.simulate_plan = PlanSimulator(
            workload, machine, self.budget, write_limit_bytes_per_s=write_limit_bytes_per_s
        )
        self.solve_s = 0.0
        self.solver = Solver(seed=seed)
        self.best: Candidate[Plan] | None = None
        self.plain: Candidate[UnitwisePlan] | None = None
        """The best that local moves can start from."""
        self.packed: Candidate[PackPlan] | None = None
        """The best in packs."""
        self.has_planned = False
        """Whether a plan of the program itself has fitted."""
        self.notes: list[str] = []
        self.milp_gap: float | None = None

    def run(self, policies: Iterable[str] | None, orders: Iterable[Order] | None) -> PlanResult:
        problems = [
            self._problem(self.semantics, order, num)
            for order, num in self._shapes(tuple(orders) if orders is not None else ("horizontal", "vertical"))
        ]
        bounds = [self._bound(p) for p in problems]
        status: Status = "searched"
        compared: dict[str, PolicyResult] = {}
        try:
            compared = self._compare(POLICIES if policies is None else policies)
            if self.num_devices > 1:
                self.budget.restart()  # their schedules are several times longer than the budget was measured for
                if self.packed is not None and self.batches != "each":
                    share = 0.95 if self.batches == "shared" else SHARE_OF_PACKS
                    self._consider(improve_packs(self.packed, self.simulate_plan, spent_frac=share, seed=self.seed))
            ranked = [pair for pair in zip(problems, bounds, strict=True) if pair[1].feasible]
            ranked.sort(key=lambda pair: pair[1].step_s * SUB_BATCH_PENALTY ** (pair[0].sub_batches - 1))
            begun = self.budget.spent_frac  # bounds and policies come first, however long they take
            for number, (p, bound) in enumerate(ranked):
                if self.best is None or bound.step_s < (self.best.step_s or 0.0) * (1 - GOOD_FRAC):
                    share = SHARES_OF_TUNING[min(number, len(SHARES_OF_TUNING) - 1)]
                    self._plan_order(p, bound, share=begun + (1 - begun) * share)
            if self.plain is not None or self.best is not None:
                self._polish(problems, bounds)
                self._on_several_devices()
        except KeyboardInterrupt:
            if self.best is None:
                raise
            status = "interrupted"
            self.notes.append("the search was interrupted; this is the best plan found until then")
        if self.best is None:
            raise self._infeasible(problems, bounds)
        bound = self._bound_of_all(problems, bounds)
        if status == "searched":
            close = self.best.step_s is not None and self.best.step_s <= bound.step_s * (1 + GOOD_FRAC)
            status = "within-gap" if close else "time-limit" if self.budget.is_out_of_time else "searched"
        return self._result(bound, compared, status)

    # ---- parts ----

    def _bound(self, p: Problem) -> Bound:
        started = time.perf_counter()
        bound = lower_bound(p, solver=self.solver)
        self.solve_s += time.perf_counter() - started
        if bound.solution is not None:
            self.budget.ops_left -= bound.solution.work_ops
        return bound

    def _shapes(self, orders: tuple[Order, ...]) -> list[tuple[Order, int]]:
        """The orders of micro-batches, and the sub-batches that they are cut into, which are worth a look."""
        training = self.workload.training
        shapes: list[tuple[Order, int]] = []
        if "horizontal" in orders or training.gradient_accumulation_steps == 1:
            shapes.append(("horizontal", 1))
        if "vertical" in orders:
            if training.gradient_accumulation_steps > 1:
                shapes.append(("vertical", 1))
            batch = training.per_device_train_batch_size
            some = SUB_BATCHES if len(self.workload.units) <= MANY_UNITS else SUB_BATCHES_OF_MANY
            shapes += [("vertical", num) for num in some if batch % num == 0]
        return shapes

    def _bound_of_all(self, problems: list[Problem], bounds: list[Bound]) -> Bound:
        """The least bound over the shapes, with that of the best plan's own if a policy has another one."""
        assert self.best is not None
        plan = self.best.plan
        only_compute = Bound(step_s=compute_s(problems[0]), shares={COMPUTE: 1.0}, s_per_gb={}, proven=False)
        if self.num_devices > 1:
            # any device may do any op: all that is certain is the compute, evenly divided
            return replace(only_compute, step_s=only_compute.step_s * plan.num_batches / self.num_devices)
        if not isinstance(plan, UnitwisePlan) or plan.operator_tiles > 1:
            self.notes.append("the best plan works in packs, pages or operators' tiles: its bound is compute alone")
            return only_compute
        own = self._problem(plan.semantics, plan.order, plan.sub_batches)
        if all((own.semantics, own.order, own.sub_batches) != (p.semantics, p.order, p.sub_batches) for p in problems):
            bounds = [*bounds, self._bound(own)]
        return min(bounds, key=lambda b: b.step_s)

    def _problem(self, semantics: Semantics, order: Order, sub_batches: int) -> Problem:
        return problem(
            self.workload,
            self.machine,
            semantics=semantics,
            order=order,
            sub_batches=sub_batches,
            write_limit_bytes_per_s=self.write_limit_bytes_per_s,
        )

    def _compare(self, names: Iterable[str]) -> dict[str, PolicyResult]:
        found = {}
        for name in names:
            if name in NEED_SEVERAL_DEVICES and self.num_devices == 1:
                found[name] = PolicyResult(step_s=None, reason="needs several devices; this machine has one")
                continue
            try:
                made = POLICIES[name](self.workload, self.machine, {})
            except (PlanError, MachineError, WorkloadError) as error:
                found[name] = PolicyResult(step_s=None, reason=str(error))
                continue
            candidate = self.simulate_plan(made)
            same = made.semantics == self.semantics or "delayed-1" not in (made.semantics, self.semantics)
            found[name] = PolicyResult(
                step_s=candidate.step_s, reason=candidate.reason, same_numbers=same, num_batches=made.num_batches
            )
            if same:
                self._consider(candidate)
        return found

    def _consider(self, candidate: Candidate[Plan]) -> bool:
        """Keeps the candidate if it is the quickest so far."""
        if candidate.step_s is None:
            return False
        allowed = self.batches is None or (candidate.plan.num_batches == 1) == (self.batches == "shared")
        if _is_plain(candidate) and (self.plain is None or _per_batch_s(candidate) < _per_batch_s(self.plain)):
            self.plain = candidate
        if _is_packed(candidate) and (self.packed is None or _per_batch_s(candidate) < _per_batch_s(self.packed)):
            self.packed = candidate
        if allowed and (self.best is None or _per_batch_s(candidate) < _per_batch_s(self.best)):
            self.best = candidate
            return True
        return False

    def _solve(self, model: Model, margins: Margins) -> UnitwisePlan | None:
        changed = with_margins(model, margins)
        solution = self.solver.solve(changed.program)
        self.solve_s += solution.seconds
        self.budget.ops_left -= solution.work_ops
        return round_to_plan(model.problem, fractions(changed, solution)) if solution.usable else None

    def _solve_whole(self, model: Model, margins: Margins) -> UnitwisePlan | None:
        found = solve_whole(model, margins, solver=self.solver)
        if found is None:
            return None
        self.solve_s += found.seconds
        self.budget.ops_left -= found.work_ops
        self.milp_gap = found.gap
        return found.plan

    def _plan_order(self, p: Problem, bound: Bound, *, share: float) -> None:
        """One order: tune the knobs by simulation, then take the integral program's plan at the best knobs too.

        `share` is the part of the whole budget that may be spent when this ends.
        """
        model = bound.model
        assert model is not None
        goal_s = bound.step_s * (1 + GOOD_FRAC)
        solved: dict[tuple[float, ...], UnitwisePlan | None] = {}
        units = granules(p)

        def trial(knobs: Knobs) -> Candidate[UnitwisePlan] | None:
            write_frac = 1.0
            while True:
                key = (knobs.rate_frac, knobs.device, knobs.host, write_frac)
                if key not in solved:
                    solved[key] = self._solve(model, replace(knobs.margins(p, *units), write_frac=write_frac))
                made = solved[key]
                if made is None:
                    return None
                tried = self.simulate_plan(_with_knobs(p, made, knobs))
                self._consider(tried)
                self.has_planned = self.has_planned or tried.step_s is not None
                if tried.wear <= 1.0 or write_frac == 0.0:
                    return tried
                # the program may have waited where the simulation does not: write less, in the end nothing at all
                write_frac = next((f for f in WRITE_FRACS if f * tried.wear < write_frac), 0.0)

        def is_over() -> bool:
            return self.budget.is_out_of_time or (self.has_planned and self.budget.spent_frac > share)

        # late updates hold gradients in host memory: where that binds, begin without them
        stretch = float("inf") if bound.s_per_gb.get("host", 0.0) > 1e-6 else 1.5
        found = tune(trial, goal_s=goal_s, is_over=is_over, stretch=stretch)
        if found is None:
            self.notes.append(f"{p.order}, {p.sub_batches} sub-batches: no rounded plan fitted")
            return
        knobs, best_s = found
        self.notes.append(f"{p.order}, {p.sub_batches} sub-batches: {knobs}")
        if best_s > goal_s and not self.budget.is_out_of_time:
            made = self._solve_whole(model, knobs.margins(p, *units))
            if made is not None:
                self._consider(self.simulate_plan(_with_knobs(p, made, knobs)))

    def _polish(self, problems: list[Problem], bounds: list[Bound]) -> None:
        """Local moves from the best plan, in its own order."""
        if self.plain is None:
            return
        by_shape = {(p.order, p.sub_batches): (p, b) for p, b in zip(problems, bounds, strict=True)}
        p, bound = by_shape.get((self.plain.plan.order, self.plain.plan.sub_batches), (problems[0], bounds[0]))
        found = descend(p, self.plain, self.simulate_plan, bound_s=bound.step_s, good_frac=GOOD_FRAC)
        self._consider(
            descend_with_restarts(
                p, found, self.simulate_plan, bound_s=bound.step_s, good_frac=GOOD_FRAC, seed=self.seed
            )
        )

    def _on_several_devices(self) -> None:
        """The best plan of one device on all of them, each with its own micro-batches, the rest cut into shards."""
        if self.num_devices > 1 and self.plain is not None:
            self._consider(self.simulate_plan(replace(self.plain.plan, devices=self.num_devices)))

    def _infeasible(self, problems: list[Problem], bounds: list[Bound]) -> InfeasiblePlan:
        if worn := [c for c in self.simulate_plan.seen.values() if c.wear > 1.0]:
            gentlest = min(worn, key=lambda c: c.wear)
            least_s = min(bound.step_s for bound in bounds)
            why = (
                f"the gentlest of {len(worn)} plans {gentlest.reason}. A step would have to take {least_s:.3g} s or "
                "more; micro-batches that are accumulated make it longer without writing more (--accumulation). Or "
                "use more drives, or drives that are rated for more (--set nvme.drives=, nvme.endurance=), or ask for "
                "a shorter lifetime"
            )
            return InfeasiblePlan(self.workload, self.machine, (), "", why)
        lacking = tuple(shortages(problems[0]))
        reason = next((c.reason for c in self.simulate_plan.seen.values() if not c.fits), "")
        return InfeasiblePlan(self.workload, self.machine, lacking, reason)

    def _result(self, bound: Bound, compared: Mapping[str, PolicyResult], status: Status) -> PlanResult:
        best = self.best
        assert best is not None
        assert best.step_s is not None
        schedule = self.simulate_plan.lowering.columns(best.plan).schedule()
        steady = steady_state(schedule, self.machine)
        assert steady.period_s == best.step_s, "SimPy and the compiled engine disagree"
        is_solvers = bound.step_s <= best.step_s * (1 + SOLVER_FRAC)
        return PlanResult(
            plan=best.plan,
            schedule=schedule,
            steady=steady,
            step_s=best.step_s,
            lower_bound_s=min(bound.step_s, best.step_s) if is_solvers else bound.step_s,
            solve_s=self.solve_s,
            total_s=time.perf_counter() - self.started,
            status=status,
            policies=compared,
            bound_by=bound.shares,
            s_per_gb=bound.s_per_gb,
            num_simulated=self.simulate_plan.num_simulated,
            solver=SOLVER,
            seed=self.seed,
            notes=tuple(self.notes),
            milp_gap=self.milp_gap,
            drive_lifetime_s=lifetime_s(self.machine, written_bytes(schedule), best.step_s),
        )


def _with_knobs(p: Problem, plan: UnitwisePlan, knobs: Knobs) -> UnitwisePlan:
    """What the program's plan leaves open, as the knobs have it."""
    in_shards = with_shards(plan, knobs.shards)
    return with_windows(late_updates(p, in_shards, stretch=knobs.stretch), knobs.windows)


def _is_plain(candidate: Candidate[Any]) -> TypeGuard[Candidate[UnitwisePlan]]:
    """Whether local moves, which are those of one device, can start from this plan."""
    plan = candidate.plan
    return isinstance(plan, UnitwisePlan) and plan.segment_units == 1 and plan.devices == 1


def _is_packed(candidate: Candidate[Any]) -> TypeGuard[Candidate[PackPlan]]:
    return isinstance(candidate.plan, PackPlan)


def _per_batch_s(candidate: Candidate[Plan]) -> float:
    """Seconds per step for the workload's micro-batches: of those that one device has, where each has its own."""
    return float("inf") if candidate.step_s is None else candidate.step_s / candidate.plan.num_batches


def granules(p: Problem) -> tuple[float, float]:
    """What margins are counted in, in GB: the largest thing that comes to the device, or to the host at a time."""
    device = max(max([u.params_gb, *(g.gb for g in u.groups)]) for u in p.units)
    host = max(max([u.grads_gb + u.params_gb + u.states_gb, *(g.gb for g in u.groups)]) for u in p.units)
    return device, host
