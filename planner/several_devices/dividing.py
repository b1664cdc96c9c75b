"""What several devices have in place of one device's ops and buffers, compiled; `partition` says what it means.

Buffers of one device are *wholes*, its ops *tasks*: some devices have a part of each, or one of their own, and between
them come collectives.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierplan.sim.columns import Int32, Int64, Lists
from tierplan.sim.compiled.compiler import compiled_in_place

Table = npt.NDArray[np.void]
"""Rows with the named columns of one of the types below."""

NONE = -1
OTHER = 0
GRAIN, SHARD_GRAIN = 1024, 32
"""Of parts in which states travel, as in `contents`."""
COPY, UPDATE, FORWARD, RECOMPUTE, BACKWARD = range(1, 6)
"""Kinds of ops."""
PARAMS, GRADS, STATES, ACTS, WORK = range(1, 6)
"""Kinds of buffers."""
OF_PARAMS, OF_FROZEN, OF_GRADIENTS, OF_TIED_GRADIENTS, OF_INPUT, OF_INPUT_GRADIENT, OF_SHARED = range(1, 8)
"""Contents."""
STATES_IN_PARTS, MOST_PARTS = 16, 1 << 15
"""The content of one of several parts in which states travel is the first, the part, and so many times their number."""
EMBED, HEAD = 1, 2
"""Units at the ends of a chain."""
OF_BLOCK = 2
"""Sums of activations over devices in a pass of a block whose operators are cut."""
GATHER, REDUCE, ALL_REDUCE = range(3)
"""Kinds of collectives."""
KEEPS_NOTHING, KEEPS_ENDS, KEEPS_ALL = range(3)
STANDS_IN, GATHERED, SCATTERED, OWN, SUMMED, COMPLETED, SUMMED_ACTS = range(7)
"""What is made: what stands for an op or a buffer of one device on one of several; whole parameters for a turn; a
share of gradients; what a device has made by itself; gradients of all devices; parameters of which each made a part;
the sum of activations."""
OF_TASKS = -1
"""In place of a kind of collective: work of tasks."""
READS, WRITES, AFTER, NUM_OPS, NUM_BUFFERS, NUM_WORKS, NUM_GATHERED = range(7)
"""Places among numbers of what was made so far; the first three are those of lists, too."""

_INT, _BOOL = np.int64, np.bool_
TASKS = np.dtype(
    [
        ("work", _INT),
        ("kind", _INT),
        ("unit", _INT),
        ("batch", _INT),  # micro-batch
        ("end", _INT),  # `EMBED`, `HEAD` or `OTHER`
        ("sums", _INT),  # of activations over devices that cut operators
        ("is_on_device", _BOOL),  # its stream is one of the device
        ("following", _INT),  # the next one that computes, or `NONE`
    ]
)
WHOLES = np.dtype(
    [
        ("tier", _INT),
        ("size_bytes", _INT),
        ("reuses", _INT),
        ("becomes", _INT),
        ("kind", _INT),
        ("content", _INT),
        ("unit", _INT),
        ("length", _INT),  # parameters of the unit that are trained; 0 where nobody says
        ("first", _INT),  # of those that stand for it, the number of the first device's
        ("made_by", _INT),  # the task that writes it, or `NONE`
        ("is_awaited", _BOOL),  # a device reads it for something else than to compute
        ("is_initial", _BOOL),
        ("is_on_device", _BOOL),
        ("is_everywhere", _BOOL),  # each device has one
        ("is_copy", _BOOL),  # a copy has brought it, or is made of that: of gradients, what is of their sum already
        ("is_summed_at_once", _BOOL),  # gradients that stay on the device, summed over devices after each micro-batch
        ("is_summed_at_last", _BOOL),  # gradients that wait on the device for the next step, summed over devices first
        ("has_tied_share", _BOOL),  # this sum over devices begins where one device's share of a tied gradient is
        ("is_sharded", _BOOL),  # a device's or the host's is 1/n of it; a gradient is whole on the device that made it
        ("is_gathered_again", _BOOL),  # parameters that every device has whole, and of which each makes a shard
    ]
)
NAMED = [("what", _INT), ("task", _INT), ("whole", _INT), ("device", _INT)]
"""What names are made of."""
OPS = np.dtype([("work", _INT), *NAMED])
BUFFERS = np.dtype(
    [
        ("tier", _INT),
        ("size_bytes", _INT),
        ("is_initial", _BOOL),
        ("reuses", _INT),
        ("becomes", _INT),
        *NAMED,
    ]
)
WORKS = np.dtype([("kind", _INT), ("of", _INT), ("times", _INT), ("device", _INT)])
"""A kind of collective, bytes, calls and device; or `OF_TASKS`, work of one device, parts that it is cut into, device
or `NONE`."""
GATHERS = np.dtype(
    [("unit", _INT), ("turn", _INT), ("batch", _INT), ("device", _INT), ("buffer", _INT), ("before", _INT)]
)
"""Whole parameters that are there for a unit's turn, and the entry before of the same whole."""


class SharingNumbers(NamedTuple):
    """What `Sharing` says, as numbers."""

    num: int
    """Devices."""
    num_drawn: int
    is_vertical: bool
    """Whether a unit's parameters stay for all its micro-batches."""
    cuts_tensors: bool
    divides_all: bool
    divides_nothing: bool
    waits: bool
    ahead: bool
    keeps: int
    by: int
    num_units: int


class Dividing(NamedTuple):
    """Tasks and wholes, what several devices have in place of them, with room for more, and what was done so far."""

    tasks: Table
    whole: Table
    terms: SharingNumbers
    tiers: Int32
    """By device that is drawn."""
    grains: Int64
    """By tier, as for `_held_bytes`."""
    num: Int64
    """Of what was made so far: `READS` to `NUM_GATHERED`."""
    lists: tuple[Lists, Lists, Lists]
    """What is read, what is written, and what comes before."""
    ops: Table
    buffers: Table
    works: Table
    parts: Int32
    """By task and device: the op that stands for it."""
    num_parts: Int64
    last: Int64
    """By device: its last op that computes, and the one before."""
    awaited: Int32
    """By device: collectives that the next op comes after that computes."""
    num_awaited: Int64
    scattered: Int32
    """By whole and device: the buffer with its share."""
    own: Int32
    """By place among a task's writes, and device: what it has made by itself."""
    way: Int64
    """By place among a task's reads: what it reads in place of its own, or `NONE`."""
    heads: Int64
    """By whole, then by unit of parameters and of frozen ones: the last of `gathers`."""
    gathers: Table
    task_works: Int32
    """By work, whether it is cut into parts, and device behind that of all: its number."""


@compiled_in_place
def _shard_bytes(d: Dividing, b: int, r: int) -> int:
    """A device's share, of whole values where there is one for each parameter, as the runtime cuts them."""
    num, cuts_tensors = d.terms.num, d.terms.cuts_tensors
    length, size_bytes = int(d.whole[b]["length"]), int(d.whole[b]["size_bytes"])
    if length > 0 and d.whole[b]["content"] >= STATES_IN_PARTS and not cuts_tensors:
        num_parts, part = divmod(int(d.whole[b]["content"]) - STATES_IN_PARTS, MOST_PARTS)
        each = -(-length // (num_parts * GRAIN)) * GRAIN  # as `contents.part_ranges`
        of_all = min(each, length - part * each)
        if size_bytes % of_all == 0:
            own = length // num + (1 if r < length % num else 0)
            begin, end = own * part // num_parts, own * (part + 1) // num_parts  # as `contents.part_of_shard`
            end = own if part + 1 == num_parts else end // SHARD_GRAIN * SHARD_GRAIN
            return (end - begin // SHARD_GRAIN * SHARD_GRAIN) * (size_bytes // of_all)
    if length > 0 and size_bytes % length == 0 and not cuts_tensors:
        return (length // num + (1 if r < length % num else 0)) * (size_bytes // length)  # as `contents.shard`
    return -(-size_bytes // num)


@compiled_in_place
def _held_bytes(size_bytes: int, grain_bytes: int) -> int:
    """As `machine.held_bytes`: exact where the grain is 0, powers of two where it is negative."""
    if size_bytes <= 0 or grain_bytes == 0:
        return size_bytes
    if grain_bytes > 0:
        return -(-size_bytes // grain_bytes) * grain_bytes
    held = 1
    while held < size_bytes:
        held *= 2
    return held


@compiled_in_place
def _on(d: Dividing, b: int, r: int) -> int:
    """The number of a whole's stand-in on device r, or of the one that all share."""
    return int(d.whole[b]["first"]) + (r if d.whole[b]["is_everywhere"] else 0)


@compiled_in_place
def _add_buffer(d: Dividing, tier: int, size_bytes: int, reuses: int, what: int, task: int, b: int, r: int) -> int:
    """Adds one that does not outlive the step; its number."""
    i = int(d.num[NUM_BUFFERS])
    row = d.buffers[i]
    row["tier"], row["size_bytes"], row["is_initial"], row["reuses"], row["becomes"] = tier, size_bytes, 0, reuses, NONE
    row["what"], row["task"], row["whole"], row["device"] = what, task, b, r
    d.num[NUM_BUFFERS] += 1
    return i


@compiled_in_place
def _refer(d: Dividing, which: int, item: int) -> None:
    """Adds an item to a list of the op that is being made, unless it is there."""
    begins, items = d.lists[which]
    for k in range(begins[d.num[NUM_OPS]], d.num[which]):
        if items[k] == item:
            return
    items[d.num[which]] = item
    d.num[which] += 1


@compiled_in_place
def _come_after(d: Dividing, task: int) -> None:
    """Has the op that is being made come after all parts of a task."""
    for k in range(d.num_parts[task]):
        _refer(d, AFTER, d.parts[task, k])


@compiled_in_place
def _add_op(d: Dividing, work: int, what: int, task: int, b: int, r: int) -> int:
    """Ends the op that is being made; its number."""
    i = int(d.num[NUM_OPS])
    row = d.ops[i]
    row["work"], row["what"], row["task"], row["whole"], row["device"] = work, what, task, b, r
    d.num[NUM_OPS] += 1
    for which in range(len(d.lists)):
        d.lists[which].begins[i + 1] = d.num[which]
    return i


@compiled_in_place
def _number(d: Dividing, kind: int, of: int, times: int, r: int, is_new: bool) -> int:
    """The number of some work, which may have one already unless it `is_new`."""
    for i in range(0 if is_new else d.num[NUM_WORKS]):
        row = d.works[i]
        if row["kind"] == kind and row["of"] == of and row["times"] == times and row["device"] == r:
            return i
    i = int(d.num[NUM_WORKS])
    row = d.works[i]
    row["kind"], row["of"], row["times"], row["device"] = kind, of, times, r
    d.num[NUM_WORKS] += 1
    return i


@compiled_in_place
def _collective(d: Dividing, kind: int, out: int, what: int, task: int, b: int, r: int) -> None:
    """Ends the collective of a whole that is being made."""
    _refer(d, WRITES, out)
    work = _number(d, kind, d.whole[b]["size_bytes"], 1, r, False)
    op = _add_op(d, work, what, task, b, r)
    if d.terms.waits:
        d.awaited[r, d.num_awaited[r]] = op
        d.num_awaited[r] += 1


@compiled_in_place
def _exchanged(d: Dividing, kind: int, size_bytes: int, after: int, what: int, task: int, b: int, r: int) -> int:
    """A new buffer on device r, of what all devices have."""
    out = _add_buffer(d, d.tiers[r], size_bytes, NONE, what, task, b, r)
    for k in range(d.terms.num_drawn):
        _refer(d, READS, _on(d, b, k))
    if after >= 0:
        _refer(d, AFTER, after)
    _collective(d, kind, out, what, task, b, r)
    return out


@compiled_in_place
def _gather(d: Dividing, task: int, b: int, r: int) -> int:
    """The whole parameters on device r for one turn of one unit, one ahead of compute."""
    unit, turn = d.tasks[task]["unit"], 0 if d.tasks[task]["kind"] == FORWARD else 1
    head, batch = b, 0 if d.terms.is_vertical else d.tasks[task]["batch"]
    if d.terms.keeps == KEEPS_ALL or (d.terms.keeps == KEEPS_ENDS and d.tasks[task]["end"] != OTHER):
        head = len(d.whole) + d.whole[b]["unit"] + (d.terms.num_units if d.whole[b]["content"] == OF_FROZEN else 0)
        unit = turn = NONE
    entry = d.heads[head]
    while entry >= 0:
        known = d.gathers[entry]
        is_same = known["unit"] == unit and known["turn"] == turn and known["batch"] == batch
        if is_same and known["device"] == r:
            return int(known["buffer"])
        entry = known["before"]
    after = d.last[r, 0 if d.terms.waits else 1]
    out = _exchanged(d, GATHER, d.whole[b]["size_bytes"], after, GATHERED, task, b, r)
    new = d.gathers[d.num[NUM_GATHERED]]
    new["unit"], new["turn"], new["batch"], new["device"] = unit, turn, batch, r
    new["buffer"], new["before"] = out, d.heads[head]
    d.heads[head] = d.num[NUM_GATHERED]
    d.num[NUM_GATHERED] += 1
    return out


@compiled_in_place
def _scatter(d: Dividing, task: int, b: int, r: int) -> int:
    """Device r's shard of the sum of all devices' gradients, or the whole where nothing is divided."""
    if d.scattered[b, r] < 0:
        size_bytes, kind = int(d.whole[b]["size_bytes"]), ALL_REDUCE
        if not d.terms.divides_nothing:
            size_bytes, kind = _shard_bytes(d, b, r), d.terms.by
        d.scattered[b, r] = _exchanged(d, kind, size_bytes, NONE, SCATTERED, task, b, r)
    return int(d.scattered[b, r])


@compiled_in_place
def _own_part(d: Dividing, task: int, b: int, r: int, computes: bool) -> int:
    """What a device has made by itself, before the others' shares are added: a gradient, or updated parameters."""
    row = d.whole[b]
    of_all, tier = d.buffers[_on(d, b, r)], d.tiers[r] if row["is_on_device"] else row["tier"]
    if computes:
        reuses = _on(d, row["reuses"], r) if row["has_tied_share"] else NONE
        return _add_buffer(d, tier, row["size_bytes"], reuses, OWN, task, b, r)
    part = _add_buffer(d, tier, of_all["size_bytes"], of_all["reuses"], OWN, task, b, r)
    of_all["reuses"] = part
    return part


@compiled_in_place
def _complete(d: Dividing, task: int, b: int, place: int, r: int, is_sum: bool) -> None:
    """Adds all devices' shares: sums gradients onto those of earlier micro-batches, or gathers new parameters."""
    row = d.whole[b]
    kind, what = GATHER, COMPLETED
    if is_sum:
        for k in range(d.terms.num_drawn):
            _refer(d, READS, d.own[place, k])
        if row["reuses"] >= 0 and not row["has_tied_share"]:
            _refer(d, READS, _on(d, row["reuses"], r))
        kind, what = ALL_REDUCE if d.terms.divides_nothing else d.terms.by, SUMMED
    else:
        _refer(d, READS, d.own[place, r])
        _come_after(d, task)
    _collective(d, kind, _on(d, b, r), what, task, b, r)


@compiled_in_place
def _sum_activations(d: Dividing, task: int, reads: Int32, writes: Int32) -> None:
    """Megatron's all-reduces."""
    most_bytes = NONE
    for some in (reads, writes):
        for b in some:
            if d.whole[b]["kind"] == ACTS and d.whole[b]["content"] in (OF_INPUT, OF_INPUT_GRADIENT):
                most_bytes = max(most_bytes, d.whole[b]["size_bytes"])
    calls = int(d.tasks[task]["sums"])
    if most_bytes < 0 or calls == 0:
        return
    for r in range(d.terms.num_drawn):
        _come_after(d, task)
        work = _number(d, ALL_REDUCE, calls * most_bytes, calls, r, False)
        d.awaited[r, d.num_awaited[r]] = _add_op(d, work, SUMMED_ACTS, task, NONE, r)
        d.num_awaited[r] += 1


@compiled_in_place
def _declare(d: Dividing) -> None:
    """All wholes, on each device that has one."""
    for b in range(len(d.whole)):
        row = d.whole[b]
        for r in range(d.terms.num_drawn if row["is_everywhere"] else 1):
            size_bytes = int(row["size_bytes"])
            if row["is_on_device"] or d.terms.num_drawn == d.terms.num:
                if row["is_sharded"]:
                    size_bytes = _shard_bytes(d, b, r)
            else:  # of what is on none of the devices, all that is held together
                num, grain_bytes = d.terms.num if row["is_everywhere"] else 1, d.grains[row["tier"]]
                if row["is_sharded"]:  # of two sizes at most
                    num_larger = min(num, int(row["length"]) % d.terms.num)
                    size_bytes = num_larger * _held_bytes(_shard_bytes(d, b, 0), grain_bytes)
                    size_bytes += (num - num_larger) * _held_bytes(_shard_bytes(d, b, num_larger), grain_bytes)
                else:
                    size_bytes = num * _held_bytes(size_bytes, grain_bytes)
            is_reused = row["reuses"] >= 0 and not row["has_tied_share"]
            reuses = _on(d, row["reuses"], r) if is_reused else NONE
            tier, device = d.tiers[r] if row["is_on_device"] else row["tier"], r if row["is_everywhere"] else NONE
            new = d.buffers[_add_buffer(d, tier, size_bytes, reuses, STANDS_IN, NONE, b, device)]
            new["is_initial"] = row["is_initial"]
            new["becomes"] = _on(d, row["becomes"], r) if row["becomes"] >= 0 else NONE


@compiled_in_place
def divide(d: Dividing, reads: Lists, writes: Lists, after: Lists) -> None:
    """Makes all of it, from tasks and what they refer to."""
    _declare(d)
    for task in range(len(d.tasks)):
        read = reads.items[reads.begins[task] : reads.begins[task + 1]]
        written = writes.items[writes.begins[task] : writes.begins[task + 1]]
        kind = d.tasks[task]["kind"]
        computes = kind in (FORWARD, RECOMPUTE, BACKWARD)
        has_acts = is_sharded = is_changed = has_sums = False
        for some in (read, written):
            for b in some:
                has_acts = has_acts or d.whole[b]["kind"] == ACTS
                is_sharded = is_sharded or d.whole[b]["is_sharded"]
        for b in written:
            has_sums = has_sums or (computes and d.whole[b]["is_summed_at_once"])
            is_changed = is_changed or (kind == OTHER and d.whole[b]["is_sharded"])
        is_for_all = not (d.tasks[task]["is_on_device"] or has_acts)
        is_shared = (kind == COPY and is_sharded) or is_changed or (kind == UPDATE and not d.terms.divides_nothing)
        is_shared = not is_for_all and (is_shared or (computes and d.terms.cuts_tensors))
        for first in range(1 if is_for_all else d.terms.num_drawn):
            for place in range(len(read)):  # what is exchanged for it comes before it
                b, is_done = read[place], computes or is_for_all or d.terms.cuts_tensors
                row = d.whole[b]
                d.way[place] = NONE
                if not row["is_on_device"] or (has_sums and row["is_summed_at_once"]):
                    continue
                if row["kind"] == PARAMS and computes and d.terms.divides_all:
                    d.way[place] = _gather(d, task, b, first)
                elif row["content"] == OF_GRADIENTS and not (is_done or row["is_summed_at_once"] or row["is_copy"]):
                    d.way[place] = _scatter(d, task, b, first)
            for place in range(len(read)):
                b = read[place]
                if has_sums and d.whole[b]["is_summed_at_once"]:
                    continue
                end = (d.terms.num_drawn if d.whole[b]["is_everywhere"] else 1) if is_for_all else first + 1
                for r in range(first, end):
                    new = d.way[place] if d.way[place] >= 0 else _on(d, b, r)
                    _refer(d, READS, new)
            for place in range(len(written)):
                b = written[place]
                is_own = d.whole[b]["is_summed_at_once"] if computes else d.whole[b]["is_gathered_again"]
                end = (d.terms.num_drawn if d.whole[b]["is_everywhere"] else 1) if is_for_all else first + 1
                for r in range(first, end):
                    new = _on(d, b, r)
                    if is_own:
                        new = _own_part(d, task, b, r, computes)
                        d.own[place, r] = new
                    _refer(d, WRITES, new)
            for k in range(after.begins[task], after.begins[task + 1]):
                old = after.items[k]
                if not is_for_all and d.num_parts[old] == d.terms.num_drawn:
                    _refer(d, AFTER, d.parts[old, first])
                else:
                    _come_after(d, old)
            if computes and not is_for_all:
                for k in range(d.num_awaited[first]):
                    _refer(d, AFTER, d.awaited[first, k])
                d.num_awaited[first] = 0
            device, is_cut, work = NONE if is_for_all else first, int(is_shared), d.tasks[task]["work"]
            if d.task_works[work, is_cut, device + 1] < 0:
                parts = d.terms.num if is_shared else 1
                number = _number(d, OF_TASKS, work, parts, device, True)
                d.task_works[work, is_cut, device + 1] = number
            number = d.task_works[work, is_cut, device + 1]
            d.parts[task, first] = _add_op(d, number, STANDS_IN, task, NONE, device)
            d.num_parts[task] += 1
        if computes and not is_for_all:
            for r in range(d.terms.num_drawn):
                d.last[r, 1], d.last[r, 0] = d.last[r, 0], d.parts[task, r]
            following = d.tasks[task]["following"]
            if d.terms.ahead and d.terms.divides_all and following >= 0:  # before what comes of this one's gradients
                for k in range(reads.begins[following], reads.begins[following + 1]):
                    b = reads.items[k]
                    if d.whole[b]["is_on_device"] and d.whole[b]["kind"] == PARAMS and d.whole[b]["made_by"] <= task:
                        for r in range(d.terms.num_drawn):
                            _gather(d, following, b, r)
            for b in written if d.terms.ahead else written[:0]:
                row = d.whole[b]
                is_whole = row["content"] == OF_GRADIENTS and not (row["is_summed_at_once"] or row["is_copy"])
                if is_whole and row["is_on_device"] and row["is_awaited"] and not d.terms.cuts_tensors:
                    for r in range(d.terms.num_drawn):
                        _scatter(d, task, b, r)
        for place in range(len(written)):
            b = written[place]
            if d.whole[b]["is_summed_at_once"] if computes else d.whole[b]["is_gathered_again"]:
                for r in range(d.terms.num_drawn):
                    _complete(d, task, b, place, r, computes)
            elif d.whole[b]["is_summed_at_last"]:
                for r in range(d.terms.num_drawn):
                    summed = d.buffers[_scatter(d, task, b, r)]
                    of_device = d.buffers[_on(d, b, r)]
                    summed["becomes"], of_device["becomes"] = of_device["becomes"], NONE
        if d.terms.cuts_tensors and computes:
            _sum_activations(d, task, read, written)
