"""What binds in each window: deadlines, memory, streams and shared limits; and over the step, drive endurance."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite

from tierplan.hwmodels.names import COMPUTE, D2H, H2D, HOST_ADAM, NVME_READ, NVME_WRITE
from tierplan.planner.milp.amounts import MODES, Problem
from tierplan.planner.milp.columns import Columns, minus
from tierplan.planner.milp.program import Terms
from tierplan.planner.milp.queues import Activations, Updates
from tierplan.planner.plan import PLACES

__all__ = ["ENDURANCE", "deadline_rows", "endurance_row", "memory_rows", "stream_rows"]

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
    has_updates = bool(p.host_gb and p.rates.adam)
    for s, then in zip(forward, reversed(backward), strict=True):
        for u in cols.windows[s].units:
            unit, is_first = cols.units[u], u == cols.windows[s].first
            demand += cols.away(u, "states", unit.gparams)
            for k, c in cols.choices[u].place.items():
                if MODES[k].states != "device" and MODES[k].params == "device":
                    upload.append((unit.params_gb, c))
            if not (unit.gparams and has_updates) or not (is_first or u == cols.windows[s].last):
                continue
            # the window's first forward comes after its last backward; its other units also have the backward window
            also = [] if is_first else [then]
            done = [*spent, *(t for w in (s, *also) for t in cols.updates(w))]
            gone = [*sent, *(t for w in (s, *also) for t in cols.flow(w, "uP"))]
            lp.row([*done, *minus(demand)], low=0.0, family="updates before the next forward")
            lp.row([*gone, *minus(upload)], low=0.0, family="uploads before the next forward")
            if is_first:
                lag: Terms = [(_chain_s(p, u, k), c) for k, c in cols.choices[u].place.items()]
                fixed, extra = cols.compute(s)
                idle: Terms = [(1.0, cols.tau[s][0]), *minus(extra)]
                lp.row([*passed, *idle, *minus(lag)], low=fixed, family="from gradient to next forward")
        spent = cols.carry(spent, [*cols.updates(s), *cols.updates(then)])
        sent = cols.carry(sent, [*cols.flow(s, "uP"), *cols.flow(then, "uP")])
        passed = cols.carry(passed, [(1.0, cols.tau[s][0]), (1.0, cols.tau[then][0])])


def _chain_s(problem: Problem, u: int, mode: int) -> float:
    """Least seconds from the end of a unit's last backward to the start of its next forward, in this placement."""
    m, chain = MODES[mode], problem.rates.chain_s
    if m.states == "device":
        return 0.0  # the update is part of the backward window
    return chain["nvme" if m.params == "nvme" else "host"][u]


def memory_rows(cols: Columns, acts: Activations, fetched: list[Terms], updates: Updates) -> None:
    """What every tier holds when a window's op starts, at most its capacity less the margin."""
    p, lp, units = cols.p, cols.lp, cols.units
    several = len(p.blocks) > 1

    def stored(where: str) -> Terms:
        return cols.over_units(
            lambda u: [
                *cols.placed(u, "params", where, units[u].params_gb),
                *cols.placed(u, "states", where, units[u].states_gb),
            ]
        )

    resident, on_host, on_drive = map(stored, PLACES)
    accumulated: Terms = []
    host_grads: Terms = []
    all_grads: Terms = []
    if p.semantics == "delayed-1":
        all_grads = cols.over_units(lambda u: cols.away(u, "states", units[u].grads_gb))
    if several:
        host_grads = cols.over_units(lambda u: cols.placed(u, "grads", "host", units[u].grads_gb))
        accumulated = cols.over_units(lambda u: cols.placed(u, "grads", "device", units[u].grads_gb))
    over_device, over_host, over_drive = ([(-1.0, cols.excess[t])] if t in cols.excess else [] for t in PLACES)
    needed = _DeviceNeeds(cols)
    for s, window in enumerate(cols.windows):
        block = p.blocks[window.block]
        drained: Terms = [(-1.0, c) for k, c in cols.early[s].items() if k == "d"]
        held = [*resident, *acts.kept[s], *acts.leaving[s], *updates.leaving[s], *drained, *acts.back[s], *fetched[s]]
        if several and not block.first:
            held += accumulated
        fixed, more = needed.of(s)
        lp.row([*held, *more, *over_device], high=p.device_gb - fixed, family="device memory")
        if window.phase == "fwd" and window.last != len(units) - 1:
            end = [*resident, *acts.kept_after[s], *acts.leaving_after[s]]
            lp.row([*end, *over_device], high=p.device_gb - p.shared_gb, family="device memory")
        if not p.host_gb:
            continue
        in_host = [*on_host, *acts.on_host[s], *updates.staged[s], *updates.waiting[s], *all_grads]
        if several and not (block.first and window.phase == "fwd") and not (block.last and window.phase == "bwd"):
            in_host += host_grads if not block.first or window.last == 0 else []
        if several and block.last and window.phase == "bwd" and window.last == 0 and p.semantics == "exact-clip":
            in_host += host_grads
        lp.row([*in_host, *over_host], high=p.host_gb, family="host memory")
        if p.has_nvme and acts.on_nvme[s]:
            lp.row([*on_drive, *acts.on_nvme[s], *over_drive], high=p.nvme_gb, family="NVMe capacity")


class _DeviceNeeds:
    """What a window's op itself needs on the device, window after window: gradients that wait for the norm add up."""

    def __init__(self, cols: Columns) -> None:
        self.cols = cols
        self.tied_gb = 0.0
        self.clipping: Terms = []

    def of(self, s: int) -> tuple[float, Terms]:
        """GB that are needed whatever is decided, and those that depend on it."""
        cols, p = self.cols, self.cols.p
        window = cols.windows[s]
        u, unit, block = window.first, cols.units[window.first], p.blocks[window.block]
        several, transients = len(p.blocks) > 1, cols.transients
        if window.phase == "fwd":
            return p.shared_gb + (unit.fwd_fixed_gb if transients else 0.0) + unit.saved_gb, []
        more: Terms = []
        fixed = p.shared_gb + (unit.bwd_fixed_gb if transients else 0.0)
        if u == 0:
            self.tied_gb = 0.0  # it becomes this unit's own gradient
        fixed += self.tied_gb + unit.tied_gb
        self.tied_gb += sum(cols.units[v].tied_gb for v in window.units)
        if not several or block.first or p.turn > 1:
            fixed += unit.grads_gb
        else:
            more += cols.placed(u, "grads", "host", unit.grads_gb)
        if p.semantics == "exact-clip" and block.last and not several:
            more += self.clipping
            for v in window.units:
                self.clipping = [*self.clipping, *cols.placed(v, "states", "device", cols.units[v].grads_gb)]
            if len(self.clipping) > SPARSE:
                self.clipping = cols.column_for(self.clipping)
        more += cols.recomputed(u, [group.gb for group in unit.groups])
        return fixed, more


def stream_rows(cols: Columns, acts: Activations, updates: Updates) -> None:
    """Every stream and every shared limit has the window's duration, and early parts its idle time."""
    p, lp, rates = cols.p, cols.lp, cols.p.rates
    streams = _streams(p)
    for s in range(len(cols.windows)):
        fixed, extra = cols.compute(s)
        tau = cols.tau[s][0]
        lp.row([(1.0, tau), *minus(extra)], low=fixed, family=COMPUTE)
        by_stream: dict[str, Terms] = {}
        for name, column in cols.flows[s].items():
            stream, rate = streams[name]
            by_stream.setdefault(stream, []).append((1.0 / rate, column))
        for stream, terms in by_stream.items():
            lp.row([*terms, (-1.0, tau)], high=0.0, family=stream)
        if p.host_gb:
            early = cols.early[s]
            lp.row([*cols.flow(s, "dA"), *cols.flow(s, "dG"), (-1.0, early["d"])], low=0.0, family="early part")
            lp.row([*acts.leaving[s], *updates.leaving[s], (-1.0, early["d"])], low=0.0, family="early part")
            up: Terms = [(1 / rates.up["acts"], early["uA"]), (1 / rates.up["params"], early["uW"])]
            fastest = max(streams[name][1] for name in ("dA", "dG") if name in cols.flows[s])
            down: Terms = [(1 / fastest, early["d"])]
            for terms in (up, down):
                lp.row([(1.0, tau), *minus(extra), *minus(terms)], low=fixed, family="idle time")
        _limit_rows(cols, s, streams)
    if p.host_gb and rates.adam and any(u.norm_s for u in cols.units):
        busy = [(c / rates.adam, column) for s in range(len(cols.windows)) for c, column in cols.updates(s)]
        lp.row([*cols.step(), *minus(busy)], low=0.0, family=HOST_ADAM)


def endurance_row(cols: Columns) -> None:
    """What a step writes to NVMe, at most what the drives may take on average over its time."""
    limit = cols.p.write_limit_gb_per_s
    if isfinite(limit) and cols.p.has_nvme:
        written = [t for name in ("wA", "wP", "wO", "gW") for t in cols.over_step(name)]
        per_second = [(-limit * a, c) for a, c in cols.step()]
        cols.lp.row([*written, *per_second], high=0.0, family=ENDURANCE)


def _streams(p: Problem) -> Mapping[str, tuple[str, float]]:
    """Flow name -> its stream, and GB (1e9 parameters, seconds) per second there."""
    up, down, read, write = p.rates.up, p.rates.down, p.rates.read, p.rates.write
    return {
        "uA": (H2D, up["acts"]),
        "uW": (H2D, up["params"]),
        "uP": (H2D, up["params"]),
        "dA": (D2H, down["acts"]),
        "dG": (D2H, down["grads"]),
        "dP": (D2H, down["params"]),
        "rA": (NVME_READ, read["acts"]),
        "rW": (NVME_READ, read["params"]),
        "rP": (NVME_READ, read["params"]),
        "rO": (NVME_READ, read["states"]),
        "gR": (NVME_READ, read["grads"]),
        "wA": (NVME_WRITE, write["acts"]),
        "wP": (NVME_WRITE, write["params"]),
        "wO": (NVME_WRITE, write["states"]),
        "gW": (NVME_WRITE, write["grads"]),
        "aH": (HOST_ADAM, p.rates.adam),
        "aN": (HOST_ADAM, p.rates.adam),
        "acc": (HOST_ADAM, 1.0),
    }


def _limit_rows(cols: Columns, s: int, streams: Mapping[str, tuple[str, float]]) -> None:
    p, window, tau = cols.p, cols.windows[s], cols.tau[s][0]
    for limit, loads in p.loads.items():
        terms: Terms = []
        for name, column in cols.flows[s].items():
            if name != "acc" and (load := loads.get(streams[name][0], 0.0)):
                terms.append((load, column))
        taken = 0.0
        for u in window.units:
            unit = cols.units[u]
            taken += (unit.fwd_load if window.phase == "fwd" else unit.bwd_load).get(limit, 0.0) * p.turn
            if window.phase == "bwd":
                terms += cols.recomputed(u, [p.turn * group.recompute_load.get(limit, 0.0) for group in unit.groups])
        if terms or taken:
            cols.lp.row([*terms, (-1.0, tau)], high=-taken, family=limit)
