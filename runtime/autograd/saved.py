"""What autograd saves for backward inside one unit, cut into slots that can be kept, moved away, or made again.

A *slot* is a storage that the unit's forward saves; its index is the order of first save. Parameters, views of them,
the unit's inputs and tensors from outside the unit are no slots: parameters and inputs are saved as references, which
are looked up when backward needs them, wherever they are by then. A storage that is saved twice is one slot.

Autograd's own in-place check does not see through saved-tensor hooks; the runtime writes over a unit's parameters only
after its backward (rule 2 of the schedule language).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tierplan.runtime.autograd.units import ModelUnit

__all__ = ["AbsentError", "AllMade", "Recorder", "Recreator", "Slot", "memory_of"]


class AbsentError(RuntimeError):
    """Backward needs bytes that the schedule has not brought to the device."""


class AllMade(Exception):
    """The last dropped slot has been made again."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Slot:
    """A saved storage. Autograd's graph holds the slot; the slot holds the storage while it is on the device."""

    index: int
    size_bytes: int
    storage: torch.UntypedStorage | None


@dataclass(eq=False, slots=True)
class _SlotRef:
    slot: Slot
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(eq=False, slots=True)
class _ParamRef:
    unit: ModelUnit
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(eq=False, slots=True)
class _InputRef:
    leaf: torch.Tensor
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset_bytes: int
    """From the beginning of the leaf."""


@dataclass(eq=False)
class _Saver:
    """Tells references from slots, and numbers the slots."""

    params: Sequence[ModelUnit]
    """Units whose parameters this forward uses."""
    inputs: Sequence[torch.Tensor]
    """The unit's differentiable inputs, as leaves."""
    external: set[int]
    """Addresses of storages from outside the unit, which live anyhow."""
    num_slots: int = 0
    saves_parameters: bool = False
    _known: dict[int, tuple[StorageWeakRef, object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._of_unit = {u.bound.untyped_storage().data_ptr(): u for u in self.params if u.bound is not None}
        self._of_input = {t.untyped_storage().data_ptr(): t for t in self.inputs}

    def reference(self, t: torch.Tensor) -> object | None:
        """How to find the tensor again if it is no slot; None if it is one."""
        address = t.untyped_storage().data_ptr()
        if address in self._of_unit:
            self.saves_parameters = True
            return _ParamRef(self._of_unit[address], t.shape, t.stride(), int(t.storage_offset()))
        if address in self._of_input:
            leaf = self._of_input[address]
            inside = int(t.storage_offset()) * t.itemsize - int(leaf.storage_offset()) * leaf.itemsize
            return _InputRef(leaf, t.dtype, t.shape, t.stride(), inside)
        if address in self.external or t.untyped_storage().nbytes() == 0:
            return t.detach()
        return None

    def seen(self, t: torch.Tensor) -> object | None:
        """What `know` was told about this tensor's storage. The weak reference keeps its identity from being reused."""
        known = self._known.get(t.untyped_storage()._cdata)
        return known[1] if known else None

    def know(self, t: torch.Tensor, what: object) -> None:
        storage = t.untyped_storage()
        self._known[storage._cdata] = (StorageWeakRef(storage), what)

    def close(self) -> None:
        """After the forward: what the graph does not hold may die."""
        self._known.clear()
        self._of_input.clear()
        self.inputs = ()


@dataclass(eq=False)
class Recorder(_Saver):
    """The hooks of a unit's forward."""

    recomputed: frozenset[int] = frozenset()
    """Indices of slots whose storage is not held, because a recompute makes it again."""
    moved: frozenset[int] = frozenset()
    """Indices of slots that are moved away: held here, until the runtime takes them."""
    sizes: list[int] = field(default_factory=list)
    missing: dict[int, Slot] = field(default_factory=dict)
    """The recomputed and the moved slots, for those who bring them back. Autograd's graph alone holds the others."""
    slots: dict[int, weakref.ref[Slot]] = field(default_factory=dict)
    """All slots, held by nobody here: what a recomputation may start from."""

    def pack(self, t: torch.Tensor) -> object:
        found = self.reference(t)
        if found is not None:
            return found
        slot = self.seen(t)
        if slot is None:
            storage = t.untyped_storage()
            index = self.num_slots
            self.num_slots += 1
            self.sizes.append(storage.nbytes())
            slot = Slot(index, storage.nbytes(), None if index in self.recomputed else storage)
            self.know(t, slot)
            self.slots[index] = weakref.ref(slot)
            if index in self.moved or index in self.recomputed:
                self.missing[index] = slot
        assert isinstance(slot, Slot)
        return _SlotRef(slot, t.dtype, t.shape, t.stride(), int(t.storage_offset()))

    @staticmethod
    def unpack(saved: object) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        if isinstance(saved, _ParamRef):
            if saved.unit.bound is None:
                raise AbsentError(
                    f"backward needs the parameters of {saved.unit.name!r}, but the schedule has not brought them to "
                    "the device for it; the op must read them"
                )
            return saved.unit.bound.as_strided(saved.size, saved.stride, saved.offset)
        assert isinstance(saved, _InputRef | _SlotRef)
        storage = saved.leaf.untyped_storage() if isinstance(saved, _InputRef) else saved.slot.storage
        if storage is None:
            assert isinstance(saved, _SlotRef)
            raise AbsentError(
                f"backward needs saved tensor {saved.slot.index}, but it is not on the device; the schedule must "
                "fetch or recompute it first"
            )
        if isinstance(saved, _InputRef) and storage.nbytes() < saved.leaf.nbytes:
            raise AbsentError("backward needs the unit's input, but the schedule has not brought it to the device")
        out = torch.empty(0, dtype=saved.dtype, device=storage.device)
        if isinstance(saved, _SlotRef):
            offset = saved.offset
        else:  # the leaf may lie elsewhere by now
            offset = (int(saved.leaf.storage_offset()) * saved.leaf.itemsize + saved.offset_bytes) // out.itemsize
        return out.set_(storage, offset, saved.size, saved.stride)


@dataclass(eq=False)
class Recreator(_Saver):
    """The hooks of a rerun: fills the wanted slots, holds nothing else, and ends the rerun with the last of them."""

    wanted: dict[int, Slot] = field(default_factory=dict)
    on_slot: Callable[[int, torch.Tensor], None] = lambda index, t: None
    """Called with each slot's index and tensor as the rerun saves it."""
    runs_to_end: bool = False
    """The rerun goes on behind the last wanted slot, for the unit's output."""
    is_on: bool = True
    """Off before the part that is to be made again."""

    def pack(self, t: torch.Tensor) -> object:
        if self.is_on and self.reference(t) is None and self.seen(t) is None:
            self.know(t, True)
            self.on_slot(self.num_slots, t)
            slot = self.wanted.pop(self.num_slots, None)
            self.num_slots += 1
            if slot is not None:
                slot.storage = t.untyped_storage()
                if not self.wanted and not self.runs_to_end:
                    raise AllMade
        return None

    @staticmethod
    def unpack(saved: object) -> torch.Tensor:
        raise AssertionError("nobody runs backward through a rerun")


def memory_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """The bytes of a storage, as a uint8 tensor."""
    out = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return out.set_(storage, 0, (storage.nbytes(),), (1,))
