"""What autograd saves for backward inside one unit, as storages that can be kept, moved away, or made again.

A *saved tensor* is a storage that the unit's forward saves; its index is the order of first save. Parameters, views of
them, the unit's inputs and tensors from outside the unit do not count: parameters and inputs are saved as references,
which are looked up when backward needs them, wherever they are by then. A storage that is saved twice counts once.

Autograd's own in-place check does not see through saved-tensor hooks; the runtime writes over a unit's parameters only
after its backward (rule 2 of the schedule language).
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

import torch

from tierplan.runtime.autograd.nests import look
from tierplan.runtime.autograd.replay import Source, There
from tierplan.runtime.autograd.units import FlatParameters
from tierplan.sim.step import UnitSpec

CPU = torch.device("cpu")


INSIDE = "Where a block itself runs backward in its forward (torch.autograd.grad), plan without recomputation"


class AbsentError(RuntimeError):
    """Backward needs bytes that the schedule has not brought to the device."""


class AllRecreated(Exception):
    """The last saved tensor that was asked for has been made again."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class SavedStorage:
    """A saved tensor. Autograd's graph holds this, and this holds the bytes while they are on the device."""

    index: int
    size_bytes: int
    dtype: torch.dtype
    shape: Sequence[int]
    stride: Sequence[int]
    """As it was first saved, if that was all of the storage in order; else flat. The stride for what is made again."""
    tensor: torch.Tensor | None = None
    """All of the storage, contiguous, in this type and shape."""
    stays: bool = False
    """It is in host memory, where backward reads it: the seed of a GPU's attention with dropout."""

    def is_all(self, t: torch.Tensor) -> bool:
        """Whether a tensor on this storage is as `tensor`."""
        return t.dtype == self.dtype and t.shape == self.shape and t.is_contiguous()

    def take(self, t: torch.Tensor) -> None:
        """The storage of this tensor is the saved one."""
        if t.dtype == self.dtype:  # no operation that writes: somebody may be noting those
            own = t.detach()
            self.tensor = own if self.is_all(t) else own.as_strided(self.shape, self.stride, 0)
        else:
            self.tensor = look(t.untyped_storage(), self.dtype, 0, self.shape, self.stride)


class _Reference:
    """What autograd holds for a tensor: where its bytes are, and how it looks at them."""

    __slots__ = ("dtype", "offset_bytes", "size", "source", "stride", "whole")

    def __init__(self, source: SavedStorage | FlatParameters | torch.Tensor, t: torch.Tensor) -> None:
        self.source = source
        """A saved tensor, a unit's parameters, or a leaf."""
        is_whole = t is source or (isinstance(source, FlatParameters) and id(t) in source.identities)
        self.whole = t if is_whole else None
        """The leaf or the parameter itself, where it is no view of it: that has its bytes, wherever they are."""
        self.dtype, self.size, self.stride = t.dtype, t.shape, t.stride()
        self.offset_bytes = _begin_bytes(t) - (_begin_bytes(source) if isinstance(source, torch.Tensor) else 0)
        """From the beginning of the leaf, which may lie elsewhere by the time of backward; else of the storage."""

    def tensor(self) -> torch.Tensor:
        """The tensor, from wherever its bytes are now. Raises `AbsentError` where they are not on the device."""
        source, begin_bytes = self.source, 0
        if isinstance(source, FlatParameters):
            if source.bound is None:
                raise AbsentError(
                    f"backward needs parameters such as {source.parameters[0][0]!r}, but the schedule has not brought "
                    "them to the device for it; the op must read them"
                )
            if self.whole is not None:
                return self.whole
            storage = source.bound.untyped_storage()
        elif isinstance(source, torch.Tensor):
            storage = source.untyped_storage()
            if storage.nbytes() < source.nbytes:
                raise AbsentError("backward needs the unit's input, but the schedule has not brought it to the device")
            if self.whole is not None:
                return self.whole
            begin_bytes = _begin_bytes(source)
        else:
            storage = _there(source).untyped_storage()
        return look(storage, self.dtype, begin_bytes + self.offset_bytes, self.size, self.stride)


def _there(saved: SavedStorage) -> torch.Tensor:
    if saved.tensor is None:
        raise AbsentError(
            f"backward needs saved tensor {saved.index}, but it is not on the device; the schedule must "
            f"fetch or recompute it first. {INSIDE}"
        )
    return saved.tensor


def _begin_bytes(t: torch.Tensor) -> int:
    return int(t.storage_offset()) * t.itemsize


@dataclass(frozen=True, slots=True)
class Treatment:
    """What happens to what a unit saves, but for what is kept."""

    recomputed: Collection[int] = ()
    """Indices of saved tensors whose storage is not held, because a recompute makes it again."""
    moved: Mapping[int, int] = field(default_factory=dict)
    """Those that are moved away, each with the index in the plan whose place it has."""

    @classmethod
    def planned(cls, spec: UnitSpec) -> Treatment:
        return cls(frozenset(spec.recomputed), {k: k for k in spec.moved})

    @classmethod
    def of(cls, sizes: Sequence[int], spec: UnitSpec, together: Collection[Sequence[int]]) -> Treatment:
        """Of saved tensors of these bytes in places for those of a plan, of which some are moved `together`.

        Tensors with the bytes of planned ones, in their order, have their places; each other has one where as much room
        is left, or where smaller ones make room for it, which go elsewhere. As planned where that cannot be, which then
        shows by its bytes.
        """
        planned = [tensor.size_bytes for tensor in spec.saved]
        place_of = dict.fromkeys(range(len(planned)), "keep") | dict.fromkeys(spec.recomputed, "recompute")
        place_of |= {k: str(indices) for indices in together for k in indices}
        left, own = Counter[str](), dict[int, int]()
        for k, place in place_of.items():
            left[place] += planned[k]

        def put(k: int, places: Collection[str]) -> bool:
            """Gives a tensor a place among these, where there is one with room and with an index that none has."""
            free = (i for i in place_of if i not in own.values() and place_of[i] in places)
            if (i := next((i for i in free if left[place_of[i]] >= sizes[k]), None)) is not None:
                left[place_of[i]] -= sizes[k]
                own[k] = i
            return i is not None

        for i, k, length in SequenceMatcher(None, planned, sizes, autojunk=False).get_matching_blocks():
            own |= {k + n: i + n for n in range(length)}
        for k, i in own.items():
            left[place_of[i]] -= sizes[k]
        for k in sorted({*range(len(sizes))} - own.keys(), key=lambda k: -sizes[k]):
            for place in ("keep", "recompute"):
                for other in sorted((j for j in own if place_of[own[j]] == place), key=lambda j: -sizes[j]):
                    if k in own or put(k, place_of.values()):
                        break
                    i = own.pop(other)
                    left[place] += sizes[other]
                    if not put(other, {*left} - {place}):
                        own[other] = i
                        left[place] -= sizes[other]
            if k not in own and not put(k, place_of.values()):
                return cls.planned(spec)
        moved = {k: i for k, i in own.items() if place_of[i] not in ("keep", "recompute")}
        return cls(frozenset(k for k, i in own.items() if place_of[i] == "recompute"), moved)


@dataclass(eq=False)
class _Saver:
    """Tells references from saved tensors, and numbers the latter."""

    params: Sequence[FlatParameters]
    """Parameters that this forward uses."""
    inputs: Sequence[torch.Tensor]
    """The unit's differentiable inputs, as leaves."""
    external: set[int]
    """Addresses of storages from outside the unit, which live anyhow."""
    num_saved: int = 0
    saves_parameters: bool = False
    _known: dict[int, tuple[weakref.ref[torch.UntypedStorage], object]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._sources: dict[int, FlatParameters | torch.Tensor] = {
            t.untyped_storage().data_ptr(): t for t in self.inputs
        }
        self._whole: dict[int, object] = {}
        """By identity, references to parameters that were saved before."""
        for part in self.params:
            if part.bound is not None:
                self._sources[part.bound.untyped_storage().data_ptr()] = part
                self._whole.update(part.references)

    def find(self, t: torch.Tensor, storage: torch.UntypedStorage, address: int) -> object | None:
        """How to find the tensor again if it is a reference; what `know` was told about its storage, and not about
        another one that had its address; None if it is a saved tensor that is seen first."""
        source = self._sources.get(address)
        if source is not None:
            reference = _Reference(source, t)
            if isinstance(source, FlatParameters):
                self.saves_parameters = True
                if reference.whole is not None:
                    self._whole[id(t)] = source.references[id(t)] = reference
            return reference
        known = self._known.get(address)
        if known is not None and known[0]() is storage:
            return known[1]
        return t.detach() if address in self.external or address == 0 else None

    def know(self, storage: torch.UntypedStorage, address: int, what: object) -> None:
        self._known[address] = weakref.ref(storage), what

    def close(self) -> None:
        """After the forward: what the graph does not hold may die."""
        self._known.clear()
        self._sources.clear()
        self._whole.clear()
        self.inputs = ()


@dataclass(eq=False)
class Recorder(_Saver):
    """The hooks of a unit's forward."""

    device: torch.device = CPU
    """Of the unit."""
    treatment: Treatment = field(default_factory=Treatment)
    """What is recomputed is not held, and what is moved is held here, until the runtime takes it."""
    sizes: list[int] = field(default_factory=list)
    kept_bytes: int = 0
    """Of those that are neither."""
    dropped: dict[int, SavedStorage] = field(default_factory=dict)
    away: dict[int, SavedStorage] = field(default_factory=dict)
    """The recomputed ones, and the moved ones by their index in the plan, for those who bring them back. Autograd's
    graph alone holds the others."""
    saved: dict[int, weakref.ref[SavedStorage]] = field(default_factory=dict)
    """Where there is a recomputation, all saved tensors, held by nobody here: what it may start from."""

    def holds(self, indices: Iterable[int], *, here: bool) -> bool:
        """Whether the graph still has these saved tensors: none was saved on a branch that has led nowhere. Also
        whether they are `here`, on the device, where that is asked."""
        saved = [self.saved[k]() for k in indices]
        return all(one is not None and (not here or one.tensor is not None) for one in saved)

    def pack(self, t: torch.Tensor) -> object:
        if (whole := self._whole.get(id(t))) is not None:
            self.saves_parameters = True
            return whole
        storage = t.untyped_storage()
        known = self.find(t, storage, address := storage.data_ptr())
        if known is None:
            return self._begin(t, storage, address)
        if known is True:
            return t.detach()
        return known if type(known) is not SavedStorage or known.is_all(t) else _Reference(known, t)

    def _begin(self, t: torch.Tensor, storage: torch.UntypedStorage, address: int) -> object:
        """A saved tensor: what autograd's graph is to hold for it, the tensor where nobody else asks for it."""
        index, size_bytes = self.num_saved, storage.nbytes()
        is_recomputed, is_moved = index in self.treatment.recomputed, index in self.treatment.moved
        self.num_saved += 1
        self.sizes.append(size_bytes)
        if not is_recomputed and not is_moved:
            self.kept_bytes += size_bytes
            if not self.treatment.recomputed:
                self.know(storage, address, True)
                return t.detach()
        is_all = t.nbytes == size_bytes and t.is_contiguous()
        shape = t.shape if is_all else (size_bytes // t.itemsize,)
        saved = SavedStorage(index, size_bytes, t.dtype, shape, t.stride() if is_all and is_recomputed else (1,))
        self.know(storage, address, saved)
        if not is_recomputed:
            saved.tensor = t.detach() if is_all else t.detach().as_strided(shape, (1,), 0)
            saved.stays = t.is_cpu and self.device != CPU
        if self.treatment.recomputed:
            self.saved[index] = weakref.ref(saved)
        if is_recomputed:
            self.dropped[index] = saved
        elif is_moved:
            self.away[self.treatment.moved[index]] = saved
        return saved if is_all else _Reference(saved, t)

    @staticmethod
    def unpack(packed: object) -> torch.Tensor:
        if type(packed) is SavedStorage:
            return _there(packed) if packed.tensor is None else packed.tensor
        if type(packed) is _Reference:
            return packed.tensor()
        assert isinstance(packed, torch.Tensor)
        return packed


@dataclass(frozen=True, slots=True)
class Finder:
    """Finds the storages from which a recomputation of a unit starts."""

    unit: str
    saved: Mapping[int, weakref.ref[SavedStorage]]
    there: There
    params: Sequence[str]
    """Names of parameters, for each of those that are `there`."""

    def __call__(self, source: Source) -> torch.UntypedStorage:
        kind, k = source
        if kind == "saved":
            saved = self.saved[k]()
            if saved is None or saved.tensor is None:
                raise AbsentError(
                    f"a recomputation in {self.unit!r} starts from saved tensor {k}, but it is not on the device; the "
                    "op must read it"
                )
            return saved.tensor.untyped_storage()
        if (tensor := self.there[kind][k]) is None:
            raise AbsentError(f"a recomputation needs {self.params[k]!r}; the op must read them")
        return tensor.untyped_storage()


@dataclass(eq=False)
class Recreator(_Saver):
    """The hooks of a rerun: fills the wanted storages, holds nothing else, and ends the rerun with the last of them."""

    wanted: dict[int, SavedStorage] = field(default_factory=dict)
    on_saved: Callable[[int, torch.Tensor], None] = lambda index, t: None
    """Called with each saved tensor's index and tensor as the rerun saves it."""
    runs_to_end: bool = False
    """The rerun goes on behind the last wanted one, for the unit's output."""
    is_on: bool = True
    """Off before the part that is to be made again."""

    def pack(self, t: torch.Tensor) -> object:
        storage = t.untyped_storage()
        if self.is_on and self.find(t, storage, address := storage.data_ptr()) is None:
            self.know(storage, address, True)
            self.on_saved(self.num_saved, t)
            saved = self.wanted.pop(self.num_saved, None)
            self.num_saved += 1
            if saved is not None:
                saved.take(t)
                if not self.wanted and not self.runs_to_end:
                    raise AllRecreated
        return None

    @staticmethod
    def unpack(packed: object) -> torch.Tensor:
        raise AbsentError(f"backward runs through what is made again. {INSIDE}")
