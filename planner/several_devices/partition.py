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
from functools import lru_cache
from typing import Any

import numpy as np

from tierplan.hwmodels.machine import PAGE_BYTES
from tierplan.hwmodels.names import DEVICE, collective, device, device_index, parse_stream
from tierplan.planner.plan import Sharing
from tierplan.planner.several_devices import dividing
from tierplan.planner.several_devices.collectives import collective_work
from tierplan.planner.several_devices.dividing import NONE, Made, Roles, Source, State, Terms, Wholes
from tierplan.sim.columns import BufferLabel, Int64, Labels, Lists, OpLabel, ScheduleColumns, Works
from tierplan.sim.contents import (
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
KEEPS = {"nothing": dividing.KEEPS_NOTHING, "ends": dividing.KEEPS_ENDS, "all": dividing.KEEPS_ALL}
COLLECTIVES = ("gather", "reduce", "all_reduce")
"""By their numbers."""
GRAINS = {"exact": 0, "page": PAGE_BYTES, "power-of-two": -1}
SHARDED = (dividing.PARAMS, dividing.GRADS, dividing.STATES)
"""Kinds of buffers that are cut into shards."""
_content = lru_cache(maxsize=2**16)(parse_content)


def partition(
    columns: ScheduleColumns,
    devices: int,
    sharing: Sharing,
    *,
    is_vertical: bool = False,
    roles: Roles | None = None,
    drawn: int | None = None,
) -> ScheduleColumns:
    """The schedule of `devices` devices, given that of one. Their tiers and the links between them must exist.

    `is_vertical` says that a unit has all its micro-batches in one turn, and `roles` what its ops and buffers are,
    which else is read from their names. With `drawn=1` the first device stands for all, which is enough where all do
    the same at once (`alike`); what they have elsewhere is there in one buffer.
    """
    roles, num_drawn = roles_of(columns.labels()) if roles is None else roles, drawn or devices
    terms = Terms(
        num=devices,
        num_drawn=num_drawn,
        is_vertical=is_vertical,
        cuts_tensors=sharing.divided == "tensors",
        divides_all=sharing.divided == "all",
        divides_nothing=sharing.divided == "nothing",
        waits=sharing.waits,
        keeps=KEEPS[sharing.keeps],
        by=COLLECTIVES.index(sharing.by),
    )
    is_on_device = np.array([parse_stream(work.stream).device is not None for work in columns.works], np.bool_)
    source = Source(
        columns.op_work,
        columns.reads,
        columns.writes,
        columns.after,
        columns.buffer_tier,
        columns.buffer_bytes,
        columns.buffer_initial,
        columns.buffer_reuses,
        columns.buffer_becomes,
        is_on_device,
    )
    tiers = columns.tiers
    names = [t.name for t in tiers]
    whole = _wholes(source, roles, sharing, names.index(DEVICE), num_drawn)
    made, state = _room(source, roles, terms)
    of_drawn = np.array([names.index(device(r)) for r in range(num_drawn)], np.int32)
    dividing.divide(
        source, roles, whole, terms, of_drawn, np.array([GRAINS[t.rounding] for t in tiers], np.int64), made, state
    )
    works, number = Works(), []
    num_ops, num_buffers, *num_items, num_works = made.num.tolist()
    for kind, of, times, r in made.works[:num_works].tolist():
        if kind != dividing.OF_TASKS:
            number.append(works.number(collective(r), collective_work(COLLECTIVES[kind], of, devices, calls=times)))
            continue
        stream, amounts = columns.works[of]
        stream = stream if r == NONE or not is_on_device[of] else parse_stream(stream).on(r)
        amounts = amounts if times == 1 else {name: amount / times for name, amount in amounts.items()}
        number.append(works.number(stream, amounts))
    if num_drawn < devices:
        tiers = tuple(t if device_index(t.name) is not None else replace(t, rounding="exact") for t in tiers)
    lists = (made.reads, made.writes, made.after)
    reads, writes, after = (
        Lists(of.begins[: num_ops + 1].copy(), of.items[:num].copy()) for of, num in zip(lists, num_items, strict=True)
    )
    op_is, buffer_is = made.op_is[:num_ops].copy(), made.buffer_is[:num_buffers].copy()
    return ScheduleColumns(
        tiers=tiers,
        works=tuple(works.listed),
        op_work=np.array(number, np.int32)[made.op_work[:num_ops]],
        reads=reads,
        writes=writes,
        after=after,
        buffer_tier=made.tier[:num_buffers].copy(),
        buffer_bytes=made.size_bytes[:num_buffers].copy(),
        buffer_initial=made.initial[:num_buffers].copy(),
        buffer_reuses=made.reuses[:num_buffers].copy(),
        buffer_becomes=made.becomes[:num_buffers].copy(),
        labels=lambda: _labels(columns, op_is, buffer_is, sharing, devices),
    )


def roles_of(labels: Labels) -> Roles:
    """What ops and buffers are, by their names."""
    contents = [_content(b.content) for b in labels.buffers]
    units: dict[str, int] = {}
    of_buffers = [
        units.setdefault(unit, len(units)) if (unit := getattr(content, "unit", "")) else NONE for content in contents
    ]
    of_ops = [units.setdefault(op.unit, len(units)) for op in labels.ops]
    lengths = {} if labels.step is None else {u.name: u.num_parameters for u in labels.step.units}
    return Roles(
        op_kind=np.array([OP_KINDS.get(op.kind, dividing.OTHER) for op in labels.ops], np.int32),
        op_unit=np.array(of_ops, np.int32),
        op_batch=np.array([op.micro_batch for op in labels.ops], np.int32),
        kind=np.array([BUFFER_KINDS.get(b.kind, dividing.OTHER) for b in labels.buffers], np.int32),
        content=np.array([CONTENTS.get(type(content), dividing.OTHER) for content in contents], np.int32),
        unit=np.array(of_buffers, np.int32),
        lengths=np.array([lengths.get(name, 0) for name in units], np.int64),
        ends=np.array([ENDS.get(name, dividing.OTHER) for name in units], np.int32),
    )


def _wholes(source: Source, roles: Roles, sharing: Sharing, on_device: int, num_drawn: int) -> Wholes:
    """What becomes of each buffer; `on_device` is the number of the device's tier."""
    num, kind, content = len(source.tier), roles.kind, roles.content
    is_on_device, cuts_tensors = source.tier == on_device, sharing.divided == "tensors"
    is_copy, is_made_on_device = np.zeros(num, np.bool_), np.zeros(num, np.bool_)
    num_writes = np.diff(source.writes.begins)
    is_copy[source.writes.items[np.repeat(roles.op_kind == dividing.COPY, num_writes)]] = True
    is_made_on_device[source.writes.items[np.repeat(source.is_on_device[source.op_work], num_writes)]] = True
    is_params, is_states = kind == dividing.PARAMS, kind == dividing.STATES
    is_gradient = content == dividing.OF_GRADIENTS
    is_summed = is_on_device & is_gradient & ~is_copy & (sharing.reduces == "each" and not cuts_tensors)
    reuses = source.reuses
    has_tied_share = is_summed & (reuses >= 0) & ~is_summed[reuses]
    # where parameters live, by unit, and whether they are frozen
    homes = np.full((2, len(roles.lengths) + 1), NONE, np.int64)
    lives = (content == dividing.OF_PARAMS) | (content == dividing.OF_FROZEN)
    is_frozen = (content == dividing.OF_FROZEN).astype(np.int64)
    at = np.flatnonzero(source.initial & is_params)
    homes[is_frozen[at], roles.unit[at]] = source.tier[at]
    home = np.where(lives, homes[is_frozen, roles.unit], NONE)
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
    return Wholes(
        first=np.cumsum(num_standing) - num_standing,
        is_on_device=is_on_device,
        is_everywhere=is_everywhere,
        is_copy=is_copy,
        is_summed_at_once=is_summed,
        has_tied_share=has_tied_share,
        is_sharded=is_sharded,
        is_gathered_again=is_params & (source.tier == home) & (sharing.divided in ("gradients", "states")),
    )


def _room(source: Source, roles: Roles, terms: Terms) -> tuple[Made, State]:
    """Room for all that may be made: each device has its part of each op, and a collective for each read and write."""
    d, num_tasks, num_wholes = terms.num_drawn, len(source.op_work), len(source.tier)
    reads, writes, after = (len(of.items) for of in (source.reads, source.writes, source.after))
    num_collectives = reads + writes + num_tasks
    num_ops, num_buffers = d * (num_tasks + num_collectives), d * (num_wholes + reads + writes)

    def lists(num: int) -> Lists:
        return Lists(np.zeros(num_ops + 1, np.int32), np.empty(num, np.int32))

    made = Made(
        num=np.zeros(6, np.int64),
        op_work=np.empty(num_ops, np.int32),
        op_is=np.empty((num_ops, 4), np.int64),
        reads=lists(d * (reads + d * reads + (d + 1) * writes)),
        writes=lists(d * (writes + num_collectives)),
        after=lists(d * (after + num_collectives + reads + d * (writes + num_tasks))),
        tier=np.empty(num_buffers, np.int32),
        size_bytes=np.empty(num_buffers, np.int64),
        initial=np.empty(num_buffers, np.bool_),
        reuses=np.empty(num_buffers, np.int32),
        becomes=np.empty(num_buffers, np.int32),
        buffer_is=np.empty((num_buffers, 4), np.int64),
        works=np.empty((num_ops, 4), np.int64),
    )
    most_writes = int(np.diff(source.writes.begins).max(initial=0))
    state = State(
        parts=np.empty((num_tasks, d), np.int32),
        num_parts=np.zeros(num_tasks, np.int32),
        last=np.full((d, 2), NONE, np.int64),
        awaited=np.empty((d, num_collectives), np.int32),
        num_awaited=np.zeros(d, np.int64),
        scattered=np.full((num_wholes, d), NONE, np.int32),
        own=np.empty((most_writes, d), np.int32),
        heads=np.full(num_wholes + 2 * len(roles.lengths), NONE, np.int64),
        gathered=np.empty((d * reads, 6), np.int64),
        num_gathered=np.zeros(1, np.int64),
        task_works=np.full((len(source.is_on_device), 2, d + 1), NONE, np.int32),
    )
    return made, state


# ---- names ----


def _labels(columns: ScheduleColumns, op_is: Int64, buffer_is: Int64, sharing: Sharing, devices: int) -> Labels:
    """The names of everything: of what stands for the same of one device, and of what is exchanged."""
    one, tiers = columns.labels(), [columns.tiers[tier].name for tier in columns.buffer_tier.tolist()]

    def of_exchange(what: int, task: int, b: int, r: int) -> tuple[str, str, str]:
        """Its key, kind and unit."""
        op = one.ops[task]
        if what == dividing.SUMMED_ACTS:
            return op_key("all_reduce", op.key, device(r)), "all_reduce", op.unit
        content, by = one.buffers[b].content, "all_reduce" if sharing.divided == "nothing" else sharing.by
        unit = str(getattr(_content(content), "unit", ""))
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

    def all_of(rows: Int64, label: Any) -> Sequence[Any]:
        return [label(*row) for row in rows.tolist()]

    return replace(
        one,
        name=f"{one.name} on {devices} devices",
        ops=all_of(op_is, of_op),
        buffers=all_of(buffer_is, of_buffer),
        meta={**one.meta, "devices": devices},
    )
