"""The file of the NVMe tier in one folder: locked, reserved, past the page cache; its first page says what it is."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from tierplan.runtime.memory import files
from tierplan.runtime.memory.arena import PAGE_BYTES, map_host
from tierplan.runtime.memory.files import StoreError

FILE_NAME = "tierplan.tier"
PROBE_NAME = "tierplan.probe"
OWNER_NAME = "tierplan.owner.json"
RECORD_NAME = "commit.json"
"""In the folder of the run that owns a file: without it, or with another run's, the claim is void."""
REMOVE_OWNER = "remove both files if no run needs what is in the folder, or give another folder"
HEADER = b"tierplan tier 2\n".ljust(PAGE_BYTES, b"\0")
HEADER_BYTES = 64 << 10
"""Before the data: one page is written; the rest keeps the data on the boundaries of a drive's own pages."""


class Owner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whose committed data the file holds."""

    run_id: str
    run_folder: str


class TierFile:
    """The preallocated file in one folder, with its threads. Offsets are those of the data, behind the header."""

    def __init__(self, folder: Path, num_threads: int, run_id: str, name: str = FILE_NAME) -> None:
        self.folder = folder
        self.path = folder / name
        self.owner_path = folder / OWNER_NAME
        files.make_folder(folder)
        self._lock_fd = files.lock_file(
            self.path, f"{self.path} is in use by another run; wait for it, or give another folder"
        )
        self.note = ""
        try:
            if name == FILE_NAME:
                self._check_owner(run_id)
            self._check_header()
            files.grow_file(self._lock_fd, self.path, HEADER_BYTES)
            fd = files.open_direct(self.path)  # a second descriptor does the I/O
            self.direct = fd is not None
            self.fd = fd if fd is not None else files.open_file(self.path, os.O_RDWR)
            if not self.direct:
                self.note = (
                    f"{folder} does not take O_DIRECT: its file goes through the page cache, at the cost of memory; "
                    "speeds measured there are those of the cache"
                )
        except BaseException:
            os.close(self._lock_fd)
            raise
        self.size_bytes = os.fstat(self.fd).st_size - HEADER_BYTES
        """Of the data."""
        self.threads = ThreadPoolExecutor(num_threads, thread_name_prefix=f"tierplan-{folder.name}")

    # ---- whose it is ----

    def _check_owner(self, run_id: str) -> None:
        owner = self._owner()
        if owner is None or owner.run_id == run_id:
            return
        record = Path(owner.run_folder) / RECORD_NAME
        try:
            is_alive = owner.run_id.encode() in record.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return
        except (OSError, ValueError) as error:
            raise StoreError(
                errno.EBUSY, f"{self.owner_path} names {record}, which cannot be read ({error}); {REMOVE_OWNER}"
            ) from error
        if is_alive:
            raise StoreError(
                errno.EBUSY,
                f"{self.path} holds committed states of the run in {owner.run_folder}; resume that run, give "
                "another folder, or remove that run's folder if it is no longer wanted",
            )

    def _owner(self) -> Owner | None:
        content = files.read_content(self.owner_path)
        if content is None:
            return None
        try:
            return msgspec.json.decode(content, type=Owner)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise StoreError(
                errno.EINVAL, f"{self.owner_path} does not say whose data this folder holds: {error}; {REMOVE_OWNER}"
            ) from error

    def claim(self, owner: Owner) -> None:
        """Notes whose committed data the file holds, so that no other run writes over it."""
        if self._owner() != owner:
            files.replace_content(self.owner_path, msgspec.json.encode(owner))

    # ---- what it is ----

    def _check_header(self) -> None:
        """Writes the header of a new file; raises `StoreError` for a file that is something else."""
        page = bytearray(PAGE_BYTES)
        size_bytes = os.fstat(self._lock_fd).st_size
        if size_bytes:
            files.read_at(self._lock_fd, self.path, [memoryview(page)[: min(size_bytes, PAGE_BYTES)]], 0)
        if page == HEADER:
            return
        if size_bytes > PAGE_BYTES or any(page):
            raise StoreError(
                errno.EINVAL,
                f"{self.path} is not a file of this version of tierplan, so it is not written over; remove it, or give "
                "another folder",
            )
        files.write_at(self._lock_fd, self.path, [memoryview(HEADER)], 0)
        files.sync_file(self._lock_fd, self.path)
        files.sync_folder(self.folder)  # for the name of the file, too

    def check(self) -> None:
        """Raises `StoreError` unless the file is where and what it was: its name, its length, its header."""
        files.check_in_place(self._lock_fd, self.path, HEADER_BYTES + self.size_bytes)
        page = map_host(PAGE_BYTES).numpy()
        files.read_at(self.fd, self.path, [page.data], 0, direct=self.direct)
        if page.tobytes() != HEADER:
            raise StoreError(
                errno.EIO,
                f"the first page of {self.path} is not what was written there; another program or the drive changed "
                "it. Nothing more was committed; resume from the last commit, if it was left whole",
            )

    # ---- bytes ----

    def grow(self, size_bytes: int) -> None:
        """Preallocates the file for so many bytes of data, after checking that the drive has the room."""
        if size_bytes <= self.size_bytes:
            return
        held = os.fstat(self.fd).st_blocks * 512
        needed = HEADER_BYTES + size_bytes - held
        files.check_room(self.folder, needed, "the plan needs", "give another folder, or lower the NVMe budget")
        files.grow_file(self._lock_fd, self.path, HEADER_BYTES + size_bytes)
        self.size_bytes = size_bytes

    def move(self, verb: str, views: Sequence[memoryview], offset: int) -> None:
        """Reads into these views, or writes them."""
        move = files.read_at if verb == "read" else files.write_at
        move(self.fd, self.path, views, HEADER_BYTES + offset, direct=self.direct)

    def sync(self) -> None:
        """Returns when everything written is on the drive."""
        files.sync_file(self.fd, self.path)

    def forget(self) -> None:
        """What went through the page cache need not stay there."""
        if not self.direct:
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self, *, remove: bool = False) -> None:
        self.threads.shutdown(wait=True, cancel_futures=True)
        try:
            if remove and files.is_at(self._lock_fd, self.path):  # under the lock: nobody else's
                files.remove_file(self.path)
                if self.path.name == FILE_NAME:
                    files.remove_file(self.owner_path)
        finally:
            os.close(self.fd)
            os.close(self._lock_fd)
