"""What every rank of a run must be given alike: else each would train its own model, and all would mix them.

UnlikeRanksError(ValueError)   ranks were given unlike things; names the first of them, the rank and both values
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from tierplan.runtime.ranks.group import Ranks
from tierplan.sim.digest import digest
from tierplan.sim.schedule import Schedule


class UnlikeRanksError(ValueError):
    """Ranks were given unlike things. Says which, and what to do."""


def check_alike(ranks: Ranks | None, given: Mapping[str, object], remedy: str = "give all the same") -> None:
    """Raises `UnlikeRanksError` on all ranks, which call this together, unless all were given the same JSON values; of
    schedules, what tells them apart is compared."""
    if ranks is None:
        return
    first, *others = map(json.loads, ranks.collect(json.dumps(given, default=_plain)))
    for rank, own in enumerate(others, start=1):
        for name, here, there in differences(first, own):
            raise UnlikeRanksError(
                f"{name} is {reprlib.repr(there)} on rank {rank}, and {reprlib.repr(here)} on rank 0; ranks train one "
                f"model together: {remedy}"
            )


def _plain(x: object) -> str:
    return digest(x) if isinstance(x, Schedule) else type(x).__name__


def differences(a: Any, b: Any, name: str = "") -> Iterator[tuple[str, object, object]]:
    """Where two JSON values are not alike: the name of each such place, `training.dtype`, and both values."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            yield from differences(a.get(key), b.get(key), f"{name}.{key}" if name else key)
    elif a != b and repr(a) != repr(b):  # nan is not nan
        yield name, a, b
