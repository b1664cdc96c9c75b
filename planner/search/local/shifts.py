"""Moves of many units at once, for chains too long to be changed one by one.

A *shift* takes some of the units that have one choice to another: a placement, an action on one group of saved tensors,
an update that is late or not. The search tries half of them, a quarter, or down to one; spread over the chain, from
either end, or neighbours. Where a shift runs out of memory, it is tried again with a second one that frees what is
short.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product

from tierplan.hwmodels.names import COMPUTE, D2H, H2D, HOST_ADAM, NVME_READ, NVME_WRITE
from tierplan.planner.milp.amounts import Problem, SlotGroup, UnitAmounts
from tierplan.planner.milp.bounds import Bound
from tierplan.planner.milp.modes import MODES, Mode
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.planner.plan_rules import ACTIONS
from tierplan.planner.search.candidates import Candidate, PlanSimulator
from tierplan.planner.search.local.descent import BETTER
from tierplan.planner.search.local.exchanges import alike, exchanged
from tierplan.planner.search.local.moves import (
    GENERAL_FAMILIES,
    Placement,
    acting,
    in_shards,
    more_gb,
    placed,
    placement_of,
    spread,
    with_host_shards,
)
from tierplan.sim.step import Action

ORDERS: tuple[Callable[[Sequence[int]], Sequence[int]], ...] = (
    lambda units: [units[k] for k in spread(len(units))],
    lambda units: units,
    lambda units: units[::-1],
)
"""Which of the units that have a choice are changed first: spread over the chain, the first, the last."""
HOLDS = {"keep": "device", "host": "host", "nvme": "nvme"}
"""Kind of tier that holds a tensor, by the action on it."""
MISJUDGED = 0.02
"""By so much of a tier's capacity, estimates of what is free there may be wrong."""
STALE = 400
"""Draws in a row that do not help, after which the search ends."""
OF_ALL_UNITS, EXCHANGES = 0.08, 0.4
"""Of the draws, those of a move of all units, and of an exchange between some; all others are shifts."""
PLACING = 0.4
"""Of the shifts, those to another placement: most of all that there are, and few help."""
FORGETS = 0.7
"""What is left of what a shift has saved after it has not helped."""
NUM_RELIEFS = 3
"""Ways to free memory that are tried for one shift."""


@dataclass(frozen=True, slots=True)
class Shift:
    """One choice taken to another, in any number of units."""

    name: str
    units: Sequence[int]
    """Units that have the old choice and may have the new one."""
    change: Callable[[int, UnitPlan], UnitPlan]
    """From such a unit's number and choice to the new choice."""
    frees_gb: dict[str, float] = field(default_factory=dict)
    """By kind of tier: about what one unit's change frees there."""
    cost_s: float = 0.0
    """About what one unit's change adds to the step, at the prices of what streams are asked for."""
    is_placing: bool = False
    """Whether it changes where things live; else what happens to activations, or when updates are made."""


def applied(plan: UnitwisePlan, shift: Shift, units: Sequence[int]) -> UnitwisePlan:
    """The plan with the shift made in these units."""
    choices = list(plan.units)
    for u in units:
        choices[u] = shift.change(u, choices[u])
    return replace(plan, units=tuple(choices))


@dataclass(frozen=True, slots=True)
class StreamPrices:
    """What a second of a stream or shared limit adds to the step: their shares of the bound."""

    problem: Problem
    shares: Mapping[str, float]

    def of_placement(
        self,
        unit: UnitAmounts,
        params: str,
        states: str,
        frozen: str = "device",
        update: str = "home",
        grads: str = "device",
    ) -> float:
        """A step's traffic and updates of one unit that lives there."""
        found, passes = 0.0, 2.0 * len(self.problem.blocks)
        if frozen != "device":
            found += self._of(H2D, passes * unit.frozen_gb)
        if frozen == "nvme":
            found += self._of(NVME_READ, passes * unit.frozen_gb)
        if params != "device":
            found += self._of(H2D, passes * unit.params_gb)
        if params == "nvme":
            found += self._of(NVME_READ, passes * unit.params_gb) + self._of(NVME_WRITE, unit.params_gb)
        if "device" in (states, update):
            found += self.shares.get(COMPUTE, 0.0) * unit.update_s
        if states != "device" and update == "device":
            moved_gb = unit.states_gb + (unit.grads_gb if grads != "device" else 0.0)
            found += self._of(H2D, moved_gb) + self._of(D2H, moved_gb)
            if grads == "nvme":
                found += self._of(NVME_READ, unit.grads_gb) + self._of(NVME_WRITE, unit.grads_gb)
        elif states != "device":
            found += self._of(D2H, unit.grads_gb) + self._of(HOST_ADAM, self.problem.host_gparams(unit))
        if states == "nvme":
            found += self._of(NVME_READ, unit.states_gb) + self._of(NVME_WRITE, unit.states_gb)
        return found

    def of_action(self, group: SlotGroup, action: str) -> float:
        """What happens to one unit's tensors in all micro-batches of a turn."""
        gb = group.gb * self.problem.turn
        if action == "recompute":
            return self.shares.get(COMPUTE, 0.0) * group.recompute_s * self.problem.turn
        found = self._of(D2H, gb) + self._of(H2D, gb) if action in ("host", "nvme") else 0.0
        return found + self._of(NVME_READ, gb) + self._of(NVME_WRITE, gb) if action == "nvme" else found

    def _of(self, stream: str, amount: float) -> float:
        """An amount on a stream: GB, or 1e9 parameters."""
        rates = self.problem.rates
        rate = {
            H2D: rates.up["acts"],
            D2H: rates.down["acts"],
            NVME_READ: rates.read["acts"],
            NVME_WRITE: rates.write["acts"],
            HOST_ADAM: rates.adam,
        }[stream]
        found = self.shares.get(stream, 0.0) * amount / rate if rate else 0.0
        for limit, loads in self.problem.loads.items():
            found += self.shares.get(limit, 0.0) * loads.get(stream, 0.0) * amount
        return found


def shifts(problem: Problem, plan: UnitwisePlan, prices: StreamPrices) -> list[Shift]:
    """All shifts from choices that the plan has somewhere."""
    kinds = (
        _placements(problem, plan, prices),
        _actions(problem, plan, prices),
        _lateness(problem, plan),
        _host_shards(problem, plan, prices),
    )
    return [shift for shift in chain.from_iterable(kinds) if shift.units]


def reliefs(problem: Problem, plan: UnitwisePlan, tier_kind: str, prices: StreamPrices) -> list[Shift]:
    """Shifts that free memory of this kind of tier, those that cost least for it first."""
    freeing = [s for s in shifts(problem, plan, prices) if s.frees_gb.get(tier_kind, 0.0) > 0]
    return sorted(freeing, key=lambda s: (s.cost_s / s.frees_gb[tier_kind], s.name))


def _placements(problem: Problem, plan: UnitwisePlan, prices: StreamPrices) -> Iterator[Shift]:
    present: dict[Placement, list[int]] = {}
    for u, choice in enumerate(plan.units):
        present.setdefault(placement_of(choice), []).append(u)
    allowed = dict.fromkeys(chain.from_iterable(problem.modes(u) for u in range(len(problem.units))))
    able = [set(problem.modes(u)) for u in range(len(problem.units))]
    unit = max(problem.units, key=lambda u: u.gparams)
    for old, units in present.items():
        for k in allowed:
            mode = MODES[k]
            new = placement_of(mode)
            if new == old:
                continue

            def change(u: int, choice: UnitPlan, mode: Mode = mode) -> UnitPlan:
                return placed(plan, choice, mode)

            frees: dict[str, float] = {}
            homes = [
                (params, states, frozen or params, update, grads)
                for params, states, grads, frozen, update in (old, new)
            ]
            moves = [*zip(*(home[:3] for home in homes), (unit.params_gb, unit.states_gb, unit.frozen_gb), strict=True)]
            if old[-1] == new[-1] == "device" and old[2] != new[2]:
                moves.append((old[2], new[2], unit.grads_gb))
            for before, after, gb in moves:
                frees[before] = frees.get(before, 0.0) + gb
                frees[after] = frees.get(after, 0.0) - gb
            cost_s = prices.of_placement(unit, *homes[1]) - prices.of_placement(unit, *homes[0])
            yield Shift(f"place {old} {k}", [u for u in units if k in able[u]], change, frees, cost_s, is_placing=True)


def _actions(problem: Problem, plan: UnitwisePlan, prices: StreamPrices) -> Iterator[Shift]:
    num_groups = max((len(unit.groups) for unit in problem.units), default=0)
    for g in range(num_groups):
        with_group = [(u, unit.groups[g]) for u, unit in enumerate(problem.units) if g < len(unit.groups)]
        group = max((own for _, own in with_group), key=lambda group: group.gb)
        present: dict[str, list[int]] = {}
        for u, own in with_group:
            present.setdefault(_action_on(plan.units[u], own), []).append(u)
        for new in ACTIONS:
            able = {u for u, own in with_group if problem.may_be(own, new)}
            for old in ACTIONS:
                if old == new or old not in present:
                    continue

                def change(u: int, choice: UnitPlan, g: int = g, new: str = new) -> UnitPlan:
                    return acting(choice, problem, u, g, new)

                frees: dict[str, float] = {}
                for action, sign in ((old, 1.0), (new, -1.0)):
                    if action in HOLDS:
                        frees[HOLDS[action]] = frees.get(HOLDS[action], 0.0) + sign * group.gb * problem.turn
                cost_s = prices.of_action(group, new) - prices.of_action(group, old)
                yield Shift(f"act {g} {old} {new}", [u for u in present[old] if u in able], change, frees, cost_s)


def _action_on(choice: UnitPlan, group: SlotGroup) -> Action:
    """What is done with a unit's tensors of this group; one without slots is the unit's input."""
    return choice.action(group.slots[0]) if group.slots else choice.input


def _lateness(problem: Problem, plan: UnitwisePlan) -> Iterator[Shift]:
    if plan.semantics == "delayed-1":
        return
    grads_gb = max(unit.grads_gb for unit in problem.units)
    for late, where in product((True, False), ("host", "device")):

        def change(u: int, choice: UnitPlan, late: bool = late) -> UnitPlan:
            return replace(choice, late_update=late)

        units = [
            u
            for u, choice in enumerate(plan.units)
            if choice.late_grads == where and choice.states != "device" and choice.late_update != late
        ]
        yield Shift(f"late {late} {where}", units, change, {} if late or where == "device" else {where: grads_gb}, 0.0)


def _host_shards(problem: Problem, plan: UnitwisePlan, prices: StreamPrices) -> Iterator[Shift]:
    """One shard more of states on NVMe, or four, that stays in host memory; or one fewer."""
    num_shards = max(choice.state_shards for choice in plan.units)
    if num_shards == 1:
        return
    unit = max(problem.units, key=lambda u: u.gparams)
    saved_s = prices.of_placement(unit, "device", "nvme") - prices.of_placement(unit, "device", "host")
    for more in (1, 4, -1):

        def change(u: int, choice: UnitPlan, more: int = more) -> UnitPlan:
            return with_host_shards(choice, more) or choice

        part = more / num_shards
        frees = {"host": -part * unit.states_gb, "nvme": part * unit.states_gb}
        units = [u for u, choice in enumerate(plan.units) if with_host_shards(choice, more)]
        yield Shift(f"host shards {more}", units, change, frees, -part * saved_s)


def descend_by_shifts(
    problem: Problem,
    start: Candidate[UnitwisePlan],
    simulate_plan: PlanSimulator,
    *,
    bound: Bound,
    goal_s: float = 0.0,
    seed: int = 0,
) -> Iterator[Candidate[UnitwisePlan]]:
    """From `start` along shifts, exchanges and moves of all units, until a step of `goal_s`; after each one, the best
    so far.

    What is changed, in how many units and in which, is drawn at random, by the seed: what helped last, and what should
    by the prices of the bound, more often. A change that helps is made again. Ends when many in a row have not helped.
    """
    for best in _Descent(problem, simulate_plan, bound, random.Random(seed)).run(start):
        yield best
        if _step_s(best) <= goal_s:
            return


class _Descent:
    def __init__(self, problem: Problem, simulate_plan: PlanSimulator, bound: Bound, rng: random.Random) -> None:
        self.problem, self.simulate_plan, self.rng = problem, simulate_plan, rng
        self.prices, self.s_per_gb = StreamPrices(problem, bound.shares), bound.s_per_gb
        self.held: dict[tuple[int, UnitPlan], tuple[tuple[str, float], ...]] = {}
        self.alike = alike(problem.workload)
        self.of_plan: UnitwisePlan | None = None
        self.menu: list[Shift] = []
        self.freeing: dict[str, list[Shift]] = {}
        self.capacity_gb = {"device": problem.device_gb, "host": problem.host_gb, "nvme": problem.nvme_gb}
        self.gains: dict[str, float] = {}
        """By shift: what it has saved lately, in seconds."""

    def run(self, best: Candidate[UnitwisePlan]) -> Iterator[Candidate[UnitwisePlan]]:
        for better in self._of_all_units(best):
            best = better
            yield best
        stale = 0
        while stale < STALE:
            before = best
            for better in self._drawn(best):
                best = better
                yield best
            stale = 0 if best is not before else stale + 1

    def _drawn(self, best: Candidate[UnitwisePlan]) -> Iterator[Candidate[UnitwisePlan]]:
        """One move that is drawn at random; the best so far after each plan that is tried for it."""
        kind = self.rng.random()
        if kind < OF_ALL_UNITS:
            return self._of_all_units(best, only_one=True)
        if kind < OF_ALL_UNITS + EXCHANGES and self.alike:
            return self._exchanged(best)
        return self._of_some(best)

    def _of_all_units(
        self, best: Candidate[UnitwisePlan], *, only_one: bool = False
    ) -> Iterator[Candidate[UnitwisePlan]]:
        """Every move that changes all units alike, or one of them."""
        moves = [move for family in GENERAL_FAMILIES for move in family(self.problem, best.plan)]
        for move in [self.rng.choice(moves)] if only_one else moves:
            if (changed := move(best.plan)) is not None:
                for better in self._with_filled(best, self.simulate_plan(changed, best)):
                    yield better
                best = better

    def _exchanged(self, best: Candidate[UnitwisePlan]) -> Iterator[Candidate[UnitwisePlan]]:
        """One exchange between units that are alike."""
        changed = exchanged(best.plan, self.rng.choice(self.alike), self.rng)
        if changed is not None:
            yield from self._with_filled(best, self.simulate_plan(changed, best))

    def _of_some(self, best: Candidate[UnitwisePlan]) -> Iterator[Candidate[UnitwisePlan]]:
        """One shift of some units, and as long as it helps of more."""
        is_placing = self.rng.random() < PLACING
        menu = self._menu(best.plan)
        menu = [shift for shift in menu if shift.is_placing == is_placing] or menu
        ranked = sorted(menu, key=lambda s: (-self.gains.get(s.name, 0.0), self._cost_s(s)))
        shift = ranked[min(int(self.rng.expovariate(len(ORDERS) / len(ranked))), len(ranked) - 1)]
        part = 2 ** self.rng.randint(1, len(self.problem.units).bit_length())
        order = self.rng.choice([*ORDERS, self._from_somewhere])
        again: Shift | None = shift
        while again:
            before = best
            for tried in self._tries(before, again, order(again.units)[: max(1, len(again.units) // part)]):
                best = tried
                yield best
            if best is before:
                self.gains[shift.name] = self.gains.get(shift.name, 0.0) * FORGETS
                return
            self.gains[shift.name] = _step_s(before) - _step_s(best)
            again = next((s for s in self._menu(best.plan) if s.name == shift.name), None)

    def _from_somewhere(self, units: Sequence[int]) -> Sequence[int]:
        at = self.rng.randrange(len(units))
        return [*units[at:], *units[:at]]

    def _tries(
        self, best: Candidate[UnitwisePlan], shift: Shift, units: Sequence[int]
    ) -> Iterator[Candidate[UnitwisePlan]]:
        """The shift made, and where it is short of memory, made with others that free some, until one is better.

        What is far too large by what it holds throughout is not simulated without such another one.
        """
        made, room_gb = applied(best.plan, shift, units), self._room_gb(best, shift, units)
        short = [kind for kind, gb in room_gb.items() if gb < -MISJUDGED * self.capacity_gb[kind]]
        if not short:
            tried = self.simulate_plan(made, best)
            yield from self._with_filled(best, tried)
            if tried.fits or not tried.short_tier:
                return
            short, room_gb = [tried.short_tier], {**room_gb, **tried.room_gb}
        if len(short) > 1:
            return
        kind = short[0]
        num_tried = 0
        for relief in self._reliefs(best.plan, kind):
            able = ORDERS[0]([u for u in relief.units if u not in units])
            freeing = self._enough(made, relief, able, kind, room_gb)
            if not freeing:
                continue
            tried = self.simulate_plan(applied(made, relief, freeing), best)
            relieved = best
            for relieved in self._with_filled(best, tried):
                yield relieved
            num_tried += 1
            if relieved is not best or num_tried == NUM_RELIEFS:
                return

    def _with_filled(
        self, best: Candidate[UnitwisePlan], tried: Candidate[UnitwisePlan]
    ) -> Iterator[Candidate[UnitwisePlan]]:
        """The better one. What it has freed in host memory is filled from drives, if that may make it pay."""
        better = self._better(best, tried)
        yield better
        if better is not best or not tried.fits:
            return
        room_gb, price = tried.room_gb.get("host", 0.0), self.s_per_gb.get("host", 0.0)
        for part in (1.0, 0.5):
            if _step_s(tried) - price * part * room_gb > _step_s(best):
                return
            filled = with_more_in_host(tried.plan, self.problem, part * room_gb)
            if filled is None:
                return
            after = self.simulate_plan(filled, best)
            better = self._better(best, after)
            yield better
            if better is not best:
                return

    def _cost_s(self, shift: Shift) -> float:
        """What it adds to the step, and what it frees of memory at the price of that."""
        return shift.cost_s - sum(self.s_per_gb.get(kind, 0.0) * gb for kind, gb in shift.frees_gb.items())

    def _menu(self, plan: UnitwisePlan) -> list[Shift]:
        """All shifts of a plan; what is known of the one before it is forgotten."""
        if plan is not self.of_plan:
            self.of_plan, self.menu = plan, shifts(self.problem, plan, self.prices)
            self.freeing = {}
        return self.menu

    def _reliefs(self, plan: UnitwisePlan, kind: str) -> list[Shift]:
        self._menu(plan)
        if kind not in self.freeing:
            self.freeing[kind] = reliefs(self.problem, plan, kind, self.prices)
        return self.freeing[kind]

    def _room_gb(self, best: Candidate[UnitwisePlan], shift: Shift, units: Sequence[int]) -> dict[str, float]:
        """By kind of tier: what would be free of it with the shift made, as far as what is held throughout says."""
        room_gb = dict(best.room_gb)
        for u in units:
            self._make_room(room_gb, u, best.plan.units[u], shift)
        return room_gb

    def _enough(
        self, plan: UnitwisePlan, relief: Shift, able: Sequence[int], kind: str, room_gb: Mapping[str, float]
    ) -> Sequence[int]:
        """As many of the units as free what is short of one kind of tier; none where all do not, or another is short
        then. Units are not equally large."""
        room_gb = dict(room_gb)
        for num, u in enumerate(able, 1):
            self._make_room(room_gb, u, plan.units[u], relief)
            if room_gb[kind] >= 0:
                is_short = any(gb < -MISJUDGED * self.capacity_gb[of] for of, gb in room_gb.items())
                return () if is_short else able[:num]
        return ()

    def _make_room(self, room_gb: dict[str, float], u: int, before: UnitPlan, shift: Shift) -> None:
        """Changes what is free by kind of tier as a shift of one unit does."""
        for choice, sign in ((before, 1.0), (shift.change(u, before), -1.0)):
            for kind, gb in self._held_gb(u, choice):
                room_gb[kind] = room_gb.get(kind, 0.0) + sign * gb

    def _held_gb(self, u: int, choice: UnitPlan) -> tuple[tuple[str, float], ...]:
        """What a unit holds by kind of tier: parameters, states, old gradients, activations at the end of forward."""
        if (u, choice) not in self.held:
            unit = self.problem.units[u]
            in_host_gb = choice.host_frac * unit.states_gb
            parts: list[tuple[str, float]] = [(choice.params, unit.params_gb), ("host", in_host_gb)]
            parts.append((choice.states, unit.states_gb - in_host_gb))
            if unit.frozen_gb:
                parts.append((choice.frozen or choice.params, unit.frozen_gb))
            if choice.late_update and choice.late_grads == "host":  # the device has room between two steps
                parts.append(("host", unit.grads_gb))
            for group in unit.groups:
                if (action := _action_on(choice, group)) in HOLDS:
                    parts.append((HOLDS[action], group.gb * self.problem.turn))
            self.held[u, choice] = tuple(parts)
        return self.held[u, choice]

    def _better(self, best: Candidate[UnitwisePlan], tried: Candidate[UnitwisePlan]) -> Candidate[UnitwisePlan]:
        return tried if tried.fits and _step_s(tried) < _step_s(best) * BETTER else best


def with_more_in_host(plan: UnitwisePlan, problem: Problem, room_gb: float) -> UnitwisePlan | None:
    """The plan with as much from NVMe in host memory as there is room for; None for nothing. Parameters come first,
    which drives read twice and write, and then states in shards."""
    choices = list(plan.units)
    for u in ORDERS[0]([u for u, choice in enumerate(choices) if choice.params == "nvme"]):
        wanted = ("host", *placement_of(choices[u])[1:])
        mode = next((MODES[k] for k in problem.modes(u) if placement_of(MODES[k]) == wanted), None)
        if mode is not None and (gb := more_gb(problem.units[u], choices[u], mode, "host")) <= room_gb:
            room_gb -= gb
            choices[u] = placed(plan, choices[u], mode)
    for u in ORDERS[0]([u for u, choice in enumerate(choices) if choice.states == "nvme" != choice.grads]):
        choice = choices[u]
        shard_gb = problem.units[u].states_gb / choice.state_shards
        num = min(choice.host_shards + int(room_gb / shard_gb), choice.state_shards) if shard_gb else 0
        if num > choice.host_shards:
            room_gb -= (num - choice.host_shards) * shard_gb
            all_there = num == choice.state_shards
            changed = in_shards(replace(choice, states="host", host_shards=0), choice.state_shards)
            choices[u] = changed if all_there else replace(choice, host_shards=num)
    return replace(plan, units=tuple(choices)) if tuple(choices) != plan.units else None


def _step_s(candidate: Candidate[UnitwisePlan]) -> float:
    assert candidate.step_s is not None
    return candidate.step_s
