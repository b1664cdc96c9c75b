"""Names of tiers and streams: what is made can be taken apart again, and every machine uses these names."""

from __future__ import annotations

import pytest

from tierplan.hwmodels import catalog_names, load_machine, names
from tierplan.hwmodels.names import StreamName, parse_stream


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (names.compute(1), StreamName("gpu1", "compute")),
        (names.h2d(0), StreamName("gpu0", "h2d")),
        (names.d2h(12), StreamName("gpu12", "d2h")),
        (names.p2p(0, 3), StreamName("gpu0", "p2p")),
        (names.collective(3), StreamName("gpu3", "collective")),
        ("nvme.read", StreamName("nvme", "read")),
        ("host.adam", StreamName("host", "adam")),
        ("a stream of its own", StreamName("a stream of its own")),
    ],
)
def test_a_name_comes_apart_as_it_was_made(name: str, parts: StreamName) -> None:
    assert parse_stream(name) == parts


@pytest.mark.parametrize(("tier", "index"), [("gpu0", 0), ("gpu17", 17), ("host", None), ("gpu", None), ("0", None)])
def test_only_devices_have_a_number(tier: str, index: int | None) -> None:
    assert names.device_index(tier) == index


def test_streams_are_shown_computing_first() -> None:
    streams = ["host.adam", "z", "nvme.write", "gpu1.compute", "gpu0.p2p.gpu1", "nvme.read", "gpu0.compute", "gpu0.d2h"]
    assert sorted(streams, key=names.display_order) == [
        "gpu0.compute", "gpu1.compute", "gpu0.d2h", "gpu0.p2p.gpu1", "nvme.read", "nvme.write", "host.adam", "z",
    ]  # fmt: skip
    many = [names.compute(device) for device in range(12)]
    assert sorted(sorted(many), key=names.display_order) == many, "gpu10 is behind gpu9, not behind gpu1"


def test_machines_have_these_tiers_and_streams() -> None:
    for name in catalog_names("machines"):
        machine = load_machine(name)
        for tier in machine.tiers:
            assert (names.device_index(tier.name) is not None) == (tier.kind == "device")
        devices = range(machine.num_devices)
        known = {names.HOST_ADAM, names.NVME_READ, names.NVME_WRITE}
        known |= {f(d) for f in (names.compute, names.h2d, names.d2h, names.collective) for d in devices}
        known |= {names.p2p(a, b) for a in devices for b in devices if a != b}
        assert {stream.name for stream in machine.streams} <= known
