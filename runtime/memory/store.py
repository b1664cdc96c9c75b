"""The NVMe tier: extents of preallocated files in folders that the user names, read and written past the page cache.

One file per folder. Data is striped over the folders (`striping`), in proportion to the speed of each drive where that
is known (`measure_weights`). Each folder has its own threads, so a slow drive does not block the others. Where a folder
does not take O_DIRECT, its file is used through the page cache and `notes` says so.

    StoreError(OSError)      a folder that cannot be used: missing, not writable, full, in use, failing
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from tierplan.runtime.memory.arena import PAGE_BYTES, map_host, padded
from tierplan.runtime.memory.striping import REQUEST_BYTES, Striping, stripe_pattern

__all__ = ["Extent", "Store", "StoreError", "measure_weights"]

STAGING_BYTES = 8 << 20
FILE_NAME = "tierplan.tier"
PROBE_NAME = "tierplan.probe"
PROBE_BYTES = 64 << 20
OWNER_NAME = "tierplan.owner.json"
RECORD_NAME = "commit.json"
"""In the folder of the run that owns a file: without it, or with another run's, the claim is void."""


class StoreError(OSError):
    """A folder that cannot be used as a tier, or a drive that failed. Names the folder and what to do."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of the store's address space, whole pages."""

    offset_bytes: int
    size_bytes: int
    """The bytes asked for; the extent covers whole pages."""


class _File:
    """The preallocated file in one folder, with its threads."""

    def __init__(self, folder: Path, num_threads: int, run_id: str, name: str = FILE_NAME) -> None:
        self.folder = folder
        self.path = folder / name
        self.owner_path = folder / OWNER_NAME
        self.size_bytes = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock_fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise StoreError(
                error.errno, f"cannot create {self.path}: {error.strerror}; give a folder that you may write to"
            ) from error
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock_fd)
            raise StoreError(
                error.errno, f"{self.path} is in use by another run; wait for it, or give another folder"
            ) from error
        try:
            if name == FILE_NAME:
                self._check_owner(run_id)
        except StoreError:
            os.close(lock_fd)
            raise
        self._lock_fd = lock_fd  # a second descriptor, opened for direct access, does the I/O
        self.note = ""
        try:
            self.fd = os.open(self.path, os.O_RDWR | getattr(os, "O_DIRECT", 0))
            self.direct = hasattr(os, "O_DIRECT")
            if self.direct:
                self._try_direct()
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                os.close(lock_fd)
                raise StoreError(error.errno, f"cannot use {self.path}: {error.strerror}") from error
            self.direct = False
        if not self.direct:
            self.fd = os.open(self.path, os.O_RDWR)
            self.note = (
                f"{folder} does not take O_DIRECT: its file goes through the page cache, at the cost of memory; "
                "speeds measured there are those of the cache"
            )
        self.size_bytes = os.fstat(self.fd).st_size
        self.threads = ThreadPoolExecutor(num_threads, thread_name_prefix=f"tierplan-{folder.name}")

    def _check_owner(self, run_id: str) -> None:
        if not self.owner_path.exists():
            return
        owner = json.loads(self.owner_path.read_text(encoding="utf-8"))
        record = Path(owner["run_folder"]) / RECORD_NAME
        is_alive = record.exists() and owner["run_id"] in record.read_text(encoding="utf-8")
        if is_alive and owner["run_id"] != run_id:
            raise StoreError(
                errno.EBUSY,
                f"{self.path} holds committed states of the run in {owner['run_folder']}; resume that run, give "
                "another folder, or remove that run's folder if it is no longer wanted",
            )

    def _try_direct(self) -> None:
        """Some file systems accept the flag and refuse the first transfer."""
        if os.fstat(self.fd).st_size < PAGE_BYTES:
            os.posix_fallocate(self._lock_fd, 0, PAGE_BYTES)
        probe = map_host(PAGE_BYTES)
        try:
            os.preadv(self.fd, [probe.numpy().data], 0)
        except OSError:
            os.close(self.fd)
            raise

    def grow(self, size_bytes: int) -> None:
        """Preallocates the file up to this size, after checking that the drive has the room."""
        if size_bytes <= self.size_bytes:
            return
        held = os.fstat(self.fd).st_blocks * 512
        disk = os.statvfs(self.folder)
        free = disk.f_bavail * disk.f_frsize
        if size_bytes - held > free:
            raise StoreError(
                errno.ENOSPC,
                f"{self.folder} has {free:,} bytes free, but the plan needs {size_bytes - held:,} more there; "
                "free space, give another folder, or lower the NVMe budget",
            )
        try:
            os.posix_fallocate(self._lock_fd, 0, size_bytes)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
                os.ftruncate(self._lock_fd, size_bytes)
            else:
                raise StoreError(
                    error.errno, f"could not reserve {size_bytes:,} bytes in {self.path}: {error.strerror}"
                ) from error
        self.size_bytes = size_bytes

    def transfer(self, verb: str, views: Sequence[memoryview], offset: int) -> None:
        """Reads into or writes from the views, one after the other, from a file offset on; goes on after short ones."""
        call: Callable[..., int] = os.preadv if verb == "read" else os.pwritev
        size, done, left = sum(map(len, views)), 0, list(views)
        while done < size:
            try:
                moved = call(self.fd, left, offset + done)
            except OSError as error:
                raise StoreError(
                    error.errno,
                    f"could not {verb} {size:,} bytes at {offset + done:,} of {self.path}: {error.strerror}",
                ) from error
            if moved == 0:
                raise StoreError(
                    errno.EIO, f"{self.path} ended at {offset + done:,}, before the data that it should hold"
                )
            if self.direct and moved % PAGE_BYTES and done + moved < size:
                moved -= moved % PAGE_BYTES  # a short transfer may stop inside a page; O_DIRECT needs whole ones
            done += moved
            while left and moved >= len(left[0]):
                moved -= len(left.pop(0))
            if moved:
                left[0] = left[0][moved:]

    def close(self) -> None:
        self.threads.shutdown(wait=True, cancel_futures=True)
        os.close(self.fd)
        os.close(self._lock_fd)


class Store:
    """Extents over one file per folder. Thread-safe; `read` and `write` return when the data is where it should be."""

    def __init__(
        self,
        folders: Sequence[str | os.PathLike[str]],
        *,
        weights: Sequence[float] = (),
        pattern: Sequence[int] = (),
        num_threads: int = 2,
        run_id: str = "",
    ) -> None:
        """Opens the folders; `weights` are their relative speeds (equal if not given).

        `pattern` is the round of stripes that the data in the files was written with, if there is any: it counts, and
        not the weights. `num_threads` requests are in flight per folder. A folder that holds committed data is opened
        for the run of that `run_id` only. Raises `StoreError`.
        """
        if not folders:
            raise StoreError(errno.EINVAL, "the NVMe tier needs at least one folder")
        if weights and len(weights) != len(folders):
            raise StoreError(errno.EINVAL, f"{len(weights)} weights for {len(folders)} folders; give one each")
        if pattern and set(pattern) != set(range(len(folders))):
            raise StoreError(
                errno.EINVAL,
                f"the data lies on {max(pattern) + 1} folders, but {len(folders)} were given; give the same folders in "
                "the same order",
            )
        self._striping = Striping(tuple(pattern) or stripe_pattern(weights or [1.0] * len(folders)))
        self._files: list[_File] = []
        try:
            for folder in folders:
                self._files.append(_File(Path(folder), num_threads, run_id))
        except BaseException:
            self.close()
            raise
        self._free: list[tuple[int, int]] = []  # offset, length; by offset, never adjacent
        self._end_bytes = 0
        self._lock = threading.Lock()
        self._bounce = threading.local()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know: folders without O_DIRECT."""
        return tuple(f.note for f in self._files if f.note)

    @property
    def pattern(self) -> tuple[int, ...]:
        """One round of stripes, as indices of folders."""
        return self._striping.pattern

    @property
    def direct(self) -> bool:
        """Whether every folder takes O_DIRECT."""
        return all(f.direct for f in self._files)

    def claim(self, run_id: str, run_folder: str) -> None:
        """Notes in every folder whose committed data its file holds, so that no other run writes over it."""
        for file in self._files:
            record = json.dumps({"run_id": run_id, "run_folder": run_folder})
            whole = file.owner_path.with_suffix(".tmp")  # a kill while it is written must not leave half of it
            whole.write_text(record, encoding="utf-8")
            whole.replace(file.owner_path)

    @property
    def size_bytes(self) -> int:
        """Address space in use or freed: what the files together must hold."""
        return self._end_bytes

    def reserve(self, size_bytes: int) -> None:
        """Makes room for so many bytes on the drives now, so that a full disk is an error before the run."""
        for file, share in zip(self._files, self._striping.shares(padded(size_bytes)), strict=True):
            file.grow(share)

    def allocate(self, size_bytes: int) -> Extent:
        """An extent of whole pages, the first free range that fits; the files grow when none does."""
        room = padded(size_bytes)
        with self._lock:
            for k, (offset, length) in enumerate(self._free):
                if length >= room:
                    if length == room:
                        del self._free[k]
                    else:
                        self._free[k] = (offset + room, length - room)
                    return Extent(offset, size_bytes)
            offset = self._end_bytes
            if self._free and sum(self._free[-1]) == offset:
                offset = self._free.pop()[0]
            for file, share in zip(self._files, self._striping.shares(offset + room), strict=True):
                file.grow(share)
            self._end_bytes = offset + room
            return Extent(offset, size_bytes)

    def allocate_at(self, extent: Extent) -> None:
        """Takes a known extent, of an earlier run, into use. Call before any `allocate`."""
        with self._lock:
            end = extent.offset_bytes + padded(extent.size_bytes)
            if end > self._end_bytes:
                if extent.offset_bytes > self._end_bytes:
                    self._free.append((self._end_bytes, extent.offset_bytes - self._end_bytes))
                self._end_bytes = end
                return
            for k, (offset, length) in enumerate(self._free):
                if offset <= extent.offset_bytes and end <= offset + length:
                    rest = [(offset, extent.offset_bytes - offset), (end, offset + length - end)]
                    self._free[k : k + 1] = [r for r in rest if r[1]]
                    return
            raise StoreError(errno.EINVAL, f"{extent} overlaps one that is in use; the record of extents is damaged")

    def free(self, extent: Extent) -> None:
        """Gives an extent back; its range may be allocated again at once."""
        with self._lock:
            self._free.append((extent.offset_bytes, padded(extent.size_bytes)))
            self._free.sort()
            merged: list[tuple[int, int]] = []
            for offset, length in self._free:
                if merged and sum(merged[-1]) == offset:
                    merged[-1] = (merged[-1][0], merged[-1][1] + length)
                else:
                    merged.append((offset, length))
            self._free = merged

    def read(self, extent: Extent, into: torch.Tensor) -> None:
        """Fills a uint8 tensor of the extent's size, or of its size in whole pages (which avoids a copy)."""
        self._move("read", extent, into)

    def write(self, extent: Extent, data: torch.Tensor) -> None:
        """Writes a uint8 tensor of the extent's size, or of its size in whole pages (which avoids a copy)."""
        self._move("write", extent, data)

    def sync(self) -> None:
        """Returns when everything written is on the drives."""
        for file in self._files:
            try:
                os.fdatasync(file.fd)
            except OSError as error:
                raise StoreError(error.errno, f"could not sync {file.path}: {error.strerror}") from error

    def close(self, *, remove: bool = False) -> None:
        """Closes the files, and removes them if asked."""
        for file in self._files:
            file.close()
            if remove:
                file.path.unlink(missing_ok=True)
                file.owner_path.unlink(missing_ok=True)
        self._files = []

    # ---- transfers ----

    def _move(self, verb: str, extent: Extent, tensor: torch.Tensor) -> None:
        room = padded(extent.size_bytes)
        if tensor.numel() not in (extent.size_bytes, room):
            raise ValueError(
                f"{tensor.numel()} bytes of memory for an extent of {extent.size_bytes}; they must be equal"
            )
        pages = _whole_pages(tensor, room)
        if pages is not None:
            self._transfer(verb, extent.offset_bytes, pages)
            return
        for at in range(0, room, STAGING_BYTES):
            part = tensor[at : at + STAGING_BYTES]
            staging = self._staging()[: padded(part.numel())]
            if verb == "write":
                staging[: part.numel()].copy_(part)
            self._transfer(verb, extent.offset_bytes + at, staging)
            if verb == "read":
                part.copy_(staging[: part.numel()])

    def _transfer(self, verb: str, offset: int, pages: torch.Tensor) -> None:
        view = pages.numpy().data
        requests = self._striping.requests(offset, len(view))
        work = [
            (self._files[k], [view[at : at + size] for at, size in parts], in_file) for k, in_file, parts in requests
        ]
        if len(work) == 1:
            file, views, in_file = work[0]
            file.transfer(verb, views, in_file)
        else:
            moves: list[Future[None]] = [
                file.threads.submit(file.transfer, verb, views, in_file) for file, views, in_file in work
            ]
            errors = [error for move in moves if (error := move.exception()) is not None]
            if errors:
                raise errors[0]
        for k in {request.file for request in requests}:
            if not self._files[k].direct:
                os.posix_fadvise(self._files[k].fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def _staging(self) -> torch.Tensor:
        """Aligned memory of this thread, for callers whose own is not."""
        memory = getattr(self._bounce, "memory", None)
        if memory is None:
            memory = self._bounce.memory = map_host(STAGING_BYTES)
        return memory


def _whole_pages(tensor: torch.Tensor, room: int) -> torch.Tensor | None:
    """The tensor's memory up to the end of its last page, if it starts on a page and its storage goes that far."""
    if tensor.data_ptr() % PAGE_BYTES or not tensor.is_contiguous():
        return None
    storage, offset = tensor.untyped_storage(), int(tensor.storage_offset())
    if storage.nbytes() < offset + room:
        return None
    return torch.empty(0, dtype=torch.uint8).set_(storage, offset, (room,), (1,))


def measure_weights(folders: Sequence[str | os.PathLike[str]], *, probe_bytes: int = PROBE_BYTES) -> list[float]:
    """Bytes per second of each folder's drive, written and read in equal parts; the median of three turns.

    A file of its own in each folder is written, read and removed.
    """
    memory = map_host(probe_bytes)
    memory.random_(0, 256)
    view = memory.numpy().data
    seconds: list[list[float]] = [[] for _ in folders]
    files: list[_File] = []
    try:
        for folder in folders:
            files.append(_File(Path(folder), 1, "", PROBE_NAME))
            files[-1].grow(probe_bytes)
        for turn in range(4):
            for file, times in zip(files, seconds, strict=True):
                began = time.perf_counter()
                for verb in ("write", "read"):
                    for at in range(0, probe_bytes, REQUEST_BYTES):
                        file.transfer(verb, [view[at : at + REQUEST_BYTES]], at)
                    os.fdatasync(file.fd)
                if turn:  # the first write into fresh blocks is slower
                    times.append(time.perf_counter() - began)
    finally:
        for file in files:
            file.close()
            file.path.unlink(missing_ok=True)
    return [2 * probe_bytes / statistics.median(times) for times in seconds]
