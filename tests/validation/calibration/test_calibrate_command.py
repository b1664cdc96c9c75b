"""`tierplan calibrate` from the command line on a tiny model, and what other commands make of its file."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.configs import config_of
from tierplan.cli import main
from tierplan.validation.calibration import session


def test_what_is_calibrated_is_taken_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    for name, value in (("LEAST_TURNS", 2), ("PROFILE_STEPS", 2)):
        monkeypatch.setattr(session, name, value)
    (tmp_path / "tiny.json").write_text(json.dumps({**config_of("llama"), "num_hidden_layers": 5}))
    asked = ["--model", "tiny.json", "--machine", "desktop-4090", "--batch", "2", "--seq", "16"]
    asked += ["--dtype", "fp32", "--backend", "cpu"]
    assert main(["calibrate", *asked, "--device", "cpu", "--threads", "1", "--budget-s", "0.1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["config"]["num_hidden_layers"] == 3, "a shallow version"
    assert found["num_threads"] == found["devices"] == found["devices_of_machine"] == 1
    assert set(found["checks"]) == set(found["measured_step_s"]) - {"in-memory"}
    assert len(found["slowdowns"]) == 2 * 6, "of each of six plans' two turns"
    assert all(seconds > 0 for seconds in found["reference_s"])
    assert not list(tmp_path.glob("tierplan-calibration*")), "scratch files are removed"
    assert main(["simulate", "--policy", "in-memory", *asked, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["basis"].startswith("calibrated here with tiny, 2 x 16 tokens")
    assert answer["step_s"] > found["measured_step_s"]["in-memory"] / 10, "a CPU's seconds, not those of the GPU"
    assert main(["explain-run", *asked, "--step-s", "1", "--time-limit", "0.2", "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert explained["expected_s"] == answer["step_s"], "of the setup, as of the plan beside it"
    # a new installation makes machine code first: what that takes is left out of the budget, and all turns are taken
    monkeypatch.setattr(session, "wall_s", lambda: -1000 * time.monotonic())
    monkeypatch.setattr(session, "MOST_TURNS", 3)
    assert main(["calibrate", *asked, "--device", "cpu", "--threads", "1", "--budget-s", "0.1", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["slowdowns"]) == 3 * 6


def test_a_machine_without_drives_is_calibrated_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in (("LEAST_TURNS", 2), ("PROFILE_STEPS", 2)):
        monkeypatch.setattr(session, name, value)
    (tmp_path / "tiny.json").write_text(json.dumps(config_of("gpt2")))
    asked = ["--model", "tiny.json", "--machine", "desktop-4090", "--set", "nvme.drives=0", "--seq", "16"]
    asked += ["--dtype", "fp32", "--backend", "cpu", "--device", "cpu", "--threads", "1", "--budget-s", "0.1"]
    assert main(["calibrate", *asked, "-o", "it.json", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["measured_step_s"]) == 6
    assert not any("nvme" in stream for stream in found["streams"])


def test_a_folder_of_somebody_else_s_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its name: also that of a calibration that runs there meanwhile."""
    seen: list[Path] = []

    def begin(*, nvme_dir: Path, **settings: object) -> None:
        (nvme_dir / "scratch").touch()
        seen.append(nvme_dir)
        raise ValueError("enough")

    monkeypatch.setattr(session, "CalibrationSession", begin)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.json").write_text(json.dumps(config_of("gpt2")))
    other = tmp_path / "tierplan-calibration" / "mine.json"
    other.parent.mkdir()
    other.touch()
    asked = ["--model", "tiny.json", "--machine", "desktop-4090", "--seq", "16", "--dtype", "fp32", "--backend", "cpu"]
    for _ in range(2):
        assert main(["calibrate", *asked, "--device", "cpu", "--nvme", "drive", "-o", "it.json"]) != 0
    assert main(["calibrate", *asked, "--device", "cpu", "-o", "it.json"]) != 0
    assert len(set(seen)) == 3
    assert not any(path.exists() for path in seen)
    assert other.exists()
