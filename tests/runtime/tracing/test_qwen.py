"""The closed forms of Qwen, which transformers does not have, against a module written after its published code.

Norm and rotation are kernels of flash-attn there; here stand a layer norm without bias, which reads, writes and keeps
as much, and a function of one kernel each way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tierplan.runtime.tracing.trace import trace_module
from tierplan.sim.workloads.models import workload_of
from tierplan.sim.workloads.workload import NotCovered, Training, Unit

RAW: dict[str, Any] = {
    "model_type": "qwen", "hidden_size": 64, "intermediate_size": 320, "num_attention_heads": 4,
    "num_hidden_layers": 2, "vocab_size": 96, "tie_word_embeddings": False, "no_bias": True,
}  # fmt: skip


def rotated(t: torch.Tensor) -> torch.Tensor:
    return t.float().neg().type_as(t)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width, bias=False)
        self.heads = heads

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mixed = self.c_attn(hidden)
        q, k, v = (x.unflatten(-1, (self.heads, -1)) for x in mixed.split(hidden.shape[-1], dim=2))
        q, k = rotated(q), rotated(k)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(attended.transpose(1, 2).contiguous().flatten(2))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w2 = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.c_proj = nn.Linear(inner, width, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        a1 = self.w1(hidden)
        a2 = self.w2(hidden)
        both = a1 * functional.silu(a2)
        return self.c_proj(both)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width, bias=False)
        self.attn = Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width, bias=False)
        self.mlp = Mlp(width, inner)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.ln_1(hidden)
        attended = self.attn(normed)
        between = attended + hidden
        normed = self.ln_2(between)
        out = self.mlp(normed)
        return between + out  # type: ignore[no-any-return]


class Qwen(nn.Module):
    """Its loss is that of its code: of logits that are copied without the last, in their type or autocast's."""

    def __init__(self) -> None:
        super().__init__()
        width, vocabulary = RAW["hidden_size"], RAW["vocab_size"]
        sizes = (width, RAW["num_attention_heads"], RAW["intermediate_size"] // 2)
        self.wte = nn.Embedding(vocabulary, width)
        self.h = nn.ModuleList(Block(*sizes) for _ in range(RAW["num_hidden_layers"]))
        self.ln_f = nn.LayerNorm(width, bias=False)
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.wte(input_ids)
        for block in self.h:
            hidden = block(hidden)
        return self.lm_head(self.ln_f(hidden))  # type: ignore[no-any-return]


def _loss(logits: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
    shifted = logits[..., :-1, :].contiguous()
    labels = batch["input_ids"][..., 1:].contiguous()
    return functional.cross_entropy(shifted.view(-1, shifted.size(-1)), labels.view(-1))


class Autocast(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.model(input_ids=input_ids)  # type: ignore[no-any-return]


def _loss_under_autocast(logits: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return _loss(logits, batch)


def alike(unit: Unit, **same: Any) -> Unit:
    """Without what a module in memory does not say: names of operations, and sizes in other micro-batches."""
    saved = tuple(replace(t, name="", of_one_bytes=None) for t in unit.saved)
    return replace(unit, saved=saved, other_work_bytes=(), **same)


def traced(model: nn.Module, training: Training, loss: Any = _loss) -> list[Unit]:
    ids = torch.zeros(training.per_device_train_batch_size, training.sequence_length, dtype=torch.int64)
    return [alike(unit) for unit in trace_module(model, {"input_ids": ids}, training, loss=loss).units]


@pytest.mark.parametrize("batch", [1, 3])
def test_closed_forms_are_those_of_its_code(batch: int) -> None:
    training = Training(per_device_train_batch_size=batch, sequence_length=24)
    closed = workload_of("x", RAW, training)
    assert [alike(unit) for unit in closed.units] == traced(Qwen().to(torch.bfloat16), training)


def test_adapters_under_autocast_are_those_of_peft() -> None:
    """But for memory between operations, where autocast keeps the weights that it has cast."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["c_attn", "c_proj", "w1", "w2"], lora_dropout=0.1)
    model = Autocast(peft.get_peft_model(Qwen().to(torch.bfloat16), lora))
    training = Training(sequence_length=24, lora="r=4,dropout=0.1", autocast="bf16")
    between: dict[str, Any] = {"forward_work_bytes": 0, "backward_work_bytes": 0, "accumulating_work_bytes": 0}
    closed = [alike(unit, **between) for unit in workload_of("x", RAW, training).units]
    own = replace(training, autocast="")  # the model has its own, which knows nothing of flash-attn's kernels
    assert closed == [replace(unit, **between) for unit in traced(model, own, _loss_under_autocast)]


def test_adapters_beside_saved_words_launch_as_many_kernels() -> None:
    lora = "r=4,dropout=0.1"
    plain, saved = (
        workload_of("x", RAW, Training(sequence_length=24, lora=text, autocast="bf16"))
        for text in (lora, f"{lora},save=wte+lm_head")
    )
    assert plain.blocks[1].num_kernels == saved.blocks[1].num_kernels
    assert saved.num_trained - plain.num_trained == 2 * RAW["vocab_size"] * RAW["hidden_size"]


@pytest.mark.parametrize(
    ("changes", "settings"),
    [({}, {"dtype": "fp32"}), ({}, {"backend": "cpu"}), ({}, {"loss_chunks": 2}), ({"attn_dropout_prob": 0.1}, {})],
    ids=str,
)
def test_what_its_code_computes_otherwise_is_refused(changes: dict[str, Any], settings: dict[str, Any]) -> None:
    with pytest.raises(NotCovered, match=r"closed forms|model_type .qwen."):
        workload_of("x", {**RAW, **changes}, Training(sequence_length=24, **settings))
