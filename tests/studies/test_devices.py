"""No command gives an answer for fewer devices than the machine has without saying so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tierplan.cli import main
from tierplan.commands import COMMANDS
from tierplan.hwmodels import load_machine
from tierplan.planner.policies import POLICIES
from tierplan.planner.policies.options import OptionError
from tierplan.planner.prediction import predict
from tierplan.sim.workloads.models import load_workload, workload_of
from tierplan.sim.workloads.workload import Training, Workload

CONFIG = {"model_type": "gpt2", "n_embd": 64, "n_head": 2, "n_layer": 2, "vocab_size": 500, "n_positions": 64}
TWO = ["--machine", "desktop-4090", "--set", "gpu.count=2", "--seq", "64", "--batch", "2"]
ASKED = {
    "simulate": ["--policy", "zero-offload", *TWO],
    "compare-policies": ["--policies", "zero-offload", *TWO],
    "plan": TWO,
    "advise": ["--workers", "1", *TWO],
    "explain-run": ["--policy", "zero-offload", "--step-s", "1", *TWO],
}
"""Commands that predict for a machine. `sweep` has its machines in a file, `page` the note in each of its answers;
`validate`, `calibrate` and `demo` one device."""
OTHERS = {
    "calibrate",
    "sweep",
    "compare",
    "demo",
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
    monkeypatch.setattr("tierplan.studies.slow_step.explain._best", lambda *_: None)
    few = {name: POLICIES[name] for name in ("in-memory", "zero-offload")}
    monkeypatch.setattr("tierplan.planner.loop.POLICIES", few)
    monkeypatch.setattr("tierplan.planner.search.budget.DEFAULT_OPS", 50_000)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    return "config.json"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_has_all_devices_or_says_so(policy: str, model: str) -> None:
    machine = load_machine("desktop-4090", ["gpu.count=2"])
    workload = load_workload(model, Training(gradient_accumulation_steps=2, sequence_length=64))
    answer = predict(policy, workload, machine)
    assert answer.fits
    if policy == "harmony":  # has another name on several
        assert answer.devices == 1
        assert "trains on 1 of the machine's 2 GPUs" in answer.devices_note
    else:
        assert (answer.devices, answer.devices_note) == (2, "")
        with pytest.raises(OptionError, match="a number from 1 to 2"):
            predict(policy, workload, machine, {"devices": 3})
    assert f"{answer.devices} of its 2 GPUs" in answer.where


@pytest.mark.parametrize("command", ASKED)
def test_the_first_line_says_how_many_devices(command: str, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    def first_line(*more: str) -> str:
        assert main([command, "--model", model, *ASKED[command], *more]) == 0
        return capsys.readouterr().out.split("\n", 1)[0]

    assert "2 GPUs" in first_line()
    assert "GPUs" not in first_line("--devices", "1")
    if command in ("simulate", "compare-policies", "explain-run"):
        flag = ASKED[command][0]
        said = first_line(flag, "harmony")
        assert "1 of its 2 GPUs" in said or "harmony on 1" in said


def test_a_sweep_says_it_too(model: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    study = f'[scenario]\nmodel = "{model}"\nmachine = "desktop-4090"\npolicy = "harmony"\nseq = 64\n'
    (tmp_path / "study.toml").write_text(study + "[set]\ngpu.count = [1, 2]\n")
    assert main(["sweep", str(tmp_path / "study.toml"), "--workers", "1", "-o", str(tmp_path / "out")]) == 0
    assert "1 of 2 rows do not use all GPUs: harmony trains on 1 of the machine's 2" in capsys.readouterr().err


def test_the_largest_of_a_family_is_not_called_the_largest_that_fits(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def two(training: Training) -> list[Workload]:
        return [workload_of(f"{n} layers", CONFIG | {"n_layer": n}, training) for n in (1, 2)]

    monkeypatch.setattr("tierplan.planner.questions.largest.family", two)
    assert main(["simulate", "--policy", "zero-offload", "--max-model", *TWO]) == 0
    out = capsys.readouterr().out
    assert out.startswith("zero-offload: 2 layers on desktop-4090, 2 of its 2 GPUs")
    assert "largest of its family: larger models may fit too" in out
