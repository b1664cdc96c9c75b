"""The turns of a step in order, compiled: which forward, backward and update comes when, and after which ops of others.

A turn is given by its kind, unit, micro-batch and flag; what it adds is `templates`' business.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tierplan.sim.columns import Bool, Float64, Int64
from tierplan.sim.compiled.compiler import compiled, compiled_in_place

(
    DECLARE,
    FORWARD,
    FETCH,
    REMAKE,
    BACKWARD,
    CLIP,
    UPDATE_HERE,
    ALIAS,
    ARRIVE,
    UPDATE,
    GO_HOME,
    PARAMS_HOME,
    STATES_HOME,
) = range(13)
"""Kinds of turns. An alias has what is due to an update be the unit's gradients or, with a flag, its old ones."""
NUM_KINDS = 13
EMPTY = -1
"""No op or unit; what an empty cell holds, and its form."""
MARKS = ("compute", "read", "home")
COMPUTE, READ, HOME = range(3)
"""Marked ops of a turn, which others come after: number 3 * turn + mark."""
IN_BACKWARD, EXACT_CLIP, DELAYED = range(3)
AT_ONCE, DELAYED_BACK, AWAITED = range(3)


class Asked(NamedTuple):
    """What of a plan and its workload decides which turns come when; arrays are by unit."""

    is_vertical: bool
    num_batches: int
    is_block: Bool
    is_owner: Bool
    """Whether it has parameters that are trained."""
    has_any: Bool
    """Whether it has any."""
    first_trained: int
    """Units before that one have no backward."""
    is_late: Int64
    updates_here: Int64
    """Whether its update runs on the device."""
    num_parts: Int64
    """Of its states."""
    reads: Bool
    """Whether its update, on the host, reads states from NVMe."""
    writes_late: Bool
    """Whether these are written only when those of others have been read."""
    semantics: int
    clips: bool
    write_back: int
    updates_backward: bool
    """As gradients come."""
    sums_first: bool
    """Gradients are summed over devices beside the next unit's turn: an update on the device comes behind that."""
    strict_windows: bool
    """This and the others as in `UnitwisePlan`."""
    prefetch_params_units: int
    prefetch_acts_units: int
    prefetch_states_units: int
    updates_in_flight: int
    hold_updates: bool
    update_over_units: int
    segment_units: int


class Turns(NamedTuple):
    """The turns of a step in order."""

    kind: Int64
    unit: Int64
    batch: Int64
    flag: Int64
    at: Float64
    """When it is wanted: in forwards and backwards of units."""
    begins: Int64
    refs: Int64
    """Those of turn p, from `begins[p]` to `begins[p + 1]`, are the marked ops that it comes after, or `EMPTY`."""
    computed_in: Int64
    """Where a turn has no op that takes something home: the turn whose computing op counts instead."""


class Making(NamedTuple):
    """Turns so far."""

    turns: Turns
    num: Int64
    """Of turns, and of those below."""
    compute: Int64
    updates: Int64
    homes: Int64
    """Forwards and backwards, updates, and what ends the way home of each update."""
    waiting: Int64
    """Unit, part and update whose way home waits; unit `EMPTY` for none."""
    waiting_at: Float64
    held: Int64
    """Unit and part of each update whose states are still to be written."""
    last_read: Int64
    """The turn with the last read of states, or `EMPTY`."""


TURNS, COMPUTES, UPDATES, HELD = range(4)


@compiled
def compute_order(is_vertical: bool, num_units: int, num_batches: int, below: int) -> tuple[Bool, Int64, Int64]:
    """Whether it is backward, unit and micro-batch: horizontal or vertical, the head's backward behind its forward.

    Units `below` have no backward.
    """
    head, n = num_units - 1, 0
    backward = np.zeros(2 * num_units * num_batches, np.bool_)
    unit, batch = np.empty(len(backward), np.int64), np.empty(len(backward), np.int64)
    for outer in range(1 if is_vertical else num_batches):
        first, end = (0, num_batches) if is_vertical else (outer, outer + 1)
        for k in range(2 * head + 1 - below):
            for m in range(first, end):
                for again in range(2 if k == head else 1):
                    backward[n], unit[n], batch[n] = k > head or again == 1, min(k, 2 * head - k), m
                    n += 1
    return backward[:n], unit[:n], batch[:n]


@compiled_in_place
def _place(t: Making, kind: int, u: int, m: int, flag: int, at: float) -> int:
    """Adds a turn; its number."""
    n, turns = int(t.num[TURNS]), t.turns
    turns.kind[n], turns.unit[n], turns.batch[n], turns.flag[n], turns.at[n] = kind, u, m, flag, at
    turns.begins[n + 1], turns.computed_in[n] = turns.begins[n], n
    t.num[TURNS] += 1
    return n


@compiled_in_place
def _ref(t: Making, op: int) -> None:
    """Has the turn that was added last come after an op, or after nothing (`EMPTY`)."""
    end, turns = t.num[TURNS], t.turns
    turns.refs[turns.begins[end]] = op
    turns.begins[end] += 1


@compiled_in_place
def _before(a: Asked, t: Making, step: int, num: int) -> None:
    """What a turn's fetches of parameters come after, and those of activations: in strict windows, the compute ops that
    have to end before a fetch for `step`, and an early one, start."""
    for k in range(num):
        ahead = a.prefetch_params_units * (a.num_batches if a.is_vertical else 1) if k < 2 else a.prefetch_acts_units
        turn = step - ahead - 1 - (max(ahead, 1) if k % 2 == 1 else 0)
        _ref(t, 3 * t.compute[turn] + COMPUTE if a.strict_windows and turn >= 0 else EMPTY)


@compiled_in_place
def _go_home(t: Making, after: int) -> None:
    """Sends what an update has written to where it lives, if that waits."""
    u, index = t.waiting[0], t.waiting[2]
    if u != EMPTY:
        t.homes[index] = _place(t, GO_HOME, u, 0, t.waiting[1], t.waiting_at[0])
        _ref(t, after)
        t.turns.computed_in[t.homes[index]] = t.updates[index]
        t.waiting[0] = EMPTY


@compiled_in_place
def _write_held(t: Making) -> None:
    """Sends the states home that have waited until all others were read."""
    for i in range(t.num[HELD]):
        _place(t, STATES_HOME, t.held[2 * i], 0, t.held[2 * i + 1], t.turns.at[t.last_read[0]])
        _ref(t, 3 * t.last_read[0] + READ)
    t.num[HELD] = 0


@compiled_in_place
def _update(a: Asked, t: Making, u: int, step: float, is_old: bool, apart: float, upload_at: float) -> None:
    """The optimizer step of one unit, with what it reads brought to it and what it writes taken home.

    `apart` is the distance to the next unit's update, over which the parts are spread, or over several such where they
    are updated on the device; `upload_at` is below 0 where what it writes goes home at once.
    """
    _place(t, ALIAS, u, 0, int(is_old), 0.0)
    if a.updates_here[u]:
        for k in range(a.num_parts[u]):
            _place(t, UPDATE_HERE, u, 0, k, step + k * a.update_over_units * apart / a.num_parts[u])
        return
    for k in range(a.num_parts[u]):
        at, index = step + k * apart / a.num_parts[u], t.num[UPDATES]
        # What has to end before states may be read, and before the update, by the windows of the plan.
        held = 3 * t.compute[t.num[COMPUTES] - 1] + COMPUTE if a.hold_updates and t.num[COMPUTES] else EMPTY
        read = home = last = EMPTY
        if a.strict_windows and index > a.prefetch_states_units:
            read = 3 * t.updates[index - 1 - a.prefetch_states_units] + COMPUTE
        if 0 < a.updates_in_flight <= index:
            home = 3 * t.homes[index - a.updates_in_flight] + HOME
        if a.write_back == AWAITED and index:
            last = 3 * t.homes[index - 1] + HOME
        made = _place(t, ARRIVE, u, 0, k, at)
        for op in (held, read, home):
            _ref(t, op)
        if a.reads[u]:
            t.last_read[0] = made
        _go_home(t, 3 * made + READ)
        made = _place(t, UPDATE, u, 0, k, at)
        for op in (held, last):
            _ref(t, op)
        t.updates[index] = t.homes[index] = made
        t.num[UPDATES] += 1
        home_at = at if upload_at < 0 else upload_at + at - step
        if a.writes_late[u]:
            held = 2 * t.num[HELD]
            t.held[held], t.held[held + 1] = u, k
            t.num[HELD] += 1
            if k == a.num_parts[u] - 1:
                _place(t, PARAMS_HOME, u, 0, k, home_at)
                _ref(t, EMPTY)
            continue
        t.waiting[0], t.waiting[1], t.waiting[2], t.waiting_at[0] = u, k, index, home_at
        if a.write_back != DELAYED_BACK:
            _go_home(t, EMPTY)


@compiled_in_place
def _backward(a: Asked, t: Making, u: int, m: int, first: int, end: int) -> None:
    """With the units from `first` to `end` that are recomputed together with it, if it is the last of them."""
    step = t.num[COMPUTES]
    if u == end - 1 and end - first > 1:
        _place(t, FETCH, u, m, 0, float(step))
        _before(a, t, step, 2)
        for v in range(first, end):
            _place(t, REMAKE, v, m, int(v != u), float(step))
            _before(a, t, step, 4)
    is_complete = m == a.num_batches - 1
    t.compute[step] = _place(t, BACKWARD, u, m, int(is_complete), float(step))
    _before(a, t, step, 4)
    t.num[COMPUTES] += 1
    if is_complete and a.semantics == IN_BACKWARD and a.is_owner[u] and not a.is_late[u]:
        apart = float(a.num_batches if a.is_vertical else 1)
        _update(a, t, u, step + apart * (a.sums_first and a.updates_here[u]), False, apart, -1.0)


@compiled_in_place
def _after(a: Asked, t: Making, owners: Int64) -> None:
    """Updates that wait for all gradients (exact clipping) and are not late, or that use those of the step before
    (delayed)."""
    end = float(t.num[COMPUTES])
    if a.updates_backward:
        owners = owners[::-1]
    if a.clips:
        _place(t, CLIP, owners[0], 0, int(a.updates_backward), end)
    for i, u in enumerate(owners):
        if a.semantics == EXACT_CLIP and not a.is_late[u]:
            _update(a, t, u, end + i, False, 1.0, -1.0)
        elif a.semantics == DELAYED:
            _update(a, t, u, end * i / len(owners), True, end / len(owners), end + i)
    _go_home(t, EMPTY)


def listed(a: Asked) -> Turns:
    """All turns of a step: what exists before it, late updates of the step before, forwards and backwards with the
    updates in between, and those behind them.

    Late updates come in time for the unit's parameters to be fetched. They are listed in the step that they overlap,
    rather than behind the step whose gradients they use, so that their grants do not hold back those of this forward.
    """
    num_updates = int(a.num_parts.sum())
    most = 4 * len(a.is_block) * a.num_batches + 6 * (len(a.is_block) + num_updates) + 1
    sizes = {"begins": most + 1, "refs": 6 * most}
    columns: dict[str, Any] = {
        name: np.zeros(sizes.get(name, most), np.float64 if name == "at" else np.int64) for name in Turns._fields
    }
    turns = Turns(**columns)
    n = _list(a, turns, num_updates)
    ends = {"begins": n + 1, "refs": turns.begins[n]}
    return Turns(**{name: column[: ends.get(name, n)] for name, column in columns.items()})


@compiled
def _list(a: Asked, turns: Turns, num_updates: int) -> int:
    """Adds all turns; their number."""
    num_units = len(a.is_block)
    t = Making(
        turns,
        np.zeros(4, np.int64),
        np.empty(2 * num_units * a.num_batches, np.int64),
        np.empty(2 * num_updates, np.int64),
        np.empty(2 * num_updates, np.int64),
        np.full(3, EMPTY, np.int64),
        np.zeros(1, np.float64),
        np.empty(2 * num_updates, np.int64),
        np.full(1, EMPTY, np.int64),
    )
    owners, blocks = np.flatnonzero(a.is_owner), np.flatnonzero(a.is_block)
    apart = float(a.num_batches if a.is_vertical else 1)  # compute turns of a unit
    for u in range(num_units):
        if a.has_any[u]:
            _place(t, DECLARE, u, 0, 0, 0.0)
    for u in range(num_units):
        if a.is_owner[u] and a.is_late[u]:
            ahead = a.prefetch_params_units + (a.update_over_units if a.updates_here[u] else 1)
            _update(a, t, u, (u - ahead) * apart, True, apart, -1.0)
    _go_home(t, EMPTY)  # forward is to use what the last of them has made
    _write_held(t)
    backward, unit, batch = compute_order(a.is_vertical, num_units, a.num_batches, a.first_trained)
    for step in range(len(unit)):
        u, m = unit[step], batch[step]
        first, end = u, u + 1
        if a.segment_units > 1 and a.is_block[u]:
            first = u - (u - blocks[0]) % a.segment_units
            end = min(first + a.segment_units, blocks[-1] + 1)
            first = max(first, min(u, a.first_trained))
        if backward[step]:
            _backward(a, t, u, m, first, end)
        else:
            t.compute[step] = _place(t, FORWARD, u, m, int(u == first), float(step))
            _before(a, t, step, 2)
            t.num[COMPUTES] += 1
    _after(a, t, owners)
    _write_held(t)
    return int(t.num[TURNS])
