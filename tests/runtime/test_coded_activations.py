"""Activations that leave the device in fp8: the numbers are those of plain training whose saved tensors are coded."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tests.runtime.models import make_batches, make_model
from tests.runtime.test_trainer import CPU, STEPS, machine
from tests.toys import uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.runtime.autograd.units import find_blocks
from tierplan.runtime.optim.adam import OptimizerSettings
from tierplan.runtime.reference import train_plainly
from tierplan.runtime.tracing.trace import trace_module
from tierplan.runtime.trainer import train
from tierplan.sim.contents import parse_content
from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.workload import Workload

pytestmark = pytest.mark.usefixtures("one_thread")
FP8 = replace(CPU, activation_format="fp8")


def roundtrip(flat: torch.Tensor) -> torch.Tensor:
    """fp8 and back, with one scale."""
    scale = flat.abs().max().float() / 448
    codes = (flat.float() / scale).clamp(-448, 448).nan_to_num().to(torch.float8_e4m3fn)
    return (codes.float() * scale).to(flat.dtype)


def flat_of(t: torch.Tensor) -> torch.Tensor:
    """All that its storage holds."""
    storage = t.untyped_storage()
    return torch.empty(0, dtype=t.dtype).set_(storage, 0, (storage.nbytes() // t.itemsize,), (1,))


class CodedSaves(nn.Module):
    """A block whose input and saved tensors, but what others own and what is small, are coded for backward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        others = [t for t in (*args, *kwargs.values()) for t in (t if isinstance(t, tuple) else (t,))]
        kept = [*self.block.parameters(), *self.block.buffers(), *(t for t in others if isinstance(t, torch.Tensor))]
        outside = {t.untyped_storage().data_ptr() for t in kept}
        known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def pack(t: torch.Tensor) -> object:
            address = t.untyped_storage().data_ptr()
            flat = flat_of(t)
            if address in outside or not t.is_floating_point() or flat.numel() * 16 <= x.numel():
                return t
            if address not in known:
                known[address] = flat, roundtrip(flat.detach())
            return known[address][1], t.shape, t.stride(), t.storage_offset()

        def unpack(packed: Any) -> torch.Tensor:
            return packed if isinstance(packed, torch.Tensor) else packed[0].as_strided(*packed[1:])

        with saved_tensors_hooks(pack, unpack):
            return self.block(x, *args, **kwargs)


class CodedInput(torch.autograd.Function):
    """A block that is run again in backward, from its coded input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Any) -> torch.Tensor:
        ctx.x, ctx.call = x.detach(), call
        with torch.no_grad():
            return call(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x = roundtrip(ctx.x.flatten()).view(ctx.x.shape).requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.call(x), grads[0])
        return x.grad, None


class RunAgain(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return CodedInput.apply(x, lambda x: self.block(x, *args, **kwargs))  # type: ignore[no-untyped-call]


@contextmanager
def with_blocks(model: nn.Module, kind: type[nn.Module]) -> Iterator[nn.Module]:
    """Each block stands in one of this kind."""
    for name, block in find_blocks(model):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, kind(block))
    yield model


def trained(model: nn.Module, plan: UnitwisePlan, workload: Workload, folder: Path) -> tuple[list[float], Schedule]:
    schedule = lower(plan, workload, machine())
    batches = make_batches(STEPS * workload.training.gradient_accumulation_steps)
    result = train(schedule, model, batches, steps=STEPS, nvme_dir=folder, optimizer=OptimizerSettings(lr=1e-2))
    assert dict(result.moved_bytes) == {stream: STEPS * size for stream, size in schedule.bytes_moved().items()}
    for tier in schedule.tiers:
        assert result.peak_bytes[tier.name] <= tier.capacity_bytes
    return list(result.losses), schedule


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(
    ("choice", "kind"),
    [
        (UnitPlan(acts="host", input="nvme"), CodedSaves),
        (UnitPlan(acts="nvme", input="host"), CodedSaves),
        (UnitPlan(acts="recompute", input="host"), RunAgain),
        (UnitPlan(acts="recompute", input="nvme"), RunAgain),
    ],
)
@pytest.mark.parametrize("order", ["horizontal", "vertical"])
def test_bits_are_those_of_plain_training_with_coded_tensors(
    order: Any, choice: UnitPlan, kind: type[nn.Module], family: str, dtype: Any, tmp_path: Path
) -> None:
    training = replace(FP8, dtype=dtype, gradient_accumulation_steps=2)
    model = make_model(family, dtype=dtype)
    workload = trace_module(model, make_batches(1)[0], training)
    plain, uncoded = copy.deepcopy(model), copy.deepcopy(model)
    batches, settings = make_batches(2 * STEPS), {"optimizer": OptimizerSettings(lr=1e-2), "steps": STEPS}
    settings["gradient_accumulation_steps"] = 2
    with with_blocks(plain, kind):
        expected = train_plainly(plain, batches, **settings)  # type: ignore[arg-type]
    losses, schedule = trained(model, uniform_plan(workload, choice, order=order), workload, tmp_path)
    assert losses == expected
    assert losses != train_plainly(uncoded, batches, **settings)  # type: ignore[arg-type]
    for p, wanted in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, wanted)
    assert {op.kind for op in schedule.ops} >= {"encode", "decode"}
    coded = [b for b in schedule.buffers if getattr(parse_content(b.content), "is_coded", False)]
    assert all(b.size_bytes % 2 == 0 for b in coded)
