"""A linear program as arrays, and HiGHS, which solves it again and again as some of its numbers change.

    draft = Draft()                     columns and rows are added one by one
    program = draft.program()           numpy arrays from here on
    solver = Solver()
    first = solver.solve(program)
    second = solver.solve(changed)      as many columns and rows: starts from where the first one ended

Why HiGHS's own interface (`highspy`) and not PuLP: one question solves a few dozen programs that differ in some bounds
and coefficients. PuLP has no start from a basis, hands a program over column by column (at 96 blocks 0.2 s, where the
solve takes 0.01 s), and believes its solver's status. What would be left of it is a name for each column. The tests
solve the same programs by CBC, through PuLP. A status is never believed here either: `solve` looks at the solution
itself (`Program.violation`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, isfinite
from typing import Any, Literal, TypeAlias

import highspy
import numpy as np
from numpy.typing import NDArray

Terms = list[tuple[float, int]]
"""A linear expression: (coefficient, column) pairs, columns may repeat."""
Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int32]
SOLVER = "HiGHS"
TOLERANCE = 1e-4
"""Of a row, relative to its largest coefficient: an answer that breaks one by more is none."""
LP_TIME_LIMIT_S = 10.0
"""Of a program without integers; the largest take a second, so only a solver that is stuck meets it."""
MOST_NODES = 100
"""At which branching ends, so that no clock decides what is found."""
OPS_PER_ITERATION, OPS_PER_COEFFICIENT = 40.0, 0.15
"""Simulated ops (some 800,000 per second) that a simplex iteration and a coefficient take as long as."""
DUAL, PRIMAL = 1, 4
"""HiGHS's numbers of the two simplex methods."""
NUM_ENDS = 32
"""Programs of a shape whose ends are kept."""
FEW_FRAC = 0.05
"""Share of a program's coefficients that are changed one by one where they stand; if more differ, it is loaded anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Minimise `cost` over columns between `low` and `high`, subject to `row_low <= row <= row_high`."""

    cost: Floats
    low: Floats
    high: Floats
    integer: Ints
    """Columns that are to be whole."""
    optional: NDArray[np.bool_]
    """By column: whether it is of what may be left out. Without those it is a program of its own, see `extended`."""
    starts: Ints
    """Where each row's entries begin, and the end of the last one's."""
    columns: Ints
    """Of all entries, row after row."""
    values: Floats
    row_low: Floats
    row_high: Floats
    families: Mapping[str, Ints]
    """What rows are about -> their numbers."""

    @property
    def shape(self) -> tuple[int, int]:
        """Columns and rows."""
        return len(self.cost), len(self.row_low)

    @property
    def size(self) -> int:
        """Coefficients."""
        return len(self.values)

    def rows_of(self, family: str) -> Ints:
        """Numbers of the rows that are about this."""
        return self.families.get(family, np.empty(0, dtype=np.int32))

    @property
    def row_of_entry(self) -> Ints:
        return np.repeat(np.arange(len(self.row_low), dtype=np.int32), np.diff(self.starts))

    def row_sums(self, values: Floats) -> Floats:
        """By row, at a point: the sum of its coefficients times the columns."""
        weights = self.values * values[self.columns]
        return np.bincount(self.row_of_entry, weights=weights, minlength=len(self.row_low)).astype(float)

    def distance(self, other: Program) -> float:
        """How much rows and coefficients differ, each relative to its size, from those of a program of this shape."""
        if self.size != other.size:
            return inf
        pairs = ((self.values, other.values), (self.row_low, other.row_low), (self.row_high, other.row_high))
        return sum(
            float(np.sum(_relative(a[changed], b[changed]))) for a, b in pairs if len(changed := np.flatnonzero(a != b))
        )

    def violation(self, values: Floats, *, integral: bool = True) -> float:
        """Largest violation of a row, a bound or (if asked) an integrality, relative to the row's scale."""
        worst = [0.0, float(np.max(self.low - values)), float(np.max(values - self.high))]
        if len(self.row_low):
            totals, scale = self.row_sums(values), np.ones(len(self.row_low))
            np.maximum.at(scale, self.row_of_entry, np.abs(self.values))
            worst += [float(np.max((self.row_low - totals) / scale)), float(np.max((totals - self.row_high) / scale))]
        if integral and len(self.integer):
            whole = values[self.integer]
            worst.append(float(np.max(np.abs(whole - np.round(whole)))))
        return max(worst)


def _relative(a: Floats, b: Floats) -> Floats:
    """Differences, 1 at most; 0 where one of the two is infinite."""
    finite = np.isfinite(a) & np.isfinite(b)
    relative: Floats = np.abs(a - b)[finite] / (np.abs(a) + np.abs(b))[finite]
    return relative


@dataclass
class Draft:
    """A program while columns and rows are added to it."""

    cost: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    integer: list[int] = field(default_factory=list)
    optional: list[bool] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    row_low: list[float] = field(default_factory=list)
    row_high: list[float] = field(default_factory=list)
    families: dict[str, list[int]] = field(default_factory=dict)

    def column(self, *, high: float = inf, cost: float = 0.0, integer: bool = False, optional: bool = False) -> int:
        """Adds a column, of 0 or more; its number."""
        self.optional.append(optional)
        self.low.append(0.0)
        self.high.append(high)
        self.cost.append(cost)
        if integer:
            self.integer.append(len(self.low) - 1)
        return len(self.low) - 1

    def row(self, terms: Terms, *, low: float = -inf, high: float = inf, family: str) -> int:
        """Adds a row, with repeated columns summed; its number."""
        merged: dict[int, float] = {}
        for coefficient, column in terms:
            merged[column] = merged.get(column, 0.0) + coefficient
        for column, coefficient in merged.items():
            if coefficient != 0.0:
                self.columns.append(column)
                self.values.append(coefficient)
        self.starts.append(len(self.columns))
        self.row_low.append(low)
        self.row_high.append(high)
        row = len(self.row_low) - 1
        self.families.setdefault(family, []).append(row)
        return row

    def program(self) -> Program:
        """What has been added, as arrays."""
        types = {"optional": bool, **dict.fromkeys(("integer", "starts", "columns"), np.int32)}
        listed = [(name, values) for name, values in vars(self).items() if name != "families"]
        return Program(
            **{name: np.array(values, types.get(name, float)) for name, values in listed},
            families={family: np.array(rows, np.int32) for family, rows in self.families.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solution:
    """What the solver found."""

    status: Literal["optimal", "feasible", "infeasible", "none"]
    """`feasible`: stopped at a limit with an answer; `none`: stopped without one."""
    objective: float = inf
    bound: float = -inf
    """No solution is below this."""
    values: Floats = field(default_factory=lambda: np.empty(0))
    duals: Floats = field(default_factory=lambda: np.empty(0))
    """Per row; empty unless the program was solved without integers."""
    seconds: float
    iterations: int
    """Of the simplex method: what solving cost, whatever else the computer does."""
    size: int
    """Coefficients of the program."""

    @property
    def usable(self) -> bool:
        return self.status in ("optimal", "feasible")

    @property
    def work_ops(self) -> int:
        """What building and solving cost, in simulated ops that take as long: a count, which no clock changes. Whole,
        so that sums do not depend on what else is added up."""
        return round(OPS_PER_ITERATION * self.iterations + OPS_PER_COEFFICIENT * self.size)


class Solver:
    """HiGHS with the programs that it solved last: the next one starts from the basis of the one that is most like it.

    Settings that are tried jump back and forth, and from a basis far away there are as many iterations as from nothing.
    Deterministic for a seed and a sequence of programs, unless a time limit is reached.
    """

    def __init__(self, *, seed: int = 0) -> None:
        self.seed = seed
        self.highs: Any = None
        self.loaded: Program | None = None
        self.ends: dict[tuple[int, int], deque[tuple[Program, Any]]] = {}
        """By shape: programs without integers, and the bases at which they ended."""
        self.last_end: tuple[Program, Any] | None = None

    @cached_property
    def wider(self) -> Solver:
        """For programs with more choices, so that what it does changes nothing here."""
        return Solver(seed=self.seed)

    def solve(
        self,
        program: Program,
        *,
        integral: bool = False,
        time_limit_s: float = LP_TIME_LIMIT_S,
        gap: float = 0.01,
        narrower: Solver | None = None,
    ) -> Solution:
        """The program's solution; with `integral` the columns in `integer` are whole, to within `gap` of the best.

        `narrower` may have solved it last without its optional columns: then the first of its shape starts there.
        """
        started = time.perf_counter()
        if integral and len(program.integer):
            self._load(program, integral=True, mip_rel_gap=gap)
            self.loaded = None
            return self._run(program, True, time_limit_s, started)
        ends, before = self.ends.setdefault(program.shape, deque(maxlen=NUM_ENDS)), self.loaded
        like, basis = min(ends, key=lambda end: program.distance(end[0]), default=(None, None))
        is_loaded = self._change(program)
        if not is_loaded:
            self._load(program)
        inner = basis is None and narrower and narrower.last_end and extended(*narrower.last_end, program)
        basis = inner or basis
        if basis is not None and not (is_loaded and like is before):
            self.highs.setBasis(basis)
        # where what is left out may only be added, the point is one of the program already, but not the best
        self.highs.setOptionValue("simplex_strategy", PRIMAL if inner else DUAL)
        found = self._run(program, False, time_limit_s, started)
        if basis is not None and found.status != "optimal":
            # not believed: once more, from nothing
            self._load(program)
            found = self._run(program, False, time_limit_s, started)
        self.last_end = None
        if found.status == "optimal":
            self.last_end = program, self.highs.getBasis()
            ends.append(self.last_end)
        return found

    def _load(self, program: Program, *, integral: bool = False, **options: float) -> None:
        if self.highs is None:
            highspy.Highs.resetGlobalScheduler(True)  # the number of threads is global to the process
        self.highs = highspy.Highs()
        settings: dict[str, object] = {"output_flag": False, "threads": 1, "random_seed": self.seed, **options}
        # the simplex method takes a fourth of interior points' time, and leaves duals and a basis; numbers in GB and s
        # need no scaling. With more perturbation it ends sooner, at plans that are 1 to 3 % slower; without, too
        branching = {"mip_heuristic_effort": 0.05, "mip_max_nodes": MOST_NODES}
        simplex = {"solver": "simplex", "simplex_scale_strategy": 0, "dual_simplex_cost_perturbation_multiplier": 0.1}
        settings |= branching if integral else simplex
        for name, value in settings.items():
            self.highs.setOptionValue(name, value)
        num_columns, num_rows = program.shape
        kinds = np.zeros(num_columns, dtype=np.int32)
        if integral:
            kinds[program.integer] = 1
        by_row, minimise, offset = 2, 1, 0.0
        p = program
        arrays = (p.cost, p.low, p.high, p.row_low, p.row_high, p.starts, p.columns, p.values, kinds)
        self.highs.passModel(num_columns, num_rows, p.size, by_row, minimise, offset, *arrays)
        self.loaded = program

    def _change(self, program: Program) -> bool:
        """Turns the loaded program into this one, if it is much like it."""
        old = self.loaded
        if old is None or old.shape != program.shape or old.size != program.size:
            return False
        if not (np.array_equal(old.starts, program.starts) and np.array_equal(old.columns, program.columns)):
            return False
        changed = np.flatnonzero(old.values != program.values)
        if len(changed) > FEW_FRAC * program.size or not np.array_equal(old.cost, program.cost):
            return False
        rows = program.row_of_entry
        for entry in changed.tolist():
            self.highs.changeCoeff(int(rows[entry]), int(program.columns[entry]), float(program.values[entry]))
        for change, pairs in (
            (self.highs.changeColsBounds, ((old.low, program.low), (old.high, program.high))),
            (self.highs.changeRowsBounds, ((old.row_low, program.row_low), (old.row_high, program.row_high))),
        ):
            (low_before, low), (high_before, high) = pairs
            where = np.flatnonzero((low_before != low) | (high_before != high)).astype(np.int32)
            if len(where):
                change(len(where), where, low[where], high[where])
        self.loaded = program
        return True

    def _run(self, program: Program, integral: bool, time_limit_s: float, started: float) -> Solution:
        self.highs.setOptionValue("time_limit", self.highs.getRunTime() + time_limit_s)  # its clock is not set back
        self.highs.run()
        status, info = self.highs.getModelStatus(), self.highs.getInfo()
        solution = self.highs.getSolution()
        values = np.array(solution.col_value)
        counted: dict[str, Any] = {
            "seconds": time.perf_counter() - started,
            "iterations": max(int(info.simplex_iteration_count), 0),
            "size": program.size,
        }
        kinds, objective = highspy.HighsModelStatus, float(info.objective_function_value)
        if status in (kinds.kInfeasible, kinds.kUnboundedOrInfeasible):
            return Solution(status="infeasible", bound=inf, **counted)
        found = len(values) == len(program.cost) and isfinite(objective)
        if not found or program.violation(values, integral=integral) > TOLERANCE:
            return Solution(status="none", **counted)
        is_optimal = status == kinds.kOptimal
        bound = float(info.mip_dual_bound) if integral else objective if is_optimal else -inf
        duals = np.empty(0) if integral else np.array(solution.row_dual)
        return Solution(
            status="optimal" if is_optimal else "feasible",
            objective=objective,
            bound=bound,
            values=values,
            duals=duals,
            **counted,
        )


def extended(narrow: Program, basis: Any, wide: Program) -> Any | None:
    """A basis of `wide` where `narrow` ended: optional columns are 0, and rows that stand in `wide` alone are slack.

    None where `narrow` is not `wide` without its optional columns.
    """
    kept = np.flatnonzero(~wide.optional)
    if len(kept) != narrow.shape[0]:
        return None
    weights, padded = np.random.default_rng(0).random(len(kept)), np.zeros(wide.shape[0])
    padded[kept] = weights
    wanted, rows = narrow.row_sums(weights).tolist(), list[int]()
    for row, total in enumerate(wide.row_sums(padded).tolist()):  # alike rows have equal sums, and stand in one order
        if len(rows) < len(wanted) and total == wanted[len(rows)]:
            rows.append(row)
    if len(rows) < len(wanted):
        return None
    status, found = highspy.HighsBasisStatus, highspy.HighsBasis()
    of_columns, of_rows = [status.kLower] * wide.shape[0], [status.kBasic] * wide.shape[1]
    for there, numbers, here in ((of_columns, kept.tolist(), basis.col_status), (of_rows, rows, basis.row_status)):
        for number, each in zip(numbers, here, strict=True):
            there[number] = each
    found.col_status, found.row_status = of_columns, of_rows
    return found
