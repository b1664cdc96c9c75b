"""Micro-batches that are fetched while the device still computes, so that a slow data loader is hidden behind it."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tierplan.runtime.autograd.nests import flatten
from tierplan.runtime.autograd.replay import is_random
from tierplan.runtime.execution.placement import TrainingError

Batch = Mapping[str, Any]


def with_own_draws(source: Iterator[Batch]) -> Iterator[Batch]:
    """The same, with PyTorch's random numbers on the CPU for itself, from where they are now: what it draws depends on
    no forward between two micro-batches, nor on whether there was one, and no forward depends on that."""
    own = torch.get_rng_state()
    while True:
        before = torch.get_rng_state()
        torch.set_rng_state(own)
        try:
            batch = next(source, None)
        finally:
            own = torch.get_rng_state()
            torch.set_rng_state(before)
        if batch is None:
            return
        yield batch


class _NothingDrawn(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_random(func, args, kwargs) and not any(isinstance(x, torch.Generator) for x in (*args, *kwargs.values())):
            raise TrainingError(
                f"on_step draws random numbers ({func}) from PyTorch's generator, and so does training, which goes on "
                "meanwhile and would have other ones; give it a torch.Generator of its own, or draw behind `run`"
            )
        return func(*args, **kwargs)


def without_draws(on_step: Callable[[int, float], None], step: int, loss: float) -> None:
    """Calls it beside training. Raises `TrainingError` where it draws what training has to draw."""
    with _NothingDrawn():
        on_step(step, loss)


def passed_over(source: Iterator[Batch], num_used: int) -> Iterator[Batch]:
    """The same behind so many, which are fetched now: before what they draw from is put back to where it was."""
    deque(itertools.islice(source, num_used), maxlen=0)
    return source


class AheadBatches:
    """An iterator's next micro-batches, one of them before it is wanted; never more than `num_wanted` in all.

    They are fetched in the thread that asks, in order, so an iterator that draws random numbers draws the same ones.
    Each is copied: an iterator may fill the same memory again, while the one before is still used.
    """

    def __init__(self, source: Iterator[Batch], num_wanted: int, take: Callable[[Tensor], Tensor]) -> None:
        """`take` copies a tensor (`Device.take`)."""
        self._source, self._num_left, self._take = source, num_wanted, take
        self._waiting: tuple[Batch | None, Exception | None] | None = None

    def fetch(self) -> None:
        """Takes the next one from the iterator if none waits. Errors are raised when it is wanted."""
        if self._waiting is None and self._num_left:
            self._num_left -= 1
            try:
                batch = next(self._source, None)
                self._waiting = None if batch is None else self._own_copy(batch), None
            except Exception as error:
                self._waiting = None, error

    def next(self) -> Batch | None:
        """The next one; None where the iterator has ended."""
        self.fetch()
        assert self._waiting is not None, "more micro-batches are begun than were announced"
        (batch, error), self._waiting = self._waiting, None
        if error is not None:
            raise error
        return batch

    def rest(self) -> Iterator[Batch]:
        """What was not given out: the one that waits, then the iterator's own."""
        if self._waiting is not None and (batch := self.next()) is not None:
            yield batch
        yield from self._source

    def _own_copy(self, batch: Batch) -> Batch:
        flat, nested = flatten(dict(batch))
        copied: Batch = nested([self._take(t) if isinstance(t, Tensor) else t for t in flat])
        return copied
