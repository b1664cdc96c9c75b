"""Optimizer states that travel in parts (`UnitPlan.state_parts`): cutting a unit's states, and joining them again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from tierplan.sim.parts import part_ranges, unit_and_part

__all__ = ["contents_of", "cut", "join", "parameters_of"]

FP32_BYTES = 4


def contents_of(unit: str, contents: Iterable[str]) -> list[str]:
    """The contents that hold a unit's states, in order: one for the whole, or one per part."""
    found = [c for c in contents if c.startswith("states/") and unit_and_part(c)[0] == unit]
    return sorted(found, key=lambda content: unit_and_part(content)[1])


def parameters_of(content: str, num_parameters: int) -> range:
    """The parameters, of all those of the unit, whose states this content holds."""
    _, part, num_parts = unit_and_part(content)
    return part_ranges(num_parameters, num_parts)[part]


def cut(states: torch.Tensor, part: range, num_parameters: int) -> torch.Tensor:
    """A copy of one part of a unit's states; uint8, region by region like the whole."""
    regions = states.view(torch.float32).view(-1, num_parameters)
    return regions[:, part.start : part.stop].contiguous().view(-1).view(torch.uint8)


def join(parts: Sequence[torch.Tensor], num_parameters: int) -> torch.Tensor:
    """A unit's states, from all of its parts; uint8."""
    num_regions = sum(part.numel() for part in parts) // (FP32_BYTES * num_parameters)
    regions = [part.view(torch.float32).view(num_regions, -1) for part in parts]
    return torch.cat(regions, dim=1).view(-1).view(torch.uint8)
