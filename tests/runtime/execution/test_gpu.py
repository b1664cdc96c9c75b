"""On a CUDA GPU: the same executor, streams and pinned memory, and the numbers of plain training on that GPU."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.execution.test_held_on_cuda import FRAGMENTS_BYTES, WORKSPACES_BYTES
from tests.runtime.models import make_batches, make_model
from tests.runtime.test_trainer import CPU, machine
from tests.toys import uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.reference import train_plainly
from tierplan.runtime.tracing.trace import trace_config
from tierplan.runtime.trainer import train
from tierplan.sim.workloads.workload import Training, Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
STEPS = 4
CUDA = replace(CPU, backend="cuda")


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Strictly, else the backward of attention is not. cuBLAS is so by a variable (`tests/conftest.py`)."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def traced(family: str, model: nn.Module, training: Training) -> Workload:
    """As CUDA's kernels save it, which the CPU's cannot show."""
    config: Any = model.config
    return trace_config(family, {**config.to_dict(), "architectures": [type(model).__name__]}, training)


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, "fp32") for family in ("gpt2", "opt", "llama", "bert")), ("llama", "bf16")]
)
@pytest.mark.parametrize("acts", ["keep", "recompute", "host", "nvme"])
def test_losses_against_plain_training_on_the_gpu(family: str, dtype: Any, acts: str, tmp_path: Path) -> None:
    """States on the device: the same kernels throughout, so bit for bit."""
    model, batches = make_model(family, dropout=0.1, dtype=dtype), make_batches(STEPS)
    workload = traced(family, model, replace(CUDA, dtype=dtype))
    schedule = lower(uniform_plan(workload, UnitPlan(acts=acts)), workload, machine())  # type: ignore[arg-type]
    plain = copy.deepcopy(model).cuda()
    losses = train_plainly(plain, [{k: v.cuda() for k, v in b.items()} for b in batches], steps=STEPS)
    result = train(schedule, model, batches, steps=STEPS, nvme_dir=tmp_path, device="cuda")
    assert result.losses == tuple(losses)
    for (name, a), (_, b) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.equal(a, b.cpu()), name


@pytest.mark.parametrize("params", ["device", "host", "nvme"])
def test_states_off_the_device(params: str, tmp_path: Path) -> None:
    """The update runs on the host's cores, whose kernels round a little differently."""
    model, batches = make_model("gpt2"), make_batches(STEPS)
    workload = traced("gpt2", model, CUDA)
    choice = UnitPlan(params=params, grads="host", states="nvme")  # type: ignore[arg-type]
    schedule = lower(uniform_plan(workload, choice), workload, machine())
    plain = copy.deepcopy(model).cuda()
    losses = train_plainly(plain, [{k: v.cuda() for k, v in b.items()} for b in batches], steps=STEPS)
    result = train(schedule, model, batches, steps=STEPS, nvme_dir=tmp_path, device="cuda")
    assert result.losses == pytest.approx(losses, rel=1e-4)


def test_the_ledger_against_the_allocator(tmp_path: Path) -> None:
    """What PyTorch's allocator has handed out at most is what the ledger says, but for kernels' own scratch."""
    model = make_model("gpt2", num_blocks=6)
    workload = traced("gpt2", model, CUDA)
    schedule = lower(uniform_plan(workload, UnitPlan(acts="host")), workload, machine())
    torch._C._cuda_clearCublasWorkspaces()  # those of earlier tests
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    result = train(schedule, model, make_batches(STEPS), steps=STEPS, nvme_dir=tmp_path, device="cuda")
    most = 1.01 * result.peak_bytes["gpu0"] + WORKSPACES_BYTES
    assert torch.cuda.max_memory_allocated() <= most
    assert torch.cuda.max_memory_reserved() <= most + FRAGMENTS_BYTES
