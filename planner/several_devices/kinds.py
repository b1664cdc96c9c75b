"""What ops and buffers are, as numbers in place of names: all that decides how several devices divide them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tierplan.planner.several_devices import dividing
from tierplan.planner.several_devices.dividing import NONE, OTHER
from tierplan.sim.columns import Int32, Int64, Labels
from tierplan.sim.contents import (
    Content,
    Frozen,
    Gradients,
    Input,
    InputGradient,
    Params,
    Shared,
    States,
    TiedGradients,
    parse_content,
)

__all__ = ["BUFFER_KINDS", "ENDS", "OP_KINDS", "OTHER", "Kinds", "kinds_of", "number_of"]

OP_KINDS = {
    "copy": dividing.COPY,
    "update": dividing.UPDATE,
    "forward": dividing.FORWARD,
    "recompute": dividing.RECOMPUTE,
    "backward": dividing.BACKWARD,
}
BUFFER_KINDS = {
    "params": dividing.PARAMS,
    "grads": dividing.GRADS,
    "states": dividing.STATES,
    "acts": dividing.ACTS,
    "work": dividing.WORK,
}
CONTENTS: dict[type, int] = {
    Params: dividing.OF_PARAMS,
    Frozen: dividing.OF_FROZEN,
    Gradients: dividing.OF_GRADIENTS,
    TiedGradients: dividing.OF_TIED_GRADIENTS,
    Input: dividing.OF_INPUT,
    InputGradient: dividing.OF_INPUT_GRADIENT,
    Shared: dividing.OF_SHARED,
}
ENDS = {"embed": dividing.EMBED, "head": dividing.HEAD}


class Kinds(NamedTuple):
    """What ops and buffers are, as numbers of `dividing`."""

    op_kind: Int32
    op_unit: Int32
    op_batch: Int32
    """Its micro-batch."""
    kind: Int32
    content: Int32
    unit: Int32
    """Of what a buffer holds; any where it belongs to none."""
    lengths: Int64
    """By unit: how many parameters are trained; 0 where nobody says."""
    ends: Int32
    """By unit: `EMBED`, `HEAD` or `OTHER`."""


def number_of(content: Content) -> int:
    """What it is, as a number."""
    if isinstance(content, States) and 1 < content.num_parts < dividing.MOST_PARTS:
        return dividing.STATES_IN_PARTS + content.num_parts * dividing.MOST_PARTS + content.part
    return CONTENTS.get(type(content), OTHER)


def kinds_of(labels: Labels) -> Kinds:
    """What ops and buffers are, by their names."""
    contents = [parse_content(b.content) for b in labels.buffers]
    units: dict[str, int] = {}
    of_buffers = [
        units.setdefault(unit, len(units)) if (unit := getattr(content, "unit", "")) else NONE for content in contents
    ]
    of_ops = [units.setdefault(op.unit, len(units)) for op in labels.ops]
    lengths = {} if labels.step is None else {u.name: u.num_parameters for u in labels.step.units}
    return Kinds(
        op_kind=np.array([OP_KINDS.get(op.kind, OTHER) for op in labels.ops], np.int32),
        op_unit=np.array(of_ops, np.int32),
        op_batch=np.array([op.micro_batch for op in labels.ops], np.int32),
        kind=np.array([BUFFER_KINDS.get(b.kind, OTHER) for b in labels.buffers], np.int32),
        content=np.array([number_of(content) for content in contents], np.int32),
        unit=np.array(of_buffers, np.int32),
        lengths=np.array([lengths.get(name, 0) for name in units], np.int64),
        ends=np.array([ENDS.get(name, OTHER) for name in units], np.int32),
    )
