"""Learning rates by step, with the formulas of `transformers.optimization`."""

from __future__ import annotations

import math
from collections.abc import Callable

SCHEDULES = ("constant", "linear", "cosine")


def learning_rate(name: str, lr: float, *, num_steps: int, warmup_steps: int = 0) -> Callable[[int], float]:
    """The rate of each step, from 0: rises linearly over the warm-up, then stays, or falls to 0 at `num_steps`."""
    if name not in SCHEDULES:
        raise ValueError(f"learning-rate schedule {name!r} is unknown; choose one of {', '.join(SCHEDULES)}")
    if not 0 <= warmup_steps <= num_steps:
        raise ValueError(f"a warm-up of {warmup_steps} steps does not fit into {num_steps}; give 0 to {num_steps}")

    def rate(step: int) -> float:
        if step < warmup_steps:
            return lr * step / max(1, warmup_steps)
        if name == "constant":
            return lr
        done = (step - warmup_steps) / max(1, num_steps - warmup_steps)
        if name == "linear":
            return lr * max(0.0, 1.0 - done)
        return lr * max(0.0, 0.5 * (1.0 + math.cos(math.pi * done)))

    return rate
