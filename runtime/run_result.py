"""What a run did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tierplan.sim.trace import Trace


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run did."""

    losses: tuple[float, ...]
    """By step of the whole run, the mean over its micro-batches. All else is of the steps since it was resumed."""
    trace: Trace
    """Spans by op key (`s0/fwd/L3/mb0`) and bytes by tier over time."""
    moved_bytes: Mapping[str, int]
    """By stream, of all steps."""
    peak_bytes: Mapping[str, int]
    """By tier."""
    step_ends_s: tuple[float, ...]
    """When the last op of each step ended, since the first began."""
    notes: tuple[str, ...] = ()
    """What a user should know, such as a folder without O_DIRECT."""

    @property
    def num_resumed_steps(self) -> int:
        """Steps that were done before the run was resumed."""
        return len(self.losses) - len(self.step_ends_s)

    @property
    def step_s(self) -> float:
        """Seconds per step in steady state: the mean distance of step ends after the first; the whole, for one step."""
        ends = self.step_ends_s
        return (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else ends[0]
