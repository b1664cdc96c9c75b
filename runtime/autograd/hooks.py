"""The places where an unmodified model is caught: each block's `forward`, replaced on the instance."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from tierplan.runtime.autograd.containers import HandBack
from tierplan.runtime.autograd.plain_values import PlainState, PlainValues
from tierplan.runtime.autograd.replay import Recipe
from tierplan.runtime.autograd.saved import Recorder, Treatment
from tierplan.runtime.autograd.units import ModelError, ModelUnit

RunsBlock = Callable[[int, Callable[..., Any], tuple, dict], Any]
"""Stands for the forward of the unit with this index; it is given the original one and its arguments."""


def chosen_around() -> dict[str, object]:
    """What code may have chosen around a call, by which operations compute: by the name of who chooses it."""
    kinds = torch._C
    attention = (
        kinds._get_flash_sdp_enabled(),
        kinds._get_mem_efficient_sdp_enabled(),
        kinds._get_math_sdp_enabled(),
        kinds._get_cudnn_sdp_enabled(),
        kinds._get_sdp_priority_order(),
    )
    return {"torch.autocast": kinds._is_any_autocast_enabled(), "torch.nn.attention.sdpa_kernel": attention}


class ModelHooks:
    """The blocks' replaced `forward`s; they find the run of the thread that they are called in."""

    def __init__(self, model: nn.Module, units: Sequence[ModelUnit], are_replays_timed: bool = False) -> None:
        self._local = threading.local()
        replaced = ExitStack()
        self.remove = replaced.close
        """Gives the model its own `forward`s back."""
        self.recipes: dict[tuple[int, object], tuple[PlainState, Recipe | None]] = {}
        """How to make what a block has dropped again, by block, how it is called and what that shares, and with which
        plain values of its modules; None where that is run again each time."""
        self.are_replays_timed = are_replays_timed
        self.before_rerun: Callable[[], None] = lambda: None
        """Called before a unit is run again."""
        self.results: dict[object, tuple[list[Any], HandBack]] = {}
        """What blocks give that other ranks run, without the numbers: by block and how it is called."""
        self.recorders: dict[object, Recorder] = {}
        """What units of which nothing moves have saved, by shapes: so they do in every micro-batch of these."""
        self.treatments: dict[tuple[int, object], Treatment] = {}
        """What happens to what a block saves, by block and how it is called, where that may be others than planned."""
        self.checked: set[tuple[int, int]] = set()
        """Units, with their number of outputs, whose graphs are known to end at the boundary to the unit before."""
        self.laid_alike = set[object]()
        """Cuts where gradients lie as autograd keeps them (`Layouts`)."""
        inside = {module for unit in units if unit.block is not None for module in unit.block.modules()}
        self._outside = PlainValues(module for module in model.modules() if module not in inside)
        self._values = [self._outside if unit.block is None else PlainValues(unit.block.modules()) for unit in units]
        self._drawing = dict[int, str]()
        """Names of blocks that hold generators of random numbers."""
        for index, unit in enumerate(units):
            if (block := unit.block) is not None:
                if any(isinstance(value, torch.Generator) for m in block.modules() for value in vars(m).values()):
                    self._drawing[index] = unit.name
                own = partial(self._forward, index, block.forward)
                replaced.enter_context(patch.object(block, "forward", own))

    def __deepcopy__(self, memo: object) -> ModelHooks:
        raise ModelError(
            "the model is held by a Trainer that is open, which stands for its blocks' forward: it can be neither "
            "copied nor traced nor trained by another one. Call restore_model, then close the Trainer, or use another "
            "model"
        )

    def values_of(self, index: int) -> PlainState:
        """The plain values, now, by which the unit's modules may compute."""
        return self._values[index].now()

    @contextmanager
    def with_values(self, index: int, values: PlainState | None) -> Iterator[None]:
        """Inside, the unit's modules have these plain values. Behind it, all that run there have those of before."""
        self.before_rerun()
        if index in self._drawing:
            raise ModelError(
                f"{self._drawing[index]!r} has a torch.Generator of its own, which goes on where the block runs again "
                "and draws other numbers; draw from PyTorch's generator, or plan without recomputation"
            )
        changed = set(self._values) if self._values[index] is self._outside else {self._values[index]}
        before = [(of, of.now()) for of in changed]
        if values is not None and values != self.values_of(index):
            values.put_back()
        try:
            yield
        finally:
            for of, then in before:
                if of.now() is not then:
                    then.put_back()

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
