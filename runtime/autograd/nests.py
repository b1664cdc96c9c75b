"""Tensors in nests of values (what calls of blocks get and give, what lies outside of all units), on storages, and one
behind the other in flat memory."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from operator import itemgetter
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils._pytree import SUPPORTED_NODES, tree_flatten, tree_is_leaf, tree_unflatten


def tensors_in(values: object) -> list[torch.Tensor]:
    """All tensors in a nest of values."""
    return [t for t in flatten(values)[0] if isinstance(t, torch.Tensor)]


def addresses(values: object) -> set[int]:
    """Addresses of the storages of all tensors in a nest of values."""
    return {t.untyped_storage().data_ptr() for t in tensors_in(values)}


def shapes_of(values: Iterable[object]) -> tuple[tuple[torch.Size, torch.dtype], ...]:
    """Shapes and types of the tensors among some values."""
    return tuple((t.shape, t.dtype) for t in values if isinstance(t, torch.Tensor))


def in_order(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor whose values lie one after the other, also along a dimension of one."""
    return (*accumulate(shape[:0:-1], lambda step, length: step * max(1, length), initial=1),)[::-1][: len(shape)]


def form_of(args: tuple[object, ...], kwargs: Mapping[str, object]) -> tuple[object, ...]:
    """How a call looks: its tensors (`shapes_of`, and whether they have gradients), the values of plain ones, the names
    of what has one, and how long its lists and dictionaries are."""
    of_each = (
        (t.shape, t.dtype, t.requires_grad) if isinstance(t, torch.Tensor) else (type(t), type(t) in PLAIN and t)
        for t in flatten((args, kwargs))[0]
    )
    of_containers = ((type(c), len(items_of(c)), *names_of(c)) for c in containers_in(args, kwargs))
    return (len(args), *kwargs, *of_each, *of_containers)


def containers_in(args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[Any]:
    """What can be changed in the arguments of a call and is no tensor: lists, dictionaries, and other objects that
    PyTorch is told to look into, in an order that is the same for equal nests."""
    waiting = [value for value in (*args, *kwargs.values()) if type(value) not in _LEAVES]
    containers = []
    for value in waiting:  # which grows meanwhile
        if isinstance(value, tuple) or type(value) in SUPPORTED_NODES:
            waiting += [item for item in items_of(value) if type(item) not in _LEAVES]
            if not isinstance(value, tuple):
                containers.append(value)
    return containers


def items_of(container: Any) -> list[Any]:
    """What lies in it, without names."""
    if isinstance(container, dict):
        return [*container.values()]
    if isinstance(container, list | tuple | deque):
        return [*container]
    return [*SUPPORTED_NODES[type(container)].flatten_fn(container)[0]]


def names_of(container: Any) -> list[Any]:
    """Those of its items, where they have some."""
    return [*container] if isinstance(container, dict) else []


def flatten(values: object) -> tuple[list[Any], Callable[[Sequence[object]], Any]]:
    """The leaves of a nest of values, and what makes such a nest of others.

    As `tree_flatten` does it, which takes as long as a small kernel: what most blocks get and give is no deep nest.
    """
    if isinstance(values, torch.Tensor):
        return [values], itemgetter(0)
    if type(values) is tuple and [*map(type, values)] == [tuple, dict]:  # arguments of a call
        args, kwargs = values
        flat = [*args, *kwargs.values()]
        if _are_leaves(flat):
            num, names = len(args), [*kwargs]  # and none of the values, which may have to go
            return flat, lambda flat: (tuple(flat[:num]), dict(zip(names, flat[num:], strict=True)))
    if isinstance(values, tuple | list) and type(values) in (tuple, list) and _are_leaves(values):
        return [*values], type(values)
    flat, spec = tree_flatten(values)
    return flat, lambda flat: tree_unflatten(flat, spec)


def _are_leaves(values: Iterable[object]) -> bool:
    return _LEAVES.issuperset(map(type, values)) or all(map(tree_is_leaf, values))


PLAIN = {type(None), bool, int, float, str}
_LEAVES = {torch.Tensor, nn.Parameter, *PLAIN}


def outside_storages(batch: Mapping[str, object], modules: Iterable[nn.Module]) -> dict[int, torch.UntypedStorage]:
    """What exists outside of all units, by address: the batch and the model's buffers, by `model.modules()`.

    To walk through the model for them takes longer than a block's forward that computes next to nothing.
    """
    buffers = [b for module in modules if module._buffers for b in module._buffers.values() if b is not None]
    storages = (t.untyped_storage() for t in (*tensors_in(dict(batch)), *buffers))
    return {storage.data_ptr(): storage for storage in storages}


class Forms:
    """Types and shapes of tensors that lie one behind the other. Equal ones are one object (`forms_of`), since to tell
    whether two are equal takes long."""

    __slots__ = ("each", "size_bytes", "sizes_bytes")

    def __init__(self, each: tuple[tuple[torch.dtype, Sequence[int]], ...]) -> None:
        self.each = each
        self.sizes_bytes = [dtype.itemsize * prod(shape) for dtype, shape in each]
        self.size_bytes = sum(self.sizes_bytes)

    def split(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The tensors in this memory (uint8), which may go on behind them."""
        parts = zip(memory[: self.size_bytes].split(self.sizes_bytes), self.each, strict=True)
        return [part.view(dtype).view(shape) for part, (dtype, shape) in parts]


forms_of = functools.lru_cache(maxsize=4096)(Forms)


def look(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset_bytes: int,
    size: Sequence[int],
    stride: Sequence[int],
) -> torch.Tensor:
    """A tensor on this storage."""
    out = torch.empty(0, dtype=dtype, device=storage.device)
    return out.set_(storage, offset_bytes // out.itemsize, size, stride)


def nodes_of(starts: Collection[Node], ends: Collection[Node] = ()) -> Iterator[Node]:
    """Those of a graph of autograd's, as far as it goes; without its `ends`, where some are given."""
    seen, waiting = {*starts, *ends}, list(starts)
    while waiting:
        yield (node := waiting.pop())
        following = {n for n, _ in node.next_functions if n is not None} - seen
        seen |= following
        waiting += following
