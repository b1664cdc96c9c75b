"""The places where an unmodified model is caught: each block's `forward`, replaced on the instance."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from tierplan.runtime.autograd.nests import PLAIN
from tierplan.runtime.autograd.replay import Recipe
from tierplan.runtime.autograd.saved import Recorder
from tierplan.runtime.autograd.units import ModelUnit

RunsBlock = Callable[[int, Callable[..., Any], tuple, dict], Any]
"""Stands for the forward of the unit with this index; it is given the original one and its arguments."""


NOT_OF_FORWARD = ("training", "_is_hf_initialized")
"""Attributes of modules that are set while a model is made ready."""


class ModelHooks:
    """The blocks' replaced `forward`s; they find the run of the thread that they are called in."""

    def __init__(self, units: Sequence[ModelUnit], are_replays_timed: bool = False) -> None:
        self._local = threading.local()
        self._blocks: list[tuple[nn.Module, dict[str, Any]]] = []
        """With the `forward` that was set on the instance, if there was one."""
        self.recipes: dict[tuple[int, object], Recipe | None] = {}
        """How to make what a block has dropped again, by block and how it is called, once it is known; None where that
        is run again each time."""
        self.are_replays_timed = are_replays_timed
        self.results: dict[object, tuple[list[Any], Any]] = {}
        """What blocks give that other ranks run, without the numbers: by block and how it is called."""
        self.recorders: dict[object, Recorder] = {}
        """What units of which nothing moves have saved, by shapes: so they do in every micro-batch of these."""
        self.checked: set[tuple[int, int]] = set()
        """Units, with their number of outputs, whose graphs are known to end at the boundary to the unit before."""
        self._attributes = {unit.block: _plain_attributes(unit.block) for unit in units if unit.block is not None}
        for index, unit in enumerate(units):
            if (block := unit.block) is not None:
                self._blocks.append((block, {name: own for name, own in vars(block).items() if name == "forward"}))
                block.forward = partial(self._forward, index, block.forward)

    def is_as_ever(self, block: nn.Module | None) -> bool:
        """Whether no forward so far has set plain attributes of the block's modules, by which it may compute."""
        return block is not None and _plain_attributes(block) == self._attributes[block]

    def _forward(self, index: int, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        run: RunsBlock | None = getattr(self._local, "run", None)
        return original(*args, **kwargs) if run is None else run(index, original, args, kwargs)

    @contextmanager
    def of(self, run: RunsBlock) -> Iterator[None]:
        """Inside, `run` is what calls of blocks in this thread do."""
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


def _plain_attributes(block: nn.Module) -> dict[tuple[str, str], object]:
    return {
        (path, name): value
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if name not in NOT_OF_FORWARD and type(value) in PLAIN
    }
