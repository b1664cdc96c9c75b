"""What a unit does, as it is recorded; and what recomputing a dropped tensor takes: the operations that lead to it.

Traced workloads record real operations, closed forms record the same operations without tensors. Both use this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tierplan.sim.workloads.work import CommonWork, total_work
from tierplan.sim.workloads.workload import SavedTensor, Training, Workload

SUB_BATCHES = (2, 4, 8)
"""Parts of a micro-batch that plans try, in vertical order: so what these hold is traced, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of a unit's forward, on storages that are numbered in order of appearance."""

    name: str
    """`mlp.act/aten.mul`: where it happens, and what."""
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    work: Mapping[str, float]
    random: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """A storage that autograd keeps."""

    size_bytes: int
    dtype: str


class Meter:
    """Bytes live now, and the most there have been: with complete gradients of own parameters, and without."""

    def __init__(self) -> None:
        self.live_bytes = 0
        self.peak_bytes = 0
        self.complete_bytes = 0
        """Of what is live, gradients of own parameters that are complete."""
        self.accumulating_peak_bytes = 0
        """The peak without those: they would be part of earlier gradients by then."""

    def add(self, size_bytes: int) -> None:
        self.live_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.accumulating_peak_bytes = max(self.accumulating_peak_bytes, self.live_bytes - self.complete_bytes)

    def restart(self) -> None:
        """Peaks from here on."""
        self.peak_bytes = self.accumulating_peak_bytes = self.live_bytes


@dataclass(kw_only=True, eq=False)
class Recording:
    """What one unit's forward and backward do."""

    memory: Meter = field(default_factory=Meter)
    operations: list[Operation] = field(default_factory=list)
    saves: dict[int, Save] = field(default_factory=dict)
    """By the storage's number, in order of first save."""
    backward_work: list[Mapping[str, float]] = field(default_factory=list)
    saves_input: bool = False
    saves_parameters: bool = False
    num_kernels: int = 0
    """That forward launches."""
    num_elementwise: int = 0
    num_modules: int = 0
    """With parameters of their own, that forward calls."""

    def note(self, operation: Operation, num_kernels: int = 1) -> None:
        """Adds an operation of forward."""
        self.num_kernels += num_kernels
        self.num_elementwise += num_kernels if "elementwise_bytes" in operation.work else 0
        self.operations.append(operation)

    def note_saved(self, number: int, size_bytes: int, dtype: str) -> None:
        """Autograd keeps this storage of the unit's own."""
        self.saves.setdefault(number, Save(size_bytes=size_bytes, dtype=dtype))

    @property
    def saved_bytes(self) -> int:
        return sum(save.size_bytes for save in self.saves.values())

    def amounts(self, granted_bytes: int) -> dict[str, Any]:
        """What a `Unit` says of it, when backward has run beside so many bytes that do not count as its work."""
        peak_bytes, adding_bytes = self.memory.peak_bytes, self.memory.accumulating_peak_bytes
        return dict(
            forward=total_work(operation.work for operation in self.operations),
            backward=total_work(self.backward_work),
            num_kernels=self.num_kernels,
            num_elementwise=self.num_elementwise,
            num_modules=self.num_modules,
            **saved_tensors(self.operations, self.saves),
            saves_input=self.saves_input,
            saves_parameters=self.saves_parameters,
            backward_work_bytes=max(0, peak_bytes - granted_bytes),
            accumulating_work_bytes=max(0, adding_bytes + self.memory.complete_bytes - granted_bytes),
        )


def saved_tensors(operations: Sequence[Operation], saves: Mapping[int, Save]) -> dict[str, Any]:
    """A unit's `saved`, with names, slices and costs, and the `common` work of slices. These start at other saved
    tensors, input or parameters."""
    writers: dict[int, list[int]] = {}
    for i, operation in enumerate(operations):
        for storage in operation.writes:
            writers.setdefault(storage, []).append(i)
    index_of = {storage: k for k, storage in enumerate(saves)}
    result, in_slices = [], [list[int]() for _ in operations]
    for k, (kept, save) in enumerate(saves.items()):
        wanted, needs, seen, work_list = set[int](), set[int](), {kept}, [kept]
        while work_list:
            for i in writers.get(work_list.pop(), ()):
                if i in wanted:
                    continue
                wanted.add(i)
                for source in operations[i].reads:
                    if source in seen:
                        continue
                    if source in index_of:
                        needs.add(index_of[source])
                    else:
                        seen.add(source)
                        work_list.append(source)
        part = [operations[i] for i in sorted(wanted)]
        for i in wanted:
            in_slices[i].append(k)
        made_by = writers.get(kept)
        result.append(
            SavedTensor(
                index=k,
                name=operations[made_by[-1]].name if made_by else "from outside",
                size_bytes=save.size_bytes,
                dtype=save.dtype,
                recompute=total_work(operation.work for operation in part),
                needs=tuple(sorted(needs)),
                replayable=bool(made_by) and not any(operation.random for operation in part),
            )
        )
    works: dict[tuple[int, ...], list[Mapping[str, float]]] = {}
    for operation, slices in zip(operations, in_slices, strict=True):
        if len(slices) > 1 and any(operation.work.values()):
            works.setdefault(tuple(slices), []).append(operation.work)
    common = tuple(CommonWork(tensors=tensors, work=total_work(each)) for tensors, each in works.items())
    return dict(saved=tuple(result), common=common)


def with_other_sizes(workload: Workload, at: Callable[[Training], Workload], sizes: Iterable[int]) -> Workload:
    """The workload with what its units hold in micro-batches of other numbers of sequences: saved tensors in one
    sequence, what they hold for a while in one and in `sizes`. It comes from the workloads `at` those settings."""
    training = workload.training
    own = training.per_device_train_batch_size
    others = {n: at(replace(training, per_device_train_batch_size=n)) for n in sorted({1, *sizes} - {own, 0})}
    units, of_both = [], dict[tuple[int, int], tuple[SavedTensor, ...]]()  # blocks that have theirs in common still do
    for u, unit in enumerate(workload.units):
        held = tuple(other.units[u].work_bytes(n) for n, other in others.items())
        alone = others[1].units[u] if 1 in others else unit
        if own > 1 and len(alone.saved) == len(unit.saved):
            pairs, both = zip(unit.saved, alone.saved, strict=True), (id(unit.saved), id(alone.saved))
            if both not in of_both:
                of_both[both] = tuple(replace(t, of_one_bytes=one.size_bytes) for t, one in pairs)
            unit = replace(unit, saved=of_both[both])
        units.append(replace(unit, other_work_bytes=held))
    shared = tuple((n, other.shared_bytes) for n, other in others.items())
    return replace(workload, units=tuple(units), other_shared_bytes=shared)
