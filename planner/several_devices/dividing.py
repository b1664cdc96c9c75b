"""What several devices have in place of one device's ops and buffers, compiled; `partition` says what it means.

Buffers of one device are *wholes*, its ops *tasks*: some devices have a part of each, or one of their own, and between
them come collectives.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tierplan.sim.columns import Int32, Int64, Lists
from tierplan.sim.compiled.compiler import compiled

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
GATHER, REDUCE, ALL_REDUCE = range(3)
"""Kinds of collectives."""
KEEPS_NOTHING, KEEPS_ENDS, KEEPS_ALL = range(3)
STANDS_IN, GATHERED, SCATTERED, OWN, SUMMED, COMPLETED, SUMMED_ACTS = range(7)
"""What is made: what stands for an op or a buffer of one device on one of several; whole parameters for a turn; a
share of gradients; what a device has made by itself; gradients of all devices; parameters of which each made a part;
the sum of activations."""
OF_TASKS = -1
"""In place of a kind of collective: work of tasks."""
NUM_OPS, NUM_BUFFERS, NUM_READS, NUM_WRITES, NUM_AFTER, NUM_WORKS, NUM_GATHERED = range(7)
"""Of what was made so far."""

_INT, _BOOL = np.int64, np.bool_
TASKS = np.dtype(
    [
        ("work", _INT),
        ("kind", _INT),
        ("unit", _INT),
        ("batch", _INT),  # micro-batch
        ("end", _INT),  # `EMBED`, `HEAD` or `OTHER`
        ("is_on_device", _BOOL),  # its stream is one of the device
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
        ("is_initial", _BOOL),
        ("is_on_device", _BOOL),
        ("is_everywhere", _BOOL),  # each device has one
        ("is_copy", _BOOL),  # a copy has brought it: of gradients, what host memory has of their sum
        ("is_summed_at_once", _BOOL),  # gradients that stay on the device, summed over devices after each micro-batch
        ("is_summed_at_last", _BOOL),  # gradients that wait on the device for the next step, summed over devices first
        ("has_tied_share", _BOOL),  # this sum over devices begins where one device's share of a tied gradient is
        ("is_sharded", _BOOL),  # a device's or the host's is 1/n of it; a gradient is whole on the device that made it
        ("is_gathered_again", _BOOL),  # parameters that every device has whole, and of which each makes a shard
    ]
)
OPS = np.dtype([("work", _INT), ("what", _INT), ("task", _INT), ("whole", _INT), ("device", _INT)])
BUFFERS = np.dtype(
    [
        ("tier", _INT),
        ("size_bytes", _INT),
        ("is_initial", _BOOL),
        ("reuses", _INT),
        ("becomes", _INT),
        ("what", _INT),
        ("task", _INT),
        ("whole", _INT),
        ("device", _INT),
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
    keeps: int
    by: int
    num_units: int


class Made(NamedTuple):
    """What several devices have, with room for more."""

    num: Int64
    ops: Table
    buffers: Table
    reads: Lists
    writes: Lists
    after: Lists
    works: Table


class State(NamedTuple):
    """What was done so far."""

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


@compiled
def _shard_bytes(whole: Table, b: int, r: int, num: int, cuts_tensors: bool) -> int:
    """A device's share, of whole values where there is one for each parameter, as the runtime cuts them."""
    length, size_bytes = int(whole[b]["length"]), int(whole[b]["size_bytes"])
    if length > 0 and whole[b]["content"] >= STATES_IN_PARTS and not cuts_tensors:
        num_parts, part = divmod(int(whole[b]["content"]) - STATES_IN_PARTS, MOST_PARTS)
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


@compiled
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


@compiled
def _on(whole: Table, b: int, r: int) -> int:
    """The number of a whole's stand-in on device r, or of the one that all share."""
    return int(whole[b]["first"]) + (r if whole[b]["is_everywhere"] else 0)


@compiled
def _add_buffer(
    num: Int64, buffers: Table, tier: int, size_bytes: int, reuses: int, what: int, task: int, b: int, r: int
) -> int:
    """Adds one that does not outlive the step; its number."""
    i = int(num[NUM_BUFFERS])
    row = buffers[i]
    row["tier"], row["size_bytes"], row["is_initial"], row["reuses"], row["becomes"] = tier, size_bytes, 0, reuses, NONE
    row["what"], row["task"], row["whole"], row["device"] = what, task, b, r
    num[NUM_BUFFERS] += 1
    return i


@compiled
def _refer(lists: Lists, num: Int64, which: int, op: int, item: int) -> None:
    """Adds an item to a list of the op that is being made, unless it is there."""
    for k in range(lists.begins[op], num[which]):
        if lists.items[k] == item:
            return
    lists.items[num[which]] = item
    num[which] += 1


@compiled
def _add_op(made: Made, work: int, what: int, task: int, b: int, r: int) -> int:
    """Ends the op that is being made; its number."""
    i = int(made.num[NUM_OPS])
    row = made.ops[i]
    row["work"], row["what"], row["task"], row["whole"], row["device"] = work, what, task, b, r
    made.num[NUM_OPS] += 1
    made.reads.begins[i + 1] = made.num[NUM_READS]
    made.writes.begins[i + 1] = made.num[NUM_WRITES]
    made.after.begins[i + 1] = made.num[NUM_AFTER]
    return i


@compiled
def _number(num: Int64, works: Table, kind: int, of: int, times: int, r: int, is_new: bool) -> int:
    """The number of some work, which may have one already unless it `is_new`."""
    for i in range(0 if is_new else num[NUM_WORKS]):
        row = works[i]
        if row["kind"] == kind and row["of"] == of and row["times"] == times and row["device"] == r:
            return i
    i = int(num[NUM_WORKS])
    row = works[i]
    row["kind"], row["of"], row["times"], row["device"] = kind, of, times, r
    num[NUM_WORKS] += 1
    return i


@compiled
def _collective(
    made: Made,
    state: State,
    terms: SharingNumbers,
    kind: int,
    size_bytes: int,
    out: int,
    what: int,
    task: int,
    b: int,
    r: int,
) -> None:
    """Ends the collective of a whole that is being made."""
    _refer(made.writes, made.num, NUM_WRITES, made.num[NUM_OPS], out)
    work = _number(made.num, made.works, kind, size_bytes, 1, r, False)
    op = _add_op(made, work, what, task, b, r)
    if terms.waits:
        state.awaited[r, state.num_awaited[r]] = op
        state.num_awaited[r] += 1


@compiled
def _exchanged(
    whole: Table, terms: SharingNumbers, tiers: Int32, made: Made, state: State,
    kind: int, size_bytes: int, after: int, what: int, task: int, b: int, r: int,
) -> int:  # fmt: skip
    """A new buffer on device r, of what all devices have."""
    out = _add_buffer(made.num, made.buffers, tiers[r], size_bytes, NONE, what, task, b, r)
    op = made.num[NUM_OPS]
    for k in range(terms.num_drawn):
        _refer(made.reads, made.num, NUM_READS, op, _on(whole, b, k))
    if after >= 0:
        _refer(made.after, made.num, NUM_AFTER, op, after)
    _collective(made, state, terms, kind, whole[b]["size_bytes"], out, what, task, b, r)
    return out


@compiled
def _gather(
    tasks: Table, whole: Table, terms: SharingNumbers, tiers: Int32, made: Made, state: State, task: int, b: int, r: int
) -> int:
    """The whole parameters on device r for one turn of one unit, one ahead of compute."""
    unit, turn = tasks[task]["unit"], 0 if tasks[task]["kind"] == FORWARD else 1
    head, batch = b, 0 if terms.is_vertical else tasks[task]["batch"]
    if terms.keeps == KEEPS_ALL or (terms.keeps == KEEPS_ENDS and tasks[task]["end"] != OTHER):
        head = len(whole) + whole[b]["unit"] + (terms.num_units if whole[b]["content"] == OF_FROZEN else 0)
        unit = turn = NONE
    entry = state.heads[head]
    while entry >= 0:
        known = state.gathers[entry]
        is_same = known["unit"] == unit and known["turn"] == turn and known["batch"] == batch
        if is_same and known["device"] == r:
            return int(known["buffer"])
        entry = known["before"]
    after = state.last[r, 0 if terms.waits else 1]
    out = _exchanged(whole, terms, tiers, made, state, GATHER, whole[b]["size_bytes"], after, GATHERED, task, b, r)
    new = state.gathers[made.num[NUM_GATHERED]]
    new["unit"], new["turn"], new["batch"], new["device"] = unit, turn, batch, r
    new["buffer"], new["before"] = out, state.heads[head]
    state.heads[head] = made.num[NUM_GATHERED]
    made.num[NUM_GATHERED] += 1
    return out


@compiled
def _scatter(
    whole: Table, terms: SharingNumbers, tiers: Int32, made: Made, state: State, task: int, b: int, r: int
) -> int:
    """Device r's shard of the sum of all devices' gradients, or the whole where nothing is divided."""
    if state.scattered[b, r] < 0:
        size_bytes, kind = int(whole[b]["size_bytes"]), ALL_REDUCE
        if not terms.divides_nothing:
            size_bytes, kind = _shard_bytes(whole, b, r, terms.num, terms.cuts_tensors), terms.by
        state.scattered[b, r] = _exchanged(
            whole, terms, tiers, made, state, kind, size_bytes, NONE, SCATTERED, task, b, r
        )
    return int(state.scattered[b, r])


@compiled
def _own_part(whole: Table, tiers: Int32, num: Int64, buffers: Table, task: int, b: int, r: int, computes: bool) -> int:
    """What a device has made by itself, before the others' shares are added: a gradient, or updated parameters."""
    row = whole[b]
    of_all, tier = buffers[_on(whole, b, r)], tiers[r] if row["is_on_device"] else row["tier"]
    if computes:
        reuses = _on(whole, row["reuses"], r) if row["has_tied_share"] else NONE
        return _add_buffer(num, buffers, tier, row["size_bytes"], reuses, OWN, task, b, r)
    part = _add_buffer(num, buffers, tier, of_all["size_bytes"], of_all["reuses"], OWN, task, b, r)
    of_all["reuses"] = part
    return part


@compiled
def _complete(
    whole: Table, terms: SharingNumbers, made: Made, state: State, task: int, b: int, place: int, r: int, is_sum: bool
) -> None:
    """Adds all devices' shares: sums gradients onto those of earlier micro-batches, or gathers new parameters."""
    op, row = made.num[NUM_OPS], whole[b]
    kind, what = GATHER, COMPLETED
    if is_sum:
        for k in range(terms.num_drawn):
            _refer(made.reads, made.num, NUM_READS, op, state.own[place, k])
        if row["reuses"] >= 0 and not row["has_tied_share"]:
            _refer(made.reads, made.num, NUM_READS, op, _on(whole, row["reuses"], r))
        kind, what = ALL_REDUCE if terms.divides_nothing else terms.by, SUMMED
    else:
        _refer(made.reads, made.num, NUM_READS, op, state.own[place, r])
        for k in range(state.num_parts[task]):
            _refer(made.after, made.num, NUM_AFTER, op, state.parts[task, k])
    _collective(made, state, terms, kind, row["size_bytes"], _on(whole, b, r), what, task, b, r)


@compiled
def _sum_activations(
    tasks: Table, whole: Table, reads: Int32, writes: Int32, terms: SharingNumbers, made: Made, state: State, task: int
) -> None:
    """Megatron's all-reduces: after each half of a block, and where the vocabulary is cut."""
    most_bytes = NONE
    for some in (reads, writes):
        for b in some:
            if whole[b]["kind"] == ACTS and whole[b]["content"] in (OF_INPUT, OF_INPUT_GRADIENT):
                most_bytes = max(most_bytes, whole[b]["size_bytes"])
    end, kind = tasks[task]["end"], tasks[task]["kind"]
    calls = 2 if end == OTHER else 1 if (end == EMBED and kind == FORWARD) or (end == HEAD and kind == BACKWARD) else 0
    if most_bytes < 0 or calls == 0:
        return
    for r in range(terms.num_drawn):
        for k in range(state.num_parts[task]):
            _refer(made.after, made.num, NUM_AFTER, made.num[NUM_OPS], state.parts[task, k])
        work = _number(made.num, made.works, ALL_REDUCE, calls * most_bytes, calls, r, False)
        state.awaited[r, state.num_awaited[r]] = _add_op(made, work, SUMMED_ACTS, task, NONE, r)
        state.num_awaited[r] += 1


@compiled
def _declare(whole: Table, terms: SharingNumbers, tiers: Int32, grains: Int64, num: Int64, buffers: Table) -> None:
    """All wholes, on each device that has one."""
    for b in range(len(whole)):
        row = whole[b]
        for r in range(terms.num_drawn if row["is_everywhere"] else 1):
            size_bytes = int(row["size_bytes"])
            if row["is_on_device"] or terms.num_drawn == terms.num:
                if row["is_sharded"]:
                    size_bytes = _shard_bytes(whole, b, r, terms.num, terms.cuts_tensors)
            else:  # of what is on none of the devices, all that is held together
                size_bytes = 0
                for k in range(terms.num if row["is_everywhere"] else 1):
                    part_bytes = int(row["size_bytes"])
                    if row["is_sharded"]:
                        part_bytes = _shard_bytes(whole, b, k, terms.num, terms.cuts_tensors)
                    size_bytes += _held_bytes(part_bytes, grains[row["tier"]])
            is_reused = row["reuses"] >= 0 and not row["has_tied_share"]
            reuses = _on(whole, row["reuses"], r) if is_reused else NONE
            tier, device = tiers[r] if row["is_on_device"] else row["tier"], r if row["is_everywhere"] else NONE
            new = buffers[_add_buffer(num, buffers, tier, size_bytes, reuses, STANDS_IN, NONE, b, device)]
            new["is_initial"] = row["is_initial"]
            new["becomes"] = _on(whole, row["becomes"], r) if row["becomes"] >= 0 else NONE


@compiled
def divide(
    tasks: Table, whole: Table, reads: Lists, writes: Lists, after: Lists,
    terms: SharingNumbers, tiers: Int32, grains: Int64, made: Made, state: State,
) -> None:  # fmt: skip
    """Makes all of it, from tasks and what they refer to. `tiers` are by device that is drawn; `grains` by tier, as for
    `_held_bytes`."""
    num = made.num
    _declare(whole, terms, tiers, grains, num, made.buffers)
    for task in range(len(tasks)):
        read = reads.items[reads.begins[task] : reads.begins[task + 1]]
        written = writes.items[writes.begins[task] : writes.begins[task + 1]]
        kind = tasks[task]["kind"]
        computes = kind in (FORWARD, RECOMPUTE, BACKWARD)
        has_acts = is_sharded = has_sums = False
        for some in (read, written):
            for b in some:
                has_acts = has_acts or whole[b]["kind"] == ACTS
                is_sharded = is_sharded or whole[b]["is_sharded"]
        for b in written:
            has_sums = has_sums or (computes and whole[b]["is_summed_at_once"])
        is_for_all = not (tasks[task]["is_on_device"] or has_acts)
        is_shared = (kind == COPY and is_sharded) or (kind == UPDATE and not terms.divides_nothing)
        is_shared = not is_for_all and (is_shared or (computes and terms.cuts_tensors))
        for first in range(1 if is_for_all else terms.num_drawn):
            for place in range(len(read)):  # what is exchanged for it comes before it
                b, is_done = read[place], computes or is_for_all or terms.cuts_tensors
                row = whole[b]
                if not row["is_on_device"] or (has_sums and row["is_summed_at_once"]):
                    state.way[place] = NONE
                elif row["kind"] == PARAMS and computes and terms.divides_all:
                    state.way[place] = _gather(tasks, whole, terms, tiers, made, state, task, b, first)
                elif row["content"] == OF_GRADIENTS and not (is_done or row["is_summed_at_once"] or row["is_copy"]):
                    state.way[place] = _scatter(whole, terms, tiers, made, state, task, b, first)
                else:
                    state.way[place] = NONE
            op = num[NUM_OPS]
            for place in range(len(read)):
                b = read[place]
                if has_sums and whole[b]["is_summed_at_once"]:
                    continue
                end = (terms.num_drawn if whole[b]["is_everywhere"] else 1) if is_for_all else first + 1
                for r in range(first, end):
                    new = state.way[place] if state.way[place] >= 0 else _on(whole, b, r)
                    _refer(made.reads, num, NUM_READS, op, new)
            for place in range(len(written)):
                b = written[place]
                is_own = whole[b]["is_summed_at_once"] if computes else whole[b]["is_gathered_again"]
                end = (terms.num_drawn if whole[b]["is_everywhere"] else 1) if is_for_all else first + 1
                for r in range(first, end):
                    new = _on(whole, b, r)
                    if is_own:
                        new = _own_part(whole, tiers, num, made.buffers, task, b, r, computes)
                        state.own[place, r] = new
                    _refer(made.writes, num, NUM_WRITES, op, new)
            for k in range(after.begins[task], after.begins[task + 1]):
                old = after.items[k]
                if not is_for_all and state.num_parts[old] == terms.num_drawn:
                    _refer(made.after, num, NUM_AFTER, op, state.parts[old, first])
                else:
                    for part in range(state.num_parts[old]):
                        _refer(made.after, num, NUM_AFTER, op, state.parts[old, part])
            if computes and not is_for_all:
                for k in range(state.num_awaited[first]):
                    _refer(made.after, num, NUM_AFTER, op, state.awaited[first, k])
                state.num_awaited[first] = 0
            device, is_cut, work = NONE if is_for_all else first, int(is_shared), tasks[task]["work"]
            if state.task_works[work, is_cut, device + 1] < 0:
                parts = terms.num if is_shared else 1
                number = _number(num, made.works, OF_TASKS, work, parts, device, True)
                state.task_works[work, is_cut, device + 1] = number
            number = state.task_works[work, is_cut, device + 1]
            state.parts[task, first] = _add_op(made, number, STANDS_IN, task, NONE, device)
            state.num_parts[task] += 1
        if computes and not is_for_all:
            for r in range(terms.num_drawn):
                state.last[r, 1], state.last[r, 0] = state.last[r, 0], state.parts[task, r]
        for place in range(len(written)):
            b = written[place]
            if whole[b]["is_summed_at_once"] if computes else whole[b]["is_gathered_again"]:
                for r in range(terms.num_drawn):
                    _complete(whole, terms, made, state, task, b, place, r, computes)
            elif whole[b]["is_summed_at_last"]:
                for r in range(terms.num_drawn):
                    summed = made.buffers[_scatter(whole, terms, tiers, made, state, task, b, r)]
                    of_device = made.buffers[_on(whole, b, r)]
                    summed["becomes"], of_device["becomes"] = of_device["becomes"], NONE
        if terms.cuts_tensors and computes:
            _sum_activations(tasks, whole, read, written, terms, made, state, task)
