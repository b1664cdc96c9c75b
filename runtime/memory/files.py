"""The operations on files that a run must not lose.

One place, so that each is named when it fails, none follows a link, and a test can record all of them in their order
and let any of them fail (`benchmarks.crash.consistency`).

    StoreError(OSError)   an operation that was refused or failed; names it, the file, and what to do
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tierplan.runtime.memory.arena import PAGE_BYTES, map_host
from tierplan.sim.output.text import format_bytes

PRIVATE = 0o600
IN_USE = (errno.EWOULDBLOCK, errno.EACCES)
REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "; free space there, or give another folder"),
    **dict.fromkeys((errno.ENOENT, errno.EEXIST, errno.EACCES, errno.ENOTDIR), "; give a folder that you may write to"),
    errno.EIO: "; the drive fails. What was committed is as it was: save it, and resume from there",
    errno.EROFS: "; make it writable, or give another folder",
    errno.ELOOP: ": a link stands there, which is not followed; remove it, or give another folder",
}


class StoreError(OSError):
    """A file or a folder of a run that cannot be used, or a drive that failed. Names it and what to do."""

    def __str__(self) -> str:
        return str(self.strerror)


@contextlib.contextmanager
def naming(operation: str, path: os.PathLike[str] | str) -> Iterator[None]:
    """What the system refuses inside is a `StoreError` that says "could not OPERATION PATH"."""
    try:
        yield
    except StoreError:
        raise
    except OSError as error:
        reason = (error.strerror or str(error)) if error.errno != errno.ELOOP else "it is not a plain file"
        raise StoreError(
            error.errno or errno.EIO,
            f"could not {operation} {path}: {reason}{REMEDIES.get(error.errno or errno.EIO, '')}",
        ) from error


# ---- files and folders ----

Folder = str | os.PathLike[str]
Folders = Folder | Sequence[Folder]
"""Of the NVMe tier: one, or several to stripe over."""


def paths_of(folders: Folders) -> list[Path]:
    """Each folder's path. Raises `ValueError` where one is given twice."""
    paths = [Path(f) for f in ([folders] if isinstance(folders, str | os.PathLike) else folders)]
    if len({path.resolve() for path in paths}) < len(paths):
        raise ValueError(f"a folder of {', '.join(map(str, paths))} is given twice; give one for each drive")
    return paths


def make_folder(path: Path) -> None:
    """The folder is there, with those above it, for good."""
    with naming("create folder", path):
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def open_file(path: Path, flags: int) -> int:
    """A descriptor of a plain file that only its owner may read. A link there is an error, and so is a second name."""
    with naming("create" if flags & os.O_CREAT else "open", path):
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, PRIVATE)
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(fd)
        what = "has a second name" if stat.S_ISREG(status.st_mode) else "is not a plain file"
        raise StoreError(errno.EMLINK, f"{path} {what}; remove it, or give another folder")
    if status.st_mode & 0o077:
        with contextlib.suppress(OSError):  # file systems without permissions
            os.fchmod(fd, PRIVATE)
    return fd


@contextlib.contextmanager
def held_open(fd: int) -> Iterator[int]:
    """The same descriptor, which is closed behind it."""
    try:
        yield fd
    finally:
        os.close(fd)


def open_direct(path: Path) -> int | None:
    """A descriptor of a file that has a page, for direct access; None where the file system does not take that. Some
    accept the flag and refuse the first transfer."""
    if not hasattr(os, "O_DIRECT"):
        return None
    fd = -1
    try:
        fd = open_file(path, os.O_RDWR | os.O_DIRECT)
        read_at(fd, path, [map_host(PAGE_BYTES).numpy().data], 0, direct=True)
    except StoreError as error:
        if fd >= 0:
            os.close(fd)
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return None
    return fd


def create_file(path: Path) -> int:
    """A descriptor of a new, empty file, whatever stood there before."""
    remove_file(path)
    return open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)


def lock_file(path: Path, in_use: str) -> int:
    """A descriptor of this file, made if need be, that nobody else holds until it is closed; `StoreError` with the
    text `in_use` when somebody does."""
    while True:
        fd = open_file(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in IN_USE:
                raise StoreError(error.errno, in_use) from error
            with naming("lock", path):
                raise
        if is_at(fd, path):
            return fd
        os.close(fd)  # its last holder removed it meanwhile


def check_in_place(fd: int, path: Path, least_bytes: int = 0) -> None:
    """Raises `StoreError` unless the open file still stands at its path, under this name only, not cut short."""
    status = os.fstat(fd)
    if not is_at(fd, path):
        what = "was removed or replaced"
    elif status.st_nlink > 1:
        what = "got a second name"
    elif status.st_size < least_bytes:
        what = f"was cut from {least_bytes:,} bytes to {status.st_size:,}"
    else:
        return
    raise StoreError(
        errno.ESTALE,
        f"{path} {what} by another program while a run was using it; nothing more was committed. Keep that program out "
        "and resume from the last commit, if it was left whole",
    )


def is_at(fd: int, path: Path) -> bool:
    """Whether the open file is the one that stands at this path."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except OSError:
        return False


def check_room(folder: Path, needed_bytes: int, what: str, remedy: str) -> None:
    """Raises `StoreError` unless the folder's drive has so much free for `what` needs it."""
    if needed_bytes > (free := room_bytes(folder)):
        raise StoreError(
            errno.ENOSPC,
            f"{folder} has {format_bytes(free)} free, but {what} {format_bytes(needed_bytes)} there; free space, "
            f"{remedy}",
        )


def room_bytes(folder: Path) -> int:
    """What whoever runs this may write in the folder."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def grow_file(fd: int, path: Path, size_bytes: int) -> None:
    """The file has at least this size, in blocks that are its own where the file system can promise that."""
    with naming(f"reserve {size_bytes:,} bytes in", path):
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            if os.fstat(fd).st_size < size_bytes:
                os.ftruncate(fd, size_bytes)


def rename_file(source: Path, target: Path) -> None:
    """In one step, `source` stands where `target` stood."""
    with naming(f"rename {source} to", target):
        source.replace(target)


def remove_file(path: Path) -> None:
    """There is no such file any more."""
    with naming("remove", path):
        path.unlink(missing_ok=True)


# ---- bytes ----


def read_at(fd: int, path: Path, views: Sequence[memoryview], offset: int, *, direct: bool = False) -> None:
    """Fills the views, one after the other, from this offset on."""
    _move("read", os.preadv, fd, path, views, offset, direct)


def write_at(fd: int, path: Path, views: Sequence[memoryview], offset: int, *, direct: bool = False) -> None:
    """Writes the views, one after the other, from this offset on."""
    _move("write", os.pwritev, fd, path, views, offset, direct)


def _move(
    verb: str, call: Callable[..., int], fd: int, path: Path, views: Sequence[memoryview], offset: int, direct: bool
) -> None:
    """Goes on after short transfers. One may stop inside a page; direct access goes on at whole ones only."""
    size, done, left = sum(map(len, views)), 0, list(views)
    while done < size:
        with naming(f"{verb} {size - done:,} bytes at {offset + done:,} of", path):
            moved = call(fd, left, offset + done)
        is_end = moved == 0 or (direct and verb == "read" and moved < min(PAGE_BYTES, size - done))
        if is_end:  # inside the page that it would go on at, too
            end = offset + done + moved
            raise StoreError(errno.EIO, f"{path} ended at {end:,}, before the data that it should hold")
        if direct and done + moved < size:
            moved -= moved % PAGE_BYTES
        done += moved
        while left and moved >= len(left[0]):
            moved -= len(left.pop(0))
        if moved:
            left[0] = left[0][moved:]


def sync_file(fd: int, path: Path) -> None:
    """Returns when what was written to the file is on its drive."""
    with naming("sync", path):
        os.fdatasync(fd)


def sync_folder(path: Path) -> None:
    """Returns when the names in the folder are on its drive as they stand."""
    with naming("sync folder", path), held_open(os.open(path, os.O_RDONLY | os.O_DIRECTORY)) as fd:
        os.fsync(fd)


def replace_content(path: Path, content: bytes) -> None:
    """At once and for good, the file holds this: a crash at any moment leaves the old content or the new."""
    temporary = path.with_suffix(".tmp")
    with held_open(create_file(temporary)) as fd:
        write_at(fd, temporary, [memoryview(content)], 0)
        sync_file(fd, temporary)
    rename_file(temporary, path)
    sync_folder(path.parent)


def read_content(path: Path) -> bytes | None:
    """What a small file holds; None if there is none."""
    try:
        fd = open_file(path, os.O_RDONLY)
    except StoreError as error:
        if error.errno == errno.ENOENT:
            return None
        raise
    with held_open(fd):
        content = bytearray(os.fstat(fd).st_size)
        if content:
            read_at(fd, path, [memoryview(content)], 0)
        return bytes(content)
