"""How the ops of a schedule's compute stream follow each other: what a micro-batch's run of the model may rely on."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tierplan.hwmodels.names import COMPUTE, DEVICE
from tierplan.sim.contents import Frozen, Input, Params, RecomputedActs, SavedActs, Shared, parse_content
from tierplan.sim.schedule import Schedule


@dataclass(frozen=True)
class Flow:
    """Of a process that runs all units, which are known by their index; for others nothing is known."""

    followed: Collection[str] = ()
    """Keys of the forwards behind which the next op is the next unit's forward of the same micro-batch."""
    in_one: Collection[int] = ()
    """Micro-batches in which all units follow each other so."""
    unmoved: Collection[int] = ()
    """Units of which nothing that backward reads has been elsewhere since forward: autograd may hold it by itself."""
    inputs_away: Collection[int] = ()
    """Units whose input leaves the device, or is dropped and made again, as far as it is theirs alone."""
    inputs_there: Collection[int] = ()
    """Units whose input stays until their backward."""
    again: Collection[int] = ()
    """Units that are run again, if only for the input of the next one."""
    apart: Mapping[int, Collection[tuple[int, ...]]] = field(default_factory=dict)
    """As in `treated_apart`."""


def treated_apart(schedule: Schedule) -> dict[str, Collection[tuple[int, ...]]]:
    """Units of which the schedule treats saved tensors apart, and which may save others than it is for: where batches
    are padded, one in which nothing is has no mask. With those that are moved together. Not of what leaves in codes,
    which is of its own form."""
    assert schedule.step is not None
    if not schedule.step.training.padded or schedule.step.training.activation_format:
        return {}
    contents = {content for b in schedule.buffers if isinstance(content := parse_content(b.content), SavedActs)}
    units = [u for u in schedule.step.units if u.moved or 0 < len(u.recomputed) < len(u.saved)]
    return {u.name: {content.indices for content in contents if content.unit == u.name} for u in units}


def flow_of(schedule: Schedule, units: Sequence[str]) -> Flow:
    """That of a process which runs all of these units."""
    ops = [op for op in schedule.ops if op.stream == COMPUTE]
    followed = {
        op.key: op.micro_batch
        for op, later in itertools.pairwise(ops)
        if (op.kind, later.kind) == ("forward", "forward") and op.micro_batch == later.micro_batch
    }
    count = Counter(followed.values())
    contents = {b.name: parse_content(b.content) for b in schedule.buffers}
    read: dict[tuple[str, int], list[set[str]]] = {}
    for op in ops:
        if op.kind in ("forward", "backward"):
            wanted = (n for n in op.reads if isinstance(contents[n], Params | Frozen | Input | Shared | SavedActs))
            read.setdefault((op.unit, op.micro_batch), []).append(set(wanted))
    moved = {unit for (unit, _), reads in read.items() if len(reads) != 2 or reads[0] != reads[1]}
    again = {content.unit for content in contents.values() if isinstance(content, RecomputedActs)}
    moved |= again
    inputs = [(content, b.tier) for b in schedule.buffers if isinstance(content := contents[b.name], Input)]
    num_made = Counter(content for content, _ in inputs)
    away = {content.unit for content, tier in inputs if tier != DEVICE or num_made[content] > 1}
    return Flow(
        frozenset(followed),
        frozenset(m for m, n in count.items() if n + 1 == len(units)),
        frozenset(i for i, name in enumerate(units) if name not in moved),
        frozenset(i for i, name in enumerate(units) if name in away),
        frozenset(i for i, name in enumerate(units) if name not in away),
        frozenset(i for i, name in enumerate(units) if name in again),
        {units.index(name): together for name, together in treated_apart(schedule).items() if name in units},
    )
