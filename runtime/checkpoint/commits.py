"""Committed steps: a run that dies at any moment can go on from the last one, bit for bit.

A commit names, for every buffer that outlives a step, where its bytes are. What lies on the NVMe tier is committed
where it lies: the extents of the last commit are never written again before the next commit, so a step that rewrites
them goes to others (two regions per buffer, used in turn). What lies in memory goes to a file beside the record. The
order is: data, `fdatasync`, then one small record that replaces the old one by an atomic rename.

A run's folder holds

    commit.json         the record of the last commit
    resident-N.bin      what was in memory after N steps

    CommitError(ValueError)   a run that cannot be resumed: nothing committed, another run's files, other settings,
    damage
"""

from __future__ import annotations

import json
import os
import reprlib
import zlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

__all__ = ["Commit", "CommitError", "CommitLog", "Stored"]

FORMAT = "tierplan-commit"
VERSION = 1


class CommitError(ValueError):
    """A run that cannot be resumed. Says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Where the bytes of one content are."""

    size_bytes: int
    offset_bytes: int
    """In the store's address space, or in the resident file."""
    in_store: bool
    crc32: int = 0
    """Of bytes in the resident file; those in the store are vouched for by its seal."""
    is_absent: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The state of training after `num_steps` steps."""

    num_steps: int
    run_id: str
    contents: Mapping[str, Stored]
    settings: Mapping[str, Any]
    """What must be the same for the numbers to be the same."""
    losses: tuple[float, ...] = ()
    seal: Stored | None = None
    """A page in the store that names the run and the step."""
    stripes: tuple[int, ...] = ()
    """How the store's data is dealt out to its folders; empty if nothing is in the store."""
    rng: tuple[str, ...] = ()
    """States of PyTorch's generators, in hexadecimal, where the run draws from them."""
    notes: Mapping[str, Any] = field(default_factory=dict)


class CommitLog:
    """The commits of one run, in its folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._record = self.folder / "commit.json"

    def last(self) -> Commit | None:
        """The last commit; None if there is none. Raises `CommitError` for a record that cannot be read."""
        try:
            record = json.loads(self._record.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise CommitError(
                f"{self._record} is not a commit record: {error}; start the run anew elsewhere"
            ) from error
        if (record.get("format"), record.get("version")) != (FORMAT, VERSION):
            raise CommitError(
                f"{self._record} has format {record.get('format')!r} version {record.get('version')!r}; this version "
                f"of tierplan resumes {FORMAT!r} version {VERSION}"
            )
        del record["format"], record["version"]
        record["contents"] = {name: Stored(**where) for name, where in record["contents"].items()}
        record["seal"] = Stored(**record["seal"]) if record["seal"] else None
        for name in ("losses", "rng", "stripes"):
            record[name] = tuple(record.get(name, ()))
        return Commit(**record)

    def resident_path(self, num_steps: int) -> Path:
        return self.folder / f"resident-{num_steps}.bin"

    def write_resident(self, num_steps: int, contents: Mapping[str, Callable[[], torch.Tensor]]) -> dict[str, Stored]:
        """Writes bytes to the resident file, one content at a time, and returns where they are."""
        found = {}
        with self.resident_path(num_steps).open("wb") as file:
            for name, memory in contents.items():
                data = memory().numpy().data
                found[name] = Stored(
                    size_bytes=len(data), offset_bytes=file.tell(), in_store=False, crc32=zlib.crc32(data)
                )
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        return found

    def read_resident(self, commit: Commit, name: str) -> torch.Tensor:
        """The bytes of one content. Raises `CommitError` if they are not those that were written."""
        where, path = commit.contents[name], self.resident_path(commit.num_steps)
        out = torch.empty(where.size_bytes, dtype=torch.uint8)
        try:
            with path.open("rb") as file:
                file.seek(where.offset_bytes)
                num_read = file.readinto(out.numpy().data)  # type: ignore[attr-defined]
        except FileNotFoundError as error:
            raise CommitError(f"{path}, which the last commit needs, is missing; the run cannot be resumed") from error
        if num_read != where.size_bytes or zlib.crc32(out.numpy().data) != where.crc32:
            raise CommitError(f"{name!r} in {path} is damaged; the run cannot be resumed from it")
        return out

    def write(self, commit: Commit) -> None:
        """Makes this commit the last one, at once and for good."""
        record = {"format": FORMAT, "version": VERSION, **asdict(commit)}
        temporary = self._record.with_suffix(".tmp")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(record, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._record)
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        for old in self.folder.glob("resident-*.bin"):
            if old != self.resident_path(commit.num_steps):
                old.unlink()


def check_settings(commit: Commit, settings: Mapping[str, Any]) -> None:
    """Raises `CommitError` unless the run to resume has these settings."""
    _check_equal("", commit.settings, json.loads(json.dumps(settings)))


def _check_equal(name: str, before: object, now: object) -> None:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in sorted(before.keys() | now.keys()):
            _check_equal(f"{name}.{key}" if name else key, before.get(key), now.get(key))
    elif before != now:
        raise CommitError(
            f"the run was made with {name} = {reprlib.repr(before)}, and is to be resumed with {reprlib.repr(now)}; "
            "that would change its numbers. Use the old setting, or start a new run"
        )
