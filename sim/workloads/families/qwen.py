"""Qwen, the first of its name: one matrix for queries, keys and values, RMSNorm, rotary positions, a gated MLP.

With the kernels of flash-attn that its code takes where they are installed: attention, a norm in one kernel, and a
rotation in one, before and after which queries and keys are cast.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierplan.sim.workloads.families.ops import (
    activation,
    add,
    fused_attention,
    kernel,
    layer_norm,
    linear,
    mul,
    product,
    split,
    to_dtype,
)
from tierplan.sim.workloads.families.tape import Storage, Tape, Value
from tierplan.sim.workloads.families.units import Config, Family, cross_entropy, embedding
from tierplan.sim.workloads.workload import NotCovered, Training


def block(tape: Tape, config: Config, x: Value) -> Value:
    tape.scope = "attn"
    normed = layer_norm(tape, x, bias=False)
    attended = attention(tape, normed, config)
    hidden = add(tape, attended, x)
    tape.scope, tape.rank = "mlp", 2
    normed = layer_norm(tape, hidden, bias=False)
    return add(tape, hidden, w1_and_w2(tape, normed, config))


def attention(tape: Tape, x: Value, config: Config) -> Value:
    width, heads = config.hidden, config.heads
    mixed = linear(tape, x, 3 * width, "c_attn")
    query, key, value = split(tape, mixed, [width] * 3)
    query, key = rotated(tape, query), rotated(tape, key)
    attended = fused_attention(tape, query, key, value, heads=heads, head_dim=width // heads)
    return linear(tape, attended, width, "c_proj", bias=not config.flag("no_bias", default=True))


def rotated(tape: Tape, x: Value) -> Value:
    wide = kernel(tape, to_dtype(tape, x, "fp32"), "rotary")
    return to_dtype(tape, wide, x.dtype)


def w1_and_w2(tape: Tape, x: Value, config: Config) -> Value:
    inner, bias = config.number("intermediate_size") // 2, not config.flag("no_bias", default=True)
    first, second = (linear(tape, x, inner, name, bias=bias) for name in ("w1", "w2"))
    both = mul(tape, first, activation(tape, second, "silu"))
    return linear(tape, both, config.hidden, "c_proj", bias=bias)


def embed(tape: Tape, config: Config, ids: Value) -> Value:
    return embedding(tape, ids, config.vocabulary, config.hidden, "wte")


def head(tape: Tape, config: Config, x: Value, labels: Value) -> Value:
    """The loss in the type of logits, or in fp32 under autocast; several sequences' logits are copied less the last."""
    training = tape.training
    tape.keep(len(training.saved_modules) * config.vocabulary * config.hidden)  # originals of copies
    normed = layer_norm(tape, x, bias=False)
    logits = product(tape, normed, config.vocabulary, bias=False, adapts="lm_head" in training.saved_modules)
    batch, length = labels.shape
    shape, labels = (batch, length - 1, config.vocabulary), Value((batch, length - 1), labels.dtype, labels.storage)
    shifted = Value(shape, logits.dtype, logits.storage)
    if batch > 1:
        shifted, labels = (tape.made("clone", [part], part.shape, part.dtype) for part in (shifted, labels))
    numel, part_bytes, dtype = logits.numel, shifted.size_bytes, logits.dtype

    def backward(grad: Storage) -> Sequence[Storage | None]:
        whole = tape.grad(numel, dtype)
        tape.backward_work.append(tape.moved(part_bytes, whole))
        return [whole]

    shifted = tape.connect(shifted, [logits], backward)
    return cross_entropy(tape, to_dtype(tape, shifted, "fp32") if training.autocast else shifted, labels)


def check(config: Config, training: Training) -> None:
    """Refuses what its code computes without flash-attn."""
    if training.backend == "cpu" or training.dtype == "fp32":
        raise NotCovered(
            "the closed forms of model_type 'qwen' are those of flash-attn's kernels, on CUDA in 16 bits; its class "
            "is no part of transformers, so that tracing does not know it either"
        )
    for name in ("attn_dropout_prob", "emb_dropout_prob"):
        if config.fraction(name, 0.0) > 0:
            raise NotCovered(f"{name} is set, which the closed forms do not cover")
    if config.tied or training.loss_chunks > 1:
        raise NotCovered("a tied output matrix and a loss in chunks are not covered for model_type 'qwen'")


LAYERS = {"c_attn", "c_proj", "w1", "w2"}
FAMILY = Family(embed=embed, block=block, head=head, check=check, layers=LAYERS, words="wte", casts=True)
