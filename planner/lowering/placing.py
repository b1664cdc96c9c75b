"""Turns put one after the other, compiled: what each finds in its cells decides which template it is.

Of a step's turns in order, `walk` finds the templates, up to the first one that has to be drawn; `written` puts their
ops together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tierplan.planner.lowering.listing import Turns
from tierplan.sim.columns import Bool, Float64, Int32, Int64, Lists
from tierplan.sim.compiled.compiler import compiled, compiled_in_place

COMPUTE, READ, HOME = range(3)
"""As in `listing`: marked ops of a turn, which others come after."""
NUM_MARKS = 3
OP_FIELDS, BUFFER_FIELDS, PUT_FIELDS, CELL_FIELDS = 7, 7, 3, 4
NO_REF = 2**40
"""No buffer at all, where a buffer is expected."""


class Rows(NamedTuple):
    """Rows of numbers: row i is `items[begins[i] : begins[i + 1]]`."""

    begins: Int64
    items: Int64


class Growing:
    """Rows of numbers, one after the other in one array with room for more."""

    def __init__(self) -> None:
        self.num = 0
        self.begins = np.zeros(64, np.int64)
        self.items = np.zeros(256, np.int64)

    def add(self, row: Sequence[int]) -> int:
        """The number of the new row."""
        begin = int(self.begins[self.num])
        end = begin + len(row)
        if self.num + 2 > len(self.begins):
            self.begins = np.concatenate([self.begins, np.zeros_like(self.begins)])
        while end > len(self.items):
            self.items = np.concatenate([self.items, np.zeros_like(self.items)])
        self.items[begin:end] = row
        self.num += 1
        self.begins[self.num] = end
        return self.num - 1

    def row(self, number: int) -> list[int]:
        return self.items[self.begins[number] : self.begins[number + 1]].tolist()  # type: ignore[no-any-return]

    @property
    def rows(self) -> Rows:
        """Those so far, and room for more."""
        return Rows(self.begins, self.items)


class Table(NamedTuple):
    """All patterns of cells, and all templates so far. In templates, buffers that are made are numbered from 0, and
    what is in cells from -1 downwards."""

    patterns: Rows
    """The cells that a kind of turn may reach for, each in `CELL_FIELDS` numbers: the first cell of its name, by how
    much units and micro-batches count, and whose it is: the unit's own, the next one's, or the owner's."""
    slots: Int64
    """Templates by the hash of their keys; -1 where none is."""
    keys: Rows
    """By template: the facts of its turn, its flag, and the forms of its cells and of ops that it comes after."""
    totals: Rows
    """By template: ops, buffers, and its marked ops or -1."""
    puts: Rows
    """By template: cell, buffer and form, in threes."""
    ops: Rows
    """By template, of each op: work, lead, rank, how many buffers it reads and writes and how many ops it comes after,
    and its kind, as in `Kinds`."""
    reads: Rows
    writes: Rows
    after: Rows
    buffers: Rows
    """By template, of each buffer: tier, bytes, whether initial, the buffer that it reuses, kind and content, as in
    `Kinds`, or the cell that holds the like, and whose it is."""


class Step(NamedTuple):
    """The turns of a step in order, and what has been found of them."""

    turns: Turns
    turn: Int64
    """The number of its facts. -1 where its first cell just comes to hold what the cell of
    its flag does."""
    pattern: Int64
    owner_of: Int64
    """By unit: the one whose parameters it shares; one beyond all units that are reached for if there is none."""
    template: Int64
    first_op: Int64
    first_buffer: Int64
    first_held: Int64
    held: Int64
    """What cells and ops each finds, by number in the schedule."""
    ids: Int64
    forms: Int64
    """By cell: what it holds, and its form."""


@compiled_in_place
def _slot(keys: Rows, slots: Int64, key: Int64) -> int:
    """Where the template of this key is, or would be."""
    hashed = 0
    for x in key:
        hashed = hashed * 1_000_003 + x
        hashed = (hashed ^ (hashed >> 31)) & 2_147_483_647
    at = hashed & (len(slots) - 1)
    while slots[at] >= 0:
        t = slots[at]
        begin, end = keys.begins[t], keys.begins[t + 1]
        is_same = end - begin == len(key)
        for k in range(len(key)):
            is_same = is_same and keys.items[begin + k] == key[k]
        if is_same:
            break
        at = (at + 1) & (len(slots) - 1)
    return at


@compiled_in_place
def enter(keys: Rows, slots: Int64, first: int, end: int) -> None:
    """Puts these templates into slots; there are always more slots than templates, a power of two."""
    for t in range(first, end):
        slots[_slot(keys, slots, keys.items[keys.begins[t] : keys.begins[t + 1]])] = t


@compiled_in_place
def walk(start: int, end: int, step: Step, table: Table, key: Int64, cells: Int64) -> int:
    """Finds the templates of turns from `start` to `end`. The first turn that has none, whose key is in `key`, of the
    length that `key[-1]` says; `end` if all have one. `cells` is room to work in, as long as `key`."""
    ids, forms, held, first_op, turns = step.ids, step.forms, step.held, step.first_op, step.turns
    for p in range(start, end):
        h, num = step.first_held[p], 2
        key[0], key[1] = step.turn[p], turns.flag[p]
        u, m = turns.unit[p], turns.batch[p]
        at = table.patterns.begins[step.pattern[p]]
        while at < table.patterns.begins[step.pattern[p] + 1]:
            field = table.patterns.items[at : at + CELL_FIELDS]
            of = u + field[3] if field[3] < 2 else step.owner_of[u]
            cell = cells[num - 2] = field[0] + field[1] * of + field[2] * m
            held[h], key[num] = ids[cell], forms[cell]
            h += 1
            num += 1
            at += CELL_FIELDS
        if step.turn[p] < 0:
            cell, of = cells[0], cells[1 + turns.flag[p]]
            ids[cell], forms[cell] = ids[of], forms[of]
            step.template[p] = -1
            first_op[p + 1], step.first_buffer[p + 1] = first_op[p], step.first_buffer[p]
            step.first_held[p + 1] = step.first_held[p]
            continue
        for k in range(turns.begins[p], turns.begins[p + 1]):
            held[h] = key[num] = -1
            if turns.refs[k] >= 0:
                q, mark = turns.refs[k] // NUM_MARKS, turns.refs[k] % NUM_MARKS
                found = table.totals.items[table.totals.begins[step.template[q]] + 2 + mark]
                if found < 0 and mark == HOME:
                    q = turns.computed_in[q]
                    found = table.totals.items[table.totals.begins[step.template[q]] + 2 + COMPUTE]
                if found >= 0:
                    held[h], key[num] = first_op[q] + found, 0
            h += 1
            num += 1
        template = table.slots[_slot(table.keys, table.slots, key[:num])]
        if template < 0:
            key[-1] = num
            return p
        step.template[p] = template
        for k in range(table.puts.begins[template], table.puts.begins[template + 1], PUT_FIELDS):
            cell, b = cells[table.puts.items[k]], table.puts.items[k + 1]
            ids[cell] = step.first_buffer[p] + b if b >= 0 else held[step.first_held[p] - 1 - b]
            forms[cell] = table.puts.items[k + 2]
        at = table.totals.begins[template]
        first_op[p + 1] = first_op[p] + table.totals.items[at]
        step.first_buffer[p + 1] = step.first_buffer[p] + table.totals.items[at + 1]
        step.first_held[p + 1] = h
    return end


class Written(NamedTuple):
    """The ops and buffers of a step, in the order of their turns; what they are is as in `Kinds`."""

    op_kind: Int32
    op_unit: Int32
    op_batch: Int32
    kind: Int32
    content: Int32
    unit: Int32
    work: Int32
    works: Int64
    """What those numbers mean to templates, in order of first use: what other plans have drawn before changes nothing,
    not even the order of sums."""
    wanted_at: Float64
    rank: Int64
    reads: Lists
    writes: Lists
    after: Lists
    tier: Int64
    size_bytes: Int64
    initial: Bool
    reuses: Int32


@compiled
def _refs_of(step: Step, rows: Rows, ops: Rows, field: int) -> Lists:
    """The buffers or ops that each op refers to, each once, numbered in the whole schedule; `field` of an op says how
    many there are of them."""
    num = 0
    for t in step.template:
        if t >= 0:
            num += rows.begins[t + 1] - rows.begins[t]
    begins, items = np.zeros(step.first_op[-1] + 1, np.int32), np.empty(num, np.int32)
    i = num = 0
    for p in range(len(step.template)):
        t = step.template[p]
        if t < 0:
            continue
        at = rows.begins[t]
        for k in range(ops.begins[t], ops.begins[t + 1], OP_FIELDS):
            for _ in range(ops.items[k + field]):
                ref = rows.items[at]
                found = step.first_buffer[p] + ref if ref >= 0 else step.held[step.first_held[p] - 1 - ref]
                is_new = True
                for before in range(begins[i], num):
                    is_new = is_new and items[before] != found
                if is_new:
                    items[num] = found
                    num += 1
                at += 1
            i += 1
            begins[i] = num
    return Lists(begins, items[:num])


@compiled
def written(step: Step, at: Float64, leads: Float64, table: Table) -> Written:
    """`at`: when each turn is wanted; `leads`: how much before that an op is, by its lead."""
    num_ops, num_buffers = step.first_op[-1], step.first_buffer[-1]
    ops, buffers = table.ops, table.buffers
    op_kind, op_unit, op_batch = np.empty(num_ops, np.int32), np.empty(num_ops, np.int32), np.empty(num_ops, np.int32)
    kind, content = np.empty(num_buffers, np.int32), np.empty(num_buffers, np.int32)
    unit = np.empty(num_buffers, np.int32)
    work, works, num_works = np.empty(num_ops, np.int32), np.empty(num_ops, np.int64), 0
    number = np.full(len(ops.items) // OP_FIELDS, -1, np.int32)  # of works, of which there are no more than such ops
    wanted_at, rank = np.empty(num_ops, np.float64), np.empty(num_ops, np.int64)
    tier, size_bytes = np.empty(num_buffers, np.int64), np.empty(num_buffers, np.int64)
    initial, reuses = np.empty(num_buffers, np.bool_), np.empty(num_buffers, np.int32)
    i = b = 0
    for p in range(len(step.template)):
        t, u = step.template[p], step.turns.unit[p]
        if t < 0:
            continue
        for k in range(ops.begins[t], ops.begins[t + 1], OP_FIELDS):
            op_kind[i], op_unit[i], op_batch[i] = ops.items[k + 6], u, step.turns.batch[p]
            if number[ops.items[k]] < 0:
                number[ops.items[k]], works[num_works] = num_works, ops.items[k]
                num_works += 1
            work[i], rank[i] = number[ops.items[k]], ops.items[k + 2]
            wanted_at[i] = at[p] - leads[ops.items[k + 1]]
            i += 1
        for k in range(buffers.begins[t], buffers.begins[t + 1], BUFFER_FIELDS):
            tier[b], size_bytes[b], initial[b] = buffers.items[k], buffers.items[k + 1], buffers.items[k + 2] > 0
            ref = buffers.items[k + 3]
            if ref == NO_REF:
                reuses[b] = -1
            elif ref >= 0:
                reuses[b] = step.first_buffer[p] + ref
            else:
                reuses[b] = step.held[step.first_held[p] - 1 - ref]
            own_kind, own_content, whose = buffers.items[k + 4], buffers.items[k + 5], buffers.items[k + 6]
            unit[b] = u + whose if whose < 2 else step.owner_of[u]
            if own_content < 0:
                held = step.held[step.first_held[p] - 1 - own_content]
                own_content, unit[b] = content[held], unit[held]
            if own_kind < 0:
                own_kind = kind[step.held[step.first_held[p] - 1 - own_kind]]
            kind[b], content[b] = own_kind, own_content
            b += 1
    return Written(
        op_kind,
        op_unit,
        op_batch,
        kind,
        content,
        unit,
        work,
        works[:num_works],
        wanted_at,
        rank,
        _refs_of(step, table.reads, ops, 3),
        _refs_of(step, table.writes, ops, 4),
        _refs_of(step, table.after, ops, 5),
        tier,
        size_bytes,
        initial,
        reuses,
    )
