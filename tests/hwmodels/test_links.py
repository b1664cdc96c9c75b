"""What links carry by themselves, and together with others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.hwmodels.test_description import PLAIN, SOCKETS, SWITCHES, machine_of
from tierplan.hwmodels import MachineError, load_machine
from tierplan.hwmodels.build import build_machine
from tierplan.hwmodels.description import override, parse_description, write_description


def test_a_quicker_link_has_an_effect_where_the_total_of_all_links_is_assumed() -> None:
    """PCIe 5.0 in place of 4.0: what a desktop's processor carries for all cards is assumed, and one link is told."""
    machine = load_machine("desktop-4090", ["link.h2d=50 GB/s"])
    assert machine.limits.get("host_link.h2d", 50e9) == 50e9
    held = load_machine("desktop-4090", ["link.h2d=50 GB/s", "link.host_h2d=25 GB/s"])
    assert held.limits["host_link.h2d"] == 25e9, "one that is given holds"


def test_collectives_over_pcie_are_not_told_to_be_quicker_than_their_links() -> None:
    with pytest.raises(
        MachineError, match=r"link.collective is 45 GB/s, but .* of 5.9 GB/s each; give link.p2p_path=own"
    ):
        load_machine("fsdp-qlora-2x3090", ["link.collective=45 GB/s"])
    assert load_machine("fsdp-qlora-2x3090", ["link.collective=45 GB/s", "link.p2p_path=own"]).num_devices == 2


def test_fewer_gpus_than_the_switches_name_is_no_error() -> None:
    """Where somebody asks about fewer; in the file it is one, which says the name."""
    four = parse_description(PLAIN.replace("[gpu]", "[gpu]\ncount = 4") + SWITCHES + SOCKETS, where="x.toml")
    four = replace(four, switches=(replace(four.switches[0], members=("gpu0", "gpu1")), *four.switches[1:]))
    one = override(four, ["gpu.count=1"])
    machine = build_machine(one)
    assert {s.name for s in machine.streams if "switch.a.up" in s.takes} == {"gpu0.d2h"}
    assert {s.name for s in machine.streams if "switch.socket1.up" in s.takes} == {"nvme.read"}
    assert "switch.b.up" not in machine.limits
    assert build_machine(parse_description(write_description(one), where="one.toml")).limits == machine.limits
    with pytest.raises(MachineError, match=r"switch 'b' of machine 'plain' has member 'gpu2', but gpu.count is 2: "):
        machine_of(PLAIN.replace("[gpu]", "[gpu]\ncount = 2") + SWITCHES)
