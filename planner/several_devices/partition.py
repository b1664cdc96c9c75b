"""One device's schedule on several, which divide what `Sharing` says.

As ZeRO-3 does, parameters, gradients and optimizer states are cut into as many shards as there are devices. A device
keeps or fetches its shard of a unit's parameters over its own link and gathers the others' from its peers before it
computes; after backward, gradients are reduced and scattered, and each device sends its shard away. Where parameters
are whole on every device, what each one updated is gathered after the update. Where operators are cut (tensor
parallelism), activations are summed after each half of a block instead. Host cores and drives work for all devices:
what they read and write is the whole. Activations belong to each device alone.

Here it is decided what becomes of each buffer; `dividing` has the ops. Names are made when somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tierplan.hwmodels.machine import PAGE_BYTES
from tierplan.hwmodels.names import DEVICE, collective, device, device_index, parse_stream
from tierplan.planner.plan import Sharing
from tierplan.planner.several_devices import dividing
from tierplan.planner.several_devices.collectives import collective_work, product_flops, work_of_part
from tierplan.planner.several_devices.dividing import NONE, Dividing, SharingNumbers, Table
from tierplan.planner.several_devices.kinds import Kinds, kinds_of
from tierplan.sim.columns import BufferLabel, Int64, Labels, Lists, OpLabel, ScheduleColumns, Works
from tierplan.sim.contents import buffer_name, copy_key, device_name, micro_batch_name, op_key, parse_content
from tierplan.sim.ranks import COLLECTIVES

KEEPS = {"nothing": dividing.KEEPS_NOTHING, "ends": dividing.KEEPS_ENDS, "all": dividing.KEEPS_ALL}
MOST_FRAC = 0.5
"""Of a block's products: with more that are made again, all sums of its forward are."""
GRAINS = {"exact": 0, "page": PAGE_BYTES, "power-of-two": -1}
SHARDED = (dividing.PARAMS, dividing.GRADS, dividing.STATES)
"""Kinds of buffers that are cut into shards."""


def partition(
    columns: ScheduleColumns,
    devices: int,
    sharing: Sharing,
    *,
    is_vertical: bool = False,
    kinds: Kinds | None = None,
    drawn: int | None = None,
) -> ScheduleColumns:
    """The schedule of `devices` devices, given that of one. Their tiers and the links between them must exist.

    `is_vertical` says that a unit has all its micro-batches in one turn, and `kinds` what its ops and buffers are,
    which else is read from their names. With `drawn=1` the first device stands for all, which is enough where all do
    the same at once (`alike`); what they have elsewhere is there in one buffer.
    """
    kinds, num_drawn = kinds_of(columns.labels()) if kinds is None else kinds, drawn or devices
    terms = SharingNumbers(
        num=devices,
        num_drawn=num_drawn,
        is_vertical=is_vertical,
        cuts_tensors=sharing.divided == "tensors",
        divides_all=sharing.divided == "all",
        divides_nothing=sharing.divided == "nothing",
        waits=sharing.waits,
        ahead=sharing.ahead,
        keeps=KEEPS[sharing.keeps],
        by=COLLECTIVES.index(sharing.by),
        num_units=len(kinds.lengths),
    )
    tiers, names = columns.tiers, [t.name for t in columns.tiers]
    tasks = _tasks(columns, kinds)
    wholes = _wholes(columns, kinds, tasks, sharing, names.index(DEVICE), num_drawn)
    of_drawn = np.array([names.index(device(r)) for r in range(num_drawn)], np.int32)
    grains = np.array([GRAINS[t.rounding] for t in tiers], np.int64)
    made = _with_room(columns, tasks=tasks, whole=wholes, terms=terms, tiers=of_drawn, grains=grains)
    dividing.divide(made, columns.reads, columns.writes, columns.after)
    *num_items, num_ops, num_buffers, num_works, _ = made.num.tolist()
    works, number = Works(), []
    for kind, of, times, r in made.works[:num_works].tolist():
        if kind != dividing.OF_TASKS:
            number.append(works.number(collective(r), collective_work(COLLECTIVES[kind], of, devices, calls=times)))
            continue
        stream, amounts = columns.works[of]
        stream = stream if r == NONE or (own := parse_stream(stream)).device is None else own.on(r)
        number.append(works.number(stream, amounts if times == 1 else work_of_part(amounts, times)))
    if num_drawn < devices:
        tiers = tuple(t if device_index(t.name) is not None else replace(t, rounding="exact") for t in tiers)
    reads, writes, after = (
        Lists(of.begins[: num_ops + 1].copy(), of.items[:num].copy())
        for of, num in zip(made.lists, num_items, strict=True)
    )
    ops, buffers = made.ops[:num_ops].copy(), made.buffers[:num_buffers].copy()
    return ScheduleColumns(
        tiers=tiers,
        works=tuple(works.listed),
        op_work=np.array(number, np.int32)[ops["work"]],
        reads=reads,
        writes=writes,
        after=after,
        buffer_tier=buffers["tier"].astype(np.int32),
        buffer_bytes=buffers["size_bytes"].copy(),
        buffer_initial=buffers["is_initial"].copy(),
        buffer_reuses=buffers["reuses"].astype(np.int32),
        buffer_becomes=buffers["becomes"].astype(np.int32),
        labels=lambda: _labels(columns, ops, buffers, sharing, devices),
    )


def _tasks(columns: ScheduleColumns, kinds: Kinds) -> Table:
    """The ops of one device."""
    tasks = np.empty(columns.num_ops, dividing.TASKS)
    is_on_device = np.array([parse_stream(work.stream).device is not None for work in columns.works], np.bool_)
    tasks["work"], tasks["is_on_device"] = columns.op_work, is_on_device[columns.op_work]
    tasks["kind"], tasks["unit"], tasks["batch"] = kinds.op_kind, kinds.op_unit, kinds.op_batch
    tasks["sums"] = _sums(columns, kinds)
    tasks["end"] = kinds.ends[kinds.op_unit]
    computes = np.flatnonzero(np.isin(kinds.op_kind, (dividing.FORWARD, dividing.RECOMPUTE, dividing.BACKWARD)))
    behind = np.searchsorted(computes, np.arange(columns.num_ops), side="right")
    tasks["following"] = np.append(computes, NONE)[behind]
    return tasks


def _sums(columns: ScheduleColumns, kinds: Kinds) -> Int64:
    """By op, how often Megatron sums activations over devices: after each half of a block, and where the vocabulary is
    cut. What is made again has as many where it has most of the products; with few of them there is one half's at
    most, and without any, none: other kernels need nothing of other devices."""
    kind, end = kinds.op_kind, kinds.ends[kinds.op_unit]
    at_ends = ((end == dividing.EMBED) & (kind == dividing.FORWARD)) | (
        (end == dividing.HEAD) & (kind == dividing.BACKWARD)
    )
    flops = np.array([product_flops(work.amounts) for work in columns.works])[columns.op_work]
    forward, of_unit = kind == dividing.FORWARD, np.zeros(len(kinds.lengths))
    of_unit[kinds.op_unit[forward]] = flops[forward]
    again = np.where(flops >= MOST_FRAC * of_unit[kinds.op_unit], dividing.OF_BLOCK, flops > 0)
    of_block = np.where(kind == dividing.RECOMPUTE, again, dividing.OF_BLOCK)
    return np.where(end == dividing.OTHER, of_block, at_ends)


def _wholes(
    columns: ScheduleColumns, kinds: Kinds, tasks: Table, sharing: Sharing, on_device: int, num_drawn: int
) -> Table:
    """The buffers of one device, and what becomes of each; `on_device` is the number of the device's tier."""
    tier, kind, content = columns.buffer_tier, kinds.kind, kinds.content
    is_on_device, cuts_tensors = tier == on_device, sharing.divided == "tensors"
    writes, num_writes = columns.writes.items, np.diff(columns.writes.begins)
    is_copy, is_made_on_device = np.zeros((2, len(tier)), np.bool_)
    is_moved = np.isin(tasks["kind"], (dividing.COPY, dividing.OTHER))  # or added to, or cast
    is_copy[writes[np.repeat(is_moved, num_writes)]] = True
    is_made_on_device[writes[np.repeat(tasks["is_on_device"], num_writes)]] = True
    reuses, becomes = columns.buffer_reuses, columns.buffer_becomes
    is_gradient = is_on_device & (content == dividing.OF_GRADIENTS) & ~is_copy
    is_at_last = is_gradient & (becomes >= 0) & (sharing.reduces == "last" and not cuts_tensors)
    is_copy[becomes[is_at_last]] = True  # what waits for the next step is a share of the sum, as a copy is
    is_params, is_states = kind == dividing.PARAMS, kind == dividing.STATES
    is_summed = is_gradient & (sharing.reduces == "each" and not cuts_tensors)
    # where parameters live, by unit, and whether they are frozen
    homes = np.full((2, len(kinds.lengths) + 1), NONE, np.int64)
    is_frozen = (content == dividing.OF_FROZEN).astype(np.int64)
    at = np.flatnonzero(columns.buffer_initial & is_params)
    homes[is_frozen[at], kinds.unit[at]] = tier[at]
    home = np.where(np.isin(content, (dividing.OF_PARAMS, dividing.OF_FROZEN)), homes[is_frozen, kinds.unit], NONE)
    if cuts_tensors:
        borders = (dividing.OF_INPUT, dividing.OF_INPUT_GRADIENT, dividing.OF_SHARED)
        is_sharded = np.isin(kind, (*SHARDED, dividing.WORK)) | ((kind == dividing.ACTS) & ~np.isin(content, borders))
    else:
        is_sharded = ~is_on_device | is_params | is_copy
        is_sharded |= is_states & (sharing.divided != "nothing")
        is_sharded |= ~is_states & is_summed & (sharing.divided in ("all", "gradients"))
        if sharing.divided != "all":  # on the way home
            is_sharded[is_params] = (~is_on_device & (home == on_device))[is_params]
        is_sharded &= np.isin(kind, SHARDED) & (content != dividing.OF_TIED_GRADIENTS)
    is_everywhere = is_on_device | np.isin(kind, (*SHARDED, dividing.ACTS)) | is_made_on_device
    num_standing = np.where(is_everywhere, num_drawn, 1)
    wholes = np.empty(len(tier), dividing.WHOLES)
    wholes["tier"], wholes["size_bytes"], wholes["is_initial"] = tier, columns.buffer_bytes, columns.buffer_initial
    wholes["reuses"], wholes["becomes"] = reuses, becomes
    wholes["kind"], wholes["content"], wholes["unit"] = kind, content, kinds.unit
    wholes["length"] = np.where(kinds.unit == NONE, 0, kinds.lengths[kinds.unit])
    wholes["first"] = np.cumsum(num_standing) - num_standing
    others = tasks["is_on_device"] & ~np.isin(tasks["kind"], (dividing.FORWARD, dividing.RECOMPUTE, dividing.BACKWARD))
    wholes["is_awaited"] = False
    wholes["is_awaited"][columns.reads.items[np.repeat(others, np.diff(columns.reads.begins))]] = True
    wholes["made_by"] = NONE
    wholes["made_by"][writes] = np.repeat(np.arange(len(num_writes)), num_writes)
    wholes["is_on_device"], wholes["is_everywhere"] = is_on_device, is_everywhere
    wholes["is_copy"], wholes["is_summed_at_once"], wholes["is_summed_at_last"] = is_copy, is_summed, is_at_last
    wholes["has_tied_share"] = is_summed & (reuses >= 0) & ~is_summed[reuses]
    wholes["is_sharded"] = is_sharded
    wholes["is_gathered_again"] = is_params & (tier == home) & (sharing.divided in ("gradients", "states"))
    return wholes


def _with_room(columns: ScheduleColumns, *, terms: SharingNumbers, **more: Any) -> Dividing:
    """With room for all that may be made: each device has its part of each op, and a collective for each read and
    write."""
    d, num_tasks, num_wholes = terms.num_drawn, columns.num_ops, columns.num_buffers
    lists = (columns.reads, columns.writes, columns.after)
    reads, writes, after = (len(of.items) for of in lists)
    most_reads, most_writes, _ = (int(np.diff(of.begins).max(initial=0)) for of in lists)
    num_collectives = reads + writes + num_tasks
    num_ops = d * (num_tasks + num_collectives)
    nums_items = (
        d * (reads + d * reads + (d + 1) * writes),
        d * (writes + num_collectives),
        d * (after + num_collectives + reads + d * (writes + num_tasks)),
    )
    reading, writing, waiting = (Lists(np.zeros(num_ops + 1, np.int32), np.empty(num, np.int32)) for num in nums_items)
    return Dividing(
        terms=terms,
        num=np.zeros(7, np.int64),
        lists=(reading, writing, waiting),
        ops=np.empty(num_ops, dividing.OPS),
        buffers=np.empty(d * (num_wholes + reads + writes), dividing.BUFFERS),
        works=np.empty(num_ops, dividing.WORKS),
        parts=np.empty((num_tasks, d), np.int32),
        num_parts=np.zeros(num_tasks, np.int64),
        last=np.full((d, 2), NONE, np.int64),
        awaited=np.empty((d, num_collectives), np.int32),
        num_awaited=np.zeros(d, np.int64),
        scattered=np.full((num_wholes, d), NONE, np.int32),
        own=np.empty((most_writes, d), np.int32),
        way=np.empty(most_reads, np.int64),
        heads=np.full(num_wholes + 2 * terms.num_units, NONE, np.int64),
        gathers=np.empty(d * reads, dividing.GATHERS),
        task_works=np.full((len(columns.works), 2, d + 1), NONE, np.int32),
        **more,
    )


# ---- names ----


def _labels(columns: ScheduleColumns, ops: Table, buffers: Table, sharing: Sharing, devices: int) -> Labels:
    """The names of everything: of what stands for the same of one device, and of what is exchanged."""
    one, tiers = columns.labels(), [columns.tiers[tier].name for tier in columns.buffer_tier.tolist()]

    def of_exchange(what: int, task: int, b: int, r: int) -> tuple[str, str, str]:
        """Its key, kind and unit."""
        op = one.ops[task]
        if what == dividing.SUMMED_ACTS:
            return op_key("all_reduce", op.key, device(r)), "all_reduce", op.unit
        content, by = one.buffers[b].content, "all_reduce" if sharing.divided == "nothing" else sharing.by
        unit = str(getattr(parse_content(content), "unit", ""))
        match what:
            case dividing.GATHERED:
                turn, batch = "fwd" if op.kind == "forward" else "bwd", micro_batch_name(op.micro_batch)
                return op_key(copy_key("gather", content), op.unit, turn, batch, device(r)), "gather", unit
            case dividing.SCATTERED:
                return device_name(copy_key("reduce", content), r), by, unit
            case dividing.SUMMED:
                return op_key("reduce", op.key, device(r)), by, unit
        return op_key("gather", op.key, device(r)), "gather", unit

    def of_op(what: int, task: int, b: int, r: int) -> OpLabel:
        if what != dividing.STANDS_IN:
            return OpLabel(*of_exchange(what, task, b, r), 0)
        was = one.ops[task]
        return was if r == NONE else was._replace(key=device_name(was.key, r))

    def of_buffer(what: int, task: int, b: int, r: int) -> BufferLabel:
        was = one.buffers[b]
        if what == dividing.STANDS_IN:
            return was if r == NONE else was._replace(name=device_name(was.name, r))
        if what != dividing.OWN:
            return was._replace(name=buffer_name(of_exchange(what, task, b, r)[0], device(r)))
        own, tier = op_key("own", one.ops[task].key), tiers[b]
        name = buffer_name(own, device(r)) if tier == DEVICE else device_name(buffer_name(own, tier), r)
        return was._replace(name=name)

    def all_of(rows: Table, label: Any) -> Sequence[Any]:
        return [label(*row) for row in rows[[name for name, _ in dividing.NAMED]].tolist()]

    return replace(
        one,
        name=f"{one.name} on {devices} devices",
        ops=all_of(ops, of_op),
        buffers=all_of(buffers, of_buffer),
        meta={**one.meta, "devices": devices},
    )
