"""The search for the plan of one division of a batch: bound, solve, round, lower, simulate, refine.

Every published policy is a candidate, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, Literal, get_args

from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.scaling import parts_of
from tierplan.planner.compared import NEAR, Compared
from tierplan.planner.infeasible import why_none
from tierplan.planner.lowering import Lowering
from tierplan.planner.milp.amounts import Problem, problem
from tierplan.planner.milp.bounds import IMPOSSIBLE, Bound, lower_bound
from tierplan.planner.milp.program import SOLVER, Solver
from tierplan.planner.milp.totals import bound_of_totals
from tierplan.planner.plan import Keeps, Plan, Sharing, UnitwisePlan, is_same, plain_semantics
from tierplan.planner.plan_rules import PLANNER, Order, check_clipping
from tierplan.planner.policies import NEED_SEVERAL_DEVICES, POLICIES, comparable
from tierplan.planner.prediction import predicted
from tierplan.planner.results import PlanResult, PolicyResult, Status
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.candidates import Candidate, PlanSimulator
from tierplan.planner.search.from_program import ProgramPlans
from tierplan.planner.search.incumbents import Batches, Incumbents, per_batch_s, step_s_of
from tierplan.planner.search.lesser import Known, needs_no_drives, off_idle_drives, without_excess
from tierplan.planner.search.local.moves import loosened, off_drives, reducing, with_shape_of
from tierplan.planner.search.race import GOOD_FRAC, MOST_OPS, OrderSearch, Racer, race, rounds
from tierplan.planner.search.shape import sub_batches_of, tried
from tierplan.planner.several_devices import tensors
from tierplan.planner.several_devices.bounds import bound_of_several
from tierplan.planner.several_devices.packs.search import bound_of_packs, search_packs
from tierplan.planner.several_devices.packs.stages import search_stages
from tierplan.planner.several_devices.sharded import sharded, tensor_parallel
from tierplan.sim.analysis.steady import steady_state
from tierplan.sim.step import Semantics
from tierplan.sim.workloads.workload import Workload

FAR = 1.05
"""A search goes on beyond its default budget while the step is more than this times the bound."""
SOLVER_FRAC = 1e-6
"""By so much a solver's bound may exceed a step that reaches it. What is more would be a wrong bound, and is shown."""
NEXT_IN_FULL = 4
"""Where the quickest plan of several devices takes longer with each of them drawn than with one for all, so many of the
next ones are drawn too, and then ones further and further behind: those beside it mostly fail alike."""
SAME_FRAC = 1e-6
"""Steps that differ by less take equally long."""
SHARES: Mapping[Order, float] = {"horizontal": 0.3, "vertical": 0.4}
"""Of the budget, where a workload has plans of both orders: the same whether both are searched or one."""
BOUND_WEIGHT = 2.0
"""Percent of an order's best step that one of its bound counts as beyond the default budget: first steps are luck."""
MOST_PARTS = 64
"""Where not even the coarser parts have room, micro-batches of up to so many sequences are cut into single ones."""
SUB_BATCH_PENALTY = 1.005
"""What one more sub-batch has to be worth in the bound for it to be tried first: it means more ops to search over."""


class Search:
    """The search for one division of the batch: begun, gone on with, perhaps several times, and ended by its result.

    In legs it does what it does at once on one device.
    """

    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        semantics: Semantics | None,
        budget: Budget,
        seed: int,
        batches: Batches | None = None,
        write_limit_bytes_per_s: float = inf,
        beat_s: float = inf,
        known: Known | None = None,
        divided: Literal["all", "tensors"] = "all",
    ) -> None:
        self.workload, self.seed, self.known, self.divided = workload, seed, known, divided
        self.asked, self.machine = machine, without_excess(machine, workload)
        self.asked_semantics = semantics
        self.semantics: Semantics = semantics or plain_semantics(workload.training)
        check_clipping(self.semantics, workload.training.max_grad_norm)
        self.num_devices = machine.num_devices
        self.batches = batches if self.num_devices > 1 else None
        self.devices = 1 if self.batches == "shared" and divided == "all" else self.num_devices
        """Of plans of units."""
        self.num_batches = self.devices if divided == "all" else 1
        """Times the workload's micro-batches of which these do a step."""
        self.has_few = tensors.sequences_each(workload, self.num_devices) < 1
        """Whether devices that share micro-batches have no sequence of their own each."""
        self.started, self.budget = time.perf_counter(), budget
        self.write_limit_bytes_per_s, self.beat_s = write_limit_bytes_per_s, beat_s
        self.simulate_plan = self._simulator(self.machine)
        self.bound_s, self.is_interrupted, self.notes = 0.0, False, list[str]()
        self.incumbents, self.seeds, self.spared = (self._no_incumbents() for _ in range(3))
        self.compared: Mapping[str, Callable[..., PolicyResult]] = {}
        self.chains: list[OrderSearch] = []
        self.like: Plan | None = None
        """The kind of plans to try."""

    def _simulator(self, machine: Machine) -> PlanSimulator:
        return PlanSimulator(self.workload, machine, self.budget, write_limit_bytes_per_s=self.write_limit_bytes_per_s)

    def _no_incumbents(self) -> Incumbents:
        accumulation = self.workload.training.gradient_accumulation_steps
        return Incumbents(self.batches, accumulation, self.devices, self.divided)

    def begin(
        self,
        policies: Iterable[str] | None = None,
        orders: Iterable[Order] | None = None,
        *,
        only: Order | None = None,
        solver: Solver | None = None,
        like: Search | None = None,
    ) -> None:
        """Compares the policies and bounds all shapes.

        With `only`, micro-batches go in this order alone and are not cut into smaller ones; `solver` is of the search
        before, and `like` one that has compared the policies.
        """
        if like is None:
            self.compare(policies)
        else:
            self.compared, self.seeds, self.simulate_plan = like.compared, like.seeds, like.simulate_plan
        cuts = self.like is None and self.divided == "all"
        shapes = sub_batches_of(self.workload, self.seeds.by_shape, cuts=cuts) if only is None else {only: [1]}
        wanted = tuple(orders) if orders is not None else ("horizontal", "vertical")
        if self.workload.training.gradient_accumulation_steps == 1:
            wanted = ("horizontal", *wanted)  # one micro-batch has no order
        for order in [order for order in shapes if order in wanted]:
            share = SHARES[order] if len(shapes) > 1 else 1.0
            self.chains.append(self._chain(order, shapes[order], share, solver or Solver(seed=self.seed)))
        self.has_all_orders = len(self.chains) == len(shapes)
        finest = self.workload.training.per_device_train_batch_size
        may_fit = self.seeds.best is not None or any(b.has_plans for chain in self.chains for b in chain.bounds)
        tried_parts = max(shapes.get("vertical", [1]))
        more = [num for num in range(tried_parts + 1, min(finest, MOST_PARTS) + 1) if finest % num == 0]
        if only is None and "vertical" in wanted and more and not may_fit:
            self.chains.append(self._chain("vertical", more, 1.0, Solver(seed=self.seed)))
        self.in_rounds = self._rounds()

    def compare(self, policies: Iterable[str] | None = None) -> None:
        """Simulates the policies: the best of them is the best plan until a quicker one is found."""
        names = comparable(self.num_devices) if policies is None else policies
        self.compared, self.seeds = self._compare(frozenset(names))

    def go_on(self) -> None:
        """Until the budget is spent."""
        try:
            may_share = self.num_devices > 1 and self.batches != "each" and self.divided == "all"
            if may_share:
                self._search_packs()
            while next(self.in_rounds, self) is not self and not self.budget.is_out_of_time:
                pass
            if may_share and not self.has_few:
                self._search_cut()
        except KeyboardInterrupt:
            self.interrupt()

    def search_stages(self) -> None:
        """Stages that stay on several devices, and operators that these cut, which takes little."""
        search_stages(self.seeds, self.simulate_plan, num_ops=self.budget.ops_left, beat_s=self.beat_s)
        if self.seeds.staged is not None:
            self.incumbents.consider(self.seeds.staged)
        tensors.search_tensors(self.incumbents, self.simulate_plan, self.semantics, beat_s=self.beat_s)

    def _search_packs(self) -> None:
        """Stages, operators that are cut, and packs, on several devices."""
        self.search_stages()
        if self.has_few:
            self._search_cut()
        beat_s = min(self.beat_s, step_s_of(self.seeds.staged))
        packed = self.seeds.packed
        if packed and bound_of_packs(self.posed("horizontal", 1), packed.plan.packs) < beat_s:
            search_packs(self.seeds, self.simulate_plan, num_ops=self.budget.ops_left, seed=self.seed, beat_s=beat_s)
        if self.seeds.packed is not None:
            self.incumbents.consider(self.seeds.packed)

    def _search_cut(self) -> None:
        """Operators that all devices cut, with some of what they need elsewhere."""
        best, wanted_s = self.incumbents.best, self.beat_s / self.num_batches
        beat_s = tensors.to_beat_s(self.workload, self.num_devices, best, wanted_s)
        if beat_s:
            with self.budget.beside(tensors.SHARE * self.budget.num_ops):
                other = self.beside(None, None, tensors.OF_BOUND * beat_s, divided="tensors")
                known_s = wanted_s if best is None else min(wanted_s, per_batch_s(best))
                tensors.go_on_while_promising(other, known_s, self.incumbents)

    def interrupt(self) -> None:
        """Ctrl-C ends the search, where there is a plan already."""
        if self.best_s == inf:
            raise
        self.is_interrupted = True
        self.notes.append("the search was interrupted; this is the best plan found until then")

    @property
    def keeps(self) -> Sequence[Keeps]:
        """Whose gathered parameters may stay for backward."""
        if isinstance(self.like, UnitwisePlan):
            return (self.like.sharing.keeps,)
        return ("nothing", "all") if self.num_batches > 1 else ("nothing",)

    @property
    def racers(self) -> list[Racer]:
        """Of all shapes."""
        return [racer for chain in self.chains for racer in chain.racers]

    def collect(self) -> None:
        """Takes what its racers have found."""
        for chain in self.chains:
            if chain.found.plain is not None:
                self.incumbents.consider(chain.found.plain)

    def offer(self, plan: UnitwisePlan) -> None:
        """Tries a plan of another division as the start of this one's."""
        for chain in self.chains:
            for p in chain.problems:
                for changed in (same := with_shape_of(plan, p), loosened(same)):
                    chain.found.consider(self.simulate_plan(changed))

    def hold(self) -> None:
        """Tries the answer of the lesser machine: where more of something only is in the way (a drive's copies slow
        those of others), it is left unused."""
        if self.known is not None and isinstance(self.known.plan, UnitwisePlan):
            held = replace(self.known.plan, parts=parts_of(self.asked, self.known.machine))
            self.incumbents.consider(self._simulator(self.asked)(held))

    def beside(self, order: Order | None, solver: Solver | None, beat_s: float, **more: Any) -> Search:
        """A search for plans of another order, or that are `divided` otherwise."""
        asked = self.workload, self.asked, self.asked_semantics, self.budget, self.seed, self.batches
        other = Search(*asked, self.write_limit_bytes_per_s, beat_s, **more)
        other.begin(only=order, solver=solver, like=self)
        return other

    def found_any(self) -> bool:
        """Whether a plan fits, of those that are tried until one does."""
        for chain in self.chains:
            self._go_on_with(chain, inf)
        return self.best_s < inf

    @property
    def has_room(self) -> bool:
        """Whether some shape may fit, by its bound."""
        return any(bound.feasible for chain in self.chains for bound in chain.bounds)

    @property
    def least_s(self) -> float:
        """No plan of units that may still be found is quicker, where no gradients come back."""
        return min((chain.least_s for chain in self.chains if not chain.is_over), default=inf)

    @property
    def best_s(self) -> float:
        """The shortest step so far."""
        return step_s_of(self.incumbents.best)

    def result(self) -> PlanResult:
        """The best plan so far. Raises `InfeasiblePlan` where there is none."""
        problems = [p for chain in self.chains for p in chain.problems]
        bounds = [bound for chain in self.chains for bound in chain.bounds]
        if self.incumbents.best is None:
            raise why_none(self, problems or [self.posed("horizontal", 1)], bounds)
        if (in_full := self._in_full(self.incumbents.best)) is None:
            raise why_none(self, problems, bounds)
        best = self._spares_drives(in_full)
        if self.known is not None and self.known.is_cut:
            self.is_interrupted = True
            self.notes.append(self.known.note)
        bound = self._bound_of_all(best.plan, problems, bounds)
        close = best.step_s is not None and best.step_s <= bound.step_s * (1 + GOOD_FRAC)
        status: Status = "within-gap" if close else "time-limit" if self.budget.is_out_of_time else "searched"
        return self._result(best, bound, "interrupted" if self.is_interrupted else status)

    def _in_full(self, best: Candidate[Plan]) -> Candidate[Plan] | None:
        """The best with every device drawn: where one stands for all, memory may be granted in another order. None
        where none of those that are drawn fits."""
        full, rivals = self._no_incumbents(), [best]
        if self.num_devices > 1:
            tried = (c for c in self.simulate_plan.seen.values() if c.fits and not c.is_estimate)
            behind = sorted((c for c in tried if is_same(c.plan, self.semantics)), key=per_batch_s)
            further = (behind[2**k] for k in range(2, (len(behind) - 1).bit_length()))
            rivals += [*behind[:NEXT_IN_FULL], *further]
        for rival in rivals:
            if full.best is None or per_batch_s(rival) < per_batch_s(full.best) * (1 - SAME_FRAC):
                full.consider(self.simulate_plan.in_full(rival.plan))
        return full.best

    def _consider_spared(self, plan: Plan) -> None:
        """The plan without drives, beside the budget and the search, which it does not change."""
        if isinstance(plan, UnitwisePlan) and (spared := off_drives(plan)) != plan:
            ops_left = self.budget.ops_left
            self.spared.consider(self.simulate_plan(spared))
            self.budget.ops_left = ops_left

    def _spares_drives(self, best: Candidate[Plan]) -> Candidate[Plan]:
        """What host memory has room for, at no cost in time, stays off the drives: they wear, and may not be there."""
        self._consider_spared(best.plan)  # and so was every best of this division: a longer search ends no worse
        tried = self.spared.best and self.simulate_plan.in_full(self.spared.best.plan)
        return tried if tried and tried.fits and per_batch_s(tried) <= per_batch_s(best) else best

    def _chain(self, order: Order, nums: Sequence[int], share: float, solver: Solver) -> OrderSearch:
        incumbents = self._no_incumbents()
        problems = [self.posed(order, num, keeps=keeps) for num in nums for keeps in self.keeps]
        left, bounds, without_room = self.budget.ops_left, list[Bound](), set[int]()
        for p in problems:  # where those that keep nothing have none, others do not
            bounds.append(IMPOSSIBLE if p.sub_batches in without_room else self._bound(p, solver))
            without_room |= set() if bounds[-1].feasible else {p.sub_batches}
        problems = [b.model.problem if b.model else p for p, b in zip(problems, bounds, strict=True)]
        from_program = ProgramPlans(solver, self.simulate_plan, incumbents, notes=self.notes)
        able = (pair for pair in zip(problems, bounds, strict=True) if pair[1].feasible and pair[1].model)
        pairs = [off_idle_drives(*pair, lambda p: self._bound(p, Solver(seed=self.seed))) for pair in able]
        pairs.sort(key=lambda pair: pair[1].searched_s * SUB_BATCH_PENALTY ** (pair[0].sub_batches - 1))
        racers = [
            Racer(tried(from_program, p, bound, self.seeds.by_shape, self.seed), bound.searched_s) for p, bound in pairs
        ]

        def meet() -> list[Racer]:
            if (best := incumbents.plain) is not None:
                for racer, (p, _) in zip(racers, pairs, strict=True):
                    incumbents.consider(same := self.simulate_plan(with_shape_of(best.plan, p)))
                    racer.best_s = min(racer.best_s, same.step_s or inf)
            return []

        going = race(racers, self.budget, meet=meet)
        spent_ops = left - self.budget.ops_left if self.num_devices == 1 else 0.0  # of several, bounds are beside it
        return OrderSearch(problems, bounds, from_program, share, spent_ops, racers, going)

    def _bound(self, p: Problem, solver: Solver) -> Bound:
        started = time.perf_counter()
        bound = lower_bound(p, solver=solver, beat_s=self._to_beat_s())
        self.bound_s += time.perf_counter() - started
        if bound.solution is not None:
            self.budget.ops_left -= bound.solution.work_ops
        return bound

    def _bound_of_all(self, plan: Plan, problems: list[Problem], bounds: list[Bound]) -> Bound:
        """The least bound over the shapes, with that of the best plan's own if a policy has another one."""
        if not isinstance(plan, UnitwisePlan) or plan.operator_tiles > 1 or plan.segment_units > 1:
            what = "packs, pages, segments or tiles: its bound is that of the totals"
            self.notes += [f"the best plan works in {what}"] if self.num_devices == 1 else []
            return bound_of_totals(self.of_one_device("horizontal", 1, plan.semantics), plan.num_batches)
        if self.num_devices > 1:
            in_shards = bounds if self.devices > 1 and plan.semantics == self.semantics else ()
            shapes = dict.fromkeys([*((order, 1) for order in get_args(Order)), (plan.order, plan.sub_batches)])
            posed = [self.of_one_device(*shape, plan.semantics) for shape in shapes]
            return bound_of_several(posed, self.num_devices, plan.num_batches, in_shards)
        own = self.posed(plan.order, plan.sub_batches, plan.semantics)
        if all((own.semantics, own.order, own.sub_batches) != (p.semantics, p.order, p.sub_batches) for p in problems):
            bounds = [*bounds, self._bound(own, Solver(seed=self.seed))]
        return min(bounds, key=lambda b: b.step_s)

    def posed(
        self, order: Order, sub_batches: int, semantics: Semantics | None = None, keeps: Keeps = "nothing"
    ) -> Problem:
        posed = self.of_one_device(order, sub_batches, semantics)
        if self.devices > 1:
            cuts = self.divided == "tensors"
            posed = tensor_parallel(posed, self.devices) if cuts else sharded(posed, self.devices, keeps)
        if not isinstance(self.like, UnitwisePlan):
            return posed
        brings = any(c.updates_here and c.states != "device" for c in self.like.units)
        return posed if brings else replace(posed, brings_states=False)

    def of_one_device(self, order: Order, sub_batches: int, semantics: Semantics | None) -> Problem:
        posed = problem(
            self.workload,
            self.machine,
            semantics=semantics or self.semantics,
            order=order,
            sub_batches=sub_batches,
            write_limit_bytes_per_s=self.write_limit_bytes_per_s,
        )
        return replace(posed, has_nvme=False) if needs_no_drives(self.machine, self.workload) else posed

    def _compare(self, names: Collection[str]) -> tuple[dict[str, Callable[..., PolicyResult]], Incumbents]:
        """What the policies that were asked for reach; and of all policies, the best plans for the search.

        The search is the same whatever it is compared with.
        """
        seeds, is_on_several = self._no_incumbents(), self.num_devices > 1
        compared = Compared(self.workload, self.asked, self.asked_semantics, self.batches, self.simulate_plan)

        def consider(plan: Plan, *, is_asked: bool = True) -> None:
            seeds.consider(candidate := self.simulate_plan(plan))
            if is_asked:
                self.incumbents.consider(candidate)

        def from_policies(some: Iterable[str]) -> None:
            for name, plan, is_other_work in compared.plans(some):
                is_asked = name in names and not is_other_work
                if self.devices > 1 and isinstance(plan, UnitwisePlan) and name not in NEED_SEVERAL_DEVICES:
                    consider(replace(plan, devices=self.devices, sharing=Sharing()), is_asked=False)
                if not is_other_work and (is_asked or seeds.is_start(plan)):
                    consider(plan, is_asked=is_asked)

        if self.like is not None and is_on_several:
            consider(self.like)
        else:
            near = compared.near()
            from_policies(name for name in POLICIES if name not in near)
            for plan in near.values():
                consider(plan, is_asked=False)
            most_s = NEAR * min(self.best_s, self.beat_s)
            from_policies(name for name, plan in near.items() if (self.simulate_plan(plan).step_s or 0.0) <= most_s)
        if self.known is not None:
            consider(self.known.plan)
        if self.devices > 1 and self.like is None:  # a shard may fit where the whole does not
            whole = POLICIES["in-memory"](self.workload, self.machine, {"sharing": "fsdp"})
            if isinstance(whole, UnitwisePlan) and is_same(whole, self.semantics):
                for sharing in (Sharing(keeps=keeps) for keeps in self.keeps):
                    for way in (sharing, reducing(sharing)):
                        consider(replace(whole, policy=PLANNER, options={}, devices=self.devices, sharing=way))
        self.budget.ops_left = self.budget.num_ops  # comparing is beside the budget of the search
        return compared.results(names), seeds

    def _rounds(self) -> Iterator[None]:
        """The chains in turns. Each order has its own share of every round, whatever the others found; what is left is
        for the best. So all orders together do all that one alone does, and more work does all that less does.
        """
        goal_ops = 0.0
        for ops in rounds(self.budget.ops_left if self.num_devices > 1 else self.budget.num_ops):
            goal_ops += ops
            able = [c for c in self.chains if not c.is_over and c.least_s < self._to_beat_s()]
            for chain in able:
                self._go_on_with(chain, chain.share * goal_ops + chain.more_ops)
            if able and self.has_all_orders:
                best = min(able, key=lambda c: c.best_s)
                best.more_ops += ops * (1 - sum(c.share for c in able))
                self._go_on_with(best, best.share * goal_ops + best.more_ops)
            if self.budget.is_out_of_time:
                break
            yield
        else:
            for chain in self.chains if self.devices == 1 or self.best_s == self.beat_s == inf else ():
                if chain.found.plain is None and chain.least_s < self._to_beat_s():
                    self._go_on_with(chain, inf)
            yield from self._more()

    def _more(self) -> Iterator[None]:
        """Where the best plan is far from all bounds: more of the most promising search, as long as that pays. Whatever
        others have found, it does all that it does when asked by itself."""
        budget = self.budget
        until_ops = budget.ops_left - budget.more_ops
        least_s = min((bound.searched_s for chain in self.chains for bound in chain.bounds), default=inf)
        while able := [chain for chain in self.chains if not chain.is_over]:
            best = self.incumbents.best
            is_near = best is None or per_batch_s(best) * self.num_batches <= FAR * least_s
            is_done = is_near or least_s >= self._to_beat_s() or budget.ops_left <= until_ops
            is_done = is_done or budget.is_stale(least_s)
            if is_done or budget.is_out_of_time or not self.has_all_orders:
                return
            chain = min(able, key=lambda c: c.best_s * c.least_s**BOUND_WEIGHT)
            self._go_on_with(chain, chain.spent_ops + MOST_OPS)
            yield

    def _go_on_with(self, chain: OrderSearch, ops: float) -> None:
        """The search of one chain until it has spent so much; without end, until it has found something that fits."""
        while not chain.is_over and chain.spent_ops < ops and not self.budget.is_out_of_time:
            before, found = self.budget.ops_left, chain.found.plain
            has_ended = next(chain.race, chain) is chain
            chain.is_over = has_ended or all(r.is_over or r.bound_s >= self.beat_s for r in chain.racers)
            chain.spent_ops += before - self.budget.ops_left
            if chain.found.plain is not None:
                self.incumbents.consider(chain.found.plain)
                if chain.found.plain is not found:
                    self._consider_spared(chain.found.plain.plan)
                self.budget.note(self.best_s)
                if ops == inf:
                    return

    def _to_beat_s(self) -> float:
        """What a bound has to be below, for its chain to be worth searching."""
        best = self.incumbents.best
        return self.beat_s if best is None else min(self.beat_s, per_batch_s(best) * self.num_batches)

    def _result(self, best: Candidate[Plan], bound: Bound, status: Status) -> PlanResult:
        assert best.step_s is not None
        columns = Lowering(self.workload, self.asked).columns(best.plan)
        steady = steady_state(columns, self.asked)
        is_solvers = bound.step_s <= best.step_s * (1 + SOLVER_FRAC)
        return PlanResult(
            prediction=predicted(best.plan, columns, steady, self.workload, self.asked),
            lower_bound_s=min(bound.step_s, best.step_s) if is_solvers else bound.step_s,
            solve_s=self.bound_s + sum(chain.from_program.solve_s for chain in self.chains),
            total_s=time.perf_counter() - self.started,
            status=status,
            compared=self.compared,
            bound_shares=bound.shares,
            s_per_gb=bound.s_per_gb,
            num_simulated=self.simulate_plan.num_simulated,
            solver=SOLVER,
            seed=self.seed,
            notes=tuple(self.notes),
            milp_gap=next((c.from_program.milp_gap for c in sorted(self.chains, key=lambda c: c.best_s)), None),
        )
