"""What a buffer of a schedule holds in reality.

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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from tierplan.runtime.autograd.saved import SavedStorage
from tierplan.runtime.autograd.units import placeholder
from tierplan.runtime.execution.instances import Instance
from tierplan.runtime.memory.arena import Block
from tierplan.runtime.memory.store import Extent
from tierplan.sim.contents import Content, States, parse_content


class SizeError(ValueError):
    """An op made more or fewer bytes than its buffer declares: the schedule is not of this model and these shapes."""


class Forms:
    """Types and shapes of tensors that lie one behind the other. Equal ones are one object (`_forms`), since to tell
    whether two are equal takes long."""

    __slots__ = ("each", "size_bytes", "sizes_bytes")

    def __init__(self, each: tuple[tuple[torch.dtype, Sequence[int]], ...]) -> None:
        self.each = each
        self.sizes_bytes = [dtype.itemsize * prod(shape) for dtype, shape in each]
        self.size_bytes = sum(self.sizes_bytes)


@functools.lru_cache(maxsize=4096)
def _forms(each: tuple[tuple[torch.dtype, Sequence[int]], ...]) -> Forms:
    return Forms(each)


class AutogradHandle(ABC):
    """Something of autograd's that lives on the device: its bytes may be moved away and come back elsewhere.

    They may come back while the first copy is still in use; so an op that reads a buffer says that it wants them there.
    """

    _lock = threading.Lock()
    """Of all together: what it guards takes next to no time."""
    _at: BufferValue | None = None

    @functools.cached_property
    def forms(self) -> Forms:
        """Of its parts, which are contiguous, where they are moved to.

        First asked for when they are moved, and in use; many never are.
        """
        return self._forms()

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
        return block.once(self.forms, self.split)  # type: ignore[no-any-return]

    def split(self, memory: torch.Tensor) -> list[torch.Tensor]:
        parts = zip(memory.split(self.forms.sizes_bytes), self.forms.each, strict=True)
        return [part.view(dtype).view(shape) for part, (dtype, shape) in parts]

    def memory(self) -> torch.Tensor:
        """The bytes in use, as one uint8 tensor."""
        parts = [part.view(-1).view(torch.uint8) for part in self.parts()]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def unpack(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """What parts on the device are to autograd: for `BufferValue.arrived`."""
        return parts

    @abstractmethod
    def _forms(self) -> Forms: ...

    @abstractmethod
    def _use(self, tensors: Sequence[torch.Tensor] | None) -> None:
        """From now on these are it, or nothing on the device is."""


@functools.lru_cache(maxsize=4096)
def _forms_of_saved(looks: Sequence[tuple[torch.dtype, Sequence[int], int]]) -> Forms:
    """As they were saved; bytes, where values would not be aligned."""
    begins = itertools.accumulate((size_bytes for *_, size_bytes in looks), initial=0)
    return _forms(
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

    def _forms(self) -> Forms:
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
            if (saved := each()) is not None:
                t = None if tensors is None else tensors[k]
                saved.tensor = t if t is None or t.shape == saved.shape else t.view(saved.dtype).view(saved.shape)


class InputHandle(AutogradHandle):
    """A unit's input: the leaves that the unit before it made; or the gradient of it, which is that of the leaves."""

    def __init__(self, leaves: Sequence[torch.Tensor], *, is_gradient: bool = False) -> None:
        self.leaves = [leaf for leaf in leaves if leaf.grad is not None] if is_gradient else leaves
        self._is_gradient = is_gradient
        self._strides: Sequence[tuple[int, ...] | None] = ()

    def _forms(self) -> Forms:
        tensors = self._tensors()
        self._strides = [None if t.is_contiguous() else t.stride() for t in tensors]
        return _forms(tuple([(t.dtype, t.shape) for t in tensors]))

    def _tensors(self) -> list[torch.Tensor]:
        if not self._is_gradient:
            return [leaf.detach() for leaf in self.leaves]
        gradients = [leaf.grad for leaf in self.leaves if leaf.grad is not None]
        assert len(gradients) == len(self.leaves), "a gradient that has been used is not moved"
        return gradients

    def parts(self) -> list[torch.Tensor]:
        return [t.contiguous() for t in self._tensors()]

    def unpack(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        strided = zip(parts, self._strides, strict=True)
        return [t if stride is None else t.new_empty_strided(t.shape, stride).copy_(t) for t, stride in strided]

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
    """Of a gradient: there is none yet (the first delayed update)."""
    norms: Sequence[tuple[int, torch.Tensor]] = ()
    """Of `norm/U`: the position in the model and the norm of each parameter's gradient."""
    clip: torch.Tensor | None = None
    rng: Sequence[torch.Tensor] = ()
    """Of an input from another rank: the random numbers with which its unit goes on."""

    @property
    def block(self) -> Block:
        assert isinstance(self.place, Block)
        return self.place


def content_of(instance: Instance) -> Content:
    """What the bytes of a buffer are."""
    return parse_content(instance.buffer.content)


def states_of(unit: str, contents: Iterable[Content | str]) -> list[States]:
    """A unit's states among these contents, in order: one for the whole, or one per part in which they travel."""
    parsed = (parse_content(str(content)) for content in contents)
    return sorted((c for c in parsed if isinstance(c, States) and c.unit == unit), key=lambda c: c.part)


def value_of(instance: Instance) -> BufferValue:
    assert isinstance(instance.value, BufferValue), f"buffer {instance.buffer.name!r} has no value"
    return instance.value


REMEDY = (
    "Make the schedule from a workload of this model, with the same shapes, dtype and backend: a plan that is run on "
    "the CPU needs `tierplan plan --backend cpu` (in Python, tierplan.runtime.tracing.trace.trace_workload)"
)


def expect(instance: Instance, found_bytes: int) -> None:
    """Raises `SizeError` unless the buffer declares so many bytes."""
    b = instance.buffer
    if found_bytes != b.size_bytes:
        raise SizeError(
            f"buffer {b.name!r} is declared with {b.size_bytes:,} bytes, but holds {found_bytes:,}. {REMEDY}"
        )


def begin_input(instance: Instance, leaves: Sequence[torch.Tensor], *, is_gradient: bool = False) -> BufferValue:
    """The value of a buffer that is a unit's input as autograd has made it, or the gradient of one."""
    handle = InputHandle(leaves, is_gradient=is_gradient)
    expect(instance, sum([leaf.nbytes for leaf in handle.leaves]))
    instance.value = value = handle.begin()
    return value
