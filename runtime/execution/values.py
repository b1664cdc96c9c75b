"""What a buffer of a schedule holds in reality, and where its bytes are (`Places`).

A `BufferValue` is memory (a block of a pool), a place on a drive (an extent), or nothing but an `AutogradHandle`, which
stands for what lives on the device by itself, such as a tensor that autograd saved. The handle travels with the content
through the tiers, and is told which copy of its bytes on the device to use, and when that one leaves.

SizeError(ValueError)   an op made more or fewer bytes than its buffer declares; says which
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from tierplan.hwmodels.names import DEVICE, NVME
from tierplan.runtime.autograd.nests import Forms, forms_of
from tierplan.runtime.autograd.saved import SavedStorage
from tierplan.runtime.autograd.units import placeholder
from tierplan.runtime.checkpoint.snapshot import Snapshot
from tierplan.runtime.execution.instances import ExecutionError, Instance
from tierplan.runtime.memory.arena import Block, Pool, map_host
from tierplan.runtime.memory.store import Extent, Store
from tierplan.runtime.optim.adam import NonFiniteGradientError
from tierplan.sim.contents import Content, SavedActs, States, TiedGradients, parse_content
from tierplan.sim.ranks import COLLECTIVES, SEND
from tierplan.sim.schedule import Op


class SizeError(ValueError):
    """An op made more or fewer bytes than its buffer declares: the schedule is not of this model and these shapes."""


class AutogradHandle(ABC):
    """Something of autograd's that lives on the device: its bytes may be moved away and come back elsewhere.

    They may come back while the first copy is still in use; so an op that reads a buffer says that it wants them there.
    """

    _lock = threading.Lock()
    """Of all together: what it guards takes next to no time."""
    _at: BufferValue | None = None

    @property
    @abstractmethod
    def forms(self) -> Forms:
        """Of its parts, which are contiguous, where they are moved to.

        First asked for when they are moved, and in use; many never are.
        """

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """Of its values; uint8 where they are of several."""
        types = {dtype for dtype, _ in self.forms.each}
        return types.pop() if len(types) == 1 else torch.uint8

    def begin(self, value: BufferValue | None = None) -> BufferValue:
        """The value of the buffer that autograd has made, or of one that has come from another rank."""
        self._at = value or BufferValue()
        self._at.handle = self
        return self._at

    def use(self, value: BufferValue) -> None:
        """From now on the bytes are those of this value, which are on the device."""
        if self._at is value:  # nobody takes them away before who reads it has ended
            return
        with self._lock:
            if self._at is not value:
                assert value.arrived is not None
                self._use(value.arrived)
                self._at, value.arrived = value, None

    def leave(self, value: BufferValue) -> None:
        """The device memory of this value is given back. Starts no work on the device."""
        with self._lock:
            value.arrived = None
            if self._at is value:
                self._use(None)
                self._at = None

    @abstractmethod
    def parts(self) -> list[torch.Tensor]:
        """Those in use."""

    def parts_of(self, block: Block) -> list[torch.Tensor]:
        """Those that lie in a block."""
        return block.once(self.forms, self.forms.split)  # type: ignore[no-any-return]

    def memory(self) -> torch.Tensor:
        """The bytes in use, as one uint8 tensor."""
        parts = [part.view(-1).view(torch.uint8) for part in self.parts()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def unpack(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """What parts on the device are to autograd: for `BufferValue.arrived`."""
        return parts

    @abstractmethod
    def _use(self, tensors: Sequence[torch.Tensor] | None) -> None:
        """From now on these are it, or nothing on the device is."""


@functools.lru_cache(maxsize=4096)
def _forms_of_saved(looks: Sequence[tuple[torch.dtype, Sequence[int], int]]) -> Forms:
    """As they were saved; bytes, where values would not be aligned."""
    begins = itertools.accumulate((size_bytes for *_, size_bytes in looks), initial=0)
    return forms_of(
        tuple(
            (dtype, shape) if begin % dtype.itemsize == 0 else (torch.uint8, (size_bytes,))
            for begin, (dtype, shape, size_bytes) in zip(begins, looks, strict=False)
        )
    )


class SavedTensorsHandle(AutogradHandle):
    """Saved tensors that go their own way."""

    def __init__(self, saved: Sequence[SavedStorage]) -> None:
        self._saved = [weakref.ref(each) for each in saved]
        """Autograd's graph holds them, and lets each go as soon as backward has used it."""
        self._looks = tuple([(each.dtype, each.shape, each.size_bytes) for each in saved])

    @functools.cached_property
    def forms(self) -> Forms:
        return _forms_of_saved(self._looks)

    def parts(self) -> list[torch.Tensor]:
        parts = []
        for each, (dtype, shape) in zip(self._saved, self.forms.each, strict=True):
            if (saved := each()) is None:  # of a branch that leads nowhere: its graph has gone
                parts.append(placeholder(torch.Size(shape), dtype))
                continue
            assert saved.tensor is not None
            parts.append(saved.tensor if dtype == saved.dtype else saved.tensor.view(-1).view(dtype))
        return parts

    def _use(self, tensors: Sequence[torch.Tensor] | None) -> None:
        for k, each in enumerate(self._saved):
            if (saved := each()) is not None and not saved.stays:
                t = None if tensors is None else tensors[k]
                saved.tensor = t if t is None or t.shape == saved.shape else t.view(saved.dtype).view(saved.shape)


Strides = Sequence[tuple[int, ...] | None]
"""Of tensors; None for those that are contiguous."""


def laid_out(parts: Sequence[torch.Tensor], strides: Strides) -> list[torch.Tensor]:
    """Contiguous tensors as they lay where they come from."""
    strided = zip(parts, strides, strict=True)
    return [t if stride is None else t.new_empty_strided(t.shape, stride).copy_(t) for t, stride in strided]


class InputHandle(AutogradHandle):
    """A unit's input: the leaves that the unit before it made; or the gradient of it, which is that of the leaves."""

    def __init__(self, leaves: Sequence[torch.Tensor], *, is_gradient: bool = False) -> None:
        self.leaves = [leaf for leaf in leaves if leaf.grad is not None] if is_gradient else leaves
        self._is_gradient = is_gradient

    @functools.cached_property
    def _looks(self) -> tuple[Forms, Strides]:
        tensors = self._tensors()
        strides = [None if t.is_contiguous() else t.stride() for t in tensors]
        return forms_of(tuple([(t.dtype, t.shape) for t in tensors])), strides

    @property
    def forms(self) -> Forms:
        return self._looks[0]

    @property
    def strides(self) -> Strides:
        """As they lie where autograd has them; parts are contiguous."""
        return self._looks[1]

    def _tensors(self) -> list[torch.Tensor]:
        if not self._is_gradient:
            return [leaf.detach() for leaf in self.leaves]
        gradients = [leaf.grad for leaf in self.leaves if leaf.grad is not None]
        assert len(gradients) == len(self.leaves), "a gradient that has been used is not moved"
        return gradients

    def parts(self) -> list[torch.Tensor]:
        return [t.contiguous() for t in self._tensors()]

    def unpack(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return laid_out(parts, self.strides)

    def _use(self, tensors: Sequence[torch.Tensor] | None) -> None:
        for k, leaf in enumerate(self.leaves):
            t = None if tensors is None else tensors[k]
            if self._is_gradient:
                leaf.grad = t
            else:
                leaf.data = placeholder(leaf.shape, leaf.dtype, leaf.device) if t is None else t


@dataclass(eq=False, slots=True)
class BufferValue:
    """A buffer's value."""

    place: Block | Extent | None = None
    handle: AutogradHandle | None = None
    coded: AutogradHandle | None = None
    """What these are the codes of."""
    arrived: Sequence[torch.Tensor] | None = None
    """Of what is autograd's, and came back to the device: what it is there, until an op uses it."""
    gradients: list[torch.Tensor | None] | None = None
    """Of a gradient as autograd makes it on the device: by parameter of the unit (see `gradients.py`)."""
    filled: set[int] | None = None
    """Of a gradient in flat memory: the positions, in the unit, of the parameters that have one; None for all."""
    is_absent: bool = False
    """Of a gradient, and what clips it: there is none yet (the first delayed or late update)."""
    norms: Sequence[tuple[int, torch.Tensor]] = ()
    """Of `norm/U`: the position in the model and the norm of each parameter's gradient."""
    rng: Sequence[torch.Tensor] = ()
    """Of an input from another rank: the random numbers with which its unit goes on."""
    strides: Strides = ()
    """Of an input from another rank, or of its gradient: how it lay there."""

    @property
    def block(self) -> Block:
        assert isinstance(self.place, Block)
        return self.place


def content_of(instance: Instance) -> Content:
    """What the bytes of a buffer are."""
    return parse_content(instance.buffer.content)


def strides_of(value: BufferValue) -> Strides:
    """How an input, or the gradient of one, lies where autograd has it."""
    return value.handle.strides if isinstance(value.handle, InputHandle) else value.strides


def states_of(unit: str, contents: Iterable[Content | str]) -> list[States]:
    """A unit's states among these contents, in order: one for the whole, or one per part in which they travel."""
    parsed = (parse_content(str(content)) for content in contents)
    return sorted((c for c in parsed if isinstance(c, States) and c.unit == unit), key=lambda c: c.part)


def value_of(instance: Instance) -> BufferValue:
    assert isinstance(instance.value, BufferValue), f"buffer {instance.buffer.name!r} has no value"
    return instance.value


REMEDY = (
    "Make the schedule from a workload of this model, with the same shapes, dtype and backend: a plan that is run on "
    "the CPU needs `tierplan plan --backend cpu`, and one for padded batches `--padded` (in Python, "
    "tierplan.runtime.tracing.trace.trace_workload). Behind model.eval() and from_pretrained, dropout keeps nothing: "
    "call model.train(). Where all is so, the model keeps other tensors than it did while it was traced, without "
    "numbers, and cannot be planned: such as a block's tensors that are no buffers (register_buffer), LSTMs, batch "
    "norm of turned tensors (PatchTST), or sequences packed by position_ids"
)


def expect(instance: Instance, found_bytes: int) -> None:
    """Raises `SizeError` unless the buffer declares so many bytes."""
    b = instance.buffer
    if found_bytes != b.size_bytes:
        raise SizeError(
            f"buffer {b.name!r} is declared with {b.size_bytes:,} bytes, but holds {found_bytes:,}. {REMEDY}"
        )


def expect_at_most(instance: Instance, found_bytes: int) -> None:
    """As `expect`, where batches are padded: one in which nothing is has no mask, and saves less."""
    if found_bytes > instance.buffer.size_bytes:
        expect(instance, found_bytes)


def begin_input(instance: Instance, leaves: Sequence[torch.Tensor], *, is_gradient: bool = False) -> BufferValue:
    """The value of a buffer that is a unit's input as autograd has made it, or the gradient of one."""
    handle = InputHandle(leaves, is_gradient=is_gradient)
    expect(instance, sum([leaf.nbytes for leaf in handle.leaves]))
    instance.value = value = handle.begin()
    return value


IN_BLOCKS = ("copy", "accumulate", "cast", "update", SEND, *COLLECTIVES)
"""Kinds of op that write flat memory, which is a block of a pool."""


@functools.lru_cache(maxsize=4096)
def _is_autograd_s(kind: str, text: str) -> bool:
    """Whether a buffer of this content, that an op of this kind writes on the device, is no block of the pool."""
    content = parse_content(text)
    is_moved = kind in IN_BLOCKS and not (kind == "copy" and isinstance(content, SavedActs | TiedGradients))
    return not is_moved and not getattr(content, "is_coded", False)


@dataclass(eq=False)
class Places:
    """Gives buffers their places in the tiers, takes them back, and keeps what a commit needs."""

    device_pool: Pool
    host_pool: Pool
    store: Store | None
    committed: Set[Extent] = frozenset()
    """Extents that the last commit needs, and one that is being made: neither written nor freed."""
    snapshot: Snapshot = field(default_factory=lambda: Snapshot({}))
    """What the last commit has taken from memory, or is to take."""
    last_updated: int = -1
    """The last step in which an update has begun."""

    @property
    def drives(self) -> Store:
        """The store, where the schedule uses the NVMe tier."""
        assert self.store is not None
        return self.store

    def allocate(self, instance: Instance) -> Block | Extent:
        """A place for a buffer in its tier."""
        b = instance.buffer
        if b.tier == NVME:
            return self.drives.allocate(b.size_bytes)
        return (self.device_pool if b.tier == DEVICE else self.host_pool).take(b.size_bytes)

    def on_grant(self, op: Op, instance: Instance, size_bytes: int) -> None:
        """Bytes on the device that autograd will hold, and no block of the pool, count against what the pool keeps."""
        if instance.buffer.tier == DEVICE and _is_autograd_s(op.kind, instance.buffer.content):
            instance.outside_bytes = size_bytes
            self.device_pool.make_room(size_bytes)

    def place(self, instance: Instance) -> BufferValue:
        """The value of a buffer that is about to be written: new memory, or that of the buffer it writes over."""
        over = instance.over
        if over is not None and (old := value_of(over).place) not in self.committed:
            if isinstance(old, Block):
                self.snapshot.before_change(old)
            instance.value = value = value_of(over)
        else:
            instance.value = value = BufferValue(self.allocate(instance))
        return value

    def release(self, instance: Instance) -> None:
        """Gives a freed buffer's memory back."""
        value = instance.value
        if not isinstance(value, BufferValue):
            return
        if value.handle is not None and instance.buffer.tier == DEVICE:
            value.handle.leave(value)
        value.gradients = None
        if isinstance(value.place, Extent):
            if value.place not in self.committed:
                self.drives.free(value.place)
        elif value.place is not None:
            if value.place.unbind is not None:
                value.place.unbind(value.place.pages.data_ptr())
            self.snapshot.before_change(value.place)
            (self.device_pool if instance.buffer.tier == DEVICE else self.host_pool).give(value.place)

    def on_free(self, instance: Instance) -> None:
        """Nobody may use the memory of a freed buffer any more."""
        if instance.outside_bytes:
            self.device_pool.make_room(-instance.outside_bytes)
            instance.outside_bytes = 0

    @contextmanager
    def changing(self, step: int) -> Iterator[None]:
        """Around an update in a step: from now on, until the step has ended, there is no whole model."""
        is_changed = True
        try:
            yield
        except NonFiniteGradientError:  # raised before anything has changed
            is_changed = False
            raise
        finally:
            if is_changed:
                self.last_updated = max(self.last_updated, step)

    def check_whole(self, num_steps: int) -> None:
        """Raises `ExecutionError` where something was updated in a step behind so many, which is all that ended."""
        if self.last_updated >= num_steps:
            raise ExecutionError(
                "training ended in the middle of a step, when some parameters had been updated and others had not, so "
                "there is no whole model; go on from the last commit or checkpoint"
            )

    def read(self, instance: Instance) -> torch.Tensor:
        """A copy of the bytes of a buffer that lies in a pool or on a drive, or of gradients on the device, in host
        memory."""
        value, size_bytes = value_of(instance), instance.buffer.size_bytes
        if value.gradients is not None:
            return torch.cat([g.cpu().view(-1) for g in value.gradients if g is not None]).view(torch.uint8)
        if isinstance(value.place, Extent):
            out = map_host(size_bytes)[:size_bytes]
            self.drives.read(value.place, out)
            return out
        return value.block.data.cpu().clone()

    def keep(self, extents: Set[Extent], snapshot: Snapshot) -> None:
        """From now on these extents, and what the snapshot has yet to read, are as they are for a commit."""
        self.committed, self.snapshot = self.committed | extents, snapshot

    def commit(self, extents: Set[Extent]) -> None:
        """From now on these are the extents of the last commit."""
        before, self.committed = self.committed, extents
        for extent in before - extents:
            self.drives.free(extent)

    def close(self) -> None:
        """Lets go of the pools' memory."""
        self.device_pool.close()
        self.host_pool.close()
