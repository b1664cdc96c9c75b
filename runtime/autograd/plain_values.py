"""Plain values that modules hold, by which their forward may compute.

They are numbers, texts and types that are attributes of a module, or that its lists, dictionaries and configurations
hold. A unit that is made again is made with those of its forward, whoever has changed them since. With other modules
inside, hooks or functions that were set, a module has other values, too, but these are not put back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from types import ModuleType
from typing import Any

import torch
from torch import nn

from tierplan.runtime.autograd.nests import PLAIN

Container = dict[Any, Any] | list[Any]
_OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}
_PLAIN = PLAIN | {torch.dtype}
MOST_VALUES, MOST_LEVELS = 256, 3
"""A list or dictionary with more values, or further down from its module, is not looked into."""


@dataclass(frozen=True)
class PlainState:
    """The plain values of some modules at one time."""

    values: list[Container]
    held: list[tuple[Container, Container]] = field(compare=False)
    """What has them, with its plain values then, and with the lists, dictionaries and objects that it held then."""

    def changed_since(self, before: PlainState) -> str | None:
        """The name of a value that was another one then, if there is one; what was None then was not made yet."""
        now = {id(container): own for container, own in self.held}
        for container, then in before.held:
            own = now.get(id(container), then)
            if isinstance(then, dict) and isinstance(own, dict):
                plain = ((k, v) for k, v in then.items() if v is not None and _is_plain(v) and v == v)  # but nan
                if (name := next((name for name, value in plain if own.get(name, value) != value), None)) is not None:
                    return str(name)
            elif own != then:
                return "a list"
        return None

    def put_back(self) -> None:
        """Gives the modules these values, and takes plain ones away that they did not have then."""
        for container, then in self.held:
            if isinstance(container, list):
                container[:] = then
                continue
            for name in [n for n, v in container.items() if n not in then and n not in _OF_EVERY_MODULE]:
                if _is_plain(container[name]):
                    del container[name]
            container.update(then)


class PlainValues:
    """The plain values of some modules, as they are from time to time."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = tuple(modules)
        names = ("_modules", "_forward_hooks", "_forward_pre_hooks")
        self._code: list[dict[Any, Any]] = [getattr(module, name) for module in self._modules for name in names]
        held = [vars(module) for module in self._modules]
        self._functions = [(own, n) for own in held for n in {"forward", *filter(lambda n: callable(own[n]), own)}]
        self._getters: list[tuple[Callable[[Any], Any], Container]] = []
        self._then: tuple[object, object] = (None, None)
        self._state: PlainState | None = None

    def now(self) -> PlainState:
        """The same object as the last time, where nothing has changed; to see that takes microseconds."""
        try:
            if self._state is not None and self._look() == self._then:
                return self._state
        except (KeyError, RuntimeError, ValueError):  # one is gone, or is a tensor now
            pass
        self._state = state = self._walk()
        self._getters = [(itemgetter(*then) if then and isinstance(then, dict) else list, c) for c, then in state.held]
        self._then = self._look()
        return state

    def _look(self) -> tuple[object, object]:
        return [get(c) for get, c in self._getters], ([len(c) for _, c in self._getters], self._code_now())

    def _code_now(self) -> list[Any]:
        """What runs when the modules are called, beside their classes' own functions."""
        functions = [own.get(name) for own, name in self._functions]
        return [*functions, *itertools.chain.from_iterable(map(dict.values, self._code))]

    def _walk(self) -> PlainState:
        values: list[Container] = [self._code_now()]
        held: list[tuple[Container, Container]] = []
        todo: list[tuple[Container, int]] = [(vars(module), 0) for module in self._modules]
        seen = set()
        for container, level in todo:  # which grows meanwhile
            if id(container) in seen:
                continue
            seen.add(id(container))
            if isinstance(container, list):
                values.append([*container])
                held.append((container, [*container]))
                continue
            own = {name: value for name, value in container.items() if name not in _OF_EVERY_MODULE}
            inner = {n: inside for n, v in own.items() if level < MOST_LEVELS and (inside := _inside(v)) is not None}
            todo += [(inside, level + 1) for inside in inner.values()]
            values.append({name: value for name, value in own.items() if _is_plain(value)})
            held.append((container, {name: v for name, v in own.items() if name in inner or _is_plain(v)}))
        return PlainState(values, held)


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(map(_is_plain, value)))


def _inside(value: object) -> Container | None:
    """Where plain values may be in this one, such as in a configuration."""
    if isinstance(value, dict) or (isinstance(value, list) and all(map(_is_plain, value))):
        return value if len(value) <= MOST_VALUES else None
    if isinstance(value, nn.Module | torch.Tensor | ModuleType | list) or callable(value):
        return None
    inside = getattr(value, "__dict__", None)
    return inside if type(inside) is dict and len(inside) <= MOST_VALUES else None
