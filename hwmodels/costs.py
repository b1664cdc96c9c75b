"""What an op costs alone, and what it takes of the shared limits while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["NO_DEMAND", "Cost"]

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

    @property
    def alone_s(self) -> float:
        """Seconds from start to end when nothing else runs."""
        return self.latency_s + self.work_s
