"""Policies that run on one device train the numbers of plain training from their schedules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.models import OwnModel, make_batches, make_model, observed_workload
from tests.runtime.test_trainer import CPU, check, machine
from tests.toys import uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.planner.policies import POLICIES, decide
from tierplan.runtime.execution.placement import TrainingError
from tierplan.runtime.trainer import Trainer
from tierplan.sim.workloads.workload import Training

pytestmark = pytest.mark.usefixtures("one_thread")

NOT_RUN = ("harmony", "virtual-memory", "mobius", "roundpipe")
AS_FULL_RECOMPUTE = ("ddp", "fsdp", "megatron-tp")
"""On one device; so what is true of its runs is true of theirs."""
RUN = [name for name in POLICIES if not name.startswith(NOT_RUN) and name not in AS_FULL_RECOMPUTE]
"""With their defaults; harmony has a test of its own, nobody would run virtual memory, and
pipelines are for several devices."""


def check_policy(model: nn.Module, training: Training, policy: str, options: dict[str, object], folder: Path) -> None:
    check(model, training, lambda workload: decide(policy, workload, machine(), options), folder)


@pytest.mark.parametrize("every", [2, 3, 5])
def test_segments_are_made_again_from_their_first_input(every: int, tmp_path: Path) -> None:
    model = make_model("gpt2", num_blocks=5, dropout=0.1)
    check_policy(model, replace(CPU, gradient_accumulation_steps=2), "full-recompute", {"every": every}, tmp_path)


class _Block(nn.Module):
    def __init__(self, *, saves: bool = True) -> None:
        super().__init__()
        self.inner, self.saves = nn.Linear(16, 16), saves

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x)) if self.saves else self.inner(x)


class _SavingNothing(OwnModel):
    """Between its lists of blocks and in one block, only inputs and parameters are saved."""

    def __init__(self) -> None:
        super().__init__([_Block(), _Block(saves=False)])
        self.second = nn.ModuleList([_Block(), _Block()])
        self.scale = nn.Parameter(torch.tensor(1.5))

    def through(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        x = super().through(x) * self.scale
        for block in self.second:
            x = block(x)
        return x


@pytest.mark.parametrize("order", ["horizontal", "vertical"])
@pytest.mark.parametrize("every", [2, 3, 5])
def test_units_that_save_nothing_are_run_again_for_the_input_of_the_next_one(
    every: int, order: Any, tmp_path: Path
) -> None:
    """Their recomputation writes a buffer of no bytes, for which the schedule was refused."""
    training, model = replace(CPU, gradient_accumulation_steps=2), _SavingNothing()
    workload = observed_workload(model, make_batches(1)[0], training)
    assert [len(unit.saved) for unit in workload.units] == [0, 1, 0, 0, 1, 1, 2]
    choice = UnitPlan(params="host", states="host", acts="recompute", input="host")
    plan = uniform_plan(workload, choice, order=order, segment_units=every)
    check(model, training, plan, tmp_path, workload=workload)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("family", "dtype", "accumulation"), [("gpt2", "fp32", 3), ("gpt2", "bf16", 1), ("llama", "bf16", 3)]
)
@pytest.mark.parametrize(("pack", "pack_forward", "clip"), [(1, 1, 0.5), (2, 3, None), (2, 3, 0.5), (9, 9, None)])
def test_packs_visit_the_device(
    pack: int, pack_forward: int, clip: float | None, accumulation: int, dtype: str, family: str, tmp_path: Path
) -> None:
    """Harmony on one device: tied and untied heads, packs that hold the embedding or the head alone, or everything."""
    training = replace(CPU, dtype=dtype, gradient_accumulation_steps=accumulation, max_grad_norm=clip)  # type: ignore[arg-type]
    model = make_model(family, num_blocks=5, dropout=0.1, dtype=dtype)
    check_policy(model, training, "harmony", {"pack": pack, "pack_forward": pack_forward}, tmp_path)


OPTIONS: list[tuple[str, dict[str, object], float | None]] = [
    ("zero-offload", {"semantics": "delayed-1"}, None),
    ("zero-offload", {"device_frac": 0.5, "checkpointing": "off"}, 1.0),
    *(("zero-infinity", {"params": p, "optimizer": o, "checkpoints": c, "host_buffers": "none"}, 1.0)
      for p, o, c in [("host", "host", "device"), ("host", "nvme", "nvme"), ("nvme", "host", "host"),
                      ("device", "device", "host"), ("device", "host", "nvme"), ("nvme", "nvme", "device")]),
    ("fuyou", {"swap": "all", "write_back": "delayed"}, None),
    ("fuyou", {"swap": "none"}, None),
    ("sliding-window", {"window": 2}, None),
    ("vertical", {"prefetch": 2}, 1.0),
]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize(("policy", "options", "clip"), OPTIONS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_policy_s_options(
    policy: str, options: dict[str, object], clip: float | None, dtype: str, tmp_path: Path
) -> None:
    training = replace(CPU, dtype=dtype, gradient_accumulation_steps=2, max_grad_norm=clip)  # type: ignore[arg-type]
    check_policy(make_model("gpt2", dtype=dtype), training, policy, options, tmp_path)


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        ("virtual-memory", {}, "pages weights out after every use"),
        ("zero-infinity", {"operator_tiles": 2, "host_buffers": "none"}, r"cuts operators into tiles \('L0.0'\)"),
    ],
)
def test_what_is_only_simulated_is_refused(policy: str, options: dict[str, object], message: str) -> None:
    model = make_model("gpt2")
    workload = observed_workload(model, make_batches(1)[0], CPU)
    schedule = lower(decide(policy, workload, machine(), options), workload, machine())
    with pytest.raises(TrainingError, match=message):
        Trainer(schedule, model)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_on_one_device_some_are_full_recompute(dtype: str, clip: float | None) -> None:
    """Op by op, and buffer by buffer."""
    training = replace(CPU, dtype=dtype, max_grad_norm=clip)  # type: ignore[arg-type]
    workload = observed_workload(make_model("gpt2", dtype=dtype), make_batches(1)[0], training)
    full = lower(decide("full-recompute", workload, machine()), workload, machine())
    for policy in AS_FULL_RECOMPUTE:
        same = lower(decide(policy, workload, machine()), workload, machine())
        assert same.name.startswith(policy)
        assert replace(same, name=full.name, meta=full.meta) == full


@pytest.mark.parametrize("policy", RUN)
@pytest.mark.parametrize(
    ("dtype", "clip"),
    [
        ("fp32", None), ("bf16", 1.0),
        pytest.param("bf16", None, marks=pytest.mark.nightly), pytest.param("fp32", 1.0, marks=pytest.mark.nightly),
    ],
)  # fmt: skip
def test_a_policy_trains_bit_for_bit(policy: str, dtype: str, clip: float | None, tmp_path: Path) -> None:
    training = replace(CPU, dtype=dtype, max_grad_norm=clip)  # type: ignore[arg-type]
    check_policy(make_model("gpt2", dtype=dtype), training, policy, {}, tmp_path)
