"""What benchmarks share: their arguments, files of results that grow line by line, and generated parts of pages."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help is the benchmark's docstring as it is written."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def read(path: Path | None) -> list[Record]:
    """The records in a file, one a line; none where there is no file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []


def append(path: Path, record: Mapping[str, Any]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def save(path: Path | None, record: Mapping[str, Any]) -> None:
    """Writes one record, where somebody named a file."""
    if path:
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def answer_missing(
    path: Path,
    questions: Iterable[tuple[Record, Callable[[], Record]]],
    shown: Callable[[Record], str],
    *,
    limit_s: float = float("inf"),
) -> None:
    """Asks what the file lacks, and adds a line for each answer as it comes; none is begun after `limit_s`.

    A question is what its record begins with, which no other has, and what gives the rest.
    """
    known, began_s = read(path), time.perf_counter()
    for question, ask in questions:
        if time.perf_counter() < began_s + limit_s and not any(question.items() <= row.items() for row in known):
            record = question | ask() | {"version": version()}
            append(path, record)
            print(shown(record), file=sys.stderr, flush=True)


@cache
def version() -> str:
    """The commit that this is a checkout of, marked where files have changed since; `unknown` outside git."""
    if found := os.environ.get("TIERPLAN_VERSION"):
        return found
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10"]
    try:
        return subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def replace_part(page: Path, name: str, text: str) -> None:
    """Writes a generated part of a page between its two marker lines."""
    begin, end = f"<!-- {name}: generated, do not edit -->", f"<!-- end of {name} -->"
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"{page} has no lines {begin!r} and {end!r}; add them where the part belongs")
    page.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")
