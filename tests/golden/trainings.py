"""Tiny real trainings: what they give to the last bit, on one thread and one kind of CPU.

Processors with the same vector instructions may still add up in another order (by their caches, or units of their own):
whether one does is seen in what PyTorch alone computes of the same models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tierplan as tp
from tests.golden.scenarios import MIXED, PER_SLOT, Decide, by_hand, policy
from tests.runtime.models import make_batches, make_model

# All that is not at the front door is imported here, so that a move is followed in one place.
from tierplan.runtime.optim.adam import OptimizerSettings

MACHINE = "laptop"
"""Its speeds order the schedule's ops; whatever they are, the numbers of training are the same."""


@dataclass(frozen=True, kw_only=True)
class TinyTraining:
    """A few steps of a model of two or three blocks, and who decides how."""

    family: str
    decide: Decide
    steps: int = 4
    dropout: float = 0.1
    dtype: str = "fp32"
    training: Mapping[str, Any] = field(default_factory=dict)


TRAININGS: Mapping[str, TinyTraining] = {
    "training: gpt2, all offloaded, a fate per saved tensor": TinyTraining(
        family="gpt2",
        decide=by_hand({**MIXED, "acts": PER_SLOT}, {**MIXED, "acts": "nvme", "params": "host"}),
    ),
    "training: gpt2, late updates, states in parts": TinyTraining(
        family="gpt2",
        decide=by_hand({**MIXED, "late_update": True, "state_shards": 2}, {**MIXED, "acts": "recompute"}),
        training={"gradient_accumulation_steps": 2},
    ),
    "training: gpt2, zero-offload, delayed": TinyTraining(
        family="gpt2", decide=policy("zero-offload", semantics="delayed-1")
    ),
    "training: llama in bf16, zero-infinity, clipped": TinyTraining(
        family="llama",
        decide=policy("zero-infinity", host_buffers="none"),
        dtype="bf16",
        training={"max_grad_norm": 0.5, "gradient_accumulation_steps": 2},
    ),
    "training: llama, vertical, 3 micro-batches": TinyTraining(
        family="llama",
        decide=policy("vertical"),
        training={"gradient_accumulation_steps": 3},
    ),
    "training: llama, fuyou": TinyTraining(family="llama", decide=policy("fuyou", swap="all")),
    "training: opt, sgd, full recompute": TinyTraining(
        family="opt",
        decide=policy("full-recompute"),
        training={"optimizer": "sgd", "master_weights": False},
    ),
    "training: bert in bf16, ssdtrain": TinyTraining(family="bert", decide=policy("ssdtrain"), dtype="bf16"),
}


def run(tiny: TinyTraining, folder: Path) -> dict[str, object]:
    """Losses by step as hexadecimal floats, and a hash of the trained parameters."""
    training = tp.Training(
        per_device_train_batch_size=2, sequence_length=16, backend="cpu", **{"dtype": tiny.dtype, **tiny.training}
    )
    model = make_model(tiny.family, dropout=tiny.dropout, dtype=tiny.dtype)
    batches = make_batches(tiny.steps * training.gradient_accumulation_steps)
    workload, machine = tp.trace_module(model, batches[0], training), tp.load_machine(MACHINE)
    schedule = tp.lower(tiny.decide(workload, machine), workload, machine)
    result = tp.train(
        schedule,
        model,
        batches,
        steps=tiny.steps,
        nvme_dir=folder,
        num_threads=1,
        optimizer=OptimizerSettings(name=training.optimizer, lr=1e-2),
        learning_rate=lambda step: 0.01 / (step + 1),
    )
    return {"losses": [loss.hex() for loss in result.losses], "weights": _digest(model)}


def plain_gradients() -> str:
    """A hash of the gradients that PyTorch alone computes of all models and batches, on one thread."""
    sha256, num_threads = hashlib.sha256(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for tiny in TRAININGS.values():
            model = make_model(tiny.family, dropout=tiny.dropout, dtype=tiny.dtype)
            for batch in make_batches(tiny.steps):
                torch.manual_seed(0)
                model(**batch).loss.backward()
            for parameter in model.parameters():
                parameter.data = parameter.grad
            sha256.update(_digest(model).encode())
    finally:
        torch.set_num_threads(num_threads)
    return sha256.hexdigest()


def _digest(model: nn.Module) -> str:
    """Of the parameters' names, shapes and bytes."""
    sha256 = hashlib.sha256()
    for name, parameter in model.named_parameters():
        sha256.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
        sha256.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return sha256.hexdigest()
