"""Weights in codes have the bits of the libraries that made the formats, and of decoded copies in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.configs import config_of
from tests.runtime.test_trainer import machine
from tests.toys import uniform_plan
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.autograd.coded import CodedLinear, coded_weight, decoded_weight
from tierplan.runtime.tracing.models import build_model
from tierplan.runtime.tracing.trace import trace_config
from tierplan.sim.contents import Frozen, parse_content
from tierplan.sim.pricing import simulate_on
from tierplan.sim.workloads.formats import FORMATS, NF4_VALUES, Format, format_of
from tierplan.sim.workloads.workload import Training, WorkloadError

SHAPES = [(96, 128), (300, 1024), (9, 40)]
E2M1 = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ADDED = Format(bits=4, block=32, scales=format_of("fp32"), is_base=True,
               codebook=(*(-value for value in reversed(E2M1)), 0.0, *E2M1))  # fmt: skip
"""A format that the package lacks: 4-bit floats, in shorter blocks than others have."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def weight_of(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_and_fp8_are_those_of_torchao(shape: tuple[int, int], dtype: torch.dtype) -> None:
    from torchao.quantization import Float8Tensor, Int8Tensor
    from torchao.quantization.granularity import PerRow

    weight = weight_of(shape, dtype)
    theirs: dict[str, Any] = {
        "int8": Int8Tensor.from_hp(weight, PerRow()),
        "fp8": Float8Tensor.from_hp(weight, granularity=PerRow()),
    }
    for base, tensor in theirs.items():
        codes, scales = coded_weight(weight, base)
        assert codes.equal(tensor.qdata.view(torch.uint8).flatten())
        assert scales.equal(tensor.scale.flatten())
        assert decoded_weight([codes, scales], base, dtype, *shape).equal(tensor.dequantize())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_nf4_is_that_of_bitsandbytes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = weight_of(shape, dtype)
    theirs, state = functional.quantize_4bit(weight, blocksize=64, quant_type="nf4")
    codes, scales = coded_weight(weight, "nf4")
    assert codes.equal(theirs.flatten())
    assert scales.equal(state.absmax)
    assert decoded_weight([codes, scales], "nf4", dtype, *shape).equal(functional.dequantize_4bit(theirs, state))


@pytest.mark.parametrize("shape", [*SHAPES, (7, 48), (3, 3)])
def test_nf4_is_the_nearest_of_sixteen_in_each_block(shape: tuple[int, int]) -> None:
    weight = weight_of(shape, torch.float32)
    weight[0] = 0
    told = decoded_weight(coded_weight(weight, "nf4"), "nf4", torch.float32, *shape).flatten()
    for begin in range(0, weight.numel(), 64):
        block = weight.flatten()[begin : begin + 64]
        near = block.abs().max() * torch.tensor(NF4_VALUES)
        best = (block[:, None] - near).abs().amin(-1)
        assert torch.allclose((told[begin : begin + 64] - block).abs(), best, atol=1e-8)


@pytest.mark.parametrize("base", ["nf4", "int8", "fp8"])
def test_a_product_with_codes_is_that_with_the_decoded_weight(base: str) -> None:
    layer = nn.Linear(40, 24, dtype=torch.bfloat16)
    coded, plain = CodedLinear(layer, base), nn.Linear(40, 24, dtype=torch.bfloat16)
    assert sum(p.nbytes for p in coded.coded) == format_of(base).size_bytes(24 * 40, 24)
    plain.load_state_dict({"weight": coded.weight, "bias": layer.bias})
    grads = []
    for used in (coded, plain):
        x = torch.randn(2, 5, 40, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        used(x).square().sum().backward()
        assert x.grad is not None
        assert used.bias.grad is not None
        grads += [x.grad, used.bias.grad]
    assert grads[0].equal(grads[2])
    assert grads[1].equal(grads[3])


def test_a_format_is_one_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes in a tier, the work of its ops, time on a stream, codes and products: all from the entry."""
    monkeypatch.setitem(FORMATS, "added", ADDED)
    weight = weight_of((6, 64), torch.float32)
    told = decoded_weight(coded_weight(weight, "added"), "added", torch.float32, 6, 64).view(-1, 32)
    blocks = weight.view(-1, 32)
    near = blocks.abs().amax(-1)[:, None, None] / 6 * torch.tensor(ADDED.codebook)
    assert torch.allclose((told - blocks).abs(), (blocks[:, :, None] - near).abs().amin(-1), atol=1e-8)
    layer = CodedLinear(nn.Linear(64, 6, dtype=torch.bfloat16), "added")
    assert sum(p.nbytes for p in layer.coded) == 6 * 64 // 2 + 6 * 64 // 32 * 4
    choice = UnitPlan(params="host", grads="host", states="host")
    raw, held, work, seconds = config_of("llama", 1), {}, {}, {}
    for base in ("nf4", "added"):
        training = Training(per_device_train_batch_size=2, sequence_length=24, backend="cpu", lora="r=4", base=base)
        workload = trace_config("llama", raw, training)
        schedule = lower(uniform_plan(workload, choice), workload, machine())
        held[base] = sum(
            b.size_bytes for b in schedule.buffers if b.initial and isinstance(parse_content(b.content), Frozen)
        )
        assert held[base] == sum(p.nbytes for p in build_model(raw, training).parameters() if not p.requires_grad)
        work[base] = workload.blocks[0].forward["elementwise_bytes"]
        seconds[base] = simulate_on(schedule, machine()).duration_s
    assert held["added"] > held["nf4"]
    assert work["added"] > work["nf4"]
    assert seconds["added"] != seconds["nf4"]


@pytest.mark.parametrize("base", ["nf4-double", "df11"])
def test_what_is_only_planned_says_so(base: str) -> None:
    assert format_of(base).is_base
    with pytest.raises(WorkloadError, match="planned, and not executed"):
        coded_weight(weight_of((4, 64), torch.float32), base)
