"""What is measured: one op of each stream, run through the same store, memory and optimizer code as training.

A `Load` is one kind of op at one size. Loads turn over far more memory than the caches hold, as training does. On a
machine without a GPU the device tier is memory of the host, and copies to it are copies between two places in RAM.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from tierplan.runtime.adam import OptimizerSettings, state_regions, update_flat
from tierplan.runtime.arena import map_host
from tierplan.runtime.store import Extent, Store

__all__ = ["Load", "Sizes", "loads"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Load:
    """An op that can be run again and again."""

    stream: str
    """Where it runs: `gpu0.compute`, ..."""
    kind: str
    """Its work kind: `bytes`, `matmul_bf16_flops`, ..."""
    amount: float
    """Work of one op."""
    run: Callable[[], None]
    """Runs one op and returns when it is done."""

    @property
    def name(self) -> str:
        return f"{self.stream} {self.kind} {self.amount:.3g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured."""

    copy_bytes: tuple[int, ...] = (4 << 10, 256 << 10, 4 * MIB, 32 * MIB)
    """The first of each row is so small that its time is all overhead."""
    file_bytes: tuple[int, ...] = (4 << 10, 256 << 10, 4 * MIB, 32 * MIB)
    adam_parameters: tuple[int, ...] = (1 << 10, 1 << 18, 1 << 22)
    hidden: tuple[int, ...] = (256, 512, 1024)
    """Widths of the blocks whose matmuls are measured."""
    tokens: int = 512
    head_dim: int = 64
    area_bytes: int = 256 * MIB
    """Memory that copies and updates turn over, so that caches do not help."""
    file_area_bytes: int = 1024 * MIB
    """Bytes of the file that reads and writes turn over."""
    overhead_hidden: int = 64
    """Width of a block whose time is all overhead."""


@contextmanager
def loads(
    folders: tuple[Path, ...], sizes: Sizes, *, device: torch.device, dtypes: tuple[str, ...]
) -> Iterator[tuple[list[Load], tuple[str, ...]]]:
    """All loads of this machine, and what a user should know of them. Holds memory and a file until it is left."""
    store = Store([str(folder) for folder in folders]) if folders else None
    try:
        found = [*_compute(sizes, device, dtypes), *_copies(sizes, device), *_adam(sizes, dtypes[0])]
        if store is not None:
            found += _files(store, sizes)
        yield found, () if store is None else store.notes
    finally:
        if store is not None:
            store.close(remove=True)


# ---- compute ----


def _compute(sizes: Sizes, device: torch.device, dtypes: tuple[str, ...]) -> list[Load]:
    found = [_overhead(sizes, device)]
    for dtype in dtypes:
        for hidden in sizes.hidden:
            found.append(_matmuls(sizes.tokens, hidden, dtype, device))
        found.append(_attention(sizes, max(sizes.hidden), dtype, device))
    found.append(_elementwise(sizes, dtypes[0], device))
    found.append(_update_on_device(sizes, dtypes[0], device))
    return found


def _done(device: torch.device, work: Callable[[], object]) -> Callable[[], None]:
    """`work`, waited for: on CUDA in a stream of its own."""
    if device.type != "cuda":

        def run() -> None:
            work()

        return run
    stream = torch.cuda.Stream(device)

    def run_on_stream() -> None:
        with torch.cuda.stream(stream):
            work()
        stream.synchronize()

    return run_on_stream


def _overhead(sizes: Sizes, device: torch.device) -> Load:
    """Forward of a block too small for its work to count: what it costs to launch one. Its amount is one op."""
    block = TransformerBlock(sizes.overhead_hidden, 1).to(device)
    x = torch.zeros(1, 8, sizes.overhead_hidden, device=device)
    with torch.no_grad():
        return Load("gpu0.compute", "ops", 1.0, _done(device, lambda: block(x)))


class TransformerBlock(torch.nn.Module):
    """A pre-norm decoder block as GPT-2 has it, with flash attention."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = torch.nn.LayerNorm(hidden), torch.nn.LayerNorm(hidden)
        self.qkv, self.out = torch.nn.Linear(hidden, 3 * hidden), torch.nn.Linear(hidden, hidden)
        self.up, self.down = torch.nn.Linear(hidden, 4 * hidden), torch.nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, hidden) to the same."""
        batch, tokens, hidden = x.shape
        q, k, v = (
            part.view(batch, tokens, self.num_heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).split(hidden, dim=2)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, hidden))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


def _matmuls(tokens: int, hidden: int, dtype: str, device: torch.device) -> Load:
    """The four products of a transformer block's forward: 24 * tokens * hidden^2 FLOPs."""
    x = torch.randn(tokens, hidden, device=device).to(DTYPES[dtype])
    wide = torch.randn(tokens, 4 * hidden, device=device).to(DTYPES[dtype])
    weights = [torch.randn(n, k, device=device).to(DTYPES[dtype]) for n, k in
               ((3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden))]  # fmt: skip

    def work() -> None:
        for weight in weights:
            F.linear(x if weight.shape[1] == hidden else wide, weight)

    amount = 24.0 * tokens * hidden * hidden
    return Load("gpu0.compute", f"matmul_{dtype}_flops", amount, _done(device, work))


def _attention(sizes: Sizes, hidden: int, dtype: str, device: torch.device) -> Load:
    """Causal attention of one sequence, forward: 2 * tokens^2 * hidden FLOPs, half of the full square's."""
    heads, tokens = max(1, hidden // sizes.head_dim), sizes.tokens
    q, k, v = (torch.randn(1, heads, tokens, sizes.head_dim, device=device).to(DTYPES[dtype]) for _ in range(3))
    work = _done(device, lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    return Load("gpu0.compute", f"attention_{dtype}_flops", 2.0 * tokens * tokens * heads * sizes.head_dim, work)


def _elementwise(sizes: Sizes, dtype: str, device: torch.device) -> Load:
    """Sums of two tensors into a third: two reads and one write."""
    each = 32 * MIB if device.type == "cuda" else 8 * MIB
    element = DTYPES[dtype].itemsize
    sets = max(2, min(sizes.area_bytes, 8 * each * 3) // (3 * each))
    triples = [
        tuple(torch.zeros(each // element, dtype=DTYPES[dtype], device=device) for _ in range(3)) for _ in range(sets)
    ]
    turn = itertools.cycle(triples)

    def work() -> None:
        a, b, out = next(turn)
        torch.add(a, b, out=out)

    return Load("gpu0.compute", "elementwise_bytes", 3.0 * each, _done(device, work))


# ---- optimizer ----


def _adam(sizes: Sizes, dtype: str) -> list[Load]:
    cpu = torch.device("cpu")
    return [_update("host.adam", n, sizes, dtype, cpu) for n in sizes.adam_parameters]


def _update_on_device(sizes: Sizes, dtype: str, device: torch.device) -> Load:
    return _update("gpu0.compute", max(sizes.adam_parameters), sizes, dtype, device)


def _turns(sizes: Sizes, size_bytes: int) -> int:
    """How many pieces of this size to turn over."""
    return min(256, max(2, sizes.area_bytes // size_bytes))


def _update(stream: str, num_parameters: int, sizes: Sizes, dtype: str, device: torch.device) -> Load:
    """The optimizer step of one unit, of many units in turn, by the code that training uses."""
    has_master = dtype != "fp32"
    per_parameter = 2 * DTYPES[dtype].itemsize + (12 if has_master else 8)
    settings = OptimizerSettings()

    def unit() -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        allocate = map_host if device.type == "cpu" else lambda n: torch.zeros(n, dtype=torch.uint8, device=device)
        params, grads = (
            allocate(num_parameters * DTYPES[dtype].itemsize).view(DTYPES[dtype])[:num_parameters] for _ in range(2)
        )
        size_bytes = num_parameters * (12 if has_master else 8)
        states = allocate(size_bytes)[:size_bytes]
        states.zero_()  # touches the pages
        params.fill_(1.0)
        grads.fill_(1e-3)
        return params, grads, state_regions(states, optimizer="adamw", has_master=has_master)

    units = itertools.cycle([unit() for _ in range(_turns(sizes, per_parameter * num_parameters))])

    def work() -> None:
        params, grads, regions = next(units)
        update_flat(params, grads, regions, settings, step=1, lr=1e-3)

    return Load(stream, "parameters", float(num_parameters), _done(device, work))


# ---- copies ----


def _copies(sizes: Sizes, device: torch.device) -> list[Load]:
    host = map_host(sizes.area_bytes, register=device.type == "cuda")
    host.fill_(1)
    if device.type == "cuda":
        there = torch.zeros(sizes.area_bytes, dtype=torch.uint8, device=device)
    else:
        there = map_host(sizes.area_bytes)
        there.fill_(1)
    found = []
    for size in sizes.copy_bytes:
        for direction, source, target in (("h2d", host, there), ("d2h", there, host)):
            found.append(_copy(f"gpu0.{direction}", size, source, target, device))
    return found


def _copy(stream: str, size: int, source: torch.Tensor, target: torch.Tensor, device: torch.device) -> Load:
    places = itertools.cycle(range(0, source.numel() - size + 1, size))

    def work() -> None:
        at = next(places)
        target[at : at + size].copy_(source[at : at + size], non_blocking=True)

    return Load(stream, "bytes", float(size), _done(device, work))


# ---- files ----


def _files(store: Store, sizes: Sizes) -> list[Load]:
    """Reads and writes of extents in turn; the whole area has been written once, for a first write is slower."""
    largest = max(sizes.file_bytes)
    extents = [store.allocate(largest) for _ in range(max(2, sizes.file_area_bytes // largest))]
    memory = map_host(largest)
    memory.random_(0, 256)
    for extent in extents:
        store.write(extent, memory)
    store.sync()
    found = []
    for size in sizes.file_bytes:
        # Small ops have extents of their own: an extent is read and written as a whole.
        own = extents if size == largest else [store.allocate(size) for _ in range(min(256, max(2, 64 * MIB // size)))]
        for verb in ("read", "write"):
            found.append(_file(store, verb, size, own))
        if own is not extents:
            for extent in own:
                store.write(extent, memory[:size])
    return found


def _file(store: Store, verb: str, size: int, extents: list[Extent]) -> Load:
    memory = map_host(size)
    memory.random_(0, 256)
    turn = itertools.cycle(extents if verb == "read" else extents[::-1])
    move = store.read if verb == "read" else store.write
    return Load(f"nvme.{verb}", "bytes", float(size), lambda: move(next(turn), memory))
