"""What benchmarks share: their arguments, files of results that grow line by line, turns, and parts of pages."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
Record = dict[str, Any]
Question = tuple[Record, Callable[[], Record]]
"""What its record begins with, which no other has, and what gives the rest."""


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


def ask_or_write(
    parser: argparse.ArgumentParser,
    part: str,
    questions: Callable[[argparse.Namespace], Iterable[Question]],
    shown: Callable[[Record], str],
    table: Callable[[list[Record]], str],
) -> list[Record]:
    """Asks what the file of results lacks, and adds a line for each answer as it comes; or writes the table of all
    answers into a part of a page. All answers."""
    parser.add_argument("results", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"), metavar="S", help="none is begun after these")
    parser.add_argument("--table", type=Path, metavar="PAGE", help="write the table into this page instead of running")
    args = parser.parse_args()
    if args.table:
        replace_part(args.table, part, table(read(args.results)))
        return read(args.results)
    known, began_s = read(args.results), time.perf_counter()
    for question, ask in questions(args):
        if time.perf_counter() < began_s + args.seconds and not any(question.items() <= row.items() for row in known):
            record = question | ask() | {"version": version()}
            append(args.results, record)
            print(shown(record), file=sys.stderr, flush=True)
    return read(args.results)


def versions_of(records: Iterable[Record]) -> str:
    """The versions that have answered."""
    return ", ".join(sorted({record["version"] for record in records}))


def in_turns(first: Callable[[], T], second: Callable[[], T], turns: int) -> Iterator[tuple[T, T]]:
    """What both give, in turns; which goes first alternates. A shared machine drifts, so only ratios within a turn
    count."""
    for turn in range(turns):
        if turn % 2:
            theirs = second()
            yield first(), theirs
        else:
            yield first(), second()


def spread(ratios: Sequence[float]) -> Record:
    """The median, the quartiles, and all; of one, that."""
    low, median, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [*ratios] * 3
    return {"ratio": median, "quartiles": [low, high], "ratios": list(ratios)}


def about() -> Record:
    """When and where something was measured."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
    }


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
