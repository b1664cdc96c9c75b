"""What several devices have in place of one device's ops and buffers, compiled; `partition` says what it means.

Buffers of one device are *wholes*, its ops *tasks*: some devices have a part of each, or one of their own, and between
them come collectives.
"""

from __future__ import annotations

from typing import NamedTuple

from tierplan.sim.columns import Bool, Int32, Int64, Lists
from tierplan.sim.compiled.compiler import compiled

NONE = -1
OTHER = 0
COPY, UPDATE, FORWARD, RECOMPUTE, BACKWARD = range(1, 6)
"""Kinds of ops."""
PARAMS, GRADS, STATES, ACTS, WORK = range(1, 6)
"""Kinds of buffers."""
OF_PARAMS, OF_FROZEN, OF_GRADIENTS, OF_TIED_GRADIENTS, OF_INPUT, OF_INPUT_GRADIENT, OF_SHARED = range(1, 8)
"""Contents."""
EMBED, HEAD = 1, 2
"""Units at the ends of a chain."""
GATHER, REDUCE, ALL_REDUCE = range(3)
"""Kinds of collectives."""
KEEPS_NOTHING, KEEPS_ENDS, KEEPS_ALL = range(3)
STANDS_IN, GATHERED, SCATTERED, OWN, SUMMED, COMPLETED, SUMMED_ACTS = range(7)
"""What is made: what stands for an op or a buffer of one device on one of several; whole parameters for a turn; a
share of gradients; what a device has made by itself; gradients of all devices; parameters of which each made a part;
the sum of activations."""
NUM_OPS, NUM_BUFFERS, NUM_READS, NUM_WRITES, NUM_AFTER, NUM_WORKS = range(6)
OF_TASKS = -1
"""In place of a kind of collective: work of tasks."""


class Roles(NamedTuple):
    """What ops and buffers are, as numbers in place of names."""

    op_kind: Int32
    op_unit: Int32
    op_batch: Int32
    """Its micro-batch."""
    kind: Int32
    content: Int32
    unit: Int32
    """Of what a buffer holds; any where it belongs to none."""
    lengths: Int64
    """By unit: how many parameters are trained; 0 where nobody says."""
    ends: Int32
    """By unit: `EMBED`, `HEAD` or `OTHER`."""


class Source(NamedTuple):
    """One device's schedule."""

    op_work: Int32
    reads: Lists
    writes: Lists
    after: Lists
    tier: Int32
    size_bytes: Int64
    initial: Bool
    reuses: Int32
    becomes: Int32
    is_on_device: Bool
    """By work: whether its stream is of the device."""


class Wholes(NamedTuple):
    """What becomes of the buffers of one device on several."""

    first: Int64
    """Of those that stand for it, the number of the first device's."""
    is_on_device: Bool
    is_everywhere: Bool
    """Whether each device has one."""
    is_copy: Bool
    """Whether a copy has brought it: of gradients, what host memory has of their sum."""
    is_summed_at_once: Bool
    """Whether these gradients stay on the device, and are summed over devices after each micro-batch."""
    has_tied_share: Bool
    """Whether this sum over devices begins where one device's share of a tied gradient is."""
    is_sharded: Bool
    """Whether a device's or the host's is 1/n of it; a gradient is whole on the device that made it."""
    is_gathered_again: Bool
    """Whether these are parameters that every device has whole, and of which each makes a shard."""


class Terms(NamedTuple):
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


class Made(NamedTuple):
    """What several devices have, with room for more."""

    num: Int64
    """Of each of what follows, and of numbers in lists."""
    op_work: Int32
    op_is: Int64
    """Per op: what it is, task, whole and device."""
    reads: Lists
    writes: Lists
    after: Lists
    tier: Int32
    size_bytes: Int64
    initial: Bool
    reuses: Int32
    becomes: Int32
    buffer_is: Int64
    """As `op_is`."""
    works: Int64
    """`OF_TASKS`, work of one device, parts that it is cut into, and device; or kind of collective, bytes, calls and
    device."""


class State(NamedTuple):
    """What was done so far."""

    parts: Int32
    """By task and device: the op that stands for it."""
    num_parts: Int32
    last: Int64
    """By device: its last op that computes, and the one before."""
    awaited: Int32
    """By device: collectives that the next op comes after that computes."""
    num_awaited: Int64
    scattered: Int32
    """By whole and device: the buffer with its share."""
    own: Int32
    """By place among a task's writes, and device."""
    heads: Int64
    """By whole, then by unit of parameters and of frozen ones: the last entry of `gathered`."""
    gathered: Int64
    """Unit, pass, micro-batch, device, the buffer with whole parameters, and the entry before."""
    num_gathered: Int64
    task_works: Int32
    """By work, whether it is cut into parts, and device behind that of all: its number."""


@compiled
def shard_bytes(size_bytes: int, length: int, num: int, r: int, cuts_tensors: bool) -> int:
    """A device's share, of whole values where there is one for each parameter, as the runtime cuts them."""
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
def _on(whole: Wholes, b: int, r: int) -> int:
    """The number of a whole's stand-in on device r, or of the one that all share."""
    return whole.first[b] + (r if whole.is_everywhere[b] else 0)


@compiled
def _length(roles: Roles, b: int) -> int:
    return roles.lengths[roles.unit[b]] if roles.unit[b] >= 0 else 0


@compiled
def _set(rows: Int64, i: int, a: int, b: int, c: int, d: int) -> None:
    rows[i, 0], rows[i, 1], rows[i, 2], rows[i, 3] = a, b, c, d


@compiled
def _add_buffer(made: Made, tier: int, size_bytes: int, reuses: int, what: int, task: int, b: int, r: int) -> int:
    """Adds one that does not outlive the step; its number."""
    i = made.num[NUM_BUFFERS]
    made.tier[i], made.size_bytes[i], made.initial[i] = tier, size_bytes, False
    made.reuses[i], made.becomes[i] = reuses, NONE
    _set(made.buffer_is, i, what, task, b, r)
    made.num[NUM_BUFFERS] += 1
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
    i = made.num[NUM_OPS]
    made.op_work[i] = work
    _set(made.op_is, i, what, task, b, r)
    made.num[NUM_OPS] += 1
    made.reads.begins[i + 1] = made.num[NUM_READS]
    made.writes.begins[i + 1] = made.num[NUM_WRITES]
    made.after.begins[i + 1] = made.num[NUM_AFTER]
    return i


@compiled
def _add_work(made: Made, kind: int, of: int, times: int, r: int) -> int:
    i = made.num[NUM_WORKS]
    _set(made.works, i, kind, of, times, r)
    made.num[NUM_WORKS] += 1
    return i


@compiled
def _collective_work(made: Made, kind: int, size_bytes: int, calls: int, r: int) -> int:
    """The number of device r's work in a collective."""
    for i in range(made.num[NUM_WORKS]):
        w = made.works[i]
        if w[0] == kind and w[1] == size_bytes and w[2] == calls and w[3] == r:
            return i
    return _add_work(made, kind, size_bytes, calls, r)


@compiled
def _collective(
    made: Made, state: State, terms: Terms, kind: int, size_bytes: int, out: int, what: int, task: int, b: int, r: int
) -> None:
    """Ends the collective of a whole that is being made."""
    _refer(made.writes, made.num, NUM_WRITES, made.num[NUM_OPS], out)
    op = _add_op(made, _collective_work(made, kind, size_bytes, 1, r), what, task, b, r)
    if terms.waits:
        state.awaited[r, state.num_awaited[r]] = op
        state.num_awaited[r] += 1


@compiled
def _exchanged(
    source: Source, whole: Wholes, terms: Terms, tiers: Int32, made: Made, state: State,
    kind: int, size_bytes: int, after: int, what: int, task: int, b: int, r: int,
) -> int:  # fmt: skip
    """A new buffer on device r, of what all devices have."""
    out = _add_buffer(made, tiers[r], size_bytes, NONE, what, task, b, r)
    op = made.num[NUM_OPS]
    for k in range(terms.num_drawn):
        _refer(made.reads, made.num, NUM_READS, op, _on(whole, b, k))
    if after >= 0:
        _refer(made.after, made.num, NUM_AFTER, op, after)
    _collective(made, state, terms, kind, source.size_bytes[b], out, what, task, b, r)
    return out


@compiled
def _gather(
    source: Source, roles: Roles, whole: Wholes, terms: Terms, tiers: Int32, made: Made, state: State,
    task: int, b: int, r: int,
) -> int:  # fmt: skip
    """The whole parameters on device r for one pass of one unit, a turn ahead of compute."""
    unit, passed = roles.op_unit[task], 0 if roles.op_kind[task] == FORWARD else 1
    head, batch = b, 0 if terms.is_vertical else roles.op_batch[task]
    if terms.keeps == KEEPS_ALL or (terms.keeps == KEEPS_ENDS and roles.ends[unit] != OTHER):
        num_units = len(roles.lengths)
        head = len(whole.first) + roles.unit[b] + (num_units if roles.content[b] == OF_FROZEN else 0)
        unit = passed = NONE
    entry = state.heads[head]
    while entry >= 0:
        known = state.gathered[entry]
        if known[0] == unit and known[1] == passed and known[2] == batch and known[3] == r:
            return known[4]
        entry = known[5]
    after = state.last[r, 0 if terms.waits else 1]
    size_bytes = source.size_bytes[b]
    out = _exchanged(source, whole, terms, tiers, made, state, GATHER, size_bytes, after, GATHERED, task, b, r)
    entry = state.num_gathered[0]
    _set(state.gathered, entry, unit, passed, batch, r)
    state.gathered[entry, 4], state.gathered[entry, 5] = out, state.heads[head]
    state.heads[head] = entry
    state.num_gathered[0] += 1
    return out


@compiled
def _scatter(
    source: Source, roles: Roles, whole: Wholes, terms: Terms, tiers: Int32, made: Made, state: State,
    task: int, b: int, r: int,
) -> int:  # fmt: skip
    """Device r's shard of the sum of all devices' gradients, or the whole where nothing is divided."""
    if state.scattered[b, r] < 0:
        size_bytes = source.size_bytes[b]
        kind = ALL_REDUCE if terms.divides_nothing else terms.by
        if not terms.divides_nothing:
            size_bytes = shard_bytes(size_bytes, _length(roles, b), terms.num, r, terms.cuts_tensors)
        out = _exchanged(source, whole, terms, tiers, made, state, kind, size_bytes, NONE, SCATTERED, task, b, r)
        state.scattered[b, r] = out
    return state.scattered[b, r]


@compiled
def _read(
    source: Source, roles: Roles, whole: Wholes, terms: Terms, tiers: Int32, made: Made, state: State,
    task: int, b: int, r: int, computes: bool,
) -> int:  # fmt: skip
    """What device r reads of a whole: its own, or what is exchanged first."""
    if whole.is_on_device[b] and not terms.cuts_tensors:
        if roles.kind[b] == PARAMS and computes and terms.divides_all:
            return _gather(source, roles, whole, terms, tiers, made, state, task, b, r)
        is_complete = not (computes or whole.is_summed_at_once[b] or whole.is_copy[b])
        if roles.content[b] == OF_GRADIENTS and is_complete:
            return _scatter(source, roles, whole, terms, tiers, made, state, task, b, r)
    return _on(whole, b, r)


@compiled
def _own_part(
    source: Source, whole: Wholes, tiers: Int32, made: Made, task: int, b: int, r: int, computes: bool
) -> int:
    """What a device has made by itself, before the others' shares are added: a gradient, or updated parameters."""
    of_all = _on(whole, b, r)
    size_bytes, reuses = made.size_bytes[of_all], made.reuses[of_all]
    if computes:
        size_bytes = source.size_bytes[b]
        reuses = _on(whole, source.reuses[b], r) if whole.has_tied_share[b] else NONE
    part = _add_buffer(made, tiers[r] if whole.is_on_device[b] else source.tier[b], size_bytes, reuses, OWN, task, b, r)
    if not computes:
        made.reuses[of_all] = part
    return part


@compiled
def _complete(
    source: Source, whole: Wholes, terms: Terms, made: Made, state: State,
    task: int, b: int, place: int, r: int, is_sum: bool,
) -> None:  # fmt: skip
    """Adds all devices' shares: sums gradients onto those of earlier micro-batches, or gathers new parameters."""
    op = made.num[NUM_OPS]
    if is_sum:
        for k in range(terms.num_drawn):
            _refer(made.reads, made.num, NUM_READS, op, state.own[place, k])
        if source.reuses[b] >= 0 and not whole.has_tied_share[b]:
            _refer(made.reads, made.num, NUM_READS, op, _on(whole, source.reuses[b], r))
        kind, what = ALL_REDUCE if terms.divides_nothing else terms.by, SUMMED
    else:
        _refer(made.reads, made.num, NUM_READS, op, state.own[place, r])
        for k in range(state.num_parts[task]):
            _refer(made.after, made.num, NUM_AFTER, op, state.parts[task, k])
        kind, what = GATHER, COMPLETED
    _collective(made, state, terms, kind, source.size_bytes[b], _on(whole, b, r), what, task, b, r)


@compiled
def _sum_activations(source: Source, roles: Roles, terms: Terms, made: Made, state: State, task: int) -> None:
    """Megatron's all-reduces: after each half of a block, and where the vocabulary is cut."""
    most_bytes = NONE
    for lists in (source.reads, source.writes):
        for k in range(lists.begins[task], lists.begins[task + 1]):
            b = lists.items[k]
            is_border = roles.content[b] == OF_INPUT or roles.content[b] == OF_INPUT_GRADIENT
            if roles.kind[b] == ACTS and is_border:
                most_bytes = max(most_bytes, source.size_bytes[b])
    end, kind = roles.ends[roles.op_unit[task]], roles.op_kind[task]
    calls = 2 if end == OTHER else 1 if (end == EMBED and kind == FORWARD) or (end == HEAD and kind == BACKWARD) else 0
    if most_bytes < 0 or calls == 0:
        return
    for r in range(terms.num_drawn):
        for k in range(state.num_parts[task]):
            _refer(made.after, made.num, NUM_AFTER, made.num[NUM_OPS], state.parts[task, k])
        work = _collective_work(made, ALL_REDUCE, calls * most_bytes, calls, r)
        op = _add_op(made, work, SUMMED_ACTS, task, NONE, r)
        state.awaited[r, state.num_awaited[r]] = op
        state.num_awaited[r] += 1


@compiled
def _emit(
    source: Source, terms: Terms, made: Made, state: State, task: int, share: int, r: int, computes: bool
) -> None:
    """Ends an op that stands for a task, on device r or for all."""
    op, on_all = made.num[NUM_OPS], r == NONE
    for k in range(source.after.begins[task], source.after.begins[task + 1]):
        old = source.after.items[k]
        if not on_all and state.num_parts[old] == terms.num_drawn:
            _refer(made.after, made.num, NUM_AFTER, op, state.parts[old, r])
        else:
            for part in range(state.num_parts[old]):
                _refer(made.after, made.num, NUM_AFTER, op, state.parts[old, part])
    if computes and not on_all:
        for k in range(state.num_awaited[r]):
            _refer(made.after, made.num, NUM_AFTER, op, state.awaited[r, k])
        state.num_awaited[r] = 0
    work, is_cut = source.op_work[task], 1 if share > 1 else 0
    if state.task_works[work, is_cut, r + 1] < 0:
        state.task_works[work, is_cut, r + 1] = _add_work(made, OF_TASKS, work, share, r)
    number = state.task_works[work, is_cut, r + 1]
    state.parts[task, state.num_parts[task]] = _add_op(made, number, STANDS_IN, task, NONE, r)
    state.num_parts[task] += 1


@compiled
def _declare(
    source: Source, roles: Roles, whole: Wholes, terms: Terms, tiers: Int32, grains: Int64, made: Made
) -> None:
    """All wholes, on each device that has one."""
    for b in range(len(whole.first)):
        num_ranks = terms.num_drawn if whole.is_everywhere[b] else 1
        length = _length(roles, b)
        for r in range(num_ranks):
            tier = tiers[r] if whole.is_on_device[b] else source.tier[b]
            size_bytes = source.size_bytes[b]
            if whole.is_on_device[b] or terms.num_drawn == terms.num:
                if whole.is_sharded[b]:
                    size_bytes = shard_bytes(size_bytes, length, terms.num, r, terms.cuts_tensors)
            else:  # of what is on none of the devices, all that is held together
                size_bytes = 0
                for k in range(terms.num if whole.is_everywhere[b] else 1):
                    part_bytes = source.size_bytes[b]
                    if whole.is_sharded[b]:
                        part_bytes = shard_bytes(part_bytes, length, terms.num, k, terms.cuts_tensors)
                    size_bytes += _held_bytes(part_bytes, grains[source.tier[b]])
            is_reused = source.reuses[b] >= 0 and not whole.has_tied_share[b]
            reuses = _on(whole, source.reuses[b], r) if is_reused else NONE
            device = r if whole.is_everywhere[b] else NONE
            i = _add_buffer(made, tier, size_bytes, reuses, STANDS_IN, NONE, b, device)
            made.initial[i] = source.initial[b]
            made.becomes[i] = _on(whole, source.becomes[b], r) if source.becomes[b] >= 0 else NONE


@compiled
def divide(
    source: Source, roles: Roles, whole: Wholes, terms: Terms, tiers: Int32, grains: Int64, made: Made, state: State
) -> None:
    """Makes all of it: `tiers` by device that is drawn; `grains` of tiers, as for `_held_bytes`."""
    _declare(source, roles, whole, terms, tiers, grains, made)
    drawn = range(terms.num_drawn)
    for task in range(len(source.op_work)):
        reads = source.reads.items[source.reads.begins[task] : source.reads.begins[task + 1]]
        writes = source.writes.items[source.writes.begins[task] : source.writes.begins[task + 1]]
        kind = roles.op_kind[task]
        computes = kind in (FORWARD, RECOMPUTE, BACKWARD)
        has_acts = is_sharded = has_sums = False
        for some in (reads, writes):
            for b in some:
                has_acts, is_sharded = has_acts or roles.kind[b] == ACTS, is_sharded or whole.is_sharded[b]
        for b in writes:
            has_sums = has_sums or (computes and whole.is_summed_at_once[b])
        if not source.is_on_device[source.op_work[task]] and not has_acts:
            op = made.num[NUM_OPS]
            for b in reads:
                for r in range(terms.num_drawn if whole.is_everywhere[b] else 1):
                    _refer(made.reads, made.num, NUM_READS, op, _on(whole, b, r))
            for place in range(len(writes)):
                b = writes[place]
                for r in range(terms.num_drawn if whole.is_everywhere[b] else 1):
                    new = _on(whole, b, r)
                    if not computes and whole.is_gathered_again[b]:
                        new = state.own[place, r] = _own_part(source, whole, tiers, made, task, b, r, computes)
                    _refer(made.writes, made.num, NUM_WRITES, op, new)
            _emit(source, terms, made, state, task, 1, NONE, computes)
        else:
            is_shared = (kind == COPY and is_sharded) or (kind == UPDATE and not terms.divides_nothing)
            share = terms.num if is_shared or (computes and terms.cuts_tensors) else 1
            for r in drawn:
                for b in reads:  # what is exchanged for it has ops of its own, before it
                    if not (has_sums and whole.is_summed_at_once[b]):
                        _read(source, roles, whole, terms, tiers, made, state, task, b, r, computes)
                op = made.num[NUM_OPS]
                for b in reads:
                    if not (has_sums and whole.is_summed_at_once[b]):
                        new = _read(source, roles, whole, terms, tiers, made, state, task, b, r, computes)
                        _refer(made.reads, made.num, NUM_READS, op, new)
                for place in range(len(writes)):
                    b = writes[place]
                    new = _on(whole, b, r)
                    is_sum = computes and whole.is_summed_at_once[b]
                    if is_sum or (not computes and whole.is_gathered_again[b]):
                        new = state.own[place, r] = _own_part(source, whole, tiers, made, task, b, r, computes)
                    _refer(made.writes, made.num, NUM_WRITES, op, new)
                _emit(source, terms, made, state, task, share, r, computes)
            if computes:
                for r in drawn:
                    state.last[r, 1] = state.last[r, 0]
                    state.last[r, 0] = state.parts[task, r]
        for place in range(len(writes)):
            b = writes[place]
            is_sum = computes and whole.is_summed_at_once[b]
            if is_sum or (not computes and whole.is_gathered_again[b]):
                for r in drawn:
                    _complete(source, whole, terms, made, state, task, b, place, r, is_sum)
        if terms.cuts_tensors and computes:
            _sum_activations(source, roles, terms, made, state, task)
