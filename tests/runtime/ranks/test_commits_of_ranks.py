"""A crash at any moment of a commit leaves all ranks with the same last one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tierplan.runtime.checkpoint.commits import Commit, CommitError, CommitLog, CommitLogOfRank, Stored, with_changes


class Crash(Exception):
    pass


class TwoRanks:
    """Rank `rank` of two, which crashes at barrier `last` of a commit."""

    size = 2

    def __init__(self, rank: int, last: int | None = None) -> None:
        self.rank, self._last = rank, last

    def barrier(self, channel: str) -> None:
        if self._last == 0:
            raise Crash
        self._last = None if self._last is None else self._last - 1


def log(folder: Path, rank: int, last: int | None = None) -> CommitLogOfRank:
    ranks: Any = TwoRanks(rank, last)
    return CommitLogOfRank(folder, ranks)


def commit(num_steps: int) -> Commit:
    return Commit(num_steps=num_steps, run_id="ab", contents={}, settings={})


@pytest.mark.parametrize("crash_of_first", [0, 1, None])
@pytest.mark.parametrize("crash_of_second", [0, 1, None])
def test_all_ranks_go_on_from_one_step(crash_of_first: int | None, crash_of_second: int | None, tmp_path: Path) -> None:
    """Nobody passes a barrier before all have come: the others crash at the first one if one does there."""
    if 0 in (crash_of_first, crash_of_second):
        crash_of_first = crash_of_second = 0
    for rank in range(2):
        log(tmp_path, rank).write(commit(1))
    for rank, last in enumerate((crash_of_first, crash_of_second)):
        if last is None:
            log(tmp_path, rank, last).write(commit(2))
            continue
        with pytest.raises(Crash):
            log(tmp_path, rank, last).write(commit(2))
    found = [log(tmp_path, rank).last() for rank in range(2)]
    wanted = 1 if crash_of_first == 0 else 2
    assert [c.num_steps for c in found if c is not None] == [wanted, wanted]
    for rank in range(2):
        log(tmp_path, rank).write(commit(3))
        again = log(tmp_path, rank).last()
        assert again is not None
        assert again.num_steps == 3


@pytest.mark.parametrize("num", [1, 4])
@pytest.mark.parametrize(
    ("more", "what"),
    [({"contents": {"states/L0": Stored(size_bytes=8, offset_bytes=0, in_store=True)}}, "contents on the NVMe"),
     ({"rng": ("00",)}, "random numbers of its own")],
)  # fmt: skip
def test_another_number_of_ranks_is_told_what_only_as_many_can_resume(
    more: dict[str, Any], what: str, num: int, tmp_path: Path
) -> None:
    """On the drive every rank has its own extents, which are not cut anew."""
    for rank in range(2):
        log(tmp_path, rank).write(with_changes(commit(3), **more))
    other: Any = TwoRanks(0)
    other.size = num
    with pytest.raises(CommitError, match=f"holds a run of 2 ranks with {what}.*; resume it with 2 ranks"):
        (CommitLog(tmp_path) if num == 1 else CommitLogOfRank(tmp_path, other)).last()


def test_what_ranks_cannot_resume(tmp_path: Path) -> None:
    assert log(tmp_path, 0).last() is None
    log(tmp_path, 0).write(commit(1))
    with pytest.raises(CommitError, match="all ranks were committed after 1 steps, and this one was not"):
        log(tmp_path, 1).last()
    (tmp_path / "commit.json").write_text("[]")
    with pytest.raises(CommitError, match="does not say after how many steps"):
        log(tmp_path, 0).last()
