"""After a crash at any moment the last commit is whole; the checker that says so finds mistakes that are put in.

`python -m benchmarks.crash.consistency` does all of it; here are the parts that take seconds.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.crash.consistency import ADAPTERS, EIGHT_BITS, case, faults, kills, prefixes, table
from benchmarks.crash.mistakes import PLANTED
from benchmarks.crash.states import Disk, Event, Recorder, crashes
from tierplan.runtime.memory import files

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[3]


# ---- the model of a drive ----


def states(events: list[Event], before: Disk) -> list[tuple[int, dict[str, bytes]]]:
    """Prefix, and what the files hold then; every state once."""
    found = []
    for crash in crashes(before, events, num_random=40):
        content = {
            name: b"".join(page for _, page in sorted(crash.disk.pages.get(number, {}).items()))[
                : crash.disk.sizes.get(number, 0)
            ]
            for name, number in crash.disk.names.items()
        }
        if (crash.num_events, content) not in found:
            found.append((crash.num_events, content))
    return found


def of_page(text: str) -> bytes:
    return text.encode() * 4096


def test_what_is_not_synced_may_be_there_in_any_part() -> None:
    before = Disk(names={"a": 1}, pages={1: {0: of_page("0"), 1: of_page("0")}}, sizes={1: 8192})
    first = Event(what="write", file=1, offset_bytes=0, data=of_page("1") + of_page("1"))
    second = Event(what="write", file=1, offset_bytes=4096, data=of_page("2"))
    sync = Event(what="sync", file=1, covers=frozenset({0}))
    found = states([first, sync, second], before)
    after = {n: {content["a"][::4096] for number, content in found if number == n} for n in range(4)}
    assert after == {0: {b"00"}, 1: {b"00", b"11", b"10", b"01"}, 2: {b"11"}, 3: {b"11", b"12"}}


def test_names_are_there_when_their_folder_is_synced() -> None:
    before = Disk(names={"a": 1}, pages={1: {0: b"old".ljust(4096)}, 2: {0: b"new".ljust(4096)}}, sizes={1: 3, 2: 3})
    events = [
        Event(what="link", path="a.tmp", file=2),
        Event(what="link", path="a", old="a.tmp", file=2),
        Event(what="sync folder", path=".", covers=frozenset({0, 1})),
        Event(what="unlink", path="a"),
    ]
    found = [content for number, content in states(events, before) if number == 2]
    assert {"a": b"old"} in found  # nothing
    assert {"a": b"old", "a.tmp": b"new"} in found  # the name, and not that it was changed
    assert {"a": b"new"} in found
    assert [content for number, content in states(events, before) if number == 3] == [{"a": b"new"}]
    assert {} in [content for number, content in states(events, before) if number == 4]


def test_a_recording_ends_in_what_is_there(tmp_path: Path) -> None:
    """All events, applied, are the folder as it is."""
    recorder = Recorder(tmp_path)
    with recorder.recording():
        files.make_folder(tmp_path / "x" / "y")
        files.replace_content(tmp_path / "x" / "one", b"first")
        files.replace_content(tmp_path / "x" / "one", b"second" * 2000)
        files.replace_content(tmp_path / "x" / "two", b"gone")
        files.remove_file(tmp_path / "x" / "two")
    disk = Disk()
    for event in recorder.events:
        disk.apply(event)
    (tmp_path / "copy").mkdir()
    disk.write_out(tmp_path / "copy")
    assert (tmp_path / "copy" / "x" / "one").read_bytes() == b"second" * 2000
    assert {path.relative_to(tmp_path / "copy").as_posix() for path in (tmp_path / "copy").rglob("*")} == {
        "x", "x/y", "x/one"
    }  # fmt: skip
    last = [crash for crash in crashes(Disk(), recorder.events) if crash.num_events == len(recorder.events)]
    assert all(set(crash.disk.names) <= {"x/one", "x/two"} for crash in last)


# ---- the checker ----


@pytest.mark.parametrize(("name", "every"), [("everything in memory", 11), ("everything on NVMe", 19)])
def test_no_crash_loses_a_commit(name: str, every: int, tmp_path: Path) -> None:
    found = prefixes(name, tmp_path, every=every, resume_every=2, generations=1)
    assert found["broken"] == []
    assert found["states"] > found["resumed"] > 3


@pytest.mark.parametrize("mistake", list(PLANTED))
def test_a_mistake_is_found(mistake: str, tmp_path: Path) -> None:
    name, planted = PLANTED[mistake]
    found = prefixes(name, tmp_path, planted=planted, every=4, generations=1, resume_every=50, stop_at_first=True)
    assert len(found["broken"]) == 1


@pytest.mark.filterwarnings("ignore::Warning:peft")
@pytest.mark.parametrize(
    "name",
    [
        *("zero-infinity, all on NVMe", "fuyou, delayed", EIGHT_BITS, next(iter(ADAPTERS))),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in list(ADAPTERS)[1:]),
    ],
)
def test_kills_and_faults(name: str, tmp_path: Path) -> None:
    killed = kills(name, 4, tmp_path / "kills", 0)
    failed = faults(name, 4, tmp_path / "faults", 0)
    assert (killed["kills"], failed["faults"]) == (4, 4)
    assert failed["operations"] > 50
    assert case(name).schedule.ops


def test_the_page_has_the_figures() -> None:
    figures = {
        "kills": {"a": {"kills": 600, "kills_before_a_commit": 5}, "b": {"kills": 400, "kills_before_a_commit": 6}},
        "prefixes": {"a": {"operations": 10, "states": 2000, "resumed": 3, "broken": []}},
        "planted": {"x": {"broken": ["y"]}, "z": {"broken": []}},
    }
    head = {"date": "2026-11-22T01:02:03"}
    text = table(
        [{**head, "part": part, "name": name, **row} for part, rows in figures.items() for name, row in rows.items()]
    )
    assert "**1,000 kills** over 2 plans, 11 of them before" in text
    assert "2,000 states" in text
    assert "1 of 2 planted mistakes found" in text


BYPASS = {"open", "write_text", "write_bytes", "replace", "rename", "unlink", "touch", "mkdir", "symlink_to"}
BYPASS_OS = {"open", "write", "pwrite", "pwritev", "rename", "replace", "unlink", "ftruncate", "fsync", "fdatasync"}


@pytest.mark.parametrize("module", ["memory/store", "memory/tier_file", "checkpoint/commits", "checkpoint/durability"])
def test_all_that_must_last_goes_through_one_module(module: str) -> None:
    """Otherwise the recording would be of a part only."""
    for node in ast.walk(ast.parse((ROOT / "runtime" / f"{module}.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value)
            assert not (owner == "os" and node.func.attr in BYPASS_OS), f"{module}: os.{node.func.attr}"
            assert owner in ("os", "files") or node.func.attr not in BYPASS, f"{module}: {ast.unparse(node)}"
