"""States in parts: every parameter in one part, parts of whole grains, names that are read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierplan.sim.parts import GRAIN, part_content, part_ranges, unit_and_part


@given(st.integers(0, 20 * GRAIN), st.integers(1, 30))
def test_parts_cover_every_parameter_once_in_whole_grains(num_parameters: int, num_parts: int) -> None:
    parts = part_ranges(num_parameters, num_parts)
    assert [i for part in parts for i in part] == list(range(num_parameters))
    assert len(parts) <= num_parts
    assert len({len(part) for part in parts[:-1]}) <= 1
    assert all(part.start % GRAIN == 0 for part in parts)


def test_parts_begin_on_pages_of_any_state() -> None:
    """fp32 states are read and written in pages of 4 KiB, one region of so many values each."""
    assert [part.start * 4 % 4096 for part in part_ranges(10_000, 3)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("num_parameters", "num_parts", "sizes"),
    [
        (10_000, 3, [4096, 4096, 1808]),
        (4096, 4, [1024, 1024, 1024, 1024]),
        (4097, 4, [2048, 2048, 1]),
        (1000, 4, [1000]),
        (5000, 1, [5000]),
        (0, 4, []),
    ],
)
def test_sizes_of_parts(num_parameters: int, num_parts: int, sizes: list[int]) -> None:
    assert [len(part) for part in part_ranges(num_parameters, num_parts)] == sizes


def test_names_of_parts_are_read_back() -> None:
    assert part_content("L3", 0, 1) == "states/L3"
    assert part_content("L3", 1, 4) == "states/L3/1of4"
    assert unit_and_part("states/L3") == ("L3", 0, 1)
    assert unit_and_part("states/L3/11of16") == ("L3", 11, 16)
