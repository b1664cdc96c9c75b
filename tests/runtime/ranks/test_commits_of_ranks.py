"""A crash at any moment of a commit leaves all ranks with the same last one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.runtime.ranks.pair import run_ranks
from tests.runtime.ranks.test_ranks import ADAM, OWN_MEMORY
from tests.runtime.ranks.test_unlike_ranks import batches, mixture, planned
from tierplan.cli import main
from tierplan.runtime.checkpoint.commits import (
    FORMAT,
    VERSION,
    Commit,
    CommitError,
    CommitLog,
    CommitLogOfRank,
    Stored,
    _checksum,
    verify_commit,
    with_changes,
)
from tierplan.runtime.checkpoint.durability import _stored
from tierplan.runtime.memory.arena import Block
from tierplan.runtime.memory.store import Store
from tierplan.runtime.memory.tier_file import HEADER_BYTES
from tierplan.runtime.ranks.group import Ranks
from tierplan.runtime.reference import same_weights, train_plainly
from tierplan.runtime.trainer import Trainer


class Crash(Exception):
    pass


class TwoRanks:
    """Rank `rank` of two, which crashes at barrier `last` of a commit."""

    size = 2

    def __init__(self, rank: int, last: int | None = None, both: Sequence[Commit] = ()) -> None:
        self.rank, self._last, self._both = rank, last, both

    def barrier(self, channel: str) -> None:
        if self._last == 0:
            raise Crash
        self._last = None if self._last is None else self._last - 1

    def collect(self, own: str, channel: str) -> list[str]:
        """Checksums of the records of both, which commit the same if nothing else was given."""
        self.barrier(channel)
        records = [{"format": FORMAT, "version": VERSION, **msgspec.to_builtins(one)} for one in self._both]
        return [*map(_checksum, records)] or [own, own]


def log(folder: Path, rank: int, last: int | None = None, both: Sequence[Commit] = ()) -> CommitLogOfRank:
    ranks: Any = TwoRanks(rank, last, both)
    return CommitLogOfRank(folder, ranks)


def commit(num_steps: int, run_id: str = "ab") -> Commit:
    return Commit(num_steps=num_steps, run_id=run_id, contents={}, settings={})


def commit_both(folder: Path, both: Sequence[Commit]) -> None:
    for rank, own in enumerate(both):
        log(folder, rank, both=both).write(own)


def said(folder: Path) -> list[str]:
    """What those say who would go on from there, as many ranks and one process, and who verifies it."""
    ways: list[Callable[[], object]] = [
        log(folder, 0).last, log(folder, 1).last, CommitLog(folder).last, lambda: verify_commit(folder)
    ]  # fmt: skip
    texts = []
    for way in ways:
        with pytest.raises(CommitError) as refused:
            way()
        texts.append(str(refused.value).replace(str(folder), "RUN"))
    return texts


def test_another_rank_s_commit_is_none_of_this_one(tmp_path: Path) -> None:
    """Both go on from the other's state where folders were exchanged, and that was committed and exported."""
    commit_both(tmp_path / "run", [commit(3, "a1"), commit(3, "a2")])
    commit_both(tmp_path / "other", [commit(3, "b1"), commit(3, "b2")])
    shutil.copytree(tmp_path / "run", tmp_path / "mixed")
    for old, new in [("rank-0", "x"), ("rank-1", "rank-0"), ("x", "rank-1")]:
        (tmp_path / "run" / old).rename(tmp_path / "run" / new)
    first, second, *others = said(tmp_path / "run")
    assert first.startswith(
        "all ranks were committed after 3 steps, and RUN/rank-0/commit.json of rank 0 is that of rank 1;"
    )
    assert second.startswith(
        "all ranks were committed after 3 steps, and RUN/rank-1/commit.json of rank 1 is that of rank 0;"
    )
    assert others == [first, first]
    shutil.rmtree(tmp_path / "mixed" / "rank-1")
    shutil.copytree(tmp_path / "other" / "rank-1", tmp_path / "mixed" / "rank-1")
    assert log(tmp_path / "mixed", 0).last() == commit(3, "a1")
    with pytest.raises(CommitError, match="of rank 1 is not there, or is of another run or time; put back"):
        log(tmp_path / "mixed", 1).last()


def test_ranks_commits_without_that_of_all_are_an_error(tmp_path: Path) -> None:
    """A run began anew, and wrote over them."""
    log(tmp_path, 0, last=1).folder.joinpath("resident-1.bin").touch()  # of a crash before there was any commit
    assert log(tmp_path, 0).last() is None
    commit_both(tmp_path, [commit(3, "a1"), commit(3, "a2")])
    (tmp_path / "commit.json").unlink()
    (text,) = set(said(tmp_path))
    assert text.startswith(
        "RUN/commit.json of the last commit is missing, and that there was one is said by RUN/rank-0/"
    )


def test_commits_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """They said the number of steps alone."""
    commit_both(tmp_path, [commit(3, "a1"), commit(3, "a2")])
    (tmp_path / "commit.json").write_text("[3,2]")
    assert [log(tmp_path, rank).last() for rank in range(2)] == [commit(3, "a1"), commit(3, "a2")]
    assert verify_commit(tmp_path).count("is whole") == 2
    commit_both(tmp_path, [commit(4, "a1"), commit(4, "a2")])
    assert log(tmp_path, 1).last() == commit(4, "a2")


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


@pytest.mark.parametrize("num", [1, 2, 4])
@pytest.mark.parametrize(
    ("more", "what"),
    [({"contents": {"states/L0": Stored(size_bytes=8, offset_bytes=0, in_store=True)}}, "contents on the NVMe tier"),
     ({"rng": ("00",)}, "random numbers of its own")],
)  # fmt: skip
def test_who_divides_the_work_otherwise_is_told_what_only_as_many_can_resume(
    more: dict[str, Any], what: str, num: int, tmp_path: Path
) -> None:
    """On the drive every rank has its own extents, which are not cut anew. As many ranks go on with their own."""
    for rank in range(2):
        log(tmp_path, rank).write(own := with_changes(commit(3), **more))
    other: Any = TwoRanks(0)
    other.size = num
    resumed = CommitLog(tmp_path) if num == 1 else CommitLogOfRank(tmp_path, other)
    assert num != 2 or resumed.last() == own
    with pytest.raises(CommitError, match=f"of 2 ranks with {what}; resume it with 2 ranks, and with a plan that div"):
        resumed.parts if num == 2 else resumed.last()


def test_what_ranks_cannot_resume(tmp_path: Path) -> None:
    assert log(tmp_path, 0).last() is None
    log(tmp_path, 0).write(commit(1))
    with pytest.raises(
        CommitError, match=r"all ranks were committed after 1 steps, and .*rank-1/commit\.json of rank 1 is not there"
    ):
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
    paths, both = {}, list[Commit]()
    for rank in range(2):
        name, memory, one = "params/L0", contents[rank].to(torch.uint8), log(run, rank)
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
        both.append(with_changes(commit(3), contents=stored, **own))
    for rank in range(2):
        with pytest.raises(Crash) if rank else nullcontext():
            log(run, rank, 1 if rank else None, both).write(both[rank])
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


def copy_and_start(ranks: Ranks, folder: Path) -> list[str]:
    """What is wrong with what follows a copy of the state."""
    wrong = []
    for policy in ("ddp", "zero-3"):
        model, plain, given = mixture(), mixture(), batches([0, 1] * 4)
        schedule, settings = planned(model, policy, {}, 1), {"optimizer": ADAM, "ranks": ranks}
        with Trainer(schedule, model, **settings) as trainer:
            trainer.run(given, 2)
            trainer.save_copy(folder / policy)
        with Trainer(schedule, other := mixture(), start=folder / policy, **settings) as trainer:
            trainer.run(given[4:], 2)
            trainer.restore_model()
            losses = list(trainer.result().losses)
        if losses != train_plainly(plain, given, steps=4, optimizer=ADAM, gradient_accumulation_steps=2):
            wrong.append(f"{policy}: other losses")
        if not same_weights(other, plain):
            wrong.append(f"{policy}: other weights")
    return wrong


def test_a_copy_of_ranks_has_the_part_of_each(tmp_path: Path) -> None:
    """One process goes on from it, too. That of one rank was taken for the whole."""
    assert run_ranks(copy_and_start, 2, tmp_path) == [[], []]
    model, plain, given = mixture(), mixture(), batches([0, 1] * 4)
    train_plainly(plain, given, steps=4, optimizer=ADAM, gradient_accumulation_steps=2)
    schedule = planned(model, "in-memory", {}, 2, num=1)
    with Trainer(schedule, model, optimizer=ADAM, start=tmp_path / "zero-3") as trainer:
        trainer.run(given[4:], 2)
        trainer.restore_model()
    assert same_weights(model, plain)


DIVISIONS: list[tuple[str, dict[str, object]]] = [
    ("zero-3", {}), ("harmony-pp", {**OWN_MEMORY, "pack": 1}), ("harmony-pp", {**OWN_MEMORY, "pack": 2}),
    ("zero-2", {}), ("ddp", {}), ("zero-3", {"params": "host", "optimizer": "host"}), ("harmony-dp", OWN_MEMORY),
]  # fmt: skip
"""The last commit of each is what the next one goes on from."""


def train_divided(ranks: Ranks, folder: Path, divisions: Sequence[tuple[str, dict[str, object]]]) -> list[str]:
    """What is wrong with a step by each of these divisions of the work among as many ranks."""
    given = batches([0, 1] * len(divisions))
    for done, (policy, options) in enumerate(divisions):
        model, each = mixture(), 2 if policy.startswith("harmony") else 1
        with Trainer(
            planned(model, policy, options, each), model, optimizer=ADAM, ranks=ranks, out_dir=folder / "run",
            resume=True, nvme_dir=folder / f"nvme-{ranks.rank}",
        ) as trainer:  # fmt: skip
            assert trainer.num_steps_done == done
            trainer.run(given, 1)
            trainer.restore_model()
            losses = list(trainer.result().losses)
    plain = mixture()
    wanted = train_plainly(plain, given, steps=len(divisions), optimizer=ADAM, gradient_accumulation_steps=2)
    return [
        what for what, is_so in [("losses", losses == wanted), ("weights", same_weights(model, plain))] if not is_so
    ]


def test_as_many_ranks_go_on_with_another_division_of_the_work(tmp_path: Path) -> None:
    """Each rank had its own record alone: "the last commit has no 'params/embed' of 2,048 bytes; plan again"."""
    assert run_ranks(train_divided, 2, tmp_path, DIVISIONS) == [[], []]
