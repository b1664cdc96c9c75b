"""What recomputing a dropped tensor takes: the slice of a unit's operations that lead to it.

Traced workloads record real operations, closed forms record the same operations without tensors. Both use this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tierplan.sim.workloads.workload import SavedTensor, Training, Workload, total_work


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
    """A storage that autograd keeps, in order of first save."""

    storage: int
    size_bytes: int
    dtype: str


def saved_tensors(operations: Sequence[Operation], saves: Sequence[Save]) -> tuple[SavedTensor, ...]:
    """The saved tensors with names, slices and costs. Slices start at other saved tensors, input or parameters."""
    writers: dict[int, list[int]] = {}
    for i, operation in enumerate(operations):
        for storage in operation.writes:
            writers.setdefault(storage, []).append(i)
    index_of = {save.storage: k for k, save in enumerate(saves)}
    result = []
    for k, save in enumerate(saves):
        wanted, needs, seen, work_list = set[int](), set[int](), {save.storage}, [save.storage]
        while work_list:
            storage = work_list.pop()
            for i in writers.get(storage, ()):
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
        made_by = writers.get(save.storage)
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
    return tuple(result)


def with_sizes_of_one(workload: Workload, at: Callable[[Training], Workload]) -> Workload:
    """The workload with the sizes that its saved tensors have in one sequence, from the workload `at` that setting."""
    training = workload.training
    if training.per_device_train_batch_size == 1:
        return workload
    units = []
    for unit, alone in zip(workload.units, at(replace(training, per_device_train_batch_size=1)).units, strict=True):
        if len(alone.saved) == len(unit.saved):
            pairs = zip(unit.saved, alone.saved, strict=True)
            unit = replace(unit, saved=tuple(replace(t, of_one_bytes=one.size_bytes) for t, one in pairs))
        units.append(unit)
    return replace(workload, units=tuple(units))
