"""The places where an unmodified model is caught: each block's `forward`, replaced on the instance."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

from tierplan.runtime.autograd.replay import Recipe
from tierplan.runtime.autograd.units import ModelUnit


class RunsBlocks(Protocol):
    """Decides what a call of a block does: a `MicroBatchRun`."""

    def block(self, index: int, original: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Stands for the forward of the unit with this index."""


class ModelHooks:
    """The blocks' replaced `forward`s; they find the run of the thread that they are called in."""

    def __init__(self, units: Sequence[ModelUnit]) -> None:
        self._local = threading.local()
        self._blocks: list[tuple[nn.Module, dict[str, Any]]] = []
        """With the `forward` that was set on the instance, if there was one."""
        self.recipes: dict[tuple[int, object], Recipe | None] = {}
        """How to make what a block has dropped again, by block and shapes, once it is known."""
        self.are_replays_timed = False
        self.checked: set[tuple[int, int]] = set()
        """Units, with their number of outputs, whose graphs are known to end at the boundary to the unit before."""
        for index, unit in enumerate(units):
            if unit.block is not None:
                self._replace(unit.block, index)

    def _replace(self, block: nn.Module, index: int) -> None:
        original = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            run: RunsBlocks | None = getattr(self._local, "run", None)
            return original(*args, **kwargs) if run is None else run.block(index, original, args, kwargs)

        self._blocks.append((block, {name: own for name, own in vars(block).items() if name == "forward"}))
        block.forward = forward

    @contextmanager
    def of(self, run: RunsBlocks) -> Iterator[None]:
        """Calls of blocks in this thread belong to this run."""
        self._local.run = run
        try:
            yield
        finally:
            self._local.run = None

    def remove(self) -> None:
        """Gives the model its own `forward`s back."""
        for block, own in self._blocks:
            del block.forward
            vars(block).update(own)
        self._blocks.clear()
