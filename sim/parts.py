"""Optimizer states in parts: how a unit's states are cut when they travel piece by piece.

A part has the states of consecutive parameters, region by region as the whole has them (`master | first | second`), in
a buffer of its own with the content `states/L3/0of4`. Whoever plans and whoever executes cut by the same rule.
"""

from __future__ import annotations

__all__ = ["part_content", "part_ranges", "unit_and_part"]

GRAIN = 1024
"""Parts are multiples of so many parameters: whole vectors, which keeps the optimizer's bits, and whole pages of 4 KiB
for states of any number of fp32 values."""


def part_ranges(num_parameters: int, num_parts: int) -> list[range]:
    """The parameters of each part: equal but for the last, and fewer parts where the unit has too few parameters."""
    each = max(1, -(-num_parameters // (num_parts * GRAIN))) * GRAIN
    return [range(begin, min(begin + each, num_parameters)) for begin in range(0, num_parameters, each)]


def part_content(unit: str, part: int, num_parts: int) -> str:
    """`states/L3/1of4`, or `states/L3` for states that are not cut."""
    return f"states/{unit}" if num_parts == 1 else f"states/{unit}/{part}of{num_parts}"


def unit_and_part(content: str) -> tuple[str, int, int]:
    """Unit, part and number of parts of a content made by `part_content`."""
    _, unit, *part = content.split("/")
    if not part:
        return unit, 0, 1
    index, _, num_parts = part[0].partition("of")
    return unit, int(index), int(num_parts)
