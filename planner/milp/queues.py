"""What moves, as queues over the windows: activations, parameters, gradients, states and updates.

A queue's content at the end of a window is a column that never goes negative, so that nothing leaves before it came.
Each function adds the rows of one kind of bytes, and tells what memory holds of them (`Held`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from math import inf

from tierplan.planner.milp.amounts import Window
from tierplan.planner.milp.columns import TRANSFER_COST, Columns, minus, times
from tierplan.planner.milp.modes import Mode
from tierplan.planner.milp.program import Terms


@dataclass
class Held:
    """Per window, in GB: what memory holds of what moves."""

    at_start: list[Terms]
    """On the device when the window's first op starts, beside what that needs whatever moves, or less."""
    at_end: list[Terms]
    """The same when its last op ends, less what that op has made."""
    leaving: list[Terms]
    """Queued to leave the device when the first op starts, in bytes that it has there."""
    on_host: list[Terms]
    """In host memory at the window's end."""
    read: list[Terms]
    """Beside that, or less: parameters read from NVMe and not yet on the device."""
    on_nvme: list[Terms]
    """Activations on NVMe at the window's end."""


def queues(cols: Columns) -> Held:
    """The rows of all that moves."""
    nothing: list[list[Terms]] = [[[] for _ in cols.windows] for _ in fields(Held)]
    held = Held(*nothing)
    for b in range(len(cols.p.blocks)):
        _activations_of_block(cols, b, held)
        _tied_of_block(cols, b, held)
    _parameters(cols, held)
    _updates(cols, held)
    return held


def _joined(each: Sequence[tuple[Terms, ...]]) -> Iterator[Terms]:
    """Of the units of a window, each kind of amounts together."""
    return ([t for terms in of_units for t in terms] for of_units in zip(*each, strict=True))


def _activations_of_block(cols: Columns, b: int, held: Held) -> None:
    """Out behind the forward that made them, back before the backward that needs them."""
    p, lp = cols.p, cols.lp
    kept: Terms = []
    out: Terms = []
    back: Terms = []
    host: Terms = []
    drive: Terms = []
    for s in cols.block_windows(b):
        window = cols.windows[s]
        each = [_made_and_needed(cols, window.phase, u) for u in window.units]
        made, stay, need, gone = _joined(each)
        made_last, stay_last, need_first = each[-1][0], each[-1][1], each[0][2]
        early_back: Terms = [(1.0, c) for k, c in cols.early[s].items() if k == "uA"]
        decoded = [((1 - p.coded_frac) * a / p.turn, c) for a, c in need_first if p.coded_frac < 1]
        held.leaving[s] += out
        held.at_start[s] += [*kept, *times(p.coded_frac, [*out, *back, *early_back]), *decoded]
        if need_first and early_back:
            one_op = [(-a / p.turn, c) for a, c in need_first]
            lp.row([*back, *early_back, *one_op], low=0.0, family="back before backward")
        kept = cols.queue(kept, stay, gone, "kept activations")
        if cols.flows[s]:
            lp.row([*cols.flow(s, "uA"), *minus(early_back)], low=0.0, family="early part")
            out = cols.queue(out, made, cols.flow(s, "dA"), "activations leaving")
            if made_last:  # what the window's last op makes cannot leave inside it
                lp.row([*out, *[(-a / p.turn, c) for a, c in made_last]], low=0.0, family="activations leaving")
            back = cols.queue(back, cols.flow(s, "uA"), need, "activations back")
            came = [*cols.flow(s, "dA"), *cols.flow(s, "rA")]
            went = [*cols.flow(s, "uA"), *cols.flow(s, "wA")]
            host = cols.queue(host, came, went, "activations on the host")
            if p.has_nvme:
                drive = cols.queue(drive, cols.flow(s, "wA"), cols.flow(s, "rA"), "activations on NVMe")
        by_last = [(a / p.turn, c) for a, c in (*times(p.coded_frac, made_last), *stay_last)]
        held.at_end[s] += [*kept, *times(p.coded_frac, out), *minus(by_last), *times(p.coded_frac, back)]
        held.on_host[s] += times(p.coded_frac, host)
        held.on_nvme[s] += times(p.coded_frac, drive)
    for state in (out, back, host, drive):
        if state:
            lp.row(state, low=0.0, high=0.0, family="nothing left at the end")
    if p.has_nvme and p.host_gb:
        stored: Terms = []
        for u in range(len(cols.units)):
            stored += cols.acted(u, ("nvme",), inputs=False, scale=_own_turns(cols, u))
            stored += cols.acted(u, ("nvme",), inputs=True, scale=float(p.turn))
        written = [t for s in cols.block_windows(b) for t in cols.flow(s, "wA")]
        lp.row([*written, *minus(stored)], low=0.0, high=0.0, family="activations on NVMe")


def _own_turns(cols: Columns, u: int) -> float:
    """Micro-batches whose saved tensors wait together: the head's turn runs forward and backward of one after the
    other."""
    return 1.0 if u == len(cols.units) - 1 else float(cols.p.turn)


def _made_and_needed(cols: Columns, phase: str, u: int) -> tuple[Terms, Terms, Terms, Terms]:
    """Of one unit's turn: activations made that leave, made that stay, needed back, and no longer kept."""
    behind = u + 1 if phase == "fwd" else u  # whose input is made, or has been used
    which = ((u, False, _own_turns(cols, u)), (behind, True, float(cols.p.turn)))

    def waiting(*wheres: str) -> Terms:
        there = (part for part in which if part[0] < len(cols.units))
        return [t for v, inputs, scale in there for t in cols.acted(v, wheres, inputs=inputs, scale=scale)]

    away, here = waiting("host", "nvme"), waiting("keep")
    return (away, here, [], []) if phase == "fwd" else ([], [], away, here)


def _tied_of_block(cols: Columns, b: int, held: Held) -> None:
    """Tied gradients of a turn's micro-batches, which may wait in host memory for what is added to them next.

    `memory_rows` has them all on the device. A plan has as many in host memory throughout, but for the one that is on
    the device at the end of its own op, and for the next one. A bound has more in one window than in others: when its
    op starts, those that were there when the one before ended, and as many more as leave in between; and it has the
    copies either way.
    """
    p, lp = cols.p, cols.lp
    backward = [s for s in cols.block_windows(b) if cols.windows[s].phase == "bwd"]
    window_of = {u: s for s in backward for u in cols.windows[s].units}
    gained: dict[int, Terms] = {}  # window -> what more waits in host memory after it
    for u, (unit, choice) in enumerate(zip(cols.units, cols.choices, strict=True)):
        if choice.tied is None:
            continue
        following = max(v for v in range(u) if cols.units[v].fetched_from == unit.fetched_from)
        first, last = window_of[u], window_of[following]
        before: Terms = []
        for s in (s for s in backward if first <= s <= last):
            is_own = (s == first and cols.windows[s].last == u) or (s == last and cols.windows[s].first == following)
            num = p.turn - is_own  # one is there at the end of the op that makes it, and for the next one
            after: Terms = [] if s == last else [(1.0, cols.for_bound(num * unit.tied_gb))]
            gained.setdefault(s, []).extend([*after, *minus(before)])
            if s != first:
                fixed, extra = cols.compute(s)
                at_start, idle_gb = cols.for_bound(num * unit.tied_gb), p.rates.down["grads"]
                leaving = [(-idle_gb, cols.tau[s][0]), *times(idle_gb, extra)]
                row = [(1.0, at_start), *minus(before), *leaving]
                lp.row(row, high=-idle_gb * fixed, family="tied gradients")
                held.at_start[s] += [(-num / p.turn, choice.tied), (-1.0, at_start)]
            if s != last:
                waiting: Terms = [(num / p.turn, choice.tied), *after]
                held.at_end[s] += minus(waiting)
                held.on_host[s] += waiting
            before = after
    for s, gain in gained.items():
        for name in ("dT", "uT"):
            cols.flows[s][name] = cols.for_bound(inf, cost=TRANSFER_COST * p.blocks[b].copies)
        copied = [*cols.flow(s, "dT"), *minus(cols.flow(s, "uT"))]
        lp.row([*gain, *minus(copied)], low=0.0, high=0.0, family="tied gradients")


def _parameters(cols: Columns, held: Held) -> None:
    """Parameters, fetched for every pass over a unit."""
    p, lp, n = cols.p, cols.lp, len(cols.units)
    if not p.host_gb:
        return
    link = _BlockLink(cols, 2 if p.has_nvme else 1)
    for b in range(len(p.blocks)):
        ahead, *staged = link.start(b)
        for s in cols.block_windows(b):
            window = cols.windows[s]
            each = [parameters_needed(cols, window.phase, u) for u in window.units]
            need, need_read = _joined(each)
            need_first = each[0][0]
            early: Terms = [(1.0, cols.early[s]["uW"])]
            present = [*ahead, *early]
            held.at_start[s] += present
            if need_first:
                lp.row([*present, *minus(need_first)], low=0.0, family="parameters before compute")
            lp.row([*cols.flow(s, "uW"), *minus(early)], low=0.0, family="early part")
            if window.last == n - 1 and window.phase == "fwd" and cols.units[n - 1].bwd_reads_params:
                need, need_read = [], []  # they stay: the head's turn fetches once
            ahead = cols.queue(ahead, cols.flow(s, "uW"), need, "parameters fetched")
            held.at_end[s] += ahead
            for read in staged:
                staged = [cols.queue(read, cols.flow(s, "rW"), need_read, "parameters read")]
                held.read[s] += [*staged[0], *minus(ahead)]
        link.end(b, [ahead, *staged])
    link.close()


def parameters_needed(cols: Columns, phase: str, u: int) -> tuple[Terms, Terms]:
    """What a unit's turn needs of parameters that are not at home on the device, and of those at home on NVMe."""
    unit = cols.units[u]
    owner = unit.fetched_from
    if not (unit.fwd_reads_params if phase == "fwd" else unit.bwd_reads_params):
        return [], []
    need, need_read = cols.params_away(owner), cols.params_on(owner, "nvme")
    if u == len(cols.units) - 1 and unit.name != cols.units[owner].name and (unit.gparams or unit.frozen_gb):
        need += cols.params_away(u)
        need_read += cols.params_on(u, "nvme")
    return need, need_read


def _updates(cols: Columns, held: Held) -> None:
    """Gradients down, states in and out, and updates, which run on into the next step."""
    p, lp = cols.p, cols.lp
    if not p.host_gb or not p.rates.adam:
        return
    grad_gb = float(p.workload.training.grad_bytes)  # per 1e9 parameters
    owners = [u for u in p.workload.units if u.num_trained]
    state_gb = min((p.workload.training.states_bytes(u) / u.num_trained for u in owners), default=0.0)
    parked: Terms = []  # GB of gradients that wait for the norm on NVMe: written there and read once more
    if p.semantics == "exact-clip" and p.has_nvme:
        parked = cols.over_units(lambda u: cols.placed(u, "grads", "nvme", cols.units[u].grads_gb))
    for name in ("wG", "rG") if parked else ():
        for flows in cols.flows:
            flows[name] = lp.column(cost=TRANSFER_COST)
    param_gb = float(p.workload.training.param_bytes)
    num_passing = 2 if "aQ" in cols.flows[0] else 0
    num_staged = 2 if p.brings_states and p.has_nvme else 0
    num_brought = (3 if p.brings_states else 0) + p.returns_grads
    link = _BlockLink(cols, 6, num_optional=num_brought + num_passing + num_staged)
    for b in range(len(p.blocks)):
        leaving, due, waiting, read, written, new, *optional = link.start(b)
        brought, passing = optional[:num_brought], optional[num_brought : num_brought + num_passing]
        staged, since = optional[num_brought + num_passing :], list[int]()
        for s in cols.block_windows(b):
            window = cols.windows[s]
            each = [_gradients_made(cols, window, u) for u in window.units]
            made, released, due_here, stay = _joined(each)
            made_last = each[-1][0]
            held.leaving[s] += leaving
            held.at_start[s] += leaving
            if brought:
                brought = _brought(cols, s, held, brought, (due_here, stay), each[-1][2:])
            if passing:
                passing = _passing(cols, s, held, passing)
            since.append(s)
            if staged and cols.flow(s, "uN"):
                staged, since = _staged(cols, since, held, staged), []
            updated = cols.updates(s)
            leaving = cols.queue(leaving, made, cols.flow(s, "dG"), "gradients leaving")
            others = [*leaving, *minus(made_last)]
            held.at_end[s] += others
            held.on_host[s] += minus(leaving) if cols.adds_up_on_host(window) else []
            if made_last:
                lp.row(others, low=0.0, family="gradients leaving")
            due = cols.queue(due, released, updated, "updates due")
            if len(p.blocks) == 1:
                came = [*cols.flow(s, "dG"), *cols.flow(s, "rG")]
                went = [*times(grad_gb, updated), *cols.flow(s, "wG"), *cols.flow(s, "uG")]
                waiting = cols.queue(waiting, came, went, "gradients on the host")
                held.on_host[s] += waiting
            if p.has_nvme:
                used = cols.flow(s, "aN", state_gb)
                read = cols.queue(read, cols.flow(s, "rO"), used, "states read")
                written = cols.queue(written, used, cols.flow(s, "wO"), "states to write")
                held.on_host[s] += [*read, *written]
            homeless = cols.flow(s, "aL", param_gb)
            if homeless:
                lp.row([*updated, *minus(cols.flow(s, "aL"))], low=0.0, family="new parameters")
            going = [*cols.flow(s, "uP"), *cols.flow(s, "wP")]
            new = cols.queue(new, homeless, going, "new parameters")
            held.on_host[s] += new
        link.end(b, [leaving, due, waiting, read, written, new, *brought, *passing, *staged])
    link.close()
    _once_per_step(cols, parked)


def _brought(
    cols: Columns,
    s: int,
    held: Held,
    queues: list[Terms],
    due_here: tuple[Terms, Terms],
    due_last: tuple[Terms, ...],
) -> list[Terms]:
    """Updates on the device of states that come and go: what is due, what has come, what leaves, after window s; and
    the gradients there, which are those of all that is due unless some leave and come back."""
    owners = [u for u in cols.units if u.gparams]
    state_gb = min((u.states_gb / u.gparams for u in owners), default=0.0)
    grad_gb = float(cols.p.workload.training.grad_bytes)
    updated = cols.flow(s, "aD")
    uses = times(state_gb, updated)
    due, come, left, *gradients = queues
    there, made_last = (*gradients, due)[0], due_last[len(gradients)]
    # updates of the window run before its op, but for those of units that share it
    held.at_start[s] += times(grad_gb, [*there, *minus(updated)])
    held.at_start[s] += [*come, *minus(uses), *left, *minus(cols.flow(s, "dS"))]
    due = cols.queue(due, due_here[0], updated, "updates due")
    if due_last[0]:
        cols.lp.row([*due, *minus(due_last[0])], low=0.0, family="updates due")
    come = cols.queue(come, cols.flow(s, "uS"), uses, "states brought")
    left = cols.queue(left, uses, cols.flow(s, "dS"), "states leaving")
    if gradients:
        came = [*due_here[1], *cols.flow(s, "uG", 1.0 / grad_gb)]
        gradients = [cols.queue(there, came, updated, "gradients brought")]
    there = (*gradients, due)[0]
    held.at_end[s] += [*times(grad_gb, [*there, *minus(made_last)]), *come, *left]
    return [due, come, left, *gradients]


def _passing(cols: Columns, s: int, held: Held, queues: list[Terms]) -> list[Terms]:
    """Beside such updates with clipping: on the device, old parameters that have come and new ones that leave, after
    window s. None is made before the norm is known, so they wait somewhere."""
    come, left = queues
    made = cols.flow(s, "aQ")
    param_gb = max((u.params_gb / u.gparams for u in cols.units if u.gparams), default=0.0)
    if made:
        cols.lp.row([*cols.flow(s, "aD", param_gb), *minus(made)], low=0.0, family="states brought")
    held.at_start[s] += [*left, *minus(cols.flow(s, "dQ"))]
    left = cols.queue(left, made, cols.flow(s, "dQ"), "parameters brought")
    if cols.flow(s, "uQ"):
        held.at_start[s] += [*come, *minus(made)]
        come = cols.queue(come, cols.flow(s, "uQ"), made, "parameters brought")
        held.at_end[s] += come
    held.at_end[s] += left
    return [come, left]


def _staged(cols: Columns, since: list[int], held: Held, queues: list[Terms]) -> list[Terms]:
    """What is in host memory, after the last of these windows, of what has been read from NVMe for updates on the
    device and of what is to be written there. The windows together: so much that the program stays small."""

    def moved(name: str) -> Terms:
        return [t for s in since for t in cols.flow(s, name)]

    read, written = queues
    gone, came = ([*moved(way + "N"), *moved(way + "M")] for way in "ud")
    read = cols.queue(read, moved("rS"), gone, "states brought")
    written = cols.queue(written, came, moved("wS"), "states brought")
    held.on_host[since[-1]] += [*read, *written]
    for whole, part in (("uS", "uN"), ("dS", "dN"), ("uQ", "uM"), ("dQ", "dM")):
        if moved(part):
            cols.lp.row([*moved(whole), *minus(moved(part))], low=0.0, family="states brought")
    return [read, written]


def _gradients_made(cols: Columns, window: Window, u: int) -> tuple[Terms, Terms, Terms, Terms]:
    """GB of gradients that a unit's turn makes and that leave, and 1e9 parameters whose update becomes due then: on the
    host; on the device with states that come there; and of these, with gradients that have stayed there."""
    unit, block = cols.units[u], cols.p.blocks[window.block]
    if window.phase != "bwd" or not unit.gparams:
        return [], [], [], []
    if not block.last:
        return cols.away(u, "grads", unit.grads_gb), [], [], []
    # with delayed updates the release is that of the step before: any time in this step
    host, brought = (cols.placed(u, "updated", where, unit.gparams) for where in ("host", "brought"))
    leave = cols.leaving(u, unit.gparams)
    return times(unit.grads_gb, cols.leaving(u)), host, brought, [t for t in brought if t not in leave]


def _once_per_step(cols: Columns, parked: Terms) -> None:
    """What moves once per step, whenever: updates by kind, new parameters going home, old ones coming."""
    p, units, training = cols.p, cols.units, cols.p.workload.training

    def total(of: Callable[[int], Terms]) -> Terms:
        return [t for u in range(len(units)) for t in of(u)]

    def updated(is_so: Callable[[Mode], bool]) -> Terms:
        return total(lambda u: cols.share(u, units[u].gparams, lambda m: m.updated == "host" and is_so(m)))

    def params(updated: str, *homes: str) -> Terms:
        return total(lambda u: cols.params_of(u, updated, *homes))

    uploaded, to_drive = params("host", "device"), params("host", "nvme")
    moved = params("brought", "host", "nvme")
    states = total(lambda u: cols.share(u, units[u].states_gb, lambda m: m.updated == "brought" and m.states == "nvme"))
    on_drives = params("brought", "nvme")
    stored = [*states, *on_drives]
    arrivals = training.gradient_accumulation_steps - 1 if len(p.blocks) > 1 else 0
    totals = [
        ("aN", updated(lambda m: m.states == "nvme"), "updates of states on NVMe"),
        ("uP", uploaded, "parameters going home"),
        ("wP", to_drive, "parameters going home"),
        ("aL", updated(lambda m: m.params != "host"), "new parameters"),
    ]
    if not training.has_master:
        totals += [("dP", uploaded, "old parameters to the host"), ("rP", to_drive, "old parameters to the host")]
    added = total(lambda u: cols.away(u, "grads", arrivals * units[u].accumulate_s))
    totals.append(("acc", added, "gradients added on the host"))
    brought = (("uQ", moved), ("dQ", moved), ("rS", states if training.has_master else stored), ("wS", stored))
    passing = (("aQ", moved), ("uN", states), ("dN", states), ("uM", on_drives), ("dM", on_drives))
    moving = {name for flows in cols.flows for name in flows}
    totals += [(name, amount, "states brought") for name, amount in (*brought, *passing) if name in moving]
    totals += [(name, parked, "gradients on NVMe") for name in ("wG", "rG") if parked]
    for name, amount, family in totals:
        cols.lp.row([*cols.over_step(name), *minus(amount)], low=0.0, high=0.0, family=family)


class _BlockLink:
    """States that run on from one block of micro-batches into the next, and from the step's end into the next step.

    The middle block stands for the average of its copies: what its average state gains from start to end, times the
    copies, is what the last block starts with beyond what the first one ended with.
    """

    def __init__(self, cols: Columns, num: int, num_optional: int = 0) -> None:
        self.lp, self.blocks = cols.lp, cols.p.blocks
        kinds = [False] * num + [True] * num_optional
        self.starts: list[list[Terms]] = [[[(1.0, cols.lp.column(optional=k))] for k in kinds] for _ in self.blocks]
        self.ends: list[list[Terms]] = []

    def start(self, b: int) -> list[Terms]:
        return [list(t) for t in self.starts[b]]

    def end(self, b: int, states: list[Terms]) -> None:
        assert b == len(self.ends)
        self.ends.append(states)

    def close(self) -> None:
        first, last = 0, len(self.blocks) - 1
        for k in range(len(self.starts[0])):
            self._equal(self.ends[last][k], self.starts[first][k])
            if len(self.blocks) == 2:
                self._equal(self.ends[first][k], self.starts[last][k])
            elif len(self.blocks) == 3:
                copies = float(self.blocks[1].copies)
                gain = [(copies * a, c) for a, c in [*self.ends[1][k], *minus(self.starts[1][k])]]
                self._equal([*gain, *self.ends[first][k]], self.starts[last][k])

    def _equal(self, left: Terms, right: Terms) -> None:
        self.lp.row([*left, *minus(right)], low=0.0, high=0.0, family="from block to block")
