"""Records are read as their class says, and errors name the place, the value and the rule."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import pytest

from tierplan.hwmodels.values.records import Amount, Count, RecordError, Whole, decode, load_record


class Row(NamedTuple):
    name: str
    at_ns: int
    alone_ns: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    name: str
    count: Count = 1
    where: Literal["host", "nvme"] | None = None

    def __post_init__(self) -> None:
        if self.name == "no":
            raise ValueError("a part is not called no")


@dataclass(frozen=True, slots=True, kw_only=True)
class Five:
    parts: tuple[Part, ...]
    first: Part | None = None
    size_bytes: Whole = 0
    work: Mapping[str, Amount] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    meta: Mapping[str, object] = field(default_factory=dict)
    kind: ClassVar[str] = "five"


COMPLETE = {
    "parts": [{"name": "a", "count": 2, "where": "host"}, {"name": "b", "count": 1, "where": None}],
    "first": {"name": "a", "count": 1, "where": None},
    "size_bytes": 5,
    "work": {"s": 1, "bytes": 2.5},
    "rows": [["x", 1, -1], ["y", 2, 3]],
    "meta": {"any": [1, None]},
}


def test_a_complete_record_becomes_its_class() -> None:
    record = decode(Five, COMPLETE)
    assert record.parts == (Part(name="a", count=2, where="host"), Part(name="b"))
    assert (record.first, record.rows) == (Part(name="a"), (Row("x", 1), Row("y", 2, 3)))
    assert repr(record.work) == "{'s': 1, 'bytes': 2.5}", "what is whole stays whole"


def test_defaults_are_taken_where_the_file_need_not_say_all() -> None:
    assert decode(Five, {"parts": [{"name": "a"}]}, complete=False) == Five(parts=(Part(name="a"),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": [{"name": "a", "count": 2}]}, r"parts\[0\] \('a'\) lacks the field 'where'"),
        ({"colour": 1}, "the file has an unknown field 'colour'; the fields are parts, first"),
        ({"first": {"name": 1, "count": 1, "where": None}}, "first.name is 1; it must be text"),
        ({"first": {"name": "no", "count": 1, "where": None}}, "first: a part is not called no"),
        ({"first": {"name": "a", "count": 1, "where": None, "x": 1}}, "first has an unknown field 'x'; .* name, count"),
        (
            {"parts": [{"name": "a", "count": 0, "where": "host"}]},
            r"\('a'\): count is 0; it must be a whole num",
        ),
        ({"parts": [{"name": "a", "count": 1, "where": "up"}]}, r"where is 'up'; it must be one of host, nvme"),
        ({"work": {"s": -1}}, r"work\['s'\] is -1; it must be a whole number >= 0"),
        ({"rows": [["x", "soon", -1]]}, r"rows\[0\]\[1\] is 'soon'; it must be a whole number"),
        ({"rows": [["x"]]}, r"rows\[0\] is \['x'\]; it must be a list of length 3"),
        ({"parts": {}}, "parts is {}; it must be a list"),
    ],
)
def test_what_is_wrong_is_named(change: dict[str, object], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        decode(Five, {**COMPLETE, **change})


def test_a_file_has_a_format_and_a_version(tmp_path: Path) -> None:
    def load(text: str) -> Five:
        (tmp_path / "x.json").write_text(text)
        return load_record(
            Five, tmp_path / "x.json", format="five", version=5, made_by="a five as tests write it", error=FiveError
        )

    assert load(json.dumps({"format": "five", "version": 5, **COMPLETE})) == decode(Five, COMPLETE)
    with pytest.raises(FiveError, match=r"x\.json is not a five as tests write it: it has format 'six' version 5"):
        load('{"format": "six", "version": 5}')
    with pytest.raises(FiveError, match="is not JSON"):
        load("[" * 100_000)
    with pytest.raises(FiveError, match="'a' is there twice"):
        load('{"a": 1, "a": 2}')


class FiveError(ValueError):
    """What a reader of fives raises."""
