"""Lists and dictionaries that a block is given, and may change.

A block gets copies of them, with leaves of autograd in place of tensors. What it changes there is done to those of its
caller, too, as in plain training; and a block that is run again starts from what it was given at first.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_not
from typing import Any

from torch.utils._pytree import tree_flatten, tree_unflatten

from tierplan.runtime.autograd.nests import containers_in, flatten, items_of, names_of
from tierplan.runtime.autograd.units import ModelError

HandBack = Callable[[Sequence[object], tuple[object, ...], Mapping[str, object]], Any]
"""Makes a block's result of flat values, for a caller with these arguments, and changes what is in those likewise."""

_FILLED = {list, deque, dict, OrderedDict, defaultdict}


@dataclass(frozen=True, slots=True)
class _Given:
    """Stands in a flat result for the caller's container with this number."""

    number: int


class Lent:
    """The containers in a block's arguments, as they are before it runs."""

    def __init__(self, name: str, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """`name` is that of the block."""
        self._name, self._containers = name, containers_in(args, kwargs)
        self._before = [(names_of(container), items_of(container)) for container in self._containers]

    def outcome(self, out: object) -> tuple[list[Any], HandBack]:
        """What the block has returned, and what it has put into containers: flat, and what hands it back."""
        if not self._containers:
            return _as_it_is(out)
        number = {id(c): k for k, c in enumerate(self._containers) if type(c) in _FILLED}
        wanted = changed = {k for k in range(len(self._containers)) if self._is_changed(k)}
        if other := next((c for k, c in enumerate(self._containers) if k in changed and id(c) not in number), None):
            raise ModelError(
                f"{self._name!r} changes a {type(other).__name__} that it is given, which the runtime has copied to "
                "cut the model there; let the block return what is new, or put it into a list or a dictionary"
            )
        if not number:
            return _as_it_is(out)
        while True:  # until all are there that the block returns, and those that lie in them
            contents = {k: items_of(self._containers[k]) for k in sorted(wanted)}
            flat, spec = tree_flatten((out, contents), is_leaf=lambda value: id(value) in number)
            flat = [_Given(number[id(value)]) if id(value) in number else value for value in flat]
            if (reached := {value.number for value in flat if type(value) is _Given}) <= wanted:
                break
            wanted = wanted | reached
        names, name = {k: names_of(self._containers[k]) for k in wanted}, self._name

        def hand_back(flat: Sequence[object], args: tuple[object, ...], kwargs: Mapping[str, object]) -> Any:
            callers = containers_in(args, kwargs)
            for k in changed:
                if sum(c is callers[k] for c in callers) > 1:
                    raise ModelError(
                        f"{name!r} is given the same {type(callers[k]).__name__} twice, and changes it; give it once"
                    )
            flat = [callers[value.number] if type(value) is _Given else value for value in flat]
            out, contents = tree_unflatten(flat, spec)
            for k, items in contents.items():
                _fill(callers[k], names[k], items)
            return out

        return flat, hand_back

    def _is_changed(self, k: int) -> bool:
        (names, items), now = self._before[k], self._containers[k]
        there = items_of(now)
        return len(items) != len(there) or any(map(is_not, items, there)) or names != names_of(now)


def _as_it_is(out: object) -> tuple[list[Any], HandBack]:
    flat, nested = flatten(out)
    return flat, lambda flat, args, kwargs: nested(flat)


def _fill(container: Any, names: Iterable[object], items: Iterable[object]) -> None:
    container.clear()
    if isinstance(container, dict):
        container.update(zip(names, items, strict=True))
    else:
        container.extend(items)
