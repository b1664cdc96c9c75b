"""A commit is made while the next steps run, and holds what was there when it was begun."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.runtime.checkpoint.test_commits import new_trainer, plain_weights, same, schedule_for, train_on
from tests.runtime.models import make_batches
from tierplan.runtime.checkpoint.commits import CommitLog
from tierplan.runtime.checkpoint.snapshot import Snapshot
from tierplan.runtime.memory import files
from tierplan.runtime.memory.arena import PAGE_BYTES, Block, Pool, map_host
from tierplan.runtime.memory.files import StoreError
from tierplan.sim.ranks import Turn

pytestmark = pytest.mark.usefixtures("one_thread")


LONG_S = 30.0


def roomy(blocks: Mapping[str, Block], spare_bytes: int) -> Snapshot:
    """A snapshot for whose copies there is mapped memory."""
    pool = Pool(map_host, spare_bytes)
    pool.prepare(block.data.numel() for block in blocks.values())
    return Snapshot(blocks, spare_bytes, pool)


def begun(change: Callable[[], object]) -> threading.Thread:
    """A thread that changes something, after a moment in which it may have waited."""
    thread = threading.Thread(target=change, daemon=True)
    thread.start()
    thread.join(0.1)
    return thread


def has_ended(thread: threading.Thread) -> bool:
    thread.join(LONG_S)
    return not thread.is_alive()


@pytest.mark.parametrize("spare_bytes", [0, 3 * PAGE_BYTES, 100 * PAGE_BYTES])
def test_a_snapshot_holds_what_was_there_whoever_changes_it_meanwhile(
    spare_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierplan.runtime.checkpoint.snapshot.PIECE_BYTES", PAGE_BYTES)
    pages = {str(k): torch.full((3 * PAGE_BYTES,), k, dtype=torch.uint8) for k in range(20)}
    blocks = {name: Block(p, p) for name, p in pages.items()}
    snapshot = roomy(blocks, spare_bytes)

    def change() -> None:
        for name in reversed(blocks):
            snapshot.before_change(blocks[name])
            pages[name].zero_()

    changes = threading.Thread(target=change)
    changes.start()
    found = {name: torch.cat([piece.data.clone() for piece in pieces]) for name, pieces in snapshot.read()}
    assert has_ended(changes)
    assert found.keys() == blocks.keys()
    assert all(torch.equal(memory, torch.full_like(memory, int(name))) for name, memory in found.items())
    assert not any(p.any() for p in pages.values())


def test_nobody_has_to_wait_when_all_is_read_or_given_up() -> None:
    """Until then no thread does an op of another stream, which may wait for this one."""
    pages = [torch.ones(PAGE_BYTES, dtype=torch.uint8) for _ in range(2)]
    snapshot = Snapshot({str(k): Block(p, p) for k, p in enumerate(pages)})
    assert not Snapshot({}).is_left
    for _, pieces in snapshot.read():
        assert snapshot.is_left, "the last one is being read"
        assert len(list(pieces)) == 1
    assert not snapshot.is_left
    given_up = Snapshot({"a": Block(pages[0], pages[0])})
    assert given_up.is_left
    given_up.end()
    assert not given_up.is_left


def test_copies_take_no_more_than_there_is_room_for() -> None:
    pages = [torch.zeros(PAGE_BYTES, dtype=torch.uint8) for _ in range(3)]
    blocks = {str(k): Block(p, p) for k, p in enumerate(pages)}
    snapshot = roomy(blocks, 2 * PAGE_BYTES)
    for name in ("0", "1"):
        snapshot.before_change(blocks[name])
    waits = begun(lambda: snapshot.before_change(blocks["2"]))
    assert waits.is_alive()
    read = snapshot.read()
    name, pieces = next(read)
    assert name == "2", "what somebody waits for comes first"
    (piece,) = pieces
    assert piece.data.data_ptr() == pages[2].data_ptr(), "nothing is copied that nobody is about to change"
    waits.join(0.1)
    assert waits.is_alive(), "it may not change while it is read"
    assert next(read)[0] == "0"
    assert has_ended(waits)


def test_changes_that_overtake_the_reading_wait_for_one_block_only() -> None:
    """The reading goes on with what changes last, and never again reads what is about to change."""
    pages = [torch.zeros(PAGE_BYTES, dtype=torch.uint8) for _ in range(5)]
    blocks = {str(k): Block(p, p) for k, p in enumerate(pages)}
    snapshot = roomy(blocks, PAGE_BYTES)
    read = snapshot.read()
    assert [next(read)[0], next(read)[0]] == ["0", "1"], "what changes soonest comes first"
    waits = begun(lambda: snapshot.before_change(blocks["1"]))
    assert waits.is_alive()
    assert next(read)[0] == "4"
    assert has_ended(waits)
    snapshot.before_change(blocks["2"])
    assert [name for name, _ in read] == ["2", "3"]


def test_who_changes_what_is_being_read_waits_for_a_piece_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierplan.runtime.checkpoint.snapshot.PIECE_BYTES", PAGE_BYTES)
    pages = torch.ones(3 * PAGE_BYTES, dtype=torch.uint8)
    block = Block(pages[:-1], pages)
    snapshot = roomy({"0": block}, pages.numel())
    _, pieces = next(snapshot.read())
    found = [next(pieces).data]
    changes = begun(lambda: (snapshot.before_change(block), pages.zero_()))
    assert changes.is_alive()
    assert found[0].all()
    found.append(next(pieces).data)
    assert has_ended(changes), "the copy is read now"
    found += [piece.data for piece in pieces]
    assert [len(data) for data in found] == [PAGE_BYTES, PAGE_BYTES, PAGE_BYTES - 1]
    assert all(data.all() for data in found[1:])


def test_what_changes_again_while_its_copy_is_read_is_not_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a slow drive the next step's update comes while the last one's copy is being written."""
    monkeypatch.setattr("tierplan.runtime.checkpoint.snapshot.PIECE_BYTES", PAGE_BYTES)
    pages = torch.ones(4 * PAGE_BYTES, dtype=torch.uint8)
    pool, block = Pool(map_host, 2 * pages.numel()), Block(pages, pages)
    pool.prepare([pages.numel()] * 2)
    snapshot = Snapshot({"0": block}, 2 * pages.numel(), pool)
    _, pieces = next(snapshot.read())
    found = [next(pieces).data.clone()]
    changes = begun(lambda: snapshot.before_change(block))
    found.append(next(pieces).data.clone())
    assert has_ended(changes)
    pages.fill_(2)
    snapshot.before_change(block)
    found += [piece.data.clone() for piece in pieces]
    assert torch.cat(found).eq(1).all()


def test_what_has_been_read_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tierplan.runtime.checkpoint.snapshot.PIECE_BYTES", PAGE_BYTES)
    pages = torch.ones(3 * PAGE_BYTES, dtype=torch.uint8)
    pool, block = Pool(map_host, pages.numel()), Block(pages, pages)
    pool.prepare([pages.numel()])  # with zeros
    snapshot = Snapshot({"0": block}, pages.numel(), pool)
    _, pieces = next(snapshot.read())
    next(pieces)
    changes = begun(lambda: snapshot.before_change(block))
    assert [piece.data.all() for piece in pieces] == [True, True]
    assert has_ended(changes)
    snapshot.end()
    assert pool.take(pages.numel()).data.view(3, -1).any(1).tolist() == [False, True, True]


def test_memory_for_copies_is_mapped_by_the_commit_that_lacks_it() -> None:
    """And not by who changes a block, who would wait for its pages longer than for a drive."""
    pages = torch.ones(PAGE_BYTES, dtype=torch.uint8)
    pool, block = Pool(map_host, PAGE_BYTES), Block(pages, pages)
    first = Snapshot({"0": block}, PAGE_BYTES, pool)
    waits = begun(lambda: first.before_change(block))
    assert waits.is_alive()
    assert pool.mapped_bytes == 0
    assert [name for name, _ in first.read()] == ["0"]
    assert has_ended(waits)
    first.prepare_next()
    assert pool.mapped_bytes == PAGE_BYTES
    second = Snapshot({"0": block}, PAGE_BYTES, pool)
    second.before_change(block)  # does not wait
    pages.zero_()
    assert [torch.cat([piece.data for piece in pieces]).all() for _, pieces in second.read()] == [True]
    second.prepare_next()
    assert pool.mapped_bytes == PAGE_BYTES


def test_nobody_waits_for_a_snapshot_that_has_ended() -> None:
    page = torch.zeros(PAGE_BYTES, dtype=torch.uint8)
    snapshot = Snapshot({"0": Block(page, page)})
    snapshot.end()
    snapshot.before_change(Block(page, page))
    assert list(snapshot.read()) == []


@pytest.mark.parametrize("choice", ["memory", "nvme", "memory_and_nvme"])
def test_steps_go_on_while_a_commit_is_made(tmp_path: Path, choice: str) -> None:
    """The first commit is held up until the step behind it has a loss; it holds the state before that step."""
    schedule = schedule_for(choice)
    has_gone_on = threading.Event()
    real = CommitLog.write

    def write(log: CommitLog, commit: Any) -> None:
        assert has_gone_on.wait(LONG_S), "nothing runs while a commit is made"
        real(log, commit)

    with mock.patch.object(CommitLog, "write", write), new_trainer(tmp_path, schedule) as trainer:
        real_forward = trainer._begin_micro_batch

        def begin(step: int, m: int, turn: Turn) -> Any:
            if step == 1:
                has_gone_on.set()
            return real_forward(step, m, turn)

        with mock.patch.object(trainer, "_begin_micro_batch", begin):
            trainer.run(make_batches(3), 3)
        assert has_gone_on.is_set()
    assert same(train_on(tmp_path, schedule), plain_weights())


def test_a_commit_that_fails_beside_a_step_ends_the_run(tmp_path: Path) -> None:
    schedule = schedule_for("memory")
    train_on(tmp_path, schedule, 2)
    with new_trainer(tmp_path, schedule, resume=True) as trainer:
        full = StoreError(errno.ENOSPC, "the drive is full")
        with mock.patch.object(files, "sync_file", side_effect=full), pytest.raises(StoreError, match="drive is full"):
            trainer.run(make_batches(8), 5)
    assert same(train_on(tmp_path, schedule), plain_weights())
