"""Llama and its relatives (Mistral, Qwen2): RMSNorm, rotary positions, grouped queries, a gated MLP."""

from __future__ import annotations

from tierplan.sim.workloads.families.ops import (
    activation,
    add,
    fused_attention,
    linear,
    mul,
    reshaped,
    rms_norm,
    rotate,
    to_dtype,
)
from tierplan.sim.workloads.families.tape import Tape, Value
from tierplan.sim.workloads.families.units import Config, Family, causal_loss, embedding, position_ids
from tierplan.sim.workloads.workload import NotCovered, Training


def projection(tape: Tape, x: Value, width: int, *, bias: bool) -> Value:
    weight = tape.parameter(width, x.shape[-1])
    return linear(tape, x, weight, tape.parameter(width) if bias else None)


def block(tape: Tape, config: Config, x: Value) -> Value:
    hidden_size, heads, head_dim = config.hidden, config.heads, head_dim_of(config)
    groups = config.number("num_key_value_heads", heads)
    inner = config.number("intermediate_size")
    qkv_bias = config.flag("attention_bias", default=False) or config.raw["model_type"] == "qwen2"
    out_bias, mlp_bias = config.flag("attention_bias", default=False), config.flag("mlp_bias", default=False)
    batch, length = x.shape[0], x.shape[1]
    tables = (length, head_dim)
    cos, sin = tape.outside(*tables), tape.outside(*tables)
    residual = x
    tape.scope = "self_attn"
    hidden = rms_norm(tape, x, tape.parameter(hidden_size))
    q, k = (
        reshaped(tape, projection(tape, hidden, n * head_dim, bias=qkv_bias)).view(batch, length, n, head_dim)
        for n in (heads, groups)
    )
    v = projection(tape, hidden, groups * head_dim, bias=qkv_bias)
    q, k = rotated(tape, q, k, cos, sin)
    attended = fused_attention(tape, q, k, v, heads=heads, head_dim=head_dim)
    del hidden, q, k, v
    hidden = add(tape, projection(tape, attended, hidden_size, bias=out_bias), residual)
    del attended
    residual = hidden
    tape.scope = "mlp"
    hidden = rms_norm(tape, hidden, tape.parameter(hidden_size))
    hidden = gated(tape, hidden, config, inner, bias=mlp_bias)
    return add(tape, residual, hidden)


def rotated(tape: Tape, q: Value, k: Value, cos: Value, sin: Value) -> tuple[Value, Value]:
    return rotate(tape, q, cos, sin), rotate(tape, k, cos, sin)


def gated(tape: Tape, x: Value, config: Config, inner: int, *, bias: bool) -> Value:
    gate = config.text("hidden_act", "silu")
    return projection(
        tape,
        mul(
            tape,
            activation(tape, projection(tape, x, inner, bias=bias), gate),
            projection(tape, x, inner, bias=bias),
        ),
        config.hidden,
        bias=bias,
    )


def head_dim_of(config: Config) -> int:
    return config.number("head_dim", config.hidden // config.heads)


def embed(tape: Tape, config: Config, ids: Value) -> Value:
    words = embedding(tape, ids, config.vocabulary, config.hidden)
    tape.hold(*rotary_tables(tape, position_ids(tape, ids.shape[1]), head_dim_of(config)))
    return words


def rotary_tables(tape: Tape, positions: Value, head_dim: int) -> tuple[Value, ...]:
    """cos and sin for each position, computed in fp32; the positions are kept beside them."""
    length = positions.shape[1]
    wide = tape.empty((length,), "fp32")
    tape.record("_to_copy", [positions], [wide], tape.moved(positions, wide))
    frequencies = tape.outside(head_dim // 2, dtype="fp32")
    angles = tape.empty((length, head_dim // 2), "fp32")
    tape.record("mul", [wide, frequencies], [angles], tape.moved(wide, frequencies, angles))
    del wide
    both = tape.empty((length, head_dim), "fp32")
    tape.record("cat", [angles], [both], tape.moved(angles, angles, both))
    cos = scaled_function(tape, both, "cos")
    sin = scaled_function(tape, both, "sin")
    return to_dtype(tape, cos, tape.training.dtype), to_dtype(tape, sin, tape.training.dtype), positions


def scaled_function(tape: Tape, x: Value, name: str) -> Value:
    result, out = tape.empty(x.shape, x.dtype), None
    tape.record(name, [x], [result], tape.moved(x, result))
    out = tape.empty(x.shape, x.dtype)
    tape.record("mul", [result], [out], tape.moved(result, out))
    return out


def head(tape: Tape, config: Config, x: Value, labels: Value) -> Value:
    hidden = rms_norm(tape, x, tape.parameter(config.hidden))
    matrix = tape.parameter(config.vocabulary, config.hidden, shared=config.flag("tie_word_embeddings", default=False))
    return causal_loss(tape, linear(tape, hidden, matrix), labels)


def shared(config: Config, training: Training) -> int:
    """Bytes of cos and sin."""
    return 2 * training.sequence_length * head_dim_of(config) * training.param_bytes


def check(config: Config, training: Training) -> None:
    """Refuses what needs a mask, or kernels that nobody has compared."""
    window = config.raw.get("sliding_window")
    uses_window = config.flag("use_sliding_window", default=config.raw["model_type"] == "mistral")
    if uses_window and isinstance(window, int) and training.sequence_length > window:
        raise NotCovered(
            f"sequence_length is {training.sequence_length}, longer than the attention window of {window}: that takes "
            "a mask, which the closed forms do not cover; use tracing (--exact)"
        )
    if (
        training.backend == "cuda"
        and training.dtype == "fp32"
        and config.number("num_key_value_heads", config.heads) != config.heads
    ):
        raise NotCovered(
            "fp32 attention with grouped queries on CUDA is not covered by the closed forms; "
            "use bf16, or tracing (--exact)"
        )


FAMILY = Family(embed=embed, block=block, head=head, shared=shared, check=check)
