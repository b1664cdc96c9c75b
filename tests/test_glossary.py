"""The glossary is true: what it points to is there, and words that it rules out are not names in the code."""

from __future__ import annotations

import io
import pkgutil
import re
import tokenize
from contextlib import suppress
from pathlib import Path
from typing import get_args

import pytest

from tests.test_imports import MODULES, ROOT, relative
from tierplan.hwmodels.description import Basis
from tierplan.planner.plan_rules import Order
from tierplan.sim.step import Action, Semantics

PAGE = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
TERMS, RULED_OUT = PAGE.split("## Words that are not used")


def rows(text: str) -> list[list[str]]:
    """The cells of all table rows, without headers and rules."""
    lines = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| term", "| not "))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


ENTRIES = rows(TERMS)
BANNED = [(word, instead) for words, instead in rows(RULED_OUT) for word in re.findall(r"`(\w+)`", words)]


def spelt_out(identifier: str) -> str:
    """`_late_update_` for `late_update`, `LateUpdate` and `LATE_UPDATE`, so that whole words can be looked for."""
    apart = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", identifier)
    return f"_{apart.lower().strip('_')}_"


def names(path: Path) -> set[str]:
    """All identifiers of a module, and its own name."""
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return {token.string for token in tokens if token.type == tokenize.NAME} | {path.stem}


def is_there(dotted: str) -> bool:
    """Whether `module.Class.field` exists below `tierplan`; modules and fields of dataclasses count."""
    owner, _, last = f"tierplan.{dotted}".rpartition(".")
    with suppress(AttributeError, ImportError):
        pkgutil.resolve_name(f"tierplan.{dotted}")  # which imports a module
        return True
    thing = pkgutil.resolve_name(owner)
    return hasattr(thing, last) or last in getattr(thing, "__annotations__", {})


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry[0])
def test_every_term_is_explained_in_a_sentence_and_lies_where_it_says(entry: list[str]) -> None:
    pytest.importorskip("torch")
    _, meaning, where = entry
    assert meaning.endswith(".")
    places = re.findall(r"`([\w.]+)`", where)
    assert places
    for place in places:
        assert is_there(place), f"there is no tierplan.{place}"


@pytest.mark.parametrize(
    ("term", "choices"),
    [("basis", Basis), ("order", Order), ("action", Action), ("semantics", Semantics)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_term_with_a_few_values_says_what_each_of_them_is(term: str, choices: object) -> None:
    """They stand in what commands print."""
    meanings = {name: meaning for name, meaning, _ in ENTRIES}
    assert set(get_args(choices)) <= set(re.findall(r"`([\w-]+)`", meanings[term]))


def test_terms_are_unique() -> None:
    terms = [entry[0] for entry in ENTRIES]
    assert len(terms) > 40
    assert len(set(terms)) == len(terms)


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_words_that_are_ruled_out_are_no_names(path: Path) -> None:
    spelt = {name: spelt_out(name) for name in names(path)}
    for word, instead in BANNED:
        for name, text in spelt.items():
            assert f"_{word}_" not in text, f"{relative(path)} has {name!r}; say {instead}"


def test_the_search_sees_words_within_names() -> None:
    assert spelt_out("LateUpdate") == spelt_out("LATE_UPDATE") == spelt_out("_late_update") == "_late_update_"
    assert spelt_out("NVMeStore").endswith("_store_")
    assert "cut_steps" in names(ROOT / "validation" / "comparison" / "steps.py")
