"""How many threads the kernels of one Python thread use.

`torch.set_num_threads` also sets the thread count of MKL, which is one for the whole process: a worker that calls it
changes the matrix products of all others, and with them the last bits of what they compute. So the count for the run is
set once in the main thread, and workers lower their own through OpenMP, whose setting belongs to each thread.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP library that PyTorch has loaded; None where it cannot be told."""
    torch.get_num_threads()
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    for line in maps.read_text().splitlines():
        path = line.rpartition(" ")[2]
        if "libgomp" in path or "libiomp" in path or "libomp" in path:
            library = ctypes.CDLL(path)
            if hasattr(library, "omp_set_num_threads"):
                return library
    return None


def limit_this_thread(num_threads: int) -> None:
    """Kernels called from this thread use so many threads, matrix products excepted. Others are not affected."""
    torch.get_num_threads()  # PyTorch sets a thread up when it is first used, which would undo the next line
    library = _openmp()
    if library is not None:
        library.omp_set_num_threads(num_threads)


@contextmanager
def threads_here(num_threads: int) -> Iterator[None]:
    """So many threads for a while."""
    before = torch.get_num_threads()
    limit_this_thread(num_threads)
    try:
        yield
    finally:
        limit_this_thread(before)


class _OfHelpers(threading.local):
    ns = 0


_of_helpers = _OfHelpers()


def coreless_ns() -> int:
    """Nanoseconds that this thread could have run and no core was free, as the kernel counts them; 0 where it does not.

    What others waited while they worked for this thread is in it (`add_coreless`). A reading takes 5 us.
    """
    try:
        file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    except OSError:
        return 0
    try:
        return int(os.read(file, 64).split()[1]) + _of_helpers.ns
    finally:
        os.close(file)


def add_coreless(by_ns: int) -> None:
    """Another thread has waited so long for a core while this one waited for it."""
    _of_helpers.ns += by_ns
