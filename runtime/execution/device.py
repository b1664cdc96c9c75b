"""The one place that knows whether the device tier is a CUDA GPU or a byte budget in this machine's memory.

Everything else uses `Device`. On CUDA each stream of the schedule has a CUDA stream of its own: a worker runs its op
under `on`, and `finish` blocks the worker (not Python's lock) until the GPU has done it, so that an op's end means on
both kinds of device that its results exist. Transfers use pinned memory and block nobody but their own worker.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tierplan.runtime.memory.arena import Pool, map_host
from tierplan.runtime.memory.freed_memory import keep_freed_memory

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
TORCH_DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By `Training.dtype`."""


def device_named(name: str) -> str:
    """`cuda` or `cpu`; `auto` is `cuda` where PyTorch sees a GPU. Raises `ValueError` for what is not there."""
    if name not in ("auto", "cuda", "cpu"):
        raise ValueError(f"device is {name!r}; choose auto, cuda or cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but PyTorch sees no GPU; check the driver, or use device cpu")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


@dataclass
class Device:
    """Memory, streams and random numbers of the device tier."""

    torch_device: torch.device
    _streams: dict[str, torch.cuda.Stream] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.is_cuda:
            _let_segments_expand()
        else:
            keep_freed_memory()

    @property
    def is_cuda(self) -> bool:
        return self.torch_device.type == "cuda"

    def pool(self, capacity_bytes: int) -> Pool:
        """Blocks of device memory."""
        if not self.is_cuda:
            return Pool(map_host, capacity_bytes)
        return Pool(lambda size: torch.empty(size, dtype=torch.uint8, device=self.torch_device), capacity_bytes)

    def host_pool(self, capacity_bytes: int) -> Pool:
        """Blocks of host memory, pinned where that matters."""
        if not self.is_cuda:
            return Pool(lambda size: map_host(size, for_transfers=True), capacity_bytes)
        return Pool(lambda size: map_host(size, register=True), capacity_bytes, release=_unregister)

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        """Work inside goes to this stream of the schedule."""
        if not self.is_cuda:
            yield
            return
        if stream not in self._streams:
            self._streams[stream] = torch.cuda.Stream(self.torch_device)
        with torch.cuda.stream(self._streams[stream]):
            yield

    def lend(self, memory: torch.Tensor, stream: str) -> None:
        """This memory is used, and perhaps given back, by another stream than the one that has allocated it."""
        if self.is_cuda and stream in self._streams:
            memory.record_stream(self._streams[stream])

    def finish(self) -> None:
        """Returns when the work that this thread has put on its stream is done."""
        if self.is_cuda:
            done = torch.cuda.Event(blocking=True)
            done.record()
            done.synchronize()

    def settle(self) -> None:
        """Returns when all work on the device is done, on whatever stream."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)

    def take_buffers(self, model: nn.Module) -> Callable[[], None]:
        """Brings the model's buffers (rotary tables, masks) to the device; returns what brings them back."""
        moved = []
        for module in model.modules() if self.is_cuda else ():
            for name, b in module._buffers.items():
                if b is not None:
                    moved.append((module, name, b))
                    module._buffers[name] = b.to(self.torch_device)

        def restore() -> None:
            for module, name, b in moved:
                module._buffers[name] = b

        return restore

    def rng_state(self) -> tuple[torch.Tensor, ...]:
        """The state of the random numbers that a forward draws."""
        state = (torch.get_rng_state(),)
        return (*state, torch.cuda.get_rng_state(self.torch_device)) if self.is_cuda else state

    def set_rng_state(self, state: tuple[torch.Tensor, ...]) -> None:
        torch.set_rng_state(state[0])
        if self.is_cuda:
            torch.cuda.set_rng_state(state[1], self.torch_device)


def _let_segments_expand() -> None:
    """What is freed on the device, of whatever sizes, serves whatever comes next. Segments of fixed sizes would hold up
    to a third more than the ledger; these hold at most a few hundred MiB more (docs/limits.md). Who has set the
    allocator otherwise is heeded."""
    if not any("expandable_segments" in os.environ.get(name, "") for name in ALLOCATOR_VARIABLES):
        set_allocator: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (set_allocator or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")


def _unregister(pages: torch.Tensor) -> None:
    torch.cuda.cudart().cudaHostUnregister(pages.data_ptr())
