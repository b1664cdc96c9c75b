"""A schedule as columns: one array per field, for making or executing thousands of schedules.

Ops and buffers are numbered by their place in the list. Arrays hold all that decides how a schedule runs. Keys, names,
contents and kinds, which only people and the runtime read, are behind `labels` and are made when they are first used.
`columns_of` and `ScheduleColumns.schedule` convert between objects and columns without loss.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tierplan.hwmodels.names import on_devices
from tierplan.sim.compiled.compiler import compiled
from tierplan.sim.contents import step_prefix
from tierplan.sim.schedule import Buffer, Op, Schedule, ScheduleError, Tier
from tierplan.sim.step import StepSpec

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]


class Work(NamedTuple):
    """What an op does, as far as its price depends on it. Ops of the same work cost the same."""

    stream: str
    amounts: Mapping[str, float]


class Works:
    """The works of all ops so far, each once. With types: 1 and 1.0 cost the same, but are not the same in a file."""

    def __init__(self) -> None:
        self.listed: list[Work] = []
        self._numbers: dict[tuple[object, ...], int] = {}

    def number(self, stream: str, amounts: Mapping[str, float]) -> int:
        """Its place in `listed`."""
        signature = (stream, *amounts.items(), *map(type, amounts.values()))
        number = self._numbers.setdefault(signature, len(self.listed))
        if number == len(self.listed):
            self.listed.append(_work(signature, len(amounts)))
        return number


@lru_cache(maxsize=2**13)
def _work(signature: tuple[Any, ...], num_amounts: int) -> Work:
    """The same object for the same work, so that what it costs on a machine is known for the next schedule too."""
    return Work(signature[0], dict(signature[1 : 1 + num_amounts]))


class Lists(NamedTuple):
    """A list of numbers per op, all in one array: those of op i are `items[begins[i] : begins[i + 1]]`."""

    begins: Int32
    """One more than there are ops."""
    items: Int32


class OpLabel(NamedTuple):
    """What people and the runtime read of an op."""

    key: str
    kind: str
    unit: str
    micro_batch: int


class BufferLabel(NamedTuple):
    """What people and the runtime read of a buffer."""

    name: str
    content: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """What a schedule is called and what is in it, in words."""

    name: str
    ops: Sequence[OpLabel]
    buffers: Sequence[BufferLabel]
    step: StepSpec | None
    meta: Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScheduleColumns:
    """As `Schedule`, with arrays for its ops and buffers. Arrays are shared between columns and never written to."""

    tiers: tuple[Tier, ...]
    works: tuple[Work, ...]
    """All that ops do, each once."""
    op_work: Int32
    """Per op: its place in `works`."""
    reads: Lists
    """Buffers that each op reads, as listed in `Op.reads`."""
    writes: Lists
    after: Lists
    """Ops that must have ended, beside those implied by `reads`."""
    buffer_tier: Int32
    """Per buffer: its place in `tiers`."""
    buffer_bytes: Int64
    """Per buffer: its own size, before its tier's allocator rounds it up."""
    buffer_initial: Bool
    """Per buffer: whether it exists before the step."""
    buffer_reuses: Int32
    """Per buffer: the buffer whose bytes it takes over; -1 for none."""
    buffer_becomes: Int32
    """Per buffer: the initial buffer that it is in the next step; -1 for one that does not outlive the step."""
    labels: Callable[[], Labels]
    """Makes the names. They may be asked for several times, or never."""
    next_devices: tuple[int, ...] = ()

    @property
    def num_ops(self) -> int:
        return len(self.op_work)

    @property
    def steps_around(self) -> int:
        """Steps after which every device does again what it does in the first one: 1 where it does so in each."""
        devices, num = self.next_devices, 1
        while devices != (*range(len(devices)),):
            devices, num = tuple(self.next_devices[d] for d in devices), num + 1
        return num

    @property
    def once_around(self) -> ScheduleColumns:
        """So many steps that every device has done each part as often as the others that it takes turns with."""
        return self if self.steps_around == 1 else self.unrolled(self.steps_around)

    @property
    def num_buffers(self) -> int:
        return len(self.buffer_tier)

    def bytes_moved(self) -> dict[str, int]:
        """As `Schedule.bytes_moved`; the mean over the steps that go once around devices."""
        moved: dict[str, int] = {}
        for work, num in self.once_around.counted_works():
            if "bytes" in work.amounts:
                moved[work.stream] = moved.get(work.stream, 0) + num * int(work.amounts["bytes"])
        return {stream: size // self.steps_around for stream, size in moved.items()}

    def counted_works(self) -> list[tuple[Work, int]]:
        """What ops do, and how many do it."""
        counts = np.bincount(self.op_work, minlength=len(self.works)).tolist()
        return [(work, num) for work, num in zip(self.works, counts, strict=True) if num]

    @property
    def streams(self) -> tuple[str, ...]:
        used, first = np.unique(self.op_work, return_index=True)
        return tuple(dict.fromkeys(self.works[w].stream for w in used[np.argsort(first)].tolist()))

    def reordered(self, order: Int32) -> ScheduleColumns:
        """The same ops listed in another order: op `order[k]` at place k."""
        place = np.empty(self.num_ops, np.int32)
        place[order] = np.arange(self.num_ops, dtype=np.int32)
        after = _gathered(self.after, order)

        def labels() -> Labels:
            listed = self.labels()
            return replace(listed, ops=[listed.ops[i] for i in order.tolist()])

        return replace(
            self,
            op_work=self.op_work[order],
            reads=_gathered(self.reads, order),
            writes=_gathered(self.writes, order),
            after=after._replace(items=place[after.items]),
            labels=labels,
        )

    def unrolled(self, num_steps: int) -> ScheduleColumns:
        """As `unroll`, without making names."""
        initial = self.buffer_initial
        if num_steps < 1:
            raise ScheduleError(f"cannot unroll {num_steps} steps; it must be 1 or more")
        numbers, reuses, becomes = _numbered(initial, self.buffer_reuses, self.buffer_becomes, num_steps)
        if lost := np.flatnonzero(numbers[-1] < 0).tolist():
            names = self.labels().buffers
            raise ScheduleError(
                f"initial buffer {min(names[b].name for b in lost)!r} has no buffer that becomes it, so a second step "
                "would lack it; declare `becomes` on the buffer that outlives the step"
            )
        fresh = np.flatnonzero(~initial)
        written = [np.arange(self.num_buffers), *[fresh] * (num_steps - 1)]  # by step: initial buffers come once
        origin, ops = np.concatenate(written), np.arange(num_steps * self.num_ops, dtype=np.int32)
        works, op_works, tiers, next_devices = self._turned(num_steps)

        def labels() -> Labels:
            one = self.labels()
            steps = [(step_prefix(k), [one.buffers[b] for b in buffers.tolist()]) for k, buffers in enumerate(written)]
            return Labels(
                name=f"{one.name} x{num_steps}",
                ops=[OpLabel(prefix + op.key, *op[1:]) for prefix, _ in steps for op in one.ops],
                buffers=[BufferLabel(prefix + b.name, *b[1:]) for prefix, buffers in steps for b in buffers],
                step=one.step,
                meta={**one.meta, "num_steps": num_steps},
            )

        return replace(
            self,
            works=works,
            op_work=np.concatenate(op_works),
            reads=_repeated(self.reads, numbers),
            writes=_repeated(self.writes, numbers),
            after=_repeated(self.after, ops.reshape(num_steps, -1)),
            buffer_tier=np.concatenate([tier[b] for tier, b in zip(tiers, written, strict=True)]),
            buffer_bytes=self.buffer_bytes[origin],
            buffer_initial=self.buffer_initial[origin],
            buffer_reuses=reuses,
            buffer_becomes=becomes,
            labels=labels,
            next_devices=next_devices,
        )

    def _turned(self, num_steps: int) -> tuple[tuple[Work, ...], list[Int32], list[Int32], tuple[int, ...]]:
        """All works of so many steps; by step, `op_work` and `buffer_tier` there; and the devices of the step behind.

        Keys and contents go on naming the device of the first step.
        """
        if not self.next_devices:
            return self.works, [self.op_work] * num_steps, [self.buffer_tier] * num_steps, ()
        works, devices, op_works, tiers = Works(), (*range(len(self.next_devices)),), list[Int32](), list[Int32]()
        tier_number = {t.name: i for i, t in enumerate(self.tiers)}
        for _ in range(num_steps):
            turned = [works.number(on_devices(work.stream, devices), work.amounts) for work in self.works]
            op_works.append(np.array(turned, np.int32)[self.op_work])
            tiers.append(
                np.array([tier_number[on_devices(t.name, devices)] for t in self.tiers], np.int32)[self.buffer_tier]
            )
            devices = tuple(self.next_devices[d] for d in devices)
        return tuple(works.listed), op_works, tiers, devices

    def schedule(self) -> Schedule:
        """The schedule as objects."""
        labels = self.labels()
        names = [b.name for b in labels.buffers]
        keys = [op.key for op in labels.ops]
        tier_names = [t.name for t in self.tiers]
        linked = ((self.reads, names), (self.writes, names), (self.after, keys))
        links = ([tuple([texts[i] for i in row]) for row in rows_of(lists)] for lists, texts in linked)
        ops = [
            Op(**label._asdict(), stream=work.stream, work=work.amounts, reads=reads, writes=writes, after=after)
            for label, w, reads, writes, after in zip(labels.ops, self.op_work.tolist(), *links, strict=True)
            for work in [self.works[w]]
        ]
        columns = (self.buffer_tier, self.buffer_bytes, self.buffer_initial, self.buffer_reuses, self.buffer_becomes)
        buffers = [
            Buffer(
                **label._asdict(),
                tier=tier_names[tier],
                size_bytes=size_bytes,
                initial=initial,
                reuses=names[reuses] if reuses >= 0 else None,
                becomes=names[becomes] if becomes >= 0 else None,
            )
            for label, tier, size_bytes, initial, reuses, becomes in zip(
                labels.buffers, *(column.tolist() for column in columns), strict=True
            )
        ]
        return Schedule(
            name=labels.name,
            tiers=self.tiers,
            buffers=tuple(buffers),
            ops=tuple(ops),
            next_devices=self.next_devices,
            step=labels.step,
            meta=labels.meta,
        )

    def __reduce__(self) -> tuple[object, ...]:  # what makes names cannot be pickled, and names can
        with collector_paused():
            return columns_of, (self.schedule(),)


def columns_of(schedule: Schedule) -> ScheduleColumns:
    """The columns of a schedule, which is taken to be valid (`schedule.validate`)."""
    ops, buffers = schedule.ops, schedule.buffers
    buffer_index = {b.name: i for i, b in enumerate(buffers)}
    op_index = {op.key: i for i, op in enumerate(ops)}
    tier_index = {t.name: i for i, t in enumerate(schedule.tiers)}
    works = Works()
    op_work = [works.number(op.stream, op.work) for op in ops]

    def labels() -> Labels:
        return Labels(
            name=schedule.name,
            ops=[OpLabel(op.key, op.kind, op.unit, op.micro_batch) for op in ops],
            buffers=[BufferLabel(b.name, b.content, b.kind) for b in buffers],
            step=schedule.step,
            meta=schedule.meta,
        )

    def numbers(names: Iterable[str | None]) -> Int32:
        return np.array([-1 if name is None else buffer_index[name] for name in names], np.int32)

    return ScheduleColumns(
        tiers=schedule.tiers,
        works=tuple(works.listed),
        op_work=np.array(op_work, np.int32),
        reads=lists_of([[buffer_index[name] for name in op.reads] for op in ops]),
        writes=lists_of([[buffer_index[name] for name in op.writes] for op in ops]),
        after=lists_of([[op_index[key] for key in op.after] for op in ops]),
        buffer_tier=np.array([tier_index[b.tier] for b in buffers], np.int32),
        buffer_bytes=np.array([b.size_bytes for b in buffers], np.int64),
        buffer_initial=np.array([b.initial for b in buffers], np.bool_),
        buffer_reuses=numbers(b.reuses for b in buffers),
        buffer_becomes=numbers(b.becomes for b in buffers),
        labels=labels,
        next_devices=schedule.next_devices,
    )


def unroll(schedule: Schedule, num_steps: int) -> Schedule:
    """`num_steps` steps as one schedule: keys and buffers get the prefix `s0/`, `s1/`, ...

    A buffer that outlives step i is the initial buffer that it `becomes` in step i+1. Streams run on from one step into
    the next, so work may overlap across the boundary exactly as rules 1 to 4 allow; that is the steady state. Where the
    schedule has `next_devices`, streams and buffers of step i are on other devices, under the names of the first step.
    """
    with collector_paused():
        return columns_of(schedule).unrolled(num_steps).schedule()


@contextmanager
def collector_paused() -> Iterator[None]:
    """Keeps Python's cyclic garbage collector from walking what grows, and has no cycles, again and again.

    Unpaused, a simulation of 10 steps of GPT-3 takes 1.7 times as long (`benchmarks/engine.py`).
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def lists_of(rows: Sequence[Sequence[int]]) -> Lists:
    """One list of numbers per op as two arrays."""
    begins = np.zeros(len(rows) + 1, np.int32)
    np.cumsum([*map(len, rows)], out=begins[1:])
    return Lists(begins, np.fromiter(chain.from_iterable(rows), np.int32, count=int(begins[-1])))


def rows_of(lists: Lists) -> list[list[int]]:
    """The same as one list of numbers per op."""
    items = lists.items.tolist()
    return [items[begin:end] for begin, end in pairwise(lists.begins.tolist())]


@compiled
def _gathered(lists: Lists, order: Int32) -> Lists:
    """The lists of the ops `order`, concatenated."""
    begins, items, num = np.zeros(len(order) + 1, np.int32), np.empty(len(lists.items), np.int32), 0
    for place in range(len(order)):
        for k in range(lists.begins[order[place]], lists.begins[order[place] + 1]):
            items[num] = lists.items[k]
            num += 1
        begins[place + 1] = num
    return Lists(begins, items)


@compiled
def _repeated(lists: Lists, numbers: Int32) -> Lists:
    """The same lists for each step, where item i has the number `numbers[step, i]`."""
    num_steps, num_ops, num_items = len(numbers), len(lists.begins) - 1, len(lists.items)
    begins, items = np.zeros(num_steps * num_ops + 1, np.int32), np.empty(num_steps * num_items, np.int32)
    for step in range(num_steps):
        for i in range(num_ops):
            begins[step * num_ops + i + 1] = step * num_items + lists.begins[i + 1]
        for k in range(num_items):
            items[step * num_items + k] = numbers[step, lists.items[k]]
    return Lists(begins, items)


@compiled
def _numbered(initial: Bool, reuses: Int32, becomes: Int32, num_steps: int) -> tuple[Int32, Int32, Int32]:
    """By step, the number of each buffer in the whole, where initial buffers come once; -1 for those that nothing
    becomes. And of all buffers, those that they reuse and become."""
    num = num_steps * len(initial)
    numbers, end = np.full((num_steps, len(initial)), -1, np.int32), 0
    all_reuses, all_becomes = np.full(num, -1, np.int32), np.full(num, -1, np.int32)
    for step in range(num_steps):
        for b in range(len(initial)):
            if step == 0 or not initial[b]:
                numbers[step, b] = end
                end += 1
            if step > 0 and becomes[b] >= 0:
                numbers[step, becomes[b]] = numbers[step - 1, b]
        for b in range(len(initial)):
            if (step == 0 or not initial[b]) and reuses[b] >= 0:
                all_reuses[numbers[step, b]] = numbers[step, reuses[b]]
    for b in range(len(initial)):
        if becomes[b] >= 0:
            all_becomes[numbers[-1, b]] = becomes[b]
    return numbers, all_reuses[:end], all_becomes[:end]
