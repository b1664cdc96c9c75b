"""Fixtures of the runtime's tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tierplan.runtime.autograd import units


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Several threads on a busy machine spend their time waiting for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def runs_on_fakes_are_shared() -> Iterator[None]:
    """Splitting a model takes a run on fake tensors, most of a small test's time: one serves all models of a config."""
    real, known = units.uses_of, dict[object, Any]()

    def uses_of(model: nn.Module, blocks: Sequence[str], batch: Mapping[str, Any]) -> units.Uses:
        config: Any = getattr(model, "config", None)
        if config is None or any("forward" in vars(module) for module in model.modules()):
            return real(model, blocks, batch)
        shapes = tuple((name, tuple(getattr(t, "shape", ()))) for name, t in batch.items())
        parameters = tuple((name, p.dtype) for name, p in model.named_parameters())
        key = type(model), config.to_json_string(use_diff=False), parameters, tuple(blocks), shapes
        if key not in known:
            known[key] = real(model, blocks, batch)
        return known[key]

    with mock.patch.object(units, "uses_of", uses_of):
        yield
