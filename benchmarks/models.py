"""The small models that benchmarks train. Nothing here needs more than the other systems have, which are run beside."""

from __future__ import annotations

MIB = 2**20
GIB = 2**30
SEQUENCE_LENGTH = 64
VOCABULARY = 512


def gpt2(
    width: int,
    blocks: int,
    *,
    positions: int = 4 * SEQUENCE_LENGTH,
    vocabulary: int = VOCABULARY,
    heads: int = 0,
    dropout: float = 0.0,
) -> dict[str, object]:
    """The `config.json` of a GPT-2; heads of 64 if not given, bytes for tokens and without dropout unless said."""
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": vocabulary,
        "n_positions": positions,
        "n_embd": width,
        "n_layer": blocks,
        "n_head": heads or width // 64,
        "bos_token_id": 0,
        "eos_token_id": 0,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout),
    }
