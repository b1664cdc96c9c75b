"""Ctrl-C while a compiled function runs: it ended the process where the function's arrays went back to Python."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import FrameType
from typing import NamedTuple

import numpy as np
import pytest

from tierplan.sim.columns import Float64
from tierplan.sim.compiled import compiler
from tierplan.sim.compiled.compiler import compiled, interrupts_wait

LONG = 100_000_000
"""Sines that take half a second, or much more."""


class Sums(NamedTuple):
    one: Float64
    other: Float64


@compiled
def sums(num: int) -> Sums:
    total = 0.0
    for i in range(num):
        total += np.sin(i * 1.0)
    return Sums(np.full(3, total), np.full(3, -total))


def interrupt(number: int, frame: FrameType | None) -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def _interrupted_soon() -> Iterator[None]:
    sums(1)  # compiled
    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("_interrupted_soon")
def test_it_comes_behind_the_function() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with pytest.raises(KeyboardInterrupt):
        sums(LONG)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert sums(2).one[0] == pytest.approx(np.sin(1.0))


@pytest.mark.usefixtures("_interrupted_soon")
def test_or_behind_all_for_which_it_is_to_wait() -> None:
    done: list[Sums] = []

    def both() -> None:
        with interrupts_wait():
            done.append(sums(LONG))
            with interrupts_wait():
                done.append(sums(1))

    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with pytest.raises(KeyboardInterrupt):
        both()
    assert len(done) == 2


def test_who_ignores_it_still_does() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_wait():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(compiler.numba is None, reason="nothing is compiled")
def test_making_machine_code_does_not_wait() -> None:
    handlers = []

    @compiled
    def doubled(number: int) -> int:
        return 2 * number

    class Noting(type(doubled)):  # type: ignore[misc]
        def compile(self, sig: object) -> object:
            handlers.append(signal.getsignal(signal.SIGINT))
            return super().compile(sig)

    doubled.__class__ = Noting
    with interrupts_wait():
        assert doubled(2) == 4
        handlers.append(signal.getsignal(signal.SIGINT))
    assert handlers[0] is signal.default_int_handler

    def interrupted_before() -> None:
        with interrupts_wait():
            signal.raise_signal(signal.SIGINT)
            doubled(2.0)  # type: ignore[arg-type]

    with pytest.raises(KeyboardInterrupt):
        interrupted_before()
    assert len(handlers) == 2
    assert handlers[-1] is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
