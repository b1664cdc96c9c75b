"""Which updates wait for the next step: those that backward has no time for."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from functools import cache

from tierplan.hwmodels.names import HOST_ADAM, NVME_READ, NVME_WRITE
from tierplan.planner.milp.amounts import Problem
from tierplan.planner.plan import UnitPlan, UnitwisePlan


def late_updates(problem: Problem, plan: UnitwisePlan, *, stretch: float) -> UnitwisePlan:
    """The plan with the updates late that backward has no time for.

    Updates are nested: the unit whose gradients come last is needed first. So whenever the host is free, the latest
    gradients are served first; what is left when backward ends is late, and runs beside the next forward in order of
    need. `stretch` scales the time that backward takes: 0 makes all updates late, infinity none.
    """
    if plan.semantics != "in-backward":
        return plan
    if stretch == float("inf"):
        return replace(plan, units=_with_late(plan, set()))
    rates = problem.rates
    units = problem.units
    seconds = []
    for unit, choice in zip(units, plan.units, strict=True):
        if choice.updates_here or not unit.gparams:
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
