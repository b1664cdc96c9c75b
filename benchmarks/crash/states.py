"""What a crash may leave of a run's files: a recording of all its operations on them, and the states that follow.

`Recorder` stands in for the functions of `tierplan.runtime.memory.files` and notes what they do, in order. `crashes`
goes through every prefix of that. The rules are those that a program may rely on, and no more:

- bytes written to a file are on the drive when a sync of that file has returned that began after they were written;
  before, each page of 4 KiB of them may be there or not, whatever came before or after it;
- a name that was made, renamed, replaced or removed is so on the drive when a sync of its folder has returned; before,
  each of these may have happened or not. A new folder is a name in the folder above it.
"""

from __future__ import annotations

import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from tierplan.runtime.memory import files

PAGE_BYTES = 4096
FILES = "tierplan.runtime.memory.files"
Real = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One operation, or that it has ended. Paths are from the root of the recording; `file` is a number of a file."""

    what: str
    """`write`, `grow`, `link` (a name is given to a file), `unlink`, `folder`; `sync`, `sync folder`; `acknowledge`."""
    path: str = ""
    file: int = -1
    offset_bytes: int = 0
    data: bytes = b""
    size_bytes: int = 0
    covers: frozenset[int] = frozenset()
    """Of a sync: the events that had ended when it began."""
    old: str = ""
    """Of a link: the name that goes, if it is a renaming."""
    num_steps: int = 0
    """Of an acknowledgement: how many steps are committed now."""


@dataclass
class Disk:
    """Names and bytes that are on a drive for certain."""

    names: dict[str, int] = field(default_factory=dict)
    folders: set[str] = field(default_factory=lambda: {"."})
    pages: dict[int, dict[int, bytes]] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, root: Path) -> Disk:
        """What a folder holds. Numbers of files are those of the system."""
        disk = cls()
        for path in root.rglob("*"):
            name = path.relative_to(root).as_posix()
            if path.is_dir():
                disk.folders.add(name)
                continue
            number, data = path.stat().st_ino, path.read_bytes()
            disk.names[name], disk.sizes[number] = number, len(data)
            disk.pages[number] = {
                at // PAGE_BYTES: data[at : at + PAGE_BYTES].ljust(PAGE_BYTES, b"\0")
                for at in range(0, len(data), PAGE_BYTES)
            }
        return disk

    def copy(self) -> Disk:
        return Disk(
            names=dict(self.names),
            folders=set(self.folders),
            pages={number: dict(pages) for number, pages in self.pages.items()},
            sizes=dict(self.sizes),
        )

    def apply(self, event: Event, which: Callable[[int], bool] = lambda page: True) -> None:
        """Of a write, the pages that `which` chooses."""
        if event.what == "write":
            pages, end = self.pages.setdefault(event.file, {}), event.offset_bytes + len(event.data)
            for page in range(event.offset_bytes // PAGE_BYTES, -(-end // PAGE_BYTES)):
                if which(page):
                    begin = page * PAGE_BYTES
                    low, high = max(begin, event.offset_bytes), min(begin + PAGE_BYTES, end)
                    old = pages.get(page, bytes(PAGE_BYTES))
                    new = event.data[low - event.offset_bytes : high - event.offset_bytes]
                    pages[page] = old[: low - begin] + new + old[high - begin :]
                    self.sizes[event.file] = max(self.sizes.get(event.file, 0), high)
        elif event.what == "grow":
            self.sizes[event.file] = max(self.sizes.get(event.file, 0), event.size_bytes)
        elif event.what == "link":
            self.names[event.path] = event.file
            if event.old:
                self.names.pop(event.old, None)
        elif event.what == "unlink":
            self.names.pop(event.path, None)
        elif event.what == "folder":
            self.folders.add(event.path)

    def write_out(self, root: Path) -> None:
        """Makes the folders and files in an empty folder; what lies below a folder that is not there is not there."""
        for name in sorted(self.folders):
            if self._is_reachable(name):
                (root / name).mkdir(exist_ok=True)
        for name, number in self.names.items():
            if self._is_reachable(Path(name).parent.as_posix()):
                fd = os.open(root / name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                os.ftruncate(fd, self.sizes.get(number, 0))
                pages = sorted(self.pages.get(number, {}).items())
                for _, run in itertools.groupby(enumerate(pages), key=lambda item: item[1][0] - item[0]):
                    row = [page for _, page in run]
                    begin, end = row[0][0] * PAGE_BYTES, (row[-1][0] + 1) * PAGE_BYTES
                    data = b"".join(content for _, content in row)
                    os.pwrite(fd, data[: min(end, self.sizes.get(number, 0)) - begin], begin)
                os.close(fd)

    def _is_reachable(self, folder: str) -> bool:
        path = Path(folder)
        return all(parent.as_posix() in self.folders for parent in (path, *path.parents))


class Recorder:
    """Notes every operation under a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self.events: list[Event] = []
        self._ended: set[int] = set()
        self._new = itertools.count(1 << 62)
        self._numbers: dict[int, int] = {}
        """Of files made since: the system gives the number of one that was removed to the next one."""
        self._lock = threading.Lock()

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Operations inside are noted."""
        stand_ins = (
            self.write_at, self.grow_file, self.sync_file, self.sync_folder, self.open_file, self.rename_file,
            self.remove_file, self.make_folder,
        )  # fmt: skip
        with ExitStack() as stack:
            for stand_in in stand_ins:
                real = getattr(files, stand_in.__name__)
                stack.enter_context(mock.patch(f"{FILES}.{stand_in.__name__}", partial(stand_in, real)))
            yield self

    def acknowledge(self, num_steps: int) -> None:
        """The run says that so many steps are committed."""
        self._begin(Event(what="acknowledge", num_steps=num_steps))

    def _begin(self, event: Event) -> int:
        with self._lock:
            self.events.append(event)
            return len(self.events) - 1

    def _end(self, number: int) -> None:
        with self._lock:
            self._ended.add(number)

    def _name(self, path: Path) -> str:
        return (path.parent.resolve() / path.name).relative_to(self.root).as_posix()

    def _number(self, found: os.stat_result) -> int:
        return self._numbers.get(found.st_ino, found.st_ino)

    @contextmanager
    def _around(self, event: Event) -> Iterator[None]:
        number = self._begin(event)
        yield
        self._end(number)

    @contextmanager
    def _synced(self, event: Event) -> Iterator[None]:
        with self._lock:
            covers = frozenset(self._ended)
        yield
        self._begin(replace(event, covers=covers))

    # Stand-ins for the functions of the same names, which are given first.

    def write_at(self, real: Real, fd: int, path: Path, views: Sequence[memoryview], offset: int, **how: bool) -> None:
        data = b"".join(bytes(view) for view in views)
        with self._around(Event(what="write", file=self._number(os.fstat(fd)), offset_bytes=offset, data=data)):
            real(fd, path, views, offset, **how)

    def grow_file(self, real: Real, fd: int, path: Path, size_bytes: int) -> None:
        with self._around(Event(what="grow", file=self._number(os.fstat(fd)), size_bytes=size_bytes)):
            real(fd, path, size_bytes)

    def sync_file(self, real: Real, fd: int, path: Path) -> None:
        with self._synced(Event(what="sync", file=self._number(os.fstat(fd)))):
            real(fd, path)

    def sync_folder(self, real: Real, path: Path) -> None:
        resolved = path.resolve()
        name = resolved.relative_to(self.root).as_posix() if resolved.is_relative_to(self.root) else ".."
        with self._synced(Event(what="sync folder", path=name)):
            real(path)

    def open_file(self, real: Real, path: Path, flags: int) -> int:
        is_new = bool(flags & os.O_CREAT) and not path.exists()
        fd: int = real(path, flags)
        if is_new:
            number = self._numbers[os.fstat(fd).st_ino] = next(self._new)
            self._end(self._begin(Event(what="link", path=self._name(path), file=number)))
        return fd

    def rename_file(self, real: Real, source: Path, target: Path) -> None:
        number, old = self._number(source.stat()), self._name(source)
        with self._around(Event(what="link", path=self._name(target), file=number, old=old)):
            real(source, target)

    def remove_file(self, real: Real, path: Path) -> None:
        if path.exists():
            with self._around(Event(what="unlink", path=self._name(path))):
                real(path)

    def make_folder(self, real: Real, path: Path) -> None:
        for parent in reversed([p for p in (path, *path.parents) if not p.exists()]):
            name = parent.resolve().relative_to(self.root).as_posix()
            self._end(self._begin(Event(what="folder", path=name)))
        real(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crash:
    """What is on the drive after a crash."""

    num_events: int
    """Events before it."""
    kept: str
    """Which operations that were not synced have happened, for people."""
    committed: tuple[int, int]
    """Steps that were committed for certain, and with the commit that was on its way."""
    disk: Disk


def crashes(
    before: Disk, events: Sequence[Event], *, committed: int = 0, every: int = 1, num_random: int = 4, seed: int = 0
) -> Iterator[Crash]:
    """States that a crash may leave after each prefix of the events (after each `every`-th of them, and the last).

    Of the operations that no sync covers: none has happened, all have, each alone, all but each, and `num_random`
    random choices, page by page.
    """
    rng, disk, open_events = random.Random(seed), before.copy(), dict[int, Event]()
    upcoming = [event.num_steps for event in events if event.what == "acknowledge"]
    for number in range(len(events) + 1):
        if number % every == 0 or number == len(events):
            next_one = next((n for n in upcoming if n > committed), committed)
            for kept, changed in _subsets(disk, open_events, rng, num_random):
                yield Crash(num_events=number, kept=kept, committed=(committed, next_one), disk=changed)
        if number < len(events):
            event = events[number]
            if event.what == "acknowledge":
                committed = event.num_steps
            elif event.what.startswith("sync"):
                _settle(disk, open_events, event)
            else:
                open_events[number] = event


def _settle(disk: Disk, open_events: dict[int, Event], sync: Event) -> None:
    """What the sync covers is on the drive now."""
    for number, event in list(open_events.items()):
        if number in sync.covers and _is_covered(event, sync):
            disk.apply(event)
            del open_events[number]


def _is_covered(event: Event, sync: Event) -> bool:
    if sync.what == "sync":
        return event.what in ("write", "grow") and event.file == sync.file
    return event.what in ("link", "unlink", "folder") and Path(event.path).parent.as_posix() == sync.path


def _subsets(
    disk: Disk, open_events: Mapping[int, Event], rng: random.Random, num_random: int
) -> Iterator[tuple[str, Disk]]:
    def with_these(numbers: Sequence[int]) -> Disk:
        changed = disk.copy()
        for number in numbers:
            changed.apply(open_events[number])
        return changed

    numbers = list(open_events)
    yield "none", with_these([])
    if not numbers:
        return
    yield "all", with_these(numbers)
    if len(numbers) > 1:
        for number in numbers:
            what = f"{open_events[number].what} {open_events[number].path}"
            yield f"only {what}", with_these([number])
            yield f"all but {what}", with_these([n for n in numbers if n != number])
    for _ in range(num_random):
        changed, happens = disk.copy(), partial(_happens, rng, rng.random())
        for number in numbers:
            if open_events[number].what == "write":
                changed.apply(open_events[number], happens)
            elif happens():
                changed.apply(open_events[number])
        yield "some pages", changed


def _happens(rng: random.Random, share: float, page: int = 0) -> bool:
    return rng.random() < share
