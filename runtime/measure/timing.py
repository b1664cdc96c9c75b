"""Timing of loads alone and together: every stream in its own thread, as in training.

Rates come from a window of wall-clock time; an op that straddles the window's edge counts by its part inside.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from math import log, sqrt
from pathlib import Path

import torch
from scipy.stats import t as student

from tierplan.runtime.execution.threads import begin_stream
from tierplan.runtime.measure.loads import Load

LEAST_SPREAD, MOST_SPREAD = 0.01, 1.0
"""No spread below the first is claimed: clocks, turbo and the system differ by as much between any two runs. The second
stands for anything worse: such a number is a guess."""


class StreamThreads(ExitStack):
    """One thread per stream, as in training."""

    def __init__(self, streams: Sequence[str], *, is_beside_gpu: bool = False) -> None:
        super().__init__()
        begin = partial(begin_stream, num_threads=torch.get_num_threads(), is_beside_gpu=is_beside_gpu)
        self._threads = {
            stream: self.enter_context(ThreadPoolExecutor(1, f"measure-{stream}", partial(begin, stream)))
            for stream in streams
        }

    def rates(self, loads: Sequence[Load], window_s: float) -> list[float]:
        """Work per second of each load while all of them run, on a window in which none pauses."""
        stop_at: list[float] = []
        start = threading.Barrier(len(loads), lambda: stop_at.append(time.perf_counter() + window_s))

        def repeat(load: Load) -> list[tuple[float, float]]:
            try:
                load.run()  # warm, and in step with the others
            except BaseException:
                start.abort()  # they would wait for ever
                raise
            start.wait()
            ops = []
            while True:
                begin = time.perf_counter()
                load.run()
                end = time.perf_counter()
                ops.append((begin, end))
                if end >= stop_at[0]:
                    return ops

        futures = [self._threads[load.stream].submit(repeat, load) for load in loads]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
        runs = [future.result() for future in futures]
        begin, end = max(ops[0][0] for ops in runs), stop_at[0]
        if len(loads) == 1:
            end = runs[0][-1][1]
        elif begin >= end:  # one was held back for as long as that, and the others were done
            return self.rates(loads, 2 * window_s)
        rates = []
        for load, ops in zip(loads, runs, strict=True):
            done = sum(max(0.0, min(e, end) - max(b, begin)) / (e - b) for b, e in ops)
            rates.append(load.amount * done / (end - begin))
        return rates


def summary(values: Sequence[float]) -> tuple[float, float]:
    """The median, and its spread: the relative standard deviation between this and another such measurement.

    Two runs differ by less than twice the spread, 19 times of 20. Rounds are spread over the whole run, so that drift
    of the machine is in it, and few rounds make it larger (Student's t, on logarithms).
    """
    middle = statistics.median(values)
    n = len(values)
    if n < 2 or middle <= 0:
        return middle, MOST_SPREAD
    deviation = statistics.stdev(log(max(v, 1e-30)) for v in values)
    # 1.25: the median of a normal sample scatters by that much more than its mean
    half = float(student.ppf(0.975, n - 1)) * 1.25 * deviation * sqrt(2 / n)
    return middle, max(LEAST_SPREAD, min(MOST_SPREAD, half / 2))


class OtherPrograms:
    """How many cores other programs take, from when this is made."""

    def __init__(self) -> None:
        self._began = self._now()

    def text(self) -> str:
        """A sentence; it says what keeps spreads wide, if that is it."""
        began, now = self._began, self._now()
        if began is None or now is None or now[0] <= began[0]:
            return "how much other programs worked meanwhile is not known here"
        (wall_s, busy_s, own_s), cores = (b - a for a, b in zip(began, now, strict=True)), os.cpu_count() or 1
        others = max(0.0, (busy_s - own_s) / wall_s)
        if others < 0.05 * cores:
            return "no other program worked meanwhile: what varies is the drive, the clocks, or other guests"
        return f"other programs took {others:.1f} of {cores} cores meanwhile, which keeps spreads wide"

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Seconds that have passed, that all cores were busy, and that this process was."""
        try:
            fields = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]
        except OSError:
            return None
        user, nice, system, _, _, irq, soft, steal = (float(x) / os.sysconf("SC_CLK_TCK") for x in fields)
        return time.monotonic(), user + nice + system + irq + soft + steal, time.process_time()
