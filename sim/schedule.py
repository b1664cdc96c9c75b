"""The schedule language: ops on streams, buffers in tiers, and nothing else.

A `Schedule` is an ordered list of ops. Two executors run it, the SimPy engine (`tierplan.sim.engine`) and the PyTorch
runtime (`tierplan.runtime.execution.executor`), and both obey the same four rules:

1. A stream runs its ops in list order.
2. An op starts when the buffers that it reads are complete (and the ops that it comes `after` have ended) and those
   that it writes have been granted.
3. Each tier grants memory in list order: the next op that needs some gets it once it is next on its stream, its inputs
   are complete and the bytes are free. Until then no op behind it gets any.
4. A buffer is freed when its last reader ends; at once, when the writer ends, if it has none. An initial one has a
   reader, or outlives the step.

Buffers that exist before the step (`initial`) or outlive it (`becomes`) are declared. A buffer may take over the bytes
of another one that its writer reads (`reuses`): that is how an in-place update is written, and it needs no grant.

Rules 1 and 3 fix every order, so whether a schedule completes does not depend on how long its ops take.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tierplan.hwmodels.machine import Rounding, Size, held_bytes
from tierplan.hwmodels.names import on_devices
from tierplan.hwmodels.values.records import Amount, Whole, check_record
from tierplan.sim.step import StepSpec

MOST_BYTES = 1 << 60
"""Of all buffers of a schedule: more are refused, so that sums of what allocators make of them fit into 64 bits."""


class ScheduleError(ValueError):
    """A schedule that breaks a rule of the language. The message names the op or the buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tier:
    """A place with a capacity: `gpu0`, `host`, `nvme`."""

    name: str
    capacity_bytes: Whole
    """What the schedule may hold here at any moment, initial buffers included."""
    rounding: Rounding = "exact"
    """How the allocator of this tier rounds buffers up: `page` (4 KiB) or `power-of-two`. What a buffer holds is what
    is granted, counted and freed; what is moved is its own size."""

    def held_bytes(self, size_bytes: Size) -> Size:
        """As `machine.held_bytes`."""
        return held_bytes(size_bytes, self.rounding)


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """Bytes in one tier, written by one op (or there before the step), read by others, freed after the last reader."""

    name: str
    tier: str
    size_bytes: Whole
    content: str
    """What the bytes are, the same in every tier they visit: `params/L3`, `acts/L3/mb0/2`. The runtime's key."""
    kind: str
    """Class for reports: `params`, `grads`, `states`, `acts`, `work`."""
    initial: bool = False
    """Exists before the step, with no writer."""
    reuses: str | None = None
    """Takes over the bytes of this buffer, which its writer reads; of the same tier and size. An in-place update."""
    becomes: str | None = None
    """Outlives the step, and is this initial buffer in the next one (its own name if nothing rewrites it)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """Work on one stream. `key` is the same in plan, schedule, both traces and the report."""

    key: str
    stream: str
    kind: str
    """What the runtime does: see the table of kinds in docs/design.md. The engine does not look at it."""
    unit: str = ""
    """The part of the model: `embed`, `L12`, `head`."""
    micro_batch: Whole = 0
    work: Mapping[str, Amount] = field(default_factory=dict)
    """Amounts by work kind: `{"matmul_bf16_flops": 2e12}`, `{"bytes": 1e9}`, `{"parameters": 7e6}`, `{"s": 0.1}`."""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    """Keys of ops that must have ended, beside those implied by `reads`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """An ordered list of ops over declared tiers and buffers; `meta` says what it was made from and for."""

    name: str
    tiers: tuple[Tier, ...]
    buffers: tuple[Buffer, ...]
    ops: tuple[Op, ...]
    next_devices: tuple[Whole, ...] = ()
    """Per device, the one that does its part in the next step, which goes on where this one ended: `(1, 2, 0)` turns
    three devices by one. Empty where each device does its own again. Nothing on these devices outlives the step."""
    step: StepSpec | None = None
    """What is trained, for the runtime; None for a schedule that is only simulated."""
    meta: Mapping[str, object] = field(default_factory=dict)
    """Facts for people and reports, as JSON values: policy, names of model and machine. Nothing depends on them."""

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the streams, in order of first use."""
        return tuple(dict.fromkeys(op.stream for op in self.ops))

    def buffers_by_name(self) -> dict[str, Buffer]:
        return {b.name: b for b in self.buffers}

    def bytes_moved(self) -> dict[str, int]:
        """Bytes that each stream moves in the step: the sum of `bytes` work, over streams that have any."""
        moved: dict[str, int] = {}
        for op in self.ops:
            if "bytes" in op.work:
                moved[op.stream] = moved.get(op.stream, 0) + int(op.work["bytes"])
        return moved

    def __repr__(self) -> str:
        return f"<Schedule {self.name}: {len(self.ops):,} ops, {len(self.buffers):,} buffers, {len(self.tiers)} tiers>"


def validate(schedule: Schedule) -> Schedule:
    """The schedule itself, if it obeys the language; otherwise `ScheduleError` naming the op or buffer.

    Checks the types of all fields, names and references, one writer per buffer, list order (a buffer's writer comes
    before its readers, `after` points backwards, a reused buffer's other readers come before), sizes, and that what is
    declared to outlive the step is consistent. Whether memory suffices is the engine's question, not this function's.
    """
    check_record(schedule, ScheduleError, f"schedule {schedule.name!r}: ", depth=-1)
    tiers = _unique("tier", (t.name for t in schedule.tiers))
    _unique("buffer", (b.name for b in schedule.buffers))
    _unique("op", (op.key for op in schedule.ops))
    buffers = schedule.buffers_by_name()
    for b in schedule.buffers:
        if b.tier not in tiers:
            raise ScheduleError(f"buffer {b.name!r} is in tier {b.tier!r}, which is not declared; have {sorted(tiers)}")
        if b.size_bytes > MOST_BYTES:
            raise ScheduleError(
                f"buffer {b.name!r} has {b.size_bytes:,} bytes; more than {MOST_BYTES:,} are not counted: make the "
                "model or the batch smaller"
            )
    _check_next_devices(schedule, tiers)
    writer_of, last_read_at = _check_ops(schedule, buffers)
    _check_lifetimes(schedule, buffers, writer_of, last_read_at)
    return schedule


def _check_next_devices(schedule: Schedule, tiers: set[str]) -> None:
    devices = schedule.next_devices
    if sorted(devices) != [*range(len(devices))]:
        raise ScheduleError(f"next_devices are {devices}; each device from 0 on must be there once")
    for t in schedule.tiers:
        if (following := on_devices(t.name, devices)) not in tiers:
            raise ScheduleError(
                f"next_devices put {following!r} in the place of tier {t.name!r}, but it is not declared"
            )
    for b in schedule.buffers:
        if (b.initial or b.becomes is not None) and on_devices(b.tier, devices) != b.tier:
            raise ScheduleError(
                f"buffer {b.name!r} outlives the step in {b.tier!r}, whose part another device does in the next step; "
                "keep it in host memory, or leave out next_devices"
            )


def _unique(what: str, names: Iterable[str]) -> set[str]:
    seen: set[str] = set()
    an = "an" if what == "op" else "a"
    for name in names:
        if not name:
            raise ScheduleError(f"{an} {what} has an empty name; every {what} needs one")
        if name in seen:
            raise ScheduleError(f"{what} {name!r} is declared twice; names are unique")
        seen.add(name)
    return seen


def _check_ops(schedule: Schedule, buffers: Mapping[str, Buffer]) -> tuple[dict[str, int], dict[str, int]]:
    """Position of each buffer's writer and of its last reader in the list."""
    written_at: dict[str, int] = {}
    last_read_at: dict[str, int] = {}
    done: set[str] = set()
    for position, op in enumerate(schedule.ops):
        if not op.stream:
            raise ScheduleError(f"op {op.key!r} has no stream; every op runs on one")
        for name in (*op.reads, *op.writes):
            if name not in buffers:
                raise ScheduleError(f"op {op.key!r} uses buffer {name!r}, which is not declared")
        if len(set(op.reads)) < len(op.reads) or len(set(op.writes)) < len(op.writes):
            raise ScheduleError(f"op {op.key!r} names a buffer twice; list each once")
        if len(set(op.after)) < len(op.after):
            raise ScheduleError(f"op {op.key!r} comes after one op twice; list each once")
        for name in op.reads:
            if not buffers[name].initial and name not in written_at:
                raise ScheduleError(f"op {op.key!r} reads {name!r}, but no op before it in the list writes that")
            last_read_at[name] = position
        for key in op.after:
            if key not in done:
                raise ScheduleError(f"op {op.key!r} comes after {key!r}, which is not before it in the list")
        for name in op.writes:
            if buffers[name].initial:
                raise ScheduleError(f"op {op.key!r} writes {name!r}, which exists before the step and has no writer")
            if name in written_at:
                other = schedule.ops[written_at[name]].key
                raise ScheduleError(f"op {op.key!r} writes {name!r}, which {other!r} has written; one writer each")
            written_at[name] = position
        done.add(op.key)
    return written_at, last_read_at


def _check_lifetimes(
    schedule: Schedule, buffers: Mapping[str, Buffer], written_at: Mapping[str, int], last_read_at: Mapping[str, int]
) -> None:
    reused_by: dict[str, str] = {}
    became: dict[str, str] = {}
    for b in schedule.buffers:
        if not b.initial and b.name not in written_at:
            raise ScheduleError(f"buffer {b.name!r} is neither initial nor written by any op; remove it or declare it")
        if b.reuses is not None:
            _check_reuse(schedule, buffers, written_at, last_read_at, b)
            if b.reuses in reused_by:
                raise ScheduleError(f"buffers {reused_by[b.reuses]!r} and {b.name!r} both reuse {b.reuses!r}; one may")
            reused_by[b.reuses] = b.name
        if b.becomes is not None:
            target = buffers.get(b.becomes)
            if target is None or not target.initial:
                raise ScheduleError(f"buffer {b.name!r} becomes {b.becomes!r}, which is not an initial buffer")
            if (target.tier, target.size_bytes, target.content) != (b.tier, b.size_bytes, b.content):
                raise ScheduleError(f"buffer {b.name!r} becomes {b.becomes!r}: tier, size and content must be equal")
            if b.becomes in became:
                raise ScheduleError(f"buffers {became[b.becomes]!r} and {b.name!r} both become {b.becomes!r}; one may")
            became[b.becomes] = b.name
    for old, new in reused_by.items():
        if buffers[old].becomes is not None:
            raise ScheduleError(
                f"buffer {old!r} is to outlive the step, but {new!r} reuses its bytes; drop one of both"
            )
    for b in schedule.buffers:
        if b.initial and b.becomes is None and b.name not in last_read_at:
            raise ScheduleError(
                f"buffer {b.name!r} exists before the step, but no op reads it and it does not outlive the step, so it "
                "would hold no bytes; remove it, or declare what it becomes"
            )


def _check_reuse(
    schedule: Schedule,
    buffers: Mapping[str, Buffer],
    written_at: Mapping[str, int],
    last_read_at: Mapping[str, int],
    b: Buffer,
) -> None:
    assert b.reuses is not None
    old = buffers.get(b.reuses)
    if old is None:
        raise ScheduleError(f"buffer {b.name!r} reuses {b.reuses!r}, which is not declared")
    if b.initial:
        raise ScheduleError(f"buffer {b.name!r} exists before the step, so it cannot reuse {b.reuses!r}")
    if (old.tier, old.size_bytes) != (b.tier, b.size_bytes):
        raise ScheduleError(
            f"buffer {b.name!r} ({b.size_bytes} bytes in {b.tier}) reuses {old.name!r} ({old.size_bytes} bytes in "
            f"{old.tier}); tier and size must be equal"
        )
    writer = schedule.ops[written_at[b.name]]
    if b.reuses not in writer.reads:
        raise ScheduleError(f"op {writer.key!r} writes {b.name!r} over {b.reuses!r}, so it must also read that")
    if last_read_at[b.reuses] > written_at[b.name]:
        late = schedule.ops[last_read_at[b.reuses]].key
        raise ScheduleError(f"op {late!r} reads {b.reuses!r} after {writer.key!r} has written {b.name!r} over it")
