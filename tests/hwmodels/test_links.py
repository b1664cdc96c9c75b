"""What links carry by themselves, and together with others."""

from __future__ import annotations

import pytest

from tierplan.hwmodels import MachineError, load_machine


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
