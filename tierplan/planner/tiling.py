"""The same step in more and smaller micro-batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tierplan.sim.workload import SavedTensor, Unit, Workload

__all__ = ["cut_batches"]


def cut_batches(workload: Workload, parts: int) -> Workload:
    """`workload` with each micro-batch cut into `parts`, which must divide its number of sequences.

    Exact where amounts are linear in the batch, which all but a few bytes are; those are rounded up.
    """
    training = workload.training
    assert training.per_device_train_batch_size % parts == 0, "the plan was not checked"
    return replace(
        workload,
        training=replace(
            training,
            per_device_train_batch_size=training.per_device_train_batch_size // parts,
            gradient_accumulation_steps=training.gradient_accumulation_steps * parts,
        ),
        units=tuple(_cut(unit, parts) for unit in workload.units),
    )


def _cut(unit: Unit, parts: int) -> Unit:
    return replace(
        unit,
        forward=_divided(unit.forward, parts),
        backward=_divided(unit.backward, parts),
        saved=tuple(_cut_tensor(t, parts) for t in unit.saved),
        input_bytes=-(-unit.input_bytes // parts),
        output_bytes=-(-unit.output_bytes // parts),
        forward_work_bytes=-(-unit.forward_work_bytes // parts),
        backward_work_bytes=-(-unit.backward_work_bytes // parts),
    )


def _cut_tensor(tensor: SavedTensor, parts: int) -> SavedTensor:
    return replace(tensor, size_bytes=-(-tensor.size_bytes // parts), recompute=_divided(tensor.recompute, parts))


def _divided(work: Mapping[str, float], parts: int) -> dict[str, float]:
    return {kind: amount / parts for kind, amount in work.items()}
