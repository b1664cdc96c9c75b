"""GPT-2: fused query, key and value, LayerNorm before each half, learned positions, a tied head."""

from __future__ import annotations

from tierplan.sim.families.ops import activation, add, fused_attention, layer_norm, linear, split
from tierplan.sim.families.tape import Tape, Value
from tierplan.sim.families.units import Config, Family, causal_loss, embedding, position_ids

__all__ = ["FAMILY"]


def block(tape: Tape, config: Config, x: Value) -> Value:
    width, heads = config.hidden, config.heads
    inner = config.number("n_inner", 4 * width)
    residual = x
    tape.scope = "attn"
    hidden = layer_norm(tape, x, tape.parameter(width), tape.parameter(width))
    qkv = linear(tape, hidden, tape.parameter(width, 3 * width), tape.parameter(3 * width))
    q, k, v = split(tape, qkv, [width] * 3)
    attended = fused_attention(tape, q, k, v, heads=heads, head_dim=width // heads)
    del hidden, qkv, q, k, v
    attended = linear(tape, attended, tape.parameter(width, width), tape.parameter(width))
    hidden = add(tape, attended, residual)
    residual = hidden
    tape.scope = "mlp"
    hidden = layer_norm(tape, hidden, tape.parameter(width), tape.parameter(width))
    hidden = linear(tape, hidden, tape.parameter(width, inner), tape.parameter(inner))
    hidden = activation(tape, hidden, config.text("activation_function", "gelu_new"))
    hidden = linear(tape, hidden, tape.parameter(inner, width), tape.parameter(width))
    return add(tape, residual, hidden)


def embed(tape: Tape, config: Config, ids: Value) -> Value:
    words = embedding(tape, ids, config.vocabulary, config.hidden)
    positions = position_ids(tape, ids.shape[1])
    return add(tape, words, embedding(tape, positions, config.number("n_positions", 1024), config.hidden))


def head(tape: Tape, config: Config, x: Value, labels: Value) -> Value:
    hidden = layer_norm(tape, x, tape.parameter(config.hidden), tape.parameter(config.hidden))
    matrix = tape.parameter(config.vocabulary, config.hidden, shared=config.tied)
    logits = linear(tape, hidden, matrix)
    return causal_loss(tape, logits, labels)


FAMILY = Family(embed=embed, block=block, head=head)
