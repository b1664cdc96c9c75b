"""Micro-batches that are fetched before they are wanted."""

from __future__ import annotations

import torch

from tierplan.runtime.data.ahead import AheadBatches


def test_what_is_left_of_batches() -> None:
    """One that waits comes first; where none came, there is none."""
    batches = [{"x": torch.tensor(k)} for k in range(3)]
    ahead = AheadBatches(iter(batches), 3, torch.clone)
    ahead.fetch()
    assert [batch["x"].item() for batch in ahead.rest()] == [0, 1, 2]
    ended = AheadBatches(iter(()), 2, torch.clone)
    ended.fetch()
    assert list(ended.rest()) == []
