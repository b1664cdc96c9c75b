"""From a solution's shares to a plan: every unit gets one placement, every tensor one action.

Error diffusion along the chain: each choice keeps a running deficit (what the solution has given it so far, less what
it got), and each unit takes the choice with the largest deficit. So every prefix of the chain is within one unit of the
solution, which keeps the memory profile over time, not only its total. Choices that the solution all but decides are
taken as they are. A unit that is like no other, such as an embedding, may be as large as many that are alike: where
that is too much for the device, the solution is rounded with less of such units there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from tierplan.planner.milp.amounts import Problem
from tierplan.planner.milp.model import Fractions
from tierplan.planner.milp.modes import MODES
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.planner.plan_rules import ACTIONS, PLANNER
from tierplan.sim.step import Action

Name = TypeVar("Name", int, str)
DECIDED = 1e-6
MOSTLY = 0.5
"""Share of a unit's tied gradients from which on all wait in host memory."""


def round_to_plan(problem: Problem, shares: Fractions, *, spares_device: bool = False) -> UnitwisePlan:
    """The plan nearest to the solution's shares, in the sense of the module's docstring.

    With `spares_device`, units that are like no other have as little at home on the device as any of their shares has,
    and tied gradients wait in host memory if any do.
    """
    sizes = [(u.gparams, u.frozen_gb) for u in problem.units]
    places = shares.place
    if spares_device:
        alone = [sizes.count(size) == 1 for size in sizes]
        places = tuple(_sparing(p) if is_alone else p for p, is_alone in zip(places, alone, strict=True))
    modes = _diffuse(places, [max(sum(size), 1e-12) for size in sizes], sizes)
    num_groups = max((len(groups) for groups in shares.action), default=0)
    actions: list[list[str]] = [[] for _ in problem.units]
    for g in range(num_groups):
        with_group = [u for u, groups in enumerate(shares.action) if g < len(groups)]
        chosen = _diffuse(
            [shares.action[u][g] for u in with_group],
            [max(problem.units[u].groups[g].gb, 1e-12) for u in with_group],
            [_kind(problem, u, g) for u in with_group],
        )
        for u, name in zip(with_group, chosen, strict=True):
            actions[u].append(name)
    units = tuple(_unit_plan(problem, u, modes[u], actions[u]) for u in range(len(problem.units)))
    least = DECIDED if spares_device else MOSTLY
    units = tuple(
        replace(choice, tied_grads="host") if share > least else choice
        for choice, share in zip(units, shares.tied, strict=True)
    )
    plan = UnitwisePlan(
        policy=PLANNER, units=units, semantics=problem.semantics, order=problem.order, sub_batches=problem.sub_batches
    )
    return _without_late_uploads(plan) if problem.semantics == "exact-clip" else plan


def _without_late_uploads(plan: UnitwisePlan) -> UnitwisePlan:
    """With updates behind backward: no parameters at home on the device, but updated elsewhere, behind fetched ones.

    Their way home is the last thing that the link does in a step, and waits for the last updates; the next forward's
    fetches are listed behind it. So one such unit would keep the whole next forward waiting for all updates.
    """
    fetched = [u for u, choice in enumerate(plan.units) if {choice.params, choice.frozen} & {"host", "nvme"}]
    if not fetched:
        return plan
    return replace(
        plan,
        units=tuple(
            replace(choice, params="host")
            if u > fetched[0] and choice.params == "device" and not choice.updates_here
            else choice
            for u, choice in enumerate(plan.units)
        ),
    )


def actions_of(problem: Problem, plan: UnitwisePlan) -> list[list[str]]:
    """By unit and group of tensors: the plan's action; of an input that nothing needs again, "recompute"."""
    found = []
    for unit, choice in zip(problem.units, plan.units, strict=True):
        acts: list[str] = [choice.action(group.slots[0]) if group.slots else choice.input for group in unit.groups]
        if acts and not unit.groups[0].slots and unit.groups[0].recomputable and "recompute" not in acts[1:]:
            acts[0] = "recompute"
        found.append(acts)
    return found


def _kind(problem: Problem, u: int, g: int) -> tuple[object, ...]:
    """Tensors that compare: of one size and one cost of making them again."""
    group = problem.units[u].groups[g]
    return (round(group.gb, 9), round(group.recompute_s, 9), group.recomputable, group.movable)


def _diffuse(shares: Sequence[Mapping[Name, float]], weights: Sequence[float], kinds: Sequence[object]) -> list[Name]:
    """One choice per position; deficits run along positions of the same kind."""
    deficits: dict[object, dict[Name, float]] = {}
    chosen = []
    for share, weight, kind in zip(shares, weights, kinds, strict=True):
        deficit = deficits.setdefault(kind, {})
        for name, value in share.items():
            deficit[name] = deficit.get(name, 0.0) + value * weight
        decided = [name for name, value in share.items() if value > 1 - DECIDED]
        best = decided[0] if decided else max(share, key=lambda name: (round(deficit[name], 9), -_rank(name)))
        deficit[best] -= weight
        chosen.append(best)
    return chosen


def _sparing(share: Mapping[int, float]) -> dict[int, float]:
    """The placement with least on the device, of those that have a share."""
    some = [k for k, value in share.items() if value > DECIDED]
    return {min(some, key=lambda k: [MODES[k].states, MODES[k].params, MODES[k].frozen].count("device")): 1.0}


def _rank(name: int | str) -> int:
    """Settles ties: the cheaper choice to carry out comes first."""
    return name if isinstance(name, int) else ACTIONS.index(name)


def _unit_plan(problem: Problem, u: int, mode: int, actions: Sequence[str]) -> UnitPlan:
    unit = problem.units[u]
    num_slots = sum(len(g.slots) for g in unit.groups)
    acts: list[Action] = ["keep"] * num_slots
    x: str = "keep"
    for group, action in zip(unit.groups, actions, strict=True):
        if not group.slots and action != "recompute":
            x = action
        for slot, act in group.acts(action).items():  # type: ignore[arg-type]
            acts[slot] = act
    return replace(MODES[mode], input=x, acts=unit.acts(acts))  # type: ignore[arg-type]
