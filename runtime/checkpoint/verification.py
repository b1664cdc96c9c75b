"""Whether everything that a run's last commit names is where it should be and what was written, byte by byte."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tierplan.runtime.checkpoint.commits import Commit, CommitError, CommitLog
from tierplan.runtime.memory.store import DamageError, Extent, Store


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A commit that is whole."""

    num_steps: int
    num_contents: int
    size_bytes: int

    def __str__(self) -> str:
        return (
            f"the commit after {self.num_steps} steps is whole: {self.num_contents} contents, {self.size_bytes:,} bytes"
        )


def verify_commit(folder: str | os.PathLike[str], nvme_dirs: Sequence[str | os.PathLike[str]] = ()) -> Verified:
    """Reads all of a run's last commit, in little memory.

    `nvme_dirs` are the folders of its NVMe tier now, if they are not where they were.

    Raises `CommitError` that names every damaged content, and `StoreError` for files that are not there or in use.
    """
    if not Path(folder).is_dir():
        raise CommitError(f"{folder} is not there; give the folder of a run")
    log = CommitLog(folder)
    lock = log.lock()
    try:
        commit = log.last()
        if commit is None:
            raise CommitError(f"{folder} holds no commit; nothing can be resumed from it")
        damage = [*_in_memory(log, commit), *_in_store(commit, nvme_dirs)]
    finally:
        os.close(lock)
    if damage:
        raise CommitError("; ".join(damage))
    return Verified(
        num_steps=commit.num_steps,
        num_contents=len(commit.contents),
        size_bytes=sum(where.size_bytes for where in commit.contents.values() if not where.is_absent),
    )


def _in_memory(log: CommitLog, commit: Commit) -> list[str]:
    """What is wrong with contents that were in memory."""
    problems = []
    for name, where in commit.contents.items():
        if not where.in_store and not where.is_absent:
            try:
                log.read_resident(commit, name)
            except CommitError as error:
                problems.append(str(error))
    return problems


def _in_store(commit: Commit, nvme_dirs: Sequence[str | os.PathLike[str]]) -> list[str]:
    """What is wrong with contents on the NVMe tier."""
    if commit.seal is None:
        return []
    store = Store(nvme_dirs or commit.folders, pattern=commit.stripes, run_id=commit.run_id)
    try:
        store.expect(commit.store_bytes)
        problems = []
        for name, where in {**commit.contents, "the seal": commit.seal}.items():
            if where.in_store:
                extent = Extent(where.offset_bytes, where.size_bytes)
                store.allocate_at(extent, where.xxh3)
                try:
                    store.verify(extent)
                except DamageError as error:
                    problems.append(f"{name!r} is damaged: {error}")
        return problems
    finally:
        store.close()
