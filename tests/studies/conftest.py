"""Searches that are short, and end after the same work however busy the computer is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tierplan.planner.search import budget


@pytest.fixture(autouse=True, scope="package")
def short_searches() -> Iterator[None]:
    """A planner's second buys a few thousandths of what it does otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "OPS_PER_S", 300)
        patch.setattr(budget, "DEFAULT_OPS", 2_000)
        yield
