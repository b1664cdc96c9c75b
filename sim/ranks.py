"""What one of several devices does: its rank's part of a schedule in which all do the same on data of their own.

Every rank has the schedule of the first device, whose names it keeps, with the sizes of its own shards. So all have
the same ops in the same order; collectives are then *joint*: a part on every rank, which start when all are granted.
Host cores and drives do a rank's share of what the schedule lets them do for all, and their tiers are shared equally;
among the stages of a pipeline, which need unequal amounts, in proportion to what each needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tierplan.hwmodels.names import DEVICE, device, device_index, parse_stream
from tierplan.sim.analysis.completion import completes
from tierplan.sim.columns import columns_of, unroll
from tierplan.sim.compiled.graph_columns import graph_columns
from tierplan.sim.compiled.readiness import least_free
from tierplan.sim.schedule import Buffer, Op, Schedule, validate
from tierplan.sim.trace import MemoryEvent, Span, Trace, peaks

COLLECTIVES = ("gather", "reduce", "all_reduce")
"""Kinds of op that all devices do together. Their places here are their numbers where work is divided."""
SEND = "send"
"""What two of them do together, in a pipeline: each executes its own stage."""
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
    if is_pipeline(schedule):
        return _stage(schedule, rank, num)
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
            share = of_rank.size_bytes if owner == 0 else -(-b.size_bytes // num)
            local[b.name] = replace(b, size_bytes=share)
    return _executed(schedule, own, local, 0, num)


def is_pipeline(schedule: Schedule) -> bool:
    """Whether devices hand micro-batches on to each other, and share none."""
    return any(op.kind == SEND for op in schedule.ops)


def stages(schedule: Schedule) -> dict[str, int]:
    """By unit, the rank that updates it; nothing where all ranks have all."""
    updates = [op for op in schedule.ops if op.kind == "update"] if is_pipeline(schedule) else []
    return {op.unit: _owner(op.key, op.stream) or 0 for op in updates}


@dataclass(eq=False, slots=True)
class Turn:
    """What a rank of a pipeline does with a micro-batch in one go."""

    units: range
    """Indices of those that it runs, forward first."""
    is_visit: bool = False
    """The units leave afterwards, and with them all that is not in a buffer."""
    goes_back: bool = False
    """Backward follows in the same turn."""
    is_one_of: bool = False
    """It has others with the micro-batch, of other stages, before backward."""


def turns(schedule: Schedule) -> dict[str, Turn]:
    """By key of each op that computes units in a rank's part of a pipeline, its turn.

    What a pack does not leave behind when it goes (`leave`) is not there when it comes again: then its recomputation is
    the forward that backward follows.
    """
    index = {unit.name: k for k, unit in enumerate(schedule.step.units)} if schedule.step else {}
    turn_of: dict[str, Turn] = {}
    begun: dict[int, list[Turn]] = {}
    for op in schedule.ops if any(op.kind == SEND for op in schedule.ops) else ():
        if op.kind == "leave":
            for turn in (turn for some in begun.values() for turn in some):
                turn.is_visit = True
            begun.clear()
        elif op.kind in ("forward", "recompute", "backward") and op.unit in index:
            unit, some = index[op.unit], begun.setdefault(op.micro_batch, [])
            if not any(unit in turn.units or unit == turn.units.stop for turn in some):
                some.append(Turn(range(unit, unit)))
                for turn in some:
                    turn.is_one_of = len(some) > 1
            turn = next(turn for turn in some if unit in turn.units or unit == turn.units.stop)
            turn.units = range(turn.units.start, max(turn.units.stop, unit + 1))
            turn.goes_back |= op.kind == "backward"
            turn_of[op.key] = turn
    return turn_of


def ends_of_sends(schedule: Schedule) -> dict[str, tuple[int, int]]:
    """By key of each op that sends, from which rank to which."""
    owners, ends = {b.name: _owner(b.name, b.tier) for b in schedule.buffers}, {}
    for op in schedule.ops:
        if op.kind == SEND:
            source, target = (owners[names[0]] if names else None for names in (op.reads, op.writes))
            if source is None or target is None or source == target or len(op.writes) > 1:
                raise _unlike(schedule, f"op {op.key!r} does not send from one device to another")
            ends[op.key] = source, target
    return ends


def _stage(schedule: Schedule, rank: int, num: int) -> Schedule:
    """What a rank has of a pipeline, its device called the first one: a send is an op of both ranks, which has what
    each of them reads and writes."""
    ends = ends_of_sends(schedule)
    if any(op.key not in ends and _owner(op.key, op.stream) is None for op in schedule.ops):
        raise _unlike(schedule, "stages that leave their devices")
    parts = [_part_of_stage(schedule, ends, r, num) for r in range(num)]
    needs = [_least_bytes(part) for part in parts]
    totals = {t.name: sum(need[t.name] for need in needs) for t in schedule.tiers if device_index(t.name) is None}
    capacity = {t.name: t.capacity_bytes for t in schedule.tiers}
    shares = {name: capacity[name] * needs[rank][name] // total for name, total in totals.items() if total}
    own = (replace(t, capacity_bytes=shares.get(t.name, t.capacity_bytes)) for t in parts[rank].tiers)
    part = replace(parts[rank], tiers=tuple(own))
    tight = next((name for name, total in totals.items() if total > capacity[name]), None)
    if tight is not None and not completes(unroll(part, 2)):
        each = " + ".join(f"{need[tight]:,}" for need in needs)
        raise RankError(
            f"schedule {schedule.name!r} has stages that need {each} = {totals[tight]:,} bytes in tier {tight!r}, "
            f"which has {capacity[tight]:,}: each rank has a part of it for itself, also while others need less. Raise "
            f"the capacity of {tight!r}, or choose a plan that keeps less there"
        )
    return part


def _part_of_stage(schedule: Schedule, ends: Mapping[str, tuple[int, int]], rank: int, num: int) -> Schedule:
    own = [op for op in schedule.ops if rank in ends.get(op.key, (_owner(op.key, op.stream),))]
    written = {name for op in own for name in op.writes}
    owner_of = ((b, _owner(b.name, b.tier)) for b in schedule.buffers)
    has = (b for b, owner in owner_of if owner == rank or (owner is None and b.name in written))
    return _executed(schedule, own, {b.name: replace(b, tier=_swapped(b.tier, rank)) for b in has}, rank, num)


def _least_bytes(part: Schedule) -> dict[str, int]:
    """By tier, with how much a part surely completes: what it holds if its ops run one by one, in list order."""
    graph = graph_columns(columns_of(part))
    return dict(zip([t.name for t in part.tiers], (graph.capacity_bytes - least_free(graph)).tolist(), strict=True))


def _executed(schedule: Schedule, own: Sequence[Op], local: dict[str, Buffer], rank: int, num: int) -> Schedule:
    """These ops and buffers as a schedule of one device, which is called the first one. Host and drives are shared."""
    kept, here = {op.key for op in own}, partial(_swapped, rank=rank)
    ops = (replace(_own_part(schedule, op, local, kept, num), stream=here(op.stream)) for op in own)
    tiers = (
        replace(
            t,
            name=here(t.name),
            capacity_bytes=t.capacity_bytes if t.name == device(rank) else t.capacity_bytes // num,
        )
        for t in schedule.tiers
        if device_index(t.name) in (None, rank)
    )
    return validate(replace(schedule, tiers=tuple(tiers), buffers=tuple(local.values()), ops=tuple(ops)))


def joined_trace(ranks: Sequence[tuple[Trace, int]]) -> Trace:
    """What all ranks did as one trace of their schedule, each with when it began, by a clock that they share.

    Of what the host or a drive does for all, the spans are those of the first rank's share; bytes are those of all.
    """
    spans, memory, capacity_bytes, moved_bytes = list[Span](), list[MemoryEvent](), Counter[str](), Counter[str]()
    for rank, (trace, begun_ns) in enumerate(ranks):
        late_ns = begun_ns - min(begun_ns for _, begun_ns in ranks)
        for s in trace.spans:
            stream, owner = parse_stream(s.stream), _owner(s.key, s.stream)
            if stream.device in (None, 0) and (owner is not None or rank == 0):  # what it receives is the sender's
                times = {name: t + late_ns for name, t in s._asdict().items() if name in TIMES and t >= 0}
                key = s.key if owner is None else _on(s.key, rank)
                spans.append(s._replace(key=key, stream=_swapped(s.stream, rank), **times))
        memory += [e._replace(time_ns=e.time_ns + late_ns, tier=_swapped(e.tier, rank)) for e in trace.memory]
        capacity_bytes.update({_swapped(tier, rank): size for tier, size in trace.capacity_bytes.items()})
        counted: Any = trace.meta.get("bytes_per_step", {})
        sent = {stream: size for stream, size in counted.items() if parse_stream(stream).device in (None, 0)}
        moved_bytes.update({_swapped(stream, rank): size for stream, size in sent.items()})
    memory.sort(key=lambda e: e.time_ns)
    return replace(
        ranks[0][0],
        spans=tuple(sorted(spans, key=lambda s: s.start_ns)),
        memory=tuple(memory),
        capacity_bytes=dict(capacity_bytes),
        peak_bytes=peaks(memory, capacity_bytes),
        meta={**ranks[0][0].meta, "bytes_per_step": dict(moved_bytes)},
    )


def _swapped(place: str, rank: int) -> str:
    """What a rank, whose device is the first one to it, calls a tier or stream; and the other way."""
    names = {device(0): device(rank), device(rank): device(0)}
    return ".".join(names.get(word, word) for word in place.split("."))


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
    if len(reads) < len(op.reads) and not is_shared and op.kind not in (*COLLECTIVES, SEND, "clip"):
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
        f"({why}); the runtime executes data parallelism (ddp, zero-1, zero-2, zero-3, fsdp), megatron-pp, "
        "and harmony-dp and harmony-pp with option host_memory=own"
    )
