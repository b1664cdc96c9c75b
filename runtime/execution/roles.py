"""What the buffers of a computing op are to its body: worked out once, by their positions among what it reads and
writes, since an op is the same in every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tierplan.runtime.autograd.units import FlatParameters, ModelUnit
from tierplan.sim.contents import (
    Frozen,
    Gradients,
    Input,
    InputGradient,
    KeptActs,
    Params,
    RecomputedActs,
    SavedActs,
    TiedGradients,
    parse_content,
)
from tierplan.sim.schedule import Buffer, Op


class GradientRole(NamedTuple):
    """A gradient that a backward writes."""

    at: int
    unit: ModelUnit
    tied_at: int | None
    """Where the op reads what a tied head has of it."""
    is_whole: bool
    """It is a unit's, and no tied head's share."""


class Roles(NamedTuple):
    """Of one op."""

    parameters: tuple[tuple[int, FlatParameters], ...]
    """That it reads, and whose memory they are."""
    outputs: tuple[int, ...]
    """Inputs of units that it writes."""
    kept: tuple[int, ...]
    """Saved tensors that stay, or are made again."""
    saved: tuple[tuple[int, tuple[int, ...]], ...]
    """Saved tensors that go their own way, with their indices."""
    gradients: tuple[GradientRole, ...]
    input_gradients: tuple[int, ...]


def roles_of(op: Op, buffers: dict[str, Buffer], unit_of: Callable[[str], ModelUnit]) -> Roles:
    """Those of a computing op's buffers; `buffers` and `unit_of` know them by name."""
    reads = [parse_content(buffers[name].content) for name in op.reads]
    writes = [parse_content(buffers[name].content) for name in op.writes]
    tied_at = {content.unit: k for k, content in enumerate(reads) if isinstance(content, TiedGradients)}
    parameters, saved, gradients = [], [], []
    for k, content in enumerate(reads):
        if isinstance(content, Params | Frozen):
            unit = unit_of(content.unit)
            parameters.append((k, unit if isinstance(content, Params) else unit.frozen))
    for k, content in enumerate(writes):
        if isinstance(content, SavedActs):
            saved.append((k, content.indices))
        elif isinstance(content, Gradients | TiedGradients):
            is_whole = isinstance(content, Gradients)
            tied = tied_at.get(content.unit) if is_whole else None
            gradients.append(GradientRole(k, unit_of(content.unit), tied, is_whole))

    def written(*kinds: type) -> tuple[int, ...]:
        return tuple(k for k, content in enumerate(writes) if isinstance(content, kinds))

    kept = written(KeptActs, RecomputedActs)
    return Roles(tuple(parameters), written(Input), kept, tuple(saved), tuple(gradients), written(InputGradient))
