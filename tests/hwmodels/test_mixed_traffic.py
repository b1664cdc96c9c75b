"""Reads and writes of one drive at once, against public fio tables: one number holds for all shares of writes."""

from __future__ import annotations

import pytest

from tierplan.hwmodels import load_machine

MIXES = [
    (566, 38.9, 37.6, 0.5), (566, 38.9, 38.2, 0.7), (557, 126, 108, 0.5), (557, 126, 122, 0.7),
    (586, 198, 143, 0.5), (586, 198, 178, 0.7), (628, 352, 234, 0.5), (628, 352, 301, 0.7),
]  # fmt: skip
"""MiB/s of reads alone, of writes alone, of the writes in a mix, their share of it: blocks of 4, 16, 32 and 128 KiB.
https://github.com/EricFanexe/ECSE6320/blob/55213dd74317df03737cd2aa33d23ff331767071/Project3/SSD_Performance.csv"""


def seconds_per_byte(settings: list[str], share_of_writes: float) -> float:
    """Of a drive that reads and writes all the time: its shared limit is full."""
    machine = load_machine("desktop-4090", settings)
    reads, writes = (machine.stream(f"nvme.{way}").takes["nvme"]["bytes"] for way in ("read", "write"))
    return ((1 - share_of_writes) * reads + share_of_writes * writes) / machine.limits["nvme"]


@pytest.mark.parametrize(("reads", "writes", "mixed_writes", "share"), MIXES)
def test_a_drive_without_a_number_takes_as_long_as_drives_that_were_measured(
    reads: float, writes: float, mixed_writes: float, share: float
) -> None:
    settings = [f"nvme.read={reads} MiB/s", f"nvme.write={writes} MiB/s"]
    measured = share / (mixed_writes * 2**20)
    assert seconds_per_byte(settings, share) == pytest.approx(measured, rel=0.07)


def test_a_drive_keeps_its_number_in_every_machine() -> None:
    """1.22 is what fio gives for a drive of 2,368 and 1,484 MiB/s, half of it reads."""
    assert load_machine("desktop-4090", ["nvme.part=p5510"]).limits["nvme"] == load_machine("fuyou-4090").limits["nvme"]
    settings = ["nvme.part=p5510", "nvme.read=2368 MiB/s", "nvme.write=1484 MiB/s", "nvme.mixed=1.22"]
    assert seconds_per_byte(settings, 0.5) == pytest.approx(0.5 / (1115.5 * 2**20), rel=0.01)


@pytest.mark.parametrize("cap", ["nvme.slot=3 GB/s", "nvme.array_read=3 GB/s"])
def test_what_caps_each_way_leaves_the_other_way_its_room(cap: str) -> None:
    """A slot carries both ways at once: only the flash behind it takes turns, at its own rates."""
    own, capped = load_machine("desktop-4090"), load_machine("desktop-4090", [cap])
    assert capped.stream("nvme.read").rates["bytes"].at(1e9) == 3e9
    for stream in ("nvme.read", "nvme.write"):
        assert capped.stream(stream).takes["nvme"] == own.stream(stream).takes["nvme"]
