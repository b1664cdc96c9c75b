"""Mistakes in how a run keeps its commits, put in on purpose: the checker must find each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from tierplan.runtime.checkpoint.commits import CommitLog
from tierplan.runtime.execution.values import Places
from tierplan.runtime.memory import files
from tierplan.runtime.memory.store import Store


@contextmanager
def without_sync_of(part: str) -> Iterator[None]:
    real = files.sync_file

    def sync_file(fd: int, path: Path) -> None:
        if part not in path.name:
            real(fd, path)

    with mock.patch("tierplan.runtime.memory.files.sync_file", sync_file):
        yield


@contextmanager
def without_sync_of_folders() -> Iterator[None]:
    with mock.patch("tierplan.runtime.memory.files.sync_folder", return_value=None):
        yield


@contextmanager
def synced_in_place(*, is_renamed: bool) -> Iterator[None]:
    """The content is synced under its own name, to which the file has been renamed, or with which it is written."""

    def replace_content(path: Path, content: bytes) -> None:
        written = path.with_suffix(".tmp") if is_renamed else path
        fd = files.create_file(written)
        files.write_at(fd, written, [memoryview(content)], 0)
        if is_renamed:
            files.rename_file(written, path)
        files.sync_file(fd, path)
        os.close(fd)
        files.sync_folder(path.parent)

    with mock.patch("tierplan.runtime.memory.files.replace_content", replace_content):
        yield


@contextmanager
def committed_extents_written_over() -> Iterator[None]:
    with mock.patch.object(Places, "keep", return_value=None), mock.patch.object(Places, "commit", return_value=None):
        yield


@contextmanager
def record_before_the_data() -> Iterator[None]:
    """The store is synced when the record is written, not before."""
    real, stores = CommitLog.write, list[Store]()

    def write(log: CommitLog, commit: Any) -> None:
        real(log, commit)
        for store in stores:
            sync(store)

    def note(store: Store) -> None:
        stores.append(store)

    sync = Store.sync
    with mock.patch.object(Store, "sync", note), mock.patch.object(CommitLog, "write", write):
        yield


PLANTED: Mapping[str, tuple[str, Callable[[], AbstractContextManager[Any]]]] = {
    "no sync of the tier": ("everything on NVMe", partial(without_sync_of, "tierplan.tier")),
    "no sync of the resident file": ("everything in memory", partial(without_sync_of, "resident")),
    "no sync of the record": ("everything in memory", partial(without_sync_of, "commit")),
    "no sync of folders": ("everything in memory", without_sync_of_folders),
    "the record is renamed before it is synced": ("everything in memory", partial(synced_in_place, is_renamed=True)),
    "the record is written in place": ("everything in memory", partial(synced_in_place, is_renamed=False)),
    "committed extents are written over": ("everything on NVMe", committed_extents_written_over),
    "the record comes before the data": ("states in parts", record_before_the_data),
}
"""The mistake, and a plan that shows it."""
