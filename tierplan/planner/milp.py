"""The planning program: placements and activation choices over windows, with transfers as fluid queues.

The mathematics, term by term and in the names used here, is in docs/planner.md. With zero margins and no integers the
program is a relaxation: every schedule of the language, cut at the ends of its compute ops, is a point of it, so its
optimum is a lower bound on the step time. With margins and integers it is what plans are rounded from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tierplan.planner.fluid import COMPUTE, CORES, DOWN, MODES, READ, UP, WRITE, Problem, Window
from tierplan.planner.program import Program, Solution, Terms

__all__ = ["ACTIONS", "Fractions", "Margins", "Model", "build", "fractions"]

TIERS = ("device", "host", "nvme")
ACTIONS = ("keep", "recompute", "host", "nvme")
TRANSFER_COST = 3e-6
"""Seconds of objective per GB moved, against pointless transfers. `Model.step_bound_s` takes them out again."""
BLOCK_LAYERS = 6
"""Identical neighbouring units whose activation choices are counted together in integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Margins:
    """What the plan leaves unused, because the fluid model cannot see it."""

    device_gb: float = 0.0
    host_gb: float = 0.0
    rate_frac: Mapping[str, float] = field(default_factory=dict)
    """Share of a stream's rate or a shared limit that is planned with, by name; 1 where absent."""
    relaxed: bool = False
    """For bounds: also what no rounded plan does, such as moving the smallest tensors or dropping inputs."""
    transients: bool = True
    """Count what is on the device only while an op runs; without, the bound also holds for tiled micro-batches."""
    elastic: str = ""
    """This tier's capacity may be exceeded, and the excess is minimised instead of the time: what does it lack?"""


@dataclass
class Model:
    """The program with the columns that a plan is read from."""

    program: Program
    problem: Problem
    place: list[dict[int, int]]
    """Per unit: mode number -> column."""
    action: list[list[dict[str, int]]]
    """Per unit and slot group: action -> column."""
    tau: list[tuple[int, int]]
    """Per window: column of its duration, copies of its block."""
    excess: dict[str, int]
    """Tier -> column of the GB by which it is exceeded (elastic programs)."""

    def step_bound_s(self, objective_bound: float) -> float:
        """A bound on the step time alone, from a bound on the objective, which also charges `TRANSFER_COST` per GB.

        In a step of T seconds no stream moves more than T times its rate, so what transfers add is at most that.
        """
        r = self.problem.rates
        per_s = sum(max(rates.values(), default=0.0) for rates in (r.up, r.down, r.read, r.write)) + 2 * r.adam + 1.0
        return objective_bound / (1.0 + TRANSFER_COST * per_s)


@dataclass(frozen=True, slots=True)
class Fractions:
    """A solution's decisions: shares per mode and per action."""

    place: tuple[Mapping[int, float], ...]
    action: tuple[tuple[Mapping[str, float], ...], ...]
    step_s: float


def build(problem: Problem, *, margins: Margins | None = None, integral: bool = False) -> Model:
    """The program of one problem. `integral` adds whole counts of activation choices per run of identical units."""
    return _Builder(problem, margins or Margins(), integral).model()


def fractions(model: Model, solution: Solution) -> Fractions:
    """The decisions in a usable solution."""
    v = solution.values
    return Fractions(
        place=tuple({k: v[c] for k, c in choice.items()} for choice in model.place),
        action=tuple(tuple({a: v[c] for a, c in group.items()} for group in groups) for groups in model.action),
        step_s=sum(v[c] * copies for c, copies in model.tau),
    )


class _Builder:
    """Walks the windows and adds their rows. A *state* is the column of a queue's content at the end of a window."""

    def __init__(self, problem: Problem, margins: Margins, integral: bool) -> None:
        self.p = problem
        self.margins = margins
        self.integral = integral
        self.lp = Program()
        self.units = problem.units
        self.place: list[dict[int, int]] = []
        self.action: list[list[dict[str, int]]] = []
        self.tau: list[tuple[int, int]] = []
        self.windows = problem.windows
        self.excess: dict[str, int] = {}
        self.flows: list[dict[str, int]] = []
        """Per window: flow name -> column, in GB (Adam: 1e9 parameters)."""
        self.early: list[dict[str, int]] = []
        """Per window: the part of a flow before the window's compute op starts."""

    def model(self) -> Model:
        self._decisions()
        if self.integral:
            self._counts()
        for s, window in enumerate(self.windows):
            self._flows(s, window)
        self._activations()
        self._parameters()
        self._gradients_and_updates()
        self._deadlines()
        self._memory()
        self._streams()
        return Model(self.lp, self.p, self.place, self.action, self.tau, self.excess)

    # ---- decisions ----

    def _decisions(self) -> None:
        lp, p = self.lp, self.p
        if self.margins.elastic:
            self.excess[self.margins.elastic] = lp.column(cost=1.0)
        for u, unit in enumerate(self.units):
            choice = {k: lp.column(high=1.0) for k in p.modes(u)}
            lp.row([(1.0, c) for c in choice.values()], low=1.0, high=1.0, family="one placement per unit")
            self.place.append(choice)
            groups = []
            for group in unit.groups:
                allowed = ["keep"]
                if group.recomputable:
                    allowed.append("recompute")
                if not group.slots and self.margins.relaxed:
                    allowed.append("recompute")  # several units from one input: no plan of ours, but a schedule could
                if (group.movable or self.margins.relaxed) and p.host_gb:
                    allowed.append("host")
                    if p.has_nvme:
                        allowed.append("nvme")
                columns = {a: lp.column(high=1.0) for a in allowed}
                lp.row([(1.0, c) for c in columns.values()], low=1.0, high=1.0, family="one action per tensor")
                groups.append(columns)
            self.action.append(groups)

    def _counts(self) -> None:
        """Over runs of identical neighbours, each action is chosen a whole number of times."""
        start = 0
        for u in range(1, len(self.units) + 1):
            same = u < len(self.units) and _alike(self.p, start, u) and u - start < BLOCK_LAYERS
            if same:
                continue
            run = range(start, u)
            for g in range(len(self.units[start].groups)):
                names = list(self.action[start][g])
                if len(names) > 1:
                    for name in names:
                        count = self.lp.column(high=float(len(run)), integer=True)
                        terms: Terms = [(1.0, self.action[i][g][name]) for i in run]
                        self.lp.row([*terms, (-1.0, count)], low=0.0, high=0.0, family="whole counts")
            start = u

    def placed(self, u: int, part: str, where: str, scale: float = 1.0) -> Terms:
        """scale x the share of unit u whose `params`, `states` or `grads` are `where`."""
        return [(scale, c) for k, c in self.place[u].items() if getattr(MODES[k], part) == where]

    def away(self, u: int, part: str, scale: float = 1.0) -> Terms:
        """scale x the share that is not on the device."""
        return [(scale, c) for k, c in self.place[u].items() if getattr(MODES[k], part) != "device"]

    def acted(self, u: int, names: tuple[str, ...], *, inputs: bool, scale: float = 1.0) -> Terms:
        """scale x GB of unit u's saved tensors (`inputs`: of its input) with one of these actions."""
        found: Terms = []
        for group, columns in zip(self.units[u].groups, self.action[u], strict=True):
            if (not group.slots) == inputs:
                found += [(scale * group.gb, columns[a]) for a in names if a in columns]
        return found

    # ---- windows ----

    def _flows(self, s: int, window: Window) -> None:
        """Durations and flow columns of one window. Only flows that can exist there get a column."""
        lp, p = self.lp, self.p
        copies = p.blocks[window.block].copies
        charged = 0.0 if self.margins.elastic else 1.0
        self.tau.append((lp.column(cost=charged * copies), copies))
        names = ["uA", "uW", "dA", "dG"] if p.host_gb else []
        if p.has_nvme and p.host_gb:
            names += ["rA", "wA", "rW", "rO", "wO", "wP"]
        block = p.blocks[window.block]
        may_update = p.semantics == "delayed-1" or (block.first and window.phase == "fwd")
        may_update = may_update or (p.semantics == "in-backward" and block.last and window.phase == "bwd")
        if p.rates.adam and may_update:
            names += ["aH", "aN", "uP", "dP", "rP", "acc"]
        elif p.rates.adam and block.last:
            names += ["dP", "rP", "acc"]
        elif p.rates.adam:
            names += ["acc"]
        if not p.has_nvme:
            names = [n for n in names if n not in ("aN", "rP")]
        if p.has_master:
            names = [n for n in names if n not in ("dP", "rP")]
        if len(p.blocks) == 1 and p.turn == 1:
            names = [n for n in names if n != "acc"]
        self.flows.append({n: lp.column(cost=charged * TRANSFER_COST * copies) for n in names})
        self.early.append({n: lp.column() for n in ("uA", "uW", "d") if p.host_gb})

    def flow(self, s: int, name: str, scale: float = 1.0) -> Terms:
        """scale x a flow of window s; nothing where that flow cannot exist."""
        column = self.flows[s].get(name)
        return [] if column is None else [(scale, column)]

    def compute(self, s: int) -> tuple[float, Terms]:
        """Seconds of window s's compute ops: a constant and what decisions add."""
        window, p = self.windows[s], self.p
        unit, turn = self.units[window.unit], p.turn
        if window.phase == "fwd":
            return unit.fwd_s * turn, []
        terms: Terms = []
        for group, columns in zip(unit.groups, self.action[window.unit], strict=True):
            if "recompute" in columns:
                seconds = group.recompute_s if group.slots else self._output_s(window.unit - 1)
                terms.append((seconds * turn, columns["recompute"]))
        if p.blocks[window.block].last:
            terms += self.placed(window.unit, "states", "device", unit.update_s)
        return unit.bwd_s * turn, terms

    def _output_s(self, u: int) -> float:
        """At least what making unit u's output again takes beyond making its saved tensors again."""
        unit = self.units[u]
        return max(0.0, unit.fwd_s - sum(g.recompute_s for g in unit.groups))

    def block_windows(self, b: int) -> list[int]:
        return [s for s, w in enumerate(self.windows) if w.block == b]

    def queue(self, before: Terms, inflow: Terms, outflow: Terms, family: str) -> int:
        """The column of a queue's content: before + inflow - outflow, never negative."""
        state = self.lp.column()
        self.lp.row([(1.0, state), *_minus(before), *_minus(inflow), *outflow], low=0.0, high=0.0, family=family)
        return state

    # ---- activations: out behind the forward that made them, back before the backward that needs them ----

    def _activations(self) -> None:
        p, lp, n = self.p, self.lp, len(self.units)
        self.kept: list[Terms] = []  # kept on the device when the window's op starts
        self.kept_after: list[Terms] = []
        self.leaving: list[Terms] = []  # queued to leave when the window's op starts
        self.leaving_after: list[Terms] = []
        self.back: list[Terms] = []  # brought back and not yet used, when the window's op starts
        self.acts_on_host: list[Terms] = []
        self.acts_on_nvme: list[Terms] = []
        for b in range(len(p.blocks)):
            kept: Terms = []
            out: Terms = []
            back: Terms = []
            host: Terms = []
            drive: Terms = []
            for s in self.block_windows(b):
                window, u = self.windows[s], self.windows[s].unit
                turn = float(p.turn)
                # the head's turn runs forward and backward of one micro-batch after the other
                own = 1.0 if u == n - 1 else turn
                made: Terms = []
                stay: Terms = []
                need: Terms = []
                gone: Terms = []
                if window.phase == "fwd":
                    made += self.acted(u, ("host", "nvme"), inputs=False, scale=own)
                    stay += self.acted(u, ("keep",), inputs=False, scale=own)
                    if u + 1 < n:
                        made += self.acted(u + 1, ("host", "nvme"), inputs=True, scale=turn)
                        stay += self.acted(u + 1, ("keep",), inputs=True, scale=turn)
                else:
                    need += self.acted(u, ("host", "nvme"), inputs=False, scale=own)
                    need += self.acted(u, ("host", "nvme"), inputs=True, scale=turn)
                    gone += self.acted(u, ("keep",), inputs=False, scale=own)
                    gone += self.acted(u, ("keep",), inputs=True, scale=turn)
                self.kept.append(kept)
                self.leaving.append(out)
                early_back = [(1.0, c) for k, c in self.early[s].items() if k == "uA"]
                self.back.append([*back, *early_back])
                if need and early_back:
                    lp.row(
                        [*back, *early_back, *[(-a / p.turn, c) for a, c in need]],
                        low=0.0,
                        family="back before backward",
                    )
                kept = [(1.0, self.queue(kept, stay, gone, "kept activations"))]
                moves = bool(self.flows[s])
                if moves:
                    lp.row([*self.flow(s, "uA"), *_minus(early_back)], low=0.0, family="early part")
                    out = [(1.0, self.queue(out, made, self.flow(s, "dA"), "activations leaving"))]
                    if made:  # what the turn's last op makes cannot leave inside the window
                        lp.row([*out, *[(-a / p.turn, c) for a, c in made]], low=0.0, family="activations leaving")
                    back = [(1.0, self.queue(back, self.flow(s, "uA"), need, "activations back"))]
                    came = [*self.flow(s, "dA"), *self.flow(s, "rA")]
                    went = [*self.flow(s, "uA"), *self.flow(s, "wA")]
                    host = [(1.0, self.queue(host, came, went, "activations on the host"))]
                    if p.has_nvme:
                        drive = [
                            (1.0, self.queue(drive, self.flow(s, "wA"), self.flow(s, "rA"), "activations on NVMe"))
                        ]
                self.kept_after.append(kept)
                self.leaving_after.append(out)
                self.acts_on_host.append(host)
                self.acts_on_nvme.append(drive)
            for state in (out, back, host, drive):
                if state:
                    lp.row(state, low=0.0, high=0.0, family="nothing left at the end")
            if p.has_nvme and p.host_gb:
                stored: Terms = []
                for u in range(n):
                    own = 1.0 if u == n - 1 else float(p.turn)
                    stored += self.acted(u, ("nvme",), inputs=False, scale=own)
                    stored += self.acted(u, ("nvme",), inputs=True, scale=float(p.turn))
                written = [t for s in self.block_windows(b) for t in self.flow(s, "wA")]
                lp.row([*written, *_minus(stored)], low=0.0, high=0.0, family="activations on NVMe")

    # ---- parameters: fetched for every pass over a unit ----

    def _parameters(self) -> None:
        p, lp, n = self.p, self.lp, len(self.units)
        self.fetched: list[Terms] = []
        if not p.host_gb:
            self.fetched = [[] for _ in self.windows]
            return
        link = _BlockLink(self, 2 if p.has_nvme else 1)
        for b in range(len(p.blocks)):
            ahead, staged = link.start(b)[0], link.start(b)[1] if p.has_nvme else []
            for s in self.block_windows(b):
                window = self.windows[s]
                unit = self.units[window.unit]
                owner = unit.fetched_from
                reads = unit.fwd_reads_params if window.phase == "fwd" else unit.bwd_reads_params
                need: Terms = []
                need_read: Terms = []
                if reads:
                    need = self.away(owner, "params", self.units[owner].params_gb)
                    need_read = self.placed(owner, "params", "nvme", self.units[owner].params_gb)
                    if window.unit == n - 1 and unit.name != self.units[owner].name and unit.gparams:
                        need += self.away(window.unit, "params", unit.params_gb)
                        need_read += self.placed(window.unit, "params", "nvme", unit.params_gb)
                early: Terms = [(1.0, self.early[s]["uW"])]
                present = [*ahead, *early]
                self.fetched.append(present)
                if need:
                    lp.row([*present, *_minus(need)], low=0.0, family="parameters before compute")
                lp.row([*self.flow(s, "uW"), *_minus(early)], low=0.0, family="early part")
                used = [] if window.unit == n - 1 and window.phase == "fwd" else need  # the head's turn fetches once
                used_read = [] if window.unit == n - 1 and window.phase == "fwd" else need_read
                ahead = [(1.0, self.queue(ahead, self.flow(s, "uW"), used, "parameters fetched"))]
                if p.has_nvme:
                    staged = [(1.0, self.queue(staged, self.flow(s, "rW"), used_read, "parameters read"))]
            link.end(b, [ahead, staged] if p.has_nvme else [ahead])
        link.close()

    # ---- gradients, states, updates ----

    def _gradients_and_updates(self) -> None:
        p, lp = self.p, self.lp
        nothing: list[Terms] = [[] for _ in self.windows]
        self.grads_leaving: list[Terms] = list(nothing)
        self.grads_waiting: list[Terms] = list(nothing)
        self.states_staged: list[Terms] = list(nothing)
        if not p.host_gb or not p.rates.adam:
            return
        t = p.workload.training
        single = len(p.blocks) == 1
        grad_gb = float(t.grad_bytes)  # per 1e9 parameters
        state_gb = float(t.state_bytes)
        link = _BlockLink(self, 5)
        for b, block in enumerate(p.blocks):
            leaving, due, waiting, read, written = link.start(b)
            for s in self.block_windows(b):
                window = self.windows[s]
                unit = self.units[window.unit]
                made: Terms = []
                released: Terms = []
                if window.phase == "bwd" and unit.gparams:
                    if single or block.last:
                        made = self.away(window.unit, "states", unit.grads_gb)
                    else:
                        made = self.away(window.unit, "grads", unit.grads_gb)
                    if block.last:
                        released = self.away(window.unit, "states", unit.gparams)
                adam = [*self.flow(s, "aH"), *self.flow(s, "aN")]
                self.grads_leaving[s] = leaving
                leaving_after = [(1.0, self.queue(leaving, made, self.flow(s, "dG"), "gradients leaving"))]
                if made:
                    lp.row([*leaving_after, *_minus(made)], low=0.0, family="gradients leaving")
                leaving = leaving_after
                if p.semantics == "delayed-1":
                    # any time in the step; the gradients of the step before wait until then
                    released = (
                        self.away(window.unit, "states", unit.gparams) if window.phase == "bwd" and block.last else []
                    )
                due = [(1.0, self.queue(due, released, adam, "updates due"))]
                if single:
                    waiting = [
                        (
                            1.0,
                            self.queue(
                                waiting,
                                self.flow(s, "dG"),
                                [(grad_gb * a, c) for a, c in adam],
                                "gradients on the host",
                            ),
                        )
                    ]
                    self.grads_waiting[s] = waiting
                if p.has_nvme:
                    used = self.flow(s, "aN", state_gb)
                    read = [(1.0, self.queue(read, self.flow(s, "rO"), used, "states read"))]
                    written = [(1.0, self.queue(written, used, self.flow(s, "wO"), "states to write"))]
                    self.states_staged[s] = [*read, *written]
            link.end(b, [leaving, due, waiting, read, written])
        link.close()
        self._totals()

    def _totals(self) -> None:
        """What moves once per step, whenever: updates by kind, new parameters going home, old ones coming."""
        p, lp = self.p, self.lp
        everywhere = range(len(self.windows))
        on_drive: Terms = []
        uploaded: Terms = []
        to_drive: Terms = []
        accumulated: Terms = []
        for u, unit in enumerate(self.units):
            on_drive += self.placed(u, "states", "nvme", unit.gparams)
            for k, c in self.place[u].items():
                mode = MODES[k]
                if mode.states != "device" and mode.params == "device":
                    uploaded.append((unit.params_gb, c))
                if mode.params == "nvme":
                    to_drive.append((unit.params_gb, c))
                if mode.states != "device" and mode.grads != "device":
                    accumulated.append((unit.accumulate_s, c))
        self._total("aN", on_drive, "updates of states on NVMe")
        self._total("uP", uploaded, "parameters going home")
        self._total("wP", to_drive, "parameters going home")
        if not p.has_master:
            self._total("dP", uploaded, "old parameters to the host")
            self._total("rP", to_drive, "old parameters to the host")
        batches = p.workload.training.gradient_accumulation_steps
        if batches > 1:
            times = float(batches - 1)
            self._total("acc", [(times * a, c) for a, c in accumulated], "gradients added on the host")
        if p.semantics == "exact-clip" and p.has_nvme:
            # gradients that wait on NVMe are written and read once more
            parked = [t for u, unit in enumerate(self.units) for t in self.placed(u, "grads", "nvme", unit.grads_gb)]
            if parked:
                for name in ("gW", "gR"):
                    for s in everywhere:
                        self.flows[s][name] = lp.column(cost=TRANSFER_COST)
                    self._total(name, parked, "gradients on NVMe")

    def _total(self, name: str, amount: Terms, family: str) -> None:
        flows = [
            t for s, w in enumerate(self.windows) for t in self.flow(s, name, float(self.p.blocks[w.block].copies))
        ]
        self.lp.row([*flows, *_minus(amount)], low=0.0, high=0.0, family=family)

    def _deadlines(self) -> None:
        """Units' updates are nested in time: released last, needed first. Each nest has room for what it holds."""
        p, lp = self.p, self.lp
        if p.semantics == "delayed-1" or not self.units:
            return
        n = len(self.units)
        forward = [s for s in self.block_windows(0) if self.windows[s].phase == "fwd"]
        backward = [s for s in self.block_windows(len(p.blocks) - 1) if self.windows[s].phase == "bwd"]
        by_unit = {self.windows[s].unit: s for s in backward}
        spent: Terms = []  # Adam between unit u's backward and its next forward, 1e9 parameters
        sent: Terms = []
        passed: Terms = []  # seconds between the same two moments
        demand: Terms = []
        upload: Terms = []
        for u in range(n):
            unit, s = self.units[u], forward[u]
            adam = [*self.flow(s, "aH"), *self.flow(s, "aN")]
            demand += self.away(u, "states", unit.gparams)
            for k, c in self.place[u].items():
                if MODES[k].states != "device" and MODES[k].params == "device":
                    upload.append((unit.params_gb, c))
            fixed, extra = self.compute(s)
            if unit.gparams and p.host_gb and p.rates.adam:
                done, gone = [*spent, *adam], [*sent, *self.flow(s, "uP")]
                lp.row([*done, *_minus(demand)], low=0.0, family="updates before the next forward")
                lp.row([*gone, *_minus(upload)], low=0.0, family="uploads before the next forward")
                lag: Terms = []
                for k, c in self.place[u].items():
                    lag.append((_chain(p, u, k), c))
                idle: Terms = [(1.0, self.tau[s][0]), *_minus(extra)]
                lp.row([*passed, *idle, *_minus(lag)], low=fixed, family="from gradient to next forward")
            elif unit.gparams:
                pass
            spent = self._carry(spent, [*adam, *self._adam(by_unit[u])])
            sent = self._carry(sent, [*self.flow(s, "uP"), *self.flow(by_unit[u], "uP")])
            passed = self._carry(passed, [(1.0, self.tau[s][0]), (1.0, self.tau[by_unit[u]][0])])

    def _adam(self, s: int) -> Terms:
        return [*self.flow(s, "aH"), *self.flow(s, "aN")]

    def _carry(self, before: Terms, more: Terms) -> Terms:
        """A column equal to the sum, so that prefix sums stay sparse."""
        if not before and not more:
            return []
        column = self.lp.column()
        self.lp.row([(1.0, column), *_minus(before), *_minus(more)], low=0.0, high=0.0, family="prefix sums")
        return [(1.0, column)]

    # ---- capacities ----

    def _memory(self) -> None:
        p, lp, n = self.p, self.lp, len(self.units)
        several = len(p.blocks) > 1
        resident = self._sum(lambda u: [(self.units[u].params_gb, c) for c in self._where(u, "params", "device")])
        resident += self._sum(lambda u: self.placed(u, "states", "device", self.units[u].states_gb))
        on_host = self._sum(lambda u: self.placed(u, "params", "host", self.units[u].params_gb))
        on_host += self._sum(lambda u: self.placed(u, "states", "host", self.units[u].states_gb))
        on_drive = self._sum(lambda u: self.placed(u, "params", "nvme", self.units[u].params_gb))
        on_drive += self._sum(lambda u: self.placed(u, "states", "nvme", self.units[u].states_gb))
        host_grads = self._sum(lambda u: self.placed(u, "grads", "host", self.units[u].grads_gb))
        all_grads = self._sum(lambda u: self.away(u, "states", self.units[u].grads_gb))
        accumulated = self._sum(lambda u: self.placed(u, "grads", "device", self.units[u].grads_gb)) if several else []
        resident, on_host, on_drive = map(self._column_for, (resident, on_host, on_drive))
        host_grads, all_grads, accumulated = map(self._column_for, (host_grads, all_grads, accumulated))
        device_high, host_high = p.device_gb - self.margins.device_gb, p.host_gb - self.margins.host_gb
        over_device, over_host, over_drive = ([(-1.0, self.excess[t])] if t in self.excess else [] for t in TIERS)
        tied = 0.0
        clipping: Terms = []
        for s, window in enumerate(self.windows):
            u, unit, block = window.unit, self.units[window.unit], p.blocks[window.block]
            fixed = p.shared_gb
            drained = [(-1.0, c) for k, c in self.early[s].items() if k == "d"]
            held = [
                *resident,
                *self.kept[s],
                *self.leaving[s],
                *self.grads_leaving[s],
                *drained,
                *self.back[s],
                *self.fetched[s],
            ]
            if several and not block.first:
                held += accumulated
            if window.phase == "fwd":
                fixed += (unit.fwd_fixed_gb if self.margins.transients else 0.0) + unit.saved_gb
                lp.row([*held, *over_device], high=device_high - fixed, family="device memory")
                if p.turn > 1 and u != n - 1:
                    end = [*resident, *self.kept_after[s], *self.leaving_after[s]]
                    lp.row([*end, *over_device], high=device_high - p.shared_gb, family="device memory")
            else:
                tied += unit.tied_gb
                fixed += (unit.bwd_fixed_gb if self.margins.transients else 0.0) + (
                    tied if not (tied and u == 0) else 0.0
                )
                if not several or block.first or p.turn > 1:
                    fixed += unit.grads_gb
                else:
                    held += self.placed(u, "grads", "host", unit.grads_gb)
                if p.semantics == "exact-clip" and block.last and not several:
                    held += clipping
                    clipping = [*clipping, *self.placed(u, "states", "device", unit.grads_gb)]
                    if len(clipping) > 4:
                        clipping = self._column_for(clipping)
                held += [
                    (g.gb, columns["recompute"])
                    for g, columns in zip(unit.groups, self.action[u], strict=True)
                    if "recompute" in columns
                ]
                lp.row([*held, *over_device], high=device_high - fixed, family="device memory")
            if not p.host_gb:
                continue
            stored = [*on_host, *self.acts_on_host[s], *self.states_staged[s], *self.grads_waiting[s]]
            if several and not (block.first and window.phase == "fwd") and not (block.last and window.phase == "bwd"):
                stored += host_grads if not block.first or u == 0 else []
            if several and block.last and window.phase == "bwd" and u == 0 and p.semantics == "exact-clip":
                stored += host_grads
            if p.semantics == "delayed-1":
                stored += all_grads
            lp.row([*stored, *over_host], high=host_high, family="host memory")
            if p.has_nvme and self.acts_on_nvme[s]:
                lp.row([*on_drive, *self.acts_on_nvme[s], *over_drive], high=p.nvme_gb, family="NVMe capacity")

    def _where(self, u: int, part: str, where: str) -> list[int]:
        return [c for k, c in self.place[u].items() if getattr(MODES[k], part) == where]

    def _sum(self, of: object) -> Terms:
        return [t for u in range(len(self.units)) for t in of(u)]  # type: ignore[operator]

    def _column_for(self, terms: Terms) -> Terms:
        """One column equal to a long sum that many rows use."""
        return self._carry([], terms) if len(terms) > 1 else terms

    def _streams(self) -> None:
        """Every stream and every shared limit has the window's duration, and early parts its idle time."""
        p, lp, rates = self.p, self.lp, self.p.rates
        per_s: dict[str, tuple[str, float]] = {
            "uA": (UP, rates.up["acts"]),
            "uW": (UP, rates.up["params"]),
            "uP": (UP, rates.up["params"]),
            "dA": (DOWN, rates.down["acts"]),
            "dG": (DOWN, rates.down["grads"]),
            "dP": (DOWN, rates.down["params"]),
            "rA": (READ, rates.read["acts"]),
            "rW": (READ, rates.read["params"]),
            "rP": (READ, rates.read["params"]),
            "rO": (READ, rates.read["states"]),
            "gR": (READ, rates.read["grads"]),
            "wA": (WRITE, rates.write["acts"]),
            "wP": (WRITE, rates.write["params"]),
            "wO": (WRITE, rates.write["states"]),
            "gW": (WRITE, rates.write["grads"]),
            "aH": (CORES, rates.adam),
            "aN": (CORES, rates.adam),
            "acc": (CORES, 1.0),
        }
        norm_s = sum(u.norm_s for u in self.units)
        for s, window in enumerate(self.windows):
            fixed, extra = self.compute(s)
            tau = self.tau[s][0]
            lp.row([(1.0, tau), *_minus(extra)], low=fixed, family=COMPUTE)
            by_stream: dict[str, Terms] = {}
            for name, column in self.flows[s].items():
                stream, rate = per_s[name]
                rate *= self.margins.rate_frac.get(stream, 1.0)
                by_stream.setdefault(stream, []).append((1.0 / rate, column))
            for stream, terms in by_stream.items():
                lp.row([*terms, (-1.0, tau)], high=0.0, family=stream)
            if p.host_gb:
                early = self.early[s]
                lp.row([*self.flow(s, "dA"), *self.flow(s, "dG"), (-1.0, early["d"])], low=0.0, family="early part")
                queued = [*self.leaving[s], *self.grads_leaving[s]]
                lp.row([*queued, (-1.0, early["d"])], low=0.0, family="early part")
                up = [(1 / rates.up["acts"], early["uA"]), (1 / rates.up["params"], early["uW"])]
                down: Terms = [(1 / max(rates.down["acts"], rates.down["grads"]), early["d"])]
                for terms in (up, down):
                    lp.row([(1.0, tau), *_minus(extra), *_minus(terms)], low=fixed, family="idle time")
            self._limits(s, window, tau, per_s)
        if norm_s and p.host_gb and p.rates.adam:
            busy = [(c / p.rates.adam, col) for s, w in enumerate(self.windows) for c, col in self._adam(s)]
            everything: Terms = [(float(copies), c) for c, copies in self.tau]
            lp.row([*everything, *_minus(busy)], low=0.0, family=CORES)

    def _limits(self, s: int, window: Window, tau: int, per_s: Mapping[str, tuple[str, float]]) -> None:
        p, unit = self.p, self.units[window.unit]
        for limit, loads in p.loads.items():
            terms: Terms = []
            for name, column in self.flows[s].items():
                if name != "acc" and (load := loads.get(per_s[name][0], 0.0)):
                    terms.append((load, column))
            taken = (unit.fwd_load if window.phase == "fwd" else unit.bwd_load).get(limit, 0.0) * p.turn
            if window.phase == "bwd":
                for group, columns in zip(unit.groups, self.action[window.unit], strict=True):
                    if "recompute" in columns and (load := group.recompute_load.get(limit, 0.0)):
                        terms.append((load * p.turn, columns["recompute"]))
            usable = self.margins.rate_frac.get(limit, 1.0)
            if terms:
                self.lp.row([*terms, (-usable, tau)], high=-taken, family=limit)
            elif taken:
                self.lp.row([(usable, tau)], low=taken, family=limit)


class _BlockLink:
    """States that run on from one block of micro-batches into the next, and from the step's end into the next step.

    The middle block stands for the average of its copies: what its average state gains from start to end, times the
    copies, is what the last block starts with beyond what the first one ended with.
    """

    def __init__(self, builder: _Builder, num: int) -> None:
        self.builder = builder
        self.blocks = builder.p.blocks
        self.starts = [[[(1.0, builder.lp.column())] for _ in range(num)] for _ in self.blocks]
        self.ends: list[list[Terms]] = []

    def start(self, b: int) -> list[Terms]:
        return [list(t) for t in self.starts[b]]

    def end(self, b: int, states: list[Terms]) -> None:
        assert b == len(self.ends)
        self.ends.append(states)

    def close(self) -> None:
        lp = self.builder.lp

        def equal(left: Terms, right: Terms) -> None:
            lp.row([*left, *_minus(right)], low=0.0, high=0.0, family="from block to block")

        for k in range(len(self.starts[0])):
            first, last = 0, len(self.blocks) - 1
            equal(self.ends[last][k], self.starts[first][k])
            if len(self.blocks) == 2:
                equal(self.ends[first][k], self.starts[last][k])
            elif len(self.blocks) == 3:
                copies = float(self.blocks[1].copies)
                gain = [(copies * a, c) for a, c in self.ends[1][k]] + [(-copies * a, c) for a, c in self.starts[1][k]]
                lp.row(
                    [*gain, *_minus(self.starts[last][k]), *self.ends[first][k]],
                    low=0.0,
                    high=0.0,
                    family="from block to block",
                )


def _chain(problem: Problem, u: int, mode: int) -> float:
    """Least seconds from the end of a unit's last backward to the start of its next forward, in this placement."""
    m, chain = MODES[mode], problem.rates.chain_s
    if m.states == "device":
        return 0.0  # the update is part of the backward window
    return chain["nvme" if m.params == "nvme" else "host"][u]


def _alike(problem: Problem, a: int, b: int) -> bool:
    """Whether two units offer the same activation choices."""
    x, y = problem.units[a], problem.units[b]
    return (x.groups, x.fwd_s, x.bwd_s) == (y.groups, y.fwd_s, y.bwd_s)


def _minus(terms: Terms) -> Terms:
    return [(-a, c) for a, c in terms]
