"""A crash at any moment of a commit leaves all ranks with the same last one."""

from __future__ import annotations

import re
import shutil
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tierplan.cli import main
from tierplan.runtime.checkpoint.commits import Commit, CommitError, CommitLog, CommitLogOfRank, Stored, with_changes
from tierplan.runtime.checkpoint.durability import _stored
from tierplan.runtime.memory.arena import Block
from tierplan.runtime.memory.store import Store
from tierplan.runtime.memory.tier_file import HEADER_BYTES


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


@pytest.mark.parametrize("where", ["memory", "nvme"])
def test_a_run_of_ranks_is_verified_rank_by_rank(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the second one had not taken the commit of all for its last one yet."""
    run, drives = tmp_path / "out", tmp_path / "drives"
    command, contents = ["run", "--verify", "--out", str(run)], {0: torch.arange(9000) % 251, 1: torch.arange(50) % 7}
    paths = {}
    for rank in range(2):
        name, memory, one = "params/L0", contents[rank].to(torch.uint8), log(run, rank, last=1 if rank else None)
        own: dict[str, Any] = {}
        if where == "memory":
            stored = one.write_resident("ab", 3, [(name, [Block(memory, memory)])])
            paths[rank], at = one.resident_path(3), stored[name].offset_bytes
        else:
            folder = (run if rank else drives) / "nvme" / f"rank-{rank}"
            with closing(Store([folder])) as store:
                extent, seal = (store.allocate(len(memory)) for _ in range(2))
                for each in (extent, seal):
                    store.write(each, memory, will_be_committed=True)
                store.sync()
                stored = {name: _stored(extent, store)}
                paths[rank], at = store.paths[0], HEADER_BYTES + extent.offset_bytes
                own = {
                    "seal": _stored(seal, store), "folders": (one.noted(folder),), "stripes": store.pattern,
                    "store_bytes": store.size_bytes,
                }  # fmt: skip
        committed = with_changes(commit(3), contents=stored, **own)
        with pytest.raises(Crash) if rank else nullcontext():
            one.write(committed)
    for more in ([], ["--nvme", str(drives / "nvme")]) if where == "nvme" else ([],):
        if more:
            shutil.move(run / "nvme" / "rank-1", drives / "nvme" / "rank-1")
            paths[1] = drives / "nvme" / "rank-1" / "tierplan.tier"
        assert main([*command, *more]) == 0
        whole = capsys.readouterr().out.replace("\n", " ")
        assert "rank-0: the commit after 3 steps is whole: 1 contents, 9,000 bytes" in whole
        assert "rank-1: the commit after 3 steps is whole: 1 contents, 50 bytes" in whole
    with paths[1].open("r+b") as file:
        file.seek(at)
        file.write(b"\xff")
    assert main([*command, *more]) == 1
    assert re.search(r"rank-1: 'params/L0'.* is damaged", capsys.readouterr().err)
