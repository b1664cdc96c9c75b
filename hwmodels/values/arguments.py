"""Arguments of public functions beside their annotations: what is swapped, or of another type, is refused by name.

What is not told from an annotation, such as the items of an iterator, is left to the function.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from numbers import Integral, Real
from pathlib import Path, PurePath
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np

from tierplan.hwmodels.values.records import WORDS, shown

P = ParamSpec("P")
R = TypeVar("R")
NUMBERS: Mapping[Any, type] = {int: Integral, float: Real}
UNIONS = (Union, types.UnionType)


class ArgumentError(TypeError, ValueError):
    """An argument of another type than a function takes, or a word that it does not know."""


def checked(
    function: Callable[P, R], name: str, checks: Callable[[], Mapping[type, Callable[[Any], object]]] = dict
) -> Callable[P, R]:
    """The function under its public name; it raises `ArgumentError` for arguments that are not as annotated, and what
    `checks` raise, each of which is for arguments of a type."""
    signature = inspect.signature(function)

    @functools.cache
    def hints() -> dict[str, Any]:
        written = {key: hint for key, hint in function.__annotations__.items() if key != "return"}
        of_parameters = types.SimpleNamespace(__annotations__=written)
        one_each = get_type_hints(of_parameters, function.__globals__)
        for key, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                one_each[key] = types.GenericAlias(tuple, (one_each[key], ...))
            if parameter.kind is parameter.VAR_KEYWORD:
                one_each[key] = types.GenericAlias(Mapping, (str, one_each[key]))
        return one_each

    @functools.wraps(function)
    def looked_at(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:  # too many or too few of them: the function says it itself
            given = {}
        check_annotated(name, hints(), given)
        for kind, check in checks().items():
            for value in given.values():
                if isinstance(value, kind):
                    check(value)
        return function(*args, **kwargs)

    looked_at.__module__, _, looked_at.__name__ = name.rpartition(".")
    looked_at.__qualname__ = looked_at.__name__
    return looked_at


def check_annotated(whose: str, hints: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raises `ArgumentError` for the first argument, or setting, that is not as annotated."""
    for name, value in given.items():
        hint = hints.get(name, Any)
        if not _is(value, hint):
            text = " ".join(shown(value).split())
            raise ArgumentError(f"{whose}: {name} is {text}; it must be {_words(hint)}{_part(value, hint)}")


def _is(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if hint in (Any, object):
        return True
    if origin in UNIONS:
        return any(_is(value, one) for one in inner)
    if origin is Literal:
        return isinstance(value, str) and value in inner
    if hint is bool:
        return isinstance(value, bool | np.bool_)
    if hint in NUMBERS:
        return isinstance(value, NUMBERS[hint]) and not isinstance(value, bool)
    if origin is None:
        return value is None if hint is type(None) else not inspect.isclass(hint) or isinstance(value, _runtime(hint))
    if not issubclass(origin, Iterable):
        return callable(value) if origin is Callable else isinstance(value, origin)
    if issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(_is(k, inner[0]) and _is(v, inner[1]) for k, v in value.items())
    if isinstance(value, str | bytes) or not (isinstance(value, Iterable) or hasattr(value, "__getitem__")):
        return False
    if not isinstance(value, list | tuple | set | frozenset):  # items of others may be there but once
        return True
    of_each = inner if origin is tuple and inner[-1] is not ... else (inner[0],) * len(value)
    return len(of_each) == len(value) and all(map(_is, value, of_each))


def _runtime(hint: type) -> type:
    """What an object of this type is seen to be an instance of."""
    if hint is Path:
        return PurePath
    return object if getattr(hint, "_is_protocol", False) else hint


def _words(hint: Any) -> str:
    """What is asked for."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in UNIONS:
        return " or ".join(dict.fromkeys(_words(one) for one in inner))
    if origin is Literal:
        return f"one of {', '.join(inner)}"
    if hint is type(None):
        return "None"
    if origin is Callable:
        return "a function"
    if origin is not None and issubclass(origin, Mapping):
        return f"a mapping to {_words(inner[1])}"
    if origin is not None and issubclass(origin, Iterable):
        return f"a list, each of which is {_words(inner[0])}"
    name = getattr(origin or hint, "__name__", str(hint))
    if name in ("PathLike", "Path"):
        return "a path"
    return WORDS.get(name) or f"{'an' if name[0] in 'AEIO' else 'a'} {name}"


def _part(value: Any, hint: Any) -> str:
    """Of what is asked for, where the value has such a thing: the `schedule` of a plan."""
    asked = get_args(hint) if get_origin(hint) in UNIONS else (hint,)
    names = [one.__name__.lower() for one in asked if inspect.isclass(one)]
    names = [name for name in names if name.isidentifier() and hasattr(type(value), name)]
    return f", such as its .{names[0]}" if names else ""
