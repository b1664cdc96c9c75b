"""What binds in each window: deadlines, memory, streams and shared limits; and over the step, drive endurance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import isfinite

from tierplan.hwmodels.names import COMPUTE, D2H, H2D, HOST_ADAM, NVME_READ, NVME_WRITE
from tierplan.planner.milp.amounts import Problem, UnitAmounts
from tierplan.planner.milp.columns import Columns, minus, times
from tierplan.planner.milp.modes import MODES
from tierplan.planner.milp.program import Terms
from tierplan.planner.milp.queues import Held, parameters_needed
from tierplan.planner.milp.rates import GB, STATE_SHARDS
from tierplan.planner.plan_rules import PLACES

ENDURANCE = "drive endurance"

SPARSE = 4
"""Terms that a growing sum may have before it becomes a column."""


def deadline_rows(cols: Columns) -> None:
    """Units' updates are nested in time: released last, needed first. Each nest has room for what it holds."""
    p, lp = cols.p, cols.lp
    if p.semantics == "delayed-1" or not cols.units:
        return
    forward = [s for s in cols.block_windows(0) if cols.windows[s].phase == "fwd"]
    backward = [s for s in cols.block_windows(len(p.blocks) - 1) if cols.windows[s].phase == "bwd"]
    spent: Terms = []  # updates between the window's backward and its next forward, 1e9 parameters
    sent: Terms = []
    passed: Terms = []  # seconds between the same two moments
    demand: Terms = []
    upload: Terms = []
    on_device: Terms = []  # updates there with states that come, in the same time
    demand_there: Terms = []
    has_updates = bool(p.host_gb and p.rates.adam)
    for s, then in zip(forward, reversed(backward), strict=True):
        for u in cols.windows[s].units:
            unit, is_first = cols.units[u], u == cols.windows[s].first
            demand += cols.placed(u, "updated", "host", unit.gparams)
            demand_there += cols.placed(u, "updated", "brought", unit.gparams)
            upload += cols.params_of(u, "host", "device")
            if not (unit.gparams and has_updates) or not (is_first or u == cols.windows[s].last):
                continue
            # the window's first forward comes after its last backward; its other units also have the backward window
            also = [] if is_first else [then]
            done = [*spent, *(t for w in (s, *also) for t in cols.updates(w))]
            gone = [*sent, *(t for w in (s, *also) for t in cols.flow(w, "uP"))]
            lp.row([*done, *minus(demand)], low=0.0, family="updates before the next forward")
            lp.row([*gone, *minus(upload)], low=0.0, family="uploads before the next forward")
            if demand_there:
                here = [*on_device, *(t for w in (s, *also) for t in cols.flow(w, "aD"))]
                lp.row([*here, *minus(demand_there)], low=0.0, family="updates before the next forward")
            if is_first:
                through_nvme_s, through_host_s = (p.rates.chain_s[home][u] for home in ("nvme", "host"))
                lag = cols.share(u, through_nvme_s, lambda m: m.updated == "host" and m.params == "nvme")
                lag += cols.share(u, through_host_s, lambda m: m.updated == "host" and m.params != "nvme")
                fixed, extra = cols.compute(s)
                idle: Terms = [(1.0, cols.tau[s][0]), *minus(extra)]
                lp.row([*passed, *idle, *minus(lag)], low=fixed + p.clip_s, family="from gradient to next forward")
        spent = cols.carry(spent, [*cols.updates(s), *cols.updates(then)])
        on_device = cols.carry(on_device, [*cols.flow(s, "aD"), *cols.flow(then, "aD")])
        sent = cols.carry(sent, [*cols.flow(s, "uP"), *cols.flow(then, "uP")])
        passed = cols.carry(passed, [(1.0, cols.tau[s][0]), (1.0, cols.tau[then][0])])


def _update_rows(cols: Columns, on_host: Terms, over: Terms, on_device: Terms, over_device: Terms) -> None:
    """While a unit is updated, host memory or the device holds its gradients, a shard of its states that have come, and
    new parameters that will leave.

    Gradients and parameters whole, beside what is at home there: however smoothly everything else flows.
    """
    p = cols.p
    num_shards = max(STATE_SHARDS)
    for u in {id(choice): u for u, choice in enumerate(cols.choices)}.values():  # alike units: on average
        unit = cols.units[u]
        held = cols.placed(u, "updated", "host", 0.0 if p.semantics == "delayed-1" else unit.grads_gb)
        held += cols.placed(u, "states", "nvme", unit.states_gb / num_shards)
        held += cols.params_of(u, "host", "device", "nvme")
        here = cols.placed(u, "updated", "brought", unit.states_gb / num_shards + unit.grads_gb)
        here += cols.params_of(u, "brought", "host", "nvme")
        if here:
            cols.lp.row([*on_device, *here, *over_device], high=p.device_gb, family="device memory")
        if unit.gparams and p.host_gb and p.rates.adam:
            cols.lp.row([*on_host, *held, *over], high=p.host_gb, family="host memory")


def memory_rows(cols: Columns, held: Held) -> None:
    """What every tier holds when a window's op starts, at most its capacity less the margin."""
    p, lp, units = cols.p, cols.lp, cols.units
    several = len(p.blocks) > 1

    def stored(where: str) -> Terms:
        return cols.over_units(
            lambda u: [
                *cols.params_on(u, where),
                *cols.placed(u, "states", where, units[u].states_gb),
            ]
        )

    resident, on_host, on_drive = map(stored, PLACES)
    accumulated: Terms = []
    host_grads: Terms = []
    adding_up: Terms = []
    all_grads: Terms = []
    if p.semantics == "delayed-1":
        all_grads = cols.over_units(lambda u: cols.away(u, "states", units[u].grads_gb))
    if several:
        host_grads = cols.over_units(lambda u: cols.placed(u, "grads", "host", units[u].grads_gb))
        adding_up = cols.over_units(lambda u: cols.away(u, "grads", units[u].grads_gb))  # wherever they wait then
        accumulated = cols.over_units(lambda u: cols.placed(u, "grads", "device", units[u].grads_gb))
    over_device, over_host, over_drive = ([(-1.0, cols.excess[t])] if t in cols.excess else [] for t in PLACES)
    _update_rows(cols, on_host, over_host, resident, over_device)
    needed = _DeviceNeeds(cols)
    for s, window in enumerate(cols.windows):
        block = p.blocks[window.block]
        drained: Terms = [(-1.0, c) for k, c in cols.early[s].items() if k == "d"]
        start = [*resident, *held.at_start[s], *drained, *([] if block.first else accumulated)]
        fixed, more = needed.of_first(s)
        lp.row([*start, *more, *over_device], high=p.device_gb - fixed, family="device memory")
        if window.phase == "bwd" or window.last != len(units) - 1 or p.turn == 1:
            fixed, more = needed.of_last(s)
            end = [*resident, *held.at_end[s]]
            if several and block.last and window.phase == "bwd":
                end += _completed(cols, window.last)
                accumulated = cols.carry(accumulated, minus([t for u in window.units for t in _completed(cols, u)]))
            end += [] if block.first else accumulated
            row = lp.row([*end, *more, *over_device], high=p.device_gb - fixed, family="device memory")
            if block.first and window.phase == "bwd" and p.turn > 1:  # no mode of ours adds up in host memory there
                cols.in_bounds[row] = p.device_gb - fixed + units[window.last].adding_gb
        if not p.host_gb:
            continue
        in_host = [*on_host, *held.on_host[s], *all_grads]
        in_host += adding_up if cols.adds_up_on_host(window) else []
        if several and block.last and window.phase == "bwd" and window.last == 0 and p.semantics == "exact-clip":
            in_host += host_grads
        for read in ([], held.read[s]) if held.read[s] else ([],):
            lp.row([*in_host, *read, *over_host], high=p.host_gb, family="host memory")
        if p.has_nvme and held.on_nvme[s]:
            lp.row([*on_drive, *held.on_nvme[s], *over_drive], high=p.nvme_gb, family="NVMe capacity")


def _completed(cols: Columns, u: int) -> Terms:
    """GB of a unit's gradients, added up on the device, that go with its last backward: updated, or on their way."""
    waits = cols.p.semantics == "exact-clip"  # for the norm, where its states are
    places = {k: c for k, c in cols.choices[u].place.items() if not (waits and MODES[k].states == "device")}
    return [(cols.units[u].grads_gb, c) for k, c in places.items() if MODES[k].grads == "device"]


class _DeviceNeeds:
    """What ops need on the device, window after window: some gradients wait there, and add up."""

    def __init__(self, cols: Columns) -> None:
        self.cols = cols
        self.tied: dict[int, float] = {}
        """Owner of shared parameters -> GB of their gradients that wait for its backward, one for each micro-batch."""
        self.clipping: Terms = []
        kinds = [unit.kind for unit in cols.p.workload.units]
        self.shared = range(kinds.index("embed"), len(kinds)) if {"embed", "block"} <= {*kinds} else range(0)
        """Units at whose forward there is what `embed` makes and all blocks read."""
        self.first_block = kinds.index("block") if "block" in kinds else 0

    def shared_gb(self, s: int, u: int) -> float:
        """What is made once and read by all blocks, at unit u's op in window s: until the first block's backward."""
        window, p = self.cols.windows[s], self.cols.p
        if u not in self.shared or (window.phase == "bwd" and u < self.first_block):
            return 0.0
        return p.shared_gb if u == self.shared[0] else p.shared_gb * p.turn

    def of_first(self, s: int) -> tuple[float, Terms]:
        """When the window's first op starts: GB that are needed whatever is decided, and those that depend on it."""
        cols, p = self.cols, self.cols.p
        window = cols.windows[s]
        u, unit, block = window.first, cols.units[window.first], p.blocks[window.block]
        fixed = self.shared_gb(s, u)
        if window.phase == "fwd":
            return fixed + unit.fwd_fixed_gb + unit.saved_gb, cols.dropped(u, 1.0)
        more: Terms = cols.recomputed(u, [group.gb for group in unit.groups])
        # of all micro-batches of the turn there are the gradients that came from behind
        fixed += unit.bwd_fixed_gb + (p.turn - 1) * unit.output_gb + unit.tied_gb + sum(self.tied.values())
        new_gb = unit.grads_gb - self.tied.get(u, 0.0) / p.turn  # which takes over the first of those
        if block.first:  # not added to those of an earlier turn
            fixed += new_gb
        else:
            more += cols.placed(u, "grads", "host", new_gb)
            more += cols.placed(u, "grads", "device", unit.adding_gb)
        if p.semantics == "exact-clip" and block.last and len(p.blocks) == 1:
            more += self.clipping
            for v in window.units:
                self.clipping = [*self.clipping, *cols.placed(v, "states", "device", cols.units[v].grads_gb)]
            if len(self.clipping) > SPARSE:
                self.clipping = cols.column_for(self.clipping)
        for v in window.units:
            self.tied.pop(v, None)
            if cols.units[v].tied_gb:
                self.tied[cols.units[v].fetched_from] = p.turn * cols.units[v].tied_gb
        return fixed, more

    def of_last(self, s: int) -> tuple[float, Terms]:
        """The same when the window's last op ends, beside what is kept and on its way then (and `of_first`).

        What came for others during the op is there beside all that the op has: in backward all that its unit saves,
        whatever became of it, and the gradients of the inputs of its whole turn.
        """
        cols, p = self.cols, self.cols.p
        u, is_first = cols.windows[s].last, p.blocks[cols.windows[s].block].first
        unit = cols.units[u]
        if cols.windows[s].phase == "fwd":
            stays = u == len(cols.units) - 1 and unit.bwd_reads_params  # fetched, and not yet used up
            more = [] if stays else parameters_needed(cols, "fwd", u)[0]
            more = [*more, *cols.dropped(u, 1.0)]
            return self.shared_gb(s, u) + unit.fwd_fixed_gb + unit.saved_gb, more
        fixed = self.shared_gb(s, u) + unit.bwd_fixed_gb + (p.turn - 1) * unit.input_gb
        fixed += sum(group.gb for group in unit.groups) + sum(self.tied.values())
        more = [*parameters_needed(cols, "bwd", u)[0], *cols.dropped(u, -1.0)]
        if is_first:
            fixed += unit.grads_gb + (unit.adding_gb if p.turn > 1 else 0.0)
        else:
            more += cols.placed(u, "grads", "host", unit.grads_gb)
            more += cols.placed(u, "grads", "device", unit.adding_gb)
        return fixed, more


def stream_rows(cols: Columns, held: Held) -> None:
    """Every stream and every shared limit has the window's duration, and early parts its idle time."""
    p, lp, rates = cols.p, cols.lp, cols.p.rates
    streams, pairs = _streams(p), drive_pairs(p)
    for s, window in enumerate(cols.windows):
        tau = cols.tau[s][0]
        # updates are made while ops wait, whichever these are: over the step there is time for both
        least, more = cols.compute(s, waits=True, updates=not p.waits)
        here = [] if p.waits else cols.flow(s, "aD", -1.0 / rates.update)
        lp.row([(1.0, tau), *minus(more), *here], low=least, family=COMPUTE)
        fixed, extra = cols.compute(s, updates=not p.waits)
        by_stream: dict[str, Terms] = {}
        for name, column in cols.flows[s].items():
            if name not in streams:
                continue
            stream, rate = streams[name]
            by_stream.setdefault(stream, []).append((1.0 / rate, column))
        for stream, terms in by_stream.items():
            lp.row([*terms, (-1.0, tau)], high=0.0, family=stream)
        if p.host_gb:
            early = cols.early[s]
            lp.row([*cols.flow(s, "dA"), *cols.flow(s, "dG"), (-1.0, early["d"])], low=0.0, family="early part")
            lp.row([*held.leaving[s], (-1.0, early["d"])], low=0.0, family="early part")
            up: Terms = [(1 / rates.up["acts"], early["uA"]), (1 / rates.up["params"], early["uW"])]
            fastest = max(streams[name][1] for name in ("dA", "dG") if name in cols.flows[s])
            down: Terms = [(1 / fastest, early["d"])]
            for terms in (up, down):
                lp.row([(1.0, tau), *minus(extra), *minus(terms)], low=fixed, family="idle time")
        for limit, loads in p.loads.items():
            terms, taken = _taken(cols, s, streams, loads), 0.0
            for u in window.units:
                unit = cols.units[u]
                taken += (unit.fwd_load if window.phase == "fwd" else unit.bwd_load).get(limit, 0.0) * p.turn
                if window.phase == "bwd":
                    loads_again = [p.turn * group.recompute_load.get(limit, 0.0) for group in unit.groups]
                    terms += cols.recomputed(u, loads_again)
            if terms or taken:
                lp.row([*terms, (-1.0, tau)], high=-taken, family=limit)
        for limit, seconds in pairs:
            lp.row([*_taken(cols, s, streams, seconds), (-1.0, tau)], high=0.0, family=limit)
    _step_rows(cols, streams)


def _step_rows(cols: Columns, streams: Mapping[str, tuple[str, float]]) -> None:
    """Over the step there is time for norms, which are taken on the cores that update, and for updates that take longer
    than by the best of all units' rates, which windows have; or for all updates, where windows have none."""
    p, rates = cols.p, cols.p.rates
    has_host = bool(p.host_gb and rates.adam)

    def also(where: str, seconds: Callable[[UnitAmounts], float]) -> Terms:
        each = [(u, seconds(unit)) for u, unit in enumerate(cols.units)]
        return [t for u, more_s in each if more_s for t in cols.placed(u, "updated", where, more_s)]

    def host_s(unit: UnitAmounts) -> float:
        return unit.norm_s + (p.host_gparams(unit) - unit.gparams) / rates.adam

    if has_host and (on_host := also("host", host_s)):
        busy = [(c / streams[name][1], t) for name in ("aH", "aN", "acc") for c, t in cols.over_step(name)]
        idle = [(1.0, cols.tau[s][0]) for s in _before_gradients(cols)]
        cols.lp.row([*busy, *on_host, *idle, *minus(cols.step())], high=-p.clip_s, family=HOST_ADAM)
    on_device = also("brought", p.slower_update_s) if has_host else []
    if on_device or p.waits:
        fixed_s, added = 0.0, times(1.0 / rates.update, cols.over_step("aD"))
        for s, (_, copies) in enumerate(cols.tau):
            window_s, decided = cols.compute(s)
            fixed_s += copies * window_s
            added += times(float(copies), decided)
        cols.lp.row([*cols.step(), *minus(added), *minus(on_device)], low=fixed_s, family=COMPUTE)


def _before_gradients(cols: Columns) -> list[int]:
    """The window of the last unit's backward, where clipping waits for norms: until it ends there is no gradient to
    take one of, and the step before has updated all by that unit's forward."""
    if cols.p.semantics != "exact-clip" or len(cols.p.blocks) > 1:
        return []
    first = next(s for s, window in enumerate(cols.windows) if window.phase == "bwd")
    return [first] if len(cols.windows[first].units) == 1 else []


def endurance_row(cols: Columns) -> None:
    """What a step writes to NVMe, at most what the drives may take on average over its time."""
    limit = cols.p.write_limit_gb_per_s
    if isfinite(limit) and cols.p.has_nvme:
        written = times(cols.p.coded_frac, cols.over_step("wA"))
        written += [t for name in ("wP", "wO", "wS", "wG") for t in cols.over_step(name)]
        per_second = [(-limit * a, c) for a, c in cols.step()]
        cols.lp.row([*written, *per_second], high=0.0, family=ENDURANCE)


def _streams(p: Problem) -> Mapping[str, tuple[str, float]]:
    """Flow name -> its stream, and GB (1e9 parameters, seconds) per second there.

    The first letter of what is moved says which way it goes, the second one what it is.
    """
    r = p.rates
    ways = {"u": (H2D, r.up), "d": (D2H, r.down), "r": (NVME_READ, r.read), "w": (NVME_WRITE, r.write)}
    letters = {"acts": "A", "grads": "GT", "params": "WPQ", "states": "OS"}
    kinds = {letter: kind for kind, of_kind in letters.items() for letter in of_kind}
    moved = {way + what: (stream, of[kind]) for way, (stream, of) in ways.items() for what, kind in kinds.items()}
    return {**moved, "aH": (HOST_ADAM, r.adam), "aN": (HOST_ADAM, r.adam), "acc": (HOST_ADAM, 1.0)}


def _taken(cols: Columns, s: int, streams: Mapping[str, tuple[str, float]], loads: Mapping[str, float]) -> Terms:
    """What the flows of window s take of a limit, with these loads by stream."""
    flows = ((name, c, loads.get(streams[name][0], 0.0)) for name, c in cols.flows[s].items() if name in streams)
    return [(load * cols.p.moved_frac(name), c) for name, c, load in flows if load and name != "acc"]


def drive_pairs(p: Problem) -> list[tuple[str, Mapping[str, float]]]:
    """By shared limit, seconds that reading a GB and writing one take of a window together, in two rows.

    A limit above 1 lets drives go on at `r` and `w` of their full speeds where they read and write at once, with
    `r + w > 1`, but each at 1 alone: then it is not used up. In `b` seconds of both, `c` of reads and `d` of writes
    alone, they do what takes `r b + c` and `w b + d` at full speed, and `b + c + d <= tau`; so `writes + reads (1 - w)
    / r <= tau`, and the same with reads first. The rates grow together until a limit is full: as both take of the same
    limits, no other transfer slows one of them for the good of the other.
    """
    found: list[tuple[str, Mapping[str, float]]] = []
    of_all = GB * p.devices
    pair = [p.machine.stream(name) for name in (NVME_READ, NVME_WRITE) if p.has_nvme]
    bytes_per_s = [
        s.rates["bytes"].points[0][1] for s in pair if "bytes" in s.rates and len(s.rates["bytes"].points) == 1
    ]
    if len(bytes_per_s) < 2 or pair[0].takes.keys() != pair[1].takes.keys():
        return found
    for limit in pair[0].takes:
        taken = [s.takes[limit].get("bytes", 0.0) * rate for s, rate in zip(pair, bytes_per_s, strict=True)]
        if min(taken) <= 0.0:
            return []
        level = p.machine.limits[limit] / sum(each * s.share for each, s in zip(taken, pair, strict=True))
        r, w = (level * s.share for s in pair)
        read_s, write_s = (of_all / rate for rate in bytes_per_s)
        if max(r, w) < 1.0 < r + w:
            found.append((limit, {NVME_WRITE: write_s, NVME_READ: read_s * (1 - w) / r}))
            found.append((limit, {NVME_READ: read_s, NVME_WRITE: write_s * (1 - r) / w}))
    return found
