"""Several devices: moving the borders of Harmony's packs never ends above where it began, and keeps packs valid."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tierplan.planner.packs import _neighbours
from tierplan.planner.plan import Packs


@pytest.mark.parametrize(
    "packs",
    [
        Packs(form="pipeline", devices=2, forward=((0, 2), (2, 5)), backward=((0, 3), (3, 5), (5, 8))),
        Packs(form="data", devices=2, forward=(), backward=((0, 8),)),
        Packs(form="pipeline", devices=3, forward=((0, 6),), backward=((0, 1), (1, 6), (6, 8))),
    ],
)
def test_neighbours_cover_all_units_in_order(packs):
    found = list(_neighbours(packs))
    assert found
    for changed in found:
        assert changed != packs
        end = changed.backward[-1][0]
        for runs, last in ((changed.backward, 8), (changed.forward, end)):
            borders = [0, *(b for _, b in runs)]
            assert [a for a, _ in runs] == borders[:-1]
            assert borders[-1] == last
            assert all(a < b for a, b in pairwise(borders))
