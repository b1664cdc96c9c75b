"""One run per folder, files of its own only: no link is followed, nothing that is somebody else's is written over."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.runtime.checkpoint.conftest import PutCommitted
from tests.runtime.checkpoint.test_commits import STEPS, new_trainer, plain_weights, same, schedule_for, train_on
from tests.runtime.models import make_batches, make_model
from tierplan.runtime.checkpoint.commits import CommitError
from tierplan.runtime.execution.placement import TrainingError
from tierplan.runtime.memory.files import StoreError
from tierplan.runtime.memory.store import Store, measure_weights
from tierplan.runtime.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")

PRECIOUS = b"PRECIOUS" * 2000


# ---- one run ----


@pytest.mark.parametrize("choice", ["memory", "nvme"])
def test_a_second_run_in_the_folder_is_one_clear_error(choice: str, tmp_path: Path) -> None:
    """In another folder of the NVMe tier, which the lock there would not notice. The first run goes on untouched."""
    schedule = schedule_for(choice)
    with new_trainer(tmp_path, schedule) as first:
        first.run(make_batches(STEPS), 2)
        for resume in (False, True):
            with pytest.raises(StoreError, match=r"out is in use by another run; wait for it, or give another folder"):
                new_trainer(tmp_path, schedule, resume=resume, nvme_dir=tmp_path / "other")
        first.run(make_batches(STEPS)[2:], STEPS - 2)
    assert same(train_on(tmp_path, schedule), plain_weights())


def test_of_two_processes_one_gets_the_folder(tmp_path: Path) -> None:
    """Started together, again and again; whichever comes first commits everything, the other one nothing."""
    schedule = schedule_for("memory")
    for turn in range(2):
        folder = tmp_path / str(turn)
        said, tell = os.pipe()
        for _ in range(2):
            if os.fork() == 0:
                try:
                    with new_trainer(folder, schedule, resume=True) as trainer:
                        num_left = STEPS - trainer.num_steps_done
                        trainer.run(make_batches(STEPS), num_left)
                    os.write(tell, b"done\n" if num_left else b"already done\n")
                except StoreError as error:
                    os.write(tell, f"{error}\n".encode())
                finally:
                    os._exit(0)
        for _ in range(2):
            os.wait()
        mine, theirs = os.read(said, 1 << 16).decode().splitlines()
        os.close(said)
        os.close(tell)
        assert "is in use by another run" in mine + theirs or {mine, theirs} == {"done", "already done"}
        assert same(train_on(folder, schedule), plain_weights())


def test_a_folder_without_a_state_to_begin_with_is_given_back(tmp_path: Path) -> None:
    """While the error is still held, as in a notebook: the next one says the same, and not that a run is there."""
    errors = list[BaseException]()
    for _ in range(2):
        with pytest.raises(TrainingError, match="holds no state to begin with") as caught:
            Trainer(schedule_for("memory"), make_model("gpt2"), start=tmp_path)
        errors.append(caught.value)
    assert len(errors) == 2


def test_a_lock_is_given_back(tmp_path: Path) -> None:
    schedule = schedule_for("memory")
    trainer = new_trainer(tmp_path, schedule)
    trainer.close()
    trainer = new_trainer(tmp_path, schedule)
    del trainer  # nobody closes it
    train_on(tmp_path, schedule, 2)
    with pytest.raises(CommitError, match="resume it"):
        new_trainer(tmp_path, schedule, resume=False)
    assert same(train_on(tmp_path, schedule), plain_weights())


def test_the_last_holder_of_a_lock_may_remove_the_file(tmp_path: Path) -> None:
    """Then who waited at the file that is gone must not think that it holds the one that is there."""
    first = Store([tmp_path])
    real, removed = os.open, []

    def late(path: Path, flags: int, *rest: int) -> int:
        fd = real(path, flags, *rest)
        if not removed and Path(path).name == "tierplan.tier":
            removed.append(path)
            first.close(remove=True)
        return fd

    with mock.patch("tierplan.runtime.memory.files.os.open", late):
        second = Store([tmp_path])
    assert removed
    with pytest.raises(StoreError, match="in use by another run"):
        Store([tmp_path])
    second.close()


# ---- links, names and other people's files ----


@pytest.mark.parametrize("name", ["tierplan.tier", "tierplan.owner.tmp", "tierplan.owner.json"])
@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_links_in_the_folder_of_the_tier(link: Callable[[Path, Path], None], name: str, tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    victim = tmp_path / "victim"
    victim.write_bytes(PRECIOUS)
    link(tmp_path / "nvme" / name, victim)
    if name == "tierplan.owner.tmp":  # a leftover of a kill; the name goes, what it led to stays
        train_on(tmp_path, schedule_for("nvme"), 1)
    else:
        with pytest.raises(StoreError, match=rf"{name}.*(a link stands there|has a second name)"):
            train_on(tmp_path, schedule_for("nvme"), 1)
    assert victim.read_bytes() == PRECIOUS


@pytest.mark.parametrize("name", ["resident-1.bin", "commit.tmp", "tierplan.lock", "commit.json"])
@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to])
def test_links_in_the_folder_of_the_run(link: Callable[[Path, Path], None], name: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    victim = tmp_path / "victim"
    victim.write_bytes(PRECIOUS)
    link(tmp_path / "out" / name, victim)
    if name in ("resident-1.bin", "commit.tmp"):
        train_on(tmp_path, schedule_for("memory"), 1)
        assert not (tmp_path / "out" / name).is_symlink()
    else:
        with pytest.raises(StoreError, match=rf"{name}.*(a link stands there|has a second name)"):
            train_on(tmp_path, schedule_for("memory"), 1)
    assert victim.read_bytes() == PRECIOUS


def test_measuring_drives_follows_no_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(PRECIOUS)
    (tmp_path / "nvme").mkdir()
    (tmp_path / "nvme" / "tierplan.probe").symlink_to(victim)
    with pytest.raises(StoreError, match=r"tierplan\.probe.*a link stands there"):
        measure_weights([tmp_path / "nvme"], probe_bytes=1 << 20)
    assert victim.read_bytes() == PRECIOUS


@pytest.mark.parametrize("out_dir", [None, "out"])
def test_somebody_else_s_file_is_not_written_over(out_dir: str | None, tmp_path: Path) -> None:
    """Nor removed at the end of a run that commits nothing."""
    (tmp_path / "tierplan.tier").write_bytes(PRECIOUS)
    with pytest.raises(StoreError, match=r"tierplan\.tier is not a file of this version of tierplan"):
        Store([tmp_path])
    assert (tmp_path / "tierplan.tier").read_bytes() == PRECIOUS


def test_a_pipe_or_a_folder_in_place_of_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tierplan.tier")
    with pytest.raises(StoreError, match=r"tierplan\.tier is not a plain file"):
        Store([tmp_path])
    (tmp_path / "a" / "tierplan.tier").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"could not create .*tierplan\.tier: Is a directory"):
        Store([tmp_path / "a"])


def test_what_a_kill_left_of_a_new_file_is_used(tmp_path: Path) -> None:
    for content in (b"", bytes(100), bytes(4096)):
        (tmp_path / "tierplan.tier").write_bytes(content)
        Store([tmp_path]).close()


def test_only_the_owner_may_read(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    (tmp_path / "nvme" / "tierplan.tier").touch(0o666)
    before = os.umask(0)
    try:
        train_on(tmp_path, schedule_for("nvme"), 2)
    finally:
        os.umask(before)
    found = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.glob("*/*")}
    assert set(found.values()) == {0o600}
    assert {"tierplan.tier", "tierplan.owner.json", "commit.json", "resident-2.bin", "tierplan.lock"} == found.keys()


# ---- records that say nothing ----

OWNERS: list[object] = [
    b"", b"{}", b"null", b"[]", b"3", b"{", b"\xff\xfe", b"[" * 100_000,
    {"run_id": 3, "run_folder": "x"}, {"run_id": "x"}, {"run_id": "x", "run_folder": "x", "more": 1},
]  # fmt: skip


@pytest.mark.parametrize("owner", OWNERS, ids=lambda owner: str(owner)[:20])
def test_a_broken_owner_is_one_clear_error_and_the_lock_is_given_back(
    owner: Any, committed: PutCommitted, tmp_path: Path
) -> None:
    schedule = schedule_for("nvme")
    committed(tmp_path, "nvme", 2)
    path = tmp_path / "nvme" / "tierplan.owner.json"
    whole = path.read_bytes()
    path.write_bytes(owner if isinstance(owner, bytes) else json.dumps(owner).encode())
    for _ in range(2):
        with pytest.raises(StoreError, match=r"tierplan\.owner\.json does not say whose data this folder holds"):
            train_on(tmp_path, schedule)
    path.write_bytes(whole)
    train_on(tmp_path, schedule, 3)


def test_an_owner_with_a_folder_that_cannot_be_looked_into(tmp_path: Path) -> None:
    owner = {"run_id": "ab", "run_folder": "/" + "x" * 5000}
    (tmp_path / "tierplan.owner.json").write_text(json.dumps(owner))
    with pytest.raises(StoreError, match=r"tierplan\.owner\.json names .* which cannot be read"):
        Store([tmp_path])


def test_a_claim_that_failed_gives_the_locks_back(tmp_path: Path) -> None:
    schedule = schedule_for("nvme")
    (tmp_path / "nvme" / "tierplan.owner.tmp").mkdir(parents=True)
    with pytest.raises(StoreError, match=r"could not remove .*tierplan\.owner\.tmp"):
        train_on(tmp_path, schedule)
    (tmp_path / "nvme" / "tierplan.owner.tmp").rmdir()
    assert same(train_on(tmp_path, schedule), plain_weights())


RECORDS: dict[str, Callable[[dict[str, Any]], object]] = {
    "null": lambda record: None,
    "a list": lambda record: [],
    "a number": lambda record: 3,
    "no object": lambda record: "x" * 10,
    "no contents": lambda record: record.pop("contents"),
    "an extra field": lambda record: record.update(x=1),
    "an extra field of a content": lambda record: record["contents"]["params/L0"].update(x=1),
    "huge offsets": lambda record: [c.update(offset_bytes=1 << 50) for c in record["contents"].values()],
    "odd offsets": lambda record: [c.update(offset_bytes=c["offset_bytes"] + 1) for c in record["contents"].values()],
    "negative offsets": lambda record: [c.update(offset_bytes=-4096) for c in record["contents"].values()],
    "a path for a number": lambda record: record.update(num_steps="../../x"),
    "a text for checksums": lambda record: record.update(xxh3=None),
    "another version": lambda record: record.update(version=1),
    "no format": lambda record: record.pop("format"),
}


@pytest.mark.parametrize("case", list(RECORDS))
@pytest.mark.parametrize("is_signed", [True, False])
def test_a_broken_record_is_one_clear_error(
    case: str, is_signed: bool, committed: PutCommitted, tmp_path: Path
) -> None:
    """Even where its checksum is right, as it would be from a program with a mistake."""
    from tierplan.runtime.checkpoint.commits import _checksum

    schedule = schedule_for("nvme")
    committed(tmp_path, "nvme", 2)
    path = tmp_path / "out" / "commit.json"
    record = json.loads(path.read_text())
    returned = RECORDS[case](record)
    if is_signed and "xxh3" in record and record["xxh3"] is not None:
        del record["xxh3"]
        record["xxh3"] = _checksum(record)
    path.write_text(json.dumps(returned if case in ("null", "a list", "a number", "no object") else record))
    with pytest.raises((CommitError, StoreError), match=r"commit\.json|tier"):
        train_on(tmp_path, schedule)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b'{"format": ' + b"9" * 5000 + b"}"])
def test_a_record_that_is_not_json(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "commit.json").write_bytes(content)
    with pytest.raises(CommitError, match=r"out/commit\.json is not a commit record"):
        new_trainer(tmp_path, schedule_for("memory"))
