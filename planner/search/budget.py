"""What a search may spend, counted in simulated ops rather than in seconds, so that the clock does not decide."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf

from tierplan.sim.compiled.compiler import computing_s, wall_s

DEFAULT_OPS = 1_400_000
MORE_TIMES, MORE_TIMES_OF_DIVISIONS = 2.0, 1.25
"""Default budgets that a search may spend beyond it, far from the bound; and one of several divisions at once, which
has begun a step many times by then."""
GAIN_FRAC, WAIT_TIMES = 0.001, 3.0
"""What is more than the default budget is spent as long as that pays: until all work is the second times that after
which the best step had last become shorter by the first."""
HARDLY_BEGUN = 1.5
"""Times the bound, above which a search goes on to its last: programs of long chains may have taken the budget."""
OPS_PER_S = 200_000
"""Simulated ops (steps included), or other work that takes as long, that a search may spend for each second of its time
limit: less than half of what a second buys, so that the clock ends only searches on slow or busy computers."""
DEFAULT_TIME_LIMIT_S = 30.0
"""Where nobody says, in Python and in every command: time for all ops of the default budget on a computer of a third of
the usual speed. With 10 s, one of half that speed found steps that were up to 6 % longer than those of another."""
PATIENCE = 4
"""How many times its seconds a short search may take that nobody has limited: its counted work ends it."""
LEAST_S = 0.1
"""Seconds that whatever is begun has at least."""
WALL_TIMES = 5
"""Time limits after which a search ends, by the wall's clock, however busy the computer is."""


@dataclass
class Budget:
    """What a search may spend: simulated ops, and seconds of computing.

    Seconds are those of this process, without compiling the simulator (once, in a new installation), so that a busy
    computer changes how long a search takes, but not what it finds; with the wall's clock at `WALL_TIMES` the limit,
    whatever happens.
    """

    time_limit_s: float
    num_ops: float = 0.0
    """To spend; by default what the time limit usually buys."""
    more_ops: float = 0.0
    """To spend beyond that, where what is found is far from the bound and becomes shorter."""
    started: float = field(default_factory=wall_s)
    started_cpu: float = field(default_factory=computing_s)
    ops_left: float = 0.0
    found_s: float = inf
    """The best step, in seconds, when it was last shorter by `GAIN_FRAC`."""
    found_ops: float = 0.0
    """What was spent then."""
    last_s: float = 0.0
    """Seconds of computing that the last simulation took: no other is begun when that much is not left."""

    @classmethod
    def of(cls, time_limit_s: float | None, *, divides: bool = False, by_clock: bool = True) -> Budget:
        """For a time limit that the user gives; None for the default, for one division of a step's sequences, or where
        it `divides` them. Not `by_clock`, it is for what that usually buys, however slow the computer is."""
        if time_limit_s is not None:
            return cls(time_limit_s if by_clock else PATIENCE * time_limit_s, time_limit_s * OPS_PER_S)
        more_times = MORE_TIMES_OF_DIVISIONS if divides else MORE_TIMES
        return cls(DEFAULT_TIME_LIMIT_S, DEFAULT_OPS, more_times * DEFAULT_OPS)

    def __post_init__(self) -> None:
        self.num_ops = self.num_ops or self.time_limit_s * OPS_PER_S
        self.restart()

    def restart(self) -> None:
        """Nothing is spent."""
        self.started, self.started_cpu = wall_s(), computing_s()
        self.ops_left, self.found_s, self.found_ops = self.num_ops, inf, 0.0

    @contextmanager
    def beside(self, num_ops: float) -> Iterator[None]:
        """Another search has so much to spend meanwhile; what it spends and finds is of no account here."""
        own, self.ops_left = (self.ops_left, self.found_s, self.found_ops), num_ops
        self.found_s, self.found_ops = inf, self.spent_ops
        try:
            yield
        finally:
            self.ops_left, self.found_s, self.found_ops = own

    def note(self, step_s: float) -> None:
        """The best step so far, for `is_stale`."""
        if step_s < self.found_s * (1 - GAIN_FRAC):
            self.found_s, self.found_ops = step_s, self.spent_ops

    def is_stale(self, bound_s: float) -> bool:
        """Nothing that counts was found for long: what is spent is `WAIT_TIMES` what had been spent by then. Not where
        the best is many times the bound of what is searched: that search has hardly begun."""
        return self.spent_ops >= WAIT_TIMES * self.found_ops and self.found_s <= HARDLY_BEGUN * bound_s

    @property
    def spent_ops(self) -> float:
        return self.num_ops - self.ops_left

    @property
    def seconds(self) -> float:
        return wall_s() - self.started

    @property
    def spent_frac(self) -> float:
        """The larger of what is spent of the ops and of the seconds."""
        return max(1 - self.ops_left / self.num_ops, self.computed_s / self.time_limit_s)

    @property
    def computed_s(self) -> float:
        """Seconds of computing that are spent."""
        return computing_s() - self.started_cpu

    @property
    def left_s(self) -> float:
        """Seconds of computing that are left, above 0."""
        return max(self.time_limit_s - self.computed_s, LEAST_S)

    @property
    def is_out_of_time(self) -> bool:
        """The clock ran out before the budget did: only then the result depends on how quick this computer is."""
        next_end_s = self.computed_s + self.last_s
        return next_end_s >= self.time_limit_s or self.seconds >= WALL_TIMES * self.time_limit_s
