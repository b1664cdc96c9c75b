"""What gathers, reductions and sends do: the bodies of the ops that ranks do together; and the norm of all gradients.

Sums are taken in the order of ranks, onto the sum of the micro-batches before, if there is one: each rank adds up its
own shard. So the numbers depend on nothing but the schedule. What is on its way goes through a few MiB at a time.

Shapes: `r` ranks, `n` values.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from tierplan.runtime.autograd.units import ModelUnit
from tierplan.runtime.execution.gradients import flat_gradients, parameter_parts
from tierplan.runtime.execution.instances import Call, Instance
from tierplan.runtime.execution.values import BufferValue, content_of, strides_of, value_of
from tierplan.runtime.optim.adam import NonFiniteGradientError
from tierplan.runtime.optim.states import StateLayout
from tierplan.runtime.ranks.group import Ranks
from tierplan.sim.contents import CastGradients, States, parse_content, part_of_shard, shard
from tierplan.sim.schedule import Schedule

CHUNK_BYTES = 1 << 22
"""What goes from one rank to another at once."""


def shards_of(unit: ModelUnit, num_ranks: int) -> list[range]:
    """By rank, the parameters of the unit whose updates are its own."""
    return [shard(range(unit.num_trained), k, num_ranks) for k in range(num_ranks)]


def own_part(instance: Instance, unit: ModelUnit, ranks: Ranks | None) -> range:
    """The parameters of the unit that a flat buffer has: all, or this rank's shard of them."""
    whole = range(unit.num_trained)
    each = torch.float32.itemsize if isinstance(content_of(instance), CastGradients) else unit.dtype.itemsize
    if ranks is None or instance.buffer.size_bytes >= len(whole) * each:
        return whole
    return shards_of(unit, ranks.size)[ranks.rank]


def with_shards_of_states(schedule: Schedule, layouts: Mapping[str, StateLayout]) -> frozenset[str]:
    """The units of whose states this rank has a shard, and not all."""
    sizes_bytes = Counter[str]()
    for b in schedule.buffers:
        if b.initial and isinstance(content := parse_content(b.content), States):
            sizes_bytes[content.unit] += b.size_bytes
    return frozenset(name for name, size in sizes_bytes.items() if size < layouts[name].size_bytes(layouts[name].whole))


def shard_part(content: States, unit: ModelUnit, rank: int, num_ranks: int) -> range:
    """The parameters whose states a part has of a rank's shard."""
    own = shards_of(unit, num_ranks)[rank]
    part = part_of_shard(len(own), content.part, content.num_parts)
    return range(own.start + part.start, own.start + part.stop)


def copy_bytes(
    new: torch.Tensor, old: torch.Tensor, name: str, units: Sequence[ModelUnit], ranks: Ranks | None
) -> None:
    """Copies (uint8); of parameters that are whole on one side and a rank's shard on the other, that shard."""
    if new.numel() != old.numel():
        assert ranks is not None
        unit = next(unit for unit in units if unit.name == name)
        own = shards_of(unit, ranks.size)[ranks.rank]
        here = slice(own.start * unit.dtype.itemsize, own.stop * unit.dtype.itemsize)
        new, old = (new[here], old) if new.numel() > old.numel() else (new, old[here])
    new.copy_(old, non_blocking=True)


def shard_gradients(value: BufferValue, unit: ModelUnit, ranks: Ranks) -> list[torch.Tensor | None]:
    """By parameter of the unit, what this rank's shard has of its gradient."""
    flat_n, part = value.block.data.view(unit.dtype), shards_of(unit, ranks.size)[ranks.rank]
    parts = parameter_parts(unit, part)
    return [flat_n[own.start - part.start : own.stop - part.start] if own else None for own in parts]


def global_norm(
    own: Sequence[tuple[int, torch.Tensor]], num_parameters: int, ranks: Ranks | None, step: int, dtype: torch.dtype
) -> torch.Tensor:
    """Of norms (`dtype`) by position in the model; with `ranks`, of those of all, by parameter and then by rank.

    A rank that updates nothing has no norm of its own.
    """
    norms = dict(own)
    if ranks is None:
        parts = torch.stack([norms[k] for k in sorted(norms)])
    else:
        rows = ranks.share([norms[k].item() if k in norms else -1.0 for k in range(num_parameters)], "norms")
        each = [row[k] for k in range(num_parameters) for row in rows if row[k] != -1.0]
        parts = torch.tensor(each, dtype=dtype)
    total = torch.linalg.vector_norm(parts, 2.0)
    if not torch.isfinite(total):
        raise NonFiniteGradientError(
            f"the global norm of the gradients is {total.item()} in step {step}; no update was made and the "
            "last committed step is intact. Lower the learning rate, or look at the data of this step"
        )
    return total


def do_collective(call: Call, unit: ModelUnit, target: BufferValue, ranks: Ranks) -> int:
    """Fills `target`, the value of what the op writes. Returns the bytes that this rank has sent."""
    over, shards, each = call.writes[0].over, shards_of(unit, ranks.size), CHUNK_BYTES // unit.dtype.itemsize
    out_n, mine = target.block.data.view(unit.dtype), shards[ranks.rank]
    is_whole = own_part(call.writes[0], unit, ranks) == range(unit.num_trained)
    mine_n = out_n[mine.start : mine.stop] if is_whole else out_n
    is_sum = call.op.kind != "gather"
    if is_sum:
        own = value_of(next(x for x in call.reads if x is not over))
    elif call.reads[0] is not over:
        own_n = value_of(call.reads[0]).block.data.view(unit.dtype)
        mine_n.copy_(own_n if own_n.numel() == len(mine) else own_n[mine.start : mine.stop])
    num_sent = 0
    sent_rn, received_rn = torch.empty(2, ranks.size, min(each, len(shards[0])), dtype=unit.dtype)
    for at in range(0, len(shards[0]), each):
        parts = [own[at : at + each] for own in shards]
        here_n = mine_n[at : at + each]
        if is_sum:
            for part, sent_n in zip(parts, sent_rn, strict=True):
                if part:
                    torch.cat(flat_gradients(own, unit, part), out=sent_n[: len(part)])
            ranks.all_to_all(received_rn, sent_rn)
            for k, received_n in enumerate(received_rn):
                if k == 0 and over is None:
                    here_n.copy_(received_n[: len(here_n)])
                else:
                    here_n.add_(received_n[: len(here_n)])
            num_sent += sum(map(len, parts)) - len(here_n)
        if call.op.kind != "reduce":
            sent_rn[0, : len(here_n)].copy_(here_n)
            ranks.all_gather(received_rn, sent_rn[0])
            num_sent += (ranks.size - 1) * len(here_n)
            for part, received_n in zip(parts, received_rn, strict=True):
                if is_whole:
                    out_n[part.start : part.stop].copy_(received_n[: len(part)])
    return num_sent * unit.dtype.itemsize


NOTICE_BYTES = 1 << 13


def header_from(way: tuple[int, int], ranks: Ranks) -> torch.Tensor:
    """What says how to read the buffer that is sent next on this way; it comes when that one may."""
    ranks.send(header := torch.zeros(NOTICE_BYTES, dtype=torch.uint8), way)
    return header


def do_send(
    call: Call, unit: ModelUnit, way: tuple[int, int], coming: tuple[BufferValue, torch.Tensor] | None, ranks: Ranks
) -> int:
    """Sends a buffer to another rank, or fills the value with what follows a header. Returns the buffer's bytes."""
    if coming is None:
        header = torch.zeros(NOTICE_BYTES, dtype=torch.uint8)
        value = value_of(call.reads[0])
        if value.gradients is not None:  # as autograd made them
            filled: set[int] | None = {k for k, t in enumerate(value.gradients) if t is not None}
            pairs = zip(value.gradients, unit.shapes, strict=True)
            parts = [torch.zeros(n, dtype=unit.dtype) if gradient is None else gradient for gradient, n in pairs]
        else:
            filled, parts = value.filled, [value.handle.memory() if value.handle is not None else value.block.data]
        text = pickle.dumps((filled, [t.numpy() for t in value.rng], strides_of(value)))
        notice = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        header[: len(notice)] = notice
        ranks.send(header, way)
    else:
        target, header = coming
        filled, rng, target.strides = pickle.loads(header.numpy().tobytes())
        target.rng = [torch.from_numpy(t) for t in rng]
        target.filled = None if filled is None or len(filled) == len(unit.shapes) else filled
        parts = [target.block.data] if filled is None else unit.views_in(target.block)
    for part in parts:
        ranks.send(part if coming is not None else part.contiguous(), way)
    return sum(part.nbytes for part in parts)


def joined(own_n: torch.Tensor, unit: ModelUnit, ranks: Ranks) -> torch.Tensor:
    """The parameters of a unit from the shards of all ranks, which ask for them together."""
    shards = shards_of(unit, ranks.size)
    sent_n = torch.zeros(len(shards[0]), dtype=unit.dtype)
    sent_n[: len(own_n)].copy_(own_n)
    received_rn = torch.empty(ranks.size, len(sent_n), dtype=unit.dtype)
    ranks.all_gather(received_rn, sent_n, "steps")
    return torch.cat([row_n[: len(own)] for row_n, own in zip(received_rn, shards, strict=True)])
