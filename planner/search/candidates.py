"""Search by simulation: every candidate plan is lowered and simulated to its steady state, and the quickest is kept.

The fluid program cannot see that buffers are whole, that grants come in list order, or that a stream serves one op at
a time. So its plans are rounded with several margins, given several windows and several choices of late updates, and
then improved by local moves. The budget is counted in simulated ops, not in seconds, so a result does not depend on
the clock unless the time limit is reached.

A local move is wanted only where it makes the step quicker. So the plan that it makes is first looked at beside the one
that it began with: what takes longer for one step by itself mostly does for steps in a row, which take as long again to
simulate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from math import inf
from typing import Any, Generic, TypeVar

from tierplan.hwmodels.machine import Machine, MachineError
from tierplan.planner.lowering import Lowering
from tierplan.planner.milp.rates import GB
from tierplan.planner.plan import PackPlan, PagedPlan, Plan, UnitwisePlan
from tierplan.planner.plan_rules import PlanError
from tierplan.planner.questions.endurance import written_bytes
from tierplan.planner.search.budget import Budget
from tierplan.planner.several_devices.alike import do_the_same
from tierplan.sim.analysis.completion import OutOfMemory, check_memory
from tierplan.sim.analysis.ordering import refinements
from tierplan.sim.analysis.steady import steady_state
from tierplan.sim.columns import ScheduleColumns
from tierplan.sim.compiled.compiler import interrupts_wait
from tierplan.sim.compiled.graph_columns import GraphColumns, graph_columns
from tierplan.sim.compiled.readiness import least_free
from tierplan.sim.compiled.simulation import KnownRows, prices_on
from tierplan.sim.output.text import digits, format_s
from tierplan.sim.schedule import ScheduleError
from tierplan.sim.workloads.workload import Workload

PlanT = TypeVar("PlanT", bound=Plan)
OPS_TO_LOWER, OPS_TO_ORDER, OPS_TO_SIMULATE = 600, 250, 400
"""What a candidate costs beside what grows with its ops, in simulated ops that take as long."""
LOOKS_FRAC = (0.03, 0.02)
"""By how much one step by itself takes longer, in its first order and in its second, than that of the best plan so far
where a plan is simulated no further. Of what would have been quicker, few are left out, and those that gain least."""
OPS_TO_SHARE, OPS_TO_BUILD = 2, 16
"""What each op costs beside that: of what several devices divide, whose schedules are long, and of packs."""
PlanT_co = TypeVar("PlanT_co", bound=Plan, covariant=True)


@dataclass(frozen=True, slots=True)
class Candidate(Generic[PlanT_co]):
    """A plan that was simulated, or the reason why it does not run."""

    plan: PlanT_co
    step_s: float | None
    why: Callable[[], str] = str
    """Says why it does not run: names and sizes, which take longer to put together than a simulation."""
    short_tier: str = ""
    """Kind of the tier that it has too little of."""
    room_gb: Mapping[str, float] = field(default_factory=dict)
    """By kind of tier: what is always free when its ops run one by one, below 0 for what they would need more; of what
    several devices share, the part of each."""
    wear: float = 0.0
    """What it writes to NVMe per second, over what it may for the drives to last; above 1 it has no step time."""
    looks_s: tuple[float, ...] = ()
    """One step by itself, as each of its orders in turn takes it to be."""
    is_estimate: bool = False
    """Its step is as much longer than that of another plan as one step by itself is: it was not simulated further."""

    def slower_s(self, looks_s: Sequence[float]) -> float | None:
        """The estimated step of a plan that by these is slower; None where it may not be."""
        if self.step_s is None or len(looks_s) > len(self.looks_s):
            return None
        k = len(looks_s) - 1
        is_slower = looks_s[k] > (1 + LOOKS_FRAC[k]) * self.looks_s[k] > 0
        return self.step_s * looks_s[k] / self.looks_s[k] if is_slower else None

    @property
    def fits(self) -> bool:
        return self.step_s is not None

    @property
    def reason(self) -> str:
        """Why it does not run; empty if it does."""
        return self.why()


class PlanSimulator:
    """Lowers and simulates plans, each one once. With a limit on writing to NVMe, plans that exceed it do not fit."""

    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        budget: Budget,
        *,
        write_limit_bytes_per_s: float = inf,
        draws_all: bool = False,
    ) -> None:
        self.workload, self.machine, self.budget = workload, machine, budget
        self.write_limit_bytes_per_s = write_limit_bytes_per_s
        self.lowering = Lowering(workload, machine)
        self.known_rows: dict[int, KnownRows] = {}
        self.draws_all = draws_all
        """Whether each device is simulated where all do the same, too."""
        self._full: PlanSimulator | None = None
        self.seen: dict[tuple[object, ...], Candidate[Any]] = {}
        self.num_simulated = 0
        training = workload.training
        self.sizes = [
            (u.num_trained * training.param_bytes, u.frozen_bytes, training.states_bytes(u)) for u in workload.units
        ]
        """Of each unit's trained and frozen parameters and states, in bytes."""

    def __call__(self, plan: PlanT, beside: Candidate[PlanT] | None = None) -> Candidate[PlanT]:
        """The candidate of a plan. A plan that contradicts itself or does not fit becomes one with a reason; what looks
        slower than the one of the same shape that it is put `beside` becomes an estimate."""
        decisions = (getattr(plan, f.name) for f in fields(plan) if f.name not in ("policy", "options"))
        key = (type(plan), *decisions)
        known = self.seen.get(key)
        if known is None or (known.is_estimate and not (beside and beside.slower_s(known.looks_s))):
            began_s = self.budget.computed_s
            with interrupts_wait():
                known = self.seen[key] = self._simulate(plan, beside)
            self.budget.last_s = self.budget.computed_s - began_s
        return replace(known, plan=plan)

    def in_full(self, plan: PlanT) -> Candidate[PlanT]:
        """The candidate with every device drawn."""
        is_alike = do_the_same(plan)
        if not is_alike:
            return self(plan)
        if self._full is None:
            limit = self.write_limit_bytes_per_s
            asked = self.workload, self.machine, self.budget
            self._full = PlanSimulator(*asked, write_limit_bytes_per_s=limit, draws_all=True)
        return self._full(plan)

    def _simulate(self, plan: PlanT, beside: Candidate[PlanT] | None) -> Candidate[PlanT]:
        self.num_simulated += 1
        if too_large := self._too_large(plan):
            return too_large
        room_gb, looks_s = dict[str, float](), tuple[float, ...]()
        try:
            columns, machine = self._posed(plan)
            rows = self.known_rows.setdefault(id(machine), {})
            graph, prices = graph_columns(columns), prices_on(columns, machine, rows)
            room_gb = self._room_gb(graph, plan)
            self.budget.ops_left -= OPS_TO_LOWER + columns.num_ops // 2 + _ops_to_draw(plan) * columns.num_ops
            if min(room_gb.values()) < 0:  # there is no better order, and memory is known to do without simulating
                check_memory(columns, graph)
            else:
                for refined, end_s in refinements(columns, machine, graph, prices, overtakes=plan.overtaking):
                    self.budget.ops_left -= len(looks_s) * (OPS_TO_ORDER + columns.num_ops * 3 // 10)
                    columns, looks_s = refined, (*looks_s, end_s)
                    if beside and (step_s := beside.slower_s(looks_s)):
                        return Candidate(plan, step_s, room_gb=room_gb, looks_s=looks_s, is_estimate=True)
            self.budget.ops_left -= OPS_TO_SIMULATE + columns.num_ops // 2
            step_s = steady_state(columns, machine, prices=prices).period_s
        except OutOfMemory as error:
            kind = next(t.kind for t in self.machine.tiers if t.name == error.tier)
            short_gb = (error.wanted_bytes - error.free_bytes) / GB / (1 if kind == "device" else _num_parts(plan))
            room_gb[kind] = min(room_gb.get(kind, 0.0), -short_gb)
            return Candidate(plan, None, partial(self._what_is_short, plan), short_tier=kind, room_gb=room_gb)
        except (PlanError, ScheduleError, MachineError) as error:
            self.budget.ops_left -= 100
            return Candidate(plan, None, partial(str, error))
        if self.write_limit_bytes_per_s == inf:
            return Candidate(plan, step_s, room_gb=room_gb, looks_s=looks_s)
        written = written_bytes(columns)
        wear = written / step_s / self.write_limit_bytes_per_s
        if wear > 1:
            reason = (
                f"writes {written / GB:.1f} GB to NVMe in a step of {format_s(step_s)}, {digits(wear)} times what the "
                f"drives may take to last as long as was asked; its step would have to take {format_s(wear * step_s)}"
            )
            return Candidate(plan, None, partial(str, reason), wear=wear)
        return Candidate(plan, step_s, wear=wear, room_gb=room_gb, looks_s=looks_s)

    def _posed(self, plan: Plan) -> tuple[ScheduleColumns, Machine]:
        if self.draws_all:
            return self.lowering.columns(plan, refine=False), self.machine
        return self.lowering.simulated(plan)

    def _room_gb(self, graph: GraphColumns, plan: Plan) -> dict[str, float]:
        kinds = [t.kind for t in self.machine.tiers]
        free_gb = (least_free(graph) / GB).tolist()
        least = {kind: min(gb for of, gb in zip(kinds, free_gb, strict=True) if of == kind) for kind in kinds}
        return {kind: gb / (1 if kind == "device" else _num_parts(plan)) for kind, gb in least.items()}

    def _what_is_short(self, plan: Plan) -> str:
        """Why a plan runs out of memory, found once more: schedules are not kept."""
        for columns, machine in ((self.lowering.columns(plan), self.machine), self.lowering.simulated(plan)):
            try:
                check_memory(columns)
                steady_state(columns, machine)
            except OutOfMemory as error:
                # not str(error), which looks for the capacity that would do by executing the schedule many times
                return error.what
        raise AssertionError(f"plan {plan.policy!r} ran out of memory when it was tried, and does not now")

    def _too_large(self, plan: PlanT) -> Candidate[PlanT] | None:
        """What parameters and states alone say, at once: the commonest reason why a plan does not fit.

        Of what several devices divide, each holds a shard.
        """
        held = {"device": 0, "host": 0, "nvme": 0}
        match plan:
            case UnitwisePlan(units=choices, devices=num, sharing=sharing) if len(choices) == len(self.sizes):
                num_owners = num if sharing.divided in ("all", "tensors") else 1
                num_updaters = num if sharing.divided != "nothing" else 1
                for (params_bytes, frozen_bytes, states_bytes), choice in zip(self.sizes, choices, strict=True):
                    in_host = int(states_bytes * choice.host_frac) if choice.host_shards else 0
                    for place, size, num_shards in (
                        (choice.params, params_bytes, num_owners),
                        (choice.frozen or choice.params, frozen_bytes, num_owners),
                        ("host", in_host, 1),
                        (choice.states, states_bytes - in_host, num_updaters),
                    ):
                        held[place] += size // num_shards if place == "device" else size
            case PagedPlan():
                held["host"] = plan.devices * sum(map(sum, self.sizes))
            case PackPlan(packs=packs) if not packs.stays:
                held["host"] = sum(map(sum, self.sizes))
            case UnitwisePlan() | PackPlan():
                return None
        capacity = {t.kind: t for t in reversed(self.machine.tiers)}
        for kind, size in held.items():
            if kind in capacity and size > capacity[kind].capacity_bytes:
                tier = capacity[kind]
                reason = (
                    f"{size:,} bytes of parameters and optimizer states are to be in tier {tier.name!r}, which has "
                    f"{tier.capacity_bytes:,}"
                )
                room_gb: dict[str, float] = {of: (t.capacity_bytes - held[of]) / GB for of, t in capacity.items()}
                return Candidate(plan, None, partial(str, reason), short_tier=kind, room_gb=room_gb)
        return None


def _num_parts(plan: Plan) -> int:
    """Of what all devices share, for which a problem is posed that is one device's."""
    return plan.devices if isinstance(plan, UnitwisePlan) else 1


def _ops_to_draw(plan: Plan) -> int:
    """What each op of its schedule costs beside what it does in plans of units on one device."""
    if isinstance(plan, PackPlan):
        return OPS_TO_BUILD
    return OPS_TO_SHARE if isinstance(plan, UnitwisePlan) and plan.devices > 1 else 0
