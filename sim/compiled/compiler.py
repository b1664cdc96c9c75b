"""Compiles functions on arrays with numba. Without numba they run as plain Python: same results, much slower.

Machine code is kept between processes: where `NUMBA_CACHE_DIR` says, beside the source, or in the user's cache folder,
the first of these that can be written. numba notices when the file of a function has changed, but not when that of
another one has which it calls: so compiled functions call only those of their own file, and use no constant of another.

Ctrl-C waits for the end of such a function: an exception that it raises while numba hands arrays to Python ends the
process (numba 0.68).
"""

from __future__ import annotations

import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

try:
    import numba
    from numba.core import event
    from numba.core.registry import CPUDispatcher
except ImportError:
    numba = None
    warnings.warn(
        "numba is not installed: schedules are simulated by plain Python, with the same results, much slower; "
        "install it with `pip install numba`",
        RuntimeWarning,
        stacklevel=2,
    )

EACH_TIME = (
    "each time, for some 20 seconds: it can be kept neither beside the source nor in a cache folder of yours, since "
    "neither can be written; set NUMBA_CACHE_DIR to a folder that can"
)


class _Interrupts:
    """Ctrl-C that waits, where it would raise an exception in this process's main thread."""

    handler: Callable[[int, FrameType | None], Any] | None = None
    """What it does otherwise; None where it does not wait."""
    has_come = False

    def wait(self) -> bool:
        """Whether it waits from now on, and did not before."""
        handler = signal.getsignal(signal.SIGINT)
        if self.handler or not callable(handler) or threading.current_thread() is not threading.main_thread():
            return False
        signal.signal(signal.SIGINT, self._come)
        self.handler = handler
        return True

    def go_on(self) -> None:
        """It waits no longer, and does what it does if it has come."""
        assert self.handler is not None
        handler, self.handler = self.handler, None
        signal.signal(signal.SIGINT, handler)
        if self.has_come:
            self.has_come = False
            handler(signal.SIGINT, None)

    def _come(self, number: int, frame: FrameType | None) -> None:
        self.has_come = True


_interrupts = _Interrupts()


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Ctrl-C within this comes behind it. Around many calls of compiled functions, which take microseconds longer each
    where every one of them has to see to it."""
    waits = _interrupts.wait()
    try:
        yield
    finally:
        if waits:
            _interrupts.go_on()


if numba is not None:

    class _Compiled(CPUDispatcher):  # type: ignore[misc]
        """A compiled function, which Ctrl-C leaves alone."""

        def __call__(self, *args: Any) -> Any:
            if _interrupts.handler:
                return super().__call__(*args)
            with interrupts_wait():
                return super().__call__(*args)

        def _compile_for_args(self, *args: Any, **kwargs: Any) -> Any:
            """Making machine code takes long, and is Python, which Ctrl-C ends."""
            waits = _interrupts.handler is not None and threading.current_thread() is threading.main_thread()
            try:
                if waits:
                    _interrupts.go_on()
                return super()._compile_for_args(*args, **kwargs)
            finally:
                if waits:
                    _interrupts.wait()

    class _Compilation(event.Listener):  # type: ignore[misc]
        """Says once that machine code is being made, how often that happens, and for how long."""

        is_announced = False
        how_often = "once, for some 20 seconds"
        depth = 0
        began_s = total_s = began_wall_s = total_wall_s = 0.0

        def on_start(self, event: object) -> None:
            if not self.is_announced:
                self.is_announced = True
                print(f"compiling the simulator, {self.how_often}", file=sys.stderr, flush=True)
            if not self.depth:
                self.began_s, self.began_wall_s = time.process_time(), time.perf_counter()
            self.depth += 1

        def on_end(self, event: object) -> None:
            self.depth -= 1
            if not self.depth:
                self.total_s += time.process_time() - self.began_s
                self.total_wall_s += time.perf_counter() - self.began_wall_s

    _compilation = _Compilation()
    event.register("numba:compile", _compilation)

F = TypeVar("F", bound=Callable[..., Any])


def computing_s() -> float:
    """Seconds that this process has computed, without those of making machine code, as in a new installation."""
    return time.process_time() - (0.0 if numba is None else _compilation.total_s)


def wall_s() -> float:
    """The same by the wall's clock, from any moment: differences of it count."""
    return time.perf_counter() - (0.0 if numba is None else _compilation.total_wall_s)


def is_kept(function: Callable[..., Any]) -> bool:
    """Whether machine code of a compiled function is at hand, or need not or cannot be."""
    folder = Path(path) if (path := getattr(getattr(function, "stats", None), "cache_path", None)) else None
    return folder is None or any(folder.glob(f"*.{function.__qualname__}-*.nbi"))


def compiled(function: F) -> F:
    """The function, compiled when it is first called."""
    return _compiled(function)


def compiled_in_place(function: F) -> F:
    """As `compiled`, of a function that makes no array: none is counted as in use, which takes most of the time where
    functions pass many to each other."""
    return _compiled(function, _nrt=False)


def _compiled(function: F, **options: object) -> F:
    if numba is None:
        return function
    options["error_model"] = "numpy"
    try:
        dispatcher = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # there is nowhere to keep it: a read-only place, no home
        _compilation.how_often = EACH_TIME
        dispatcher = numba.njit(**options)(function)
    if isinstance(dispatcher, CPUDispatcher):  # a plain function where NUMBA_DISABLE_JIT is set
        dispatcher.__class__ = _Compiled
    return dispatcher  # type: ignore[no-any-return]
