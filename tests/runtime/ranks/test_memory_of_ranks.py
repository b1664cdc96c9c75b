"""What a rank's threads free, later ones take again: however many threads its exchanges have, there is one arena.

Not where a rank computes with several threads, which would wait for each other."""

from __future__ import annotations

import ctypes
import tempfile
import threading
from pathlib import Path

import pytest
import torch

from tests.runtime.ranks.pair import run_ranks
from tierplan.runtime.execution.device import Device
from tierplan.runtime.memory.freed_memory import keep_freed_memory
from tierplan.runtime.ranks.group import Ranks


def num_arenas() -> int:
    """Of this process, by the C library's own account."""
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    with tempfile.NamedTemporaryFile() as told:
        file = ctypes.c_void_p(libc.fopen(told.name.encode(), b"w"))
        libc.malloc_info(0, file)
        libc.fclose(file)
        return Path(told.name).read_text().count("<heap nr=")


def arenas_of_a_rank(ranks: Ranks) -> int:
    """With its exchanges, and two threads that hold tensors, as two micro-batches do."""
    Device()
    ranks.connect([(0, 1), (1, 0)])
    ranks.share([1.0], "steps")
    for _ in range(2):
        thread = threading.Thread(target=torch.ones, args=(625_000,))
        thread.start()
        thread.join()
    return num_arenas()


def test_threads_of_a_rank_share_what_was_freed() -> None:
    if not keep_freed_memory():
        pytest.skip("the C library is not glibc, or memory is capped")
    assert run_ranks(arenas_of_a_rank, 2) == [1, 1]


def test_threads_that_compute_together_do_not() -> None:
    if not keep_freed_memory():
        pytest.skip("the C library is not glibc, or memory is capped")
    assert all(num > 2 for num in run_ranks(arenas_of_a_rank, 2, num_threads=2))
