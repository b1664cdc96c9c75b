"""Optimizer states that travel in parts (`UnitPlan.state_shards`): cutting a unit's states, and joining them again.

Shapes: `r` regions (master copy and moments), `n` parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from tierplan.sim.contents import Content, States, parse_content

FP32_BYTES = 4


def states_of(unit: str, contents: Iterable[Content | str]) -> list[States]:
    """A unit's states among these contents, in order: one for the whole, or one per part."""
    parsed = (parse_content(str(content)) for content in contents)
    return sorted((c for c in parsed if isinstance(c, States) and c.unit == unit), key=lambda c: c.part)


def cut(states: torch.Tensor, part: range, num_parameters: int) -> torch.Tensor:
    """A copy of one part of a unit's states; uint8, region by region like the whole."""
    regions_rn = states.view(torch.float32).view(-1, num_parameters)
    return regions_rn[:, part.start : part.stop].contiguous().view(-1).view(torch.uint8)


def join(parts: Sequence[torch.Tensor], num_parameters: int) -> torch.Tensor:
    """A unit's states, from all of its parts; uint8."""
    num_regions = sum(part.numel() for part in parts) // (FP32_BYTES * num_parameters)
    parts_rn = [part.view(torch.float32).view(num_regions, -1) for part in parts]
    return torch.cat(parts_rn, dim=1).view(-1).view(torch.uint8)
