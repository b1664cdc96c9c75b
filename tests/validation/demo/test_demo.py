"""The demo: its budgets do what they are for, its whole run holds together, and it ends well when it must end early."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.toys import toy_machine, toy_workload
from tierplan import Training, load_machine, load_workload
from tierplan.cli import main
from tierplan.commands.evidence.demo import demo_lines
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.planner.prediction import predict
from tierplan.runtime.data.synthetic import seeded_model
from tierplan.runtime.measure import machine
from tierplan.runtime.measure.loads import Sizes
from tierplan.runtime.reference import train_with_tracked_memory
from tierplan.sim.analysis.completion import OutOfMemory
from tierplan.sim.analysis.steady import steady_state
from tierplan.validation.calibration import session
from tierplan.validation.demo import demo
from tierplan.validation.demo.demo import byte_tokens, demo_budgets, load_notes, run_demo


def test_budgets_are_too_small_for_training_in_memory_and_for_states_in_host_memory() -> None:
    workload = toy_workload(6, slots=12)
    in_memory_bytes, place = demo_budgets(workload, toy_machine())
    assert place.tier("gpu0").capacity_bytes < in_memory_bytes
    for choice in (UnitPlan(), UnitPlan(params="host", grads="host", states="host")):
        plan = UnitwisePlan(policy="without NVMe", units=(choice,) * len(workload.units))
        with pytest.raises(OutOfMemory):
            steady_state(lower(plan, workload, place), place)


def test_a_busy_machine_is_said() -> None:
    assert load_notes(0.2, 2) == load_notes(1.2, 2) == load_notes(7.0, 16) == []
    assert "load 5.6 on 2 cores" in load_notes(5.6, 2)[0]


def test_the_text_is_the_same_bytes_each_time() -> None:
    tokens = byte_tokens(100_000)
    assert len(tokens) == 100_000
    assert tokens.min() >= 0
    assert tokens.max() <= 255
    assert (tokens == byte_tokens(100_000)).all()
    assert b"import" in bytes(tokens.astype("uint8"))


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(SystemExit, match="2"):
        main(["demo", "--out", str(tmp_path / "file" / "out")])
    error = capsys.readouterr().err
    assert "cannot write" in error
    assert "--out" in error
    assert "Traceback" not in error


def test_too_few_steps_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["demo", "--out", str(tmp_path), "--steps", "1"])
    assert "give a whole number of 4 or more" in capsys.readouterr().err


def test_plain_training_is_tracked_without_the_gradients_of_the_step_before(tmp_path: Path) -> None:
    """At its peak, the end of a forward, it holds what the simulator says: parameters, states and activations."""
    config = {**json.loads(demo.demo_config().read_text()), "n_embd": 128, "n_layer": 4, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(config))
    training = Training(per_device_train_batch_size=2, sequence_length=64, dtype="fp32", backend="cpu")
    workload = load_workload(str(tmp_path), training)
    model = seeded_model(config, training)
    batches = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 512, (4, 2, 64))]
    _, held = train_with_tracked_memory(model, batches, steps=4, num_threads=1, on_step=lambda step, loss: None)
    steady = predict("in-memory", workload, load_machine("desktop-4090")).steady
    assert steady is not None
    assert held == pytest.approx(steady.peak_bytes["gpu0"], rel=0.05)


def test_the_whole_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a smaller model, a quarter of the demo's tokens and less time for each part of it."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(demo.demo_config().read_text()), "n_embd": 256, "n_layer": 6}))
    for name, value in (("SEQUENCE", 64), ("CALIBRATE_S", 1.0), ("PLAN_S", 1.0), ("demo_config", lambda: config)):
        monkeypatch.setattr(demo, name, value)
    for name, value in (("PROFILE_STEPS", 2), ("LEAST_TURNS", 2)):
        monkeypatch.setattr(session, name, value)
    sizes = Sizes(hidden=(128, 256), block_hidden=256, tokens=64, area_bytes=64 << 20, file_area_bytes=256 << 20)
    monkeypatch.setattr(machine, "_plan", lambda *settings: (3, sizes))
    result = run_demo(tmp_path, steps=4, measure_s=5)
    record = json.loads((tmp_path / "result.json").read_text())
    assert record["losses"] == record["reference_losses"]
    assert record["weights_equal"]
    assert record["bytes_agree"]
    assert record["moved_bytes"]["nvme.read"]["measured"] > 0
    assert result.in_memory_measured_bytes > result.machine.tier("gpu0").capacity_bytes
    for tier in record["tiers"]:
        assert tier["peak_bytes"]["measured"] <= tier["capacity_bytes"]
    assert "<html" in (tmp_path / "report.html").read_text()
    timeline = json.loads((tmp_path / "timeline.json").read_text())
    assert len(timeline["traceEvents"]) > 100
    summary = "\n".join(demo_lines(result, tmp_path))
    assert "equal bit for bit" in summary
    low_s, high_s = record["interval_s"]
    predicted_s, measured_s = (record["step_s"][name] for name in ("predicted", "measured"))
    paces_s = (predicted_s, record["step_s_at_slowdown"])
    assert low_s < min(paces_s) <= max(paces_s) < high_s, "of the calibration, and of the run"
    assert low_s < predicted_s < high_s
    assert record["in_interval"] == (low_s <= measured_s <= high_s)
    assert f"it lies {'within' if record['in_interval'] else 'OUTSIDE'}" in summary
    assert record["slowdown"] > 0


def test_ctrl_c_ends_it_cleanly(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from tierplan.cli import main; raise SystemExit(main())", "demo", "--out", "out"]
    run = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ})
    deadline = time.monotonic() + 300
    while not (tmp_path / "out" / "nvme").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(2)
    run.send_signal(signal.SIGINT)
    _, error = run.communicate(timeout=300)
    assert run.returncode == 130
    assert b"Traceback" not in error
    assert b"interrupted" in error
    assert not (tmp_path / "out" / "nvme").exists()


def test_the_nvme_folder_of_a_run_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A demo into the folder of a run refuses to write over its commits, and must not remove them as its own either."""

    def fail(out: Path, **settings: object) -> None:
        (out / "nvme").mkdir(parents=True, exist_ok=True)
        raise ValueError("enough")

    monkeypatch.setattr(demo, "run_demo", fail)
    committed = tmp_path / "run" / "nvme" / "tierplan.tier"
    committed.parent.mkdir(parents=True)
    committed.touch()
    for out in ("run", "new"):
        assert main(["demo", "--out", str(tmp_path / out)]) != 0
    assert committed.exists()
    assert not (tmp_path / "new" / "nvme").exists()
