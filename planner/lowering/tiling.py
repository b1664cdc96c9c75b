"""The same step in smaller pieces: micro-batches of fewer sequences, or blocks cut into tiles of their operators."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, replace

from tierplan.hwmodels.machine import KERNELS
from tierplan.sim.contents import tile_name
from tierplan.sim.workloads.work import WorkBytes, bytes_at
from tierplan.sim.workloads.workload import SavedTensor, Unit, Workload


def cut_batches(workload: Workload, parts: int) -> Workload:
    """`workload` with each micro-batch cut into `parts`, which must divide its number of sequences.

    Saved tensors are exact where their size in one sequence is known, and what is held for a while where it is known in
    so many. Other amounts are in proportion, rounded up.
    """
    training = workload.training
    assert training.per_device_train_batch_size % parts == 0, "the plan was not checked"
    sequences = training.per_device_train_batch_size // parts
    return _of_sequences(workload, sequences, training.gradient_accumulation_steps * parts, parts)


def with_batch(workload: Workload, sequences: int) -> Workload:
    """`workload` with one micro-batch of so many sequences: as exact as `cut_batches`."""
    return _of_sequences(workload, sequences, 1, workload.training.per_device_train_batch_size, sequences)


def _of_sequences(workload: Workload, sequences: int, accumulation: int, parts: int, times: int = 1) -> Workload:
    """`workload` in micro-batches of so many sequences: so many times one of so many parts of what they were."""
    given = {"per_device_train_batch_size": sequences, "gradient_accumulation_steps": accumulation}
    units = tuple(_cut(unit, parts, times, sequences=sequences) for unit in workload.units)
    training = replace(workload.training, **given)  # type: ignore[arg-type]
    others = workload.other_shared_bytes
    shared = (workload.training.per_device_train_batch_size, workload.shared_bytes), *others
    _, shared_bytes = bytes_at(sequences, shared) if others else shared[0]
    return replace(
        workload,
        training=training,
        computed_for=None,
        units=units,
        shared_bytes=shared_bytes,
        other_shared_bytes=shared if others else (),
    )


def cut_operators(workload: Workload, parts: int) -> Workload:
    """`workload` with each block cut into `parts` units, each with its part of the parameters, compute and saved bytes.

    Memory-centric tiling (ZeRO-Infinity): the tiles of an operator have the same input and work one after the other, so
    only one tile's parameters and gradients need the device at a time. Every tile keeps its input here, where the
    real ones share it: `parts - 1` inputs too many per block.
    """
    units: list[Unit] = []
    for unit in workload.units:
        if unit.kind != "block":
            units.append(unit)
            continue
        tile = replace(_cut(unit, parts), input_bytes=unit.input_bytes, output_bytes=unit.output_bytes)
        for k in range(parts):
            own = {
                name: getattr(unit, name) * (k + 1) // parts - getattr(unit, name) * k // parts
                for name in ("num_parameters", "num_frozen", "frozen_bytes")
            }
            units.append(replace(tile, name=tile_name(unit.name, k), shapes=(), **own))
    return replace(workload, units=tuple(units))


def _cut(unit: Unit, parts: int, times: int = 1, sequences: int | None = None) -> Unit:
    """So many times one of so many parts of the unit's amounts; bytes are rounded up. With `sequences`, what is left is
    a micro-batch of so many."""

    def size(whole_bytes: int) -> int:
        return -(-whole_bytes * times // parts)

    def work(whole: Mapping[str, float]) -> dict[str, float]:
        own = {KERNELS: whole[KERNELS]} if sequences is not None and KERNELS in whole else {}
        return {kind: amount * times / parts for kind, amount in whole.items()} | own

    def tensor(t: SavedTensor) -> SavedTensor:
        size_bytes = size(t.size_bytes)
        if sequences is not None and t.of_one_bytes is not None and (sequences == 1 or t.of_one_bytes == t.size_bytes):
            size_bytes = t.of_one_bytes
        of_one_bytes = None if sequences == 1 else t.of_one_bytes
        return replace(t, size_bytes=size_bytes, recompute=work(t.recompute), of_one_bytes=of_one_bytes)

    known = () if sequences is None else unit.other_work_bytes
    whole = unit.work_bytes(parts if sequences is None else sequences * parts // times)
    held = WorkBytes(*bytes_at(sequences or times, map(astuple, (whole, *known))))
    return replace(
        unit,
        forward=work(unit.forward),
        backward=work(unit.backward),
        recompute=None if unit.recompute is None else work(unit.recompute),
        saved=tuple(tensor(t) for t in unit.saved),
        common=tuple(replace(common, work=work(common.work)) for common in unit.common),
        input_bytes=size(unit.input_bytes),
        output_bytes=size(unit.output_bytes),
        forward_work_bytes=held.forward,
        backward_work_bytes=held.backward,
        accumulating_work_bytes=held.accumulating,
        other_work_bytes=(whole, *known) if known else (),
    )
