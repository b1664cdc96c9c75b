"""A fused loss and compiled blocks, beside what their kernels would keep and move."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.configs import config_of
from tierplan.hwmodels import load_machine
from tierplan.planner.prediction import predict
from tierplan.runtime.tracing.trace import trace_config, trace_module
from tierplan.sim.workloads.fused import with_fused
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.work import flops_of, total_work
from tierplan.sim.workloads.workload import NotCovered, Training, WorkloadError

WIDTH, WORDS = 64, 20000
IDS = torch.zeros(2, 32, dtype=torch.int64)


class InPlace(torch.autograd.Function):
    """A loss of one kernel that writes in place of the logits, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x_nd: torch.Tensor, weight_vd: torch.Tensor) -> torch.Tensor:
        logits_nv = torch.mm(x_nd, weight_vd.t())
        ctx.save_for_backward(x_nd, weight_vd, logits_nv.neg_())
        return logits_nv.new_empty(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x_nd, weight_vd, logits_nv = ctx.saved_tensors
        logits_nv.neg_()
        return torch.mm(logits_nv, weight_vd), torch.mm(logits_nv.t(), x_nd)


class Tower(nn.Module):
    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.table = nn.Embedding(100, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x)
        x = self.norm(x).flatten(0, 1)
        if self.in_place:
            return InPlace.apply(x, self.out.weight)
        return nn.functional.cross_entropy(self.out(x).float(), labels.flatten())


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_fused_loss_keeps_and_moves_what_a_kernel_in_place_of_the_logits_does(dtype: Any) -> None:
    training = Training(per_device_train_batch_size=2, sequence_length=32, dtype=dtype)
    kind = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    batch = {"input_ids": IDS, "labels": IDS}
    plain, real = (trace_module(Tower(x).to(kind), batch, training) for x in (False, True))
    asked = replace(plain, training=replace(training, loss="fused"), config={"vocab_size": WORDS}, computed_for=None)
    head, expected = with_fused(asked).units[-1], real.units[-1]
    logits_bytes, item = IDS.numel() * WORDS * kind.itemsize, kind.itemsize
    assert [t.size_bytes for t in head.saved if t.name == "logits"] == [logits_bytes]
    assert 0 <= head.saved_bytes - expected.saved_bytes < 1000, "labels and a number"
    assert plain.units[-1].saved_bytes - head.saved_bytes == IDS.numel() * WORDS * (4 - item)
    assert flops_of(head.forward) == flops_of(expected.forward)
    assert flops_of(head.backward) == flops_of(expected.backward)
    assert head.forward["elementwise_bytes"] == head.backward["elementwise_bytes"] == 2 * logits_bytes
    norm_bytes = 16 * IDS.numel() * WIDTH
    for name in ("forward_work_bytes", "backward_work_bytes", "accumulating_work_bytes"):
        more_bytes = getattr(head, name) - getattr(expected, name)
        assert 0 <= more_bytes <= norm_bytes + 1000 < logits_bytes / 10


def test_a_fused_loss_makes_no_logits_again_but_for_a_frozen_matrix() -> None:
    def flops(**more: Any) -> float:
        return flops_of(load_workload("llama-3.2-1b", Training(sequence_length=64, **more)).units[-1].backward)

    once = 2 * 64 * 2048 * 128256
    assert (flops(), flops(loss="fused"), flops(loss_chunks=4)) == (2 * once, 2 * once, 3 * once)
    assert flops(loss="fused", loss_chunks=4) == 2 * once
    frozen = {"lora": "r=4,targets=q_proj"}
    assert (flops(**frozen, loss="fused"), flops(**frozen, loss="fused", loss_chunks=4)) == (once, 2 * once)
    whole = [load_workload("llama-3.2-1b", Training(loss="fused", loss_chunks=n)).flops for n in (1, 4)]
    assert whole[0] == whole[1] == load_workload("llama-3.2-1b", Training()).flops


def test_a_fused_loss_is_of_logits() -> None:
    workload = load_workload("gpt2", Training())
    asked = replace(workload, training=Training(loss="fused"), config={}, computed_for=None)
    with pytest.raises(WorkloadError, match=r"cross entropy of logits over a vocabulary, .* leave out loss fused"):
        with_fused(asked)


def test_a_compiled_block_keeps_its_products_and_moves_what_they_read_and_write() -> None:
    training = Training(sequence_length=64, lora="r=4,targets=q_proj+down_proj", trained_dtype="bf16")
    eager, fused = (
        load_workload("llama-3.2-1b", replace(training, torch_compile=on)).blocks[0].forward for on in (False, True)
    )
    d, kv, f = 2048, 512, 8192
    adapters = (d + f) + 2 * d + 2 * d  # read by their products, written by these, read by the sums
    assert fused["elementwise_bytes"] == 2 * 64 * (11 * d + 2 * kv + 3 * f + adapters) < eager["elementwise_bytes"]
    assert {**eager, "elementwise_bytes": 0} == {**fused, "elementwise_bytes": 0}


def test_a_compiled_gpt_2_keeps_its_products_too_and_others_are_refused() -> None:
    eager, fused = (
        load_workload("gpt2", Training(sequence_length=64, torch_compile=on)).blocks[0] for on in (False, True)
    )
    d, f = 768, 3072
    assert fused.forward["elementwise_bytes"] == 2 * 64 * (8 * d + 2 * f) < eager.forward["elementwise_bytes"]
    assert fused.saved_bytes == 2 * 64 * (6 * d + 2 * f) < eager.saved_bytes
    with pytest.raises(
        WorkloadError, match="of GPT-2 without adapters; this is gpt2 with lora: leave out torch_compile"
    ):
        trace_config("x", config_of("gpt2"), Training(sequence_length=8, lora="r=4", torch_compile=True))
    with pytest.raises(WorkloadError, match="this is mixtral"):
        trace_config("x", config_of("mixtral"), Training(sequence_length=8, torch_compile=True))
    for wrong in ({"dtype": "fp32", "autocast": "bf16"}, {"attention": "plain"}):
        with pytest.raises(WorkloadError, match="torch_compile is described of blocks in one type"):
            Training(torch_compile=True, **wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["gpt2", "llama-3.2-1b", "qwen3-4b"])
def test_what_is_made_again_of_a_compiled_block_takes_its_part_of_forward(model: str) -> None:
    """All but the last product and the sum behind it."""
    block = load_workload(model, Training(sequence_length=64, torch_compile=True)).blocks[0]
    made = total_work(t.recompute for t in block.saved)
    assert {kind for kind, amount in made.items() if amount} == set(block.forward)
    assert all(0.5 * amount < made[kind] <= amount for kind, amount in block.forward.items())
    assert made["attention_bf16_flops"] == block.forward["attention_bf16_flops"]
    assert all(need < t.index for t in block.saved for need in t.needs)
    shapes = [shape for shape in block.shapes if len(shape) == 2]
    last = max(rows * columns for rows, columns in shapes)  # of the MLP, whose matrices are alike
    assert block.forward["matmul_bf16_flops"] - made["matmul_bf16_flops"] == pytest.approx(2 * 64 * last)


def test_operators_are_chosen_among_those_of_pytorch() -> None:
    machine = load_machine("dgx-8xa100-80gb", ["gpu.count=1"])
    training = Training(sequence_length=512, torch_compile=True)
    steps = {
        how: predict("fsdp", load_workload("llama-3.2-1b", training), machine, {"checkpointing": how}).step_s
        for how in ("on", "selective", "off")
    }
    assert steps["off"] < steps["selective"] < steps["on"]  # type: ignore[operator]
    with pytest.raises(NotCovered):
        load_workload("mixtral-8x7b", training)
