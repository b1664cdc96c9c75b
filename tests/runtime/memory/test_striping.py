"""Stripes cover every byte once, in few requests, and follow the drives' speeds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierplan.runtime.memory.striping import REQUEST_BYTES, STRIPE_BYTES, Striping, stripe_pattern

PAGE = 4096


def place(pattern: tuple[int, ...], address: int) -> tuple[int, int]:
    """File and offset of one byte, by dealing out stripes one by one."""
    counts = [0] * (max(pattern) + 1)
    for stripe in range(address // STRIPE_BYTES):
        counts[pattern[stripe % len(pattern)]] += 1
    k = pattern[address // STRIPE_BYTES % len(pattern)]
    return k, counts[k] * STRIPE_BYTES + address % STRIPE_BYTES


@given(
    pattern=st.sampled_from([(0,), (0, 1), (0, 1, 0), (1, 0, 2, 1), (0, 0, 1, 1, 1)]),
    first=st.integers(0, 2000),
    num_pages=st.integers(1, 9000),
)
def test_requests_cover_the_range_once(pattern: tuple[int, ...], first: int, num_pages: int) -> None:
    offset, length = first * PAGE, num_pages * PAGE
    striping = Striping(pattern)
    covered = []
    shares = striping.shares(offset + length)
    for k, in_file, parts in striping.requests(offset, length):
        assert sum(size for _, size in parts) <= REQUEST_BYTES
        assert in_file + sum(size for _, size in parts) <= shares[k]
        for at, size in parts:
            covered.append((at, size))
            for byte in (at, at + size - 1):
                assert place(pattern, offset + byte) == (k, in_file + byte - at)
            in_file += size
    covered.sort()
    assert [at for at, _ in covered] == [sum(n for _, n in covered[:i]) for i in range(len(covered))]
    assert sum(size for _, size in covered) == length


def test_a_files_part_of_a_range_is_moved_by_large_requests() -> None:
    striping = Striping((0, 1))
    requests = striping.requests(3 * STRIPE_BYTES + PAGE, 64 * STRIPE_BYTES)
    assert len(requests) <= 2 * (32 * STRIPE_BYTES // REQUEST_BYTES + 1)
    assert [r.file for r in requests[:4]] == [1, 0, 1, 0] or [r.file for r in requests[:4]] == [0, 1, 0, 1]


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 1.0), (1.5, 1.0), (7.0, 3.3, 1.0), (2.9, 3.0, 3.1), (1.0, 30.0)])
def test_a_round_keeps_all_drives_busy(weights: tuple[float, ...]) -> None:
    pattern = stripe_pattern(weights)
    slowest = max(pattern.count(k) / w for k, w in enumerate(weights))
    assert set(pattern) == set(range(len(weights)))
    assert len(pattern) / slowest >= 0.97 * sum(weights)


def test_equal_drives_take_turns() -> None:
    assert stripe_pattern([2.0, 2.0, 2.0]) == (0, 1, 2)
    assert stripe_pattern([1.0, 1.01]) == (0, 1)
    assert sorted(stripe_pattern([3.0, 1.0])) == [0, 0, 0, 1]


@pytest.mark.parametrize("weights", [(1.0, 0.0), (1.0, float("nan")), (-1.0,), (float("inf"), 1.0)])
def test_weights_are_finite_and_above_0(weights: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="must be finite and above 0"):
        stripe_pattern(weights)
