"""Host memory: pools that keep their budget, and memory that is empty in forked processes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.runtime.models import make_batches, make_model, schedule_for
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.memory.arena import PAGE_BYTES, Pool, map_host
from tierplan.runtime.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")


def test_spare_blocks_make_way_for_what_others_hold() -> None:
    pool = Pool(map_host, 10 * PAGE_BYTES)
    pool.give(pool.take(4 * PAGE_BYTES))
    kept = pool.take(2 * PAGE_BYTES)
    assert pool.mapped_bytes == 6 * PAGE_BYTES
    pool.make_room(4 * PAGE_BYTES)
    assert pool.mapped_bytes == 6 * PAGE_BYTES  # there is room for both
    pool.make_room(1)
    assert pool.mapped_bytes == pool.lent_bytes == 2 * PAGE_BYTES
    pool.make_room(-1)
    pool.give(kept)
    pool.take(6 * PAGE_BYTES)
    assert pool.mapped_bytes == 6 * PAGE_BYTES  # the other size had to go


def test_a_closed_pool_has_let_go_of_everything() -> None:
    released: list[int] = []
    pool = Pool(map_host, 10 * PAGE_BYTES, release=lambda pages: released.append(pages.numel() // PAGE_BYTES))
    pool.take(PAGE_BYTES)
    pool.give(pool.take(2 * PAGE_BYTES))
    pool.close()
    assert sorted(released) == [1, 2]
    assert pool.mapped_bytes == 0


def mapped(address: int) -> bool:
    """Whether this process has memory at this address."""
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


@pytest.mark.parametrize("for_transfers", [False, True])
def test_memory_for_transfers_is_empty_in_a_forked_process(for_transfers: bool) -> None:
    """Empty, but there: in a hole something else could come to lie, which freeing the tensor would unmap."""
    pages = map_host(64 * PAGE_BYTES, for_transfers=for_transfers)
    pages.fill_(7)
    process = os.fork()
    if process == 0:
        os._exit(int(pages.max()) if mapped(pages.data_ptr()) else 99)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == (0 if for_transfers else 7)
    assert pages.min() == 7


class Examples(Dataset):  # type: ignore[type-arg]
    """Micro-batches that also tell which process made them."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, k: int) -> dict[str, Any]:
        return {**self.batches[k], "process": os.getpid()}


def test_workers_may_be_forked_while_drives_fill_pages(tmp_path: Path) -> None:
    """All pages that drives and GPUs fill are kept from them, and the numbers are those without workers."""
    batches = make_batches(6)
    losses = []
    for has_workers in (False, True):
        model = make_model("gpt2")
        choice = UnitPlan(params="nvme", grads="host", states="nvme", acts="host")
        schedule = schedule_for(model, choice)
        with Trainer(schedule, model, nvme_dir=tmp_path) as trainer:
            trainer.run(batches[:2], 2)
            pool = trainer._bodies.places.host_pool  # type: ignore[union-attr]
            blocks = [block.pages.data_ptr() for spare in pool._spare.values() for block in spare]
            flags = re.findall(r"^([0-9a-f]+)-([0-9a-f]+) |VmFlags: (.*)", Path("/proc/self/smaps").read_text(), re.M)
            kept = [  # "wf": wiped in a forked process
                range(int(begin, 16), int(end, 16))
                for (begin, end, _), (_, _, words) in zip(flags[::2], flags[1::2], strict=True)
                if "wf" in words.split()
            ]
            assert blocks
            assert all(any(address in addresses for addresses in kept) for address in blocks)

            def loaded() -> Iterator[Any]:
                settings: dict[str, Any] = {"batch_size": None, "num_workers": 1, "multiprocessing_context": "fork"}
                for batch in DataLoader(Examples(batches[2:]), **settings):
                    assert batch.pop("process") != os.getpid()
                    yield batch

            trainer.run(loaded() if has_workers else batches[2:], 4)
            losses.append(trainer.result().losses)
    assert losses[0] == losses[1]


def test_memory_that_the_system_refuses_is_not_prepared_and_what_it_gave_is_kept() -> None:
    given: list[int] = []

    def allocate(size_bytes: int) -> torch.Tensor:
        if given:
            raise MemoryError
        given.append(size_bytes)
        return map_host(size_bytes)

    pool = Pool(allocate, 10 * PAGE_BYTES)
    pool.prepare([PAGE_BYTES, 2 * PAGE_BYTES])
    assert pool.has_spare(PAGE_BYTES)
    assert not pool.has_spare(2 * PAGE_BYTES)
    assert (pool.lent_bytes, pool.mapped_bytes) == (0, PAGE_BYTES)
