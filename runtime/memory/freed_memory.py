"""Freed tensors on the CPU keep their pages, so that the next step's tensors need not fault them in again; and Python
does not look through all objects of the process for some that are unreachable.

The C library gives large blocks back to the system when they are freed, and every page of the next tensor is zeroed and
mapped anew: one to ten microseconds per 4 KiB on a virtual machine, which can be more than the kernel that fills it
takes. Which tensors meet this changes from step to step with the order of allocations, so that steps of one plan differ
by a tenth and more. Training allocates the same sizes step after step; what it has freed it takes again.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

# Parameters of glibc's `mallopt` (malloc.h).
TRIM_THRESHOLD, TOP_PAD, MMAP_MAX, ARENA_MAX = -1, -2, -4, -8
NEVER = -1
GROWTH_BYTES = 256 << 20
"""By which memory grows; untouched pages cost nothing. Above twice the 64 MiB of the heaps that threads of their own
arena have, these are kept, too."""


@functools.cache
def keep_freed_memory() -> bool:
    """Tells the C library to keep what is freed: the process holds its peak until it ends.

    False where it is not glibc, which is left as it is. So is a process whose memory is capped (`ulimit -d`, `-v`):
    holes between what is in use would count there. Each thread has an arena of its own to take memory from. In one
    arena, a thread that computes and its helpers wait for each other with each allocation, 16,000 times in two steps of
    63 M parameters: those took 10 to 30 % longer.
    """
    return _set(((MMAP_MAX, 0), (TRIM_THRESHOLD, NEVER), (TOP_PAD, GROWTH_BYTES)))


def share_an_arena() -> bool:
    """Threads that come later take memory from the arenas that there are, in turns; False where memory is not kept.

    For ranks, which have some twenty threads for their exchanges and one that computes: new threads would wander
    through as many arenas, all of them cold. A quarter of a step of Harmony went into page faults.
    """
    return keep_freed_memory() and _set(((ARENA_MAX, 1),))


def _set(settings: Iterable[tuple[int, int]]) -> bool:
    if any(
        resource.getrlimit(what)[0] != resource.RLIM_INFINITY for what in (resource.RLIMIT_DATA, resource.RLIMIT_AS)
    ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(name, value) == 1 for name, value in settings)


@contextmanager
def only_new_objects_searched(num_at_once: int) -> Iterator[None]:
    """Inside, Python's search for unreachable rings of objects passes over all that there were before, and comes when
    there are so many more new ones than else: those that steps have at once, and that go with them.

    A step makes a few thousand objects, so all are searched about every hundred steps. PyTorch and a model are half a
    million objects, which take a quarter of a second: an eighth of the time where steps are near-empty. New ones are
    searched with every 700 of them, in each step: 1 to 3 % of that time. One who has asked for this before
    (`gc.freeze`), or for no search, is left alone.
    """
    if gc.get_freeze_count():
        yield
        return
    objects, *others = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(objects and objects + num_at_once, *others)
    try:
        yield
    finally:
        gc.set_threshold(objects, *others)
        gc.unfreeze()
