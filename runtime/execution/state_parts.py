"""Optimizer states that travel in parts (`UnitPlan.state_shards`): which of a schedule's contents they are."""

from __future__ import annotations

from collections.abc import Iterable

from tierplan.sim.contents import Content, States, parse_content


def states_of(unit: str, contents: Iterable[Content | str]) -> list[States]:
    """A unit's states among these contents, in order: one for the whole, or one per part."""
    parsed = (parse_content(str(content)) for content in contents)
    return sorted((c for c in parsed if isinstance(c, States) and c.unit == unit), key=lambda c: c.part)
