"""`tierplan compare`: from a schedule file and a run's folder to the page, without a run."""

from __future__ import annotations

import json
from dataclasses import replace
from math import exp
from pathlib import Path

import pytest

from tests.toys import toy_machine, toy_workload, uniform_plan
from tierplan.cli import command_parser
from tierplan.commands import compare as command
from tierplan.hwmodels import load_machine
from tierplan.hwmodels.machine import CATALOG, PredictionBasis
from tierplan.hwmodels.names import COMPUTE
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitPlan
from tierplan.planner.plan_file import PlanFileError, machine_meta, save_plan
from tierplan.planner.planning import plan
from tierplan.sim.analysis.steady import steady_state
from tierplan.sim.columns import unroll
from tierplan.sim.digest import PLAN_KEY, sealed
from tierplan.sim.pricing import simulate_on
from tierplan.sim.schedule import Schedule
from tierplan.sim.schedule_file import load_schedule, save_schedule
from tierplan.sim.trace import Trace
from tierplan.validation.calibration.dispatch import LEAST_TIMES, core_slowdown
from tierplan.validation.comparison.compare import Pair, compare
from tierplan.validation.comparison.run_folder import RunFolderError, load_run, read_schedule
from tierplan.validation.comparison.words import at_slowdown, causes_in_words, what_to_do

CALIBRATED = PredictionBasis("calibrated here with toy", 0.1, reference_s=(0.004, 0.005), num_threads=1)
MACHINE = replace(toy_machine(), basis=CALIBRATED)
SLOWER, CORE_SLOWER = 1.25, 1.1
"""In all, and without what threads waited for a core."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A schedule file and a folder as `tierplan run` leaves it, here from a simulation on a slower machine."""
    workload = toy_workload(3)
    schedule = lower(uniform_plan(workload, UnitPlan(states="host", grads="host", params="host")), workload, MACHINE)
    save_schedule(replace(schedule, meta={**schedule.meta, **machine_meta(MACHINE)}), tmp_path / "plan.json")
    slower = replace(
        MACHINE,
        streams=tuple(
            replace(
                s, rates={k: replace(r, points=tuple((x, y / SLOWER) for x, y in r.points)) for k, r in s.rates.items()}
            )
            for s in MACHINE.streams
        ),
    )
    measured = simulate_on(unroll(schedule, 6), slower)
    run = tmp_path / "run"
    run.mkdir()
    meta = {
        "bytes_per_step": schedule.bytes_moved(),
        "reference_s": {str(k): [0.0055, 0.0055, 0.0063] for k in range(100)},
        "num_threads": 1,
    }
    waits = 1 - CORE_SLOWER / SLOWER
    spans = tuple(s._replace(coreless_ns=round(s.duration_ns * waits)) for s in measured.spans)
    replace(measured, spans=spans, meta=meta).save(run / "trace.json")
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": i, "loss": 3.0 - i / 10}) + "\n" for i in range(6)))
    return tmp_path


def arguments(*words: str):  # type: ignore[no-untyped-def]
    return command_parser().parse_args(["compare", *words])


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


def test_it_says_which_steps_are_judged(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A trace begins where the run was last resumed and covers so many steps: what is not in it is not judged."""
    words = (str(folder / "plan.json"), str(folder / "run"), "-o", str(folder / "report.html"))
    command.run(arguments(*words))
    assert "measured: median of 4 steps; not judged: 2 to warm up\n" in capsys.readouterr().out
    trace, _ = load_run(folder / "run")
    resumed = tuple(s._replace(key=s.key.replace("s", "s1", 1)) for s in trace.spans)
    replace(trace, spans=resumed).save(folder / "run" / "trace.json")
    (folder / "run" / "metrics.jsonl").write_text('{"loss": 3.0}\n' * 50)
    command.run(arguments(*words))
    said = " ".join(capsys.readouterr().out.split())
    assert "median of 4 steps; not judged: 10 before the run was last resumed, 2 to warm up, 34 after the trace" in said
    command.run(arguments(*words, "--json"))
    judged = json.loads(capsys.readouterr().out)["steps"]
    assert judged == {"judged": 4, "before_resumed": 10, "warmup": 2, "after_trace": 34}


def test_json_is_the_comparison(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = folder / "report.html"
    command.run(arguments(str(folder / "plan.json"), str(folder / "run"), "-o", str(page), "--json"))
    record = json.loads(capsys.readouterr().out)
    assert record["step_error_frac"] == pytest.approx(-0.2, abs=1e-3)
    assert record["bytes_agree"]
    assert record["basis"]["text"] == CALIBRATED.text
    assert record["interval_s"] == pytest.approx([record["step_s"]["predicted"] * exp(x) for x in (-0.1, 0.1)])
    assert not record["in_interval"]


def test_a_slower_machine_is_told_from_a_wrong_prediction(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything but drives took a quarter longer: 10 % as the reference work, the rest waits for a core. Both are
    shown."""
    asked = arguments(str(folder / "plan.json"), str(folder / "run"), "-o", str(folder / "report.html"))
    command.run(asked)
    said = " ".join(capsys.readouterr().out.split())
    assert "-20.0 %" in said
    assert "at the run's slowdown, 1.27" in said, "1.25, and a little for caches that were cold after each wait"
    assert "The machine was slower in the run than in the calibration" in said
    schedule, machine = read_schedule(folder / "plan.json", None)
    trace, _ = load_run(folder / "run")
    comparison = compare(schedule, steady_state(schedule, machine).trace, trace, warmup_steps=2)
    found = at_slowdown(comparison, schedule, machine, trace)
    assert found.slowdown == pytest.approx(SLOWER, rel=0.02)
    assert found.step_error_frac == pytest.approx(-0.2, abs=1e-3), "raw, whatever the slowdown"
    assert found.normalised_error_frac == pytest.approx(0.0, abs=0.02)
    for seconds, basis, meta, wanted in (
        (0.0050, CALIBRATED, {"num_threads": 1}, "The machine works otherwise than in its calibration"),
        (0.0050, CALIBRATED, {"num_threads": 2}, "calibrate with --threads 2"),
        (0.0050, CATALOG, {}, "rests on no calibration: run tierplan calibrate"),
        (0.0050, CATALOG, {"machine": "desktop-4090"}, "The plan is for desktop-4090: for a run on another"),
        (0.0050, replace(CALIBRATED, half_width=0.5), {}, "lies in the predicted interval"),
    ):
        spans = tuple(s._replace(coreless_ns=0) for s in trace.spans)
        as_timed = replace(trace, spans=spans, meta={"reference_s": {"1": [seconds]}})
        rated = replace(comparison, interval_s=basis.interval_s(comparison.step_s.predicted))
        assert wanted in what_to_do(at_slowdown(rated, schedule, machine, as_timed), basis, meta)
    good = replace(comparison, step_s=Pair(1.0, 1.01))
    assert what_to_do(good, CALIBRATED, {}) == "There is nothing to do: the prediction held."
    causes = causes_in_words(comparison)
    assert len(causes) == 3
    assert any("gpu0.compute; the ops themselves were slower" in text for text in causes), causes


def test_waits_that_the_prediction_has_are_no_slowdown(folder: Path) -> None:
    """Computation was predicted to be slowed by what is beside it. As long as its thread waits no longer for a core,
    the machine is as quick as it was, however long other plans had to wait in the calibration."""
    schedule, machine = read_schedule(folder / "plan.json", None)
    trace, _ = load_run(folder / "run")
    comparison = compare(schedule, steady_state(schedule, machine).trace, trace, warmup_steps=2)
    computing = next(s for s in comparison.streams if s.stream == COMPUTE)
    slowed = replace(computing, predicted=replace(computing.predicted, slowed_s=0.2 * computing.predicted.alone_s))
    others = [s for s in comparison.streams if s is not computing]
    comparison = replace(comparison, streams=(slowed, *others))
    times = replace(trace, meta={"reference_s": {"1": [machine.basis.reference_s[True]]}})
    for part, wanted in ((0.1, 1.0), (1 / 6, 1.0), (0.25, 4 / 3 / 1.2)):  # waits, of what ops took
        spans = tuple(s._replace(coreless_ns=round(part * s.duration_ns), late_ns=0) for s in trace.spans)
        found = at_slowdown(comparison, schedule, machine, replace(times, spans=spans))
        assert found.slowdown == pytest.approx(wanted, rel=0.03)


def test_a_folder_without_a_run_is_refused(folder: Path) -> None:
    with pytest.raises(RunFolderError, match=r"has no trace\.json; give the folder that `tierplan run --out` wrote"):
        load_run(folder)
    (folder / "run" / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(RunFolderError, match="line 1, is no record of a step"):
        load_run(folder / "run")


def test_a_line_that_is_no_text_is_named(folder: Path) -> None:
    """As a drive leaves it: the error said which byte, and not of what file."""
    (folder / "run" / "metrics.jsonl").write_bytes(b'{"loss": 1.0}\n\xff\xfe\n')
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl, line 2, is no record of a step"):
        load_run(folder / "run")


def test_a_line_that_a_crash_cut_off_is_no_step(folder: Path) -> None:
    """As one left of a resumed run, beside the trace of the run before."""
    metrics = folder / "run" / "metrics.jsonl"
    whole, (_, losses) = metrics.read_text(), load_run(folder / "run")
    for cut in ('{"step": 9, "lo', '{"step": 9, "loss": 1.5}'):
        metrics.write_text(whole + cut)
        assert load_run(folder / "run")[1] == losses
    metrics.write_text('{"step": 9, "lo\n' + whole)
    with pytest.raises(RunFolderError, match="line 1, is no record of a step"):
        load_run(folder / "run")


def test_a_schedule_that_names_no_machine_wants_one(tmp_path: Path) -> None:
    workload = toy_workload(3)
    save_schedule(lower(uniform_plan(workload, UnitPlan()), workload, MACHINE), tmp_path / "plain.json")
    with pytest.raises(PlanFileError, match="does not say which machine it was made for; give it with --machine"):
        read_schedule(tmp_path / "plain.json", None)
    assert read_schedule(tmp_path / "plain.json", "desktop-4090")[1].name == "desktop-4090"


def test_a_schedule_of_another_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tierplan.cli import main

    monkeypatch.chdir(tmp_path)
    named = ["--policy", "fuyou", "--model", "gpt-6.7b", "--machine", "desktop-4090"]
    assert main(["simulate", *named, "-o", "s.json"]) == 0
    assert read_schedule("s.json", "desktop-4090")[1].name == "desktop-4090"
    assert replace(read_schedule("s.json", None)[1], description={}) == replace(
        load_machine("desktop-4090"), description={}
    )
    with pytest.raises(PlanFileError, match="was made for another machine"):
        read_schedule("s.json", "desktop-4090", ["nvme.drives=2"])
    assert read_schedule("s.json", "desktop-4090", ["nvme.drives=2"], any_machine=True)
    record = json.loads((tmp_path / "s.json").read_text())
    record["meta"]["predicted_step_s"] /= 2
    (tmp_path / "s.json").write_text(json.dumps(record))
    for given in ((None,), ("desktop-4090",)):
        with pytest.raises(PlanFileError, match=r"s\.json is not as it was written"):
            read_schedule("s.json", *given)


def test_more_warm_up_than_steps_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="has 6 steps; give 5 or less"):
        command.run(arguments(str(folder / "plan.json"), str(folder / "run"), "--warmup", "6"))


def test_a_plan_of_another_machine_is_refused(tmp_path: Path) -> None:
    workload, machine = toy_workload(2), load_machine("desktop-4090")
    result = plan(workload, machine, time_limit_s=0.5)
    save_plan(result, workload, machine, tmp_path / "plan.json")
    schedule, own = read_schedule(tmp_path / "plan.json", None)
    assert len(schedule.ops) == len(result.schedule.ops)
    assert own == replace(machine, description={})
    with pytest.raises(PlanFileError, match="was made for another machine"):
        read_schedule(tmp_path / "plan.json", "desktop-4090", ["gpu.capacity=30 GiB"])


TINY = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": 128}


def test_the_run_of_another_plan_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All these plans have ops of the same names: only what their files say of themselves tells them apart."""
    from tierplan.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    (tmp_path / "wide.json").write_text(json.dumps({**TINY, "n_embd": 512}))
    settings = {"--model": "tiny.json", "--machine": "desktop-4090", "--batch": "2", "--seq": "32", "--dtype": "fp32"}

    def simulated(name: str, **more: str) -> None:
        asked = {**settings, **{f"--{option}": value for option, value in more.items()}}
        words = [word for pair in asked.items() for word in pair]
        assert main(["simulate", "--policy", "fuyou", *words, "-o", name]) == 0

    simulated("plan.json")
    ran = load_schedule("plan.json")
    (tmp_path / "run").mkdir()
    simulate_on(unroll(ran, 4), load_machine("desktop-4090")).save("run/trace.json")
    assert main(["compare", "plan.json", "run", "--json"]) == 0
    assert main(["compare", "plan.json", "run", "--machine", "fuyou-4090", "--other-machine"]) == 0
    for options, difference in (
        ({"batch": "4"}, "per_device_train_batch_size is 4 in the schedule and 2 in the trace"),
        ({"seq": "64"}, "sequence_length is 64 in the schedule and 32 in the trace"),
        ({"model": "wide.json"}, "n_embd is 512 in the schedule and 32 in the trace"),
        ({"machine": "fuyou-4090"}, "machine is 'fuyou-4090' in the schedule and 'desktop-4090' in the trace"),
        ({"set": "nvme.drives=3"}, "their machines have one name, but other rates or capacities"),
    ):
        simulated("other.json", **options)
        schedule, machine = read_schedule("other.json", None)
        trace, _ = load_run("run")
        with pytest.raises(ValueError, match=rf"is of another plan than .*: {difference}\. Compare the trace"):
            compare(schedule, steady_state(schedule, machine).trace, trace)


def test_one_plan_by_data_sheets_and_from_a_calibration_is_one(folder: Path) -> None:
    """Its files have other seals. Two schedules with other seals and one basis are two, unless both are of one plan."""
    plain = load_schedule(folder / "plan.json")

    def made(basis: PredictionBasis, decisions: str | None, **more: object) -> tuple[Schedule, Trace]:
        meta = {**plain.meta, **machine_meta(replace(MACHINE, basis=basis)), **more}
        schedule = sealed(replace(plain, meta=meta if decisions is None else {**meta, PLAN_KEY: {"plan": decisions}}))
        return schedule, simulate_on(unroll(schedule, 4), MACHINE)

    for calibrated, sheets in (
        (made(CALIBRATED, None), made(CATALOG, None)),
        (made(CALIBRATED, "a"), made(CATALOG, "a")),
        (made(CATALOG, "a", predicted_step_s=1.0), made(CATALOG, "a", predicted_step_s=2.0)),
        (made(CATALOG, None), (None, replace(made(CATALOG, None)[1], meta={}))),
    ):
        assert compare(calibrated[0], calibrated[1], sheets[1]).step_error_frac == 0
    for one, other, difference in (
        (made(CATALOG, "a"), made(CALIBRATED, "b"), "their plans decide otherwise"),
        (made(CATALOG, None, x=1), made(CATALOG, None, x=2), "they have other seals"),
    ):
        with pytest.raises(ValueError, match=difference):
            compare(one[0], one[1], other[1])
        with pytest.raises(ValueError, match=difference):
            compare(one[0], other[1], one[1])


def test_a_factor_that_chance_explains_is_none() -> None:
    assert core_slowdown([], 1.0) == core_slowdown([1.0], 0.0) == core_slowdown([1.24], 1.0) == 1.0
    assert core_slowdown([1.2, 0.9, 1.0, 1.0] * 2, 0.97) == pytest.approx(1.0, abs=0.02)
    assert core_slowdown([1.04] * 50, 1.0) == pytest.approx(1.04, abs=0.002)
    assert core_slowdown([2.0] * (LEAST_TIMES - 1), 1.0) == 1.0, "moments close to other streams' work"
    assert core_slowdown([2.0, 2.0, 2.0, 2.1] * 2, 1.0) == pytest.approx(2.0, rel=0.02)
    assert core_slowdown([1.15] * 9 + [1.01], 1.0) == pytest.approx(1.03, abs=0.002), "one of them denies the others"
    assert core_slowdown([1.0, 1.0, 1.0, 5.0] * 2, 1.0) == 1.0, "what ran beside one of them does not count"
