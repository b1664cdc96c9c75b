"""What links carry by themselves, and together with others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.hwmodels.test_description import PLAIN, SOCKETS, SWITCHES, machine_of
from tierplan.hwmodels import MachineError, load_description, load_machine
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


def test_a_card_in_a_machine_that_was_measured_without_one_has_a_link_of_its_own(tmp_path: Path) -> None:
    """Copies within host memory were its link, took host cores, and the CPU's budget stayed taken of host memory."""
    cores = 'name = "cores"\nlimit = 1.0\ntakes = { "gpu0.compute" = 1.0, "gpu0.h2d" = 0.5, "host.adam" = 0.5 }\n'
    text = PLAIN + f'[[limit]]\n{cores}[shares]\n"gpu0.h2d" = 2.0\n'
    (of_cpu := tmp_path / "cpu.toml").write_text(text)
    (of_gpu := tmp_path / "gpu.toml").write_text(text.replace('"gpu0.compute" = 1.0, ', ""))
    assert (measured := load_machine(of_cpu)).stream("gpu0.h2d").share == 2.0
    described = load_description(of_cpu, ["gpu.part=rtx-4090", "link.d2h=11 GB/s"])
    machine = build_machine(described)
    up, down = machine.stream("gpu0.h2d"), machine.stream("gpu0.d2h")
    assert max(up.rates["bytes"].points)[1] == pytest.approx(25.2e9, rel=0.01)
    assert max(down.rates["bytes"].points)[1] == 11e9, "one that is given holds"
    assert (up.takes.keys() & {"cores"}, up.share) == (set(), 1.0)
    assert described.values["link.h2d"].basis == "assumed"
    assert "measured without a GPU" in described.values["link.h2d"].source
    assert machine.tier("host").capacity_bytes - measured.tier("host").capacity_bytes == 24e9
    kept = load_machine(of_gpu, ["gpu.part=rtx-4090"]).stream("gpu0.h2d")
    assert (max(kept.rates["bytes"].points)[1], kept.share) == (20e9, 2.0), "of a GPU's measurement it stays"


def test_a_section_that_is_written_as_a_value_is_told_how_it_is_written() -> None:
    with pytest.raises(
        MachineError, match=r"gpu is 'rtx-4090'; write \[gpu\] on a line, and what it has below, by key"
    ):
        parse_description('gpu = "rtx-4090"', where="x.toml")
