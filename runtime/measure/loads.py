"""What is measured: one op of each stream, run through the same store, memory and optimizer code as training.

A `Load` is one kind of op at one size. Loads turn over far more memory than the caches hold, as training does. On a
machine without a GPU the device tier is memory of the host, and copies to it are copies between two places in RAM.

Shapes: `b` sequences, `t` tokens, `d` hidden size, `f` four times that, `h` heads, `k` size of a head.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from tierplan.hwmodels.names import COMPUTE, D2H, H2D, HOST_ADAM, NVME_READ, NVME_WRITE
from tierplan.runtime.execution.device import TORCH_DTYPES, Device
from tierplan.runtime.memory.arena import map_host
from tierplan.runtime.memory.store import Extent, Store, measure_weights
from tierplan.runtime.optim.adam import OptimizerSettings, update_states
from tierplan.runtime.optim.states import View, layout_of
from tierplan.sim.workloads.models import workload_of
from tierplan.sim.workloads.work import total_work
from tierplan.sim.workloads.workload import Training

BLOCK = "blocks"
"""Work kind of the load that runs a whole block."""

TINY_HIDDEN = 64
"""Width of a block whose time is all overhead."""
MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Load:
    """An op that can be run again and again."""

    stream: str
    """Where it runs: `gpu0.compute`, ..."""
    kind: str
    """Its work kind: `bytes`, `matmul_bf16_flops`, ..."""
    amount: float
    """Work of one run."""
    run: Callable[[], object]
    """Does the work and returns when it is done."""
    op_amount: float = 0.0
    """Work of one op, where `run` does several (forward and backward); 0: the same as `amount`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured."""

    copy_bytes: tuple[int, ...] = (4 << 10, 256 << 10, 4 * MIB, 32 * MIB)
    """The first of each row is so small that its time is all overhead."""
    file_bytes: tuple[int, ...] = (4 << 10, 256 << 10, 4 * MIB, 32 * MIB, 128 * MIB)
    adam_parameters: tuple[int, ...] = (1 << 10, 1 << 18, 1 << 22)
    hidden: tuple[int, ...] = (256, 512, 1024)
    """Widths of the blocks whose matmuls are measured."""
    block_hidden: int = 512
    """One of them: the width of the block that is measured as a whole, and of attention."""
    tokens: int = 512
    head_dim: int = 64
    area_bytes: int = 256 * MIB
    """Memory that copies and updates turn over, so that caches do not help."""
    file_area_bytes: int = 1024 * MIB
    """Bytes of the file that reads and writes turn over."""


@contextmanager
def loads(
    folders: tuple[Path, ...], sizes: Sizes, *, device: Device, dtypes: tuple[str, ...]
) -> Iterator[tuple[list[Load], tuple[str, ...]]]:
    """All loads of this machine, and what a user should know of them. Holds memory and a file until it is left."""
    weights = measure_weights(folders) if len(folders) > 1 else ()  # as a run stripes over them
    store = Store(folders, weights=weights) if folders else None
    host_pool, cpu = device.host_pool(sizes.area_bytes), Device()
    host = host_pool.take(sizes.area_bytes)
    try:
        all_loads = [_overhead(device)]
        for dtype in dtypes:
            all_loads += [_matmuls(sizes, hidden, dtype, device) for hidden in sizes.hidden]
            all_loads.append(_attention(sizes, dtype, device))
        all_loads += [
            _block(sizes, dtypes[0], device),
            *_copies(sizes, host.data, device),
            *(_update(n, sizes, dtypes[0], cpu) for n in sizes.adam_parameters),
        ]
        if store is not None:
            all_loads += _files(store, sizes)
        yield all_loads, () if store is None else store.notes
    finally:
        host_pool.close()  # unpins it
        if store is not None:
            store.close(remove=True)


# ---- compute ----


def _done(device: Device, stream: str, work: Callable[[], object]) -> Callable[[], None]:
    """`work` on its stream, waited for as the runtime waits."""

    def run() -> None:
        with device.on(stream):
            work()
            device.finish()

    return run


class TransformerBlock(torch.nn.Module):
    """A pre-norm decoder block as GPT-2 has it, with flash attention."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = torch.nn.LayerNorm(hidden), torch.nn.LayerNorm(hidden)
        self.qkv, self.out = torch.nn.Linear(hidden, 3 * hidden), torch.nn.Linear(hidden, hidden)
        self.up, self.down = torch.nn.Linear(hidden, 4 * hidden), torch.nn.Linear(4 * hidden, hidden)

    def forward(self, x_btd: torch.Tensor) -> torch.Tensor:
        batch, tokens, hidden = x_btd.shape
        q_bhtk, k_bhtk, v_bhtk = (
            part_btd.view(batch, tokens, self.num_heads, -1).transpose(1, 2)
            for part_btd in self.qkv(self.norm_1(x_btd)).split(hidden, dim=2)
        )
        mixed_bhtk = F.scaled_dot_product_attention(q_bhtk, k_bhtk, v_bhtk, is_causal=True)
        x_btd = x_btd + self.out(mixed_bhtk.transpose(1, 2).reshape(batch, tokens, hidden))
        return x_btd + self.down(F.gelu(self.up(self.norm_2(x_btd)), approximate="tanh"))


def _overhead(device: Device) -> Load:
    """Forward of a block too small for its work to count: what it costs to launch one. Its amount is one op."""
    block = TransformerBlock(TINY_HIDDEN, 1).to(device.torch_device)
    x_btd = torch.zeros(1, 8, TINY_HIDDEN, device=device.torch_device)
    return Load(COMPUTE, "ops", 1.0, _done(device, COMPUTE, lambda: block(x_btd)))


def _there_and_back(outputs: Callable[[], torch.Tensor], leaves: Sequence[torch.Tensor]) -> None:
    """Forward and backward, gradients of all leaves included and dropped."""
    out = outputs()
    torch.autograd.backward(out, out.detach())
    for leaf in leaves:
        leaf.grad = None


def _matmuls(sizes: Sizes, hidden: int, dtype: str, device: Device) -> Load:
    """The four products of a block, forward (24 * tokens * hidden^2 FLOPs) and backward (twice that)."""
    make = partial(torch.randn, device=device.torch_device, dtype=TORCH_DTYPES[dtype], requires_grad=True)
    x_td, wide_tf = make(sizes.tokens, hidden), make(sizes.tokens, 4 * hidden)
    shapes = ((3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden))
    weights = [make(*shape) for shape in shapes]

    def work() -> None:
        for weight in weights:
            source = x_td if weight.shape[1] == hidden else wide_tf
            _there_and_back(partial(F.linear, source, weight), (source, weight))

    forward = 24.0 * sizes.tokens * hidden * hidden
    return Load(COMPUTE, f"matmul_{dtype}_flops", 3 * forward, _done(device, COMPUTE, work), op_amount=1.5 * forward)


def _attention(sizes: Sizes, dtype: str, device: Device) -> Load:
    """Causal attention of one sequence. FLOPs as workloads count them: of the full square, 2.5 times that backward."""
    hidden, tokens = sizes.block_hidden, sizes.tokens
    heads = max(1, hidden // sizes.head_dim)
    make = partial(torch.randn, device=device.torch_device, dtype=TORCH_DTYPES[dtype], requires_grad=True)
    q_bhtk, k_bhtk, v_bhtk = (make(1, heads, tokens, hidden // heads) for _ in range(3))
    attend = partial(F.scaled_dot_product_attention, q_bhtk, k_bhtk, v_bhtk, is_causal=True)
    forward = 4.0 * tokens * tokens * hidden
    work = _done(device, COMPUTE, lambda: _there_and_back(attend, (q_bhtk, k_bhtk, v_bhtk)))
    return Load(COMPUTE, f"attention_{dtype}_flops", 3.5 * forward, work, op_amount=1.75 * forward)


def _block(sizes: Sizes, dtype: str, device: Device) -> Load:
    """Forward and backward of one whole block: with matmuls and attention known, what is left is elementwise."""
    block = TransformerBlock(sizes.block_hidden, max(1, sizes.block_hidden // sizes.head_dim))
    block.to(device=device.torch_device, dtype=TORCH_DTYPES[dtype])
    x_btd = torch.randn(1, sizes.tokens, sizes.block_hidden, device=device.torch_device, dtype=TORCH_DTYPES[dtype])
    x_btd.requires_grad_()
    leaves = (x_btd, *block.parameters())
    return Load(COMPUTE, BLOCK, 1.0, _done(device, COMPUTE, lambda: _there_and_back(lambda: block(x_btd), leaves)))


def block_work(sizes: Sizes, dtype: str, device: Device) -> dict[str, float]:
    """What the workload model says that `_block` does, forward and backward, by work kind."""
    config = {
        "model_type": "gpt2", "n_layer": 2, "n_embd": sizes.block_hidden, "vocab_size": 256,
        "n_head": max(1, sizes.block_hidden // sizes.head_dim), "n_positions": sizes.tokens,
        "activation_function": "gelu_pytorch_tanh", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
    }  # fmt: skip
    training = Training(
        sequence_length=sizes.tokens,
        dtype=dtype,  # type: ignore[arg-type]  # one of the keys of TORCH_DTYPES
        backend="cuda" if device.is_cuda else "cpu",
    )
    unit = workload_of("block", config, training).blocks[0]
    return total_work((unit.forward, unit.backward))


# ---- optimizer ----


def _update(num_parameters: int, sizes: Sizes, dtype: str, device: Device) -> Load:
    """The optimizer step of one unit on the host, of many units in turn, by the code that training uses."""
    has_master, torch_dtype = dtype != "fp32", TORCH_DTYPES[dtype]
    layout = layout_of("adamw", [(num_parameters,)], dtype, is_block=True, has_master=has_master)
    state_bytes, value_bytes = layout.size_bytes(layout.whole), num_parameters * torch_dtype.itemsize
    settings, allocate = OptimizerSettings(), device.pool(0).allocate

    def unit() -> tuple[torch.Tensor, torch.Tensor, list[View]]:
        params, grads = (allocate(value_bytes).view(torch_dtype)[:num_parameters] for _ in range(2))
        states = allocate(state_bytes)[:state_bytes]
        states.zero_()  # touches the pages
        params.fill_(1.0)
        grads.fill_(1e-3)
        return params, grads, list(layout.views(states, layout.whole))

    num_units = min(256, max(2, sizes.area_bytes // (2 * value_bytes + state_bytes)))
    units = itertools.cycle([unit() for _ in range(num_units)])

    def work() -> None:
        params, grads, views = next(units)
        update_states(params, grads, views, layout, settings, part=layout.whole, step=1, lr=1e-3)

    return Load(HOST_ADAM, "parameters", float(num_parameters), _done(device, HOST_ADAM, work))


# ---- copies ----


def _copies(sizes: Sizes, host: torch.Tensor, device: Device) -> list[Load]:
    there = device.pool(sizes.area_bytes).take(sizes.area_bytes).data
    host.fill_(1)
    there.fill_(1)
    ways = ((H2D, host, there), (D2H, there, host))
    return [_copy(stream, size, source, target, device) for size in sizes.copy_bytes for stream, source, target in ways]


def _copy(stream: str, size: int, source: torch.Tensor, target: torch.Tensor, device: Device) -> Load:
    places = itertools.cycle(range(0, source.numel() - size + 1, size))

    def work() -> None:
        at = next(places)
        target[at : at + size].copy_(source[at : at + size], non_blocking=True)

    return Load(stream, "bytes", float(size), _done(device, stream, work))


# ---- files ----


def _files(store: Store, sizes: Sizes) -> list[Load]:
    """Reads and writes of extents in turn; the whole area has been written once, for a first write is slower."""
    largest = max(sizes.file_bytes)
    extents = [store.allocate(largest) for _ in range(max(2, sizes.file_area_bytes // largest))]
    written, read = map_host(largest), map_host(largest)
    written.random_(0, 256)
    for extent in extents:
        store.write(extent, written)
    store.sync()
    accesses = []
    for size in sizes.file_bytes:
        # Small ops have extents of their own: an extent is read and written as a whole.
        own = extents if size == largest else [store.allocate(size) for _ in range(min(256, max(2, 64 * MIB // size)))]
        if own is not extents:
            for extent in own:
                store.write(extent, written[:size])
        accesses.append(_file(NVME_READ, store.read, own, read[:size]))
        accesses.append(_file(NVME_WRITE, store.write, own[::-1], written[:size]))
    return accesses


def _file(
    stream: str, move: Callable[[Extent, torch.Tensor], None], extents: list[Extent], memory: torch.Tensor
) -> Load:
    turn = itertools.cycle(extents)
    return Load(stream, "bytes", float(memory.numel()), lambda: move(next(turn), memory))
