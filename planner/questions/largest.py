"""The largest model of a family that fits a machine under a policy.

The family are GPT-3-style decoders: the sizes that the papers use, to 276 B parameters, and smaller ones. Beyond the
largest, its depth grows by a quarter at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from tierplan.hwmodels.machine import Machine
from tierplan.planner.prediction import Prediction, predict
from tierplan.sim.workloads.models import load_workload, named_models, workload_of
from tierplan.sim.workloads.workload import Training, Workload

DEEPEST = 16
"""Times the blocks of the family's largest: what is looked at at most."""


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest model that fits, and why the next one does not."""

    fits: Prediction | None
    next_model: str
    """Empty when even the largest of the family fits, and `DEEPEST` times as many blocks."""
    next_why_not: str

    def record(self) -> dict[str, object]:
        return {
            "largest": None if self.fits is None else self.fits.record(),
            "next_model": self.next_model or None,
            "next_why_not": self.next_why_not or None,
        }


def family(training: Training) -> list[Workload]:
    """The named GPT-3-style models by size, smallest first."""
    named = [name for name, config in named_models().items() if name.startswith("gpt-") and "n_layer" in config]
    return sorted((load_workload(name, training) for name in named), key=lambda workload: workload.num_parameters)


def largest_model(
    policy: str, machine: Machine, training: Training, options: Mapping[str, object] | None = None
) -> Largest:
    """The largest of `family` that fits, or one that is deeper. A larger model never needs less memory, so this is a
    binary search."""
    models, tried = family(training), dict[int, Prediction]()

    def is_too_large(k: int) -> bool:
        tried[k] = predict(policy, models[k], machine, options)
        return not tried[k].fits

    first = bisect_left(range(len(models)), True, key=is_too_large)
    best, worst = tried.get(first - 1), tried.get(first)
    name, config, depth = models[-1].name, models[-1].config, int(str(models[-1].config["n_layer"]))
    num_blocks = depth
    while worst is None and num_blocks < DEEPEST * depth:
        num_blocks = ceil(1.25 * num_blocks)
        deeper = workload_of(f"{name} with {num_blocks} blocks", {**config, "n_layer": num_blocks}, training)
        prediction = predict(policy, deeper, machine, options)
        best, worst = (prediction, None) if prediction.fits else (best, prediction)
    return Largest(best, worst.model if worst else "", worst.why_not if worst else "")
