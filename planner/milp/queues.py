"""What moves, as queues over the windows: activations, parameters, gradients, states and updates.

A queue's content at the end of a window is a column that never goes negative, so that nothing leaves before it came.
Each function adds the rows of one kind of bytes, and returns what memory rows need to know about them."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierplan.planner.milp.amounts import Window
from tierplan.planner.milp.columns import TRANSFER_COST, Columns, minus, times
from tierplan.planner.milp.modes import MODES
from tierplan.planner.milp.program import Terms


@dataclass
class Activations:
    """Per window, in GB: what memory holds of activations."""

    kept: list[Terms] = field(default_factory=list)
    """Kept on the device when the window's op starts."""
    kept_after: list[Terms] = field(default_factory=list)
    leaving: list[Terms] = field(default_factory=list)
    """Queued to leave when the window's op starts."""
    leaving_after: list[Terms] = field(default_factory=list)
    by_last: list[Terms] = field(default_factory=list)
    """Of what is kept and queued after the window: what its last op has made."""
    back: list[Terms] = field(default_factory=list)
    """Brought back and not yet used, when the window's op starts."""
    back_after: list[Terms] = field(default_factory=list)
    on_host: list[Terms] = field(default_factory=list)
    on_nvme: list[Terms] = field(default_factory=list)


@dataclass
class Parameters:
    """Per window, in GB: what memory holds of parameters that are fetched for a pass."""

    fetched: list[Terms] = field(default_factory=list)
    """On the device when the window's op starts."""
    fetched_after: list[Terms] = field(default_factory=list)
    """Not yet used at the window's end."""
    on_host: list[Terms] = field(default_factory=list)
    """Read from NVMe and not yet on the device at the window's end, or less."""


@dataclass
class Updates:
    """Per window, in GB: what memory holds of gradients, states and new parameters on their way."""

    leaving: list[Terms]
    """Gradients queued to leave the device when the window's op starts."""
    others_leaving: list[Terms]
    """The same when its last op ends, less the gradients which that makes."""
    waiting: list[Terms]
    """Gradients on the host that wait for their update."""
    staged: list[Terms]
    """States on the host, between NVMe and their return to it; new parameters that have a home elsewhere."""
    brought: list[Terms]
    """On the device for updates there when the window's op starts, or less: gradients that wait, states that have come
    or that leave."""
    brought_after: list[Terms]
    """The same when its last op ends, less the gradients which that makes."""


def activation_queues(cols: Columns) -> Activations:
    """Out behind the forward that made them, back before the backward that needs them."""
    found = Activations()
    for b in range(len(cols.p.blocks)):
        _activations_of_block(cols, b, found)
    return found


def _activations_of_block(cols: Columns, b: int, found: Activations) -> None:
    p, lp = cols.p, cols.lp
    kept: Terms = []
    out: Terms = []
    back: Terms = []
    host: Terms = []
    drive: Terms = []
    for s in cols.block_windows(b):
        window = cols.windows[s]
        each = [_made_and_needed(cols, window.phase, u) for u in window.units]
        made, stay, need, gone = ([t for unit in each for t in unit[k]] for k in range(4))
        made_last, stay_last, need_first = each[-1][0], each[-1][1], each[0][2]
        early_back: Terms = [(1.0, c) for k, c in cols.early[s].items() if k == "uA"]
        found.kept.append(kept)
        found.leaving.append(out)
        decoded = [((1 - p.coded_frac) * a / p.turn, c) for a, c in need_first if p.coded_frac < 1]
        found.back.append([*times(p.coded_frac, [*back, *early_back]), *decoded])
        if need_first and early_back:
            one_op = [(-a / p.turn, c) for a, c in need_first]
            lp.row([*back, *early_back, *one_op], low=0.0, family="back before backward")
        kept = [(1.0, cols.queue(kept, stay, gone, "kept activations"))]
        if cols.flows[s]:
            lp.row([*cols.flow(s, "uA"), *minus(early_back)], low=0.0, family="early part")
            out = [(1.0, cols.queue(out, made, cols.flow(s, "dA"), "activations leaving"))]
            if made_last:  # what the window's last op makes cannot leave inside it
                lp.row([*out, *[(-a / p.turn, c) for a, c in made_last]], low=0.0, family="activations leaving")
            back = [(1.0, cols.queue(back, cols.flow(s, "uA"), need, "activations back"))]
            came = [*cols.flow(s, "dA"), *cols.flow(s, "rA")]
            went = [*cols.flow(s, "uA"), *cols.flow(s, "wA")]
            host = [(1.0, cols.queue(host, came, went, "activations on the host"))]
            if p.has_nvme:
                drive = [(1.0, cols.queue(drive, cols.flow(s, "wA"), cols.flow(s, "rA"), "activations on NVMe"))]
        found.kept_after.append(kept)
        found.leaving_after.append(out)
        found.by_last.append([(a / p.turn, c) for a, c in (*times(p.coded_frac, made_last), *stay_last)])
        found.back_after.append(times(p.coded_frac, back))
        found.on_host.append(times(p.coded_frac, host))
        found.on_nvme.append(times(p.coded_frac, drive))
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


def parameter_queues(cols: Columns) -> Parameters:
    """Parameters, fetched for every pass over a unit."""
    p, lp, n = cols.p, cols.lp, len(cols.units)
    if not p.host_gb:
        nothing: list[Terms] = [[] for _ in cols.windows]
        return Parameters(nothing, nothing, nothing)
    found = Parameters()
    link = _BlockLink(cols, 2 if p.has_nvme else 1)
    for b in range(len(p.blocks)):
        ahead, staged = link.start(b)[0], link.start(b)[1] if p.has_nvme else []
        for s in cols.block_windows(b):
            window = cols.windows[s]
            each = [parameters_needed(cols, window.phase, u) for u in window.units]
            need, need_read = ([t for unit in each for t in unit[k]] for k in range(2))
            need_first = each[0][0]
            early: Terms = [(1.0, cols.early[s]["uW"])]
            present = [*ahead, *early]
            found.fetched.append(present)
            if need_first:
                lp.row([*present, *minus(need_first)], low=0.0, family="parameters before compute")
            lp.row([*cols.flow(s, "uW"), *minus(early)], low=0.0, family="early part")
            if window.last == n - 1 and window.phase == "fwd" and cols.units[n - 1].bwd_reads_params:
                need, need_read = [], []  # they stay: the head's turn fetches once
            ahead = [(1.0, cols.queue(ahead, cols.flow(s, "uW"), need, "parameters fetched"))]
            if p.has_nvme:
                staged = [(1.0, cols.queue(staged, cols.flow(s, "rW"), need_read, "parameters read"))]
            found.fetched_after.append(ahead)
            found.on_host.append([*staged, *minus(ahead)] if p.has_nvme else [])
        link.end(b, [ahead, staged] if p.has_nvme else [ahead])
    link.close()
    return found


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


def update_queues(cols: Columns) -> Updates:
    """Gradients down, states in and out, and updates, which run on into the next step."""
    p, lp = cols.p, cols.lp
    nothing: list[Terms] = [[] for _ in cols.windows]
    found = Updates(*(list(nothing) for _ in range(6)))
    if not p.host_gb or not p.rates.adam:
        return found
    single = len(p.blocks) == 1
    grad_gb = float(p.workload.training.grad_bytes)  # per 1e9 parameters
    owners = [u for u in p.workload.units if u.num_trained]
    state_gb = min((p.workload.training.states_bytes(u) / u.num_trained for u in owners), default=0.0)
    parked = _parked(cols)
    for name in ("wG", "rG") if parked else ():
        for flows in cols.flows:
            flows[name] = lp.column(cost=TRANSFER_COST)
    param_gb = float(p.workload.training.param_bytes)
    link = _BlockLink(cols, 6, num_optional=(3 if p.brings_states else 0) + p.returns_grads)
    for b in range(len(p.blocks)):
        leaving, due, waiting, read, written, new, *brought = link.start(b)
        for s in cols.block_windows(b):
            window = cols.windows[s]
            each = [_gradients_made(cols, window, u) for u in window.units]
            made, released, due_here, stay = ([t for unit in each for t in unit[k]] for k in range(4))
            made_last = each[-1][0]
            if brought:
                brought = _brought(cols, s, found, brought, (due_here, stay), each[-1][2:])
            updated = cols.updates(s)
            found.leaving[s] = leaving
            leaving = [(1.0, cols.queue(leaving, made, cols.flow(s, "dG"), "gradients leaving"))]
            found.others_leaving[s] = [*leaving, *minus(made_last)]
            if made_last:
                lp.row(found.others_leaving[s], low=0.0, family="gradients leaving")
            due = [(1.0, cols.queue(due, released, updated, "updates due"))]
            if single:
                came = [*cols.flow(s, "dG"), *cols.flow(s, "rG")]
                went = [*[(grad_gb * a, c) for a, c in updated], *cols.flow(s, "wG"), *cols.flow(s, "uG")]
                waiting = [(1.0, cols.queue(waiting, came, went, "gradients on the host"))]
                found.waiting[s] = waiting
            if p.has_nvme:
                used = cols.flow(s, "aN", state_gb)
                read = [(1.0, cols.queue(read, cols.flow(s, "rO"), used, "states read"))]
                written = [(1.0, cols.queue(written, used, cols.flow(s, "wO"), "states to write"))]
                found.staged[s] = [*read, *written]
            homeless = cols.flow(s, "aL", param_gb)
            if homeless:
                lp.row([*updated, *minus(cols.flow(s, "aL"))], low=0.0, family="new parameters")
            going = [*cols.flow(s, "uP"), *cols.flow(s, "wP")]
            new = [(1.0, cols.queue(new, homeless, going, "new parameters"))]
            found.staged[s] = [*found.staged[s], *new]
        link.end(b, [leaving, due, waiting, read, written, new, *brought])
    link.close()
    _once_per_step(cols, parked)
    return found


def _parked(cols: Columns) -> Terms:
    """GB of gradients that wait for the norm on NVMe: written there and read once more."""
    if cols.p.semantics != "exact-clip" or not cols.p.has_nvme:
        return []
    return cols.over_units(lambda u: cols.placed(u, "grads", "nvme", cols.units[u].grads_gb))


def _brought(
    cols: Columns,
    s: int,
    found: Updates,
    queues: list[Terms],
    due_here: tuple[Terms, Terms],
    due_last: tuple[Terms, Terms],
) -> list[Terms]:
    """Updates on the device of states that come and go: what is due, what has come, what leaves, after window s; and
    the gradients there, which are those of all that is due unless some leave and come back."""
    owners = [u for u in cols.units if u.gparams]
    state_gb = min((u.states_gb / u.gparams for u in owners), default=0.0)
    grad_gb = float(cols.p.workload.training.grad_bytes)
    updated = cols.flow(s, "aD")
    uses = [(state_gb * a, c) for a, c in updated]
    due, come, left, *gradients = queues
    there, made_last = (*gradients, due)[0], due_last[len(gradients)]
    # updates of the window run before its op, but for those of units that share it
    found.brought[s] = [(grad_gb * a, c) for a, c in (*there, *minus(updated))]
    found.brought[s] += [*come, *minus(uses), *left, *minus(cols.flow(s, "dS"))]
    due = [(1.0, cols.queue(due, due_here[0], updated, "updates due"))]
    if due_last[0]:
        cols.lp.row([*due, *minus(due_last[0])], low=0.0, family="updates due")
    come = [(1.0, cols.queue(come, cols.flow(s, "uS"), uses, "states brought"))]
    left = [(1.0, cols.queue(left, uses, cols.flow(s, "dS"), "states leaving"))]
    if gradients:
        came = [*due_here[1], *cols.flow(s, "uG", 1.0 / grad_gb)]
        gradients = [[(1.0, cols.queue(there, came, updated, "gradients brought"))]]
    there = (*gradients, due)[0]
    found.brought_after[s] = [*[(grad_gb * a, c) for a, c in (*there, *minus(made_last))], *come, *left]
    return [due, come, left, *gradients]


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
    p, lp = cols.p, cols.lp
    on_drive: Terms = []
    uploaded: Terms = []
    to_drive: Terms = []
    accumulated: Terms = []
    homeless: Terms = []
    brought: dict[str, Terms] = {name: [] for name in ("uQ", "dQ", "rS", "wS")}
    for u, unit in enumerate(cols.units):
        for k, c in cols.choices[u].place.items():
            mode = MODES[k]
            if mode.updated == "host" and mode.states == "nvme":
                on_drive.append((unit.gparams, c))
            if mode.updated == "host" and mode.params != "host":
                homeless.append((unit.gparams, c))
            if mode.grads != "device" and len(p.blocks) > 1:
                accumulated.append((unit.accumulate_s, c))
            if mode.updated == "brought" and mode.states == "nvme":
                brought["rS"].append((unit.states_gb, c))
                brought["wS"].append((unit.states_gb, c))
        uploaded += cols.params_of(u, "host", "device")
        to_drive += cols.params_of(u, "host", "nvme")
        moved, stored = cols.params_of(u, "brought", "host", "nvme"), cols.params_of(u, "brought", "nvme")
        for name, terms in (("uQ", moved), ("dQ", moved), ("rS", [] if p.has_master else stored), ("wS", stored)):
            brought[name] += terms
    totals = [
        ("aN", on_drive, "updates of states on NVMe"),
        ("uP", uploaded, "parameters going home"),
        ("wP", to_drive, "parameters going home"),
        ("aL", homeless, "new parameters"),
    ]
    if not p.has_master:
        totals += [("dP", uploaded, "old parameters to the host"), ("rP", to_drive, "old parameters to the host")]
    batches = p.workload.training.gradient_accumulation_steps
    totals.append(("acc", times(float(batches - 1), accumulated), "gradients added on the host"))
    totals += [(name, moved, "states brought") for name, moved in brought.items() if name in cols.flows[0]]
    if parked:
        totals += [(name, parked, "gradients on NVMe") for name in ("wG", "rG")]
    for name, amount, family in totals:
        lp.row([*cols.over_step(name), *minus(amount)], low=0.0, high=0.0, family=family)


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
