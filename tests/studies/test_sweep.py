"""Studies: the grid, resuming after any interruption, and every kind of executor."""

from __future__ import annotations

import csv
import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.configs import config_of
from tests.validation.calibration.test_known import calibration_of
from tierplan.cli import command_parser, main, message_of
from tierplan.commands.options.scenario import read_point
from tierplan.hwmodels import load_description, load_machine
from tierplan.hwmodels.catalog import here_path
from tierplan.hwmodels.description import write_description
from tierplan.studies import sweep as sweeping
from tierplan.studies.evaluate import training_of
from tierplan.studies.study import Point, Study, StudyError, load_study
from tierplan.studies.sweep import asking, sweep
from tierplan.validation.calibration.calibration import UnitFit
from tierplan.validation.calibration.known import calibrations_dir

STUDY = """
name = "drives"
question = "How many drives pay off?"
[scenario]
model = "gpt-13b"
machine = ["desktop-4090", "mine.toml"]
batch = [1, 8]
[set]
nvme.drives = [1, 2, 4]
"host.capacity" = "64 GB"
"""


SEEN: list[int] = []


def cost(point: Point) -> Mapping[str, object]:
    """A stand-in for a simulation: quick, and wrong for one batch size."""
    if point.batch == 13:
        raise ValueError("13 brings bad luck")
    return {"step_s": point.batch * 0.1, "pid": os.getpid()}


def grid(num_points: int) -> list[Point]:
    return [Point(model="m", machine="x", batch=i + 1) for i in range(num_points)]


def test_study_is_the_product_of_its_axes(tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(STUDY)
    (tmp_path / "mine.toml").write_text("")
    study = load_study(tmp_path / "study.toml")
    points = list(study.points())
    assert len(points) == 2 * 2 * 3
    assert points[0] == Point(
        model="gpt-13b", machine="desktop-4090", batch=1, overrides={"nvme.drives": 1, "host.capacity": "64 GB"}
    )
    assert [p.overrides["nvme.drives"] for p in points[:4]] == [1, 2, 4, 1]
    assert points[-1].machine == str((tmp_path / "mine.toml").resolve())
    assert len({p.key for p in points}) == 12
    assert points[0].columns()["nvme.drives"] == 1


def test_a_study_that_says_no_batch_asks_what_plan_asks() -> None:
    study = Study(name="x", scenario={"model": ["gpt2"], "machine": ["laptop"]})
    args = command_parser().parse_args(["plan", "--model", "gpt2", "--machine", "laptop"])
    (point,) = study.points()
    assert point == replace(read_point(args), policy=point.policy)


def test_a_study_asks_for_kernels_and_types_as_commands_do() -> None:
    asked = {"loss": ["fused"], "torch_compile": [True], "lora": ["r=8"], "trained_dtype": ["bf16"]}
    study = Study(name="x", scenario={"model": ["gpt2"], "machine": ["laptop"], **asked})
    words = ["--loss", "fused", "--torch-compile", "--lora", "r=8", "--trained-dtype", "bf16"]
    args = command_parser().parse_args(["plan", "--model", "gpt2", "--machine", "laptop", *words])
    (point,) = study.points()
    assert point == replace(read_point(args), policy=point.policy)
    training = training_of(point, None)
    assert (training.loss, training.torch_compile, training.trained_dtype) == ("fused", True, "bf16")


def test_a_row_has_no_micro_batch_that_nobody_asked_for() -> None:
    """Where it is searched, the answer says it."""
    searched = Point(model="m", machine="x", sequences=8).columns()
    assert searched["sequences"] == 8
    assert not {"batch", "accumulation"} & searched.keys()
    assert Point(model="m", machine="x", batch=8).columns()["batch"] == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[scenario]", "[scenarios]"), "no key 'scenarios'; the keys are name, question, scenario, set"),
        (("batch", "batches"), r"no key 'batches' in \[scenario\]; the keys are model, machine"),
        (("[1, 8]", '[1, "8"]'), "batch is '8'; it must be a whole number"),
        (("[1, 8]", "[1, 8]\ntorch_compile = 1"), "torch_compile is 1; it must be true or false"),
        (("[1, 8]", "[]"), "batch is an empty list"),
        (("[1, 8]", "[1, 8]\nsequences = 8"), "sequences looks for the best batch and accumulation; leave out batch"),
        (('model = "gpt-13b"', ""), "names no model; add model"),
        (("name =", "name"), "is not TOML"),
        (("[1, 8]", "8\nplanner_s = 0"), "planner_s is 0; it must be above 0"),
        (("[1, 8]", "8\nmax_grad_norm = nan"), "max_grad_norm is nan; it must be above 0"),
        (('name = "', 'name = "../'), r"name is '\.\./.*'; it is that of a folder, without /; --out says where else"),
        (('name = "', 'name = ".." # "'), "name is '..'; it is that of a folder"),
        (('name = "', 'name = 3 # "'), "name is 3; it is that of a folder"),
    ],
)
def test_a_study_with_a_mistake_names_it(tmp_path: Path, change: tuple[str, str], message: str) -> None:
    path = tmp_path / "study.toml"
    path.write_text(STUDY.replace(*change, 1))
    with pytest.raises(StudyError, match=message):
        load_study(path)


@pytest.mark.parametrize(
    ("axis", "message"),
    [
        ({"optimizer": ["adamw", "foo"]}, "foo"),
        ({"dtype": ["bf16", "bf61"]}, "bf61"),
        ({"lora": ["r=8", "rank=8"]}, "rank=8"),
        ({"base": ["nf5"], "lora": ["", "r=8"]}, "nf5"),
        ({"attention": ["flash", "flesh"]}, "flesh"),
        ({"loss": ["plain", "quick"]}, "quick"),
        ({"semantics": ["", "exact"]}, "semantics is 'exact'; choose among in-backward, exact-clip"),
        ({"policy": ["planer"]}, "no policy 'planer'; did you mean 'planner'[?] choose among planner, in-memory"),
        ({"gpu.part": ["rtx-4090", "rtx-4091"]}, "rtx-4091"),
    ],
)
def test_a_name_that_does_not_exist_is_refused_before_anything_is_planned(
    axis: dict[str, list[object]], message: str
) -> None:
    changes = {key: axis.pop(key) for key in list(axis) if "." in key}
    study = Study(name="x", scenario={"model": ["gpt2"], "machine": ["desktop-4090"], **axis}, overrides=changes)
    with pytest.raises(ValueError, match=message):
        study.check_names()


def test_what_only_some_combinations_cannot_do_is_not_refused() -> None:
    axes = {"base": ["", "nf4"], "lora": ["", "r=8"], "dtype": ["auto", "fp32", "bf16"], "autocast": ["", "bf16"]}
    Study(name="x", scenario={"model": ["gpt2"], "machine": ["laptop"], **axes}).check_names()


def test_rows_are_in_the_order_of_the_points_and_errors_are_results(tmp_path: Path) -> None:
    rows = sweep(grid(20), cost, out_dir=tmp_path, num_workers=1)
    assert [r["batch"] for r in rows] == list(range(1, 21))
    assert rows[12]["error"] == "13 brings bad luck"
    assert "step_s" not in rows[12]
    with (tmp_path / "table.csv").open() as file:
        table = list(csv.DictReader(file))
    assert [float(r["step_s"] or "nan") for r in table[:2]] == [0.1, 0.2]
    assert table[12]["error"] == "13 brings bad luck"


def test_a_study_is_swept_as_its_points_are() -> None:
    study = Study(name="x", scenario={"model": ["gpt2"], "machine": ["laptop"], "batch": [1, 2]})
    assert sweep(study, cost, num_workers=1) == sweep(study.points(), cost, num_workers=1)
    assert len(sweep(study, cost, num_workers=1)) == 2


def untraced(point: Point) -> Mapping[str, object]:
    raise ModuleNotFoundError("it is not there", name="torch.nn" if point.batch == 1 else "no_such_package.nn")


def test_a_row_names_the_extra_whose_package_is_not_installed() -> None:
    """Out of a process of its own, too; a package that no extra brings is a mistake in the code."""
    told = {row["error"] for row in sweep([*grid(1), replace(*grid(1), seq=8)], untraced, num_workers=2)}
    assert told == {"this needs torch, which is not installed; install tierplan[runtime]"}
    with pytest.raises(ModuleNotFoundError, match="it is not there"):
        sweep(grid(2)[1:], untraced)


def test_a_full_disk_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = sweeping._ResultsFile.__init__

    def on_a_full_disk(self: sweeping._ResultsFile, folder: Path, versions: Mapping[str, str]) -> None:
        begin(self, folder, versions)
        self.file.close()
        self.file = Path("/dev/full").open("a", encoding="utf-8")  # noqa: SIM115

    monkeypatch.setattr(sweeping._ResultsFile, "__init__", on_a_full_disk)
    with pytest.raises(OSError, match="No space left") as error:
        sweep(grid(2), cost, out_dir=tmp_path, num_workers=1)
    assert message_of(error.value).startswith(f"{tmp_path / 'results.jsonl'}: no space left on device; give another f")


def test_a_mistake_in_the_code_is_not_a_result() -> None:
    with pytest.raises(ZeroDivisionError):
        sweep(grid(3), lambda point: {"x": 1 / (point.batch - 2)}, num_workers=1)


def counted(point: Point) -> Mapping[str, object]:
    SEEN.append(point.batch)
    return cost(point)


@pytest.fixture
def seen() -> list[int]:
    """Batches that were evaluated by `counted`."""
    SEEN.clear()
    return SEEN


def test_finished_points_are_not_evaluated_again(tmp_path: Path, seen: list[int]) -> None:
    first = sweep(grid(5), counted, out_dir=tmp_path, num_workers=1)
    again = sweep(grid(8), counted, out_dir=tmp_path, num_workers=1)
    assert seen == [1, 2, 3, 4, 5, 6, 7, 8]
    assert again[:5] == first


def times(point: Point, factor: float = 1.0) -> Mapping[str, object]:
    return {"times": point.batch * factor}


def test_a_row_is_of_the_function_that_made_it(tmp_path: Path, seen: list[int]) -> None:
    """The same point for another function, or with other arguments, is another row, beside the first."""
    functions = (counted, times, partial(times, factor=2.0), partial(times, factor=3.0))
    alone = [sweep(grid(3), one, num_workers=1) for one in functions]
    for _ in range(2):
        assert [sweep(grid(3), one, out_dir=tmp_path, num_workers=1) for one in functions] == alone
    assert len(seen) == 2 * 3
    assert len({json.loads(line)["key"] for line in (tmp_path / "results.jsonl").read_text().splitlines()}) == 4 * 3


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_function_without_a_name_keeps_no_rows(wrapped: bool, tmp_path: Path) -> None:
    """Two lambdas, or two functions made in one place, have the same name."""

    def anonymous(point: Point) -> Mapping[str, object]:
        return {"x": point.batch}

    function = partial(anonymous) if wrapped else anonymous
    assert [row["x"] for row in sweep(grid(2), function, num_workers=1)] == [1, 2]
    with pytest.raises(ValueError, match=r"evaluate is .*anonymous.*, which cannot be pickled.*or leave out out_dir"):
        sweep(grid(2), function, out_dir=tmp_path / "out", num_workers=1)
    assert not (tmp_path / "out").exists()


def test_a_script_s_function_is_another_than_that_of_the_next_script(tmp_path: Path) -> None:
    """Both are `__main__.figure`."""
    text = """
        import sys
        from tierplan.studies.study import Point
        from tierplan.studies.sweep import sweep

        def figure(point):
            return {"x": WHAT}

        (row,) = sweep([Point(model="m", machine="x")], figure, out_dir=sys.argv[1], num_workers=1)
        print(row["x"])
    """
    for what in ("1", "2", "1"):
        script = tmp_path / f"{what}.py"
        script.write_text(textwrap.dedent(text).replace("WHAT", what))
        command = [sys.executable, str(script), str(tmp_path / "out")]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{what}\n"
    assert len((tmp_path / "out" / "results.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("cut", [1, 40, 200, 333])
def test_a_file_cut_off_anywhere_is_continued(tmp_path: Path, cut: int) -> None:
    """Whatever byte the writing stopped at: whole lines are kept, and the result is that of an unbroken run."""
    whole = sweep(grid(6), cost, out_dir=tmp_path / "whole", num_workers=1)
    text = (tmp_path / "whole" / "results.jsonl").read_bytes()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / "results.jsonl").write_bytes(text[:-cut])
    assert sweep(grid(6), cost, out_dir=tmp_path / "cut", num_workers=1) == whole
    lines = (tmp_path / "cut" / "results.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["row"]["batch"] for line in lines) == [1, 2, 3, 4, 5, 6]


def test_what_another_version_has_answered_is_answered_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], seen: list[int]
) -> None:
    monkeypatch.setattr("tierplan.studies.sweep.code_version", lambda: "before")
    sweep(grid(3), counted, out_dir=tmp_path, num_workers=1)
    monkeypatch.undo()
    for _ in range(2):
        again = sweep(grid(3), counted, out_dir=tmp_path, num_workers=1, progress=True)
        assert again == sweep(grid(3), cost, num_workers=1)
    assert seen == 2 * [1, 2, 3]
    assert capsys.readouterr().err.count("3 points of another version") == 1


def test_another_version_of_what_is_traced_is_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sweeping.code_version()
    monkeypatch.setattr(sweeping, "version", lambda name: "9.9" if name == "transformers" else version(name))
    assert sweeping.code_version.__wrapped__() != before
    monkeypatch.setattr(sweeping, "version", version)
    assert sweeping.code_version.__wrapped__() == before


@pytest.mark.parametrize("changed", ["machine", "here", "model", "cached", "auto", "newer", "file"])
def test_what_was_answered_before_a_file_changed_is_answered_anew(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of all points, those alone that name it: a machine, a model, or a calibration that may be taken."""
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "HF_HUB_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    hub = tmp_path / "HF_HUB_CACHE" / "models--some--model" / "snapshots" / "1"
    for folder in (here_path().parent, calibrations_dir(), hub):
        folder.mkdir(parents=True)
    machine, calibrated = tmp_path / "mine.toml", load_machine("laptop")
    for path in (machine, here_path()):
        path.write_text(write_description(load_description("desktop-4090")))
    for path in (tmp_path / "config.json", hub / "config.json"):
        path.write_text(json.dumps(config_of("gpt2")))

    def calibrate(path: Path, factor: float) -> None:
        twice = UnitFit(forward=factor, backward=factor, recompute=factor, saved=(), spread=0.0)
        calibration = calibration_of("gpt2", calibrated, units=dict.fromkeys(("embed", "block", "head"), twice))
        versions = {name: version(name) for name in ("torch", "transformers")}
        replace(calibration, versions=versions).save(path)

    calibrate(calibrations_dir() / "a.json", 2.0)
    calibrate(tmp_path / "mine.json", 2.0)
    one = Point(model=str(tmp_path / "config.json"), machine="laptop", policy="in-memory", seq=32, dtype="fp32")
    plain = replace(one, machine="desktop-4090")
    points = {
        "machine": replace(plain, machine=str(machine), overrides={"gpu.count": 1}),
        "here": replace(plain, machine="here"),
        "model": plain,
        "cached": replace(plain, model="some/model"),
        "auto": one,
        "file": replace(one, calibration=str(tmp_path / "mine.json")),
    }
    before = sweep(points.values(), out_dir=tmp_path / "out", num_workers=1)
    assert not [row["error"] for row in before if "error" in row]
    match changed:
        case "machine" | "here":
            path = machine if changed == "machine" else here_path()
            path.write_text(write_description(load_description("desktop-4090", ["gpu.part=rtx-3090"])))
        case "model" | "cached":
            path = (tmp_path if changed == "model" else hub) / "config.json"
            path.write_text(json.dumps({**config_of("gpt2"), "n_layer": 8}))
        case "auto" | "newer":
            calibrate(calibrations_dir() / ("a.json" if changed == "auto" else "b.json"), 3.0)
        case "file":
            calibrate(tmp_path / "mine.json", 3.0)
    after = sweep(points.values(), out_dir=tmp_path / "out", num_workers=1, progress=True)
    assert after == sweep(points.values(), num_workers=1)
    others = {name for name, old, new in zip(points, before, after, strict=True) if old != new}
    assert others == {"model": {*points} - {"cached"}, "newer": {"auto"}}.get(changed, {changed})
    assert f"{len(others)} points of another version" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["hello", '{"key":"a","row":"x"}', '{"key":"a","row":null}', "null"])
def test_a_foreign_file_is_refused(tmp_path: Path, line: str) -> None:
    (tmp_path / "results.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=f"a line that is no result: b'{line}"):
        sweep(grid(2), cost, out_dir=tmp_path, num_workers=1)


def test_threads_and_processes_give_the_same(tmp_path: Path) -> None:
    def without_pid(rows: list[dict[str, object]]) -> list[dict[str, object]]:
        return [{k: v for k, v in row.items() if k != "pid"} for row in rows]

    plain = without_pid(sweep(grid(30), cost, num_workers=1))
    with ThreadPoolExecutor(4) as threads:
        assert without_pid(sweep(grid(30), cost, executor=threads)) == plain
    by_processes = sweep(grid(30), cost, num_workers=2)
    assert without_pid(by_processes) == plain
    assert os.getpid() not in {row.get("pid") for row in by_processes}


def level_of_others(point: Point) -> dict[str, object]:
    return {"level": logging.getLogger("of.others").getEffectiveLevel(), "pid": os.getpid()}


def test_processes_hear_of_others_what_is_heard_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that are begun anew, as beside PyTorch, had told a user of kernels that no command uses."""
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch", sys))  # then nothing is forked
    logger = logging.getLogger("of.others")
    before = logger.level
    try:
        logger.setLevel(logging.CRITICAL)
        rows = sweep(grid(4), level_of_others, num_workers=2)
    finally:
        logger.setLevel(before)
    assert {row["level"] for row in rows} == {logging.CRITICAL}
    assert os.getpid() not in {row["pid"] for row in rows}


def test_what_follows_from_answers_is_asked_while_others_are_computed() -> None:
    """In one process a row is computed when it is called for; in several, from when it is asked for: the same rows."""
    found = []
    for num_workers in (1, 2):
        with asking(num_workers) as ask:
            first, bad, *others = ask([Point(model="m", machine="x", batch=batch) for batch in (1, 13, 2, 3)], cost)
            (later,) = ask([Point(model="m", machine="x", batch=int(first()["step_s"] * 100))], cost)
            found.append([row() for row in (first, bad, *others, later)])
    rows, same = ([{k: v for k, v in row.items() if k != "pid"} for row in rows] for rows in found)
    assert rows == same
    assert [row.get("step_s") for row in rows] == [0.1, None, 0.2, pytest.approx(0.3), 1.0]
    assert rows[1]["error"] == "13 brings bad luck"
    assert {row["pid"] for row in found[0] if "pid" in row} == {os.getpid()}


def test_a_family_without_closed_forms_is_traced(tmp_path: Path) -> None:
    config = {"model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "vocab_size": 256, "dropout_rate": 0.0, "decoder_start_token_id": 0}))
    (row,) = sweep([Point(model=str(path), machine="laptop", policy="in-memory", seq=32)], num_workers=1)
    assert row.get("error") is None
    assert row["fits"]


def test_dask_cluster_gives_the_same() -> None:
    """A real scheduler and two worker processes on this machine, whose port 8787 another program may have."""
    distributed = pytest.importorskip("distributed")
    plain = [row.get("step_s") for row in sweep(grid(40), cost, num_workers=1)]
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address="127.0.0.1:0", protocol="tcp"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        rows = sweep(grid(40), cost, executor=client.get_executor())
    assert [row.get("step_s") for row in rows] == plain
    assert len({row.get("pid") for row in rows if "pid" in row}) == 2
    assert rows[12]["error"] == "13 brings bad luck"


def test_a_row_says_that_the_clock_ended_its_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    study = tmp_path / "study.toml"
    study.write_text('name = "x"\n[scenario]\nmachine = "laptop"\nmodel = "gpt2"\nbatch = 1\nplanner_s = 0.3\n')
    command = ["sweep", str(study), "--workers", "1", "-o", str(tmp_path / "out")]
    assert main([*command, "--json"]) == 0
    said = capsys.readouterr()
    (row,) = json.loads(said.out)
    assert row["status"] == "searched"
    assert row["gap"] > 0
    assert not said.err
    monkeypatch.setattr("tierplan.studies.sweep.sweep", lambda *args, **settings: [{**row, "status": "time-limit"}])
    assert main(command) == 0
    said = capsys.readouterr()
    assert said.err.startswith("1 of 1 searches ended at their time limit")
    assert "error" not in said.out


def test_the_command_prints_times_and_speeds_in_eighty_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = tmp_path / "study.toml"
    varied = 'model = ["gpt2", "gpt2-medium"]\npolicy = ["in-memory", "zero-3"]\nbatch = [1, 8]'
    study.write_text(f'name = "x"\n[scenario]\nmachine = "desktop-4090"\n{varied}\n[set]\ngpu.count = [1, 2]\n')
    assert main(["sweep", str(study), "-o", str(tmp_path / "out"), "--workers", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[-4:] == ["step", "tokens/s", "limited", "by"]
    assert " ms " in lines[1]
    assert "e+" not in "".join(lines)
    assert max(map(len, lines[:-1])) <= 80
    assert main(["sweep", str(study), "-o", str(tmp_path / "out"), "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 16
