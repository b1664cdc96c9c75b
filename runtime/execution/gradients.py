"""Gradients of a unit's parameters, on the device and away from it.

On the device a gradient buffer is granted whole, but holds what autograd has made so far: each parameter's gradient is
the tensor that autograd gives, with no copy of it. So a block's backward takes the memory that it takes in plain
training, where gradients come into being as saved tensors go. Away from the device, and when they come back from
there, a unit's gradients are one flat buffer.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch._utils import _flatten_dense_tensors

from tierplan.runtime.autograd.units import ModelError, ModelUnit
from tierplan.runtime.execution.instances import Instance
from tierplan.runtime.execution.values import BufferValue, value_of
from tierplan.runtime.optim.adam import CHUNK_ELEMENTS
from tierplan.runtime.ranks.group import Ranks


class WrittenGradient(NamedTuple):
    """A gradient that a backward writes."""

    instance: Instance
    unit: ModelUnit
    tied: Instance | None
    """What the op reads of it that a tied head has."""
    is_whole: bool
    """It is a unit's, and no tied head's share."""


def gradients_of(value: BufferValue, unit: ModelUnit) -> list[torch.Tensor | None]:
    """By parameter of the unit, its gradient, in its shape; None where there is none yet."""
    if value.gradients is not None:
        return value.gradients
    views = enumerate(unit.views_in(value.block))
    return [view if value.filled is None or k in value.filled else None for k, view in views]


def _given(value: BufferValue, unit: ModelUnit) -> dict[int, torch.Tensor]:
    """The gradients that are there, by the positions of their parameters in the unit."""
    return {k: gradient for k, gradient in enumerate(gradients_of(value, unit)) if gradient is not None}


def _lend(value: BufferValue, unit: ModelUnit) -> None:
    """Gives autograd the gradients that are there, to add to."""
    for k, gradient in _given(value, unit).items():
        unit.parameters[k][1].grad = gradient


def _take_back(value: BufferValue, unit: ModelUnit, which: Iterable[int]) -> None:
    """Takes the gradients of these parameters from autograd, which has added to them, or made them."""
    for k in which:
        _, p = unit.parameters[k]
        if p.grad is not None:
            _put(value, unit, k, p.grad)
            p.grad = None


def _put(value: BufferValue, unit: ModelUnit, k: int, gradient: torch.Tensor) -> None:
    if value.gradients is not None:
        value.gradients[k] = gradient
    elif value.filled is not None and k not in value.filled:
        value.filled.add(k)
        unit.views_in(value.block)[k].copy_(gradient)


def take_over(value: BufferValue, unit: ModelUnit, other: BufferValue) -> None:
    """Adds the gradients that `other` has, which is given up after this."""
    for k, gradient in _given(other, unit).items():
        if (old := gradients_of(value, unit)[k]) is not None:
            old.add_(gradient)
        else:
            _put(value, unit, k, gradient if other.gradients is not None else gradient.clone())


def _complete(value: BufferValue, unit: ModelUnit) -> None:
    """Parameters without a gradient get zeros."""
    if value.gradients is not None:
        for k, gradient in enumerate(value.gradients):
            if gradient is None:
                _, p = unit.parameters[k]
                value.gradients[k] = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
    elif value.filled is not None:
        for k, view in enumerate(unit.views_in(value.block)):
            if k not in value.filled:
                view.zero_()
        value.filled = None


def flat_gradients(value: BufferValue, unit: ModelUnit, part: range) -> list[torch.Tensor]:
    """What the gradients of a unit have of a part of its elements: flat, one after the other.

    Small ones on the device in one: a call of the optimizer's kernel takes longer than this copy.
    """
    if value.gradients is None:
        return [value.block.data.view(unit.dtype)[part.start : part.stop]]
    gradients = list(_given(value, unit).values())
    assert len(gradients) == len(unit.parameters), "a gradient that is complete has all of its unit's"
    if len(part) == unit.num_trained:
        is_small = len(part) <= CHUNK_ELEMENTS and not gradients[0].is_cuda
        return [_flatten_dense_tensors(gradients)] if is_small else [gradient.view(-1) for gradient in gradients]
    begins = itertools.accumulate(unit.lengths, initial=0)
    own = zip(gradients, begins, parameter_parts(unit, part), strict=False)
    return [gradient.view(-1)[some.start - begin : some.stop - begin] for gradient, begin, some in own if some]


def parameter_parts(unit: ModelUnit, part: range) -> list[range]:
    """What a part of a unit's values has of each of its parameters."""
    ends = list(itertools.accumulate(unit.lengths, initial=0))
    return [range(max(a, part.start), min(b, part.stop)) for a, b in itertools.pairwise(ends)]


def gather(value: BufferValue, unit: ModelUnit, flat: BufferValue) -> None:
    """Copies gradients on the device into a flat buffer."""
    views, have = unit.views_in(flat.block), _given(value, unit)
    if have:
        torch._foreach_copy_([views[k] for k in have], list(have.values()), non_blocking=True)
    flat.filled = None if len(have) == len(views) else set(have)


class WithoutGradient:
    """By step and unit, the parameters that none of the step's micro-batches so far gave a gradient."""

    def __init__(self) -> None:
        self._names: dict[int, dict[str, set[str]]] = {}

    def note(self, step: int, without: Mapping[str, set[str]]) -> None:
        """What a micro-batch's backward of some units left without one."""
        of_step = self._names.setdefault(step, {})
        for unit, names in without.items():
            of_step[unit] = names & of_step.get(unit, names)

    def end_step(self, step: int, units: Sequence[ModelUnit], ranks: Ranks | None) -> None:
        """Raises `ModelError` where some have none. With `ranks`, which have other micro-batches of the step, that
        counts which has none on any; all call this."""
        of_step = self._names.pop(step, {})
        if ranks is None and not any(of_step.values()):
            return
        own = [(unit.name, name) for unit in units for name, _ in unit.parameters]
        rows = [[float(name in of_step.get(unit, ())) for unit, name in own]]
        if ranks is not None:
            rows = ranks.share(rows[0], "steps")
        wrong = [of for of, *row in zip(own, *rows, strict=True) if all(row)]
        if wrong:
            unit = wrong[0][0]
            names = ", ".join(repr(name) for of, name in wrong if of == unit)
            raise ModelError(
                f"{names} of unit {unit!r} had no gradient in step {step}: plain training leaves such parameters and "
                "their optimizer states as they are, which a schedule does not. Freeze them (requires_grad_(False)), "
                "or take them out of the model"
            )


Looks = list[tuple[torch.Tensor | None, int]]
"""Of each of a unit's parameters, the gradient that autograd is given, and how often it has been written."""


def begin_gradients(written: Iterable[WrittenGradient]) -> list[Looks]:
    """From now on, autograd adds to the gradients that a backward reads, or makes those that it writes. How each looks.

    Gradients of one micro-batch are complete (those of a tied head included) before they are added to those of the
    micro-batches before, as in plain training.
    """
    looks = []
    for instance, unit, tied, _ in written:
        if instance.over is None:
            instance.value = BufferValue(gradients=[None] * len(unit.parameters))
        else:
            instance.value = value_of(instance.over)
            _lend(instance.value, unit)
        gradients = [p.grad for _, p in unit.parameters]
        looks.append([(gradient, -1 if gradient is None else gradient._version) for gradient in gradients])
        if tied is not None:
            _lend(value_of(tied), unit)
    return looks


def end_gradients(written: Iterable[WrittenGradient], looks: Iterable[Looks]) -> dict[str, set[str]]:
    """Takes them from autograd. By unit whose gradients are whole, the parameters of which backward made none."""
    without: dict[str, set[str]] = {}
    for (instance, unit, tied_instance, is_whole), look in zip(written, looks, strict=True):
        own = value_of(instance)
        if is_whole:
            without[unit.name] = {
                name
                for (name, p), (before, version) in zip(unit.parameters, look, strict=True)
                if p.grad is before and (before is None or before._version == version)
            }
        tied = None if tied_instance is None else value_of(tied_instance)
        if tied is own:
            tied = None
        if tied is not None:
            _take_back(tied, unit, _given(tied, unit))
        _take_back(own, unit, range(len(unit.parameters)))
        if tied is not None:
            take_over(own, unit, tied)
        if is_whole and (own.gradients is None or without[unit.name]):
            _complete(own, unit)
    return without


def refuse_left(name: str, owner: ModelUnit) -> None:
    """Raises `ModelError` where backward of a unit of this name has made gradients of another one's parameters that no
    buffer took: the next ones would be put in their place, or added to them in another order."""
    if (left := next((name for name, p in owner.parameters if p.grad is not None), None)) is not None:
        raise ModelError(
            f"the backward of unit {name!r} has made a gradient of {left!r}, a parameter of unit {owner.name!r}, for "
            f"which its op in the schedule writes no tied/{owner.name} buffer: the schedule is of a model in which "
            f"unit {name!r} does not train it. Make the schedule from this model"
        )
