"""Candidates from the planning program: its plan is rounded, and what it cannot decide is tuned by simulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache
from math import inf

from tierplan.hwmodels.names import HOST_ADAM, NVME_READ, NVME_WRITE
from tierplan.planner.milp.amounts import Problem
from tierplan.planner.milp.bounds import Bound, solver_of
from tierplan.planner.milp.integral import solve_whole
from tierplan.planner.milp.model import Margins, Model, fractions, with_margins
from tierplan.planner.milp.program import LP_TIME_LIMIT_S, Solver
from tierplan.planner.milp.rounding import round_to_plan
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.planner.search.candidates import Candidate, PlanSimulator
from tierplan.planner.search.incumbents import Incumbents
from tierplan.planner.search.knobs import Knobs, tune
from tierplan.planner.search.local.moves import on_its_devices, with_late_here, with_shards, with_windows

MOST_TIMES_BLOCKS = 2.0
"""Times the largest thing of blocks that a granule of margins is at most: with one of a large embedding, all windows
would leave unused what one of them needs."""
WRITE_FRACS = (0.8, 0.5, 0.25, 0.1, 0.03, 0.01)
"""Shares of the drives' endurance that are planned with, one after the other, while simulated plans exceed it."""


@dataclass
class ProgramPlans:
    """Solves, rounds, tunes and simulates, one shape after the other."""

    solver: Solver
    simulate_plan: PlanSimulator
    incumbents: Incumbents
    """Take every candidate."""
    solve_s: float = 0.0
    milp_gap: float | None = None
    """Of the last integral program that was solved."""
    notes: list[str] = field(default_factory=list)

    def tried(self, p: Problem, bound: Bound, *, goal_s: float) -> Iterator[float]:
        """One shape, plan by plan, with the shortest step so far: tunes the knobs by simulation, until a step of
        `goal_s`; then takes the integral program's plan at the best knobs too."""
        model = bound.model
        assert model is not None
        solved: dict[tuple[float, ...], list[UnitwisePlan]] = {}
        lacking: list[Margins] = []
        units = granules(p)

        def trial(knobs: Knobs) -> Candidate[UnitwisePlan] | None:
            write_frac = 1.0
            while True:
                key = (knobs.rate_frac, knobs.device, knobs.host, write_frac)
                if key not in solved:
                    margins = replace(knobs.margins(p, *units), write_frac=write_frac)
                    solved[key] = self._solve(model, margins, lacking)
                if not solved[key]:
                    return None
                for plan in solved[key]:
                    tried = self.simulate_plan(_with_knobs(p, plan, knobs))
                    if tried.short_tier != "device":
                        break
                self.incumbents.consider(tried)
                if tried.wear <= 1.0 or write_frac == 0.0:
                    return tried
                # the program may have waited where the simulation does not: write less, in the end nothing at all
                write_frac = next((f for f in WRITE_FRACS if f * tried.wear < write_frac), 0.0)

        # late updates hold gradients in host memory: where that binds, begin without them
        stretch = float("inf") if bound.s_per_gb.get("host", 0.0) > 1e-6 else 1.5
        tuned = None
        for found in tune(
            trial,
            goal_s=goal_s,
            stretch=stretch,
            brings_states=p.brings_states,
            needs_states_here=bound.needs_states_here,
            granules_gb=units,
        ):
            tuned = found
            yield inf if found is None else found[1]
        if tuned is None:
            self.notes.append(f"{p.order}, {p.sub_batches} sub-batches: no rounded plan fitted")
            return
        knobs, best_s = tuned
        self.notes.append(f"{p.order}, {p.sub_batches} sub-batches: {knobs}")
        if best_s > goal_s:
            plan = self._solve_whole(model, knobs.margins(p, *units))
            if plan is not None:
                self.incumbents.consider(self.simulate_plan(_with_knobs(p, plan, knobs)))
                yield best_s

    def _solve(self, model: Model, margins: Margins, lacking: list[Margins]) -> list[UnitwisePlan]:
        """The solution's plan, and if that differs, the one that is to be tried where the device has no room for it.

        `lacking` are margins that leave too little memory; so do wider ones.
        """
        if any(margins.leave_no_more(than) for than in lacking):
            return []
        changed = with_margins(model, margins)
        limit_s = min(self.simulate_plan.budget.left_s, LP_TIME_LIMIT_S)
        solution = solver_of(model.problem, self.solver).solve(changed.program, time_limit_s=limit_s)
        self.solve_s += solution.seconds
        self.simulate_plan.budget.ops_left -= solution.work_ops
        if solution.status == "infeasible":
            lacking.append(margins)
        if not solution.usable:
            return []
        shares = fractions(changed, solution)
        near, sparing = (round_to_plan(model.problem, shares, spares_device=spares) for spares in (False, True))
        return [near] if sparing == near else [near, sparing]

    def _solve_whole(self, model: Model, margins: Margins) -> UnitwisePlan | None:
        whole = solve_whole(model, margins, solver=solver_of(model.problem, self.solver))
        if whole is None:
            return None
        self.solve_s += whole.seconds
        self.simulate_plan.budget.ops_left -= whole.work_ops
        self.milp_gap = whole.gap
        return whole.plan


def _with_knobs(p: Problem, plan: UnitwisePlan, knobs: Knobs) -> UnitwisePlan:
    """What the program's plan leaves open, as the knobs have it."""
    in_shards = with_shards(with_shards(plan, knobs.brought_shards, "device"), knobs.shards, "home")
    in_time = with_late_here(late_updates(p, in_shards, stretch=knobs.stretch), knobs.late_here)
    return on_its_devices(replace(with_windows(in_time, knobs.windows), update_over_units=knobs.over_units), p)


def granules(p: Problem) -> tuple[float, float]:
    """What margins are counted in, in GB: about the largest thing that comes to the device, or to the host, at once."""
    is_block = [unit.kind == "block" for unit in p.workload.units]

    def granule(sizes_gb: Sequence[float]) -> float:
        of_blocks = (gb for gb, counts in zip(sizes_gb, is_block, strict=True) if counts)
        return min(max(sizes_gb), MOST_TIMES_BLOCKS * max(of_blocks, default=inf))

    groups = [[g.gb for g in u.groups] for u in p.units]
    device = [max([u.params_gb, *each]) for u, each in zip(p.units, groups, strict=True)]
    host = [max([u.grads_gb + u.params_gb + u.states_gb, *each]) for u, each in zip(p.units, groups, strict=True)]
    return granule(device), granule(host)


# ---- which updates wait for the next step ----


def late_updates(problem: Problem, plan: UnitwisePlan, *, stretch: float) -> UnitwisePlan:
    """The plan with the updates late that backward has no time for.

    Updates are nested: the unit whose gradients come last is needed first. So whenever the host is free, the latest
    gradients are served first; what is left when backward ends is late, and runs beside the next forward in order of
    need. `stretch` scales the time that backward takes: 0 makes all updates late, infinity none. With exact clipping
    backward has time for none, so it is all or none.
    """
    if plan.semantics == "delayed-1":
        return plan
    if stretch == float("inf"):
        return replace(plan, units=_with_late(plan, set()))
    if plan.semantics == "exact-clip":
        able = {u for u, choice in enumerate(plan.units) if choice.states != "device" and choice.grads != "nvme"}
        return replace(plan, units=_with_late(plan, able))
    rates = problem.rates
    units = problem.units
    seconds = []
    for unit, choice in zip(units, plan.units, strict=True):
        if choice.updates_here or not unit.gparams:
            seconds.append(0.0)
            continue
        gparams = problem.host_gparams(unit)
        loads = [gparams / rates.adam] if rates.adam else [0.0]
        if choice.states == "nvme":
            read, write = unit.states_gb / rates.read["states"], unit.states_gb / rates.write["states"]
            loads += [read, write]
            for per in problem.loads.values():
                streams = ((NVME_READ, unit.states_gb), (NVME_WRITE, unit.states_gb), (HOST_ADAM, gparams))
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
    return replace(plan, units=_with_late(plan, late))


def _with_late(plan: UnitwisePlan, late: Set[int]) -> tuple[UnitPlan, ...]:
    """The plan's choices with these updates of the host late, and no others."""
    changed = cache(lambda choice, is_late: replace(choice, late_update=is_late))
    return tuple(choice if choice.updates_here else changed(choice, u in late) for u, choice in enumerate(plan.units))


def _backward_s(problem: Problem, plan: UnitwisePlan, u: int) -> float:
    unit, choice = problem.units[u], plan.units[u]
    again = sum(g.recompute_s for g in unit.groups if g.slots and choice.action(g.slots[0]) == "recompute")
    update = unit.update_s if choice.updates_here else 0.0
    return (unit.bwd_s + again) * problem.turn + update
