"""Activations that leave the device in fp8: the numbers are those of plain training whose saved tensors are coded."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tests.random_plans import random_plan
from tests.runtime.models import make_batches, make_model, schedule_for
from tests.runtime.test_trainer import CPU, STEPS, machine
from tests.toys import uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.runtime.autograd.coded import decode_acts, encode_acts
from tierplan.runtime.autograd.units import find_blocks
from tierplan.runtime.execution.placement import TrainingError
from tierplan.runtime.optim.adam import OptimizerSettings
from tierplan.runtime.reference import train_plainly
from tierplan.runtime.tracing.trace import trace_module
from tierplan.runtime.trainer import train
from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.formats import CODED_AT_ONCE, FORMATS
from tierplan.sim.workloads.workload import Workload, WorkloadError

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
        ctx.x, ctx.call, ctx.rng = x.detach(), call, torch.get_rng_state()
        with torch.no_grad():
            return call(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x = roundtrip(ctx.x.flatten()).view(ctx.x.shape).requires_grad_()
        with torch.enable_grad(), torch.random.fork_rng([]):
            torch.set_rng_state(ctx.rng)
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


@pytest.mark.sampled
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
    left = {b.content.removesuffix("/coded") for b in schedule.buffers if b.content.endswith("/coded")}
    read = [unit.name for unit in workload.blocks if unit.saves_input or choice.acts == "recompute"]
    assert {content for content in left if content[0] == "x"} == {f"x/{u}/mb{m}" for u in read for m in (0, 1)}
    assert left
    for b in schedule.buffers:
        assert b.tier == "gpu0" or b.content not in left, "it leaves as it is"


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(6))
def test_what_leaves_decides_and_not_where_to(seed: int, tmp_path: Path) -> None:
    """A random plan, and another one with all places changed that no number depends on."""
    rng = random.Random(seed)
    family, dtype = rng.choice(("gpt2", "opt", "llama", "bert", "t5")), rng.choice(("bf16", "fp32"))
    training = replace(FP8, dtype=dtype, gradient_accumulation_steps=rng.choice((1, 2)))  # type: ignore[arg-type]
    model = make_model(family, num_blocks=2 if family == "t5" else 3, dropout=0.1, dtype=dtype)
    again = copy.deepcopy(model)
    workload = trace_module(model, make_batches(1)[0], training)
    plan = random_plan(workload, rng)
    swapped: dict[str, Any] = {"host": "nvme", "nvme": "host"}

    def elsewhere(choice: UnitPlan) -> UnitPlan:
        acts = tuple(swapped.get(a, a) for a in choice.acts) if isinstance(choice.acts, tuple) else choice.acts
        return replace(choice, acts=acts, input=swapped.get(choice.input, choice.input))

    other = replace(plan, units=tuple(map(elsewhere, plan.units)), prefetch_acts_units=2 - plan.prefetch_acts_units)
    losses, schedule = trained(model, plan, workload, tmp_path)
    assert any(op.kind == "encode" for op in schedule.ops)
    assert trained(again, other, workload, tmp_path)[0] == losses
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_what_is_no_floating_number_and_what_is_small_leaves_as_it_is() -> None:
    model = make_model("gpt2", dropout=0.1, dtype="bf16")
    workload = trace_module(model, make_batches(1)[0], replace(FP8, dtype="bf16"))
    block = workload.blocks[0]
    values = block.input_bytes // 2
    coded = [tensor for tensor in block.saved if workload.training.coded(block, tensor)[0]]
    assert 0 < len(coded) < len(block.saved)
    for tensor in block.saved:
        each = {"bf16": 2, "fp32": 4}.get(tensor.dtype)
        num = tensor.size_bytes // (each or 1)
        assert (tensor in coded) == (each is not None and num * 16 > values)
        moved, worked = workload.training.coded(block, tensor)
        assert (moved, worked) == ((num + 4, tensor.size_bytes + num + 4) if tensor in coded else (0, 0))


def test_other_formats_and_schedules_that_code_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="activation_format is 'nf4'; choose one of fp8, or none"):
        replace(CPU, activation_format="nf4")
    model = make_model("gpt2")
    schedule = schedule_for(model, UnitPlan(acts="host"), FP8, traced=make_batches(1)[0])
    assert schedule.step is not None
    stripped = replace(schedule, step=replace(schedule.step, training=CPU))
    with pytest.raises(TrainingError, match="codes 1 buffers in format ''; executed are fp8"):
        train(stripped, model, make_batches(1), steps=1, nvme_dir=tmp_path)
    values = torch.tensor([3.0, float("nan"), 0.0])
    memory = torch.empty(7, dtype=torch.uint8)
    encode_acts(values, memory, "fp8")
    decode_acts(memory, values, "fp8")
    assert values.isnan().all(), "what is no number is not hidden"
    encode_acts(torch.zeros(3), memory, "fp8")
    decode_acts(memory, values, "fp8")
    assert values.tolist() == [0.0, 0.0, 0.0]


def test_many_values_are_coded_in_parts_as_all_at_once() -> None:
    values = torch.randn(CODED_AT_ONCE + 1000, generator=torch.Generator().manual_seed(1)).bfloat16()
    memory, back = torch.empty(len(values) + 4, dtype=torch.uint8), torch.empty_like(values)
    encode_acts(values, memory, "fp8")
    decode_acts(memory, back, "fp8")
    assert torch.equal(back, roundtrip(values))


def test_another_format_is_one_entry_and_run_says_what_it_executes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """4 bits with scales by blocks of 32: planned with its bytes, and not executed in silence as something else."""
    monkeypatch.setitem(FORMATS, "added", replace(FORMATS["nf4"], block=32, is_acts=True))
    model = make_model("gpt2")
    workload = trace_module(model, make_batches(1)[0], replace(CPU, activation_format="added"))
    schedule = lower(uniform_plan(workload, UnitPlan(acts="recompute", input="host")), workload, machine())
    [coded] = [b for b in schedule.buffers if b.content == "x/L1/mb0/coded" and b.tier == "host"]
    num = workload.units[2].input_bytes // 4
    assert coded.size_bytes == num // 2 + num // 32 * 4
    [work] = [op.work for op in schedule.ops if op.key == "decode_x/L1/mb0"]
    assert work == {"elementwise_bytes": coded.size_bytes + 4 * num}
    with pytest.raises(TrainingError, match="in format 'added'; executed are fp8"):
        train(schedule, model, make_batches(1), steps=1, nvme_dir=tmp_path)
