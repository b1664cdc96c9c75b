"""Local moves: small changes of a plan that the search tries, in families, and the changes that they are made of.

A family yields moves for a plan; a move gives the changed plan, or None where it does not apply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from tierplan.planner.milp.amounts import Problem, UnitAmounts
from tierplan.planner.milp.modes import MODES, Mode
from tierplan.planner.milp.rates import STATE_SHARDS
from tierplan.planner.plan import PackPlan, Plan, Sharing, UnitPlan, UnitwisePlan
from tierplan.planner.plan_rules import ACTIONS, PLANNER, Place, TiedPlace, UpdatePlace
from tierplan.sim.workloads.workload import Workload

WINDOWS = ((1, 1, 1), (2, 2, 2), (1, 2, 2), (2, 1, 1), (3, 4, 3), (0, 0, 1), (1, 1, 4))
"""Prefetch windows that are tried: parameters, activations, states, in units."""
OVER_UNITS = (1, 2, 3)
"""Turns of units over which updates are spread whose states come to the device."""
LATE_WRITES = (0, 1, 2, 3, 4, 6, 8, 12, 16)
"""Units whose states are written when all have been read."""
TIED: tuple[TiedPlace, ...] = ("host", "device")
"""Where tied gradients may wait, in the order in which that is tried."""
SHORT_CHAIN = 6
BROUGHT_ONE_IN = (2, 3, 4, 6)
"""States of one in so many units come to the device: evenly spread, they are out of each other's way."""

LATE_ONE_IN = (0, 4, 3, 2, 1)
"""Of these, one in so many is updated in the next step; 0 for none."""

Move = Callable[[UnitwisePlan], UnitwisePlan | None]
"""From a plan to a neighbour, or to None where the move does not apply."""
Placement = tuple[Place, Place, Place, Place | None, UpdatePlace]
RANK = {"device": 0, "host": 1, "nvme": 2}
PARTS = ("states", "params", "frozen")
ON_DRIVES = (*PARTS, "grads", "input")
"""What of a unit may be on NVMe, beside what its forward saves."""
PLACEMENT = ("params", "frozen", "grads", "states", "update", "late_update", "state_shards", "host_shards")
"""What a choice says about where things live."""


def _promotions(problem: Problem, plan: UnitwisePlan) -> Iterator[Move]:
    """One unit's states or parameters a tier up, as long as memory has room: what rounding and margins left unused."""

    def up(u: int, part: str) -> Move:
        def move(plan: UnitwisePlan) -> UnitwisePlan | None:
            choice = plan.units[u]
            now = _rank(choice, part)
            others = [other for other in PARTS if other != part]
            for k in sorted(problem.modes(u), key=lambda k: -_rank(MODES[k], part)):
                mode = MODES[k]
                if _rank(mode, part) < now and all(_rank(mode, other) <= _rank(choice, other) for other in others):
                    return with_placement(plan, u, mode)
            return None

        return move

    for part in PARTS if any(unit.frozen_gb for unit in problem.units) else PARTS[:2]:
        for u in spread(len(plan.units)):
            yield up(u, part)


def _rank(where: UnitPlan | Mode, part: str) -> int:
    return RANK[getattr(where, part) or where.params]


def _kept(problem: Problem, plan: UnitwisePlan) -> Iterator[Move]:
    """One more tensor kept, the dearest to make again first; or moved rather than made again."""
    by_cost = []
    for u, unit in enumerate(problem.units):
        for g, group in enumerate(unit.groups):
            if group.slots and plan.units[u].action(group.slots[0]) != "keep":
                by_cost.append((-group.recompute_s / max(group.gb, 1e-12), u, g))

    def act(u: int, g: int, action: str) -> Move:
        return lambda plan: with_action(plan, problem, u, g, action)

    for _, u, g in sorted(by_cost):
        yield act(u, g, "keep")
    if problem.host_gb:
        for _, u, g in sorted(by_cost):
            if problem.units[u].groups[g].movable:
                yield act(u, g, "host")


def _windows(problem: Problem, plan: UnitwisePlan) -> Iterator[Move]:
    yield lambda plan: replace(plan, overtaking=not plan.overtaking)
    for overtaking in (False, True) if plan.semantics != "in-backward" else ():
        yield lambda plan, overtaking=overtaking: replace(turned(plan), overtaking=overtaking)  # type: ignore[misc]
    for windows in WINDOWS:
        yield lambda plan, windows=windows: with_windows(plan, windows)  # type: ignore[misc]
    for num in OVER_UNITS if any(choice.update == "device" for choice in plan.units) else ():
        yield lambda plan, num=num: replace(plan, update_over_units=num)  # type: ignore[misc]
    for num in LATE_WRITES if may_write_late(plan) else ():
        yield lambda plan, num=num: replace(plan, late_writes=num, updates_in_flight=0)  # type: ignore[misc]
    if problem.devices > 1 and problem.divided == "all":
        yield lambda plan: replace(plan, sharing=reducing(plan.sharing))
        yield lambda plan: replace(plan, sharing=gathering(plan.sharing))


def turned(plan: UnitwisePlan) -> UnitwisePlan:
    """The plan with its updates behind backward in the opposite order."""
    return replace(plan, update_order="backward" if plan.update_order == "forward" else "forward")


def may_write_late(plan: UnitwisePlan) -> bool:
    """Whether drives may be idle in backward, with too much to do later: where all updates wait for the norm."""
    on_drives = (choice.states == "nvme" and not choice.updates_here for choice in plan.units)
    return plan.semantics == "exact-clip" and any(on_drives)


def _loosened(problem: Problem, plan: UnitwisePlan) -> Iterator[Move]:
    yield loosened
    yield lambda plan: with_shards(loosened(plan), STATE_SHARDS[0])


def _shards(problem: Problem, plan: UnitwisePlan) -> Iterator[Move]:
    """States that travel in larger or smaller shards, at once for all units with updates in the same place."""
    for place in dict.fromkeys(choice.update for choice in plan.units if choice.states_travel):
        for num_shards in STATE_SHARDS:
            yield lambda plan, num=num_shards, place=place: with_shards(plan, num, place)  # type: ignore[misc]


def _brought(problem: Problem, plan: UnitwisePlan) -> Iterator[Move]:
    """States of one in so many units come to the device, and of no others."""
    for every in BROUGHT_ONE_IN if problem.brings_states else ():
        yield lambda plan, every=every: with_windows(with_brought_states(plan, every), (1, 1, 0))  # type: ignore[misc]
    for every in LATE_ONE_IN if any(choice.update == "device" for choice in plan.units) else ():
        yield lambda plan, every=every: with_late_here(plan, every)  # type: ignore[misc]
    for every in (1, *BROUGHT_ONE_IN) if problem.returns_grads else ():
        yield lambda plan, every=every: with_returned_grads(plan, every)  # type: ignore[misc]


def _host_shards(problem: Problem, plan: UnitwisePlan) -> Iterator[Move]:
    """Some more of one unit's states in host memory, where those of a whole unit have no room; or fewer."""

    def some(u: int, more: int) -> Move:
        def move(plan: UnitwisePlan) -> UnitwisePlan | None:
            choice = with_host_shards(plan.units[u], more)
            return None if choice is None else _with_unit(plan, u, choice)

        return move

    for more in (4, 1, -1):
        for u in spread(len(plan.units)):
            yield some(u, more)


def _tied(problem: Problem, plan: UnitwisePlan) -> Iterator[Move]:
    """Tied gradients wait elsewhere."""
    for place in TIED if any(unit.tied_gb for unit in problem.units) and problem.host_gb else ():
        yield lambda plan, place=place: with_tied(plan, problem.workload, place)  # type: ignore[misc]


def _lateness(problem: Problem, plan: UnitwisePlan) -> Iterator[Move]:
    """One update late, or no longer."""

    def toggle(u: int) -> Move:
        def move(plan: UnitwisePlan) -> UnitwisePlan | None:
            choice = plan.units[u]
            if choice.states == "device" or plan.semantics == "delayed-1":
                return None
            return _with_unit(plan, u, replace(choice, late_update=not choice.late_update))

        return move

    for u in spread(len(plan.units)):
        yield toggle(u)


def _placements(problem: Problem, plan: UnitwisePlan) -> Iterator[Move]:
    """Any other placement of one unit."""
    for u in spread(len(plan.units)):
        for k in problem.modes(u):
            yield lambda plan, u=u, k=k: with_placement(plan, u, MODES[k])  # type: ignore[misc]


def _actions(problem: Problem, plan: UnitwisePlan) -> Iterator[Move]:
    """Any other action on one unit's tensor, or on its input."""
    for u in spread(len(plan.units)):
        for g, group in enumerate(problem.units[u].groups):
            for action in (action for action in ACTIONS if problem.may_be(group, action)):
                yield lambda plan, u=u, g=g, action=action: with_action(plan, problem, u, g, action)  # type: ignore[misc]


def _swaps(problem: Problem, plan: UnitwisePlan) -> Iterator[Move]:
    """Two units exchange their placements: where along the chain something lives also matters."""
    order = spread(len(plan.units))
    for i, u in enumerate(order):
        for v in order[i + 1 :]:

            def move(plan: UnitwisePlan, u: int = u, v: int = v) -> UnitwisePlan | None:
                a, b = plan.units[u], plan.units[v]
                if placement_of(a) == placement_of(b) and a.late_update == b.late_update:
                    return None
                return _with_unit(_with_unit(plan, u, with_those_of(a, b)), v, with_those_of(b, a))

            yield move


def _joint(problem: Problem, plan: UnitwisePlan) -> Iterator[Move]:
    """On short chains: placement and action of one unit at once, then of two units at once."""
    num = len(plan.units)
    if num > SHORT_CHAIN:
        return
    choices = [[(k, action) for k in problem.modes(u) for action in ACTIONS] for u in range(num)]

    def both(*changes: tuple[int, int, str]) -> Move:
        def move(plan: UnitwisePlan) -> UnitwisePlan | None:
            for u, k, action in changes:
                plan = with_placement(plan, u, MODES[k])
                for g, group in enumerate(problem.units[u].groups):
                    if group.slots and problem.may_be(group, action):
                        plan = with_action(plan, problem, u, g, action)
            return plan

        return move

    for u in range(num):
        for k, action in choices[u]:
            yield both((u, k, action))
    for u in range(num):
        for v in range(u + 1, num):
            for k, action in choices[u]:
                for j, other in choices[v]:
                    yield both((u, k, action), (v, j, other))


FAMILIES: tuple[Callable[[Problem, UnitwisePlan], Iterator[Move]], ...] = (
    _loosened,
    _promotions,
    _kept,
    _windows,
    _shards,
    _host_shards,
    _tied,
    _brought,
    _lateness,
    _swaps,
    _placements,
    _actions,
    _joint,
)

GENERAL_FAMILIES = (_loosened, _windows, _shards, _tied, _brought)
"""Families whose moves change all units alike."""


def with_placement(plan: UnitwisePlan, u: int, mode: Mode) -> UnitwisePlan:
    """The plan with this placement of one unit."""
    return _with_unit(plan, u, placed(plan, plan.units[u], mode))


def placed(plan: UnitwisePlan, choice: UnitPlan, mode: Mode) -> UnitPlan:
    """The choice of one of the plan's units with this placement."""
    late = choice.late_update and mode.updated != "device" and mode.grads != "nvme"
    shards = _shards_of(plan, mode.update)
    places = {name: getattr(mode, name) for name in ("params", "grads", "states", "frozen", "update")}
    return in_shards(replace(choice, **places, late_update=late), shards)  # type: ignore[arg-type]


def placement_of(where: UnitPlan | Mode) -> Placement:
    """Where parameters, states, gradients and frozen parameters live, and where updates are made."""
    return where.params, where.states, where.grads, where.frozen, where.update


def nearer(problem: Problem, u: int, choice: UnitPlan, kind: Place) -> Mode | None:
    """The placement with what unit `u` has farther away in this kind of tier; None where nothing is or may be so."""

    def near(place: Place) -> Place:
        return place if RANK[place] < RANK[kind] else kind

    wanted = near(choice.params), near(choice.states), choice.frozen and near(choice.frozen)
    if wanted == (choice.params, choice.states, choice.frozen):
        return None
    modes = (MODES[k] for k in problem.modes(u))
    able = [mode for mode in modes if (mode.params, mode.states, mode.frozen) == wanted]
    same = (mode for mode in able if (mode.update, mode.grads) == (choice.update, choice.grads))
    return able[0] if able and wanted[1] == "device" else next(same, None)


def more_gb(unit: UnitAmounts, old: UnitPlan, new: UnitPlan | Mode, kind: Place) -> float:
    """By how much more parameters and optimizer states it has in a kind of tier with another placement."""

    def held_gb(where: UnitPlan | Mode) -> float:
        places = where.params, where.frozen or where.params, where.states
        sizes_gb = unit.params_gb, unit.frozen_gb, unit.states_gb
        return sum(gb for place, gb in zip(places, sizes_gb, strict=True) if place == kind)

    return held_gb(new) - held_gb(old)


def with_those_of(choice: UnitPlan, other: UnitPlan, names: Sequence[str] = PLACEMENT) -> UnitPlan:
    """The choice with what the other says of these; by default, all about where things live."""
    return replace(choice, **{name: getattr(other, name) for name in names})


def with_action(plan: UnitwisePlan, problem: Problem, u: int, g: int, action: str) -> UnitwisePlan:
    """The plan with this action on one group of a unit's tensors."""
    return _with_unit(plan, u, acting(plan.units[u], problem, u, g, action))


def acting(choice: UnitPlan, problem: Problem, u: int, g: int, action: str) -> UnitPlan:
    """The choice of unit `u` with this action on one group of its tensors; an input cannot be recomputed."""
    group = problem.units[u].groups[g]
    if not group.slots:
        return choice if action == "recompute" else replace(choice, input=action)  # type: ignore[arg-type]
    actions = [choice.action(k) for k in range(sum(len(other.slots) for other in problem.units[u].groups))]
    for k, act in group.acts(action).items():  # type: ignore[arg-type]
        actions[k] = act
    return replace(choice, acts=problem.units[u].acts(actions))


def _with_unit(plan: UnitwisePlan, u: int, choice: UnitPlan) -> UnitwisePlan:
    units = list(plan.units)
    units[u] = choice
    return replace(plan, units=tuple(units))


def spread(num: int) -> Sequence[int]:
    """0 ... num-1, far apart first: halves, quarters, ..."""
    order: list[int] = []
    step = 1
    while step < 2 * num:
        order += [i * num // step for i in range(step)]
        step *= 2
    return [u for u in dict.fromkeys(order) if u < num]


def with_shape_of(plan: UnitwisePlan, problem: Problem) -> UnitwisePlan:
    """The plan in the problem's order and sub-batches, with gradients where its turns leave them."""

    @cache
    def able(modes: Sequence[int]) -> set[Placement]:
        return {placement_of(replace(MODES[k], frozen=None)) for k in modes}

    @cache
    def changed(choice: UnitPlan, modes: Sequence[int]) -> UnitPlan:
        if choice.states == "device" or placement_of(replace(choice, frozen=None)) in able(modes):
            return choice
        other: Place = "host" if choice.grads == "device" else "device"
        return in_shards(replace(choice, grads=other, update="home"), choice.state_shards)

    plan = plan if problem.has_nvme else off_drives(plan)
    units = tuple(changed(choice, problem.modes(u)) for u, choice in enumerate(plan.units))
    reshaped = replace(plan, units=units, order=problem.order, sub_batches=problem.sub_batches)
    return on_its_devices(reshaped, problem)


def reducing(sharing: Sharing) -> Sharing:
    """The same with gradients that are summed over devices after other micro-batches."""
    return replace(sharing, reduces="each" if sharing.reduces == "last" else "last")


def gathering(sharing: Sharing) -> Sharing:
    """The same with parameters that are gathered ahead, or are so no longer."""
    return replace(sharing, ahead=not sharing.ahead)


def on_its_devices(plan: UnitwisePlan, problem: Problem) -> UnitwisePlan:
    """The plan on the problem's devices, which gather parameters ahead if they fetch them so, or wait for sums."""
    sharing = Sharing(keeps=problem.keeps, ahead=plan.prefetch_params_units > 0)
    if problem.divided == "tensors":
        sharing = Sharing(divided="tensors", waits=True)
    return replace(plan, policy=PLANNER, options={}, devices=problem.devices, sharing=sharing, fp32_by_link=False)


def loosened(plan: UnitwisePlan) -> UnitwisePlan:
    """A plan without what a system's fixed buffers prescribe: reads and writes overlap where memory has room, and
    nothing crosses the link wider than it is."""
    free: dict[str, Any] = {"strict_windows": False, "hold_updates": False, "fp32_by_link": False}
    return replace(plan, updates_in_flight=0, write_back="at once", **free)


def untied(plan: Plan, workload: Workload) -> Iterator[Plan]:
    """The plan with the bits of plain training: as it is; or, where tied gradients of all micro-batches have no room
    beside each other, with those in host memory, or one micro-batch after the other."""
    if not plan.sums_tied:
        yield plan
    elif isinstance(plan, PackPlan):
        yield replace(plan, packs=replace(plan.packs, sums_tied=False))
    elif isinstance(plan, UnitwisePlan):
        yield replace(plan, sums_tied=False)
        units = tuple(replace(unit, grads="host") if unit.grads == "device" else unit for unit in plan.units)
        own: dict[str, Any] = {"policy": PLANNER, "options": {}}  # no system does that
        yield replace(with_tied(plan, workload, "host"), sums_tied=False, **own)
        yield replace(plan, sums_tied=False, order="horizontal", units=units, **own)


def off_drives(plan: UnitwisePlan) -> UnitwisePlan:
    """The plan with everything in host memory that is on drives."""

    @cache
    def changed(u: UnitPlan) -> UnitPlan:
        places = {part: "host" for part in ON_DRIVES if getattr(u, part) == "nvme"}
        acts = u.acts if isinstance(u.acts, str) else tuple("host" if act == "nvme" else act for act in u.acts)
        places |= {"acts": "host" if acts == "nvme" else acts}  # type: ignore[dict-item]
        return in_shards(replace(u, **places), u.state_shards)  # type: ignore[arg-type]

    return replace(plan, units=tuple(map(changed, plan.units)))


def with_brought_states(plan: UnitwisePlan, every: int = 1, grads: Place = "device") -> UnitwisePlan:
    """The plan with states that live elsewhere brought to the device for their updates: of one in so many units, whose
    gradients wait there, and of no others."""
    there, here = _shards_of(plan, "home"), _shards_of(plan, "device")

    @cache
    def changed(u: UnitPlan, is_brought: bool) -> UnitPlan:
        if u.states != "device" and is_brought:
            return in_shards(replace(u, grads=grads, update="device", late_update=False), here)
        if u.states != "device" and u.update == "device":
            return in_shards(replace(u, grads="host", update="home"), there)
        return u

    return replace(plan, units=tuple(changed(u, k % every == 0) for k, u in enumerate(plan.units)))


def with_late_here(plan: UnitwisePlan, every: int) -> UnitwisePlan:
    """The plan with one late in so many of the updates on the device whose states come there, and no others: evenly
    spread, or where all come behind backward those whose forward comes last."""
    if plan.semantics == "delayed-1":
        return plan
    units, brought = list(plan.units), [u for u, choice in enumerate(plan.units) if choice.update == "device"]
    in_time = len(brought) - (round(len(brought) / every) if every else 0)
    for k, u in enumerate(brought):
        is_spread = every > 0 and k % every == every - 1
        units[u] = replace(units[u], late_update=k >= in_time if plan.semantics == "exact-clip" else is_spread)
    return replace(plan, units=tuple(units))


def with_returned_grads(plan: UnitwisePlan, every: int = 1) -> UnitwisePlan:
    """The same with gradients that wait in host memory until then; nothing comes there ahead of its update."""
    return with_windows(with_brought_states(plan, every, "host"), (1, 1, 0))


def with_tied(plan: UnitwisePlan, workload: Workload, place: TiedPlace) -> UnitwisePlan:
    """The plan with all tied gradients waiting there."""
    units = (
        replace(choice, tied_grads=place) if unit.shares and unit.adds_to_shared else choice
        for unit, choice in zip(workload.units, plan.units, strict=True)
    )
    return replace(plan, units=tuple(units))


def with_windows(plan: UnitwisePlan, windows: tuple[int, int, int]) -> UnitwisePlan:
    """The plan with these prefetch windows: parameters, activations, states."""
    params, acts, states = windows
    return replace(plan, prefetch_params_units=params, prefetch_acts_units=acts, prefetch_states_units=states)


def with_shards(plan: UnitwisePlan, num_shards: int, place: UpdatePlace | None = None) -> UnitwisePlan:
    """The plan with states travelling in `num_shards` shards, all or those that are updated in this place.

    On the host each shard costs the latency of an update, so fewer may be better there.
    """

    @cache
    def changed(choice: UnitPlan) -> UnitPlan:
        return in_shards(choice, num_shards) if place in (None, choice.update) else choice

    return replace(plan, units=tuple(map(changed, plan.units)))


def _shards_of(plan: UnitwisePlan, place: UpdatePlace) -> int:
    """In how many shards the states of one more unit travel to its update in this place: in as many as others'."""
    others = (choice.state_shards for choice in plan.units if choice.states_travel and choice.update == place)
    return max(others, default=STATE_SHARDS[0])


def in_shards(choice: UnitPlan, num_shards: int) -> UnitPlan:
    """The choice with states that travel in so many shards, of which no more stay in host memory than now."""
    num = num_shards if choice.states_travel else 1
    in_host = min(int(choice.host_frac * num), num - 1) if choice.states == "nvme" != choice.grads else 0
    return replace(choice, state_shards=num, host_shards=in_host)


def with_host_shards(choice: UnitPlan, more: int) -> UnitPlan | None:
    """The choice with so many more shards of its states in host memory; None where it has none to move there."""
    num = choice.host_shards + more
    is_able = choice.states == "nvme" != choice.grads and 0 <= num < choice.state_shards
    return replace(choice, host_shards=num) if is_able else None
