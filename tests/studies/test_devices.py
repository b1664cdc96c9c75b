"""No command gives an answer for fewer devices than the machine has without saying so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tierplan.cli import main
from tierplan.commands import COMMANDS
from tierplan.planner.policies import POLICIES

CONFIG = {"model_type": "gpt2", "n_embd": 64, "n_head": 2, "n_layer": 2, "vocab_size": 500, "n_positions": 64}
TWO = ["--machine", "desktop-4090", "--set", "gpu.count=2", "--seq", "64", "--batch", "2"]
ASKED = {
    "simulate": ["--policy", "zero-offload", *TWO],
    "compare-policies": ["--policies", "zero-offload", *TWO],
    "plan": TWO,
    "advise": ["--workers", "1", *TWO],
}
"""Commands that predict for a machine. `sweep` has its machines in a file, `page` the note in each of its answers,
`explain-run` among its notes (see below), `validate`, `calibrate` and `demo` one device."""
OTHERS = {
    "calibrate",
    "sweep",
    "compare",
    "demo",
    "explain-run",
    "machine",
    "page",
    "reproduce",
    "run",
    "validate",
    "workload",
}


def test_every_command_is_looked_at() -> None:
    assert set(COMMANDS) == ASKED.keys() | OTHERS


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("tierplan.studies.advise.purchases", lambda description, prices: [])
    monkeypatch.setattr("tierplan.studies.advise._largest_model", lambda point: "")
    alone = {name: POLICIES[name] for name in ("in-memory", "zero-offload")}
    monkeypatch.setattr("tierplan.planner.planning.POLICIES", alone)
    monkeypatch.setattr("tierplan.planner.planning.on_all_devices", lambda *args: None)  # else all are used
    monkeypatch.setattr("tierplan.planner.planning.search_packs", lambda *args, **more: None)
    monkeypatch.setattr("tierplan.planner.search.budget.DEFAULT_OPS", 50_000)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


@pytest.mark.parametrize("command", ASKED)
def test_fewer_devices_are_said(command: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--model", model, *ASKED[command], "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    answer = answer.get("zero-offload", answer)
    assert (answer["devices"], answer["devices_of_machine"]) == (1, 2)
    assert "--devices 1" in answer["devices_note"]
    assert main([command, "--model", model, *ASKED[command]]) == 0
    assert " of the machine's 2 GPUs" in (text := " ".join(capsys.readouterr().out.split())) or "1 of 2 GPUs" in text
    assert main([command, "--model", model, *ASKED[command], "--devices", "1", "--json"]) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone.get("zero-offload", alone)["devices_note"] is None


def test_explain_run_says_it_among_its_notes(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierplan.studies.slow_step.explain._best", lambda *_: None)
    asked = ["explain-run", "--policy", "zero-offload", "--step-s", "1", "--model", model, *TWO]
    assert main([*asked, "--json"]) == 0
    assert "on 1 of the machine's 2 GPUs" in " ".join(json.loads(capsys.readouterr().out)["notes"])
    assert main([*asked, "--devices", "1", "--json"]) == 0
    assert "GPUs" not in " ".join(json.loads(capsys.readouterr().out)["notes"])


def test_a_sweep_says_it_too(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    study = f'[scenario]\nmodel = "{model}"\nmachine = "desktop-4090"\npolicy = "zero-offload"\nseq = 64\n'
    (tmp_path / "study.toml").write_text(study + "[set]\ngpu.count = [1, 2]\n")
    assert main(["sweep", str(tmp_path / "study.toml"), "--workers", "1", "-o", str(tmp_path / "out")]) == 0
    assert "1 of 2 rows do not use all GPUs: zero-offload trains on 1 of the machine's 2" in capsys.readouterr().err
