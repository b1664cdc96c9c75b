"""The one place that knows whether the device tier is a CUDA GPU or a byte budget in this machine's memory.

Everything else uses `Device`. On CUDA each stream of the schedule has a CUDA stream of its own: what a worker does
under `on` is put on it, and an `Event` behind it says when that is done: to other streams, which `wait_for` it, and to
the host. Transfers use pinned memory. `fake_device` is a third kind, a test double that is as late as CUDA allows.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from tierplan.hwmodels.names import COMPUTE, D2H, H2D
from tierplan.runtime.memory.arena import Pool, map_host
from tierplan.runtime.memory.freed_memory import keep_freed_memory

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
DEVICE_STREAMS = (COMPUTE, H2D, D2H)
"""Streams of the schedule whose work the device does."""
CLOCK_PERIOD_S = 8
"""The distance of two events is exact to a microsecond for so long; then another event is measured from."""
TORCH_DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By `Training.dtype`."""


def device_named(name: str) -> str:
    """`cuda` or `cpu`; `auto` is `cuda` where PyTorch sees a GPU. Raises `ValueError` for what is not there."""
    if name not in ("auto", "cuda", "cpu"):
        raise ValueError(f"device is {name!r}; choose auto, cuda or cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but PyTorch sees no GPU; check the driver, or use device cpu")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


class Event(Protocol):
    """A place on a stream."""

    def wait(self) -> None:
        """Returns when everything on the stream before it is done."""

    def time_ns(self) -> int:
        """When that was, by `time.perf_counter_ns`."""


class Device:
    """Memory, streams and random numbers of the device tier; of this class itself, in this machine's memory."""

    torch_device = torch.device("cpu")
    is_cuda = False
    is_asynchronous = False
    """Its streams work by themselves, and events say when they are done."""

    def __init__(self) -> None:
        keep_freed_memory()

    def pool(self, capacity_bytes: int) -> Pool:
        """Blocks of device memory."""
        return Pool(map_host, capacity_bytes)

    def host_pool(self, capacity_bytes: int) -> Pool:
        """Blocks of host memory, pinned where that matters."""
        return Pool(lambda size: map_host(size, for_transfers=True), capacity_bytes)

    def on(self, stream: str) -> AbstractContextManager[None]:
        """Work inside goes to this stream of the schedule."""
        return nullcontext()

    def record(self, stream: str) -> Event | None:
        """An event behind all that was put on the stream; None where it is done."""
        return None

    def wait_for(self, stream: str, event: Event) -> None:
        """What is put on the stream from now on begins after the event. Does not block."""

    def lend(self, memory: Sequence[torch.Tensor], stream: str) -> None:
        """This memory is used, and perhaps given back, by another stream than the one that has allocated it."""

    def finish(self) -> None:
        """Returns when the work that this thread has put on its stream is done."""

    def settle(self) -> None:
        """Returns when all work on the device is done, on whatever stream."""

    def take(self, t: torch.Tensor) -> torch.Tensor:
        """A copy of a caller's tensor, who may fill it again, in the order of this thread's stream."""
        return t if t.requires_grad else t.clone()

    def to_device(self, t: torch.Tensor) -> torch.Tensor:
        """What was taken, on the device, in the order of this thread's stream."""
        return t

    def to_host(self, t: torch.Tensor) -> torch.Tensor:
        """The values on the host, which has them when the work on this thread's stream is done. Does not block."""
        return t

    def take_buffers(self, model: nn.Module) -> Callable[[], None]:
        """Brings the model's buffers (rotary tables, masks) to the device; returns what brings them back."""
        return lambda: None

    def planned_kernels(self) -> AbstractContextManager[None]:
        """Inside, in all threads, PyTorch chooses among the kernels that plans know."""
        return nullcontext()

    def seed(self, seed: int) -> None:
        """Begins the random numbers that a forward draws, as `torch.manual_seed` does, which takes a millisecond."""
        torch.default_generator.manual_seed(seed)

    def rng_state(self) -> tuple[torch.Tensor, ...]:
        """The state of the random numbers that a forward draws."""
        return (torch.get_rng_state(),)

    def set_rng_state(self, state: tuple[torch.Tensor, ...]) -> None:
        torch.set_rng_state(state[0])


def move_buffers(model: nn.Module, move: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], None]:
    """Moves each buffer, once for all modules that have it; returns what brings it back, as forward has changed it."""
    moved: dict[int, torch.Tensor] = {}
    homes = []
    for buffers in (module._buffers for module in model.modules()):
        for name, b in buffers.items():
            if b is not None:
                buffers[name] = moved[id(b)] = moved[id(b)] if id(b) in moved else move(b)
                homes.append((buffers, name, b))

    def restore() -> None:
        for buffers, name, b in homes:
            if (now := buffers.get(name)) is not None and not torch.equal(back := now.to(b.device), b):
                buffers[name] = b.copy_(back) if now is moved[id(b)] else back
            elif now is not None:
                buffers[name] = b

    return restore


class CudaDevice(Device):
    """A GPU."""

    is_cuda = is_asynchronous = True

    def __init__(self, torch_device: str = "cuda") -> None:
        _let_segments_expand()
        if torch_device == "cuda":  # the current one of this thread: others have their own, which is the first GPU
            torch_device = f"cuda:{torch.cuda.current_device()}"
        self.torch_device = torch.device(torch_device)
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._clock: tuple[torch.cuda.Event, int] | None = None
        self._clock_lock = threading.Lock()

    def pool(self, capacity_bytes: int) -> Pool:
        return Pool(lambda size: torch.empty(size, dtype=torch.uint8, device=self.torch_device), capacity_bytes)

    def host_pool(self, capacity_bytes: int) -> Pool:
        return Pool(partial(_map_pinned, self.torch_device), capacity_bytes, release=partial(_unpin, self.torch_device))

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        with torch.cuda.stream(self._stream(stream)):
            yield

    def _stream(self, name: str) -> torch.cuda.Stream:
        if name not in self._streams:  # several threads may ask at once: one of theirs counts
            self._streams.setdefault(name, torch.cuda.Stream(self.torch_device))
        return self._streams[name]

    def record(self, stream: str) -> Event | None:
        if stream not in DEVICE_STREAMS:
            return None
        self._begin_clock()
        return _CudaEvent(self, self._stream(stream))

    def wait_for(self, stream: str, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        self._stream(stream).wait_event(event.cuda)

    def lend(self, memory: Sequence[torch.Tensor], stream: str) -> None:
        for t in memory:
            t.record_stream(self._stream(stream))

    def finish(self) -> None:
        done = torch.cuda.Event(blocking=True)
        done.record(torch.cuda.current_stream(self.torch_device))
        done.synchronize()

    def settle(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def take(self, t: torch.Tensor) -> torch.Tensor:
        if t.device.type == self.torch_device.type:  # made on the default stream, or behind what is there
            here = torch.cuda.current_stream(t.device)
            here.wait_stream(torch.cuda.default_stream(t.device))
            t.record_stream(here)
        return super().take(t)

    def to_device(self, t: torch.Tensor) -> torch.Tensor:
        pinned = t if t.device.type == self.torch_device.type else t.pin_memory()
        return pinned.to(self.torch_device, non_blocking=True)

    def to_host(self, t: torch.Tensor) -> torch.Tensor:
        return torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True)

    def take_buffers(self, model: nn.Module) -> Callable[[], None]:
        return move_buffers(model, lambda b: b.to(self.torch_device))

    def planned_kernels(self) -> AbstractContextManager[None]:
        return without_cudnn_attention()

    def seed(self, seed: int) -> None:
        super().seed(seed)
        torch.cuda.manual_seed_all(seed)

    def rng_state(self) -> tuple[torch.Tensor, ...]:
        return (torch.get_rng_state(), torch.cuda.get_rng_state(self.torch_device))

    def set_rng_state(self, state: tuple[torch.Tensor, ...]) -> None:
        torch.set_rng_state(state[0])
        torch.cuda.set_rng_state(state[1], self.torch_device)

    def _begin_clock(self) -> None:
        """Before the first event: later there may be work on the stream that is taken for it, to be waited for."""
        with self._clock_lock:
            if self._clock is None:
                zero = torch.cuda.Event(enable_timing=True)
                zero.record(torch.cuda.Stream(self.torch_device))
                zero.synchronize()
                self._clock = zero, time.perf_counter_ns()

    def time_ns(self, event: torch.cuda.Event) -> int:
        """The host's time of an event that is done."""
        with self._clock_lock:
            assert self._clock is not None, "an event was recorded"
            zero, zero_ns = self._clock
            found_ns = zero_ns + round(1e6 * zero.elapsed_time(event))
            if found_ns - zero_ns > CLOCK_PERIOD_S * 10**9:
                self._clock = event, found_ns
            return found_ns


@contextmanager
def without_cudnn_attention() -> Iterator[None]:
    """Inside, in all threads, PyTorch takes other attention than cuDNN's, which saves what no plan knows, and which it
    prefers on an H100."""
    was_on = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(was_on)


class _CudaEvent:
    def __init__(self, device: CudaDevice, stream: torch.cuda.Stream) -> None:
        self._device = device
        self.cuda = torch.cuda.Event(enable_timing=True, blocking=True)
        self.cuda.record(stream)

    def wait(self) -> None:
        self.cuda.synchronize()

    def time_ns(self) -> int:
        return self._device.time_ns(self.cuda)


def open_device(name: str) -> Device:
    """`cuda` (or `cuda:0`), `cpu`, or `fake`: a test double of a GPU. Raises `ValueError` for any other name."""
    kind, _, index = name.partition(":")
    if name == "fake":
        from tierplan.runtime.execution.fake_device import FakeCuda

        return FakeCuda()
    if kind == "cuda" and (not index or index.isdecimal()):
        return CudaDevice(name)
    if name != "cpu":
        raise ValueError(f"device is {name!r}; choose cpu, cuda or one of several as in cuda:1")
    return Device()


def _let_segments_expand() -> None:
    """What is freed on the device, of whatever sizes, serves whatever comes next. Segments of fixed sizes would hold up
    to a third more than the ledger; these hold at most a few hundred MiB more (docs/limits.md). Who has said whether
    segments expand is heeded, and what else is set stays: PyTorch forgets all that is not set again."""
    known: Any = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    settings = known() if known else next(filter(None, map(os.environ.get, ALLOCATOR_VARIABLES)), "")
    if "expandable_segments" not in settings:
        set_allocator: Any = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        together = ",".join(filter(None, (settings, "expandable_segments:True")))
        (set_allocator or torch.cuda.memory._set_allocator_settings)(together)


def _map_pinned(device: torch.device, size_bytes: int) -> torch.Tensor:
    """Host memory, pinned where it lies: PyTorch's own pinned memory comes in powers of two."""
    pages = map_host(size_bytes, for_transfers=True)
    portable = 1  # cudaHostRegisterPortable: for whichever GPU, and not for the one that is current here alone
    with torch.cuda.device(device):  # else CUDA makes a context on the first one, which may be full
        status = torch.cuda.cudart().cudaHostRegister(pages.data_ptr(), pages.numel(), portable)
    if int(status) != 0:
        with suppress(RuntimeError):  # CUDA keeps the error until this thread's next kernel is looked at: this one
            torch.ones(1, device=device)
        raise MemoryError(f"CUDA could not pin {pages.numel():,} bytes of host memory (error {int(status)})")
    return pages


def _unpin(device: torch.device, pages: torch.Tensor) -> None:
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(pages.data_ptr())
