"""Committed steps: a run that dies at any moment can go on from the last one, bit for bit.

A commit names, for every buffer that outlives a step, where its bytes are. What lies on the NVMe tier is committed
where it lies: the extents of the last commit are never written again before the next commit, so a step that rewrites
them goes to others (two regions per buffer, used in turn). What lies in memory goes to a file beside the record. The
order is: data, `fdatasync`, then one small record that replaces the old one by an atomic rename.

Every part is vouched for by a checksum of the bytes as they were in memory: each content, and the record itself.

A run's folder holds

    commit.json         the record of the last commit
    resident-N.bin      what was in memory after N steps, behind a page that says so
    tierplan.lock       held by the process that trains there; says that something was committed

    CommitError(ValueError)   a run that cannot be resumed: nothing committed, another run's files, other settings,
    damage
"""

from __future__ import annotations

import errno
import functools
import json
import os
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec.structs import replace as with_changes
from xxhash import xxh3_64, xxh3_64_hexdigest

from tierplan.runtime.memory import files
from tierplan.runtime.memory.arena import PAGE_BYTES, Block, padded
from tierplan.runtime.memory.files import Folder, StoreError
from tierplan.runtime.memory.store import DamageError, Extent, Store
from tierplan.runtime.memory.tier_file import RECORD_NAME
from tierplan.runtime.ranks.alike import differences
from tierplan.runtime.ranks.group import Ranks
from tierplan.sim.schedule import Schedule

FORMAT = "tierplan-commit"
VERSION = 2
LOCK_NAME = "tierplan.lock"
COMMITTED = b"committed"
"""What the lock says when there is a commit: a record that is gone later was removed."""

AT_ONCE = ("in-backward", "exact-clip")
"""Semantics that leave the same state at a step's end. Whether it clips is the training's `max_grad_norm` to say."""
DRAWING_ORDER = "drawing_order"
OTHERWISE = {
    DRAWING_ORDER: "without a seed, random numbers are drawn in the order of the plan's forwards, and this plan has "
    "another one. Resume with a plan that takes its micro-batches in the old order, or start a new run with a seed",
    "late_updates": "in a commit, gradients of such units wait for their update in the next step, a part on each rank. "
    "Resume with a plan that updates the same units late, such as the one that the run was made with, or on one device",
}
"""Why other settings are refused than those that change the numbers, and what to do."""

Count = Annotated[int, msgspec.Meta(ge=0)]
Hexadecimal = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{2})*$")]


class CommitError(ValueError):
    """A run that cannot be resumed. Says why and what to do."""


class DamagedContentError(CommitError):
    """One content is damaged; the file that it is in is there, and is that of the commit."""


class Stored(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where the bytes of one content are."""

    size_bytes: Count
    offset_bytes: Count
    """In the store's address space, or in the resident file."""
    in_store: bool
    xxh3: Hexadecimal = ""
    """Of the bytes, as they were written."""
    is_absent: bool = False


class Commit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The state of training after `num_steps` steps."""

    num_steps: Count
    run_id: Hexadecimal
    contents: Mapping[str, Stored]
    settings: Mapping[str, Any]
    """What must be the same for the numbers to be the same."""
    losses: tuple[float, ...] = ()
    seal: Stored | None = None
    """A page in the store that names the run and the step."""
    folders: tuple[str, ...] = ()
    """Of the store; empty if nothing is in it. Those in the run's own folder are told from that of the record."""
    stripes: tuple[Count, ...] = ()
    """How the store's data is dealt out to its folders."""
    store_bytes: Count = 0
    """The store's address space."""
    frozen: Mapping[str, Hexadecimal] = {}
    """By content, checksums of what is not trained, and so is no part of the commit."""
    rng: tuple[Hexadecimal, ...] = ()
    """States of PyTorch's generators, where the run draws from them."""


class Decision(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What makes the commits of several ranks the last one of all."""

    num_steps: Count
    num_ranks: Count
    records: tuple[Hexadecimal, ...] = ()
    """By rank, the checksum of its record. Earlier versions wrote none."""

    def __post_init__(self) -> None:
        if self.records and len(self.records) != self.num_ranks:
            raise ValueError(f"{len(self.records)} checksums of {self.num_ranks} ranks")


class CommitLog:
    """The commits of one run, in its folder."""

    def __init__(self, folder: Folder) -> None:
        self.folder = self.run_folder = Path(folder)
        files.make_folder(self.folder)
        self._record, self._next = self.folder / RECORD_NAME, self.folder / "next.json"
        self.is_of_others = False
        """Whether another number of ranks has made the last commit."""
        self._decided_on: Decision | None = None
        """What has made the last commit that of all, where ranks have made it or go on from it."""

    def lock(self) -> int:
        """A descriptor; until it is closed, no other process trains here. Raises `StoreError` when one does."""
        path = self.folder / LOCK_NAME
        return files.lock_file(path, f"{self.folder} is in use by another run; wait for it, or give another folder")

    def check(self, lock: int) -> None:
        """Raises `StoreError` unless the folder that was locked is the one at its path."""
        files.check_in_place(lock, self.folder / LOCK_NAME)

    def last(self) -> Commit | None:
        """The last commit; None if there is none. Raises `CommitError` for a record that cannot be read."""
        content = files.read_content(self._record)
        if content is None:
            self._check_never()
            return None
        if content[:1] == b"[":
            return self._of_others(self._decision(self._record, content))
        return self._commit_in(self._record, content)[0]

    def _check_never(self) -> None:
        """Raises `CommitError` where something was committed, of which the record is gone."""
        of_ranks = [str(path) for path in sorted(self.run_folder.glob(f"rank-*/{RECORD_NAME}"))]
        lock = self.run_folder / LOCK_NAME
        if of_ranks or files.read_content(lock) == COMMITTED:
            raise CommitError(
                f"{self.run_folder / RECORD_NAME} of the last commit is missing, and that there was one is said by "
                f"{', '.join(of_ranks or [str(lock)])}; put it back, or start the run anew in another folder"
            )

    def _commit_in(self, path: Path, content: bytes) -> tuple[Commit, str]:
        """That of a record, and the record's checksum."""
        try:
            record = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise _broken(path, f"it is not JSON ({error})") from error
        if not isinstance(record, dict):
            raise _broken(path, f"it holds {type(record).__name__}, not an object")
        if (record.get("format"), record.get("version")) != (FORMAT, VERSION):
            raise CommitError(
                f"{path} has format {record.get('format')!r} version {record.get('version')!r}; this version "
                f"of tierplan resumes {FORMAT!r} version {VERSION}"
            )
        if record.pop("xxh3", None) != (checksum := _checksum(record)):
            raise _broken(path, "it is not what was written there")
        del record["format"], record["version"]
        try:
            return msgspec.convert(record, Commit), checksum
        except msgspec.ValidationError as error:
            raise _broken(path, str(error)) from error

    def decided(self) -> Decision | None:
        """What makes the commits of several ranks the last one; None where one process was."""
        content = files.read_content(self._record)
        return self._decision(self._record, content) if content is not None and content[:1] == b"[" else None

    def after(self, decided: Decision, rank: int = 0) -> Commit:
        """A rank's commit of those that were decided on, which it may not have taken for its last one yet. Raises
        `CommitError` where it is another one's."""
        num_steps, there = decided.num_steps, set[str]()
        for path in (self._record, self._next):
            if (content := files.read_content(path)) is not None:
                commit, xxh3 = self._commit_in(path, content)
                if commit.num_steps == num_steps and (not decided.records or decided.records[rank] == xxh3):
                    if path != self._record:
                        files.rename_file(path, self._record)
                        files.sync_folder(self.folder)
                    return commit
                there.add(xxh3)
        others = [k for k, xxh3 in enumerate(decided.records) if xxh3 in there]
        why = f"is that of rank {others[0]}" if others else "is not there, or is of another run or time"
        raise CommitError(
            f"all ranks were committed after {num_steps} steps, and {self._record} of rank {rank} {why}; put back "
            "whole copies of the folders of all ranks, or start the run anew in another folder"
        )

    def _of_others(self, decided: Decision) -> Commit:
        """The last commit of all, by another number of ranks; what each had is in `parts`."""
        self.is_of_others, self._decided_on = True, decided
        return with_changes(self.parts[0][1], seal=None, folders=(), stripes=(), store_bytes=0)

    @functools.cached_property
    def parts(self) -> Sequence[tuple[CommitLog, Commit]]:
        """By rank, where the last commit is; empty where one process has made it and goes on. What a rank needs, and
        has not committed itself, is made of them. Raises `CommitError` where ranks cannot take from one another."""
        if (decided := self._decided_on) is None:
            return ()
        folder, num_ranks = self.run_folder, decided.num_ranks
        logs = [CommitLog(folder / f"rank-{k}") for k in range(num_ranks)] if num_ranks > 1 else [CommitLog(folder)]
        parts = [(log, log.after(decided, k)) for k, log in enumerate(logs)]
        if (rng := parts[0][1].rng) or any(where.in_store for _, own in parts for where in own.contents.values()):
            what = "random numbers of its own" if rng else "contents on the NVMe tier"
            own = f"{num_ranks} ranks"
            raise CommitError(
                f"{folder} holds a run of {own} with {what}; resume it with {own}, and with a plan that divides it "
                "among them as before"
            )
        return parts

    def _decision(self, path: Path, content: bytes) -> Decision:
        """After how many steps how many ranks were committed together."""
        try:
            return msgspec.json.decode(content, type=Decision)
        except msgspec.MsgspecError as error:
            what = "it does not say after how many steps how many ranks were committed"
            raise _broken(path, f"{what} ({error})") from error

    def noted(self, store_folder: Path) -> str:
        """A folder of the store as a commit has it: in the run's own folder so that a copy of that has its own."""
        own, folder = self.run_folder.resolve(), store_folder.resolve()
        return os.path.relpath(folder, self.folder.resolve()) if folder.is_relative_to(own) else str(folder)

    def store_folders(self, commit: Commit) -> list[str]:
        """Where a commit says that the folders of its store are."""
        return [os.path.normpath(self.folder / path) for path in commit.folders]

    def resident_path(self, num_steps: int) -> Path:
        return self.folder / f"resident-{num_steps}.bin"

    def write_resident(
        self, run_id: str, num_steps: int, contents: Iterable[tuple[str, Iterable[Block]]]
    ) -> dict[str, Stored]:
        """Writes names with their bytes, in pieces of whole pages, to the resident file, and returns where they are.

        Past the page cache where that goes: pages for 1 GB in it cost 0.3 to 2 s of a core that trains meanwhile.
        """
        path, stored, at = self.resident_path(num_steps), {}, PAGE_BYTES
        with ExitStack() as opened:
            fd = opened.enter_context(files.held_open(files.create_file(path)))
            files.write_at(fd, path, [memoryview(stamp("resident", run_id, num_steps))], 0)
            if (direct_fd := files.open_direct(path)) is not None:
                opened.enter_context(files.held_open(direct_fd))
            for name, pieces in contents:
                begin, size_bytes, checksum = at, 0, xxh3_64()
                for piece in pieces:
                    data, pages = piece.data.numpy().data, piece.pages
                    checksum.update(data)
                    if direct_fd is None or pages.numel() % PAGE_BYTES or pages.data_ptr() % PAGE_BYTES:
                        files.write_at(fd, path, [data], at)
                    else:
                        files.write_at(direct_fd, path, [pages.numpy().data], at, direct=True)
                    size_bytes, at = size_bytes + len(data), at + padded(len(data))
                stored[name] = Stored(
                    size_bytes=size_bytes, offset_bytes=begin, in_store=False, xxh3=checksum.hexdigest()
                )
            files.sync_file(fd, path)
        files.sync_folder(self.folder)  # its name must be there before the record that needs it is
        return stored

    def read_resident(self, commit: Commit, name: str) -> torch.Tensor:
        """The bytes of one content. Raises `CommitError` if they are not those that were written."""
        where, path = commit.contents[name], self.resident_path(commit.num_steps)
        out = torch.empty(where.size_bytes, dtype=torch.uint8)
        page = bytearray(PAGE_BYTES)
        try:
            fd = files.open_file(path, os.O_RDONLY)
        except StoreError as error:
            if error.errno == errno.ENOENT:
                raise CommitError(
                    f"{path}, which the last commit needs, is missing; the run cannot be resumed"
                ) from error
            raise
        with files.held_open(fd):
            if os.fstat(fd).st_size < where.offset_bytes + where.size_bytes:
                raise CommitError(f"{path} was cut short: {name!r} is not in it; the run cannot be resumed from it")
            files.read_at(fd, path, [memoryview(page)], 0)
            if where.size_bytes:
                files.read_at(fd, path, [out.numpy().data], where.offset_bytes)
        if page != stamp("resident", commit.run_id, commit.num_steps):
            raise CommitError(f"{path} is not of the last commit; the run cannot be resumed from it")
        if xxh3_64_hexdigest(out.numpy().data) != where.xxh3:
            raise DamagedContentError(f"{name!r} in {path} is damaged; the run cannot be resumed from it")
        return out

    def write(self, commit: Commit) -> None:
        """Makes this commit the last one, at once and for good."""
        self._put(self._record, commit)
        lock = self.folder / LOCK_NAME
        if not files.read_content(lock):
            with files.held_open(files.open_file(lock, os.O_RDWR | os.O_CREAT)) as fd:
                files.write_at(fd, lock, [memoryview(COMMITTED)], 0)
        self._forget_others(commit)

    def _put(self, path: Path, commit: Commit) -> str:
        """Returns the checksum of the record."""
        record = {"format": FORMAT, "version": VERSION, **msgspec.to_builtins(commit)}
        text = json.dumps({**record, "xxh3": (checksum := _checksum(record))})
        files.replace_content(path, text.encode())
        return checksum

    def _forget_others(self, commit: Commit) -> None:
        for old in (*self.folder.glob("resident-*.bin"), *self.folder.glob("rank-*/resident-*.bin")):
            if old != self.resident_path(commit.num_steps):
                files.remove_file(old)


class CommitLogOfRank(CommitLog):
    """The commits of one of several ranks, in a folder of its own in that of the run.

    All write their records beside the last ones; then the first makes them the last commit of all, by one small file
    that says the number of steps, and which records; then each takes its own for the last. A crash in between is made
    good by `last`.
    """

    def __init__(self, folder: Folder, ranks: Ranks) -> None:
        super().__init__(Path(folder) / f"rank-{ranks.rank}")
        self.run_folder = Path(folder)
        self._ranks, self._decided = ranks, Path(folder) / RECORD_NAME

    def last(self) -> Commit | None:
        content = files.read_content(self._decided)
        if content is None:
            self._check_never()
            return None
        if content[:1] == b"{" and (alone := CommitLog(self._decided.parent).last()) is not None:
            decided = Decision(alone.num_steps, 1)
        else:
            decided = self._decision(self._decided, content)
        if decided.num_ranks == self._ranks.size:
            own, self._decided_on = self.after(decided, self._ranks.rank), decided
            self._ranks.barrier("commits")  # each has made good what a crash has left
            return own
        if self._ranks.rank > 0:  # behind the first, which does so
            self._ranks.barrier("commits")
        others = self._of_others(decided)
        if self._ranks.rank == 0:
            self._ranks.barrier("commits")
        return others

    def write(self, commit: Commit) -> None:
        records = self._ranks.collect(self._put(self._next, commit), "commits")
        if self._ranks.rank == 0:
            decided = Decision(commit.num_steps, self._ranks.size, tuple(records))
            files.replace_content(self._decided, msgspec.json.encode(decided))
        self._ranks.barrier("commits")
        files.rename_file(self._next, self._record)
        files.sync_folder(self.folder)
        self._forget_others(commit)
        going_on = [self._decided.parent / f"rank-{k}" for k in range(self._ranks.size)]
        for log, old in self.parts if self.is_of_others and self._ranks.rank == 0 else ():
            if log.folder not in going_on:
                files.remove_file(log.resident_path(old.num_steps))
        self.is_of_others = False


def stamp(what: str, run_id: str, num_steps: int) -> bytes:
    """A page that says of which run and step the bytes beside it are."""
    return f"tierplan {what} of run {run_id} after {num_steps} steps\n".encode().ljust(PAGE_BYTES, b"\0")


def _broken(path: Path, why: str) -> CommitError:
    return CommitError(
        f"{path} is not a commit record: {why}; put back a whole copy of it, or start the run anew in another folder"
    )


def _checksum(record: Mapping[str, Any]) -> str:
    return xxh3_64_hexdigest(json.dumps(record, sort_keys=True).encode())


def drawing_order(schedule: Schedule) -> str:
    """A digest of the order in which a schedule's forwards draw random numbers, where those have no seed."""
    order = [(op.unit, op.micro_batch) for op in schedule.ops if op.kind == "forward"]
    return xxh3_64_hexdigest(repr(order).encode())


def check_same_settings(commit: Commit, settings: Mapping[str, Any], *, num_ranks: int = 1) -> None:
    """Raises `CommitError` unless the run to resume has these settings. Older commits do not say that losses
    are divided, nor in which order random numbers were drawn. One device makes whichever updates were still to come."""
    both = {"divides_loss": True, DRAWING_ORDER: settings.get(DRAWING_ORDER), **commit.settings}, settings
    before, now = (json.loads(json.dumps(each, sort_keys=True)) for each in both)
    if before.get("semantics") in AT_ONCE and now.get("semantics") in AT_ONCE:
        now["semantics"] = before["semantics"]
        if num_ranks == 1:
            now["late_updates"] = before.get("late_updates")
    for name, old, new in differences(before, now):
        why = OTHERWISE.get(name, "that would change its numbers. Use the old setting, or start a new run")
        raise CommitError(
            f"the run was made with {name} = {reprlib.repr(old)}, and is to be resumed with {reprlib.repr(new)}; {why}"
        )


def verify_commit(folder: Folder, nvme_dirs: Sequence[Folder] = ()) -> str:
    """Reads all of a run's last commit, in little memory; says what is whole.

    `nvme_dirs` are the folders of its NVMe tier now, if they are not where they were.

    Raises `CommitError` that names every damaged content, and `StoreError` for files that are not there or in use.
    """
    if not Path(folder).is_dir():
        raise CommitError(f"{folder} is not there; give the folder of a run")
    with ExitStack() as held:
        texts, damaged = list[str](), list[str]()
        for log, commit, own in _last_of_each(CommitLog(folder), held):
            drives = [str(Path(path) / own) for path in nvme_dirs] or log.store_folders(commit)
            of_whom = f"{own}: " if own else ""
            damaged += [of_whom + damage for damage in _damage(log, commit, drives)]
            size_bytes = sum(where.size_bytes for where in commit.contents.values() if not where.is_absent)
            texts.append(
                f"{of_whom}the commit after {commit.num_steps} steps is whole: {len(commit.contents)} contents, "
                f"{size_bytes:,} bytes" + (f"; its NVMe tier in {', '.join(drives)}" if commit.seal is not None else "")
            )
    if damaged:
        raise CommitError("; ".join(damaged))
    return "\n".join(texts)


def _last_of_each(log: CommitLog, held: ExitStack) -> Iterator[tuple[CommitLog, Commit, str]]:
    """The last commit, or that of each rank under the name of its folder; all are locked until `held` is left."""
    held.callback(os.close, log.lock())
    decided = log.decided()
    if decided is None:
        if (commit := log.last()) is None:
            raise CommitError(f"{log.folder} holds no commit; nothing can be resumed from it")
        yield log, commit, ""
        return
    for k in range(decided.num_ranks):
        of_rank = CommitLog(log.folder / f"rank-{k}")
        held.callback(os.close, of_rank.lock())
        yield of_rank, of_rank.after(decided, k), of_rank.folder.name


def _damage(log: CommitLog, commit: Commit, drives: Sequence[str]) -> Iterator[str]:
    """What is wrong with contents that were in memory, and with those on the NVMe tier."""
    is_file_whole = True
    for name, where in commit.contents.items():
        if not where.in_store and not where.is_absent:
            try:
                log.read_resident(commit, name)
            except DamagedContentError as error:
                yield str(error)
            except CommitError as error:
                if is_file_whole:  # said once, and not of all that was in it
                    yield str(error)
                is_file_whole = False
    if commit.seal is None:
        return
    with closing(Store(drives, pattern=commit.stripes, run_id=commit.run_id)) as store:
        store.expect(commit.store_bytes)
        for name, where in {**commit.contents, "the seal": commit.seal}.items():
            if where.in_store:
                extent = Extent(where.offset_bytes, where.size_bytes)
                store.allocate_at(extent, where.xxh3)
                try:
                    store.verify(extent)
                except DamageError as error:
                    yield f"{name!r} is damaged: {error}"
