"""How many threads the kernels of one Python thread use.

`torch.set_num_threads` also sets the thread count of MKL, which is one for the whole process: a worker that calls it
changes the matrix products of all others, and with them the last bits of what they compute. So the count for the run is
set once in the main thread, and workers lower their own through OpenMP, whose setting belongs to each thread.

OpenMP keeps helpers for each thread that has used them. Where it has more threads than there are cores, helpers sleep
after each op instead of waiting for the next awake: 15 us instead of 4 for a small op on two cores. So of the threads
that compute in turns only the one whose turn it is has helpers (`let_helpers_go`).
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue

import torch

from tierplan.hwmodels.names import HOST_ADAM, parse_stream


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


def begin_stream(stream: str, num_threads: int, *, is_beside_gpu: bool) -> None:
    """This thread is that of a stream: only compute uses several threads for one op, and Adam beside a GPU, where it
    has the cores. Measured without one: more only get into the way of compute."""
    torch.get_num_threads()  # sets the thread up, which a matrix product as its first op would not
    if not parse_stream(stream).is_compute:
        limit_this_thread(num_threads if stream == HOST_ADAM and is_beside_gpu else 1)


def let_helpers_go() -> None:
    """Ends the threads that OpenMP keeps to help this one; its next op that wants some starts them, in some 50 us."""
    library = _openmp()
    if library is not None and hasattr(library, "omp_pause_resource_all"):
        library.omp_pause_resource_all(1)


@contextmanager
def threads_here(num_threads: int) -> Iterator[None]:
    """So many threads for a while. One that has so many keeps its helpers: to start others takes some 50 us."""
    before = torch.get_num_threads()
    if before == num_threads:
        yield
        return
    limit_this_thread(num_threads)
    try:
        yield
    finally:
        let_helpers_go()
        limit_this_thread(before)


class LastingThread:
    """A thread that does one piece of work after another, until `end` is called or nobody has this object any more.

    What it has freed it takes again: the C library gives a new thread the memory that some other thread has left.
    """

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=_do_all, args=(self._work,), name=name, daemon=True)
        self._no_more = weakref.finalize(self, self._work.put, None)

    def begin(self, work: Callable[[], None]) -> None:
        """Does it when all that it was given before is done. Raises `RuntimeError` once the thread was told to end."""
        if not self._no_more.alive:
            raise RuntimeError(f"thread {self._thread.name!r} has ended and takes no more work; make another")
        if self._thread.ident is None:
            self._thread.start()
        self._work.put(work)

    def wait(self) -> None:
        """Returns when all that it was given is done."""
        done = threading.Event()
        self.begin(done.set)
        done.wait()

    def end(self) -> None:
        """Returns when all that it was given is done and the thread has ended."""
        self._no_more()
        if self._thread.ident is not None:
            self._thread.join()


def _do_all(work: SimpleQueue[Callable[[], None] | None]) -> None:
    while (one := work.get()) is not None:
        try:
            one()
        except BaseException:  # told as that of any thread; what comes behind it is done
            threading.excepthook(threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread())))
        del one


class _Clock:
    """Of one thread."""

    def __init__(self) -> None:
        self.helpers_ns, self.file = 0, -1
        with suppress(OSError):  # another kernel
            self.file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
            weakref.finalize(self, os.close, self.file).atexit = False


class _Own(threading.local):
    def __init__(self) -> None:
        self.clock = _Clock()


_own = _Own()


def coreless_ns() -> int:
    """Nanoseconds that this thread could have run and no core was free, as the kernel counts them; 0 where it does not.

    What others waited while they did its work is in it (`Coroutine`). A reading takes 2 us.
    """
    clock = _own.clock
    return 0 if clock.file < 0 else int(os.pread(clock.file, 64, 0).split()[1]) + clock.helpers_ns


class _Cancelled(BaseException):
    """Unwinds work that is not wanted any more."""


class Coroutine:
    """Work in a thread of its own that stops in between: of it, and of who lets it go on, one works at a time.

    `coreless_ns` of whoever works goes on from where the other's was: it grows by what their work has waited for a
    core, and not by what a thread waits that has let the other work and is about to sleep.
    """

    def __init__(self, work: Callable[[], None], name: str) -> None:
        """It does not begin yet."""
        self._there, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._handed_ns = self._waited_ns = 0
        """When the work was last handed over, and what it had waited by then."""
        self._mark_ns = 0
        """The thread's clock when it went to sleep."""
        self._is_for_rest = self._is_cancelled = self._is_over = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._main, args=(work,), name=name, daemon=True)
        self._thread.start()

    def go_on(self) -> None:
        """Returns when the work has stopped next, or has ended. Raises what it has raised."""
        let_helpers_go()
        mark_ns = self._pass(self._there)
        self._back.acquire()
        self._set_clock(mark_ns)
        if self._error is not None:
            raise self._error

    def let_helpers_go(self) -> None:
        """The thread's, which has stopped."""
        if not self._is_over:
            self._is_for_rest = True
            self._there.release()
            self._back.acquire()

    def cancel(self) -> None:
        """Ends the thread, wherever it has stopped."""
        self._is_cancelled = True
        self._there.release()
        self._thread.join()

    def stop(self) -> None:
        """In the work: returns when it is to go on."""
        self._mark_ns = self._pass(self._back)
        self._take()

    def _main(self, work: Callable[[], None]) -> None:
        torch.get_num_threads()  # sets the thread up, which a matrix product as its first op would not
        try:
            self._take()
            work()
        except _Cancelled:
            pass
        except BaseException as error:
            self._error = error
        finally:
            let_helpers_go()
            self._is_over = True
            self._pass(self._back)

    def _take(self) -> None:
        self._there.acquire()
        while self._is_for_rest:
            self._is_for_rest = False
            let_helpers_go()
            self._back.release()
            self._there.acquire()
        self._set_clock(self._mark_ns)
        if self._is_cancelled:
            raise _Cancelled

    def _pass(self, to: threading.Semaphore) -> int:
        now_ns = self._waited_ns = coreless_ns()
        self._handed_ns = time.perf_counter_ns()
        to.release()
        return now_ns

    def _set_clock(self, mark_ns: int) -> None:
        """This thread works now."""
        now_ns = coreless_ns()
        waited_ns = min(now_ns - mark_ns, time.perf_counter_ns() - self._handed_ns)
        _own.clock.helpers_ns += self._waited_ns + waited_ns - now_ns
