"""Extents hold what was written to them, over one folder or several, and every bad folder is one clear error."""

from __future__ import annotations

import errno
import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from tierplan.runtime.memory.arena import PAGE_BYTES, Pool, map_host
from tierplan.runtime.memory.files import StoreError
from tierplan.runtime.memory.store import Extent, Store, measure_weights
from tierplan.runtime.memory.tier_file import HEADER_BYTES


def noise(size: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def read(store: Store, extent: Extent) -> torch.Tensor:
    found = torch.empty(extent.size_bytes, dtype=torch.uint8)
    store.read(extent, found)
    return found


@pytest.mark.parametrize(("num_folders", "weights"), [(1, ()), (2, ()), (3, (3.0, 1.0, 2.0))])
def test_extents_hold_what_was_written(tmp_path: Path, num_folders: int, weights: tuple[float, ...]) -> None:
    rng = random.Random(1)
    store = Store([tmp_path / f"drive{k}" for k in range(num_folders)], weights=weights)
    expected = {}
    for turn in range(60):
        if expected and rng.random() < 0.4:
            extent = rng.choice(list(expected))
            if rng.random() < 0.5:
                store.free(extent)
                del expected[extent]
                continue
        else:
            extent = store.allocate(rng.choice([1, 100, PAGE_BYTES, 70_000, 3 << 20, (9 << 20) + 5]))
        expected[extent] = noise(extent.size_bytes, turn)
        store.write(extent, expected[extent])
    ranges = sorted((e.offset_bytes, e.offset_bytes + e.size_bytes) for e in expected)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))
    assert all(read(store, extent).equal(data) for extent, data in expected.items())
    store.sync()
    store.close(remove=True)
    assert not any(any((tmp_path / f"drive{k}").iterdir()) for k in range(num_folders))


def test_aligned_memory_is_used_in_place(tmp_path: Path) -> None:
    store = Store([tmp_path])
    extent = store.allocate(10_000)
    pool = Pool(map_host, 1 << 20)
    block = pool.take(10_000)
    block.data.copy_(noise(10_000, 3))
    with mock.patch.object(store, "_staging", side_effect=AssertionError("copied through staging memory")):
        store.write(extent, block.pages)
        block.pages.zero_()
        store.read(extent, block.pages)
    assert torch.equal(block.data, noise(10_000, 3))
    store.close()


def test_known_extents_can_be_taken_again(tmp_path: Path) -> None:
    store = Store([tmp_path])
    kept = [store.allocate(5000) for _ in range(4)]
    for k, extent in enumerate(kept):
        store.write(extent, noise(5000, k))
    checksums = {k: store.verify(kept[k]) for k in (2, 0)}
    store.close()
    again = Store([tmp_path])
    for k in (2, 0):
        again.allocate_at(kept[k], checksums[k])
    fresh = [again.allocate(5000) for _ in range(3)]
    assert kept[0] not in fresh
    assert kept[2] not in fresh
    for k in (2, 0):
        assert read(again, kept[k]).equal(noise(5000, k))
    past_the_end = Extent(fresh[-1].offset_bytes, 1 << 20)
    for taken in (kept[0], past_the_end):
        with pytest.raises(StoreError, match="overlaps one that is in use"):
            again.allocate_at(taken, "")
    again.close()


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match="give a folder that you may write to"):
        Store([tmp_path / "file" / "sub"])


def test_full_disk_is_an_error_before_the_run(tmp_path: Path) -> None:
    store = Store([tmp_path])
    with pytest.raises(StoreError, match="free, but the plan needs 1,048,576 TiB there") as caught:
        store.reserve(1 << 60)
    assert caught.value.errno == errno.ENOSPC
    store.close()


def test_a_folder_serves_one_run_at_a_time(tmp_path: Path) -> None:
    store = Store([tmp_path])
    with pytest.raises(StoreError, match="in use by another run"):
        Store([tmp_path])
    store.close()
    Store([tmp_path]).close()


def test_without_direct_access_it_says_so_and_works(tmp_path: Path) -> None:
    real_open = os.open

    def refuse_direct(path: str, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real_open(path, flags, *rest)

    with mock.patch("tierplan.runtime.memory.files.os.open", refuse_direct):
        store = Store([tmp_path])
    assert "does not take O_DIRECT" in store.notes[0]
    extent = store.allocate(123_456)
    store.write(extent, noise(123_456, 1))
    assert read(store, extent).equal(noise(123_456, 1))
    store.close()


@pytest.mark.parametrize("left_bytes", [0, 1, 3 * PAGE_BYTES, 3 * PAGE_BYTES + 1])
def test_a_file_that_another_program_cut_ends_a_read(tmp_path: Path, left_bytes: int) -> None:
    """Inside a page, too, where direct access cannot go on."""
    store = Store([tmp_path])
    extent = store.allocate(8 * PAGE_BYTES)
    store.write(extent, noise(8 * PAGE_BYTES, 1))
    os.truncate(store.paths[0], HEADER_BYTES + left_bytes)
    with pytest.raises(StoreError, match="ended at"):
        store.read(extent, map_host(8 * PAGE_BYTES))


@pytest.mark.parametrize("num_folders", [1, 2])
@pytest.mark.parametrize("most_bytes", [PAGE_BYTES, 3 * PAGE_BYTES + 512])
def test_short_transfers_are_completed(tmp_path: Path, num_folders: int, most_bytes: int) -> None:
    """Those that end inside a page, and those that end in a later piece of memory, too."""
    store = Store([tmp_path / str(k) for k in range(num_folders)])
    extent = store.allocate(5_000_000)
    real = os.pwritev

    def short(fd: int, views: list[memoryview], at: int) -> int:
        data = b"".join(view[:most_bytes] for view in views[:2])[:most_bytes]
        memory = map_host(len(data))[: len(data)]
        memory.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return real(fd, [memory.numpy().data], at)

    with mock.patch("tierplan.runtime.memory.files.os.pwritev", short):
        store.write(extent, noise(5_000_000, 1))
    assert read(store, extent).equal(noise(5_000_000, 1))
    store.close()


def test_a_failing_drive_is_named(tmp_path: Path) -> None:
    store = Store([tmp_path])
    extent = store.allocate(20 << 20)
    failing = mock.patch(
        "tierplan.runtime.memory.files.os.preadv", side_effect=OSError(errno.EIO, "Input/output error")
    )
    with failing, pytest.raises(StoreError, match=f"could not read .*{tmp_path}"):
        store.read(extent, torch.empty(20 << 20, dtype=torch.uint8))
    store.close()


def test_faster_drives_hold_more(tmp_path: Path) -> None:
    store = Store([tmp_path / "fast", tmp_path / "slow"], weights=(3.0, 1.0))
    store.reserve(64 << 20)
    fast, slow = ((tmp_path / name / "tierplan.tier").stat().st_size for name in ("fast", "slow"))
    assert (fast - HEADER_BYTES, slow - HEADER_BYTES) == (48 << 20, 16 << 20)
    store.close()


def test_weights_are_speeds(tmp_path: Path) -> None:
    """On a clock that only transfers move, one drive twice as fast as the other."""
    clock = [0.0]
    real = os.preadv, os.pwritev
    slow_files = set()

    def timed(call: Callable[..., int]) -> Callable[..., int]:
        def move(fd: int, views: list[memoryview], at: int) -> int:
            is_slow = Path(f"/proc/self/fd/{fd}").readlink().is_relative_to(tmp_path / "slow")
            slow_files.add(is_slow)
            clock[0] += sum(map(len, views)) * (2e-9 if is_slow else 1e-9)
            return call(fd, views, at)

        return move

    with (
        mock.patch("tierplan.runtime.memory.files.os.preadv", timed(real[0])),
        mock.patch("tierplan.runtime.memory.files.os.pwritev", timed(real[1])),
        mock.patch("tierplan.runtime.memory.store.time.perf_counter", side_effect=lambda: clock[0]),
    ):
        found = measure_weights([tmp_path / "fast", tmp_path / "slow"], probe_bytes=1 << 20)
    assert found == pytest.approx([1e9, 0.5e9])
    assert slow_files == {True, False}
    assert not any((tmp_path / "fast").iterdir())


def test_data_is_found_by_the_round_that_it_was_written_with(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    store = Store(folders, weights=(2.0, 1.0))
    extent = store.allocate(7 << 20)
    store.write(extent, noise(7 << 20, 1))
    pattern, checksum = store.pattern, store.verify(extent)
    store.close()
    again = Store(folders, weights=(1.0, 1.0), pattern=pattern)
    again.allocate_at(extent, checksum)
    assert read(again, extent).equal(noise(7 << 20, 1))
    again.close()
    with pytest.raises(StoreError, match="the same folders in the same order"):
        Store(folders[:1], pattern=pattern)


def test_pool_reuses_by_size_and_stays_under_its_capacity() -> None:
    pool = Pool(map_host, 10 * PAGE_BYTES)
    first = pool.take(3 * PAGE_BYTES - 5)
    address = first.data.data_ptr()
    assert address % PAGE_BYTES == 0
    assert first.data.numel() == 3 * PAGE_BYTES - 5
    pool.give(first)
    assert pool.take(3 * PAGE_BYTES - 5).data.data_ptr() == address
    second = pool.take(4 * PAGE_BYTES)
    pool.give(second)
    pool.take(6 * PAGE_BYTES)
    assert pool.mapped_bytes <= 10 * PAGE_BYTES
    assert pool.lent_bytes == 9 * PAGE_BYTES
