"""Ranks whose shards are of unequal length: a block has an odd number of parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.models import make_batches, make_model
from tests.runtime.ranks.pair import run_ranks
from tests.runtime.ranks.test_ranks import Case, train_ranks
from tierplan.runtime.autograd.units import split_model
from tierplan.runtime.ranks.collectives import shards_of

FAMILY = "gpt2 of odd width"
CASES = (
    Case("zero-2", family=FAMILY),
    Case("zero-3", family=FAMILY, dtype="bf16", accumulation=2),
    Case("parts", family=FAMILY),
)


@pytest.mark.usefixtures("one_thread")
def test_uneven_shards_train_the_numbers_of_plain_training(tmp_path: Path) -> None:
    block = split_model(make_model(FAMILY), make_batches(1)[0])[1]
    assert [len(shard) for shard in shards_of(block, 2)] == [block.num_trained // 2 + 1, block.num_trained // 2]
    assert run_ranks(train_ranks, 2, CASES, tmp_path) == [[], []]
