"""Trainings that benchmarks measure: schedules of small models on a machine of two cores, and their trainers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.models import GIB, SEQUENCE_LENGTH, VOCABULARY
from tierplan.hwmodels.machine import Machine, Rate, SharedLimit, Stream, TierSpec
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.runtime.checkpoint.weights import hollow_model, random_weights
from tierplan.runtime.tracing.trace import trace_config
from tierplan.runtime.trainer import Trainer
from tierplan.sim.schedule import Schedule
from tierplan.sim.step import Semantics
from tierplan.sim.workloads.workload import Training


def machine(device_bytes: int, host_bytes: int) -> Machine:
    """Rates as measured on a machine of 2 cores, for the order of ops; nothing else depends on them.

    The drive reads 1.3 GB/s or writes 3.4 GB/s, and hardly more of one beside the other.
    """
    kinds = ("matmul_bf16_flops", "matmul_fp32_flops", "attention_bf16_flops", "attention_fp32_flops")
    rates = {"bytes": Rate.constant(8e9), "parameters": Rate.constant(3e8), "elementwise_bytes": Rate.constant(5e9)}
    rates |= {kind: Rate.constant(1.2e11) for kind in kinds}
    streams = [Stream(name=n, rates=rates) for n in ("gpu0.compute", "gpu0.h2d", "gpu0.d2h", "host.adam")]
    for name, per_s, share in (("nvme.read", 1.3e9, 1.5), ("nvme.write", 3.4e9, 0.65)):
        takes = {"drive": {"bytes": 1 / per_s}}
        streams.append(Stream(name=name, rates={"bytes": Rate.constant(per_s)}, takes=takes, share=share))
    tiers = (
        TierSpec(name="gpu0", kind="device", capacity_bytes=device_bytes),
        TierSpec(name="host", kind="host", capacity_bytes=host_bytes),
        TierSpec(name="nvme", kind="nvme", capacity_bytes=1 << 50),
    )
    limits = (SharedLimit(name="drive", limit=1.05),)
    return Machine(name="here", tiers=tiers, streams=tuple(streams), shared_limits=limits)


def batches(length: int = SEQUENCE_LENGTH) -> Iterator[dict[str, torch.Tensor]]:
    """The same text for ever."""
    ids = torch.randint(0, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(1))
    return itertools.repeat({"input_ids": ids, "labels": ids})


def schedule_of(
    raw: Mapping[str, object],
    choice: UnitPlan,
    training: Training,
    place: Machine,
    *,
    semantics: Semantics = "in-backward",
    **of_plan: int,
) -> Schedule:
    """All blocks as the choice says; embedding and head keep what they save."""
    workload = trace_config("benchmark", raw, training)
    kept = replace(choice, acts="keep", input="keep")
    units = tuple(choice if u.kind == "block" else kept for u in workload.units)
    plan = UnitwisePlan(policy="benchmark", units=units, semantics=semantics, **of_plan)  # type: ignore[arg-type]
    return lower(plan, workload, place)


def trainer_of(
    raw: Mapping[str, object],
    choice: UnitPlan,
    folder: Path,
    *,
    device_bytes: int = 4 * GIB,
    host_bytes: int = 4 * GIB,
    dtype: Literal["bf16", "fp32"] = "bf16",
    length: int = SEQUENCE_LENGTH,
    semantics: Semantics = "in-backward",
    **settings: Any,
) -> Trainer:
    """Trains from random weights, one sequence a step, on a schedule for `machine`."""
    training = Training(sequence_length=length, dtype=dtype, backend="cpu")
    schedule = schedule_of(raw, choice, training, machine(device_bytes, host_bytes), semantics=semantics)
    model = hollow_model(raw, training)
    return Trainer(schedule, model, nvme_dir=folder, weights=random_weights(model, seed=0), **settings)


def num_parameters(trainer: Trainer) -> int:
    return sum(p.numel() for p in trainer.model.parameters())
