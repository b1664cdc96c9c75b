"""Bytes that are not those that were written are an error that names them, before they are committed and after."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from tests.runtime.checkpoint.conftest import PutCommitted
from tests.runtime.checkpoint.test_commits import (
    STEPS,
    last_commit,
    new_trainer,
    plain_weights,
    same,
    schedule_for,
    train_on,
)
from tests.runtime.models import make_batches
from tierplan.cli import main
from tierplan.runtime.checkpoint.commits import CommitError, CommitLog, Stored, verify_commit
from tierplan.runtime.execution.instances import ExecutionError
from tierplan.runtime.memory.arena import PAGE_BYTES, map_host, padded
from tierplan.runtime.memory.files import StoreError
from tierplan.runtime.memory.store import DamageError
from tierplan.runtime.memory.tier_file import HEADER_BYTES

pytestmark = pytest.mark.usefixtures("one_thread")


def overwrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def flip_a_bit(path: Path, at: int) -> None:
    overwrite(path, at, bytes([path.read_bytes()[at] ^ 0x40]))


def tier_of(folder: Path) -> Path:
    return folder / "nvme" / "tierplan.tier"


# ---- between two runs ----


def bit_flip(tier: Path, where: Stored) -> None:
    flip_a_bit(tier, HEADER_BYTES + where.offset_bytes + where.size_bytes // 2 + 3)


def zeros(tier: Path, where: Stored) -> None:
    overwrite(tier, HEADER_BYTES + where.offset_bytes, bytes(where.size_bytes))


@pytest.mark.parametrize("content", ["params/L0", "states/L1", "params/embed"])
@pytest.mark.parametrize("change", [bit_flip, zeros])
def test_changed_data_is_not_resumed(
    change: Callable[[Path, Stored], None], content: str, committed: PutCommitted, tmp_path: Path
) -> None:
    schedule = schedule_for("nvme")
    committed(tmp_path, "nvme", 3)
    change(tier_of(tmp_path), last_commit(tmp_path).contents[content])
    with pytest.raises(CommitError, match=rf"'{content}' of the last commit in .*out is damaged.*tierplan\.tier"):
        train_on(tmp_path, schedule)


def test_changed_data_does_not_come_to_another_plan(committed: PutCommitted, tmp_path: Path) -> None:
    """Where states go to memory in other parts than they lay in on the drive, too."""
    committed(tmp_path, "nvme", 3)
    bit_flip(tier_of(tmp_path), last_commit(tmp_path).contents["states/L1"])
    with pytest.raises(CommitError, match=r"'states/L1' of the last commit .* is damaged"):
        train_on(tmp_path, schedule_for("memory_and_nvme"))


@pytest.mark.parametrize("read_back", [True, False])
def test_checksums_are_of_memory_and_not_of_the_drive(read_back: bool, tmp_path: Path) -> None:
    """A drive that changes a bit on the way is found, although what is on it was never right; the bit is in no sample.

    Where commits are read back, before one counts, and nothing is lost. Otherwise on resuming.
    """
    schedule, real, size_bytes = schedule_for("nvme"), os.pwritev, padded(101_632)  # the states of a block
    num_steps = [0]

    def lying(fd: int, views: list[memoryview], at: int) -> int:
        if sum(map(len, views)) != size_bytes or num_steps[0] != 3:
            return real(fd, views, at)
        changed = map_host(size_bytes)
        changed.copy_(torch.frombuffer(bytearray(b"".join(views)), dtype=torch.uint8))
        changed[PAGE_BYTES - 1] ^= 1
        return real(fd, [changed.numpy().data], at)

    def count(step: int, loss: float) -> None:
        num_steps[0] = step + 1
        if step == 4 and not read_back:
            raise InterruptedError("the machine went down")

    broken = pytest.raises(DamageError if read_back else InterruptedError)
    with mock.patch("tierplan.runtime.memory.files.os.pwritev", lying), broken:
        train_on(tmp_path, schedule, on_step=count, read_back=read_back)
    assert last_commit(tmp_path).num_steps == (3 if read_back else 4)
    if read_back:
        assert same(train_on(tmp_path, schedule), plain_weights())
    else:
        with pytest.raises(CommitError, match=r"'states/L\d' of the last commit .*the 101,632 bytes at"):
            train_on(tmp_path, schedule)


@pytest.mark.parametrize("part", [0.0, 0.3, 0.7, 0.9, 0.999])
def test_a_tier_that_was_cut_is_not_resumed(part: float, committed: PutCommitted, tmp_path: Path) -> None:
    schedule = schedule_for("nvme")
    committed(tmp_path, "nvme", 3)
    tier = tier_of(tmp_path)
    os.truncate(tier, HEADER_BYTES + int((last_commit(tmp_path).store_bytes - 1) * part))
    with pytest.raises(StoreError, match=r"tierplan\.tier is not that of the last commit, or was cut short"):
        train_on(tmp_path, schedule)


def test_a_cut_tier_that_was_filled_up_is_not_resumed(committed: PutCommitted, tmp_path: Path) -> None:
    schedule = schedule_for("nvme")
    committed(tmp_path, "nvme", 3)
    tier, commit = tier_of(tmp_path), last_commit(tmp_path)
    size_bytes, behind = tier.stat().st_size, max(where.offset_bytes for where in commit.contents.values())
    os.truncate(tier, HEADER_BYTES + behind)
    os.truncate(tier, size_bytes)
    with pytest.raises(CommitError, match=r"damaged|not those of the last commit"):
        train_on(tmp_path, schedule)


def test_an_older_copy_of_the_tier_is_not_resumed(tmp_path: Path) -> None:
    schedule = schedule_for("nvme")
    train_on(tmp_path, schedule, 2)
    shutil.copy(tier_of(tmp_path), tmp_path / "copy")
    train_on(tmp_path, schedule, 5)
    shutil.copy(tmp_path / "copy", tier_of(tmp_path))
    with pytest.raises(CommitError, match="are not those of the last commit"):
        train_on(tmp_path, schedule)


def test_a_bit_of_the_record_or_of_the_resident_file(tmp_path: Path) -> None:
    schedule = schedule_for("memory")
    train_on(tmp_path, schedule, 2)
    for name, message in (
        ("commit.json", "is not|has format"),
        ("resident-2.bin", "is damaged|is not of the last commit"),
    ):
        path = tmp_path / "out" / name
        whole = path.read_bytes()
        for at in range(20, len(whole), len(whole) // 7):
            flip_a_bit(path, at)
            with pytest.raises((CommitError, StoreError), match=message):
                train_on(tmp_path, schedule)
            path.write_bytes(whole)
    assert same(train_on(tmp_path, schedule), plain_weights())


def test_a_file_that_was_cut_short_is_said_once(tmp_path: Path) -> None:
    train_on(tmp_path, schedule_for("memory"), 2)
    resident = tmp_path / "out" / "resident-2.bin"
    os.truncate(resident, 2 * PAGE_BYTES)
    with pytest.raises(CommitError) as refused:
        verify_commit(tmp_path / "out")
    assert str(refused.value).count("was cut short") == str(refused.value).count(str(resident)) == 1


# ---- under a run ----


def cut(tier: Path) -> None:
    os.truncate(tier, HEADER_BYTES + PAGE_BYTES)


def cut_and_filled_up(tier: Path) -> None:
    size_bytes = tier.stat().st_size
    os.truncate(tier, 0)
    os.truncate(tier, size_bytes)


def zeroed(tier: Path) -> None:
    overwrite(tier, 0, bytes(tier.stat().st_size))


def data_zeroed(tier: Path) -> None:
    overwrite(tier, HEADER_BYTES, bytes(tier.stat().st_size - HEADER_BYTES))


def removed(tier: Path) -> None:
    tier.unlink()


def replaced(tier: Path) -> None:
    shutil.copy(tier, tier.with_suffix(".copy"))
    tier.with_suffix(".copy").replace(tier)


def linked(tier: Path) -> None:
    tier.with_suffix(".link").hardlink_to(tier)


def replaced_by_a_link(tier: Path) -> None:
    tier.rename(tier.with_suffix(".moved"))
    tier.symlink_to(tier.with_suffix(".moved"))


@pytest.mark.parametrize(
    "change", [cut, cut_and_filled_up, zeroed, data_zeroed, removed, replaced, linked, replaced_by_a_link]
)
@pytest.mark.parametrize("checkpoint_every", [1, 4])
def test_a_change_under_a_run_is_noticed_before_the_next_commit(
    change: Callable[[Path], None], checkpoint_every: int, tmp_path: Path
) -> None:
    last = {1: 5, 4: 4}[checkpoint_every]

    def at_step_5(step: int, loss: float) -> None:
        if step == 5:
            log = CommitLog(tmp_path / "out")
            while (done := log.last()) is None or done.num_steps < last:  # it is made meanwhile
                time.sleep(0.01)
            change(tier_of(tmp_path))

    with pytest.raises(StoreError, match=r"tierplan\.tier"):
        train_on(tmp_path, schedule_for("nvme"), on_step=at_step_5, checkpoint_every=checkpoint_every)
    assert last_commit(tmp_path).num_steps == last


@pytest.mark.parametrize("at_step", [5, 6, 7])
def test_data_that_was_zeroed_beside_the_last_commit_is_not_used(at_step: int, tmp_path: Path) -> None:
    """Whether a step reads it before the next commit or not. What was committed stays whole, so nothing is lost."""

    def zero_the_rest(step: int, loss: float) -> None:
        if step == at_step:
            commit, tier, before = last_commit(tmp_path), tier_of(tmp_path), b""
            while (now := tier.read_bytes()) != before:  # what is written after it is zeroed is whole
                before = now
                time.sleep(0.05)
            assert commit.seal is not None
            kept = {commit.seal.offset_bytes: commit.seal.size_bytes}
            kept |= {where.offset_bytes: where.size_bytes for where in commit.contents.values() if where.in_store}
            pages = {
                page for at, size in kept.items() for page in range(at // PAGE_BYTES, -(-(at + size) // PAGE_BYTES))
            }
            for page in range((tier.stat().st_size - HEADER_BYTES) // PAGE_BYTES):
                if page not in pages:
                    overwrite(tier, HEADER_BYTES + page * PAGE_BYTES, bytes(PAGE_BYTES))

    schedule = schedule_for("nvme")
    with pytest.raises(DamageError):
        train_on(tmp_path, schedule, on_step=zero_the_rest, checkpoint_every=4)
    assert last_commit(tmp_path).num_steps == 4
    assert same(train_on(tmp_path, schedule), plain_weights())


def test_a_run_folder_that_was_replaced_gets_no_commit(tmp_path: Path) -> None:
    with new_trainer(tmp_path, schedule_for("memory")) as trainer:
        batches = make_batches(STEPS)
        trainer.run(batches[:3], 3)
        (tmp_path / "out").rename(tmp_path / "moved")
        shutil.copytree(tmp_path / "moved", tmp_path / "out")
        with pytest.raises(StoreError, match=r"tierplan\.lock was removed or replaced"):
            trainer.run(batches[3:], STEPS - 3)
    assert last_commit(tmp_path).num_steps == 3


def test_a_stop_that_nobody_expected_has_checksums(tmp_path: Path) -> None:

    schedule = schedule_for("nvme")
    with new_trainer(tmp_path, schedule, checkpoint_every=None) as trainer:
        trainer.on_step = lambda step, loss: trainer.request_stop()
        trainer.run(make_batches(STEPS), STEPS)
        assert trainer.num_steps_done < STEPS
    contents = last_commit(tmp_path).contents
    assert all(where.xxh3 for where in contents.values() if not where.is_absent)
    bit_flip(tier_of(tmp_path), contents["states/L0"])
    with pytest.raises(CommitError, match="is damaged"):
        train_on(tmp_path, schedule)


def test_a_step_that_failed_is_not_committed(tmp_path: Path) -> None:
    """Nor is anything behind it, whatever the caller does with the error."""

    def at_step_2(step: int, loss: float) -> None:
        if step == 2:
            raise OSError("from a callback")

    with new_trainer(tmp_path, schedule_for("nvme"), on_step=at_step_2) as trainer:
        with pytest.raises(OSError, match="from a callback"):
            trainer.run(make_batches(STEPS), STEPS)
        with pytest.raises(ExecutionError, match="has failed and cannot go on"):
            trainer.run(make_batches(STEPS), 1)
    assert last_commit(tmp_path).num_steps == 2


# ---- on demand ----


@pytest.mark.parametrize("choice", ["nvme", "memory"])
def test_a_commit_is_verified_on_demand(choice: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every damaged content is named at once; nothing is changed or locked."""
    schedule = schedule_for(choice)
    train_on(tmp_path, schedule, 3)
    contents = last_commit(tmp_path).contents
    command = ["run", "--verify", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    size_bytes = sum(where.size_bytes for where in contents.values())
    assert f"after 3 steps is whole: {len(contents)} contents, {size_bytes:,} bytes" in capsys.readouterr().out
    damaged = ["params/L0", "states/L1"]
    for name in damaged:
        where = contents[name]
        path = tier_of(tmp_path) if where.in_store else tmp_path / "out" / "resident-3.bin"
        flip_a_bit(path, where.offset_bytes + where.size_bytes - 1 + (HEADER_BYTES if where.in_store else 0))
    for _ in range(2):
        assert main(command) == 1
        (message,) = capsys.readouterr().err.splitlines()
        assert [name for name in contents if f"'{name}'" in message] == [n for n in contents if n in damaged]


def test_what_cannot_be_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "out").mkdir()
    for folder, message in (("out", "holds no commit"), ("nothing", "is not there")):
        assert main(["run", "--verify", "--out", str(tmp_path / folder)]) == 1
        assert message in capsys.readouterr().err
    assert not (tmp_path / "nothing").exists()
    schedule = schedule_for("nvme")
    with new_trainer(tmp_path, schedule) as trainer:
        trainer.run(make_batches(STEPS), 2)
        assert main(["run", "--verify", "--out", str(tmp_path / "out")]) == 1
        assert "out is in use by another run" in capsys.readouterr().err
    (tmp_path / "nvme").rename(tmp_path / "moved")
    assert main(["run", "--verify", "--out", str(tmp_path / "out")]) == 1
    assert "nvme/tierplan.tier, which the last commit needs, is missing" in capsys.readouterr().err
    assert main(["run", "--verify", "--out", str(tmp_path / "out"), "--nvme", str(tmp_path / "moved")]) == 0


def test_a_copy_of_a_run_is_verified_by_its_own_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the NVMe tier lies in the run's folder, as in `tierplan run`; so is a run that was moved."""
    run, copied, moved = (tmp_path / name for name in ("out", "copied", "moved"))
    train_on(tmp_path, schedule_for("nvme"), 3, nvme_dir=run / "nvme")
    where = last_commit(tmp_path).contents["states/L0"]

    def verified(folder: Path) -> str:
        code = main(["run", "--verify", "--out", str(folder)])
        said = capsys.readouterr()
        return said.out if code == 0 else said.err

    shutil.copytree(run, copied)
    assert f"is whole: {len(last_commit(tmp_path).contents)} contents" in (whole := verified(copied))
    assert f"NVMe tier in {copied / 'nvme'}" in whole.replace("\n", " ")
    bit_flip(copied / "nvme" / "tierplan.tier", where)
    assert "'states/L0' is damaged" in verified(copied)
    run.rename(moved)
    assert f"NVMe tier in {moved / 'nvme'}" in verified(moved).replace("\n", " ")
    (copied / "nvme" / "tierplan.tier").unlink()
    for _ in range(2):
        assert f"{copied / 'nvme' / 'tierplan.tier'}, which the last commit needs, is missing" in verified(copied)
        shutil.rmtree(copied / "nvme", ignore_errors=True)


def test_a_folder_of_another_place_is_noted_as_it_lies(tmp_path: Path) -> None:
    """Under the run's name by `..` or by a link, it is none of the run's own: a copy of that has no other one."""
    log = CommitLog(run := tmp_path / "run")
    (run / "nvme").mkdir(parents=True)
    (drive := tmp_path / "drive").mkdir()
    (run / "link").symlink_to(drive)
    assert (log.folder / log.noted(run / "nvme")).resolve() == (run / "nvme").resolve()
    assert not Path(log.noted(run / "nvme")).is_absolute()
    for way in (run / ".." / "drive", run / "link", drive):
        assert log.noted(way) == str(drive.resolve())
