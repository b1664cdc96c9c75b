"""What runs here: versions, devices, and models and batches that are the same for the same seed.

Shapes: `b` sequences, `t` tokens.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import transformers
from torch import nn

from tierplan import __version__
from tierplan.runtime.tracing.models import build_model
from tierplan.sim.workloads.workload import Training


def versions() -> dict[str, str]:
    """Of tierplan, of the libraries that decide how long kernels take and what a model is made of, and of Python.

    As the packages are installed, which can be asked without importing them: for CUDA, the package of 2.11.0 says of
    itself, once imported, that it is 2.11.0+cu130.
    """
    libraries = {}
    for module in (torch, transformers):
        try:
            libraries[module.__name__] = version(module.__name__)
        except PackageNotFoundError:  # built here, and not installed
            libraries[module.__name__] = module.__version__
    return {"tierplan": __version__, **libraries, "Python": platform.python_version()}


def device_model(device: str) -> str:
    """The GPU's name; `no GPU` for a device on the CPU."""
    return torch.cuda.get_device_name() if device.startswith("cuda") else "no GPU"


def seeded_model(config: Mapping[str, object], training: Training, seed: int = 0) -> nn.Module:
    """The model of a config with random weights, the same for the same seed."""
    torch.manual_seed(seed)
    return build_model(config, training)


def random_batches(config: Any, training: Training) -> Iterator[dict[str, torch.Tensor]]:
    """Micro-batches of random tokens without end, each its own label, for a model with this config."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = config.get_text_config().vocab_size
    shape = (training.per_device_train_batch_size, training.sequence_length)
    while True:
        tokens_bt = torch.randint(vocabulary, shape, generator=generator)
        yield {"input_ids": tokens_bt, "labels": tokens_bt}
