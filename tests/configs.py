"""Small configs of many families, in two sizes."""

from __future__ import annotations

from tierplan.sim.workloads.models import SUPPORTED

LLAMA = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "max_position_embeddings": 64,
    "vocab_size": 100,
}
CONFIGS: dict[str, dict[str, object]] = {
    "gpt2": {
        "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 100,
        "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0,
    },
    "opt": {
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 256, "dropout": 0.0,
        "max_position_embeddings": 64, "vocab_size": 100, "word_embed_proj_dim": 64,
    },
    "gpt_neox": {
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256,
        "max_position_embeddings": 64, "vocab_size": 100,
    },
    "llama": dict(LLAMA),
    "mistral": dict(LLAMA),
    "qwen2": dict(LLAMA),
    "qwen3": {**LLAMA, "head_dim": 16},
    "gemma": {**LLAMA, "head_dim": 16, "num_key_value_heads": 1},
    "gemma2": {**LLAMA, "head_dim": 16, "num_key_value_heads": 1, "num_hidden_layers": 4},
    "phi": {
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256,
        "max_position_embeddings": 64, "vocab_size": 100, "resid_pdrop": 0.0,
    },
    "phi3": {**LLAMA, "resid_pdrop": 0.0, "pad_token_id": 0},
    "bert": {
        "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256,
        "max_position_embeddings": 64, "vocab_size": 100, "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "t5": {
        "d_model": 64, "num_layers": 3, "num_heads": 4, "d_kv": 16, "d_ff": 256, "vocab_size": 100,
        "dropout_rate": 0.0, "decoder_start_token_id": 0,
    },
    "mixtral": {**LLAMA, "num_local_experts": 4},
}  # fmt: skip
CLOSED = tuple(family for family in SUPPORTED if family in CONFIGS)
"""Those with closed forms that transformers has."""
WIDTHS = ("n_embd", "hidden_size", "ffn_dim", "word_embed_proj_dim", "intermediate_size", "d_model", "d_ff")


def config_of(family: str, size: int = 1) -> dict[str, object]:
    """A config of this family; size 2 is twice as wide, with one block more."""
    config = dict(CONFIGS[family])
    for name, value in config.items():
        assert size in (1, 2)
        if size == 2 and isinstance(value, int) and name in WIDTHS:
            config[name] = value * 2
        if size == 2 and name in ("head_dim", "d_kv") and isinstance(value, int):
            config[name] = value * 2
    return {"model_type": family, **config}
