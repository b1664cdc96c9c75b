"""With nothing to recompute, what to offload is a transport problem: the program against one written without it.

Here every tensor has flows of its own in every window, on each of the four hops between device, host and NVMe, and the
rules of precedence are sums over prefixes; the planner's program has one queue per hop instead. scipy solves this one.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from tests.planner.instances import MB, chain, small_machine
from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.scaling import with_capacity
from tierplan.planner.milp.amounts import problem
from tierplan.planner.milp.bounds import lower_bound
from tierplan.planner.milp.model import build, fractions
from tierplan.planner.milp.program import Solver
from tierplan.planner.milp.rounding import round_to_plan
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.candidates import PlanSimulator
from tierplan.sim.workloads.workload import Workload

DOWN, UP, READ, WRITE = "gpu0.d2h", "gpu0.h2d", "nvme.read", "nvme.write"
Expression = dict[object, float]


@dataclass(frozen=True)
class Tensor:
    """Made by the op of one window and needed by that of a later one."""

    size_mb: float
    made_at: int
    needed_at: int


class Transport:
    """The least sum of window durations, by linear programming over named variables, in MB and s."""

    def __init__(self, workload: Workload, machine: Machine) -> None:
        self.num = len(workload.units)
        self.workload, self.machine = workload, machine
        self.tensors = list(self._tensors())
        self.windows = range(2 * self.num)
        self.index: dict[object, int] = {}
        self.rows: list[tuple[Expression, float]] = []  # at most
        self.equal: list[tuple[Expression, float]] = []
        self._tensor_rows()
        self._window_rows()

    def optimum_s(self) -> float | None:
        """The least step time; None where nothing fits."""
        cost = np.zeros(len(self.index))
        for s in self.windows:
            cost[self.index["tau", s]] = 1.0
        upper, below = self._matrix(self.rows)
        same, to = self._matrix(self.equal)
        found = linprog(cost, A_ub=upper, b_ub=below, A_eq=same, b_eq=to, bounds=(0, None), method="highs")
        assert found.status in (0, 2), found.message
        return float(found.fun) if found.status == 0 else None

    def _tensors(self):
        for u, unit in enumerate(self.workload.units):
            backward = 2 * self.num - 1 - u
            for saved in unit.saved:
                yield Tensor(saved.size_bytes / MB, u, backward)
            if u:
                yield Tensor(unit.input_bytes / MB, u - 1, backward)

    def _tensor_rows(self) -> None:
        for t, tensor in enumerate(self.tensors):
            alive = range(tensor.made_at + 1, tensor.needed_at + 1)
            self._same({("keep", t): 1, ("host", t): 1, ("nvme", t): 1}, 1.0)
            away: Expression = {("host", t): -tensor.size_mb, ("nvme", t): -tensor.size_mb}
            on_drive: Expression = {("nvme", t): -tensor.size_mb}
            # it comes back before the op that needs it: in that op's window only in the part before the op
            back = {("up", t, s): 1.0 for s in alive[:-1]} | {("up early", t, alive[-1]): 1.0}
            self._same({("down", t, s): 1.0 for s in alive} | away, 0.0)
            self._same(back | away, 0.0)
            self._same({("write", t, s): 1.0 for s in alive} | on_drive, 0.0)
            self._same({("read", t, s): 1.0 for s in alive} | on_drive, 0.0)
            self._same({("up", t, alive[-1]): 1.0, ("up early", t, alive[-1]): -1.0}, 0.0)
            for s in alive:
                before = range(alive[0], s + 1)
                on_host = {("down", t, w): -1.0 for w in before} | {("write", t, w): 1.0 for w in before}
                on_host |= {("read", t, w): -1.0 for w in before} | {("up", t, w): 1.0 for w in before}
                self._most(on_host, 0.0)
                self._most({("read", t, w): 1.0 for w in before} | {("write", t, w): -1.0 for w in before}, 0.0)
                self._most({("up early", t, s): 1.0, ("up", t, s): -1.0}, 0.0)
                self._most({("down early", t, s): 1.0, ("down", t, s): -1.0}, 0.0)

    def _window_rows(self) -> None:
        rate = {
            s.name: s.rates["bytes"].at(1.0) / MB for s in self.machine.streams if s.name in (DOWN, UP, READ, WRITE)
        }
        capacity_mb = {t.kind: t.capacity_bytes / MB for t in self.machine.tiers}
        for s in self.windows:
            unit = self.workload.units[s if s < self.num else 2 * self.num - 1 - s]
            compute_s = (unit.forward if s < self.num else unit.backward)["s"]
            alive = [t for t, tensor in enumerate(self.tensors) if tensor.made_at < s <= tensor.needed_at]
            self._most({("tau", s): -1.0}, -compute_s)
            for flow, stream in (("down", DOWN), ("up", UP), ("read", READ), ("write", WRITE)):
                self._most({(flow, t, s): 1 / rate[stream] for t in alive} | {("tau", s): -1.0}, 0.0)
            for flow, stream in (("down early", DOWN), ("up early", UP)):
                self._most({(flow, t, s): 1 / rate[stream] for t in alive} | {("tau", s): -1.0}, -compute_s)
            for limit in self.machine.shared_limits:
                shared = {("read", t, s): 1 / rate[READ] for t in alive} | {
                    ("write", t, s): 1 / rate[WRITE] for t in alive
                }
                self._most(shared | {("tau", s): -limit.limit}, 0.0)
            made_mb = (sum(x.size_bytes for x in unit.saved) + unit.output_bytes) / MB
            gradients_mb = (unit.output_bytes + unit.input_bytes) / MB
            held: Expression = defaultdict(float)
            on_host: Expression = defaultdict(float)
            on_drive: Expression = defaultdict(float)
            for t in alive:
                tensor = self.tensors[t]
                for share in ("keep", "host", "nvme"):  # there, until it has left
                    held[share, t] += tensor.size_mb
                for w in range(tensor.made_at + 1, s):
                    held["down", t, w] -= 1.0
                    held["up", t, w] += 1.0
                held["down early", t, s] -= 1.0
                held["up early", t, s] += 1.0
                for w in range(tensor.made_at + 1, s + 1):
                    for flow, sign in (("down", 1.0), ("read", 1.0), ("up", -1.0), ("write", -1.0)):
                        on_host[flow, t, w] += sign
                    on_drive["write", t, w] += 1.0
                    on_drive["read", t, w] -= 1.0
            self._most(held, capacity_mb["device"] - (made_mb if s < self.num else gradients_mb))
            used = [t for t in alive if self.tensors[t].needed_at == s]
            used_mb = sum(self.tensors[t].size_mb for t in used)
            ending: Expression = defaultdict(float)  # what came during the op is there beside all that it uses
            for t in set(alive).difference(used):
                for share in ("keep", "host", "nvme"):
                    ending[share, t] += self.tensors[t].size_mb
                for w in range(self.tensors[t].made_at + 1, s + 1):
                    ending["down", t, w] -= 1.0
                    ending["up", t, w] += 1.0
            self._most(ending, capacity_mb["device"] - used_mb - (made_mb if s < self.num else gradients_mb))
            self._most(on_host, capacity_mb["host"])
            self._most(on_drive, capacity_mb["nvme"])

    def _most(self, terms: Expression, high: float) -> None:
        self.rows.append((self._known(terms), high))

    def _same(self, terms: Expression, value: float) -> None:
        self.equal.append((self._known(terms), value))

    def _known(self, terms: Expression) -> Expression:
        for name in terms:
            self.index.setdefault(name, len(self.index))
        return dict(terms)

    def _matrix(self, rows: list[tuple[Expression, float]]):
        entries = [(i, self.index[name], a) for i, (terms, _) in enumerate(rows) for name, a in terms.items()]
        where = ([e[0] for e in entries], [e[1] for e in entries])
        shape = (len(rows), len(self.index))
        return coo_matrix(([e[2] for e in entries], where), shape=shape).tocsr(), np.array([high for _, high in rows])


def instance(seed: int) -> tuple[Workload, Machine]:
    """A chain that cannot be recomputed, on a device that is too small for it."""
    rng = random.Random(seed)
    num = rng.choice((2, 3, 4, 5, 6))
    saved = [[rng.choice((2, 5, 10, 20)) for _ in range(rng.choice((1, 2)))] for _ in range(num)]
    border_mb = rng.choice((0.5, 1, 4))
    made = chain(
        forward_s=[rng.choice((0.05, 0.1, 0.2, 0.4)) for _ in range(num)],
        parameters=[0] * num,
        saved_mb=saved,
        border_mb=border_mb,
    )
    units = [replace(u, saved=tuple(replace(t, replayable=False) for t in u.saved)) for u in made.units]
    most_mb, all_mb = max(map(sum, saved)), sum(map(sum, saved))
    machine = small_machine(
        device_mb=most_mb + 3 * border_mb + rng.uniform(0.0, 0.9) * (all_mb - most_mb),
        host_mb=rng.uniform(0.1, 1.2) * all_mb,
        link_mb_per_s=rng.choice((20, 50, 100, 200)),
        read_mb_per_s=rng.choice((20, 50, 100)),
        write_mb_per_s=rng.choice((20, 40, 80)),
        ssd_bonus=rng.choice((None, 0.0, 0.3)),
    )
    return replace(made, units=tuple(units)), machine


@pytest.mark.parametrize("seed", range(40))
def test_offload_choices_against_a_transport_optimum(seed):
    workload, machine = instance(seed)
    expected_s = Transport(workload, machine).optimum_s()
    p = problem(workload, machine, semantics="in-backward")
    model = build(p)
    found = Solver().solve(model.program)
    assert found.usable == (expected_s is not None)
    if expected_s is None:
        return
    shares = fractions(model, found)
    assert shares.step_s == pytest.approx(expected_s, rel=1e-4)
    assert lower_bound(p).step_s <= expected_s * (1 + 1e-6)
    tried = PlanSimulator(workload, machine, Budget(100))(round_to_plan(p, shares))
    if tried.step_s is not None:
        assert tried.step_s >= expected_s * (1 - 1e-6)


def test_the_instances_are_not_all_trivial():
    """In many of them moving takes time beside computing, and in some NVMe is needed."""
    longer = on_drive = 0
    for seed in range(40):
        workload, machine = instance(seed)
        expected_s = Transport(workload, machine).optimum_s()
        if expected_s is not None:
            compute_s = sum(u.forward["s"] + u.backward["s"] for u in workload.units)
            longer += expected_s > 1.02 * compute_s
            without_s = Transport(workload, with_capacity(machine, {"nvme": 0})).optimum_s()
            on_drive += without_s is None or without_s > 1.001 * expected_s
    assert longer >= 10
    assert on_drive >= 4
