"""What the fluid program cannot decide, as a few knobs that are tuned by simulation, one after the other.

How much memory to leave for whole buffers, how far below their rates to plan the host and the drives, how many
updates to make late, how far ahead to fetch. Each knob has a short list of settings; tuning walks along one list at a
time while the simulated step gets shorter, and goes round the knobs until none helps."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

from tierplan.hwmodels.names import H2D, HOST_ADAM, NVME_READ, NVME_WRITE
from tierplan.planner.milp.amounts import Problem
from tierplan.planner.milp.model import Margins
from tierplan.planner.milp.rates import STATE_SHARDS
from tierplan.planner.plan import UnitwisePlan
from tierplan.planner.search.candidates import Candidate
from tierplan.planner.search.local.moves import LATE_ONE_IN, OVER_UNITS

Trial = Callable[["Knobs"], Candidate[UnitwisePlan] | None]
"""Plans with these knobs and simulates; None where the program has no solution."""

INF = float("inf")
SETTINGS: Mapping[str, Sequence[Any]] = {
    "stretch": (INF, 4.0, 3.2, 2.5, 2.0, 1.7, 1.5, 1.3, 1.15, 1.0, 0.85, 0.7, 0.6, 0.5, 0.4, 0.3),
    "windows": ((0, 0, 1), (1, 1, 1), (2, 2, 2), (3, 4, 3)),
    "rate_frac": (1.0, 0.9, 0.8, 0.7, 0.6, 0.45, 0.3, 0.15, 0.05, 0.01),
    "host": (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0),
    "shards": sorted(STATE_SHARDS),
    "device": (0.3, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
}
BROUGHT_SETTINGS: Mapping[str, Sequence[Any]] = {
    **SETTINGS,
    "windows": ((0, 0, 1), (0, 1, 0), (1, 1, 0), (1, 1, 1), (2, 2, 2), (3, 4, 3)),
    "device": (*SETTINGS["device"], 8.0, 12.0),
    "brought_shards": (4, 8, 16),
    "over_units": OVER_UNITS,
    "late_here": LATE_ONE_IN,
}
"""Where states may come to the device. Gradients, new parameters and some shards of them are there beside all else."""
SHORTER = 1 - 2e-4
WORTH_A_ROUND = 0.99
"""A knob that shortens the step to less than this has all others tried again; local moves find sooner what is finer."""
CORNERS = ((4.0, 1.5, 1), (2.0, 1.5, 4), (4.0, INF, 4), (4.0, 1.5, 4), (2.0, INF, 1), (4.0, 1.0, 1), (2.0, 1.0, 4))
"""Margins in host memory, late updates and shards, which trade the same bytes: walking along one of them alone may not
get from a setting to a better one of all. Parts need less memory, but also less is read ahead."""
BROUGHT_CORNERS = ((4.0, 1.15, 16), (4.0, 1.5, 16), (8.0, 1.0, 4), (8.0, 1.15, 16))
"""Margins in device memory, late updates and shards where states may come to the device: with much room there, and what
comes for an update not read ahead."""
MARGINS = (
    (1.0, 2.0), (1.5, 4.0), (0.3, 0.5), (2.0, 8.0), (3.0, 8.0),
    (2.0, 32.0), (6.0, 32.0), (3.0, 1.0), (5.0, 1.0), (0.0, 2.0), (0.0, 0.5), (0.0, 0.0),
)  # fmt: skip
"""In device and host memory, as they are tried until a plan fits."""
FRUGAL = (((2, 2, 2), 4), ((1, 1, 1), 4), ((0, 0, 1), 4), ((0, 0, 1), max(STATE_SHARDS)))
"""Windows and shards that are tried with each: they need less and less memory."""
FEW_MARGINS = 3
"""So many are tried before others are made of what a plan lacks; none where plans must have states that come."""
MENDED, ROOMIER = 3, 1.1
"""How often margins become wider by what the plan with them lacks, and so many times that, before others are tried."""
NUM_SCATTERED = 18
"""Settings from all over that are tried too: walks from them all would take longer than they bring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """One setting of all knobs."""

    stretch: float = 1.5
    """Time that updates may count on in backward, as a multiple of what it takes; those it has no room for are late."""
    windows: tuple[int, int, int] = (2, 2, 2)
    """How far ahead parameters, activations and states are fetched, in units."""
    rate_frac: float = 0.9
    """Share of the drives' and the host's rates that is planned with."""
    host: float = 2.0
    """Margin in host memory, in units' gradients, parameters and states."""
    device: float = 1.0
    """Margin in device memory, in the largest things that come there."""
    shards: int = STATE_SHARDS[0]
    """In which states on NVMe travel to their update and back."""
    brought_shards: int = STATE_SHARDS[0]
    """In which states come to the device for their update and go back."""
    over_units: int = 1
    """Turns of units over which such an update is spread."""
    late_here: int = 0
    """Of such updates, one in so many is late; 0 for none."""

    def margins(self, problem: Problem, device_gb: float, host_gb: float) -> Margins:
        """The margins of the fluid program, for granules of `device_gb` and `host_gb`."""
        slow = {NVME_READ, NVME_WRITE, HOST_ADAM}
        slow |= {limit for limit, loads in problem.loads.items() if slow & loads.keys() and H2D not in loads}
        ahead_gb = max(unit.gathered_gb for unit in problem.units)
        return Margins(
            device_gb=min(self.device * device_gb + ahead_gb, 0.5 * problem.device_gb),
            host_gb=min(self.host * host_gb, 0.5 * problem.host_gb),
            rate_frac=dict.fromkeys(sorted(slow), self.rate_frac),
        )


def tune(
    trial: Trial,
    *,
    goal_s: float,
    stretch: float = 1.5,
    brings_states: bool = False,
    needs_states_here: bool = False,
    granules_gb: tuple[float, float] = (1.0, 1.0),
) -> Iterator[tuple[Knobs, float] | None]:
    """After each trial, the best knobs so far and their step time, or None as long as nothing fits; until `goal_s`.

    `stretch` is where the search begins; with `brings_states`, some may come to the device for their updates, and with
    `needs_states_here` some must.
    `granules_gb` are as for `Knobs.margins`.
    """
    settings = BROUGHT_SETTINGS if brings_states else SETTINGS
    found: tuple[Knobs, float] | None = None
    firsts = [
        Knobs(device=device, host=4.0, rate_frac=1.0, stretch=late, windows=(1, 1, 0), brought_shards=shards)
        for device, late, shards in (BROUGHT_CORNERS if brings_states else ())
    ]
    few = 0 if needs_states_here else FEW_MARGINS
    for first in _first_that_fits(trial, stretch, firsts, few, granules_gb):
        found = first
        yield found
    if found is None:
        return
    start, best_s = best, _ = found
    corners = [*firsts, *(replace(start, host=host, stretch=late, shards=shards) for host, late, shards in CORNERS)]
    for corner in [*corners, *scattered(NUM_SCATTERED, settings)]:
        if best_s <= goal_s:
            return
        best, best_s = _shorter(corner, trial(corner), (best, best_s))
        yield best, best_s
    stale = 0
    for name in cycle(settings):
        before_s = best_s
        for found in _along(name, settings[name], (best, best_s), trial):
            best, best_s = found
            yield found
            if best_s <= goal_s:
                return
        stale = 0 if best_s < before_s * WORTH_A_ROUND else stale + 1
        if stale >= len(settings):
            return


def scattered(num: int, settings: Mapping[str, Sequence[Any]] = SETTINGS) -> list[Knobs]:
    """Settings from all over, the same for every question of one kind."""
    rng = random.Random(0)
    settings = {**settings, "rate_frac": [f for f in settings["rate_frac"] if f >= 0.15]}
    found: list[Knobs] = []
    for i in range(num):
        drawn = Knobs(**{name: rng.choice(some) for name, some in settings.items()})
        if i % 3:  # of one solution of the program several plans
            drawn = replace(drawn, device=found[-1].device, host=found[-1].host, rate_frac=found[-1].rate_frac)
        found.append(drawn)
    return found


def _shorter(knobs: Knobs, tried: Candidate[UnitwisePlan] | None, best: tuple[Knobs, float]) -> tuple[Knobs, float]:
    is_shorter = tried is not None and tried.step_s is not None and tried.step_s < best[1] * SHORTER
    return (knobs, tried.step_s) if is_shorter else best  # type: ignore[union-attr,return-value]


def _first_that_fits(
    trial: Trial, first_stretch: float, firsts: Sequence[Knobs], few: int, granules_gb: tuple[float, float]
) -> Iterator[tuple[Knobs, float] | None]:
    """After `firsts`, margins grow, and late updates, which hold gradients in host memory, are given up, until a plan
    fits; after a `few` the first of `firsts` is tried with the least margins for which there is room."""
    for knobs in firsts:
        tried = trial(knobs)
        if tried is not None and tried.step_s is not None:
            yield knobs, tried.step_s
            return
        yield None
    for at, (device, host) in enumerate(MARGINS):
        if at == few and firsts:
            mended = None
            for mended in _mended(trial, firsts[0], granules_gb):
                yield mended
            if mended is not None:
                return
        for windows, shards in FRUGAL:
            for stretch in dict.fromkeys((first_stretch, INF)):
                knobs = Knobs(device=device, host=host, stretch=stretch, windows=windows, shards=shards)
                tried = trial(knobs)
                if tried is not None and tried.step_s is not None:
                    yield knobs, tried.step_s
                    return
                yield None
            if tried is None:
                break


def _mended(trial: Trial, knobs: Knobs, granules_gb: tuple[float, float]) -> Iterator[tuple[Knobs, float] | None]:
    """With the least margins for which there is room."""
    lacking_gb = {"device": 0.0, "host": 0.0}
    for _ in range(1 + MENDED):
        device, host = (ROOMIER * lacking_gb[kind] / gb for kind, gb in zip(lacking_gb, granules_gb, strict=True))
        knobs = replace(knobs, device=device, host=host)
        tried = trial(knobs)
        if tried is None:
            break
        if tried.step_s is not None:
            yield knobs, tried.step_s
            return
        yield None
        for kind in lacking_gb:
            lacking_gb[kind] += max(0.0, -tried.room_gb.get(kind, 0.0))


def _along(
    name: str, settings: Sequence[Any], best: tuple[Knobs, float], trial: Trial
) -> Iterator[tuple[Knobs, float]]:
    """Walks along one knob's settings from where it stands, both ways, as long as that helps, or makes no update more
    or fewer late."""
    settings, (knobs, _) = list(settings), best
    at = settings.index(getattr(knobs, name)) if getattr(knobs, name) in settings else 0
    for ahead in (settings[at + 1 :], settings[:at][::-1]):
        for setting in ahead:
            changed, before = replace(knobs, **{name: setting}), best
            best = _shorter(changed, tried := trial(changed), best)
            yield best
            is_same = name == "stretch" and tried is not None and tried.step_s == before[1]
            if best is before and not is_same:
                break
        if best[0] is not knobs:
            break
