"""BERT with its masked-language-modelling head: LayerNorm after each half, attention in both directions."""

from __future__ import annotations

from tierplan.sim.workloads.families.ops import activation, add, dropout, fused_attention, layer_norm, linear
from tierplan.sim.workloads.families.tape import Tape, Value
from tierplan.sim.workloads.families.units import Config, Family, cross_entropy, embedding
from tierplan.sim.workloads.workload import NotCovered, Training

DROPOUT = 0.1
"""BERT's own, where a config does not say."""


def block(tape: Tape, config: Config, x: Value) -> Value:
    width = config.hidden
    tape.scope = "attention"
    q, k, v = (projection(tape, x, width) for _ in range(3))
    drops = config.fraction("attention_probs_dropout_prob", DROPOUT) > 0
    attended = fused_attention(tape, q, k, v, heads=config.heads, head_dim=width // config.heads, drops=drops)
    del q, k, v
    attended = closed(tape, config, attended, x)
    tape.scope = "ffn"
    inner = projection(tape, attended, config.number("intermediate_size"))
    inner = activation(tape, inner, config.text("hidden_act", "gelu"))
    return closed(tape, config, inner, attended)


def closed(tape: Tape, config: Config, x: Value, residual: Value) -> Value:
    """The end of each half: projection, dropout, residual, norm."""
    hidden = projection(tape, x, config.hidden)
    hidden = dropout(tape, hidden, config.fraction("hidden_dropout_prob", DROPOUT))
    return norm(tape, add(tape, hidden, residual))


def projection(tape: Tape, x: Value, width: int) -> Value:
    return linear(tape, x, tape.parameter(width, x.shape[-1]), tape.parameter(width))


def norm(tape: Tape, x: Value) -> Value:
    return layer_norm(tape, x, tape.parameter(x.shape[-1]), tape.parameter(x.shape[-1]))


def embed(tape: Tape, config: Config, ids: Value) -> Value:
    length, positions = ids.shape[1], config.number("max_position_embeddings", 512)
    table = tape.outside(1, positions, dtype="int64")
    places = Value((1, length), "int64", table.storage)
    kinds = tape.empty((1, length), "int64")
    tape.record("gather", [table, places], [kinds], tape.moved(table, places, kinds))
    words = embedding(tape, ids, config.vocabulary, config.hidden)
    of_kind = embedding(tape, kinds.view(*ids.shape), config.number("type_vocab_size", 2), config.hidden)
    hidden = add(tape, words, of_kind)
    of_place = embedding(tape, places, positions, config.hidden)
    hidden = add(tape, hidden, of_place)
    hidden = norm(tape, hidden)
    return dropout(tape, hidden, config.fraction("hidden_dropout_prob", DROPOUT))


def head(tape: Tape, config: Config, x: Value, labels: Value) -> Value:
    hidden = projection(tape, x, config.hidden)
    hidden = activation(tape, hidden, config.text("hidden_act", "gelu"))
    hidden = norm(tape, hidden)
    matrix = tape.parameter(config.vocabulary, config.hidden, shared=config.tied)
    return cross_entropy(tape, linear(tape, hidden, matrix, tape.parameter(config.vocabulary)), labels)


def check(config: Config, training: Training) -> None:
    """Refuses attention dropout on a CPU, and BERT as a decoder."""
    if training.backend == "cpu" and config.fraction("attention_probs_dropout_prob", DROPOUT) > 0:
        raise NotCovered(
            "attention_probs_dropout_prob is above 0: attention with dropout has no fused kernel on a CPU, which the "
            "closed forms do not cover; set it to 0 in the config, or use tracing (--exact)"
        )
    for name in ("is_decoder", "add_cross_attention"):
        if config.flag(name, default=False):
            raise NotCovered(f"{name} is set, which the closed forms do not cover; use tracing (--exact)")


FAMILY = Family(embed=embed, block=block, head=head, check=check)
