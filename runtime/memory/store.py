"""The NVMe tier: extents of preallocated files in folders that the user names, read and written past the page cache.

One file per folder (`tier_file`). Data is striped over the folders (`striping`), in proportion to the speed of each
drive where that is known (`measure_weights`). Each folder has its own threads, so a slow drive does not block the
others. Where a folder does not take O_DIRECT, its file is used through the page cache and `notes` says so.

Bytes that are not those that were written are an error, never a result. The store takes two checksums from memory as an
extent is written. That of a *sample*, the first cache line of each page, is taken of every extent and compared whenever
it is read: a page that was zeroed, lost, put elsewhere, or is an older one, is found, for a tenth of the time that all
bytes would take. That of *all bytes* is taken of what will be committed, and compared by `verify`.

    StoreError(OSError)             a folder that cannot be used: missing, not writable, full, in use, failing
    └── DamageError                 an extent that does not hold what was written to it
"""

from __future__ import annotations

import errno
import statistics
import threading
import time
from bisect import bisect, insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from xxhash import xxh3_64

from tierplan.runtime.memory.arena import PAGE_BYTES, map_host, padded
from tierplan.runtime.memory.files import Folder, StoreError
from tierplan.runtime.memory.striping import REQUEST_BYTES, Request, Striping, stripe_pattern
from tierplan.runtime.memory.tier_file import FILE_NAME, PROBE_NAME, Owner, TierFile

NUM_THREADS = 2
"""For each folder: so many requests are in flight there."""
STAGING_BYTES = 8 << 20
PROBE_BYTES = 64 << 20
SAMPLE_BYTES = 64
"""Of each page."""
VERIFY_BYTES = 64 << 20
"""Read at a time where an extent is only looked at: as many requests as keep a few drives busy."""


class DamageError(StoreError):
    """An extent that does not hold what was written to it."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of the store's address space, whole pages."""

    offset_bytes: int
    size_bytes: int
    """The bytes asked for; the extent covers whole pages."""

    @property
    def range(self) -> tuple[int, int]:
        """Where its pages begin and end."""
        return self.offset_bytes, self.offset_bytes + padded(self.size_bytes)


class Store:
    """Extents over one file per folder. Thread-safe; `read` and `write` return when the data is where it should be."""

    def __init__(
        self,
        folders: Sequence[Folder],
        *,
        weights: Sequence[float] = (),
        pattern: Sequence[int] = (),
        run_id: str = "",
    ) -> None:
        """Opens the folders; `weights` are their relative speeds (equal if not given).

        `pattern` is the round of stripes that the data in the files was written with, if there is any: it counts, and
        not the weights. A folder that holds committed data is opened for the run of that `run_id` only. Raises
        `StoreError`.
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
        for path in [Path(folder) / FILE_NAME for folder in folders] if pattern else ():
            if not path.exists():  # before anything is made there
                raise StoreError(
                    errno.ENOENT,
                    f"{path}, which the last commit needs, is missing; give the folder that the run was made with",
                )
        self._striping = Striping(tuple(pattern) or stripe_pattern(weights or [1.0] * len(folders)))
        self._files: list[TierFile] = []
        try:
            for folder in folders:
                self._files.append(TierFile(Path(folder), NUM_THREADS, run_id))
        except BaseException:
            self.close()
            raise
        self.pattern, self.paths = self._striping.pattern, tuple(f.path for f in self._files)
        """One round of stripes, as indices of folders; and the files."""
        self._used: list[tuple[int, int]] = []  # where extents begin and end, in order
        self.size_bytes = 0
        """Address space in use or freed: what the files together must hold."""
        self._lock = threading.Lock()
        self._bounce = threading.local()
        self._samples: dict[Extent, str] = {}
        self._checksums: dict[Extent, str] = {}
        """Of those extents that were written to be committed, or verified since."""

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know: folders without O_DIRECT."""
        return tuple(f.note for f in self._files if f.note)

    def claim(self, run_id: str, run_folder: str) -> None:
        """Notes in every folder whose committed data its file holds, so that no other run writes over it."""
        for file in self._files:
            file.claim(Owner(run_id=run_id, run_folder=run_folder))

    def check(self) -> None:
        """Raises `StoreError` unless every file is where and what it was: its name, its length, its first page."""
        with self._lock:  # nothing grows meanwhile
            for file in self._files:
                file.check()

    def reserve(self, size_bytes: int) -> None:
        """Makes room for so many bytes on the drives now, so that a full disk is an error before the run."""
        for file, share in zip(self._files, self._striping.shares(padded(size_bytes)), strict=True):
            file.grow(share)

    def expect(self, size_bytes: int) -> None:
        """Raises `StoreError` unless the files are as long as an address space of this size, left by an earlier run."""
        for file, share in zip(self._files, self._striping.shares(size_bytes), strict=True):
            if file.size_bytes < share:
                raise StoreError(
                    errno.EIO,
                    f"{file.path} is not that of the last commit, or was cut short: it has {file.size_bytes:,} bytes "
                    f"of data, and {share:,} were committed. Give the folder that the run was made with, or put back a "
                    "whole copy of its file",
                )

    def allocate(self, size_bytes: int) -> Extent:
        """An extent of whole pages, the first free range that fits; the files grow when none does."""
        room, offset = padded(size_bytes), 0
        with self._lock:
            for begin, end in self._used:
                if begin - offset >= room:
                    break
                offset = end
            if offset + room > self.size_bytes:
                for file, share in zip(self._files, self._striping.shares(offset + room), strict=True):
                    file.grow(share)
                self.size_bytes = offset + room
            insort(self._used, (offset, offset + room))
            return Extent(offset, size_bytes)

    def allocate_at(self, extent: Extent, checksum: str) -> None:
        """Takes a known extent, of an earlier run, into use. Call before any `allocate`."""
        begin, end = extent.range
        with self._lock:
            at = bisect(self._used, (begin, end))
            around = [*self._used[max(at - 1, 0) : at], (begin, end), *self._used[at : at + 1]]
            if begin % PAGE_BYTES or any(one[1] > other[0] for one, other in pairwise(around)):
                names = ", ".join(str(path) for path in self.paths)
                raise StoreError(
                    errno.EINVAL,
                    f"{names}: {extent} overlaps one that is in use; the record of what lies there is damaged",
                )
            self._used.insert(at, (begin, end))
            self._checksums[extent] = checksum
            self.size_bytes = max(self.size_bytes, end)

    def free(self, extent: Extent) -> None:
        """Gives an extent back; its range may be allocated again at once."""
        with self._lock:
            self._forget(extent)
            self._used.remove(extent.range)

    def read(self, extent: Extent, into: torch.Tensor) -> None:
        """Fills a uint8 tensor of the extent's size, or of its size in whole pages (which avoids a copy).

        Raises `DamageError` when the sample is not that of what was written.
        """
        self._move("read", extent, into)
        sample = _sample(into[: extent.size_bytes]).hexdigest()
        if sample != self._samples.get(extent, sample):
            raise self._damage(extent)

    def write(self, extent: Extent, data: torch.Tensor, *, will_be_committed: bool = False) -> None:
        """Writes a uint8 tensor of the extent's size, or of its size in whole pages (which avoids a copy)."""
        self._forget(extent)
        content = data[: extent.size_bytes]
        sample = _sample(content).hexdigest()
        digest = xxh3_64() if will_be_committed else None
        self._move("write", extent, data, digest)
        self._samples[extent] = sample
        if digest is not None:
            self._checksums[extent] = digest.hexdigest()

    def _forget(self, extent: Extent) -> None:
        self._samples.pop(extent, None)
        self._checksums.pop(extent, None)

    def checksum(self, extent: Extent) -> str | None:
        """Of all its bytes: XXH3 of 64 bits, in hexadecimal; None where it was not taken as they were written."""
        return self._checksums.get(extent)

    def verify(self, extent: Extent) -> str:
        """Reads the extent, which may be larger than memory, and drops it; the checksum of all its bytes.

        Raises `DamageError` when it does not hold what was written, as far as is known.
        """
        digest, sample, room = xxh3_64(), xxh3_64(), padded(extent.size_bytes)
        memory = map_host(min(room, VERIFY_BYTES)) if room else torch.empty(0, dtype=torch.uint8)
        for at in range(0, room, VERIFY_BYTES):
            pages = memory[: min(VERIFY_BYTES, room - at)]
            self._transfer("read", extent.offset_bytes + at, pages)
            content = pages[: extent.size_bytes - at]
            digest.update(content.numpy().data)
            _sample(content, sample)
        checksum = digest.hexdigest()
        if sample.hexdigest() != self._samples.setdefault(extent, sample.hexdigest()):
            raise self._damage(extent)
        if checksum != self._checksums.setdefault(extent, checksum):
            raise self._damage(extent)
        return checksum

    def _damage(self, extent: Extent) -> DamageError:
        return DamageError(
            errno.EIO,
            f"{', '.join(str(path) for path in self.paths)}: the {extent.size_bytes:,} bytes at "
            f"{extent.offset_bytes:,} of the tier are not those that were written there; the drive or another program "
            "changed them. Nothing was computed from them",
        )

    def sync(self) -> None:
        """Returns when everything written is on the drives."""
        for file in self._files:
            file.sync()

    def close(self, *, remove: bool = False) -> None:
        """Closes the files, and removes them if asked."""
        while self._files:
            self._files.pop().close(remove=remove)

    # ---- transfers ----

    def _move(self, verb: str, extent: Extent, tensor: torch.Tensor, digest: xxh3_64 | None = None) -> None:
        """Between the extent and memory; the digest takes the bytes while they are on their way."""
        room = padded(extent.size_bytes)
        if tensor.numel() not in (extent.size_bytes, room):
            raise ValueError(
                f"{tensor.numel()} bytes of memory for an extent of {extent.size_bytes}; they must be equal"
            )
        pages = _whole_pages(tensor, room)
        if pages is not None:
            self._transfer(verb, extent.offset_bytes, pages, digest, extent.size_bytes)
            return
        for at in range(0, room, STAGING_BYTES):
            part = tensor[at : at + STAGING_BYTES]
            staging = self._staging()[: padded(part.numel())]
            if verb == "write":
                staging[: part.numel()].copy_(part)
            self._transfer(verb, extent.offset_bytes + at, staging, digest, extent.size_bytes - at)
            if verb == "read":
                part.copy_(staging[: part.numel()])

    def _transfer(
        self, verb: str, offset: int, pages: torch.Tensor, digest: xxh3_64 | None = None, size_bytes: int = 0
    ) -> None:
        """Moves whole pages; the digest takes the first `size_bytes` of them meanwhile."""
        view = pages.numpy().data
        requests = self._striping.requests(offset, len(view))

        def move(request: Request) -> None:
            views = [view[at : at + size] for at, size in request.parts]
            self._files[request.file].move(verb, views, request.offset_bytes)

        moves = [self._files[r.file].threads.submit(move, r) for r in requests] if len(requests) > 1 else []
        if digest is not None:
            digest.update(view[: min(len(view), size_bytes)])
        if len(requests) == 1:
            move(requests[0])
        errors = [error for moved in moves if (error := moved.exception()) is not None]
        if errors:
            raise errors[0]
        for k in {request.file for request in requests}:
            self._files[k].forget()

    def _staging(self) -> torch.Tensor:
        """Aligned memory of this thread, for callers whose own is not."""
        memory = getattr(self._bounce, "memory", None)
        if memory is None:
            memory = self._bounce.memory = map_host(STAGING_BYTES, for_transfers=True)
        return memory


def _whole_pages(tensor: torch.Tensor, room: int) -> torch.Tensor | None:
    """The tensor's memory up to the end of its last page, if it starts on a page and its storage goes that far."""
    if tensor.data_ptr() % PAGE_BYTES or not tensor.is_contiguous():
        return None
    storage, offset = tensor.untyped_storage(), int(tensor.storage_offset())
    if storage.nbytes() < offset + room:
        return None
    return torch.empty(0, dtype=torch.uint8).set_(storage, offset, (room,), (1,))


def _sample(content: torch.Tensor, digest: xxh3_64 | None = None) -> xxh3_64:
    """Takes the first line of each page into a digest."""
    digest = xxh3_64() if digest is None else digest
    data = content.numpy()
    whole = len(data) // PAGE_BYTES * PAGE_BYTES
    digest.update(np.ascontiguousarray(data[:whole].reshape(-1, PAGE_BYTES)[:, :SAMPLE_BYTES]).data)
    digest.update(np.ascontiguousarray(data[whole : whole + SAMPLE_BYTES]).data)
    return digest


def measure_weights(folders: Sequence[Folder], *, probe_bytes: int = PROBE_BYTES) -> list[float]:
    """Bytes per second of each folder's drive, written and read in equal parts; the median of three turns.

    A file of its own in each folder is written, read and removed.
    """
    memory = map_host(probe_bytes)
    memory.random_(0, 256)
    view = memory.numpy().data
    seconds: list[list[float]] = [[] for _ in folders]
    files: list[TierFile] = []
    try:
        for folder in folders:
            files.append(TierFile(Path(folder), 1, "", PROBE_NAME))
            files[-1].grow(probe_bytes)
        for turn in range(4):
            for file, times in zip(files, seconds, strict=True):
                began = time.perf_counter()
                for verb in ("write", "read"):
                    for at in range(0, probe_bytes, REQUEST_BYTES):
                        file.move(verb, [view[at : at + REQUEST_BYTES]], at)
                    file.sync()
                if turn:  # the first write into fresh blocks is slower
                    times.append(time.perf_counter() - began)
    finally:
        for file in files:
            file.close(remove=True)
    return [2 * probe_bytes / statistics.median(times) for times in seconds]
