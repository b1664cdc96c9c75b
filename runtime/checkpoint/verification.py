"""Whether everything that a run's last commit names is where it should be and what was written, byte by byte."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from tierplan.runtime.checkpoint.commits import Commit, CommitError, CommitLog
from tierplan.runtime.memory.store import DamageError, Extent, Store


def verify_commit(folder: str | os.PathLike[str], nvme_dirs: Sequence[str | os.PathLike[str]] = ()) -> str:
    """Reads all of a run's last commit, in little memory; says what is whole.

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
        if damage := list(_damage(log, commit, nvme_dirs)):
            raise CommitError("; ".join(damage))
    finally:
        os.close(lock)
    size_bytes = sum(where.size_bytes for where in commit.contents.values() if not where.is_absent)
    return f"the commit after {commit.num_steps} steps is whole: {len(commit.contents)} contents, {size_bytes:,} bytes"


def _damage(log: CommitLog, commit: Commit, nvme_dirs: Sequence[str | os.PathLike[str]]) -> Iterator[str]:
    """What is wrong with contents that were in memory, and with those on the NVMe tier."""
    for name, where in commit.contents.items():
        if not where.in_store and not where.is_absent:
            try:
                log.read_resident(commit, name)
            except CommitError as error:
                yield str(error)
    if commit.seal is None:
        return
    with closing(Store(nvme_dirs or commit.folders, pattern=commit.stripes, run_id=commit.run_id)) as store:
        store.expect(commit.store_bytes)
        for name, where in {**commit.contents, "the seal": commit.seal}.items():
            if where.in_store:
                extent = Extent(where.offset_bytes, where.size_bytes)
                store.allocate_at(extent, where.xxh3)
                try:
                    store.verify(extent)
                except DamageError as error:
                    yield f"{name!r} is damaged: {error}"
