"""`tierplan machine`: what it lists and shows, and that it needs no torch for that."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from tierplan.cli import main
from tierplan.hwmodels import catalog_names, description, load_machine
from tierplan.hwmodels.catalog import here_path
from tierplan.hwmodels.description import KEYS

MEASURED = sorted(Path("docs/campaign").glob("*/*/machine.toml"))
"""Machine files that were published, measured when there was a key that is gone."""


def test_list_names_every_machine_and_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machine", "list"]) == 0
    out = capsys.readouterr().out
    for folder in ("machines", "gpus", "drives"):
        for name in catalog_names(folder):
            assert name in out


def test_show_gives_every_number_its_basis_and_marks_nameplate(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machine", "show", "desktop-4090", "--set", "nvme.drives=3"]) == 0
    out = capsys.readouterr().out
    drives = next(line for line in out.splitlines() if line.split()[:1] == ["nvme.drives"])
    assert "3" in drives
    assert "--set" in drives
    assert "nvme.read" in out.split("from data sheets: ")[1]


def test_show_as_json_holds_the_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machine", "show", "fuyou-4090", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["nvme.drives"]["value"] == 12
    assert record["gpu.matmul_fp16"]["basis"] == "calibrated"


def test_show_lists_the_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machine", "show", "laptop", "--keys"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in KEYS)


def test_machines_that_were_measured_before_are_read_with_a_note(caplog: pytest.LogCaptureFixture) -> None:
    assert MEASURED
    description._note_gone.cache_clear()  # another test may have read them
    with caplog.at_level(logging.WARNING):
        machines = [load_machine(path) for path in MEASURED]
    assert {machine.name for machine in machines} == {"here"}
    said = [message.partition(" means nothing any more")[0] for message in caplog.messages]
    assert said == [f"{path}: gpu.adam" for path in MEASURED]


def test_the_list_survives_a_machine_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    here_path().parent.mkdir(parents=True)
    for wrong, why in (("[gpu]\nadams = 1\n", "no key 'gpu.adams' in"), ("[gpu", "is not TOML"), ("gpu = 1", "gpu")):
        here_path().write_text(wrong)
        assert main(["machine", "list", "--json"]) == 0
        machines = json.loads(capsys.readouterr().out)["machines"]
        assert machines["laptop"]
        assert machines["here"].startswith("cannot be read: ")
        assert why in machines["here"]
        assert str(here_path()) in machines["here"]
        assert main(["machine", "show", "here"]) == 1
        assert str(here_path()) in capsys.readouterr().err


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machine", "show", "laptop", "--set", "nvme.drive=3"]) == 1
    assert "did you mean nvme.drives" in capsys.readouterr().err
    assert main(["machine", "show", "lptop"]) == 1
    assert "did you mean 'laptop'" in capsys.readouterr().err


def test_listing_and_showing_need_no_torch() -> None:
    code = (
        "import sys; from tierplan.cli import main; main(['machine', 'list']); main(['machine', 'show', 'laptop']);"
        "sys.exit('torch' in sys.modules or 'scipy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0


def test_the_list_says_what_rests_on_which_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machine", "list", "--sources"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if "gpu-specs/geforce-rtx-4070-ti-super" in line).split()[0] == "3"
    assert not [line for line in lines if "not opened" in line]


def test_the_list_is_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["machine", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert {"desktop-4090", "laptop"} <= listed["machines"].keys()
    assert listed["gpus"]["rtx-4090"]["gpu.capacity"]["value"] == 24564 * 2**20
    assert all("source" in number for number in listed["drives"]["990-pro"].values() if isinstance(number, dict))
    assert len(listed["gpus"]) >= 22
    assert len(listed["drives"]) >= 12
    assert all(part["basis"] and part["date"] for folder in ("gpus", "drives") for part in listed[folder].values())
    assert listed["gpus"]["rtx-4090"]["basis"] == "published"
    assert listed["gpus"]["rtx-5090"]["basis"] == "derived"


def test_addresses_of_sources_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    """In a table they would be cut into pieces; below it, each stands once."""
    assert main(["machine", "show", "desktop-4090"]) == 0
    out = capsys.readouterr().out
    assert out.count("https://www.techpowerup.com/gpu-specs/geforce-rtx-4090.c3889") == 1
    assert "assumed: " not in out
