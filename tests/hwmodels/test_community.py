"""Shared files: anonymous, checked, and a basis of their own; those of the catalog are valid."""

from __future__ import annotations

from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

from tierplan.cli import main
from tierplan.hwmodels import Description, MachineError, Quantity, load_machine
from tierplan.hwmodels.catalog import catalog_names
from tierplan.hwmodels.community import SharedStep, parse_shared, share
from tierplan.hwmodels.description import write_description

MINE = Description(
    name="alices-box",
    summary="under the desk of alice",
    values={
        "gpu.part": Quantity("rtx-4090", "measured", "nvidia-smi on alices-box"),
        "gpu.matmul_bf16": Quantity(((1e10, 1.23456e14), (1e12, 1.6e14)), "measured", "/home/alice/run"),
        "link.h2d": Quantity(2.5e10, "assumed", "80 % of PCIe"),
        "nvme.write": Quantity(1.5e9, "measured", "fio"),
        "nvme.drives": Quantity(0.0, "measured", "none were asked for"),
        "host.price": Quantity(1500.0, "measured", "receipt of alice"),
    },
)


def test_a_file_holds_measured_rates_and_nothing_of_the_person() -> None:
    text = share(MINE, "2026-11", SharedStep(model="gpt2", policy="in-memory", batch=4, seq=512, step_s=0.25))
    assert "alice" not in text
    shared, values = parse_shared(text, where="x")
    assert (shared.gpu, shared.date) == ("rtx-4090", "2026-11")
    assert shared.step is not None
    assert set(values) == {"gpu.matmul_bf16", "nvme.write"}
    assert values["gpu.matmul_bf16"].value == ((1e10, 1.23e14), (1e12, 1.6e14))
    assert {q.basis for q in values.values()} == {"community"}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("version = 1", "version = 2", "it must be 'tierplan-community' 1"),
        ('date = "2026-11"', 'date = "yesterday"', "date is 'yesterday'"),
        ('gpu = "rtx-4090"', 'gpu = "Alice\'s card"', "gpu is"),
        ("[rates]", '[rates]\n"gpu.matmull" = 1e14', "no key 'gpu.matmull'"),
        ("[rates]", '[rates]\n"link.d2h" = "26 GB/s by alice"', "must be a number or points"),
        ("[rates]", 'author = "alice"\n[rates]', "unknown field 'author'"),
        ("[rates]", '[rates]\n"link.d2h" = 26', "did you mean"),
    ],
)
def test_what_is_wrong_is_refused_by_name(old: str, new: str, said: str) -> None:
    text = share(MINE, "2026-11")
    assert old in text
    with pytest.raises(MachineError, match=said):
        parse_shared(text.replace(old, new), where="x")


def test_a_machine_without_drives_names_none() -> None:
    """Where it began as one that has some."""
    values = {**MINE.values, "nvme.part": Quantity("990-pro", "nameplate", "the catalog's")}
    assert "drive" not in share(replace(MINE, values=values), "2026-11")
    values["nvme.drives"] = Quantity(2.0, "measured", "lsblk")
    assert 'drive = "990-pro"' in share(replace(MINE, values=values), "2026-11")


def test_nothing_measured_is_nothing_to_share() -> None:
    with pytest.raises(MachineError, match="run: tierplan machine measure"):
        share(replace(MINE, values={"link.h2d": MINE.values["link.h2d"]}), "2026-11")


def test_the_command_writes_such_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(write_description(MINE))
    target = tmp_path / "shared.toml"
    assert main(["machine", "share", str(tmp_path / "mine.toml"), "-o", str(target)]) == 0
    assert "nvme.write" in parse_shared(target.read_text(), where="x")[1]
    with pytest.raises(MachineError, match="`tierplan machine share` wrote it: rates without their machine"):
        load_machine(target)


def test_files_of_the_catalog_are_valid() -> None:
    folder = files("tierplan.hwmodels").joinpath("catalog", "community")
    for file in folder.iterdir():
        if file.name.endswith(".toml"):
            shared, _ = parse_shared(file.read_text(encoding="utf-8"), where=file.name)
            assert shared.gpu is None or shared.gpu in catalog_names("gpus"), file.name
            assert shared.drive is None or shared.drive in catalog_names("drives"), file.name
