"""Policies that run on one device train the numbers of plain training from their schedules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.runtime.models import make_batches, make_model, observed_workload
from tests.runtime.test_trainer import CPU, check, machine, one_thread
from tierplan.planner.policies import decide

__all__ = ["one_thread"]

RUN = (
    "in-memory",
    "full-recompute",
    "zero-offload",
    "zero-infinity",
    "fuyou",
    "ssdtrain",
    "sliding-window",
    "vertical",
)


@pytest.mark.parametrize("every", [2, 3, 5])
def test_segments_are_made_again_from_their_first_input(every: int, tmp_path: Path) -> None:
    training = replace(CPU, gradient_accumulation_steps=2)
    model = make_model("gpt2", num_blocks=5, dropout=0.1)
    workload = observed_workload(model, make_batches(1)[0], training)
    plan = decide("full-recompute", workload, machine(), {"every": every})
    check(model, training, plan, tmp_path, workload=workload)


@pytest.mark.parametrize("policy", RUN)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_policy_trains_bit_for_bit(policy: str, dtype: str, clip: float | None, tmp_path: Path) -> None:
    training = replace(CPU, dtype=dtype, max_grad_norm=clip)  # type: ignore[arg-type]
    model = make_model("gpt2", dtype=dtype)
    workload = observed_workload(model, make_batches(1)[0], training)
    check(model, training, decide(policy, workload, machine()), tmp_path, workload=workload)
