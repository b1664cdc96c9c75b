"""The list order of ops that are wanted at given moments, compiled."""

from __future__ import annotations

import heapq

import numpy as np

from tierplan.sim.columns import Int32, Int64, Lists
from tierplan.sim.compiled.compiler import compiled


@compiled
def consistent_order(wanted: Int64, reads: Lists, writes: Lists, after: Lists, reuses: Int32) -> Int64:
    """Ops as they are `wanted`, each behind those whose output it needs and behind the readers of what it writes over.

    All that may come is known at any time, and the first of it in the wanted order comes. Ops that wait for each other
    in a circle are left out.
    """
    (read_begins, read), (write_begins, written), (after_begins, earlier) = reads, writes, after
    num_ops, num_buffers = len(wanted), len(reuses)
    writer = np.full(num_buffers, -1, np.int64)
    begins = np.zeros(num_buffers + 1, np.int64)  # of the readers of each buffer
    for i in range(num_ops):
        for k in range(write_begins[i], write_begins[i + 1]):
            writer[written[k]] = i
        for k in range(read_begins[i], read_begins[i + 1]):
            begins[read[k] + 1] += 1
    for b in range(num_buffers):
        begins[b + 1] += begins[b]
    readers, filled = np.empty(len(read), np.int64), begins.copy()
    for i in range(num_ops):
        for k in range(read_begins[i], read_begins[i + 1]):
            readers[filled[read[k]]] = i
            filled[read[k]] += 1
    # Pairs of ops, one that must come first and one that waits for it.
    room = len(read) + len(earlier)
    for b in range(num_buffers):
        if reuses[b] >= 0:
            room += begins[reuses[b] + 1] - begins[reuses[b]]
    first, second, num = np.empty(room, np.int64), np.empty(room, np.int64), 0
    for i in range(num_ops):
        for k in range(read_begins[i], read_begins[i + 1]):
            first[num], second[num] = writer[read[k]], i
            num += 1
        for k in range(after_begins[i], after_begins[i + 1]):
            first[num], second[num] = earlier[k], i
            num += 1
        for k in range(write_begins[i], write_begins[i + 1]):
            old = reuses[written[k]]
            if old >= 0:
                for r in range(begins[old], begins[old + 1]):
                    first[num], second[num] = readers[r], i
                    num += 1
    missing, ends = np.zeros(num_ops, np.int64), np.zeros(num_ops + 1, np.int64)
    for k in range(num):
        if first[k] >= 0 and first[k] != second[k]:
            missing[second[k]] += 1
            ends[first[k]] += 1
    for i in range(num_ops):
        ends[i + 1] += ends[i]
    followers = np.empty(ends[num_ops], np.int64)
    for k in range(num):
        if first[k] >= 0 and first[k] != second[k]:
            ends[first[k]] -= 1
            followers[ends[first[k]]] = second[k]
    place = np.empty(num_ops, np.int64)
    for k in range(num_ops):
        place[wanted[k]] = k
    ready = [place[i] for i in range(num_ops) if missing[i] == 0]
    heapq.heapify(ready)
    order, num = np.empty(num_ops, np.int64), 0
    while len(ready) > 0:
        i = wanted[heapq.heappop(ready)]
        order[num] = i
        num += 1
        for k in range(ends[i], ends[i + 1]):
            j = followers[k]
            missing[j] -= 1
            if missing[j] == 0:
                heapq.heappush(ready, place[j])
    return order[:num]
