"""Gradients of a unit's parameters, on the device and away from it.

On the device a gradient buffer is granted whole, but holds what autograd has made so far: each parameter's gradient is
the tensor that autograd gives, with no copy of it. So a block's backward takes the memory that it takes in plain
training, where gradients come into being as saved tensors go. Away from the device, and when they come back from
there, a unit's gradients are one flat buffer.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tierplan.runtime.autograd.units import ModelUnit
from tierplan.runtime.execution.values import Held

__all__ = ["complete", "gather", "given", "parts_of", "sink_of", "take_over"]


def parts_of(held: Held, unit: ModelUnit) -> list[torch.Tensor | None]:
    """By parameter of the unit, its gradient, in its shape; None where there is none yet."""
    if held.parts is not None:
        return held.parts
    views = unit.views(held.block.data.view(unit.dtype))
    return [view if held.filled is None or k in held.filled else None for k, view in enumerate(views)]


def given(held: Held, unit: ModelUnit) -> list[int]:
    """Positions, in the unit, of the parameters that have a gradient there."""
    return [k for k, part in enumerate(parts_of(held, unit)) if part is not None]


def sink_of(held: Held, unit: ModelUnit, k: int) -> Callable[[torch.Tensor], None]:
    """Where the gradient of parameter `k` goes: added to what is there, or put there if nothing is."""

    def take(gradient: torch.Tensor) -> None:
        old = parts_of(held, unit)[k]
        if old is not None:
            old.add_(gradient)
        elif held.parts is not None:
            held.parts[k] = gradient
        else:
            assert held.filled is not None
            held.filled.add(k)
            unit.views(held.block.data.view(unit.dtype))[k].copy_(gradient)

    return take


def take_over(held: Held, unit: ModelUnit, other: Held) -> None:
    """Adds the gradients that `other` has, which is given up after this."""
    for k, part in enumerate(parts_of(other, unit)):
        if part is not None:
            sink_of(held, unit, k)(part if other.parts is not None else part.clone())


def complete(held: Held, unit: ModelUnit) -> None:
    """Parameters without a gradient get zeros."""
    if held.parts is not None:
        for k, part in enumerate(held.parts):
            if part is None:
                _, p = unit.parameters[k]
                held.parts[k] = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
    elif held.filled is not None:
        for k, view in enumerate(unit.views(held.block.data.view(unit.dtype))):
            if k not in held.filled:
                view.zero_()
        held.filled = None


def gather(held: Held, unit: ModelUnit, flat: Held) -> None:
    """Copies gradients on the device into a flat buffer."""
    assert held.parts is not None
    views = unit.views(flat.block.data.view(unit.dtype))
    for part, view in zip(held.parts, views, strict=True):
        if part is not None:
            view.copy_(part, non_blocking=True)
    have = given(held, unit)
    flat.filled = None if len(have) == len(views) else set(have)
