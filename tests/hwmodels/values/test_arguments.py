"""What is taken for an annotation, and how it is said. The public functions are tried in `tests/test_front_door.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import pytest

from tierplan.hwmodels.values.arguments import ArgumentError, check_annotated, checked


class Speaker(Protocol):
    def speak(self) -> str: ...


class Box:
    @property
    def path(self) -> Path:
        return Path()


def once() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize(
    ("hint", "right", "wrong", "words"),
    [
        (int, [1, np.int32(1)], ["1", 1.0, True, None], "a whole number"),
        (float, [1, 1.5, np.float32(1)], ["1", False, 1j], "a number"),
        (bool, [True], [1, None], "true or false"),
        (str | None, ["", None], [b"", 1], "text or None"),
        (Literal["a", "b"], ["a"], ["c", 1, []], "one of a, b"),
        (str | PathLike[str], ["x", Path()], [1], "text or a path"),
        (
            Iterable[int],
            [[1], once(), range(2), {1: 2}.keys(), np.arange(2)],
            ["12", ["1"], 1],
            "a list, each of .* a w",
        ),
        (Sequence[str], [["a"], ()], ["a", ["a", 1]], "a list, each of which is text"),
        (tuple[float, float], [(1, 2), [1, 2.5]], [(1,), (1, "2")], "a list, each of which is a number"),
        (tuple[int, ...], [(), (1, 2)], [(1, "2")], "a list, each of which is a whole number"),
        (Mapping[str, float] | float, [{"a": 1}, 1], [{"a": "1"}, {1: 1}, "1"], "a mapping to a number or a number"),
        (Callable[[int], float], [abs, Box], [0.1], "a function"),
        (Speaker, [1], [], ""),
        (Any, [1, None], [], ""),
        (object, [1, None], [], ""),
        (Path, [Path()], ["x", Box()], "a path"),
    ],
)
def test_what_is_taken(hint: Any, right: list[Any], wrong: list[Any], words: str) -> None:
    for value in right:
        check_annotated("f", {"x": hint}, {"x": value})
    for value in wrong:
        with pytest.raises(ArgumentError, match=f"^f: x is .*; it must be {words}"):
            check_annotated("f", {"x": hint}, {"x": value})


def test_items_of_an_iterator_are_still_there() -> None:
    check_annotated("f", {"x": Iterable[int]}, {"x": (items := once())})
    assert [*items] == [1]


def test_a_function_has_its_public_name_and_says_itself_what_it_lacks() -> None:
    def own(a: int, /, *more: int, b: str = "", **others: Any) -> tuple[Any, ...]:
        return a, more, b, others

    public = checked(own, "package.public")
    assert (public.__module__, public.__name__, public.__qualname__) == ("package", "public", "public")
    assert public(1, 2, b="x", c=None) == (1, (2,), "x", {"c": None})
    with pytest.raises(ArgumentError, match=r"^package.public: b is 1; it must be text$"):
        public(1, b=1)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"more is \(2, 'x'\); it must be a list, each of which is a whole number$"):
        public(1, 2, "x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        public()  # type: ignore[call-arg]
