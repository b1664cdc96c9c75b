"""Llama and its relatives (Mistral, Qwen2, Qwen3): RMSNorm, rotary positions, grouped queries, a gated MLP."""

from __future__ import annotations

from collections.abc import Mapping

from tierplan.sim.workloads.families.ops import (
    WIDEST_HEAD,
    activation,
    add,
    attention_in_products,
    fused_attention,
    linear,
    mul,
    reshaped,
    rms_norm,
    rotate,
    to_dtype,
)
from tierplan.sim.workloads.families.tape import Tape, Value
from tierplan.sim.workloads.families.units import Config, Family, causal_head, check_attention, embedding, position_ids
from tierplan.sim.workloads.workload import DTYPE_BYTES, NotCovered, Training, WorkloadError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Whose frequencies are numbers of the model; others are computed from the positions of each batch."""


def block(tape: Tape, config: Config, x: Value) -> Value:
    hidden_size, heads, head_dim = config.hidden, config.heads, head_dim_of(config)
    groups = config.number("num_key_value_heads", heads)
    inner = config.number("intermediate_size")
    kind = config.raw["model_type"]
    normed = kind == "qwen3"
    out_bias = kind in ("llama", "qwen3") and config.flag("attention_bias", default=False)
    mlp_bias = kind == "llama" and config.flag("mlp_bias", default=False)
    qkv_bias = out_bias or kind == "qwen2"
    batch, length = x.shape[0], x.shape[1]
    tables = (length, head_dim)
    cos, sin = tape.outside(*tables), tape.outside(*tables)
    residual = x
    tape.scope = "self_attn"
    hidden = rms_norm(tape, x, tape.parameter(hidden_size, rank=3))

    def project(n: int, name: str) -> Value:
        out = linear(tape, hidden, n * head_dim, name, bias=qkv_bias).view(batch, length, n, head_dim)
        return rms_norm(tape, out, tape.parameter(head_dim, rank=1)) if normed else out

    q, k = (reshaped(tape, project(n, name)) for n, name in ((heads, "q_proj"), (groups, "k_proj")))
    v = linear(tape, hidden, groups * head_dim, "v_proj", bias=qkv_bias)
    in_products = groups != heads and tape.training.backend == "cuda" and tape.training.dtype == "fp32"
    v = reshaped(tape, v.view(*k.shape)) if in_products else v
    q, k = rotate(tape, q, cos, sin), rotate(tape, k, cos, sin)
    drops = config.fraction("attention_dropout", 0.0)
    if in_products:
        attended = attention_in_products(tape, q, k, v, drops)
    else:
        attended = fused_attention(tape, q, k, v, heads=heads, head_dim=head_dim, drops=drops > 0)
    attended = linear(tape, attended, hidden_size, "o_proj", bias=out_bias)
    del hidden, q, k, v
    hidden = residual = add(tape, attended, residual)
    del attended
    tape.scope, tape.rank = "mlp", 2
    hidden = rms_norm(tape, hidden, tape.parameter(hidden_size, rank=3))
    hidden = gated(tape, hidden, config, inner, bias=mlp_bias)
    return add(tape, residual, hidden)


def gated(tape: Tape, x: Value, config: Config, inner: int, *, bias: bool) -> Value:
    """No local variables: a tensor dies when the next one is made from it."""
    gate = config.text("hidden_act", "silu")

    def project(name: str) -> Value:
        return linear(tape, x, inner, name, bias=bias)

    product = mul(tape, activation(tape, project("gate_proj"), gate), project("up_proj"))
    return linear(tape, product, config.hidden, "down_proj", bias=bias)


def head_dim_of(config: Config) -> int:
    width = config.number("head_dim", config.hidden // config.heads)
    if width % 2:
        raise WorkloadError(f"heads are {width} wide in the config; rotary positions turn pairs, so make that even")
    return width


def embed(tape: Tape, config: Config, ids: Value) -> Value:
    words = embedding(tape, ids, config.vocabulary, config.hidden, "embed_tokens")
    tape.hold(*rotary_tables(tape, position_ids(tape, ids.shape[1]), head_dim_of(config)))
    return words


def rotary_tables(tape: Tape, positions: Value, head_dim: int) -> tuple[Value, ...]:
    """cos and sin for each position, computed in fp32; the positions are kept beside them."""
    length = positions.shape[1]
    wide = tape.made("_to_copy", [positions], (length,), "fp32")
    frequencies = tape.outside(head_dim // 2, dtype="fp32")
    angles = tape.made("mul", [wide, frequencies], (length, head_dim // 2), "fp32")
    del wide
    both = tape.made("cat", [angles, angles], (length, head_dim), "fp32")
    functions = (tape.made(name, [both], both.shape, both.dtype) for name in ("cos", "sin"))
    cos, sin = (tape.made("mul", [x], x.shape, x.dtype) for x in functions)
    return to_dtype(tape, cos, tape.training.dtype), to_dtype(tape, sin, tape.training.dtype), positions


def head(tape: Tape, config: Config, x: Value, labels: Value) -> Value:
    hidden = rms_norm(tape, x, tape.parameter(config.hidden))
    return causal_head(tape, config, hidden, labels, tied=False)


def shared(config: Config, training: Training) -> int:
    """Bytes of cos and sin."""
    return 2 * training.sequence_length * head_dim_of(config) * DTYPE_BYTES[training.dtype]


def check(config: Config, training: Training) -> None:
    """Refuses what needs a mask, or kernels that nobody has compared."""
    check_attention(config, training, "attention_dropout", 0.0)
    rope = config.raw.get("rope_parameters") or config.raw.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else rope
    if kind not in ROPE_TYPES:
        raise NotCovered(
            f"rope_type is {kind!r}; the closed forms cover {', '.join(ROPE_TYPES)}; use tracing (--exact)"
        )
    groups = config.number("num_key_value_heads", config.heads)
    if groups != config.heads and head_dim_of(config) > WIDEST_HEAD:
        raise NotCovered(
            f"{config.heads} heads of {head_dim_of(config)} share {groups} keys and values, which transformers repeats "
            f"for heads wider than {WIDEST_HEAD}: the closed forms do not cover that; use tracing (--exact)"
        )
    window = config.raw.get("sliding_window")
    uses_window = config.flag("use_sliding_window", default=config.raw["model_type"] == "mistral")
    if uses_window and isinstance(window, int) and training.sequence_length > window:
        raise NotCovered(
            f"sequence_length is {training.sequence_length}, longer than the attention window of {window}: that takes "
            "a mask, which the closed forms do not cover; use tracing (--exact)"
        )


LAYERS = {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}
FAMILY = Family(
    embed=embed,
    block=block,
    head=head,
    shared=shared,
    check=check,
    layers=LAYERS,
    words="embed_tokens",
    has_head_dim=lambda config: config.raw["model_type"] != "llama",
)
