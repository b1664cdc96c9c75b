"""The operations that transformers consist of, as autograd sees them: work, saved tensors, memory in backward.

Shape letters: D model width, O output width. Saved tensors are listed in the order in which PyTorch saves them
(alphabetical by their name in its derivative formulas, inputs before outputs), since that order numbers them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from tierplan.sim.workloads.adapters import is_thin, read_adapters
from tierplan.sim.workloads.families.tape import ITEM_BYTES, Storage, Tape, Value
from tierplan.sim.workloads.formats import format_of
from tierplan.sim.workloads.workload import NotCovered

WIDEST_HEAD = 256
"""Of flash attention."""
COMPOSITE = ("gelu_new", "gelu_python_tanh")
"""Activation functions of several operations, of which five tensors are saved."""
SAVE_INPUT = ("gelu", "gelu_pytorch_tanh", "silu", "swish")
SAVE_OUTPUT = ("relu", "sigmoid", "tanh")
"""Those of one kernel, by what it saves."""


def linear(tape: Tape, x: Value, width: int, name: str = "", *, bias: bool = True) -> Value:
    """A linear layer of a block, with adapters where there are any for its `name`."""
    base = tape.training.base
    out = product(tape, x, width, bias=bias and base != "int4", base=base)
    if base == "int4":  # auto-gptq adds the bias by itself, and PEFT adds adapters to a copy
        out = shift(tape, out, tape.parameter(width)) if bias else out
        out = shift(tape, out)
    if not tape.training.lora:
        return out
    adapters, dtype = read_adapters(tape.training.lora), out.dtype
    if not {name, "all-linear"} & {*adapters.targets}:
        return out
    casts = bool(
        tape.training.autocast
    )  # what adapters in fp32 read is cast to fp32 and back, and so are their weights
    x = to_dtype(tape, x, "fp32" if casts else tape.training.dtype_of_trained)

    def given() -> Value:
        dropped = dropout(tape, x, adapters.dropout)
        return to_dtype(tape, dropped, dtype) if casts else dropped

    low = product(tape, given(), adapters.r, bias=False, adapts=True, casts=casts)
    return to_dtype(
        tape,
        add(tape, out, scale(tape, product(tape, low, width, bias=False, adapts=True, casts=casts))),
        dtype,
    )


def product(
    tape: Tape,
    x: Value,
    width: int,
    *,
    bias: bool = True,
    shared: bool = False,
    adapts: bool = False,
    casts: bool = False,
    base: str = "",
) -> Value:
    """x (.., D) times a weight (O, D), its own or (`shared`) another unit's, with a bias of its own.

    The weight is cast to x's dtype first where autocast `casts` it. A frozen one in codes (`base`) is decoded for each
    product; in int4 once, for forward and backward. A thin product moves bytes besides (`adapters.is_thin`).
    """
    tape.num_modules += 1
    decodes: Mapping[str, float] = {}
    if base:
        codes = tape.codes(width, x.shape[-1], base)
        weight = tape.empty((width, x.shape[-1]), x.dtype)
        decodes = {"elementwise_bytes": format_of(base).coding_bytes(weight.numel, ITEM_BYTES[x.dtype], width)}
        tape.record("decode", [codes], [weight], decodes, num_kernels=format_of(base).num_kernels)
        decodes = {} if base == "int4" else decodes
    else:
        weight = tape.parameter(width, x.shape[-1], shared=shared, adapts=adapts)
        weight = kernel(tape, weight, "_to_copy", dtype=x.dtype) if casts else weight
    added = tape.parameter(width) if bias else None
    rows = x.numel // x.shape[-1]
    flops = 2 * rows * weight.numel
    kept = codes if decodes else weight
    saved = tape.save(*((kept,) if x.needs_grad else ()), *((x,) if weight.needs_grad else ()))
    out = tape.empty((*x.shape[:-1], width), x.dtype)
    thin = tape.moved(x, weight, out) if is_thin(tape.training.lora, rows, width, x.shape[-1]) else {}
    work = {f"matmul_{x.dtype}_flops": flops, **({} if added else thin)}
    tape.record("addmm" if added else "mm", [x, weight], [out], work)
    inputs = [x, weight, *([added] if added else [])]
    num_x, num_weight, dtype, wants_x, wants_weight = x.numel, weight.numel, x.dtype, x.needs_grad, weight.needs_grad

    def backward(grad: Storage) -> Sequence[Storage | None]:
        assert saved is not None
        if decodes:
            again = tape.grad(num_weight, dtype)
            tape.backward_work.append(decodes)
        tape.backward_work.append({f"matmul_{dtype}_flops": flops * (wants_x + wants_weight)})
        tape.backward_work += [thin] * (wants_x + wants_weight)
        grads = [tape.grad(num_x, dtype) if wants_x else None, tape.grad(num_weight, dtype) if wants_weight else None]
        if decodes:
            del again
        if bias and wants_weight:
            grads.append(tape.grad(width, dtype))
            tape.backward_work.append(tape.moved(grad, grads[-1] or 0))
        return [*grads, None]

    return tape.connect(out, inputs, backward)


def layer_norm(tape: Tape, x: Value, *, rank: int | None = None, bias: bool = True) -> Value:
    """With parameters of its own. Statistics are in their dtype on a CPU, in fp32 on a GPU."""
    tape.num_modules += 1
    dtype, num_x, width = x.dtype, x.numel, x.shape[-1]
    inputs = [x, *(tape.parameter(width, rank=rank) for _ in range(1 + bias))]
    wanted = [value.needs_grad for value in inputs]
    saved = list(tape.save(*inputs)) if any(wanted) else []
    out = tape.empty(x.shape, dtype)
    statistics = dtype if tape.training.backend == "cpu" else "fp32"
    mean, rstd = (tape.empty((*x.shape[:-1], 1), statistics) for _ in range(2))
    tape.record("native_layer_norm", inputs, [out, mean, rstd], tape.moved(*inputs, out, mean, rstd))
    saved += tape.save(mean, rstd) if any(wanted) else []

    def backward(grad: Storage) -> Sequence[Storage | None]:
        sizes = (num_x, *[width] * (len(wanted) - 1))
        grads = [tape.grad(n, dtype) if wants else None for n, wants in zip(sizes, wanted, strict=True)]
        tape.backward_work.append(tape.moved(grad, *saved, *filter(None, grads)))
        return grads

    return tape.connect(out, inputs, backward)


def add(tape: Tape, a: Value, b: Value) -> Value:
    """Equal shapes, or b is broadcast over the batch; of two dtypes becomes fp32."""
    dtype = a.dtype if a.dtype == b.dtype else "fp32"
    narrow = [(v.numel, v.dtype) if v.dtype != dtype and v.needs_grad else None for v in (a, b)]

    def backward(grad: Storage) -> Sequence[Storage | None]:
        grads: list[Storage | None] = []
        for cast in narrow:
            grads.append(tape.grad(*cast) if cast else grad)
            if cast:
                tape.backward_work.append(tape.moved(grad, grads[-1] or 0))
        return grads

    return tape.connect(tape.made("add", [a, b], a.shape, dtype), [a, b], backward)


def kernel(
    tape: Tape,
    x: Value,
    name: str,
    *,
    saves: Literal["nothing", "input", "output"] = "nothing",
    shape: tuple[int, ...] | None = None,
    dtype: str | None = None,
    num_backward: int = 1,
) -> Value:
    """A memory-bound kernel on x, whose derivative is `num_backward` such kernels. The result is like x unless said."""
    saved = tape.save(x) if saves == "input" and x.needs_grad else ()
    out = tape.made(name, [x], x.shape if shape is None else shape, dtype or x.dtype)
    if saves == "output" and x.needs_grad:
        saved = tape.save(out)
    return derived(tape, out, x, saved, num_backward)


def derived(tape: Tape, out: Value, x: Value, saved: Sequence[Storage] = (), num_kernels: int = 1) -> Value:
    """`out`, whose gradient becomes that of x in memory-bound kernels that also read what was saved."""
    numel, dtype, out_bytes = x.numel, x.dtype, out.size_bytes  # its gradient may be a part of a larger storage

    def backward(grad: Storage) -> Sequence[Storage | None]:
        *between, input_grad = (tape.grad(numel, dtype) for _ in range(num_kernels))
        tape.backward_work.append(tape.moved(out_bytes, *saved, *between, *between, input_grad))
        return [input_grad]

    return tape.connect(out, [x], backward)


def scale(tape: Tape, x: Value) -> Value:
    """x times a number: nothing is saved."""
    return kernel(tape, x, "mul")


def shift(tape: Tape, x: Value, *others: Value) -> Value:
    """x plus a number, or what is not trained, which passes its gradient on; or a copy of it."""
    return tape.connect(tape.made("add", [x, *others], x.shape, x.dtype), [x], lambda grad: [grad])


def copied(tape: Tape, x: Value, shape: tuple[int, ...]) -> Value:
    """x in another layout, or repeated to a larger shape; the gradient of what is repeated is summed."""
    return tape.connect(tape.made("clone", [x], shape, x.dtype), [x], lambda grad: [grad])


def mul(tape: Tape, a: Value, b: Value) -> Value:
    """Elementwise product, in which one may be broadcast: each factor is saved for the other's gradient."""
    saved_b = tape.save(b) if a.needs_grad else None
    saved_a = tape.save(a) if b.needs_grad else None
    whole = max(a, b, key=lambda value: value.numel)
    out = tape.made("mul", [a, b], whole.shape, a.dtype)
    numel, dtype, a_bytes, b_bytes = whole.numel, a.dtype, a.size_bytes, b.size_bytes
    del whole

    def backward(grad: Storage) -> Sequence[Storage | None]:
        grads: list[Storage | None] = []
        for other, size_bytes in ((saved_b, b_bytes), (saved_a, a_bytes)):
            operand_grad = tape.grad(numel, dtype) if other else None
            if operand_grad:
                tape.backward_work.append(tape.moved(operand_grad, operand_grad, size_bytes))
            grads.append(operand_grad)
        return grads

    return tape.connect(out, [a, b], backward)


def power(tape: Tape, x: Value) -> Value:
    """x to an integer power."""
    return kernel(tape, x, "pow", saves="input", num_backward=3)


def activation(tape: Tape, x: Value, name: str) -> Value:
    """An activation function by the name that a config has for it; `NotCovered` where its operations are not known."""
    if name in COMPOSITE:
        return mul(  # no local variables: a tensor dies when the next one is made from it
            tape,
            scale(tape, x),
            shift(tape, kernel(tape, scale(tape, add(tape, x, scale(tape, power(tape, x)))), "tanh", saves="output")),
        )
    if name not in SAVE_INPUT + SAVE_OUTPUT:
        raise NotCovered(
            f"the activation function is {name!r}; the closed forms cover "
            f"{', '.join(sorted(COMPOSITE + SAVE_INPUT + SAVE_OUTPUT))}; use tracing (--exact) for others"
        )
    return kernel(tape, x, name, saves="input" if name in SAVE_INPUT else "output")


def split(tape: Tape, x: Value, parts: Sequence[int]) -> list[Value]:
    """Views of x along its last dimension; their gradients are put together again."""
    whole, dtype = x.numel, x.dtype
    values = [Value((*x.shape[:-1], width), dtype, x.storage) for width in parts]
    gathered: list[Storage] = []

    def backward(grad: Storage) -> Sequence[Storage | None]:
        """Each part is a node that hands its gradient over; the last one to come joins them."""
        gathered.append(grad)
        if len(gathered) < len(parts):
            return [None]
        input_grad = tape.grad(whole, dtype)
        tape.backward_work.append(tape.moved(*gathered, input_grad))
        gathered.clear()
        return [input_grad]

    for value in values:
        tape.connect(value, [x], backward)
    assert sum(parts) == x.shape[-1]
    return values


def dropout(tape: Tape, x: Value, probability: float) -> Value:
    """x itself for 0. A GPU keeps a mask of one byte per element, a CPU one in x's dtype that it multiplies with."""
    if probability == 0:
        return x
    if tape.training.backend == "cpu":
        mask = tape.made("empty_like", [x], x.shape, x.dtype)
        tape.record("bernoulli_", [mask], [mask], tape.moved(mask, mask), random=True)
        tape.record("div_", [mask], [mask], tape.moved(mask, mask))
        return mul(tape, x, mask)
    out, mask = tape.empty(x.shape, x.dtype), tape.empty(x.shape, "bool")
    tape.record("native_dropout", [x], [out, mask], tape.moved(x, out, mask), random=True)
    return derived(tape, out, x, tape.save(mask) if x.needs_grad else ())


def to_dtype(tape: Tape, x: Value, dtype: str) -> Value:
    """x itself if it has the dtype."""
    return x if x.dtype == dtype else kernel(tape, x, "_to_copy", dtype=dtype)


def rms_norm(tape: Tape, x: Value, weight: Value) -> Value:
    """Llama's RMSNorm, operation by operation: in fp32, then cast, then scaled."""
    tape.num_modules += 1
    wide = to_dtype(tape, x, "fp32")
    variance = kernel(tape, power(tape, wide), "mean", shape=(*x.shape[:-1], 1))
    wide = mul(tape, wide, kernel(tape, shift(tape, variance), "rsqrt", saves="output", num_backward=3))
    return mul(tape, weight, to_dtype(tape, wide, x.dtype))


def reshaped(tape: Tape, x: Value) -> Value:
    """x (B, S, heads, head_dim) with another layout of heads: a view, whose gradient is copied to come back to x's
    layout; that of one head is in it."""
    return x if x.shape[2] == 1 else derived(tape, Value(x.shape, x.dtype, x.storage), x)


def rotate(tape: Tape, x: Value, cos: Value, sin: Value) -> Value:
    """Rotary positions: x * cos + rotate_half(x) * sin."""
    return add(tape, mul(tape, x, cos), mul(tape, rotate_half(tape, x), sin))


def rotate_half(tape: Tape, x: Value) -> Value:
    """(-second half, first half) of each head."""
    half = (*x.shape[:-1], x.shape[-1] // 2)
    first, second = (derived(tape, Value(half, x.dtype, x.storage), x) for _ in range(2))
    negative = kernel(tape, second, "neg")
    out = tape.made("cat", [negative, first], x.shape, x.dtype)
    tape.connect(out, [negative, first], lambda grad: [grad, grad])
    if out.node is not None:
        out.node.is_view = True
    return out


def fused_attention(
    tape: Tape, q: Value, k: Value, v: Value, *, heads: int, head_dim: int, drops: bool = False, causal: bool = True
) -> Value:
    """Attention that keeps q, k, v, its output and a log-sum-exp per row. q is (B, S, heads * head_dim).

    On a CPU one kernel does it; on a GPU flash attention for 16-bit types and heads up to `WIDEST_HEAD`, else the
    memory-efficient kernel. FLOPs are those of the full square of scores, causal or not, as in PyTorch's counter: two
    products forward, five backward.
    """
    batch, length = q.shape[:2]
    on_cpu, wide = tape.training.backend == "cpu", q.dtype == "fp32" or head_dim > WIDEST_HEAD
    work = f"{'' if causal else 'noncausal_'}attention_{q.dtype}_flops"
    flops = 4 * batch * heads * length * length * head_dim
    wanted = q.needs_grad or k.needs_grad or v.needs_grad
    saved = list(tape.save(k, q, v)) if wanted else []
    out = tape.empty((batch, length, heads * head_dim), q.dtype)
    rows = tape.empty((batch, heads, length if on_cpu or not wide else -(-length // 32) * 32), "fp32")
    seeds = [] if on_cpu else [("int64", ()), ("int64", ())] if wide else [("uint64", (2,)), ("uint64", ())]
    extra = [tape.empty(shape, dtype) for dtype, shape in seeds]
    tape.record("attention", [q, k, v], [out, rows, *extra], {work: flops}, random=drops)
    saved += tape.save(rows, out, *extra) if wanted else []
    sizes, dtype = [value.numel for value in (q, k, v)], q.dtype

    def backward(grad: Storage) -> Sequence[Storage | None]:
        tape.backward_work.append({work: flops * 5 // 2})
        assert saved
        return [tape.grad(size, dtype) for size in sizes]

    return tape.connect(out, [q, k, v], backward)


def attention_in_products(tape: Tape, q: Value, k: Value, v: Value, probability: float) -> Value:
    """Causal attention of q (B, S, heads, head_dim), by products of matrices: it keeps a weight per pair of tokens."""
    batch, length, heads, head_dim = q.shape
    pairs, square = (batch, heads, length, length), (length, length)

    def attended() -> Value:
        query = scale(tape, q)
        allowed = tape.made("tril", [tape.made("ones", [], square, "bool")], square, "bool")
        numbers = (tape.made("scalar_tensor", [], (), q.dtype) for _ in range(2))
        mask = tape.made("where", [allowed, *numbers], square, q.dtype)
        key, value = (copied(tape, each, q.shape) for each in (k, v))
        scores = matmul(tape, copied(tape, query, q.shape) if batch > 1 else query, scale(tape, key), pairs, head_dim)
        tape.record("add_", [scores, mask], [scores], tape.moved(scores, mask, scores))
        inner = tape.made("_softmax", [scores], pairs, q.dtype)  # and what the next two make: they live for a while
        empty = tape.made("eq", [scores], pairs, "bool")
        is_empty = tape.made("all", [empty], pairs[:3], "bool")
        weights = kernel(tape, scores, "_safe_softmax", saves="output")
        del inner, empty, is_empty, scores
        return matmul(tape, dropout(tape, weights, probability), value, q.shape, length)

    out = attended()  # what it has made is gone
    return copied(tape, reshaped(tape, out) if batch > 1 else out, (batch, length, heads * head_dim))


def matmul(tape: Tape, a: Value, b: Value, shape: tuple[int, ...], inner: int) -> Value:
    """Products of a's matrices with b's, over an `inner` dimension."""
    saved = tape.save(*((b,) if a.needs_grad else ()), *((a,) if b.needs_grad else ()))
    out, dtype, wanted = tape.empty(shape, a.dtype), a.dtype, [v.numel if v.needs_grad else 0 for v in (a, b)]
    work = {f"matmul_{dtype}_flops": 2 * out.numel * inner}
    tape.record("bmm", [a, b], [out], work)

    def backward(grad: Storage) -> Sequence[Storage | None]:
        assert saved
        tape.backward_work += [work for size in wanted if size]
        return [tape.grad(size, dtype) if size else None for size in wanted]

    return tape.connect(out, [a, b], backward)
