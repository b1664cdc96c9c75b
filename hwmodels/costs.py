"""What one op costs alone, and what it takes of shared limits while it runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

NO_DEMAND: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class Cost:
    """The price of one op on one machine, when nothing else runs."""

    latency_s: float
    """Fixed part, paid before the work and not slowed by others: launch, allocation, seek."""
    work_s: float
    """The part that shared limits can slow down."""
    demand: Mapping[str, float] = field(default_factory=dict)
    """Per shared limit, the units per second that the op takes at full speed."""
    share: float = 1.0
    """Weight under contention: speeds (fractions of full speed) grow in proportion to it until a limit is reached."""
    wake_s: float = 0.0
    """Added to the fixed part where the stream stood still until an input was complete."""

    @property
    def alone_s(self) -> float:
        """Seconds from start to end when nothing else runs."""
        return self.latency_s + self.work_s

    def fault(self, limits: Mapping[str, float]) -> str:
        """Why no op can cost this where these limits (units per second, by name) are shared; empty if it can."""
        for what, seconds in (("latency_s", self.latency_s), ("work_s", self.work_s), ("wake_s", self.wake_s)):
            if not (math.isfinite(seconds) and seconds >= 0):
                return f"costs {what} = {seconds}; it must be finite and 0 or more"
        if not 0 < self.share < math.inf:
            return f"has a share of {self.share}; it must be finite and above 0"
        for name, need in self.demand.items():
            if not 0 <= need < math.inf:
                return f"takes {need:g} per second of shared limit {name!r}; it must be finite and 0 or more"
            if need > 0 and not limits.get(name, 0.0) > 0:
                return (
                    f"takes {need:g} per second of shared limit {name!r}, which is {limits.get(name, 'unknown')}; it "
                    "would never end. Give the limit a value above 0"
                )
        return ""
