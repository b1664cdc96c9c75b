"""Regular plans, for chains too long to be changed unit by unit.

What a long chain asks of its streams adds up to the same wherever a choice stands. But a stream that is idle first and
has too much to do later takes longer than one that always has some. So a *pattern* says how many blocks have each
placement, how these are spread over the chain, and what holds for all of them. A few of its numbers are changed at
random, as long as that helps: each change moves units all over the chain.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import count
from math import ceil
from typing import Any

from tierplan.planner.milp.amounts import Problem
from tierplan.planner.milp.modes import MODES
from tierplan.planner.milp.rates import STATE_SHARDS
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.planner.plan_rules import Place
from tierplan.planner.search.candidates import Candidate, PlanSimulator
from tierplan.planner.search.local.descent import BETTER
from tierplan.planner.search.local.exchanges import ACTIVATIONS, alike
from tierplan.planner.search.local.moves import (
    LATE_WRITES,
    OVER_UNITS,
    WINDOWS,
    gathering,
    in_shards,
    may_write_late,
    more_gb,
    nearer,
    placed,
    reducing,
    with_those_of,
)

SLOPES = (-0.8, -0.5, -0.2, 0.0, 0.2, 0.5, 0.8)
BEGINS, ENDS = (0.0, 0.1, 0.2, 0.4, 0.6, 0.8), (1.0, 0.97, 0.95, 0.9, 0.7)
NUMS = (1, 1, 2, 3, 4, 8)
"""Units that get another placement at once."""
IN_FLIGHT = (0, 1, 2, 3, 4, 6)
MOST_ACTIONS = 8
"""Of what happens to blocks' activations in the plan to begin with, the commonest that are tried for all."""
CHANGES = (1, 1, 2, 2, 3)
"""That are made at once."""
LONE, PLACING, SPREADING, ACTING, SHARDING = 0.05, 0.42, 0.7, 0.8, 0.9
"""Of the changes, those of a unit that is no block, of how many blocks have a placement, of where these stand, of
activations and of shards, summed up; all others are of what holds for all blocks."""
OTHER, LATENESS = 0.4, 0.5
"""Of the first, those to a placement that differs in one thing from one that there is; and of these, in whether the
update is late."""
KINDS: tuple[Place, ...] = ("device", "host")
"""Of memory that is filled behind a change."""
CHANGE, TIMES_AS_OFTEN = "change", 3
"""How much more often than changes filling must have helped for all to be filled that is free behind a change."""
ALL_WINDOWS = (*WINDOWS, (0, 1, 0), (1, 1, 0))
"""Those that leave the device room for states that come there, too."""
STALE = 250
"""Changes in a row that do not help, after which the search ends."""


@dataclass(frozen=True, slots=True)
class Spread:
    """How many units have a placement, and where: on a stretch of the chain whose ends are shares of it."""

    num: int
    slope: float = 0.0
    """How much denser they stand at its end than in its middle; below 0, so much less."""
    begin: float = 0.0
    end: float = 1.0

    def wanted(self, num_blocks: int) -> list[int]:
        """Where they stand by their density; two may want the same place."""
        found = []
        for i in range(self.num):
            share, rise = (i + 0.5) / self.num, 1 - self.slope
            at = ((rise**2 + 4 * self.slope * share) ** 0.5 - rise) / (2 * self.slope) if self.slope else share
            found.append(int((self.begin + at * (self.end - self.begin)) * num_blocks))
        return found


@dataclass(frozen=True, slots=True)
class Pattern:
    """All that a regular plan says of its blocks."""

    common: UnitPlan
    """Who is none of the others is placed so."""
    spreads: Mapping[UnitPlan, Spread]
    """By placement."""
    actions: UnitPlan | None = None
    """Whose actions on activations all have; None: each its own."""
    of_all: Mapping[str, Any] = field(default_factory=dict)
    lone: Mapping[int, UnitPlan] = field(default_factory=dict)
    """Placements of units that are no blocks, such as an embedding, which may be as large as many of them."""

    def made_of(self, plan: UnitwisePlan, blocks: Sequence[int]) -> UnitwisePlan:
        """The plan with its blocks in the pattern."""
        placements = [self.common] * len(blocks)
        free = set(range(len(blocks)))
        for placement, spread in self.spreads.items():
            for at in spread.wanted(len(blocks))[: len(free)]:
                k = next(k for away in count() for k in (at + away, at - away) if k in free)
                placements[k] = placement
                free.remove(k)
        units = list(plan.units)
        for u, placement in zip(blocks, placements, strict=True):
            units[u] = _placed(units[u], placement, self.actions)
        for u, placement in self.lone.items():
            units[u] = with_those_of(units[u], placement)
        return replace(plan, units=tuple(units), **self.of_all)


@lru_cache(maxsize=4096)
def _placed(choice: UnitPlan, placement: UnitPlan, actions: UnitPlan | None) -> UnitPlan:
    """One block's choice in a pattern, with this placement."""
    choice = with_those_of(choice, placement)
    return with_those_of(choice, actions, ACTIVATIONS) if actions else choice


def _moved(pattern: Pattern, source: UnitPlan, target: UnitPlan, num: int) -> Pattern:
    """With so many units of one placement in another one."""
    spreads = dict(pattern.spreads)
    for placement, more in ((source, -num), (target, num)):
        if placement != pattern.common:
            known = spreads.get(placement, Spread(0))
            spreads[placement] = replace(known, num=known.num + more)
    return replace(pattern, spreads=spreads)


class Patterns:
    """From the regular plan with as many units of each placement as a plan has to quicker ones.

    What is changed of a pattern is drawn at random, by the seed. A change that only frees memory is not quicker; so
    what has room there is tried with it, where that may pay by the bound's `s_per_gb` of memory.
    """

    def __init__(
        self,
        problem: Problem,
        plan: UnitwisePlan,
        simulate_plan: PlanSimulator,
        s_per_gb: Mapping[str, float],
        seed: int,
    ) -> None:
        self.problem, self.s_per_gb = problem, s_per_gb
        self.num_tried, self.num_helped = Counter[str](), Counter[str]()
        """Of changes, and of kinds of memory that were filled behind them."""
        self.plan, self.simulate_plan, self.rng = plan, simulate_plan, random.Random(seed)
        self.blocks = [u for u, unit in enumerate(problem.workload.units) if unit.kind == "block"]
        self.choices = [plan.units[u] for u in self.blocks]
        self.modes = [MODES[k] for k in problem.modes(self.blocks[0])]
        others = (u for u in range(len(plan.units)) if u not in self.blocks and len(problem.modes(u)) > 1)
        self.lone = [u for u in others if problem.units[u].gparams + problem.units[u].frozen_gb > 0]
        is_one_kind = self.blocks in alike(problem.workload)
        actions = Counter(with_those_of(UnitPlan(), choice, ACTIVATIONS) for choice in self.choices)
        self.actions = [found for found, _ in actions.most_common(MOST_ACTIONS if is_one_kind else 0)]
        self.pattern = self._evened()
        self.best: Candidate[UnitwisePlan] = simulate_plan(self.pattern.made_of(plan, self.blocks))

    def descend(self, goal_s: float = 0.0) -> Iterator[Candidate[UnitwisePlan]]:
        """After each plan that is tried the best so far, until a step of `goal_s`, or many in a row have not helped.

        It may be slower than the plan that all began with, or not fit.
        """
        stale = 0
        while stale < STALE:
            changed = self._changed()
            stale += 1
            for pattern in self._with_filled(changed):
                tried = self._tried(pattern)
                if tried.step_s is not None and (self.best.step_s is None or tried.step_s < self.best.step_s * BETTER):
                    self.pattern, self.best, stale = pattern, tried, 0
                yield self.best
            if self.best.step_s is not None and self.best.step_s <= goal_s:
                return

    def _with_filled(self, pattern: Pattern) -> Iterator[Pattern]:
        """A pattern, and where it is no better, what fills the memory that it leaves free, if that may pay.

        What its change has freed always; all that is free as long as that helps clearly more often than changes do.
        """
        before, last = self.best, pattern
        yield last
        tried = self._tried(pattern)
        self._count(CHANGE, pattern is self.pattern)
        for kind in KINDS:
            if tried.step_s is None or before.step_s is None or last is self.pattern:
                return
            room_gb = tried.room_gb.get(kind, 0.0)
            if self._helps(kind) < TIMES_AS_OFTEN * self._helps(CHANGE):
                room_gb -= max(0.0, before.room_gb.get(kind, 0.0))
            if tried.step_s - self.s_per_gb.get(kind, 0.0) * room_gb <= before.step_s:
                filled = self._filled(pattern, kind, room_gb)
                if filled is not None:
                    yield (last := filled)
                    self._count(kind, filled is self.pattern)

    def _count(self, what: str, has_helped: bool) -> None:
        self.num_tried[what] += 1
        self.num_helped[what] += has_helped

    def _helps(self, what: str) -> float:
        """How often it has helped, with once beforehand."""
        return (self.num_helped[what] + 1) / (self.num_tried[what] + 1)

    def _filled(self, pattern: Pattern, kind: Place, room_gb: float) -> Pattern | None:
        """With as many more units in this kind of tier as there is room for, of the commonest that are farther away."""
        nums = {placement: spread.num for placement, spread in pattern.spreads.items()}
        nums[pattern.common] = len(self.blocks) - sum(nums.values())
        for source, most in sorted(nums.items(), key=lambda each: -each[1]):
            near = nearer(self.problem, self.blocks[0], source, kind)
            if near is not None:
                gb = more_gb(self.problem.units[self.blocks[0]], source, near, kind)
                target = with_those_of(UnitPlan(), placed(self.plan, source, near))
                num = min(int(room_gb / gb), most) if gb > 0 else 0
                return _moved(pattern, source, target, num) if num > 0 else None
        return None

    def _tried(self, pattern: Pattern) -> Candidate[UnitwisePlan]:
        return self.simulate_plan(pattern.made_of(self.plan, self.blocks), self.best)

    def _evened(self) -> Pattern:
        """As many units of each placement as the plan has, evenly spread."""
        placements = Counter(with_those_of(UnitPlan(), choice) for choice in self.choices)
        (common, _), *others = placements.most_common()
        return Pattern(common, {placement: Spread(num) for placement, num in others})

    def _changed(self) -> Pattern:
        """The best pattern so far with some changes."""
        pattern = self.pattern
        for _ in range(self.rng.choice(CHANGES)):
            kind = self.rng.random()
            if kind < LONE and self.lone:
                pattern = self._alone(pattern)
            elif kind < PLACING:
                pattern = self._replaced(pattern)
            elif kind < SPREADING:
                pattern = self._elsewhere(pattern)
            elif kind < ACTING:
                pattern = replace(pattern, actions=self.rng.choice([None, *self.actions]))
            elif kind < SHARDING:
                pattern = self._in_shards(pattern)
            else:
                pattern = self._of_all(pattern)
        return pattern

    def _replaced(self, pattern: Pattern) -> Pattern:
        """Some units of one placement have another one, which may be new."""
        rng, spreads = self.rng, pattern.spreads
        source = rng.choice([*(placement for placement, spread in spreads.items() if spread.num), pattern.common])
        target, num = rng.choice([*spreads, pattern.common]), rng.choice(NUMS)
        if rng.random() < OTHER:
            target = self._other(rng.choice((source, target)))
        return _moved(pattern, source, target, min(num, spreads[source].num) if source in spreads else num)

    def _alone(self, pattern: Pattern) -> Pattern:
        """A unit that is no block is placed elsewhere. Where it has no room there, some blocks make some for it."""
        u = self.rng.choice(self.lone)
        now = pattern.lone.get(u, self.plan.units[u])
        mode = MODES[self.rng.choice(self.problem.modes(u))]
        there = with_those_of(UnitPlan(), placed(self.plan, now, mode))
        changed = replace(pattern, lone={**pattern.lone, u: there})
        for kind in KINDS:
            short_gb = -self._tried(changed).room_gb.get(kind, 0.0)
            if short_gb > 0:
                changed = self._spilled(changed, kind, short_gb)
        return changed

    def _spilled(self, pattern: Pattern, kind: Place, short_gb: float) -> Pattern:
        """With so much less of the blocks in this kind of tier: of those with one placement, some have another that
        others have."""
        unit, placements = self.problem.units[self.blocks[0]], [pattern.common, *pattern.spreads]
        pairs = [(a, b, -more_gb(unit, a, b, kind)) for a in placements for b in placements]
        able = [(a, b, ceil(short_gb / gb)) for a, b, gb in pairs if gb > 0]
        nums = {placement: spread.num for placement, spread in pattern.spreads.items()}
        nums[pattern.common] = len(self.blocks) - sum(nums.values())
        able = [(a, b, num) for a, b, num in able if num <= nums[a]]
        return _moved(pattern, *self.rng.choice(able)) if able else pattern

    def _other(self, placement: UnitPlan) -> UnitPlan:
        """A placement that differs in one thing: whether the update is late, or where something is."""
        is_summed_late = self.plan.devices > 1 and placement.update == "device"
        may_be_late = self.plan.semantics != "delayed-1" and not is_summed_late
        if self.rng.random() < LATENESS and may_be_late:
            return replace(placement, late_update=not placement.late_update)
        parts = ("params", "frozen", "states", "update")
        near = [mode for mode in self.modes if sum(getattr(mode, p) != getattr(placement, p) for p in parts) == 1]
        if not near:
            return placement
        late = placement.late_update
        changed = placed(self.plan, placement, self.rng.choice(near))
        return replace(changed, late_update=late and changed.states != "device")

    def _elsewhere(self, pattern: Pattern) -> Pattern:
        """Units of one placement stand elsewhere."""
        if not pattern.spreads:
            return pattern
        placement = self.rng.choice(list(pattern.spreads))
        name, values = self.rng.choice((("slope", SLOPES), ("begin", BEGINS), ("end", ENDS)))
        spread = replace(pattern.spreads[placement], **{name: self.rng.choice(values)})  # type: ignore[arg-type]
        is_stretch = spread.begin < spread.end
        return replace(pattern, spreads={**pattern.spreads, placement: spread}) if is_stretch else pattern

    def _in_shards(self, pattern: Pattern) -> Pattern:
        """States that travel to updates in one place do so in other shards."""
        place, num = self.rng.choice(("home", "device")), self.rng.choice(STATE_SHARDS)

        def changed(placement: UnitPlan) -> UnitPlan:
            return in_shards(placement, num) if placement.update == place else placement

        common, spreads = changed(pattern.common), dict[UnitPlan, Spread]()
        for placement, spread in pattern.spreads.items():
            if (other := changed(placement)) != common:
                known = spreads.get(other, replace(spread, num=0))
                spreads[other] = replace(known, num=known.num + spread.num)
        return replace(pattern, common=common, spreads=spreads)

    def _of_all(self, pattern: Pattern) -> Pattern:
        params, acts, states = self.rng.choice(ALL_WINDOWS)
        changes: list[Mapping[str, Any]] = [
            {"prefetch_params_units": params, "prefetch_acts_units": acts, "prefetch_states_units": states},
            {"overtaking": self.rng.random() < 0.5},
            {"update_over_units": self.rng.choice(OVER_UNITS)},
            {"updates_in_flight": self.rng.choice(IN_FLIGHT), "late_writes": 0},
        ]
        if self.plan.semantics != "in-backward":
            overtaking, is_turned = (self.rng.random() < 0.5 for _ in range(2))
            changes.append({"overtaking": overtaking, "update_order": "backward" if is_turned else "forward"})
        if may_write_late(self.plan):
            changes.append({"updates_in_flight": 0, "late_writes": self.rng.choice(LATE_WRITES)})
        if self.problem.devices > 1 and self.problem.divided == "all":
            sharing = {"sharing": self.plan.sharing, **pattern.of_all}["sharing"]
            changes += [{"sharing": reducing(sharing)}, {"sharing": gathering(sharing)}]
        return replace(pattern, of_all={**pattern.of_all, **self.rng.choice(changes)})
