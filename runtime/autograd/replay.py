"""Makes single saved tensors of a block again by replaying only the operations that they come from.

While a block is run again for the first time, an `OperationLog` notes its operations on storages (views need no replay:
a tensor is its storage and how to look at it). `Recipe` then is the shortest run of operations that makes what was
dropped from what is there: parameters, the block's inputs, other saved tensors. Later recomputations execute the recipe
alone, without the block's Python code, without autograd and without any hook.

A recipe draws no random numbers, writes over nothing, and reads nothing that was written over after it was read; where
a tensor would need that (dropout), `recipe` is None and the block is run again instead.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tierplan.runtime.autograd.nests import flatten, look, tensors_in
from tierplan.runtime.execution.device import Event

Source = tuple[str, int]
"""Where a storage comes from that the block does not make: `("param", 0)`, `("input", 1)`, `("arg", 4)` or
`("saved", 7)`; the number counts units, inputs, tensor arguments or saved tensors."""
There = Mapping[str, Sequence[torch.Tensor | None]]
"""Where a recomputation may start, by the kinds of its sources."""


@dataclass(frozen=True, slots=True)
class _View:
    """A tensor argument: a storage by number, and how it is looked at."""

    number: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class _Operation:
    """One operation that makes storages or writes into some."""

    func: Any
    given: list[object]
    """Its arguments, flat, and what nests them; tensors are `_View`s."""
    nested: Callable[[Sequence[object]], tuple[Sequence[object], dict[str, object]]]
    read: tuple[int, ...]
    """Numbers of their storages."""
    results: tuple[int | None, ...]
    """Number of the storage of each output that is new with this call; None for others."""
    written: tuple[int, ...]
    is_random: bool


class OperationLog(TorchDispatchMode):
    """Notes operations while it is active. Holds no tensor, so it does not lengthen any life."""

    def __init__(self, there: There, constants: Iterable[torch.Tensor]) -> None:
        """What is `there` is found where it is in later runs. `constants` stay as they are."""
        super().__init__()
        self.calls: list[_Operation] = []
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}
        self._outside: dict[int, Source | torch.Tensor] = {t.untyped_storage()._cdata: t for t in constants}
        """By identity of a storage."""
        self._outside |= _sources(there)
        self.source_of: dict[int, Source | torch.Tensor] = {}
        self.saved_number: dict[int, int] = {}
        """Storage number by index of the saved tensor."""

    def number(self, t: torch.Tensor) -> tuple[int, bool]:
        """The number of a tensor's storage, and whether it was not known before."""
        storage = t.untyped_storage()
        known = self._known.get(storage._cdata)
        if known is not None:
            return known[1], False
        number = len(self._known)
        self._known[storage._cdata] = (StorageWeakRef(storage), number)  # keeps the identity from being reused
        return number, True

    def saved(self, index: int, t: torch.Tensor) -> None:
        """The tensor's storage is that of saved tensor `index`."""
        self.saved_number[index] = self.number(t)[0]

    def _input(self, t: torch.Tensor, read: list[int]) -> _View:
        number, is_new = self.number(t)
        read.append(number)
        if is_new and (source := self._outside.get(t.untyped_storage()._cdata)) is not None:
            self.source_of[number] = source
        return _View(number, t.dtype, tuple(t.shape), tuple(t.stride()), int(t.storage_offset()) * t.itemsize)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read: list[int] = []
        flat, nested = flatten((args, kwargs))
        given = [self._input(x, read) if isinstance(x, torch.Tensor) else x for x in flat]
        out = func(*args, **kwargs)
        numbers = [self.number(t) if isinstance(t, torch.Tensor) else (None, False) for t in flatten(out)[0]]
        fresh = tuple(number if is_new else None for number, is_new in numbers)
        written = tuple(self.number(t)[0] for t in changed(func, args, kwargs))
        if written or any(n is not None for n in fresh):
            draws = is_random(func, args, kwargs)
            self.calls.append(_Operation(func, given, nested, tuple(read), fresh, written, draws))
        return out

    def recipe(self, wanted: Iterable[int], available: Iterable[int]) -> Recipe | None:
        """How to make `wanted` saved tensors from `available` ones; None where that draws a random number or writes."""
        target = {self.saved_number[k]: k for k in wanted if k in self.saved_number}
        sources: dict[int, Source | torch.Tensor] = dict(self.source_of)
        for k in available:
            if k in self.saved_number and self.saved_number[k] not in target:
                sources[self.saved_number[k]] = ("saved", k)
        maker = {n: i for i, call in enumerate(self.calls) for n in call.results if n is not None}
        written_at = {n: i for i, call in enumerate(self.calls) for n in call.written}
        needed, chosen = list(target), set[int]()
        while needed:
            number = needed.pop()
            if number in sources and number not in target:
                continue
            i = maker.get(number)
            if i is None or number in written_at or self.calls[i].is_random:
                return None
            if i not in chosen:
                chosen.add(i)
                needed += self.calls[i].read
        # What is there now is what it was after its last write: a call that read it earlier read something else.
        if any(written_at.get(n, -1) >= i for i in chosen for n in self.calls[i].read):
            return None
        calls = [self.calls[i] for i in sorted(chosen)]
        last: dict[int, int] = {}
        for i, call in enumerate(calls):
            for number in (*call.read, *(n for n in call.results if n is not None)):
                last[number] = i
        return Recipe(tuple(calls), sources, target, last)


def _sources(there: There) -> dict[int, Source]:
    """By identity of a storage; the last one of those that have it."""
    given = ((kind, k, t) for kind, ts in there.items() for k, t in enumerate(ts) if t is not None)
    return {t.untyped_storage()._cdata: (kind, k) for kind, k, t in given}


def looks_of(there: There) -> tuple[object, ...]:
    """What a recipe takes to be the same: whether a block's argument is its input, or another one twice, and where each
    lies in its storage."""
    source_of, tensors = _sources(there), (t for ts in there.values() for t in ts if t is not None)
    return tuple((source_of[t.untyped_storage()._cdata], t.stride(), t.storage_offset()) for t in tensors)


def arguments(func: Any, args: Any, kwargs: Any) -> Iterable[tuple[Any, Any]]:
    """The operation's declared arguments, each with its value or its default."""
    for k, argument in enumerate(func._schema.arguments):
        given = args[k] if k < len(args) else kwargs.get(argument.name, argument.default_value)
        yield argument, given


def written_arguments(func: Any, args: Any, kwargs: Any) -> Iterable[tuple[Any, Any]]:
    """Those that the operation writes to."""
    return ((a, value) for a, value in arguments(func, args, kwargs) if a.alias_info and a.alias_info.is_write)


def changed(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that the operation writes to."""
    return tensors_in([value for _, value in written_arguments(func, args, kwargs)])


def is_random(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether the operation draws random numbers; attention does only with dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    return not any(a.name == "dropout_p" and value == 0 for a, value in arguments(func, args, kwargs))


@dataclass(frozen=True)
class Recipe:
    """Operations that make saved tensors from what is there."""

    calls: tuple[_Operation, ...]
    sources: Mapping[int, Source | torch.Tensor]
    target: Mapping[int, int]
    """Index of the saved tensor by storage number."""
    last: Mapping[int, int]
    """Position of the last call that uses a storage."""
    saved: tuple[int, ...] = field(init=False)
    """Indices of the saved tensors that it starts from."""
    marks: list[list[Event | int]] = field(default_factory=list)
    """Of each run that was timed: before the first call and behind each, an event or the clock in nanoseconds."""

    def __post_init__(self) -> None:
        own = {number for call in self.calls for number in call.results}
        read = [self.sources[n] for n in self.last if n not in own]
        saved = tuple(k for kind, k in (s for s in read if not isinstance(s, torch.Tensor)) if kind == "saved")
        object.__setattr__(self, "saved", saved)

    def run(
        self,
        find: Callable[[Source], torch.UntypedStorage],
        wanted: Mapping[int, Any],
        *,
        record: Callable[[], Event | None] | None = None,
    ) -> None:
        """Executes the calls; `find` gives the storage of a source, `wanted` has the `SavedStorage`s to fill.

        They are timed if `record` is given: it gives an event behind what has been put on the device's stream, or None
        where that is done.
        """
        storages: dict[int, torch.UntypedStorage] = {}
        marks: list[Event | int] = []

        def mark() -> None:
            if record is not None:
                marks.append(record() or time.perf_counter_ns())

        def looked_at(value: object) -> object:
            if not isinstance(value, _View):
                return value
            if (storage := storages.get(value.number)) is None:
                source = self.sources[value.number]
                storage = source.untyped_storage() if isinstance(source, torch.Tensor) else find(source)
                storages[value.number] = storage
            return look(storage, value.dtype, value.offset_bytes, value.size, value.stride)

        mark()
        with torch.no_grad():
            for i, call in enumerate(self.calls):
                args, kwargs = call.nested([looked_at(x) for x in call.given])
                out = flatten(call.func(*args, **kwargs))[0]
                del args, kwargs
                mark()
                for number, t in zip(call.results, out, strict=True):
                    if number is None:
                        continue
                    if number in self.target:
                        wanted[self.target[number]].take(t)
                    if self.last[number] > i:
                        storages[number] = t.untyped_storage()
                del out
                for number in call.read:
                    if self.last[number] == i:
                        storages.pop(number, None)
        if marks:
            self.marks.append(marks)

    def seconds(self) -> dict[int, list[float]]:
        """By saved tensor, what the calls that lead to it from others took in each timed run. Waits for the last."""
        by_tensor_s: dict[int, list[float]] = {}
        for marks in self.marks:
            if not isinstance(last := marks[-1], int):
                last.wait()
            times_ns = [mark if isinstance(mark, int) else mark.time_ns() for mark in marks]
            for index, total_s in self._attributed([(b - a) / 1e9 for a, b in itertools.pairwise(times_ns)]).items():
                by_tensor_s.setdefault(index, []).append(total_s)
        return by_tensor_s

    def _attributed(self, spent_s: Sequence[float]) -> dict[int, float]:
        """Each call's time belongs to the first saved tensor that is made from its result."""
        owner: dict[int, int] = {}
        total_s: dict[int, float] = dict.fromkeys(self.target.values(), 0.0)
        for i in reversed(range(len(self.calls))):
            call = self.calls[i]
            results = [n for n in call.results if n is not None]
            saved = sorted(self.target[n] for n in results if n in self.target)
            index = saved[0] if saved else next((owner[n] for n in results if n in owner), None)
            if index is None:
                continue
            total_s[index] += spent_s[i]
            for number in call.read:
                if number not in self.target:
                    owner[number] = index
        return total_s
