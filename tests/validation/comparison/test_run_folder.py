"""`tierplan compare`: from a schedule file and a run's folder to the page, without a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.toys import toy_machine, toy_workload, uniform_plan
from tierplan.commands import compare as command
from tierplan.hwmodels.machine import Machine
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.sim.columns import unroll
from tierplan.sim.pricing import simulate_on
from tierplan.sim.schedule_file import save_schedule
from tierplan.validation.comparison.run_folder import RunFolderError, load_run, read_schedule

MACHINE = toy_machine()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A schedule file and a folder as `tierplan run` leaves it, here from a simulation on a slower machine."""
    workload = toy_workload(3)
    schedule = lower(uniform_plan(workload, UnitPlan(states="nvme", grads="host", params="host")), workload, MACHINE)
    save_schedule(schedule, tmp_path / "plan.json")
    slower = replace(
        MACHINE,
        streams=tuple(
            replace(
                s, rates={k: replace(r, points=tuple((x, y / 1.25) for x, y in r.points)) for k, r in s.rates.items()}
            )
            for s in MACHINE.streams
        ),
    )
    measured = simulate_on(unroll(schedule, 6), slower)
    run = tmp_path / "run"
    run.mkdir()
    replace(measured, meta={"bytes_per_step": schedule.bytes_moved()}).save(run / "trace.json")
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": i, "loss": 3.0 - i / 10}) + "\n" for i in range(6)))
    monkeypatch.setattr("tierplan.hwmodels.load_machine", lambda name, overrides: MACHINE)
    return tmp_path


def arguments(*words: str):  # type: ignore[no-untyped-def]
    import argparse

    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def test_compare_writes_the_page_and_says_the_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, picture = folder / "report.html", folder / "timeline.svg"
    words = [str(folder / "plan.json"), str(folder / "run"), "-o", str(page), "--plot", str(picture)]
    assert command.run(arguments(*words)) == 0
    assert "<svg" in picture.read_text(encoding="utf-8")
    said = capsys.readouterr().out
    assert "an error of -20.0 %" in said
    assert "bytes per stream agree exactly" in said
    html = page.read_text(encoding="utf-8")
    assert "The loss went from 3.0000 to 2.5000 in 6 steps." in html


def test_json_is_the_comparison(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = folder / "report.html"
    command.run(arguments(str(folder / "plan.json"), str(folder / "run"), "-o", str(page), "--json"))
    record = json.loads(capsys.readouterr().out)
    assert record["step_error_frac"] == pytest.approx(-0.2, abs=1e-3)
    assert record["bytes_agree"]


def test_a_folder_without_a_run_is_refused(folder: Path) -> None:
    with pytest.raises(RunFolderError, match=r"has no trace\.json; give the folder that `tierplan run --out` wrote"):
        load_run(folder)
    (folder / "run" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(RunFolderError, match="line 1, is no record of a step"):
        load_run(folder / "run")


def test_a_plain_schedule_has_no_interval(folder: Path) -> None:
    schedule, interval = read_schedule(folder / "plan.json", Machine(name="other", tiers=(), streams=()))
    assert interval is None
    assert len(schedule.ops) > 10


def test_a_schedule_of_another_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tierplan.cli import main
    from tierplan.hwmodels import load_machine
    from tierplan.planner.plan_file import PlanFileError

    monkeypatch.chdir(tmp_path)
    named = ["--policy", "fuyou", "--model", "gpt-6.7b", "--machine", "desktop-4090"]
    assert main(["simulate", *named, "-o", "s.json"]) == 0
    assert read_schedule("s.json", load_machine("desktop-4090"))[1] is None
    assert read_schedule("s.json", None)[1] is None
    with pytest.raises(PlanFileError, match="was made for another machine"):
        read_schedule("s.json", load_machine("desktop-4090", ["nvme.drives=2"]))


def test_more_warm_up_than_steps_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="the trace has 6 steps; give 5 or less"):
        command.run(arguments(str(folder / "plan.json"), str(folder / "run"), "--warmup", "6"))


def test_a_plan_of_another_machine_is_refused(tmp_path: Path) -> None:
    from tierplan.planner.plan_file import PlanFileError, save_plan
    from tierplan.planner.planning import plan

    workload = toy_workload(2)
    result = plan(workload, MACHINE, time_limit_s=0.5)
    save_plan(result, workload, MACHINE, tmp_path / "plan.json")
    schedule, _ = read_schedule(tmp_path / "plan.json", MACHINE)
    assert len(schedule.ops) == len(result.schedule.ops)
    with pytest.raises(PlanFileError, match="was made for another machine"):
        read_schedule(tmp_path / "plan.json", toy_machine(device_bytes=10**9))
    read_schedule(tmp_path / "plan.json", None)
