"""OPT: separate query, key and value with biases, ReLU, learned positions with an offset, a tied head."""

from __future__ import annotations

from tierplan.sim.workloads.families.ops import activation, add, dropout, fused_attention, layer_norm, linear, scale
from tierplan.sim.workloads.families.tape import Tape, Value
from tierplan.sim.workloads.families.units import Config, Family, causal_loss, embedding
from tierplan.sim.workloads.workload import NotCovered, Training

DROPOUT = 0.1
OFFSET = 2
"""Rows of the table of positions that no position uses."""


def block(tape: Tape, config: Config, x: Value) -> Value:
    width, inner = config.hidden, config.number("ffn_dim", 3072)
    residual = x
    tape.scope = "self_attn"
    hidden = layer_norm(tape, x, tape.parameter(width), tape.parameter(width))
    q = scale(tape, projection(tape, hidden, width))
    k, v = projection(tape, hidden, width), projection(tape, hidden, width)
    hidden = attended(tape, config, q, k, v)
    del q, k, v
    hidden = dropout(tape, hidden, config.fraction("dropout", DROPOUT))
    hidden = add(tape, residual, hidden)
    residual = hidden
    tape.scope = "ffn"
    hidden = layer_norm(tape, hidden, tape.parameter(width), tape.parameter(width))
    hidden = projection(tape, hidden, inner)
    hidden = activation(tape, hidden, config.text("activation_function", "relu"))
    hidden = projection(tape, hidden, width)
    hidden = dropout(tape, hidden, config.fraction("dropout", DROPOUT))
    return add(tape, residual, hidden)


def attended(tape: Tape, config: Config, q: Value, k: Value, v: Value) -> Value:
    out = fused_attention(tape, q, k, v, heads=config.heads, head_dim=config.hidden // config.heads)
    return projection(tape, out, config.hidden)


def projection(tape: Tape, x: Value, width: int) -> Value:
    return linear(tape, x, tape.parameter(width, x.shape[-1]), tape.parameter(width))


def embed(tape: Tape, config: Config, ids: Value) -> Value:
    words = embedding(tape, ids, config.vocabulary, config.hidden)
    mask = tape.empty(ids.shape, "fp32")
    tape.record("ones", [], [mask], tape.moved(mask))
    numbers = place_numbers(tape, mask)
    tape.hold(numbers)  # blocks get it
    places = embedding(tape, moved_on(tape, numbers), config.number("max_position_embeddings") + OFFSET, config.hidden)
    return add(tape, words, places)


def place_numbers(tape: Tape, mask: Value) -> Value:
    """Positions counted from the mask, in fp32, then as integers."""
    counted, product, less = (tape.empty(mask.shape, "fp32") for _ in range(3))
    numbers = tape.empty(mask.shape, "int64")
    tape.record("cumsum", [mask], [counted], tape.moved(mask, counted))
    tape.record("mul", [counted, mask], [product], tape.moved(counted, mask, product))
    tape.record("sub", [product], [less], tape.moved(product, less))
    tape.record("_to_copy", [less], [numbers], tape.moved(less, numbers))
    return numbers


def moved_on(tape: Tape, numbers: Value) -> Value:
    out = tape.empty(numbers.shape, "int64")
    tape.record("add", [numbers], [out], tape.moved(numbers, out))
    return out


def head(tape: Tape, config: Config, x: Value, labels: Value) -> Value:
    hidden = layer_norm(tape, x, tape.parameter(config.hidden), tape.parameter(config.hidden))
    matrix = tape.parameter(config.vocabulary, config.hidden, shared=config.tied)
    return causal_loss(tape, linear(tape, hidden, matrix), labels)


def check(config: Config, training: Training) -> None:
    """Refuses the variants of the smallest and the 350 M models."""
    if config.number("word_embed_proj_dim", config.hidden) != config.hidden:
        raise NotCovered("word_embed_proj_dim differs from hidden_size, which takes tracing (--exact)")
    if not config.flag("do_layer_norm_before", default=True):
        raise NotCovered("do_layer_norm_before is false, which takes tracing (--exact)")
    if config.fraction("attention_dropout", 0.0) > 0:
        raise NotCovered("attention_dropout is above 0, which takes tracing (--exact)")


FAMILY = Family(embed=embed, block=block, head=head, check=check)
