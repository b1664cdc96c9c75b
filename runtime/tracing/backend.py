"""Makes a forward on fake CPU tensors take the operations that a real CPU step, or a real CUDA step, would take.

Autocast is the CPU's, whose products run in 16 bits as CUDA's do. What CUDA's has in fp32 beside (powers, norms,
softmax) is made so.

`transformers` builds masks when it sees fake tensors that it would not build in a real run; that is undone, but where
batches are padded. For CUDA, attention and dropout are replaced by CUDA's operations, and LayerNorm's statistics are in
fp32, as its kernel has them: a CPU build of PyTorch then saves what a CUDA build saves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from tierplan.runtime.execution.device import TORCH_DTYPES
from tierplan.sim.workloads.workload import Training

aten = torch.ops.aten
IN_FP32 = {
    torch.pow, torch.Tensor.pow, torch.Tensor.__pow__, torch.rsqrt, torch.Tensor.rsqrt, torch.reciprocal, torch.exp,
    torch.Tensor.exp, torch.log, torch.Tensor.log, torch.sum, torch.Tensor.sum, torch.cumsum, torch.Tensor.cumsum,
    torch.norm, torch.Tensor.norm, torch.layer_norm, F.layer_norm, F.group_norm, F.softmax, F.log_softmax,
    torch.softmax, torch.Tensor.softmax, torch.log_softmax, F.cross_entropy, F.nll_loss, F.softplus,
}  # fmt: skip
"""Of what models here use, what CUDA's autocast has in fp32 (PyTorch, `amp`: CUDA ops that can autocast to float32)."""


def result_on(training: Training, func: Any, out: Any) -> Any:
    """What an operation returns on the backend, where it is `out` on the CPU."""
    has_statistics = func in (aten.native_layer_norm.default, aten.native_group_norm.default)
    if training.backend == "cpu" or training.dtype == "fp32" or not has_statistics:
        return out
    normed, *statistics = out
    return (normed, *(t.float() for t in statistics))


@contextmanager
def backend_rules(training: Training) -> Iterator[None]:
    """Inside, `transformers` behaves as in a real run on the training's backend."""
    with ExitStack() as stack:
        import transformers.masking_utils as masking

        stack.enter_context(patch.object(masking, "find_packed_sequence_indices", lambda *a, **k: None))
        stack.enter_context(patch.object(masking, "is_tracing", lambda *a, **k: training.padded))
        if training.autocast:
            stack.enter_context(torch.autocast("cpu", TORCH_DTYPES[training.autocast]))
        if training.autocast and training.backend == "cuda":
            stack.enter_context(_WideOnCuda())
        if training.backend == "cuda":
            stack.enter_context(patch.object(F, "scaled_dot_product_attention", cuda_attention))
            stack.enter_context(patch.object(F, "dropout", cuda_dropout))
        yield


@contextmanager
def behind_autocast() -> Iterator[None]:
    """As backward runs, which comes when autocast is over: casts that it does not need are gone."""
    with torch.autocast("cpu", enabled=False):
        torch.clear_autocast_cache()
        yield


def as_made_before(leaf: torch.Tensor) -> torch.Tensor:
    """What a block gets in place of a leaf: autocast keeps its cast of a leaf, as of a parameter, but casts what a step
    has made anew for each product, which saves its own."""
    return leaf.view_as(leaf) if torch.is_autocast_enabled("cpu") and leaf.requires_grad else leaf


class _WideOnCuda(TorchFunctionMode):
    """Inside, what CUDA's autocast has in fp32 is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in IN_FP32 and torch.is_autocast_enabled("cpu"):
            args = [_wide(x) for x in args]
            kwargs = {name: _wide(x) for name, x in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def _wide(x: Any) -> Any:
    return x.float() if isinstance(x, torch.Tensor) and x.dtype in (torch.bfloat16, torch.float16) else x


def cuda_dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """One kernel that keeps a mask of one byte per element."""
    if p == 0 or not training:
        return x
    return torch.native_dropout(x, p, True)[0]


def cuda_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Flash attention for 16-bit types without a mask, else the memory-efficient kernel, or products of matrices where
    heads are grouped, which that kernel cannot. Never cuDNN's, which the runtime switches off
    (`device.without_cudnn_attention`)."""
    if torch.is_autocast_enabled("cpu"):
        query, key, value = (t.to(torch.get_autocast_dtype("cpu")) for t in (query, key, value))
    flash = attn_mask is None and query.dtype != torch.float32 and query.shape[-1] == value.shape[-1] <= 256
    if flash:
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
    if enable_gqa and query.shape[1] > key.shape[1]:
        return _attention_in_products(query, key, value, attn_mask, dropout_p, is_causal, scale)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
    )[0]


def _attention_in_products(
    query_bhtk: torch.Tensor,
    key_bgtk: torch.Tensor,
    value_bgtk: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> torch.Tensor:
    """What PyTorch computes where no kernel of attention can (`_scaled_dot_product_attention_math`), with CUDA's
    dropout. The softmax is four kernels, which autograd takes for one."""
    dtype, length = query_bhtk.dtype, query_bhtk.shape[2]
    root = (query_bhtk.shape[3] ** -0.5 if scale is None else scale) ** 0.5
    query_bhtk, key_bgtk, value_bgtk = (t.float() for t in (query_bhtk, key_bgtk, value_bgtk))
    query_bhtk = query_bhtk * root
    if is_causal:
        allowed = torch.ones(length, key_bgtk.shape[2], dtype=torch.bool).tril()
        mask = torch.where(allowed, 0.0, torch.scalar_tensor(float("-inf")))
    groups = query_bhtk.shape[1] // key_bgtk.shape[1]
    key_bhtk, value_bhtk = (t.repeat_interleave(groups, 1) for t in (key_bgtk, value_bgtk))
    scores = query_bhtk @ (key_bhtk.transpose(2, 3) * root)
    if mask is not None:
        scores.add_(mask)
    with torch.no_grad():
        inner = torch.softmax(scores, -1)
        empty = scores.eq(float("-inf"))
        is_empty = empty.all(-1, keepdim=True)
    weights = aten._safe_softmax(scores, -1)
    del inner, empty, is_empty, scores
    return (cuda_dropout(weights, dropout_p) @ value_bhtk).to(dtype)
