"""Which parameters the optimizer treats how: groups with a weight decay or a rate of their own.

    OptimizerSettings(weight_decay=0.1, groups=(without_decay(model),))

`segments` cuts a unit's flat buffer where the treatment changes. A parameter that is not whole vectors is a segment of
its own, since the fused kernel rounds the end of a tensor differently (see `tierplan.runtime.optim.adam`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import nn

from tierplan.runtime.autograd.units import ModelUnit
from tierplan.runtime.optim.adam import OptimizerSettings, ParameterGroup, Segment
from tierplan.sim.workloads.optimizers import VECTOR_ELEMENTS


class GroupError(ValueError):
    """Groups that do not fit the model: an unknown name, or one that is in two groups."""


def without_decay(model: nn.Module) -> ParameterGroup:
    """Biases and the parameters of norms, which are commonly spared weight decay, as the Hugging Face Trainer does."""
    norms = {name for name, module in model.named_modules() if _is_norm(module)}
    names = (name for name, _ in model.named_parameters())  # also T5's tables of position biases
    spared = tuple(name for name in names if "bias" in name or name.rpartition(".")[0] in norms)
    return ParameterGroup(names=spared, weight_decay=0.0)


def _is_norm(module: nn.Module) -> bool:
    known = nn.LayerNorm | nn.GroupNorm | nn.RMSNorm | nn.modules.batchnorm._BatchNorm
    return isinstance(module, known) or type(module).__name__.endswith(("LayerNorm", "RMSNorm"))


def check_groups(settings: OptimizerSettings, names: Collection[str]) -> None:
    """Raises `GroupError` unless every name that is given is one of the model's, and in one group only."""
    seen: set[str] = set()
    for group in settings.groups:
        for name in group.names:
            if name not in names:
                raise GroupError(
                    f"a parameter group names {name!r}, but the model has no such parameter; use the names of "
                    "`model.named_parameters()` (a tied parameter has one name)"
                )
            if name in seen:
                raise GroupError(f"parameter {name!r} is in two groups; put it into one")
            seen.add(name)


def segments(unit: ModelUnit, settings: OptimizerSettings) -> tuple[Segment, ...]:
    """The unit's flat buffer in runs of parameters that are updated alike, in order."""
    joined: list[Segment] = []
    for (name, _), length in zip(unit.parameters, unit.lengths, strict=True):
        group = next((group for group in settings.groups if name in group.names), ParameterGroup(names=()))
        decay = settings.weight_decay if group.weight_decay is None else group.weight_decay
        segment = Segment(length=length, weight_decay=decay, lr_factor=group.lr_factor)
        is_odd = length % VECTOR_ELEMENTS != 0
        before = joined[-1] if joined else None
        if before and not is_odd and replace(before, length=length) == segment and before.length % VECTOR_ELEMENTS == 0:
            joined[-1] = replace(before, length=before.length + length)
        else:
            joined.append(segment)
    return tuple(joined)
