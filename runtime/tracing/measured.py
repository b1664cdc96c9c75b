"""A model's workload with times that were measured here: traced sizes, and seconds of real steps."""

from __future__ import annotations

import itertools
from pathlib import Path

import torch

from tierplan.runtime.measure.units import profile_workload
from tierplan.runtime.tracing.models import build_model, example_batch
from tierplan.runtime.tracing.trace import trace_config
from tierplan.sim.workloads.models import read_config
from tierplan.sim.workloads.workload import Training, Workload, WorkloadError


def measure_workload(
    model: str | Path, training: Training, *, num_steps: int = 6, num_threads: int | None = None
) -> Workload:
    """What one training step of `model`, which must fit into memory, computes: in seconds here, with their spread.

    Random weights and tokens: times of dense models do not depend on them. Raises `WorkloadError` if the training is
    for a backend that is not here.
    """
    if training.backend == "cuda" and not torch.cuda.is_available():
        raise WorkloadError(
            "times for backend 'cuda' cannot be measured here: PyTorch sees no GPU; use backend 'cpu', or leave times "
            "to the machine's rates"
        )
    name, raw = read_config(model, training)
    workload = trace_config(name, raw, training)
    real = build_model(raw, training)
    batch = example_batch(real.config, training)
    return profile_workload(
        workload,
        real,
        itertools.repeat(batch),
        num_steps=num_steps,
        device="cuda" if training.backend == "cuda" else "cpu",
        num_threads=num_threads,
    )
