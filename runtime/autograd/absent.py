"""What a rank of a pipeline must not compute with: numbers that only others have.

To lead the model to its stage, a rank runs what is in front without numbers: parameters that other ranks have read nan,
and so does what blocks of theirs give. The input of the stage gets its numbers from the rank before; other tensors that
come of such a nan would be wrong, and need not be nan any more (a comparison is False).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from tierplan.runtime.autograd.containers import HandBack, Lent
from tierplan.runtime.autograd.nests import flatten, tensors_in
from tierplan.runtime.autograd.plain_values import PlainState
from tierplan.runtime.autograd.replay import changed, is_random
from tierplan.runtime.autograd.units import ModelError, is_placeholder
from tierplan.runtime.tracing.record import ExpertsOnFakes


class Absent(TorchDispatchMode):
    """While it is active, which is outside of blocks, notes what comes of numbers that are not here."""

    def __init__(self, draws_alike: bool) -> None:
        super().__init__()
        self.draws_alike = draws_alike
        """Random numbers that the model draws now are those of plain training."""
        self._known: dict[int, StorageWeakRef] = {}  # by identity of the storage, which it keeps from being reused

    def _has(self, t: torch.Tensor) -> bool:
        return is_placeholder(t) or t.untyped_storage()._cdata in self._known

    def refuse(self, whose: str, values: object) -> None:
        """Raises `ModelError` where there are such tensors among these values."""
        if (t := next((t for t in tensors_in(values) if self._has(t)), None)) is not None:
            raise ModelError(
                f"{whose} a tensor of shape {tuple(t.shape)} that comes of parameters, activations or random numbers "
                "which only other devices of the pipeline have: the model computes with them outside of its blocks. "
                "Beside the activations that a block hands to the next one, let the model give what comes of the batch "
                "or, with a seed, of random numbers drawn in front of the first block; or choose a plan without stages "
                "(ddp, zero-3, harmony-dp)"
            )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, operations are done as without it, unless the model has entered a mode of its own."""
        if _get_current_dispatch_mode() is not self:
            yield
            return
        self.__exit__(None, None, None)
        try:
            yield
        finally:
            self.__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        reads = not name.startswith("new_") and not name.endswith("_like")  # these look at shapes alone
        is_absent = (reads and any(map(self._has, tensors_in((args, kwargs))))) or (
            not self.draws_alike and is_random(func, args, kwargs)
        )
        out = func(*args, **kwargs)
        if is_absent:
            for t in (*tensors_in(out), *changed(func, args, kwargs)):
                self._known[t.untyped_storage()._cdata] = StorageWeakRef(t.untyped_storage())
        return out


def results_alone(
    name: str, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[list[Any], HandBack]:
    """What a block returns that another rank runs, without numbers, as `Lent.outcome`."""
    given, nested = flatten((args, kwargs))
    own_args, own_kwargs = nested(list(map(_without_graph, given)))
    lent = Lent(name, own_args, own_kwargs)
    with FakeTensorMode(allow_non_fake_inputs=True), ExpertsOnFakes():
        results, hand_back = lent.outcome(original(*own_args, **own_kwargs))
    if any(not t.requires_grad for t in tensors_in(results)):
        raise ModelError(
            f"{name!r} gives a tensor without a gradient, which would have to go to another rank; let blocks give "
            "activations alone"
        )
    return results, hand_back


def refuse_more(name: str, leaves: Sequence[torch.Tensor]) -> None:
    """Raises `ModelError` where a stage would begin with other tensors than the activations alone."""
    if len(leaves) > 1:
        raise ModelError(
            f"unit {name!r}, with which a stage of the pipeline begins, is handed {len(leaves)} tensors by the unit "
            "before it (in a tuple, or in lists and dictionaries that blocks fill), but devices send each other one "
            "tensor of activations; have each block take and return one tensor, or choose a plan without stages "
            "(ddp, zero-3, harmony-dp)"
        )


def refuse_count(whose: str, before: PlainState, now: PlainState) -> None:
    """Raises `ModelError` where forward, which another turn runs too, perhaps on another rank, has changed a plain
    value by which it may compute."""
    if now is not before and (value := now.changed_since(before)) is not None:
        raise ModelError(
            f"forward of {whose} changes {value!r}, a plain value that its modules hold (a count of calls, say), but "
            "this pipeline runs that forward more than once for a micro-batch, also on devices that have not seen the "
            "change: it would compute by another value there. Set it from the batch, or choose a plan where devices "
            "have one stage each (megatron-pp), or none"
        )


def _without_graph(value: Any) -> Any:
    is_result = isinstance(value, torch.Tensor) and value.grad_fn is not None
    return value.detach().requires_grad_() if is_result else value
