"""Parameters are views of flat memory, which one thread may take away while another gives new memory."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.runtime.models import make_batches, make_model
from tests.runtime.test_trainer import CPU
from tierplan.runtime.autograd.units import FlatParameters, ModelError, find_blocks
from tierplan.runtime.memory.arena import Block
from tierplan.runtime.tracing.trace import trace_module
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
