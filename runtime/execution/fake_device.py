"""A CUDA device that is none: a test double that is as late as the programming model of CUDA allows, and finds races.

Memory is this machine's and kernels are PyTorch's for the CPU, so the numbers are those of the CPU. But what is put on
a stream is done later: kernels and copies wait in a queue of bounded length, streams overtake each other at random,
events complete late and out of order, and what a kernel has not made yet reads as nan. Only an event, or a full queue,
makes anything happen for sure. Pinning memory twice fails, as CUDA's does.

Beside that, every access is checked against the order that streams and events promise, so that a race is found where
it did no harm, too (`RaceError`):

- a stream uses memory that another one has written or reads, with no event between;
- the host uses memory of work that it has not waited for;
- memory goes back to the allocator of its stream while another one may use it, and it was not lent.

An operation on tensors of both the device and the host is refused, as CUDA refuses it (`PlaceError`).

Give it to a `Trainer` as its `device`. Numbers have the bits of the CPU where one thread computes.

    RaceError(RuntimeError)   two accesses without an order; names both and where they were made
    PlaceError(RuntimeError)  an operation on tensors of both sides
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from tierplan.runtime.autograd.nests import look, tensors_in
from tierplan.runtime.autograd.replay import changed, is_random, written_arguments
from tierplan.runtime.execution.device import DEVICE_STREAMS, Device, Event, move_buffers, without_cudnn_attention
from tierplan.runtime.memory.arena import Pool, map_host

METADATA = {"set_", "resize_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_", "detach_"}
"""Operations that change what a tensor says of itself, and no memory."""
WAITING = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "masked_select", "unique_dim", "_unique2"}
"""Operations whose result the host needs before it goes on."""
INDICES = (torch.bool, torch.int32, torch.int64)
OF_BOTH_SIDES = {"copy_", "_to_copy", "_foreach_copy_", "index", "index_put_", "_index_put_impl_"}
"""Copies, and operations whose indices may be the host's."""
EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class RaceError(RuntimeError):
    """Two accesses to memory without an order between them."""


class PlaceError(RuntimeError):
    """An operation on tensors of both the device and the host."""


Clock = Counter[str]
"""By stream, how many of its items come before. The union of two has the later of both."""


@dataclass(eq=False)
class _Memory:
    """Who has used a storage last."""

    home: str | None = None
    """The stream whose allocator it is from; None for what is not from the device's."""
    is_on_host: bool = False
    is_on_device: bool = False
    """From elsewhere, but the device's: a pool's, or a buffer's of the model."""
    lent: set[str] = field(default_factory=set)
    write: tuple[str, int, str] | None = None
    reads: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Since the last write, by stream."""


@dataclass(eq=False)
class _Stream:
    name: str
    queue: deque[tuple[int, Callable[[], None]]] = field(default_factory=deque)
    """What is to be done, with its number."""
    num_put: int = 0
    num_done: int = 0
    clock: Clock = field(default_factory=Counter)


class _FakeEvent:
    def __init__(self, device: FakeCuda, stream: _Stream) -> None:
        self._device, self.stream, self.clock = device, stream, stream.clock.copy()
        self.number = stream.num_put
        self._time_ns = 0

    def note(self) -> None:
        self._time_ns = time.perf_counter_ns()

    def wait(self) -> None:
        self._device.wait_on_host(self)

    def time_ns(self) -> int:
        return self._time_ns


class FakeCuda(Device):
    """See the module. `races` has what was found; the next use of the device raises it.

    Parameters
    ----------
    seed
        Of what overtakes what.
    queue_length
        Items that a stream takes before putting another one has to wait.
    lateness_s
        The host hears of an event at most so much later.
    """

    is_asynchronous = True

    def __init__(self, seed: int = 0, *, queue_length: int = 200, lateness_s: float = 0.001) -> None:
        super().__init__()
        self.races: list[str] = []
        self._random = random.Random(seed)
        self._queue_length, self._lateness_s = queue_length, lateness_s
        self._lock = threading.RLock()
        self._here = threading.local()
        self._streams = {name: _Stream(name) for name in DEVICE_STREAMS}
        self._host_clock = Clock()
        self._memory: dict[int, tuple[StorageWeakRef, _Memory]] = {}
        self._most_known = 1000
        """Of memory; then what is gone is forgotten."""
        self._twins: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        """Of memory from the device's allocator, by its address: what keeps it there for work that is to be done."""
        self._freed: deque[tuple[_Memory, Clock]] = deque()
        self._pinned: dict[int, int] = {}

    # ---- what the runtime asks of a device ----

    def pool(self, capacity_bytes: int) -> Pool:
        return Pool(lambda size: self._placed(map_host(size)), capacity_bytes)

    def _placed(self, t: torch.Tensor) -> torch.Tensor:
        with self._lock:
            self._memory_of(t.untyped_storage()).is_on_device = True
        return t

    def host_pool(self, capacity_bytes: int) -> Pool:
        return Pool(lambda size: self.pin(map_host(size, for_transfers=True)), capacity_bytes, release=self._unpin)

    def pin(self, pages: torch.Tensor) -> torch.Tensor:
        """Raises `MemoryError` where some of it is pinned, as CUDA does."""
        begin, end = pages.data_ptr(), pages.data_ptr() + pages.numel()
        if any(begin < other + size and other < end for other, size in self._pinned.items()):
            raise MemoryError(f"CUDA could not pin {pages.numel():,} bytes of host memory (error 712)")
        self._pinned[begin] = pages.numel()
        with self._lock:
            self._memory_of(pages.untyped_storage()).is_on_host = True
        return pages

    def _unpin(self, pages: torch.Tensor) -> None:
        with self._lock:
            self.use(None, "cudaHostUnregister", (), (pages.untyped_storage(),))
        del self._pinned[pages.data_ptr()]

    @property
    def pinned_bytes(self) -> int:
        return sum(self._pinned.values())

    @contextmanager
    def on(self, stream: str) -> Iterator[None]:
        here = self._here
        before = getattr(here, "stream", None), getattr(here, "launches", None)
        here.stream = self._streams.get(stream)
        here.launches = _Launches(self, here.stream)
        try:
            with here.launches:
                yield
        finally:
            here.stream, here.launches = before

    def record(self, stream: str) -> Event | None:
        if stream not in self._streams:
            return None
        with self._lock:
            here = self._streams[stream]
            event = _FakeEvent(self, here)
            self._put(here, event.note)
            event.number = here.num_put
            return event

    def wait_for(self, stream: str, event: Event) -> None:
        assert isinstance(event, _FakeEvent)
        with self._lock:
            here = self._streams[stream]
            here.clock |= event.clock
            self._put(here, lambda: self._do(event.stream, event.number))

    def wait_on_host(self, event: _FakeEvent) -> None:
        time.sleep(self._random.random() * self._lateness_s)
        with self._lock:
            self._do(event.stream, event.number)
            self._host_clock |= event.clock
        self._raise()

    def lend(self, memory: Sequence[torch.Tensor], stream: str) -> None:
        with self._lock:
            for t in memory:
                self._memory_of(t.untyped_storage()).lent.add(stream)

    def finish(self) -> None:
        stream = getattr(self._here, "stream", None)
        if stream is not None and (event := self.record(stream.name)) is not None:
            event.wait()

    def settle(self) -> None:
        with self._lock:
            for stream in self._streams.values():
                self._do(stream, stream.num_put)
                self._host_clock |= stream.clock
        self._raise()

    def take_buffers(self, model: nn.Module) -> Callable[[], None]:
        return move_buffers(model, lambda b: self._placed(b.clone()))

    def planned_kernels(self) -> AbstractContextManager[None]:
        return without_cudnn_attention()

    def to_device(self, t: torch.Tensor) -> torch.Tensor:
        return t.clone()

    def to_host(self, t: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():
            out = torch.empty_like(t)
        with self._lock:
            self._memory_of(out.untyped_storage()).is_on_host = True
        return out.copy_(t)

    # ---- streams ----

    def put(self, stream: str, work: Callable[[], None]) -> None:
        """Something of a test's own, done in its turn on a stream of the device; at once on one of the host."""
        if stream not in self._streams:
            return work()
        with self._lock:
            return self._put(self._streams[stream], work)

    def _put(self, stream: _Stream, work: Callable[[], None]) -> None:
        stream.num_put += 1
        stream.clock |= self._host_clock
        stream.clock[stream.name] = stream.num_put
        stream.queue.append((stream.num_put, work))
        if len(stream.queue) > self._queue_length:
            self._do(stream, stream.queue[0][0])
        if self._random.random() < 0.05:  # some stream comes on a bit
            chosen = self._random.choice(list(self._streams.values()))
            self._do(chosen, chosen.num_done + self._random.randrange(20))

    def _do(self, stream: _Stream, number: int) -> None:
        """Brings a stream to this item, and others to what it waits for."""
        while stream.queue and stream.queue[0][0] <= number:
            done, work = stream.queue.popleft()
            work()
            stream.num_done = done

    # ---- memory ----

    def _memory_of(self, storage: torch.UntypedStorage, home: str | None = None) -> _Memory:
        known = self._memory.get(storage._cdata)
        if known is None or known[0].expired():
            if len(self._memory) >= self._most_known:
                self._memory = {key: one for key, one in self._memory.items() if not one[0].expired()}
                self._most_known = 2 * len(self._memory) + 1000
            known = self._memory[storage._cdata] = StorageWeakRef(storage), _Memory(home)
        return known[1]

    def use(self, stream: _Stream | None, what: str, reads: Iterable[Any], writes: Iterable[Any]) -> None:
        """Notes an access of the stream's next item, or of the host; what has no order to it is a race."""
        clock = self._host_clock if stream is None else stream.clock | self._host_clock
        who = "the host" if stream is None else stream.name
        if stream is not None:
            clock[stream.name] = stream.num_put + 1
        written = {s._cdata: s for s in writes}
        for storage in {**{s._cdata: s for s in reads}, **written}.values():
            memory, is_write = self._memory_of(storage), storage._cdata in written
            does = f"{'writes' if is_write else 'reads'} {storage.nbytes():,} bytes"
            others = [("write", *memory.write)] if memory.write is not None else []
            if is_write:
                others += [("read", other, number, by) for other, (number, by) in memory.reads.items()]
            for how, other, number, by in others:
                if number > clock[other] and other != who:
                    self.races.append(f"{what} on {who} {does}, with no order to the {how} of {by} on {other}")
            if stream is None:
                continue
            if is_write:
                memory.write, memory.reads = (stream.name, stream.num_put + 1, what), {}
            else:
                memory.reads[stream.name] = stream.num_put + 1, what

    def _raise(self) -> None:
        with self._lock:
            while self._freed:
                memory, clock = self._freed.popleft()
                uses = {**memory.reads}
                if memory.write is not None:
                    uses.setdefault(memory.write[0], memory.write[1:])
                for other, (number, by) in uses.items():
                    if other != memory.home and other not in memory.lent and number > clock[other]:
                        self.races.append(
                            f"memory of {memory.home} is freed, with no order to the use by {by} on {other}"
                        )
        if self.races:
            raise RaceError("; ".join(self.races[:3]))

    def _all_own(self, out: Any, stream: _Stream, moved: dict[int, torch.UntypedStorage]) -> Any:
        """What an operation gave, with every tensor in it as `_own` has it."""
        return tree_map(lambda t: self._own(t, stream, moved) if isinstance(t, torch.Tensor) else t, out)

    def _own(self, t: torch.Tensor, stream: _Stream, moved: dict[int, torch.UntypedStorage]) -> torch.Tensor:
        """The tensor in memory from the stream's allocator, which says when it is freed."""
        old = t.untyped_storage()
        storage = moved.get(old._cdata)
        if storage is None:
            storage = moved[old._cdata] = torch.from_numpy(
                (twin := torch.empty(old.nbytes(), dtype=torch.uint8)).numpy()
            ).untyped_storage()
            storage.copy_(old)
            memory = self._memory_of(storage, stream.name)
            if twin.numel():
                self._twins[twin.data_ptr()] = twin
                weakref.finalize(storage, self._free, memory, stream, twin).atexit = False
        return look(storage, t.dtype, int(t.storage_offset()) * t.itemsize, t.shape, t.stride())

    def _free(self, memory: _Memory, stream: _Stream, twin: torch.Tensor) -> None:
        self._freed.append((memory, stream.clock.copy() | self._host_clock.copy()))  # others may go on

    def _hold(self, value: object) -> object:
        """A tensor as it is now, for work that is to be done; of the allocator's memory it keeps the bytes alone."""
        if not isinstance(value, torch.Tensor):
            return value
        storage = value.untyped_storage()
        twin = self._twins.get(storage.data_ptr())
        if twin is not None:
            storage = torch.from_numpy(twin.numpy()).untyped_storage()
        return look(storage, value.dtype, int(value.storage_offset()) * value.itemsize, value.shape, value.stride())

    # ---- operations ----

    def launch(self, stream: _Stream | None, func: Any, args: Any, kwargs: Any) -> Any:
        name = func._schema.name.partition("::")[2]
        tensors = tensors_in((args, kwargs))
        if name in METADATA or func.is_view:
            return func(*args, **kwargs)
        targets = changed(func, args, kwargs)
        reads, writes = [t.untyped_storage() for t in tensors], [t.untyped_storage() for t in targets]
        with self._lock:
            self._raise()
            if stream is None or (name in WAITING and any(self._memory_of(s).is_on_host for s in reads)):
                self.use(None, name, reads, writes)
                self._raise()
                return func(*args, **kwargs)
            self._check_places(name, tensors)
            masks = tensors_in(args[1]) if name == "index" else ()
            if name in WAITING or any(t.dtype in (torch.bool, torch.uint8) for t in masks):
                self.use(stream, name, reads, ())
                self._put(stream, lambda: None)
                self._do(stream, stream.num_put)
                self._host_clock |= stream.clock
                return self._all_own(func(*args, **kwargs), stream, {})
            if any(t.dtype in INDICES for t in targets):
                self._do(stream, stream.num_put)
                return func(*args, **kwargs)
            return self._launch(stream, func, args, kwargs, (reads, writes))

    def _check_places(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Raises `PlaceError` for tensors of both sides, as CUDA raises. A number may be the host's."""
        if name in OF_BOTH_SIDES:
            return
        places = set()
        for t in tensors:
            memory = self._memory_of(t.untyped_storage())
            is_here = memory.home is not None or memory.is_on_device
            if is_here or t.dim():
                places.add("the device" if is_here else "the host")
        if len(places) > 1:
            raise PlaceError(f"{name} is given tensors of the device and of the host")

    def _launch(self, stream: _Stream, func: Any, args: Any, kwargs: Any, used: tuple[list[Any], list[Any]]) -> Any:
        name, (reads, writes) = func._schema.name.partition("::")[2], used
        draws = is_random(func, args, kwargs)
        # Random numbers are drawn at the launch, so what they are combined with must be there; so must indices.
        is_indexed = any(t.dtype in INDICES[1:] for t in tensors_in((args, kwargs)))
        if is_indexed or (draws and not writes):
            self._do(stream, stream.num_put)
        if writes:
            out = _returned(func, args, kwargs)
            targets = changed(func, args, kwargs) if draws else []
            drawn = func(*tree_map(_copied, args), **tree_map(_copied, kwargs)) if draws else None
        else:
            out = func(*args, **kwargs)  # on what is there now; what it says of itself is right
            results_now = tensors_in(out)
            if {t.untyped_storage()._cdata for t in results_now} <= {s._cdata for s in reads}:
                return out
            if not draws and any(t.dtype in INDICES for t in results_now) and name not in EMPTY:
                draws = True  # indices are right at once, so that whoever uses them launches what he would
                self._do(stream, stream.num_put)
                out = func(*args, **kwargs)
            drawn, moved = tree_map(_copied, out) if draws else None, dict[int, torch.UntypedStorage]()
            out = self._all_own(out, stream, moved)
            targets = tensors_in(out)
            for t in targets:
                if t.is_floating_point():
                    t.fill_(torch.nan)
            writes = list(moved.values())
            if name in EMPTY:
                return out
        self.use(stream, name, reads, writes)
        held_args, held_kwargs = tree_map(self._hold, (args, kwargs))
        results = [self._hold(t) for t in targets]

        def work() -> None:
            with _disable_current_modes(), torch.no_grad():
                computed = drawn if draws else func(*held_args, **held_kwargs)
                for t, new in zip(results, tensors_in(computed), strict=False):
                    t.copy_(new)  # type: ignore[attr-defined]

        self._put(stream, work)
        self._raise()
        return out


class _Launches(TorchDispatchMode):
    """Operations in this thread are put on a stream of the device, or are the host's (None)."""

    def __init__(self, device: FakeCuda, stream: _Stream | None) -> None:
        super().__init__()
        self._device, self._stream = device, stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._device._here.launches is not self:  # within one that launches: this is the device's own doing
            return func(*args, **(kwargs or {}))
        return self._device.launch(self._stream, func, args, kwargs or {})


def _copied(value: object) -> object:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _returned(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation that writes to its arguments returns: some of them."""
    by_alias = {tuple(a.alias_info.before_set): value for a, value in written_arguments(func, args, kwargs)}
    returned = [by_alias.get(tuple(r.alias_info.before_set)) for r in func._schema.returns if r.alias_info]
    return returned[0] if len(returned) == 1 else tuple(returned) or None
