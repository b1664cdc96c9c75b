"""One device's schedule on several, which divide what `Sharing` says.

As ZeRO-3 does, parameters, gradients and optimizer states are cut into as many shards as there are devices. A device
keeps or fetches its shard of a unit's parameters over its own link and gathers the others' from its peers before it
computes; after backward, gradients are reduced and scattered, and each device sends its shard away. Where parameters
are whole on every device, what each one updated is gathered after the update. Where operators are cut (tensor
parallelism), activations are summed after each half of a block instead. Host cores and drives work for all devices:
what they read and write is the whole. Activations belong to each device alone.

Buffers and ops are numbers here, as in `ScheduleColumns`: those of eight devices are many, and hardly ever named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product

import numpy as np

from tierplan.hwmodels.names import DEVICE, collective, device, device_index, parse_stream
from tierplan.planner.plan import Sharing
from tierplan.planner.several_devices.collectives import collective_work
from tierplan.sim.columns import (
    BufferLabel,
    Labels,
    OpLabel,
    ScheduleColumns,
    Work,
    Works,
    collector_paused,
    lists_of,
    rows_of,
)
from tierplan.sim.contents import (
    Content,
    Frozen,
    Gradients,
    Input,
    InputGradient,
    Params,
    Shared,
    TiedGradients,
    buffer_name,
    copy_key,
    device_name,
    micro_batch_name,
    op_key,
    parse_content,
)

SHARDED = ("params", "grads", "states")
"""Kinds of buffers that are cut into shards."""
ENDS = ("embed", "head")
COMPUTE_KINDS = ("forward", "recompute", "backward")
_content = lru_cache(maxsize=2**16)(parse_content)
NONE = -1
StandIn = tuple[int, int]
"""A buffer or an op of one device, and the device that has it here; `NONE` where all devices share one."""


def partition(columns: ScheduleColumns, devices: int, sharing: Sharing, *, drawn: int | None = None) -> ScheduleColumns:
    """The schedule of `devices` devices, given that of one. Their tiers and the links between them must exist.

    With `drawn=1` the first device stands for all, which is enough where all do the same at once (`alike`); what they
    have elsewhere is there in one buffer.
    """
    with collector_paused():
        return _Partition(columns, devices, sharing, range(drawn or devices)).columns()


@dataclass(slots=True, kw_only=True)
class _Whole:
    """A buffer of one device, and what becomes of it on several."""

    number: int
    label: BufferLabel
    content: Content | None
    tier: str
    size_bytes: int
    reuses: int
    first: int = 0
    """Of those that stand for it, the number of the first device's."""
    is_everywhere: bool = False
    """Whether each device has one."""
    is_copy: bool = False
    """Whether a copy has brought it: of gradients, what host memory has of their sum."""
    is_summed_at_once: bool = False
    """Whether these gradients stay on the device, and are summed over devices after each micro-batch."""
    has_tied_share: bool = False
    """Whether this sum over devices begins where one device's share of a tied gradient is."""
    is_sharded: bool = False
    """Whether a device's or the host's is 1/n of it; a gradient is whole on the device that made it."""
    is_gathered_again: bool = False
    """Whether these are parameters that every device has whole, and of which each makes a shard."""

    def ranks(self, drawn: range) -> range:
        """The devices that have one, of those that are drawn; the first where all share it."""
        return drawn if self.is_everywhere else drawn[:1]

    def on(self, r: int) -> int:
        """The number of that of device r, or of the one that all share."""
        return self.first + r if self.is_everywhere else self.first


@dataclass(slots=True, kw_only=True)
class _Task:
    """An op of one device."""

    number: int
    label: OpLabel
    work: int
    does: Work
    reads: list[_Whole]
    writes: list[_Whole]
    after: list[int]
    computes: bool
    is_on_device: bool


class _Partition:
    def __init__(self, columns: ScheduleColumns, devices: int, sharing: Sharing, drawn: range) -> None:
        self.source, self.n, self.sharing, self.drawn = columns, devices, sharing, drawn
        self.labels = labels = columns.labels()
        self.cuts_tensors = sharing.divided == "tensors"
        self.stays = labels.meta.get("order") == "vertical"  # a unit's parameters, for all its micro-batches
        self.lengths = {} if labels.step is None else {u.name: u.num_parameters for u in labels.step.units}
        self.tiers = {t.name: i for i, t in enumerate(columns.tiers)}
        self.works = Works()
        self.numbers: dict[tuple[object, ...], int] = {}  # of works, by what they are of
        # what is made: one entry each per buffer, then per op
        self.tier: list[int] = []
        self.size_bytes: list[int] = []
        self.initial: list[bool] = []
        self.reuses: list[int] = []
        self.becomes: list[int] = []
        self.buffer_labels: list[BufferLabel | StandIn] = []
        self.op_work: list[int] = []
        self.reads: list[Sequence[int]] = []
        self.writes: list[Sequence[int]] = []
        self.after: list[Sequence[int]] = []
        self.op_labels: list[OpLabel | StandIn] = []
        # what was done so far
        self.gathered: dict[tuple[object, ...], int] = {}
        self.scattered: dict[tuple[int, int], int] = {}
        self.own: dict[tuple[int, int, int], int] = {}
        self.computes: list[list[int]] = [[] for _ in drawn]  # ops per device, in order
        self.awaited: list[list[int]] = [[] for _ in drawn]  # collectives that the next compute comes after
        self.parts: list[list[int]] = []  # of each op of one device, the ops that stand for it
        self.wholes = self._wholes()
        self.tasks = self._tasks()

    def columns(self) -> ScheduleColumns:
        self._declare()
        for task in self.tasks:
            self.parts.append([])
            self._place(task)
        tiers = self.source.tiers
        if len(self.drawn) < self.n:
            tiers = tuple(t if device_index(t.name) is not None else replace(t, rounding="exact") for t in tiers)
        return replace(
            self.source,
            tiers=tiers,
            works=tuple(self.works.listed),
            op_work=np.array(self.op_work, np.int32),
            reads=lists_of(self.reads),
            writes=lists_of(self.writes),
            after=lists_of(self.after),
            buffer_tier=np.array(self.tier, np.int32),
            buffer_bytes=np.array(self.size_bytes, np.int64),
            buffer_initial=np.array(self.initial, np.bool_),
            buffer_reuses=np.array(self.reuses, np.int32),
            buffer_becomes=np.array(self.becomes, np.int32),
            labels=partial(_labels, self.labels, self.op_labels, self.buffer_labels, self.n),
        )

    # ---- what one device has ----

    def _wholes(self) -> list[_Whole]:
        c, names = self.source, [t.name for t in self.source.tiers]
        numbers = (column.tolist() for column in (c.buffer_tier, c.buffer_bytes, c.buffer_reuses))
        rows = zip(self.labels.buffers, *numbers, strict=True)
        made_of = zip(self.labels.ops, rows_of(c.writes), strict=True)
        copies = {i for op, writes in made_of if op.kind == "copy" for i in writes}
        wholes = []
        for i, (label, tier, size_bytes, reuses) in enumerate(rows):
            content = _content(label.content)
            b = _Whole(number=i, label=label, content=content, tier=names[tier], size_bytes=size_bytes, reuses=reuses)
            b.is_copy = i in copies
            is_made = b.tier == DEVICE and isinstance(content, Gradients) and not b.is_copy and not self.cuts_tensors
            b.is_summed_at_once = self.sharing.reduces == "each" and is_made
            wholes.append(b)
        homes = {
            b.label.content: b.tier
            for b, initial in zip(wholes, c.buffer_initial.tolist(), strict=True)
            if initial and b.label.kind == "params"
        }
        for b in wholes:
            b.has_tied_share = b.is_summed_at_once and b.reuses >= 0 and not wholes[b.reuses].is_summed_at_once
            home = homes.get(b.label.content)
            b.is_sharded = self._is_sharded(b, home)
            is_home = b.label.kind == "params" and b.tier == home
            b.is_gathered_again = is_home and self.sharing.divided in ("gradients", "states")
        return wholes

    def _tasks(self) -> list[_Task]:
        c = self.source
        is_on_device = [parse_stream(work.stream).device is not None for work in c.works]
        rows = zip(
            self.labels.ops, c.op_work.tolist(), rows_of(c.reads), rows_of(c.writes), rows_of(c.after), strict=True
        )
        return [
            _Task(
                number=i,
                label=label,
                work=w,
                does=c.works[w],
                reads=[self.wholes[b] for b in reads],
                writes=[self.wholes[b] for b in writes],
                after=after,
                computes=label.kind in COMPUTE_KINDS,
                is_on_device=is_on_device[w],
            )
            for i, (label, w, reads, writes, after) in enumerate(rows)
        ]

    def _is_sharded(self, b: _Whole, home: str | None) -> bool:
        kind = b.label.kind
        if self.cuts_tensors:
            return kind in (*SHARDED, "work") or (kind == "acts" and not self._is_border(b))
        if kind not in SHARDED or isinstance(b.content, TiedGradients):
            return False
        if kind == "params" and self.sharing.divided != "all":
            return b.tier != DEVICE and home == DEVICE  # on the way home
        if b.tier != DEVICE or kind == "params" or b.is_copy:
            return True
        if kind == "states":
            return self.sharing.divided != "nothing"
        return b.is_summed_at_once and self.sharing.divided in ("all", "gradients")

    def _is_border(self, b: _Whole) -> bool:
        """Whether it passes from unit to unit, or belongs to all of them."""
        return isinstance(b.content, Input | InputGradient | Shared)

    # ---- buffers ----

    def _declare(self) -> None:
        """All buffers, on each device that has one."""
        made_on_device = {b.number for task in self.tasks if task.is_on_device for b in task.writes}
        num = 0
        for b in self.wholes:
            b.is_everywhere = b.tier == DEVICE or b.label.kind in (*SHARDED, "acts") or b.number in made_on_device
            b.first = num
            num += len(b.ranks(self.drawn))
        rows = zip(self.wholes, self.source.buffer_initial.tolist(), self.source.buffer_becomes.tolist(), strict=True)
        for b, initial, becomes in rows:
            ranks = b.ranks(self.drawn)
            nothing = [NONE] * len(ranks)
            self.tier += [self.tiers[device(r) if b.tier == DEVICE else b.tier] for r in ranks]
            self.size_bytes += self._sizes_bytes(b)
            self.initial += [initial] * len(ranks)
            reuses = b.reuses if not b.has_tied_share else NONE
            self.reuses += [self.wholes[reuses].on(r) for r in ranks] if reuses >= 0 else nothing
            self.becomes += [self.wholes[becomes].on(r) for r in ranks] if becomes >= 0 else nothing
            self.buffer_labels += [(b.number, r if b.is_everywhere else NONE) for r in ranks]

    def _buffer(self, label: BufferLabel | StandIn, tier: str, size_bytes: int, reuses: int = NONE) -> int:
        """Adds one that does not outlive the step; its number."""
        self.tier.append(self.tiers[tier])
        self.size_bytes.append(size_bytes)
        self.initial.append(False)
        self.reuses.append(reuses)
        self.becomes.append(NONE)
        self.buffer_labels.append(label)
        return len(self.tier) - 1

    def _sizes_bytes(self, b: _Whole) -> list[int]:
        """By device, of those that are drawn; of what is on none of them, all that is held together."""

        def of(r: int) -> int:
            return self._shard_bytes(b, r) if b.is_sharded else b.size_bytes

        if b.tier == DEVICE or len(self.drawn) == self.n:
            return [of(r) for r in b.ranks(self.drawn)]
        held = self.source.tiers[self.tiers[b.tier]].held_bytes
        return [sum(held(of(r)) for r in b.ranks(range(self.n)))]

    def _shard_bytes(self, b: _Whole, r: int) -> int:
        """A device's share, of whole values where there is one for each parameter, as the runtime cuts them."""
        length = self.lengths.get(getattr(b.content, "unit", ""), 0)
        if length and b.size_bytes % length == 0 and not self.cuts_tensors:
            each, more = divmod(length, self.n)  # as `contents.shard`
            return (each + (r < more)) * (b.size_bytes // length)
        return -(-b.size_bytes // self.n)

    def _numbers(self, b: _Whole) -> Sequence[int]:
        """By device: that of its own, or of the one that all share."""
        return [b.on(r) for r in self.drawn]

    def _all(self, wholes: Iterable[_Whole]) -> list[int]:
        return [b.on(r) for b in wholes for r in b.ranks(self.drawn)]

    # ---- ops ----

    def _place(self, task: _Task) -> None:
        touched = [*task.reads, *task.writes]
        sums = [b for b in task.writes if task.computes and b.is_summed_at_once]
        updated = [b for b in task.writes if not task.computes and b.is_gathered_again]
        if not task.is_on_device and not any(b.label.kind == "acts" for b in touched):
            writes = [
                self._own_part(task, b, r) if b in updated else b.on(r)
                for b in task.writes
                for r in b.ranks(self.drawn)
            ]
            self._emit(task, 1, list(dict.fromkeys(self._all(task.reads))), writes, None)
            for b, r in product(updated, self.drawn):
                self._complete(task, b, r, is_sum=False)
            return
        is_shard = task.label.kind == "copy" and any(b.is_sharded for b in touched)
        is_shared_update = task.label.kind == "update" and self.sharing.divided != "nothing"
        share = self.n if is_shard or is_shared_update or (task.computes and self.cuts_tensors) else 1
        inputs = [(b, self._way(task, b)) for b in task.reads if not (sums and b.is_summed_at_once)]
        if sums or updated or any(way for _, way in inputs):
            for r in self.drawn:
                reads = [way(task, b, r) if way else b.on(r) for b, way in inputs]
                writes = [self._own_part(task, b, r) if b in sums or b in updated else b.on(r) for b in task.writes]
                self._emit(task, share, list(dict.fromkeys(reads)), writes, r)
        else:
            rows = [
                zip(*map(self._numbers, bs), strict=True) if bs else [()] * len(self.drawn)
                for bs in (task.reads, task.writes)
            ]
            for r, (reads, writes) in enumerate(zip(*rows, strict=True)):
                self._emit(task, share, reads, writes, r)
        if task.computes:
            for made, op in zip(self.computes, self.parts[task.number], strict=True):
                made.append(op)
        for b in (*sums, *updated):
            for r in self.drawn:
                self._complete(task, b, r, is_sum=b in sums)
        if self.cuts_tensors and task.computes:
            self._sum_activations(task, touched)

    def _way(self, task: _Task, b: _Whole) -> Callable[[_Task, _Whole, int], int] | None:
        """To what device r reads in place of its own, if there is another."""
        if b.tier != DEVICE or self.cuts_tensors:
            return None
        if b.label.kind == "params" and task.computes and self.sharing.divided == "all":
            return self._gather
        if isinstance(b.content, Gradients) and not (task.computes or b.is_summed_at_once or b.is_copy):
            return self._scatter
        return None

    def _emit(self, task: _Task, share: int, reads: Sequence[int], writes: Sequence[int], r: int | None) -> None:
        after: list[int] = []
        for old in task.after:
            new = self.parts[old]
            after += [new[r]] if r is not None and len(new) == len(self.drawn) else new
        if r is not None and task.computes:
            after += self.awaited[r]
            self.awaited[r] = []
        place = (task.number, NONE if r is None else r)
        work = self._work_of_task(task, share, r)
        self.parts[task.number].append(self._op(place, work, reads, writes, after and list(dict.fromkeys(after))))

    def _work_of_task(self, task: _Task, share: int, r: int | None) -> int:
        """The number of a share of its work, on device r."""
        key = (task.work, share, r)
        if key not in self.numbers:
            stream, amounts = task.does
            stream = stream if r is None or not task.is_on_device else parse_stream(stream).on(r)
            amounts = amounts if share == 1 else {kind: amount / share for kind, amount in amounts.items()}
            self.numbers[key] = self.works.number(stream, amounts)
        return self.numbers[key]

    def _work_of_all(self, kind: str, size_bytes: int, r: int, *, calls: int = 1) -> int:
        """The number of device r's work in a collective."""
        key = (kind, size_bytes, calls, r)
        if key not in self.numbers:
            amounts = collective_work(kind, size_bytes, self.n, calls=calls)
            self.numbers[key] = self.works.number(collective(r), amounts)
        return self.numbers[key]

    def _op(
        self,
        label: OpLabel | StandIn,
        work: int,
        reads: Sequence[int],
        writes: Sequence[int],
        after: Sequence[int],
    ) -> int:
        """Adds one; its number."""
        self.op_work.append(work)
        self.reads.append(reads)
        self.writes.append(writes)
        self.after.append(after)
        self.op_labels.append(label)
        return len(self.op_work) - 1

    # ---- collectives ----

    def _gather(self, task: _Task, b: _Whole, r: int) -> int:
        """The whole parameters on device r for one pass of one unit, a turn ahead of compute."""
        _, kind, unit, micro_batch = task.label
        turn = "fwd" if kind == "forward" else "bwd"
        use: tuple[object, ...] = (b.number, unit, turn)
        if self.sharing.keeps == "all" or (self.sharing.keeps == "ends" and unit in ENDS):
            use = (b.label.content, "", "")
        known = (*use, 0 if self.stays else micro_batch, r)
        if known not in self.gathered:
            key = op_key(copy_key("gather", b.label.content), unit, turn, micro_batch_name(micro_batch), device(r))
            after = self.computes[r][-1:] if self.sharing.waits else self.computes[r][-2:-1]
            self.gathered[known] = self._exchanged(key, "gather", b, r, b.size_bytes, after)
        return self.gathered[known]

    def _scatter(self, _: _Task, b: _Whole, r: int) -> int:
        """Device r's shard of the sum of all devices' gradients, or the whole where nothing is divided."""
        if (b.number, r) not in self.scattered:
            whole = self.sharing.divided == "nothing"
            key = device_name(copy_key("reduce", b.label.content), r)
            size_bytes = b.size_bytes if whole else self._shard_bytes(b, r)
            kind = "all_reduce" if whole else self.sharing.by
            self.scattered[b.number, r] = self._exchanged(key, kind, b, r, size_bytes, [])
        return self.scattered[b.number, r]

    def _own_part(self, task: _Task, b: _Whole, r: int) -> int:
        """What a device has made by itself, before the others' shares are added: a gradient, or updated parameters."""
        of_all, own = b.on(r), op_key("own", task.label.key)
        name = buffer_name(own, device(r)) if b.tier == DEVICE else device_name(buffer_name(own, b.tier), r)
        size_bytes, reuses = self.size_bytes[of_all], self.reuses[of_all]
        if task.computes:
            size_bytes = b.size_bytes
            reuses = self.wholes[b.reuses].on(r) if b.has_tied_share else NONE
        label, tier = BufferLabel(name, b.label.content, b.label.kind), device(r) if b.tier == DEVICE else b.tier
        part = self.own[task.number, b.number, r] = self._buffer(label, tier, size_bytes, reuses)
        if not task.computes:
            self.reuses[of_all] = part
        return part

    def _complete(self, task: _Task, b: _Whole, r: int, *, is_sum: bool) -> None:
        """Adds all devices' shares: sums gradients onto those of earlier micro-batches, or gathers new parameters."""
        own = [self.own[task.number, b.number, k] for k in self.drawn]
        if is_sum:
            kind = "all_reduce" if self.sharing.divided == "nothing" else self.sharing.by
            reads = [*own, *([self.wholes[b.reuses].on(r)] if b.reuses >= 0 and not b.has_tied_share else [])]
            self._collective(op_key("reduce", task.label.key, device(r)), kind, b, r, reads, b.on(r), [])
        else:
            key = op_key("gather", task.label.key, device(r))
            self._collective(key, "gather", b, r, [own[r]], b.on(r), self.parts[task.number])

    def _sum_activations(self, task: _Task, touched: list[_Whole]) -> None:
        """Megatron's all-reduces: after each half of a block, and where the vocabulary is cut."""
        borders = [b for b in touched if b.label.kind == "acts" and isinstance(b.content, Input | InputGradient)]
        key, kind, unit, _ = task.label
        once = (("embed", "forward"), ("head", "backward"))
        calls = 2 if unit not in ENDS else int((unit, kind) in once)
        if not borders or not calls:
            return
        size_bytes = calls * max(b.size_bytes for b in borders)
        for r in self.drawn:
            label = OpLabel(op_key("all_reduce", key, device(r)), "all_reduce", unit, 0)
            work = self._work_of_all("all_reduce", size_bytes, r, calls=calls)
            self.awaited[r].append(self._op(label, work, [], [], list(self.parts[task.number])))

    def _exchanged(self, key: str, kind: str, b: _Whole, r: int, size_bytes: int, after: Sequence[int]) -> int:
        """A new buffer on device r, of what all devices have."""
        label = BufferLabel(buffer_name(key, device(r)), b.label.content, b.label.kind)
        out = self._buffer(label, device(r), size_bytes)
        self._collective(key, kind, b, r, [b.on(k) for k in self.drawn], out, after)
        return out

    def _collective(
        self, key: str, kind: str, b: _Whole, r: int, reads: list[int], out: int, after: Sequence[int]
    ) -> None:
        assert isinstance(b.content, Params | Frozen | Gradients)
        label = OpLabel(key, kind, b.content.unit, 0)
        op = self._op(label, self._work_of_all(kind, b.size_bytes, r), reads, [out], list(after))
        if self.sharing.waits:
            self.awaited[r].append(op)


def _labels(one: Labels, ops: list[OpLabel | StandIn], buffers: list[BufferLabel | StandIn], devices: int) -> Labels:
    """The names of everything, of what stands for the same of one device too."""

    def of_buffer(number: int, r: int) -> BufferLabel:
        was = one.buffers[number]
        return was if r == NONE else was._replace(name=device_name(was.name, r))

    def of_op(number: int, r: int) -> OpLabel:
        was = one.ops[number]
        return was if r == NONE else was._replace(key=device_name(was.key, r))

    return replace(
        one,
        name=f"{one.name} on {devices} devices",
        ops=[label if isinstance(label, OpLabel) else of_op(*label) for label in ops],
        buffers=[label if isinstance(label, BufferLabel) else of_buffer(*label) for label in buffers],
        meta={**one.meta, "devices": devices},
    )
