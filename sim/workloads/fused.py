"""A fused loss and compiled blocks: kernels that several of PyTorch's become, by Liger or `torch.compile`.

Which kernels a compiler makes is in no model's code. So they are described here, from what PyTorch's own kernels do, by
closed forms or traced: what products and attention compute stays, and what lies between moves each value once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tierplan.sim.workloads.adapters import read_adapters
from tierplan.sim.workloads.formats import format_of
from tierplan.sim.workloads.workload import DTYPE_BYTES, SavedTensor, Training, Unit, Workload, WorkloadError

COMPILED = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
"""Model types whose compiled blocks are described."""
OF_NORM_BYTES = (4, 16)
"""Per value of the head's input, while its norm is computed in fp32, and while the gradient of it is."""


def with_fused(workload: Workload) -> Workload:
    """The workload with what its training asks for. Raises `WorkloadError` for a model of which it is not described."""
    training, units = workload.training, list(workload.units)
    if training.torch_compile:
        parts, kept = _block_of(workload), dict[tuple[int, int], tuple[SavedTensor, ...]]()
        for u, unit in enumerate(units):
            if unit.kind == "block":
                both = (id(unit.forward), id(unit.saved))  # blocks that have theirs in common still do
                if both not in kept:
                    kept[both] = tuple(_saved(unit, parts, training))
                units[u] = _compiled(unit, parts, training, kept[both])
    if training.loss == "fused":
        units[-1] = _with_fused_loss(units[-1], workload)
    return replace(workload, units=tuple(units))


# ---- loss ----


def _with_fused_loss(head: Unit, workload: Workload) -> Unit:
    """The head with one kernel for the loss, which reads logits in 16 bits and writes in their place, forward and
    backward. No logits are made again, but those of a matrix that is not trained where the loss is in chunks.

    Logits in chunks take the memory that those of PyTorch's kernels take, which is no less; all at once are kept as
    they are, and nothing beside them.
    """
    t = workload.training
    tokens = t.per_device_train_batch_size * t.sequence_length
    width = int(str(workload.config.get("vocab_size", 0)))
    dtype = t.autocast or t.dtype
    size_bytes = DTYPE_BYTES[dtype] * tokens * width
    passes = {"elementwise_bytes": 2.0 * size_bytes}
    products = {kind: min(2 * amount, head.backward.get(kind, 2 * amount)) for kind, amount in head.forward.items()}
    head = replace(head, forward={**head.forward, **passes}, backward={**products, **passes})
    if t.loss_chunks > 1:
        return head
    numels = (tokens * width, (tokens - t.per_device_train_batch_size) * width)  # some make none of the last token
    whole = [s for s in head.saved if s.dtype in DTYPE_BYTES and s.size_bytes // DTYPE_BYTES[s.dtype] in numels]
    if not width or not whole:
        raise WorkloadError(
            f"a fused loss is described of the cross entropy of logits over a vocabulary, and the last unit of "
            f"{workload.name} keeps none; leave out loss fused"
        )
    (wide, *_), old_bytes = whole, DTYPE_BYTES[whole[0].dtype] * tokens * width
    logits = replace(wide, name="logits", size_bytes=size_bytes, dtype=dtype)
    casts, gradients = size_bytes + (0 if wide.dtype == dtype else old_bytes), 2 * old_bytes
    in_norm, in_its_backward = (num * head.input_bytes // DTYPE_BYTES[t.dtype] for num in OF_NORM_BYTES)
    added_bytes = head.num_trained * t.grad_bytes  # of the matrix, beside the sum of earlier ones

    def without(gone: int, of_bytes: int, least_bytes: int) -> int:
        return max(of_bytes - gone, min(of_bytes, least_bytes))

    return replace(
        head,
        saved=tuple(logits if s is wide else s for s in head.saved),
        forward_work_bytes=without(casts, head.forward_work_bytes, in_norm),
        backward_work_bytes=without(gradients, head.backward_work_bytes, in_its_backward),
        accumulating_work_bytes=without(gradients, head.accumulating_work_bytes, in_its_backward + added_bytes),
    )


# ---- blocks ----


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A step of a block, per token: a kernel between products, a product, or attention, and what it leaves."""

    name: str
    width: int
    """Of what is kept of it for backward."""
    needs: tuple[str, ...] = ()
    """Parts before it; the block's input is there."""
    values: int = 0
    """That kernels between products read and write for it."""
    weights: int = 0
    """Of its product's matrix."""


def _compiled(block: Unit, parts: tuple[_Part, ...], t: Training, saved: tuple[SavedTensor, ...]) -> Unit:
    """A block whose element-wise work lies in kernels between products; twice as much in backward, where they read what
    was saved beside gradients. They are so few that their launches do not count."""
    tokens, values = t.per_device_train_batch_size * t.sequence_length, sum(part.values for part in parts)
    decoded = _decoded_bytes(block, t)
    forward, backward = (
        {**work, "elementwise_bytes": n * float(DTYPE_BYTES[t.dtype]) * values * tokens + decoded}
        for work, n in ((block.forward, 1), (block.backward, 2))
    )
    return replace(
        block,
        forward=forward,
        backward=backward,
        recompute=None,
        num_kernels=0,
        num_elementwise=0,
        saved=saved,
        common=(),
    )


def _decoded_bytes(block: Unit, t: Training) -> int:
    return format_of(t.base).coding_bytes(block.num_frozen, 2) if t.base else 0


def _saved(block: Unit, parts: tuple[_Part, ...], t: Training) -> list[SavedTensor]:
    """What products and attention read and write. What draws random numbers in PyTorch's block does in this one."""
    tokens, item_bytes = t.per_device_train_batch_size * t.sequence_length, DTYPE_BYTES[t.dtype]
    weights, index = sum(part.weights for part in parts), {part.name: k for k, part in enumerate(parts)}
    decoded, replayable = _decoded_bytes(block, t), all(s.replayable for s in block.saved)
    tensors = []
    for k, part in enumerate(parts):
        share = part.weights / weights
        work = {kind: amount * share for kind, amount in block.forward.items() if "matmul" in kind and share}
        if part.name == "attention":
            work |= {kind: amount for kind, amount in block.forward.items() if "attention" in kind}
        if moved := item_bytes * part.values * tokens + decoded * share:
            work["elementwise_bytes"] = moved
        size_bytes = item_bytes * tokens * part.width
        tensors.append(
            SavedTensor(
                index=k,
                name=part.name,
                size_bytes=size_bytes,
                dtype=t.dtype,
                recompute=work,
                needs=tuple(index[name] for name in part.needs),
                replayable=replayable,
            )
        )
    return [tensor for tensor in tensors if tensor.size_bytes]


def _block_of(workload: Workload) -> tuple[_Part, ...]:
    """A sum and a norm are one kernel, and so is what follows the first products of an MLP. The last part is not kept.

    Raises `WorkloadError` for any other than a Llama's, with LoRA or without, or a GPT-2's without adapters.
    """
    c = {name: int(str(value)) for name, value in workload.config.items() if str(value).isdigit()}
    adapters = read_adapters(workload.training.lora) if workload.training.lora else None
    is_known = workload.model_type in COMPILED and (
        adapters is None or (adapters.method == "lora" and workload.model_type != "gpt2")
    )
    if not is_known:
        raise WorkloadError(
            f"compiled blocks are described of {', '.join(COMPILED[:-1])} with LoRA or without, and of GPT-2 without "
            f"adapters; this is {workload.model_type}{f' with {adapters.method}' if adapters else ''}: "
            "leave out torch_compile"
        )
    return _gpt2(c) if workload.model_type == "gpt2" else _llama(c, adapters.targets if adapters else ())


def _gpt2(c: Mapping[str, int]) -> tuple[_Part, ...]:
    d = c["n_embd"]
    f = c.get("n_inner", 4 * d)
    return (
        _Part(name="norm", width=d, values=2 * d),
        _Part(name="query, key and value", width=3 * d, needs=("norm",), weights=3 * d * d),
        _Part(name="attention", width=d, needs=("query, key and value",)),
        _Part(name="mlp norm", width=d, needs=("attention",), values=4 * d, weights=d * d),
        _Part(name="inner", width=f, needs=("mlp norm",), weights=d * f),
        _Part(name="product", width=f, needs=("inner",), values=2 * f),
        _Part(name="sum", width=0, needs=("product",), values=2 * d, weights=d * f),
    )


def _llama(c: Mapping[str, int], adapted: tuple[str, ...]) -> tuple[_Part, ...]:
    d, f, heads = c["hidden_size"], c["intermediate_size"], c["num_attention_heads"]
    q = heads * c.get("head_dim", d // heads)
    kv = q * c.get("num_key_value_heads", heads) // heads
    layers = {
        "q_proj": (d, q), "k_proj": (d, kv), "v_proj": (d, kv), "o_proj": (q, d),
        "gate_proj": (d, f), "up_proj": (d, f), "down_proj": (f, d),
    }  # fmt: skip
    if unknown := {*adapted} - {*layers, "all-linear"}:
        raise WorkloadError(
            f"compiled blocks are described with adapters of {', '.join(layers)}; these are of "
            f"{', '.join(sorted(unknown))} too: leave out torch_compile"
        )

    def product(name: str, layer: str, *needs: str, values: int = 0, width: int | None = None) -> _Part:
        """With its adapters, where it has some: their products are thin, and read and write beside it."""
        read, written = layers[layer]
        beside = 2 * written + read if {layer, "all-linear"} & {*adapted} else 0
        width = written if width is None else width
        return _Part(name=name, width=width, needs=needs, values=values + beside, weights=read * written)

    return (
        _Part(name="norm", width=d, values=2 * d),
        product("query", "q_proj", "norm", values=2 * q),
        product("key", "k_proj", "norm", values=2 * kv),
        product("value", "v_proj", "norm"),
        _Part(name="attention", width=q, needs=("query", "key", "value")),
        product("output", "o_proj", "attention"),
        _Part(name="mlp norm", width=d, needs=("output",), values=4 * d),
        product("gate", "gate_proj", "mlp norm"),
        product("up", "up_proj", "mlp norm"),
        _Part(name="product", width=f, needs=("gate", "up"), values=3 * f),
        product("sum", "down_proj", "product", values=3 * d, width=0),
    )
