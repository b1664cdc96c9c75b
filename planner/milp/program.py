"""A linear program as plain arrays, and its solution with PuLP: HiGHS by default, CBC as fall-back.

Rows and columns are added as lists of numbers, which is quick; the solver gets them in one piece. A status is never
believed: `solve` looks at the solution itself (`Program.violation`). Errors:

    SolverError(RuntimeError)    no solver is installed, or none gave a usable answer
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Literal

import highspy
import numpy as np
import pulp

__all__ = ["LP_TIME_LIMIT_S", "Program", "Solution", "SolverError", "solve"]

Terms = list[tuple[float, int]]
"""A linear expression: (coefficient, column) pairs, columns may repeat."""
SolverName = Literal["highs", "cbc"]
TOLERANCE = 1e-5
LP_TIME_LIMIT_S = 60.0
"""Of a program without integers; the largest take some seconds, so only a solver that is stuck meets it."""
OPS_PER_ITERATION, OPS_PER_COEFFICIENT = 3.0, 0.05
"""Simulated ops (some 40,000 per second) that a simplex iteration and a coefficient take as long as."""


class SolverError(RuntimeError):
    """No solver is installed, or it gave no usable answer."""


@dataclass
class Program:
    """Minimise cost over columns within their bounds, subject to rows `low <= terms <= high`."""

    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)
    integer: list[int] = field(default_factory=list)
    """Columns that are to be whole."""
    rows: list[tuple[list[int], list[float], float, float, str]] = field(default_factory=list)
    """Columns, coefficients, low, high, family (what the row is about)."""

    def column(self, *, low: float = 0.0, high: float = inf, cost: float = 0.0, integer: bool = False) -> int:
        """Adds a column; its number."""
        self.low.append(low)
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
        kept = {c: a for c, a in merged.items() if a != 0.0}
        self.rows.append((list(kept), list(kept.values()), low, high, family))
        return len(self.rows) - 1

    def violation(self, values: Sequence[float]) -> float:
        """Largest violation of a row, a bound or an integrality, relative to the row's scale."""
        found = np.asarray(values, dtype=float)
        worst = [0.0, float(np.max(np.array(self.low) - found)), float(np.max(found - np.array(self.high)))]
        if self.rows:
            columns = np.array([c for r in self.rows for c in r[0]], dtype=int)
            coefficients = np.array([a for r in self.rows for a in r[1]], dtype=float)
            of_row = np.repeat(np.arange(len(self.rows)), [len(r[0]) for r in self.rows])
            totals = np.bincount(of_row, weights=coefficients * found[columns], minlength=len(self.rows))
            scale = np.ones(len(self.rows))
            np.maximum.at(scale, of_row, np.abs(coefficients))
            lows, highs = np.array([r[2] for r in self.rows]), np.array([r[3] for r in self.rows])
            worst += [float(np.max((lows - totals) / scale)), float(np.max((totals - highs) / scale))]
        whole = found[self.integer]
        return float(max([*worst, *np.abs(whole - np.round(whole)).tolist()]))


@dataclass(frozen=True, slots=True)
class Solution:
    """What a solver found."""

    status: Literal["optimal", "feasible", "infeasible", "none"]
    """`feasible`: stopped at a limit with an answer; `none`: stopped without one."""
    objective: float
    bound: float
    """No solution is below this."""
    values: tuple[float, ...]
    duals: tuple[float, ...]
    """Per row; empty unless the program was solved without integers."""
    seconds: float
    solver: str
    iterations: int = 0
    """Of the simplex method: what solving cost, whatever else the computer does."""
    size: int = 0
    """Coefficients of the program."""
    basis: object = field(default=None, repr=False, compare=False)
    """Where the simplex method ended; another program of the same columns and rows may start from there."""

    @property
    def usable(self) -> bool:
        return self.status in ("optimal", "feasible")

    @property
    def work_ops(self) -> float:
        """What building and solving cost, in simulated ops that take as long: a count, which no clock changes."""
        return OPS_PER_ITERATION * self.iterations + OPS_PER_COEFFICIENT * self.size


class _Highs(pulp.HiGHS):  # type: ignore[misc]
    """PuLP's in-process HiGHS, handed the arrays in one call instead of column by column."""

    program: Program
    start: object = None

    def buildSolverModel(self, lp: pulp.LpProblem) -> None:  # noqa: N802 (PuLP's name)
        program = self.program
        num = len(program.low)
        highs = lp.solverModel
        empty = np.array([], dtype=np.int32)
        highs.addCols(
            num,
            np.array(program.cost),
            np.array(program.low),
            np.array(program.high),
            0,
            empty,
            empty,
            np.array([], dtype=np.float64),
        )
        starts = np.cumsum([0, *(len(r[0]) for r in program.rows)])[:-1].astype(np.int32)
        columns = np.array([c for r in program.rows for c in r[0]], dtype=np.int32)
        coefficients = np.array([a for r in program.rows for a in r[1]], dtype=np.float64)
        lows, highs_ = np.array([r[2] for r in program.rows]), np.array([r[3] for r in program.rows])
        highs.addRows(len(program.rows), lows, highs_, len(columns), starts, columns, coefficients)
        if self.mip and program.integer:
            index = np.array(program.integer, dtype=np.int32)
            kinds = np.array([highspy.HighsVarType.kInteger] * len(index))
            highs.changeColsIntegrality(len(index), index, kinds)
        elif self.start is not None:
            highs.setBasis(self.start)

    def findSolutionValues(self, lp: pulp.LpProblem) -> tuple[int, int]:  # noqa: N802 (PuLP's name)
        return pulp.LpStatusOptimal, pulp.LpSolutionOptimal  # `_solve_highs` reads the model itself


def solve(
    program: Program,
    *,
    integral: bool,
    time_limit_s: float = 30.0,
    gap: float = 0.01,
    seed: int = 0,
    solver: SolverName | None = None,
    start: object = None,
) -> Solution:
    """The program's solution by HiGHS, or by CBC if that is asked for or HiGHS is missing or fails.

    `integral=False` drops the integrality of columns. `start` is the basis of a solution of a program with as many
    columns and rows: where few numbers differ, that takes a tenth of the time. Deterministic for a seed (and a start),
    unless the time limit is reached.
    """
    started = time.perf_counter()
    if solver != "cbc":
        if start is not None and not (integral and program.integer):
            found = _solve_highs(program, integral, time_limit_s, gap, seed, start)
            if found.status == "optimal":
                return found
        found = _solve_highs(program, integral, time_limit_s, gap, seed)
        if solver == "highs" or found.usable or found.status == "infeasible":
            return found
    left = max(1.0, time_limit_s - (time.perf_counter() - started))
    return _solve_cbc(program, integral, left, gap, seed)


def _solve_highs(
    program: Program, integral: bool, time_limit_s: float, gap: float, seed: int, start: object = None
) -> Solution:
    started = time.perf_counter()
    highspy.Highs.resetGlobalScheduler(True)  # the number of threads is global to the process
    has_integers = integral and bool(program.integer)
    # the simplex method takes a fourth of interior points' time (10,000 columns, 1.2 s against 0.4 s), and leaves duals
    options = {"mip_heuristic_effort": 0.05} if has_integers else {"solver": "simplex"}
    solver = _Highs(mip=integral, msg=False, threads=1, timeLimit=time_limit_s, gapRel=gap, random_seed=seed, **options)
    solver.program, solver.start = program, start
    lp = pulp.LpProblem("plan", pulp.LpMinimize)
    solver.actualSolve(lp)
    model = lp.solverModel
    status, info = model.getModelStatus(), model.getInfo()
    values = tuple(float(v) for v in model.getSolution().col_value)
    iterations, size = max(int(info.simplex_iteration_count), 0), sum(len(r[0]) for r in program.rows)
    kinds = highspy.HighsModelStatus
    seconds = time.perf_counter() - started
    if status in (kinds.kInfeasible, kinds.kUnboundedOrInfeasible):
        return Solution("infeasible", inf, inf, (), (), seconds, "HiGHS", iterations, size)
    if not values or not isfinite(info.objective_function_value) or _broken(program, values, integral):
        return Solution("none", inf, -inf, (), (), seconds, "HiGHS", iterations, size)
    bound = info.mip_dual_bound if has_integers else info.objective_function_value
    duals = () if has_integers else tuple(float(v) for v in model.getSolution().row_dual)
    if len(duals) != len(program.rows):
        duals = ()  # not every way to a solution leaves them
    kind: Literal["optimal", "feasible"] = "optimal" if status == kinds.kOptimal else "feasible"
    if kind == "feasible" and not has_integers:
        bound = -inf
    basis = None if has_integers else model.getBasis()
    return Solution(
        kind, info.objective_function_value, bound, values, duals, seconds, "HiGHS", iterations, size, basis
    )


def _solve_cbc(program: Program, integral: bool, time_limit_s: float, gap: float, seed: int) -> Solution:
    started = time.perf_counter()
    if "PULP_CBC_CMD" not in pulp.listSolvers(onlyAvailable=True):
        raise SolverError("no solver is left: HiGHS gave no answer and CBC is not available; install highspy or CBC")
    whole = set(program.integer) if integral else set()
    lp = pulp.LpProblem("plan", pulp.LpMinimize)
    columns = [
        lp.add_variable(
            f"c{i:06d}", low, None if high == inf else high, pulp.LpInteger if i in whole else pulp.LpContinuous
        )
        for i, (low, high) in enumerate(zip(program.low, program.high, strict=True))
    ]
    lp.setObjective(pulp.lpSum(c * columns[i] for i, c in enumerate(program.cost) if c))
    for cols, coefficients, low, high, _ in program.rows:
        terms = pulp.lpSum(a * columns[c] for c, a in zip(cols, coefficients, strict=True))
        if low == high:
            lp += terms == low
            continue
        if low > -inf:
            lp += terms >= low
        if high < inf:
            lp += terms <= high
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # PuLP 4 will take CBC from a package of its own
        command = pulp.PULP_CBC_CMD(
            mip=integral, msg=False, threads=1, timeLimit=time_limit_s, gapRel=gap, options=[f"randomSeed {seed + 1}"]
        )
        lp.solve(command)
    seconds = time.perf_counter() - started
    if lp.status == pulp.LpStatusInfeasible:
        return Solution("infeasible", inf, inf, (), (), seconds, "CBC")
    values = tuple(float(c.value() or 0.0) for c in columns)
    if lp.sol_status not in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible) or _broken(
        program, values, integral
    ):
        return Solution("none", inf, -inf, (), (), seconds, "CBC")
    objective = sum(c * v for c, v in zip(program.cost, values, strict=True))
    proven = lp.sol_status == pulp.LpSolutionOptimal
    bound = objective * (1 - gap) if proven and whole else objective if proven else -inf
    return Solution("optimal" if proven else "feasible", objective, bound, values, (), seconds, "CBC")


def _broken(program: Program, values: Sequence[float], integral: bool) -> bool:
    if integral:
        return program.violation(values) > TOLERANCE * 10
    relaxed = Program(program.low, program.high, program.cost, [], program.rows)
    return relaxed.violation(values) > TOLERANCE * 10


def total(terms: Iterable[Terms]) -> Terms:
    """The sum of expressions."""
    return [t for part in terms for t in part]
