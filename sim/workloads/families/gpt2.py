"""GPT-2: fused query, key and value, LayerNorm before each half, learned positions, a tied head."""

from __future__ import annotations

from tierplan.sim.workloads.families.ops import activation, add, dropout, fused_attention, layer_norm, linear, split
from tierplan.sim.workloads.families.tape import Tape, Value
from tierplan.sim.workloads.families.units import Config, Family, causal_loss, embedding, position_ids
from tierplan.sim.workloads.workload import NotCovered, Training

DROPOUT = 0.1
"""GPT-2's own, where a config does not say."""


def attention_drops(config: Config) -> bool:
    return config.fraction("attn_pdrop", DROPOUT) > 0


def block(tape: Tape, config: Config, x: Value) -> Value:
    width, heads = config.hidden, config.heads
    inner = config.number("n_inner", 4 * width)
    residual = x
    tape.scope = "attn"
    hidden = layer_norm(tape, x, tape.parameter(width), tape.parameter(width))
    qkv = linear(tape, hidden, tape.parameter(width, 3 * width), tape.parameter(3 * width))
    q, k, v = split(tape, qkv, [width] * 3)
    attended = fused_attention(tape, q, k, v, heads=heads, head_dim=width // heads, drops=attention_drops(config))
    del hidden, qkv, q, k, v
    attended = linear(tape, attended, tape.parameter(width, width), tape.parameter(width))
    attended = dropout(tape, attended, config.fraction("resid_pdrop", DROPOUT))
    hidden = add(tape, attended, residual)
    residual = hidden
    tape.scope = "mlp"
    hidden = layer_norm(tape, hidden, tape.parameter(width), tape.parameter(width))
    hidden = linear(tape, hidden, tape.parameter(width, inner), tape.parameter(inner))
    hidden = activation(tape, hidden, config.text("activation_function", "gelu_new"))
    hidden = linear(tape, hidden, tape.parameter(inner, width), tape.parameter(width))
    hidden = dropout(tape, hidden, config.fraction("resid_pdrop", DROPOUT))
    return add(tape, residual, hidden)


def embed(tape: Tape, config: Config, ids: Value) -> Value:
    words = embedding(tape, ids, config.vocabulary, config.hidden)
    positions = position_ids(tape, ids.shape[1])
    tape.hold(positions)  # a local variable of the model's forward
    places = embedding(tape, positions, config.number("n_positions", 1024), config.hidden)
    hidden = add(tape, words, places)
    return dropout(tape, hidden, config.fraction("embd_pdrop", DROPOUT))


def head(tape: Tape, config: Config, x: Value, labels: Value) -> Value:
    hidden = layer_norm(tape, x, tape.parameter(config.hidden), tape.parameter(config.hidden))
    matrix = tape.parameter(config.vocabulary, config.hidden, shared=config.tied)
    logits = linear(tape, hidden, matrix)
    return causal_loss(tape, logits, labels)


def check(config: Config, training: Training) -> None:
    """Refuses attention dropout on a CPU, which computes attention in another way then, and unusual attention."""
    if training.backend == "cpu" and attention_drops(config):
        raise NotCovered(
            f"attn_pdrop is {config.fraction('attn_pdrop', DROPOUT)}: attention with dropout has no fused kernel on a "
            "CPU, which the closed forms do not cover; set attn_pdrop to 0 in the config, or use tracing (--exact)"
        )
    for name in ("add_cross_attention", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"):
        if config.flag(name, default=False):
            raise NotCovered(f"{name} is set, which the closed forms do not cover; use tracing (--exact)")


FAMILY = Family(embed=embed, block=block, head=head, check=check)
