"""GPT-2: fused query, key and value, LayerNorm before each half, learned positions, a tied head."""

from __future__ import annotations

from tierplan.sim.workloads.families.ops import activation, add, dropout, fused_attention, layer_norm, linear, split
from tierplan.sim.workloads.families.tape import Tape, Value
from tierplan.sim.workloads.families.units import Config, Family, causal_head, check_attention, embedding, position_ids
from tierplan.sim.workloads.workload import Training

DROPOUT = 0.1
"""GPT-2's own, where a config does not say."""


def block(tape: Tape, config: Config, x: Value) -> Value:
    width, heads = config.hidden, config.heads
    inner = config.number("n_inner", 4 * width)
    residual = x
    tape.scope = "attn"
    hidden = layer_norm(tape, x)
    qkv = linear(tape, hidden, 3 * width, "c_attn")
    drops = config.fraction("attn_pdrop", DROPOUT) > 0
    q, k, v = split(tape, qkv, [width] * 3)
    attended = fused_attention(tape, q, k, v, heads=heads, head_dim=width // heads, drops=drops)
    del qkv, q, k, v
    attended = linear(tape, attended, width, "c_proj")
    attended = dropout(tape, attended, config.fraction("resid_pdrop", DROPOUT))
    hidden = add(tape, attended, residual)
    residual = hidden
    tape.scope = "mlp"
    normed = layer_norm(tape, hidden)  # lives as long as the MLP
    hidden = linear(tape, normed, inner, "c_fc")
    hidden = activation(tape, hidden, config.text("activation_function", "gelu_new"))
    hidden = linear(tape, hidden, width, "c_proj")
    hidden = dropout(tape, hidden, config.fraction("resid_pdrop", DROPOUT))
    return add(tape, residual, hidden)


def embed(tape: Tape, config: Config, ids: Value) -> Value:
    words = embedding(tape, ids, config.vocabulary, config.hidden, "wte")
    positions = position_ids(tape, ids.shape[1])
    tape.hold(positions)  # a local variable of the model's forward
    num = config.number("max_position_embeddings", config.number("n_positions", 1024))  # as in transformers
    places = embedding(tape, positions, num, config.hidden)
    hidden = add(tape, words, places)
    return dropout(tape, hidden, config.fraction("embd_pdrop", DROPOUT))


def head(tape: Tape, config: Config, x: Value, labels: Value) -> Value:
    return causal_head(tape, config, layer_norm(tape, x), labels)


def check(config: Config, training: Training) -> None:
    check_attention(config, training, "attn_pdrop", DROPOUT)


COVERS = dict.fromkeys(("add_cross_attention", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"), False)
LAYERS = {"c_attn", "c_proj", "c_fc"}
FAMILY = Family(embed=embed, block=block, head=head, check=check, covers=COVERS, layers=LAYERS, words="wte")
