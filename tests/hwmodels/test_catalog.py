"""The catalog: every number has its source, every file is read, and descriptions survive a round trip."""

from __future__ import annotations

import os
import pwd
import re
from importlib.resources import files
from pathlib import Path

import pytest

from tierplan.hwmodels import MachineError, catalog_names, load_description, load_machine
from tierplan.hwmodels.build import build_machine
from tierplan.hwmodels.catalog import here_path, load_curves, load_part
from tierplan.hwmodels.description import PARTS, Quantity, parse_description, write_description

MACHINES = catalog_names("machines")
PARTS_HELD = [(section, name) for section, folder in PARTS.items() for name in catalog_names(folder)]
SYSTEMS = ("fuyou-4090", "zero-offload-v100", "zero-infinity-4xh100", "ssdtrain-a100", "harmony-4x1080ti")


def test_the_machines_of_the_published_systems_are_there() -> None:
    assert set(SYSTEMS) <= set(MACHINES)


@pytest.mark.parametrize(
    ("home", "config", "base"),
    [
        ("/h", None, "/h/.config"),
        ("/h", "", "/h/.config"),
        ("/h", "/c", "/c"),
        ("/h", "relative", "/h/.config"),
        ("", None, f"{pwd.getpwuid(os.getuid()).pw_dir}/.config"),
        (None, None, f"{pwd.getpwuid(os.getuid()).pw_dir}/.config"),
    ],
)
def test_the_users_folder_is_the_same_wherever_one_works(
    home: str | None, config: str | None, base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("HOME", home), ("XDG_CONFIG_HOME", config)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert here_path() == Path(base, "tierplan/machines/here.toml")


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine_of_the_catalog_is_complete(name: str) -> None:
    machine = load_machine(name)
    streams = {stream.name for stream in machine.streams}
    assert {"gpu0.compute", "gpu0.h2d", "gpu0.d2h", "host.adam"} <= streams
    assert ("nvme" in {tier.name for tier in machine.tiers}) == ("nvme.read" in streams) == ("nvme.write" in streams)
    for stream in machine.streams:
        assert set(stream.takes) <= set(machine.limits)
        for rate in stream.rates.values():
            assert all(per_s > 0 for _, per_s in rate.points)


@pytest.mark.parametrize("name", MACHINES)
def test_every_number_of_a_machine_has_a_source(name: str) -> None:
    description = load_description(name)
    own = files("tierplan.hwmodels").joinpath("catalog", "machines", f"{name}.toml")
    assert own.is_file()
    words = {"gpu.part", "nvme.part", "link.p2p_path", "host.rounding"}
    for key, quantity in description.used().items():
        assert quantity.source, key
        assert key in words or quantity.basis != "given" or quantity.value == 0, f"{key} says no basis"
    for shared in (*description.switches, *description.limits):
        assert shared.basis != "given"


def named(quantity: Quantity) -> bool:
    """Whether its source is an address. Rules of thumb and fits have none."""
    thumb = quantity.basis in ("assumed", "calibrated") or isinstance(quantity.value, str)
    return thumb or "https://" in quantity.source


@pytest.mark.parametrize(("section", "name"), PARTS_HELD)
def test_every_number_of_a_part_names_an_address_that_was_opened(section: str, name: str) -> None:
    part = load_part(section, name)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", part.date), "the day when its addresses were opened"
    for key, quantity in part.values.items():
        assert quantity.basis != "given", key
        assert named(quantity), f"{key}: {quantity.source}"


@pytest.mark.parametrize("name", MACHINES)
def test_every_number_of_a_machine_names_an_address(name: str) -> None:
    for key, quantity in load_description(name).values.items():
        assert named(quantity) or quantity.value == 0, f"{key}: {quantity.source}"


@pytest.mark.parametrize("name", catalog_names("curves"))
def test_every_curve_names_a_file_at_a_commit(name: str) -> None:
    for quantity in load_curves(name).values.values():
        assert re.search(r"https://github\.com/\S+/blob/[0-9a-f]{40}/", quantity.source)


@pytest.mark.parametrize("name", MACHINES)
def test_descriptions_survive_a_round_trip(name: str) -> None:
    text = files("tierplan.hwmodels").joinpath("catalog", "machines", f"{name}.toml").read_text(encoding="utf-8")
    description = parse_description(text, where=f"{name}.toml")
    assert parse_description(write_description(description), where=f"{name}.toml") == description


@pytest.mark.parametrize("path", sorted(Path("docs/campaign").glob("*/*/machine.toml"))[:1], ids=str)
def test_a_file_that_was_measured_is_read_whole_or_not_at_all(path: Path) -> None:
    """Behind its required keys come drives, shared limits and shares, all of which a machine may be without."""
    text = write_description(parse_description(path.read_text(encoding="utf-8"), where="here.toml"))
    lines = text.splitlines(keepends=True)
    for kept in range(len(lines)):
        with pytest.raises(MachineError):
            build_machine(parse_description("".join(lines[:kept]), where="here.toml"))
    limits = text.index("[[limit]]")
    with pytest.raises(MachineError, match=r"here.toml: it was cut off: its last section is to be \[end\]"):
        parse_description(text[:limits], where="here.toml")
    for kept in range(limits, len(text.rstrip())):
        with pytest.raises(MachineError):
            parse_description(text[:kept], where="here.toml")


@pytest.mark.parametrize("name", catalog_names())
def test_a_part_that_is_chosen_once_more_changes_nothing(name: str) -> None:
    """Also in a machine that says more of it than the part does."""
    given = load_description(name).values
    for part in ("gpu.part", "nvme.part"):
        if part in given:
            assert load_machine(name, [f"{part}={given[part].value}"]).streams == load_machine(name).streams


@pytest.mark.parametrize("name", catalog_names("gpus"))
def test_a_card_computes_alike_wherever_it_is_chosen(name: str) -> None:
    """Its rates are facts of the part, not of the machine that had it first."""
    by_machine = [load_machine(m, [f"gpu.part={name}"]) for m in catalog_names() if f"{name}" not in FITTED.get(m, "")]
    rates = [{kind: r for kind, r in m.stream("gpu0.compute").rates.items()} for m in by_machine]
    assert all(r == rates[0] for r in rates)


FITTED = {"fuyou-4090": "rtx-4090", "roundpipe-8x4090": "rtx-4090", "ssdtrain-a100": "a100-pcie-40gb"}
"""Machines that have a card fitted to one system's steps, or with a locked clock: their file says so."""


@pytest.mark.parametrize("name", catalog_names("gpus"))
def test_attention_that_skips_nothing_is_no_quicker_than_the_peak(name: str) -> None:
    """Rates of attention count the full square, of which causal kernels compute half: that of an RTX 4090 is 237
    TFLOP/s, and its peak 165."""
    machine = load_machine("desktop-4090", [f"gpu.part={name}"])
    rates = machine.stream("gpu0.compute").rates
    for dtype in ("bf16", "fp16", "fp32"):
        if peak := load_part("gpu", name).number(f"gpu.peak_{dtype}"):
            fastest = max(per_s for _, per_s in rates[f"noncausal_attention_{dtype}_flops"].points)
            assert fastest <= peak
            assert 2 * fastest == max(per_s for _, per_s in rates[f"attention_{dtype}_flops"].points)


def test_a_machine_without_a_name_is_no_gpu() -> None:
    with pytest.raises(MachineError, match="no machine ' '; the catalog has"):
        load_machine(" ")
