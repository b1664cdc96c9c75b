"""Parameters are views of flat memory, which one thread may take away while another gives new memory."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.runtime.models import CPU, OwnModel, make_batches, make_model, schedule_for
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.autograd.units import FlatParameters, ModelError, find_blocks
from tierplan.runtime.memory.arena import Block
from tierplan.runtime.tracing.trace import trace_module
from tierplan.runtime.trainer import train
from tierplan.sim.workloads.workload import WorkloadError

NUM_TIMES = 1000


@pytest.fixture
def threads_that_alternate() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("threads_that_alternate")
def test_new_memory_stays_while_the_old_is_taken_away() -> None:
    """A unit's parameters come to the device anew while the last reader of the old ones ends (once in 300 runs)."""
    part = FlatParameters(tuple((str(k), nn.Parameter(torch.ones(3))) for k in range(4)))
    old, new = torch.zeros(48, dtype=torch.uint8), torch.zeros(48, dtype=torch.uint8)
    old_block, new_block = Block(old, old), Block(new, new)
    together = threading.Barrier(2, timeout=60)

    def take_old_away() -> None:
        for _ in range(NUM_TIMES):
            together.wait()
            part.unbind(old.data_ptr())
            together.wait()

    other = threading.Thread(target=take_old_away)
    other.start()
    num_lost = 0
    for _ in range(NUM_TIMES):
        part.bind(old_block)
        together.wait()
        part.bind(new_block)
        together.wait()
        num_lost += part.bound is not new or any(bool(p.isnan().any()) for _, p in part.parameters)
    other.join()
    assert num_lost == 0
    part.unbind(old.data_ptr())
    assert part.bound is new
    part.unbind(new.data_ptr())
    assert all(p.isnan().all() for _, p in part.parameters)


def test_a_model_that_makes_activations_again_itself_is_refused() -> None:
    model: Any = make_model("gpt2")
    model.gradient_checkpointing_enable()
    for split in (find_blocks, lambda m: trace_module(m, make_batches(1)[0], CPU)):
        with pytest.raises((ModelError, WorkloadError), match=r"checkpointing.*gradient_checkpointing_disable"):
            split(model)
    model.gradient_checkpointing_disable()
    assert find_blocks(model)


class _Checkpointed(nn.Module):
    """A block that makes its activations again by itself, at once or behind its first forwards."""

    def __init__(self, reentrant: bool, begin: int) -> None:
        super().__init__()
        self.inner, self.reentrant, self.begin = nn.Linear(16, 16), reentrant, begin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.begin -= 1
        if self.begin >= 0:
            return x + torch.tanh(self.inner(x))
        return x + checkpoint(lambda x: torch.tanh(self.inner(x)), x, use_reentrant=self.reentrant)


def _of_checkpointed(reentrant: bool, begin: int = 0) -> OwnModel:
    return OwnModel(_Checkpointed(reentrant, begin) for _ in range(2))


@pytest.mark.parametrize("choice", [UnitPlan(), UnitPlan(params="host", grads="host", states="host", acts="host")])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_that_makes_activations_again_itself_is_refused(reentrant: bool, choice: UnitPlan) -> None:
    """With parameters off the device it was said to give nan, or to save other tensors when it is run again."""
    why, batches = "torch.utils.checkpoint", make_batches(3)
    with pytest.raises(WorkloadError, match=why):
        trace_module(_of_checkpointed(reentrant), batches[0], CPU)
    schedule = schedule_for(_of_checkpointed(reentrant, begin=9), choice, traced=batches[0])
    for begin in (0, 2):
        with pytest.raises(ModelError, match=why):
            train(schedule, _of_checkpointed(reentrant, begin), batches, steps=3)
    x = torch.ones(2, 16, requires_grad=True)
    assert _Checkpointed(reentrant, 0)(x).requires_grad
