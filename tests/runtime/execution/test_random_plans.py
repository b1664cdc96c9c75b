"""Random plans train the numbers of plain training, bit for bit: a few here, and 20 of each kind with `-m matrix`.

Kinds are family, precision, accumulation and clipping; dropout is on throughout. A plan's decisions are drawn one by
one: places of parameters, gradients, states and inputs by unit, an action by saved tensor, and every knob of the plan
that changes what runs on one device.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from torch import nn

from tests.random_plans import random_plan, with_some_in_host, with_updates_here
from tests.runtime.models import make_model
from tests.runtime.test_trainer import CPU, check
from tierplan.sim.workloads.workload import Training

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = ("gpt2", "opt", "llama", "bert", "t5")
KINDS = [
    (family, dtype, accumulation, clip)
    for family in FAMILIES
    for dtype in ("fp32", "bf16")
    for accumulation in (1, 2)
    for clip in (None, 0.5)
]
PER_KIND = 20


def training_of(dtype: str, accumulation: int, clip: float | None) -> Training:
    return replace(CPU, dtype=dtype, gradient_accumulation_steps=accumulation, max_grad_norm=clip)  # type: ignore[arg-type]


def train_random(family: str, training: Training, seed: str, folder: Path) -> None:
    rng = random.Random(seed)
    model: nn.Module = make_model(family, num_blocks=2 if family == "t5" else 3, dropout=0.1, dtype=training.dtype)
    check(model, training, lambda w: with_updates_here(with_some_in_host(random_plan(w, rng), rng), rng), folder)


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(n, marks=pytest.mark.nightly) for n in range(10, 16))])
def test_random_plans(seed: int, tmp_path: Path) -> None:
    family, dtype, accumulation, clip = random.Random(seed).choice(KINDS)
    train_random(family, training_of(dtype, accumulation, clip), f"quick {seed}", tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(PER_KIND))
@pytest.mark.parametrize(("family", "dtype", "accumulation", "clip"), KINDS)
def test_the_whole_matrix(
    family: str, dtype: str, accumulation: int, clip: float | None, number: int, tmp_path: Path
) -> None:
    """800 trainings: `pytest -m nightly tests/runtime/execution/test_random_plans.py`."""
    train_random(family, training_of(dtype, accumulation, clip), f"{family} {number}", tmp_path)
