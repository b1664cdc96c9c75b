"""What a compiled block keeps for backward, counted on one that PyTorch compiles."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from tests.configs import config_of
from tierplan.sim.workloads.models import workload_of
from tierplan.sim.workloads.workload import Training

SIZES = {"hidden_size": 128, "intermediate_size": 448, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 32}  # fmt: skip
LENGTH = 64


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_block_keeps_what_its_products_read_and_write() -> None:
    """Beside its input, and statistics of norms and attention, which are small."""
    config = LlamaConfig(**SIZES, num_hidden_layers=1, attn_implementation="sdpa")
    block = LlamaDecoderLayer(config, 0).to(torch.bfloat16).train()
    hidden = torch.randn(1, LENGTH, SIZES["hidden_size"], dtype=torch.bfloat16, requires_grad=True)
    tables = LlamaRotaryEmbedding(config)(hidden, torch.arange(LENGTH)[None])
    outside = {t.untyped_storage()._cdata for t in (*block.parameters(), *tables, hidden)}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in outside and tensor.dtype == torch.bfloat16:
            kept[storage._cdata] = storage.nbytes()
        return tensor

    compiled = torch.compile(lambda x: block(x, position_embeddings=tables), backend="aot_eager_decomp_partition")
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = compiled(hidden)
    training = Training(sequence_length=LENGTH, torch_compile=True)
    workload = workload_of("x", {**config_of("llama"), **SIZES}, training)
    assert out.shape == hidden.shape
    assert workload.blocks[0].saved_bytes == sum(kept.values())
