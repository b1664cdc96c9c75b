"""What one of several devices does: its rank's part of a schedule in which all do the same on data of their own.

Every rank has the schedule of the first device, whose names it keeps, with the sizes of its own shards. So all have
the same ops in the same order; collectives are then *joint*: a part on every rank, which start when all are granted.
Host cores and drives do a rank's share of what the schedule lets them do for all, and their tiers are shared equally.

RankError(ValueError)   devices that do not do alike
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tierplan.hwmodels.names import DEVICE, device, device_index, parse_stream
from tierplan.sim.schedule import Buffer, Op, Schedule, validate
from tierplan.sim.trace import MemoryEvent, Span, Trace, peaks

COLLECTIVES = ("gather", "reduce", "all_reduce")
"""Kinds of op that all devices do together."""
TIMES = ("free_ns", "ready_ns", "start_ns", "end_ns", "granted_ns")


class RankError(ValueError):
    """Devices that do not do alike."""


def num_ranks(schedule: Schedule) -> int:
    """How many devices work in a schedule, each of which a rank executes."""
    return max(1, len({parse_stream(stream).device for stream in schedule.streams} - {None}))


def rank_schedule(schedule: Schedule, rank: int) -> Schedule:
    """What one rank executes. Raises `RankError` where devices do different things."""
    num, buffers = num_ranks(schedule), schedule.buffers_by_name()
    if num == 1:
        return schedule
    keys = {op.key: op.stream for op in schedule.ops}
    own = [op for op in schedule.ops if _owner(op.key, op.stream) in (None, 0)]
    num_shared = sum(_owner(op.key, op.stream) is None for op in own)
    for op in own:
        matches = [(r, _on(op.key, r)) for r in range(num) if _owner(op.key, op.stream) == 0]
        if any(key not in keys or _owner(key, keys[key]) != r for r, key in matches):
            raise _unlike(schedule, f"op {op.key!r} has no match on every device")
    if num_shared + num * (len(own) - num_shared) != len(schedule.ops):
        raise _unlike(schedule, "some devices have ops that the first has not")
    local: dict[str, Buffer] = {}
    for b in schedule.buffers:
        owner = _owner(b.name, b.tier)
        if owner in (None, 0):
            of_rank = buffers.get(b.name if owner is None else _on(b.name, rank))
            if of_rank is None:
                raise _unlike(schedule, f"buffer {b.name!r} has no match on device {rank}")
            local[b.name] = replace(b, size_bytes=of_rank.size_bytes)
    kept = {op.key for op in own}
    ops = tuple(_own_part(schedule, op, local, kept, num) for op in own)
    tiers = (
        t if t.name == DEVICE else replace(t, capacity_bytes=t.capacity_bytes // num)
        for t in schedule.tiers
        if device_index(t.name) in (None, 0)
    )
    return validate(replace(schedule, tiers=tuple(tiers), buffers=tuple(local.values()), ops=ops))


def joined_trace(ranks: Sequence[tuple[Trace, int]]) -> Trace:
    """What all ranks did as one trace of their schedule, each with when it began, by a clock that they share.

    Of what the host or a drive does for all, the spans are those of the first rank's share; bytes are those of all.
    """
    spans, memory, capacity_bytes = list[Span](), list[MemoryEvent](), dict[str, int]()
    for rank, (trace, begun_ns) in enumerate(ranks):
        late_ns = begun_ns - min(begun_ns for _, begun_ns in ranks)

        def tier(name: str, rank: int = rank) -> str:
            return device(rank) if name == DEVICE else name

        for s in trace.spans:
            stream, owner = parse_stream(s.stream), _owner(s.key, s.stream)
            if owner is not None or rank == 0:
                times = {name: t + late_ns for name, t in s._asdict().items() if name in TIMES and t >= 0}
                on = s.stream if stream.device is None else stream.on(rank)
                spans.append(s._replace(key=s.key if owner is None else _on(s.key, rank), stream=on, **times))
        memory += [e._replace(time_ns=e.time_ns + late_ns, tier=tier(e.tier)) for e in trace.memory]
        for name, size in trace.capacity_bytes.items():
            capacity_bytes[tier(name)] = capacity_bytes.get(tier(name), 0) + size
    memory.sort(key=lambda e: e.time_ns)
    return replace(
        ranks[0][0],
        spans=tuple(sorted(spans, key=lambda s: s.start_ns)),
        memory=tuple(memory),
        capacity_bytes=capacity_bytes,
        peak_bytes=peaks(memory, capacity_bytes),
    )


def _owner(name: str, place: str) -> int | None:
    """The device whose buffer or op it is; None for what the host does for all."""
    index = parse_stream(place).device
    return device_index(name.rpartition("/")[2]) if index is None else index


def _on(name: str, rank: int) -> str:
    """What device `rank` calls its own of the first device's."""
    stem = name.removesuffix(f"@{DEVICE}")
    own = stem.removesuffix(f"/{DEVICE}")
    return own + (f"/{device(rank)}" if own != stem else "") + (f"@{device(rank)}" if stem != name else "")


def _own_part(schedule: Schedule, op: Op, local: dict[str, Buffer], kept: set[str], num: int) -> Op:
    is_shared = _owner(op.key, op.stream) is None
    reads = tuple(name for name in op.reads if name in local)
    if len(reads) < len(op.reads) and not is_shared and op.kind not in COLLECTIVES:
        raise _unlike(schedule, f"op {op.key!r} reads what lies on another device")
    if op.kind in COLLECTIVES and len(op.writes) != 1:
        raise _unlike(schedule, f"op {op.key!r} is of parts of operators")
    work = {kind: amount / num if is_shared else amount for kind, amount in op.work.items()}
    if op.kind == "copy" and "bytes" in work and reads:
        work["bytes"] = float(min(local[reads[0]].size_bytes, local[op.writes[0]].size_bytes))
    return replace(
        op,
        work=work,
        reads=reads,
        writes=tuple(name for name in op.writes if name in local),
        after=tuple(key for key in op.after if key in kept),
    )


def _unlike(schedule: Schedule, why: str) -> RankError:
    return RankError(
        f"schedule {schedule.name!r} does not do the same on each of its devices, which only the simulator executes "
        f"({why}); the runtime executes data parallelism (ddp, zero-1, zero-2, zero-3, fsdp)"
    )
