"""How slow the machine is while it trains: a reference piece of work, timed on the compute stream every few steps.

The same piece is timed in a calibration run, so that a slower machine can be told from a wrong prediction. What its
thread waits for a core is left out: spans say that of every op (`Span.coreless_ns`), and a few moments say little. So
are moments in which other streams work: where cores share their units, the piece takes a fifth longer then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F

from tierplan.runtime.execution.device import Device
from tierplan.runtime.execution.threads import coreless_ns

MOST_FRAC = 0.005
"""Of the time of training."""
TOKENS, WIDTH, ELEMENTS = 64, 512, 1 << 18
"""About 2 ms on a core, so that a run of some seconds has several."""
SMALL, NUM_SMALL = 8, 24
"""Rows of small ops, and rounds of them: about a third of the piece in bf16. What Python and PyTorch take to launch ops
goes up and down by a third where kernels take 6 % more or less, and small models with it."""
NUM_ASKED = 6
"""Times in a step: one of them is off by a sixth."""
NUM_AT_REST = 4
"""Times before the first step of a run, and at most twice as many after its last one: in some plans other streams
hardly ever rest, and a few moments say nothing."""
GPU_TIMES = 16
"""Larger on a GPU, where so little would be all launches."""


@dataclass(eq=False)
class ReferenceWork:
    """Times the reference work: when it is asked to, or by itself, as often as `most_frac` of the time allows."""

    device: Device
    dtype: torch.dtype
    most_frac: float = MOST_FRAC
    is_alone: Callable[[], bool] = lambda: True
    """Whether no other stream works now."""
    asked_step: int = -1
    """In this step it is timed `NUM_ASKED` times, as soon as other streams rest."""
    seconds: dict[int, list[float]] = field(default_factory=dict)
    """By step."""

    def __post_init__(self) -> None:
        times = GPU_TIMES if self.device.is_cuda else 1
        full = partial(torch.full, device=self.device.torch_device, dtype=self.dtype)
        self._x_td = full((TOKENS * times, WIDTH), 0.5)
        self._weight_dd = full((WIDTH, WIDTH), 1e-3)
        self._long = full((ELEMENTS * times,), 0.5)
        self._small = full((SMALL, SMALL), 0.5)
        self._spent_s, self._began_s = 0.0, 0.0
        self._last_s = min(self._take() for _ in range(3))

    def on_op(self, step: int) -> None:
        """Called where ops begin in the thread of the compute stream. While other streams work there is no time to
        lose."""
        self._began_s = self._began_s or time.perf_counter()
        num = NUM_ASKED - len(self.seconds.get(step, ())) if step == self.asked_step else int(self._may_be)
        while num > 0 and self.is_alone():
            num -= 1
            self._take(step)

    @property
    def _may_be(self) -> bool:
        return self._spent_s + self._last_s <= self.most_frac * (time.perf_counter() - self._began_s)

    def at_rest(self, step: int) -> None:
        """Called before a run's steps and after them, when no stream works."""
        is_first = not self._began_s
        for _ in range(NUM_AT_REST if is_first else 2 * NUM_AT_REST):
            if self.most_frac and (is_first or self._may_be):
                self._take(step)

    def _take(self, step: int | None = None) -> float:
        """Times it, for a step or to be ready; what that takes in all."""
        began_s = time.perf_counter()
        seconds = self._time_s()
        if step is not None and self.is_alone():
            self.seconds.setdefault(step, []).append(seconds)
        self._last_s = time.perf_counter() - began_s
        self._spent_s += 0.0 if step is None else self._last_s
        return self._last_s

    def _time_s(self) -> float:
        """Products of matrices, as a block has them, a function of many elements, which memory limits, and small ops,
        as there are between products. The second time counts: what caches held before makes a difference of a third,
        and says nothing of the machine."""
        for _ in range(2):
            self.device.finish()
            began_s, waited_ns = time.perf_counter(), coreless_ns()
            with torch.no_grad():
                x_td = self._x_td
                for _ in range(4):
                    x_td = F.linear(x_td, self._weight_dd)
                F.gelu(self._long, approximate="tanh").add_(self._long)
                small = self._small
                for _ in range(NUM_SMALL):
                    small = F.silu(F.linear(F.layer_norm(small, (SMALL,)), self._small)) * small
                    small = torch.cat((small, self._small)).view(2, SMALL, SMALL).transpose(0, 1).mean(1)
                self.device.finish()
        return max(1e-9, time.perf_counter() - began_s - (coreless_ns() - waited_ns) / 1e9)
