"""Several devices: better packs than Harmony's own search finds, by moving their borders and simulating.

Harmony tries packs of about equal compute. What decides is not equality: the first and the last pack wait for others, a
pack with the embedding moves more, and forward packs need less memory than backward packs. So from Harmony's packs the
borders are moved, removed and added one at a time, and each change is simulated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tierplan.planner.plan import Packs
from tierplan.planner.search import BETTER, Candidate, Evaluator

__all__ = ["improve_packs"]

Runs = tuple[tuple[int, int], ...]
SHIFTS = (1, -1, 2, -2, 4, -4)


def improve_packs(start: Candidate, evaluate: Evaluator, *, spent_frac: float) -> Candidate:
    """The best that moves of borders reach from a plan of packs, until this part of the budget is spent."""
    best = start
    moved = True
    while moved:
        moved = False
        assert best.plan.packs is not None
        for packs in _neighbours(best.plan.packs):
            if evaluate.budget.spent_frac > spent_frac or evaluate.budget.is_late:
                return best
            tried = evaluate(replace(best.plan, policy="planner", packs=packs))
            if tried.step_s is not None and best.step_s is not None and tried.step_s < best.step_s * BETTER:
                best, moved = tried, True
                break
    return best


def _neighbours(packs: Packs) -> Iterator[Packs]:
    """Packs with one border moved, added or taken away; forward packs end where the last backward pack begins."""
    backward = [b for _, b in packs.backward]
    forward = [b for _, b in packs.forward]
    for borders in _changed(backward):
        end = borders[-2] if len(borders) > 1 else 0
        kept = [b for b in forward if b < end] + ([end] if end else [])
        yield replace(packs, backward=_runs(borders), forward=_runs(kept))
    for borders in _changed(forward):
        yield replace(packs, forward=_runs(borders))
    if len(backward) > 1:
        yield replace(packs, forward=_runs(backward[:-1]))


def _changed(borders: list[int]) -> Iterator[list[int]]:
    """The ends of runs, with one of them but the last changed."""
    for i in reversed(range(len(borders) - 1)):
        low, high = borders[i - 1] if i else 0, borders[i + 1]
        for shift in SHIFTS:
            if low < borders[i] + shift < high:
                yield [*borders[:i], borders[i] + shift, *borders[i + 1 :]]
    for i in reversed(range(len(borders))):
        low = borders[i - 1] if i else 0
        if borders[i] - low > 1:
            yield [*borders[:i], (low + borders[i]) // 2, *borders[i:]]
    for i in range(len(borders) - 1):
        yield borders[:i] + borders[i + 1 :]


def _runs(borders: list[int]) -> Runs:
    return tuple(zip([0, *borders[:-1]], borders, strict=True)) if borders else ()
