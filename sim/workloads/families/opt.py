"""OPT: separate query, key and value with biases, ReLU, learned positions with an offset, a tied head."""

from __future__ import annotations

from tierplan.sim.workloads.families.ops import activation, add, dropout, fused_attention, layer_norm, linear, scale
from tierplan.sim.workloads.families.tape import Tape, Value
from tierplan.sim.workloads.families.units import Config, Family, causal_head, embedding
from tierplan.sim.workloads.workload import NotCovered, Training

DROPOUT = 0.1
OFFSET = 2
"""Rows of the table of positions that no position uses."""


def block(tape: Tape, config: Config, x: Value) -> Value:
    width, inner = config.hidden, config.number("ffn_dim", 3072)
    residual = x
    tape.scope = "self_attn"
    hidden = layer_norm(tape, x, rank=1)
    q = scale(tape, linear(tape, hidden, width, "q_proj"))
    k, v = (linear(tape, hidden, width, name) for name in ("k_proj", "v_proj"))
    attended = fused_attention(tape, q, k, v, heads=config.heads, head_dim=width // config.heads)
    hidden = linear(tape, attended, width, "out_proj")
    del q, k, v, attended
    hidden = dropout(tape, hidden, config.fraction("dropout", DROPOUT))
    hidden = add(tape, residual, hidden)
    residual = hidden
    tape.scope, tape.rank = "ffn", 2
    hidden = layer_norm(tape, hidden, rank=3)
    hidden = linear(tape, hidden, inner, "fc1")
    hidden = activation(tape, hidden, config.text("activation_function", "relu"))
    hidden = linear(tape, hidden, width, "fc2")
    hidden = dropout(tape, hidden, config.fraction("dropout", DROPOUT))
    return add(tape, residual, hidden)


def embed(tape: Tape, config: Config, ids: Value) -> Value:
    words = embedding(tape, ids, config.vocabulary, config.hidden, "embed_tokens")
    mask = tape.made("ones", [], ids.shape, "fp32")
    counted = tape.made("cumsum", [mask], mask.shape, "fp32")
    product = tape.made("mul", [counted, mask], mask.shape, "fp32")
    less = tape.made("sub", [product], mask.shape, "fp32")
    numbers = tape.made("_to_copy", [less], mask.shape, "int64")
    del counted, product, less
    tape.hold(numbers)  # blocks get it
    moved_on = tape.made("add", [numbers], numbers.shape, "int64")
    places = embedding(tape, moved_on, config.number("max_position_embeddings") + OFFSET, config.hidden)
    del moved_on
    return add(tape, words, places)


def head(tape: Tape, config: Config, x: Value, labels: Value) -> Value:
    return causal_head(tape, config, layer_norm(tape, x), labels)


def check(config: Config, training: Training) -> None:
    """Refuses words of another width, as the model of 350 M has."""
    if config.number("word_embed_proj_dim", config.hidden) != config.hidden:
        raise NotCovered("word_embed_proj_dim differs from hidden_size, which takes tracing (--exact)")
    if config.fraction("attention_dropout", 0.0) > 0:
        raise NotCovered("attention_dropout is above 0, which takes tracing (--exact)")


COVERS = {
    "do_layer_norm_before": True,
    "_remove_final_layer_norm": False,
    "enable_bias": True,
    "layer_norm_elementwise_affine": True,
    "layerdrop": 0,
}
LAYERS = {"q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"}
FAMILY = Family(embed=embed, block=block, head=head, check=check, covers=COVERS, layers=LAYERS, words="embed_tokens")
