"""BERT with its masked-language-modelling head: LayerNorm after each half, attention in both directions."""

from __future__ import annotations

from tierplan.sim.workloads.families.ops import activation, add, dropout, fused_attention, layer_norm, linear, product
from tierplan.sim.workloads.families.tape import Tape, Value
from tierplan.sim.workloads.families.units import Config, Family, check_attention, cross_entropy, embedding
from tierplan.sim.workloads.workload import NotCovered, Training

DROPOUT = 0.1
"""BERT's own, where a config does not say."""


def block(tape: Tape, config: Config, x: Value) -> Value:
    width = config.hidden
    tape.scope = "attention"
    q, k, v = (linear(tape, x, width, name) for name in ("query", "key", "value"))
    drops = config.fraction("attention_probs_dropout_prob", DROPOUT) > 0
    sizes = {"heads": config.heads, "head_dim": width // config.heads}
    attended = fused_attention(tape, q, k, v, **sizes, drops=drops, causal=False)
    del q, k, v
    attended = closed(tape, config, attended, x)
    tape.scope = "ffn"
    inner = linear(tape, attended, config.number("intermediate_size"), "dense")
    inner = activation(tape, inner, config.text("hidden_act", "gelu"))
    return closed(tape, config, inner, attended)


def closed(tape: Tape, config: Config, x: Value, residual: Value) -> Value:
    """The end of each half: projection, dropout, residual, norm."""
    hidden = linear(tape, x, config.hidden, "dense")
    hidden = dropout(tape, hidden, config.fraction("hidden_dropout_prob", DROPOUT))
    return layer_norm(tape, add(tape, hidden, residual))


def embed(tape: Tape, config: Config, ids: Value) -> Value:
    length, positions = ids.shape[1], config.number("max_position_embeddings", 512)
    table = tape.outside(1, positions, dtype="int64")
    places = Value((1, length), "int64", table.storage)
    kinds = tape.made("gather", [table, places], (1, length), "int64")
    words = embedding(tape, ids, config.vocabulary, config.hidden)
    of_kind = embedding(tape, kinds.view(*ids.shape), config.number("type_vocab_size", 2), config.hidden, rank=1)
    hidden = add(tape, words, of_kind)
    of_place = embedding(tape, places, positions, config.hidden)
    hidden = add(tape, hidden, of_place)
    hidden = layer_norm(tape, hidden, rank=2)
    return dropout(tape, hidden, config.fraction("hidden_dropout_prob", DROPOUT))


def head(tape: Tape, config: Config, x: Value, labels: Value) -> Value:
    hidden = linear(tape, x, config.hidden, "dense")
    hidden = activation(tape, hidden, config.text("hidden_act", "gelu"))
    hidden = layer_norm(tape, hidden)
    tape.num_modules += 1  # of which the output's bias is, before all else of the head
    tape.rank = -1
    hidden = product(tape, hidden, config.vocabulary, shared=True)
    return cross_entropy(tape, hidden, labels)


def check(config: Config, training: Training) -> None:
    """Refuses the loss of the next token, which alone is taken in chunks."""
    check_attention(config, training, "attention_probs_dropout_prob", DROPOUT)
    if training.loss_chunks > 1:
        raise NotCovered(
            f"loss_chunks is {training.loss_chunks}, but BERT's loss is not that of the next token, which alone is "
            "taken in chunks; leave it out"
        )
    named = config.raw.get("architectures")
    if isinstance(named, list) and "BertLMHeadModel" in named:
        raise NotCovered(
            "architectures has BertLMHeadModel; the closed forms cover BertForMaskedLM; use tracing (--exact)"
        )


COVERS = {
    "is_decoder": False,
    "add_cross_attention": False,
    "chunk_size_feed_forward": 0,
    "tie_word_embeddings": True,
}
LAYERS = {"query", "key", "value", "dense"}
FAMILY = Family(embed=embed, block=block, head=head, check=check, covers=COVERS, layers=LAYERS)
