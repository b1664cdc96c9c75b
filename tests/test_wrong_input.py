"""Wrong input of every kind ends in one clear line and status 1 or 2, before anything is computed or written."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tierplan.cli import main
from tierplan.commands import COMMANDS
from tierplan.studies.evaluate import predict_point
from tierplan.studies.study import Point

SCENARIO = ["--model", "gpt-13b", "--machine", "desktop-4090"]
SIMULATE = ["simulate", "--policy", "fuyou", *SCENARIO]
RUN = ["run", "plan.json", "--model", "m", "--data", "d", "--out", "run"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Some files and folders to be wrong with."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    Path("a-folder").mkdir()
    Path("a-file").write_text("hello\n")
    Path("plan.json").write_text("{}")
    Path("study.toml").write_text('[scenario]\nmodel = "gpt-13b"\nmachine = "desktop-4090"\n')
    return tmp_path


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit status and the message; nothing may have been printed beside it."""
    try:
        status = main(argv)
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    printed = capsys.readouterr()
    assert printed.out == ""
    return status, printed.err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([*SIMULATE, "--batch", "-1"], "-1 is out of range; give a whole number of 1 or more"),
        ([*SIMULATE, "--batch", "x"], "'x' is no whole number; give a whole number of 1 or more"),
        ([*SIMULATE, "--devices", "129"], "give a whole number of 1 to 128; "),
        ([*SIMULATE, "--seq", "0"], "sequence_length: 0 is out of range"),
        ([*SIMULATE, "--lora", ""], "--lora: '' says nothing, as a variable of the shell that is not set"),
        ([*SIMULATE, "--freeze", " "], "--freeze: ' ' says nothing"),
        (["plan", "--model", "", "--machine", "laptop"], "--model: '' says nothing"),
        ([*SIMULATE, "--accumulation", "0"], "gradient_accumulation_steps: 0 is out of range"),
        ([*SIMULATE, "--max-grad-norm", "nan"], "max_grad_norm: nan is out of range; give a number above 0"),
        ([*SIMULATE, "-o", "x.json", "--timeline", "./x.json"], "x.json is given twice, and one would replace"),
        (["plan", *SCENARIO, "--timeline", "x.png", "--frontier", "x.png"], "x.png is given twice"),
        (["plan", "--model", "a-file", "--machine", "laptop", "-o", "a-file"], "a-file is given twice"),
        (["compare", "plan.json", "a-folder", "-o", "plan.json"], "plan.json is given twice"),
        ([*SIMULATE, "-o", "a-folder"], "a-folder is a folder; give the name of a file"),
        ([*SIMULATE, "-o", "a-file/x.json"], "a-file is a file, not a folder"),
        ([*SIMULATE, "-o", "/proc/x.json"], "in /proc; give another place"),
        (["machine", "measure", "-o", "/proc/x.toml"], "in /proc; give another place"),
        ([*SIMULATE, "--bacth", "4"], "no option --bacth"),
        (["compare-policies", *SCENARIO, "--plot", "x.txt"], "end it with .png or .svg or .pdf"),
        (["compare-policies", *SCENARIO, "--plot", "a-folder"], "a-folder is a folder"),
        (["plan", *SCENARIO, "--seed", "9" * 23], "give a whole number of 0 to 4,294,967,295"),
        (
            ["run", __file__, "--model", ".", "--data", ".", "--out", "x", "--steps", "1", "--seed", "9" * 23],
            "--seed: 99999999999999999999999 is out of range; give a whole number of 0 to 4,294,967,295",
        ),
        (["plan", *SCENARIO, "--sequences", "0"], "--sequences: 0 is out of range"),
        (["plan", *SCENARIO, "--time-limit", "0"], "--time-limit: 0 is out of range; give a number above 0"),
        (["plan", *SCENARIO, "--time-limit=-1"], "--time-limit: -1 is out of range; give a number above 0"),
        (["plan", *SCENARIO, "--time-limit", "nan"], "--time-limit: nan is out of range; give a number above 0"),
        (["plan", *SCENARIO, "--drive-lifetime-years", "-1"], "give a number above 0"),
        (["plan", *SCENARIO, "--frontier", "x.txt"], "end it with .png or .svg or .pdf"),
        (["reproduce", "--write", "a-folder"], "a-folder is a folder"),
        ([*RUN, "--steps", "0"], "--steps: 0 is out of range"),
        ([*RUN, "--steps", "1", "--lr", "-1"], "--lr: -1 is out of range; give a number 0 or more"),
        (
            [*RUN, "--steps", "1", "--betas", "0.9", "1"],
            "--betas: 1 is out of range; give a number 0 or more and below",
        ),
        ([*RUN, "--steps", "1", "--eps", "0"], "--eps: 0 is out of range; give a number above 0"),
        ([*RUN, "--steps", "1", "--weight-decay", "-1"], "--weight-decay: -1 is out of range"),
        ([*RUN, "--steps", "1", "--threads", "0"], "--threads: 0 is out of range"),
        ([*RUN, "--steps", "1", "--checkpoint-every", "0"], "--checkpoint-every: 0 is out of range"),
        ([*RUN, "--steps", "1", "--nvme-weights", "0"], "--nvme-weights: 0 is out of range; give a number above 0"),
        ([*RUN, "--steps", "1", "--nvme", "a-file"], "a-file is a file, not a folder"),
        (["run", "nope.json", *RUN[2:], "--steps", "1"], "there is no file 'nope.json'"),
        (["run", "a-folder", *RUN[2:], "--steps", "1"], "a-folder is a folder; give a file"),
        (["compare", "nope.json", "run"], "there is no file 'nope.json'"),
        (["compare", "plan.json", "run", "-o", "a-folder"], "a-folder is a folder"),
        (["compare", "plan.json", "run", "--warmup", "-1"], "--warmup: -1 is out of range"),
        (["sweep", "nope.toml"], "there is no file 'nope.toml'"),
        (["sweep", "a-folder"], "a-folder is a folder; give a file"),
        (["sweep", "study.toml", "-o", "a-file"], "a-file is a file, not a folder"),
        (["sweep", "study.toml", "--workers", "0"], "--workers: 0 is out of range"),
        (["advise", *SCENARIO, "--batch", "0"], "batch_size: 0 is out of range"),
        (["advise", *SCENARIO, "--years", "0"], "--years: 0 is out of range; give a number above 0"),
        (["advise", *SCENARIO, "--electricity", "-1"], "--electricity: -1 is out of range; give a number 0 or more"),
        (["advise", *SCENARIO, "--time-limit", "-1"], "--time-limit: -1 is out of range"),
        (["advise", *SCENARIO, "--tokens", "ten"], "--tokens: 'ten' is no amount; give a number above 0"),
        (["advise", *SCENARIO, "--workers", "0"], "--workers: 0 is out of range"),
        (["advise", *SCENARIO, "-o", "a-folder"], "a-folder is a folder"),
        (
            ["run", __file__, "--model", ".", "--data", ".", "--threads", "100000"],
            "100000 is out of range; give a whole number of 1 to 1,024",
        ),
        (["demo", "--steps", "3"], "--steps: 3 is out of range; give a whole number of 4 or more"),
        (["demo", "--threads", "0"], "--threads: 0 is out of range"),
        (["demo", "--out", "a-file"], "a-file is a file, not a folder"),
        (["machine", "measure", "--budget-s", "1"], "--budget-s: 1 is out of range; give a number 5 or more"),
        (["machine", "measure", "--nvme-dir", "a-file"], "a-file is a file, not a folder"),
        (["machine", "measure", "--no-nvme", "--nvme-dir", "."], "not allowed with"),
        (["machine", "import", "--fio", "nope.json", "-o", "m.toml"], "there is no file 'nope.json'"),
        (["workload", "show", "gpt-13b", "--batch", "0"], "--per_device_train_batch_size: 0 is out of range"),
        (["workload", "deepspeed", "a-folder", "--model", "gpt-13b"], "a-folder is a folder; give a file"),
        (["validate", "--measure-s", "-1"], "--measure-s: -1 is out of range; give a number 5 or more"),
        (["validate", "--out", "a-file"], "a-file is a file, not a folder"),
        (["validate", "--table", "a-folder", "-o", "a-folder"], "a-folder is a folder"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, error = refused(argv, capsys)
    assert status == 2
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["simulate", "--policy", "fuyu", *SCENARIO], "did you mean 'fuyou'"),
        (
            ["simulate", "--policy", "fuyou", "--model", "gpt2", "--machine", "laptop", "--freeze", "*"],
            "freeze '*' matches all parameters, so that nothing is trained; freeze fewer",
        ),
        (
            ["simulate", "--policy", "planner", *SCENARIO],
            "no policy 'planner'; its plan is that of `tierplan plan`; choose",
        ),
        (["compare-policies", "--policies", "fuyu", *SCENARIO[2:], "--model", "gpt-13b"], "did you mean 'fuyou'"),
        (["simulate", "--policy", "fuyou", "--model", "gpt-13", *SCENARIO[2:]], "did you mean 'gpt-1.3b' or 'gpt-13b'"),
        (["simulate", "--policy", "fuyou", "--max-model", *SCENARIO], "leave out --model"),
        (["simulate", "--policy", "fuyou", "--max-model", "--machine", "laptop", "--exact"], "leave out --exact"),
        (
            ["simulate", "--policy", "fuyou", "--max-model", "--machine", "laptop", "--timeline", "t.png"],
            "leave out --timeline t.png",
        ),
        ([*SIMULATE, "--option", "semantics=in-backward", "--semantics", "delayed-1"], "contradict each other"),
        (
            ["simulate", "--policy", "mobius", "--model", "gpt2", "--machine", "laptop", "--option", "semantics=clip"],
            "option 'semantics' of policy 'mobius' is 'clip'; choose among in-backward, exact-clip, delayed-1",
        ),
        (["simulate", "--policy", "fuyou", "--model", "gpt-13b", "--machine", "nope.toml"], "nope.toml"),
        (["compare", "plan.json", "a-folder", *SCENARIO[2:]], "not a schedule"),
        (
            ["plan", *SCENARIO, "--batch", "100000000"],
            "per_device_train_batch_size is 100,000,000; no step has so many",
        ),
        (["plan", *SCENARIO, "--accumulation", "100000000"], "gradient_accumulation_steps is 100,000,000; no step has"),
        (["advise", *SCENARIO, "--sequences", "100000000"], "a step of 100,000,000 sequences is no step"),
        ([*SIMULATE, "--set", "gpu.peak_bf16=165"], 'did you mean "165 TFLOP/s"?'),
        ([*SIMULATE, "--set", "host.capacity=64"], 'did you mean "64 GiB"?'),
        ([*SIMULATE, "--set", "host.capacity=64000000000000GiB"], "which nothing reaches; check its unit"),
        ([*SIMULATE, "-o", "/dev/full"], "/dev/full: cannot be written: no space left on device; give another file"),
    ],
)
def test_what_cannot_be_is_one_line_and_status_1(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, error = refused(argv, capsys)
    assert status == 1
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "kept"),
    [
        (["machine", "measure", "--no-nvme", "--budget-s", "5"], "machines/here.toml"),
        (["calibrate", "--model", "gpt2", "--machine", "laptop", "--batch", "1", "--budget-s", "1"], "calibrations"),
    ],
)
def test_where_a_result_would_be_kept_is_tried_before_it_is_measured(
    argv: list[str], kept: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Root may write everywhere but in `/proc`, so permissions say nothing of it."""
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME"):
        monkeypatch.setenv(name, "/proc")
    status, error = refused(argv, capsys)
    assert status == 1
    assert re.search(f"cannot write /proc/tierplan/{kept}, where it is kept without -o: .* in /proc; give an", error)


@pytest.mark.parametrize("more", [["plan", "--batch", "4", "--time-limit", "0.5"], ["advise", "--quick"]])
def test_an_answer_that_took_a_while_is_said_though_its_file_cannot_be_written(
    more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*more, "--model", "gpt2", "--machine", "desktop-4090", "-o", "/dev/full"]
    assert main(command) == 1
    told = capsys.readouterr()
    assert "tokens/s" in told.out
    assert "/dev/full" not in told.out
    assert "/dev/full: cannot be written: no space left on device" in told.err
    if more[0] == "plan":
        assert main([*command, "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["fits"]


def test_an_output_that_is_closed_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the shell's `>&-`."""
    with monkeypatch.context() as closed:
        closed.setattr("sys.stdout", None)
        assert main(SIMULATE) == 1
    assert capsys.readouterr().err.startswith("tierplan: the standard output is closed; send it to a file")


def test_systems_of_which_none_runs_are_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["compare-policies", *SCENARIO, "--batch", "1"]
    assert main([*asked, "--policies", "in-memory", "full-recompute"]) == 3
    assert main([*asked, "--policies", "in-memory", "fuyou"]) == 0
    nowhere = ["compare-policies", *SCENARIO, "--batch", "4096", "--policies", "planner"]
    assert main(nowhere) == main([*nowhere, "in-memory"]) == 3


def test_names_of_systems_stand_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """A comma between them was a part of the name of a policy that there is not."""
    for names in (["in-memory,fuyou"], ["in-memory,", "fuyou"], ["in-memory", ",", "fuyou"]):
        assert main(["compare-policies", *SCENARIO, "--policies", *names]) == 1
        said = capsys.readouterr().err
        assert "separated by spaces: --policies in-memory fuyou" in said
        assert len(said.splitlines()) == 1


def test_systems_that_update_in_another_way_do_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Harmony was listed with updates in backward where delayed ones were asked for."""
    asked = ["compare-policies", *SCENARIO[2:], "--model", "gpt2", "--batch", "1", "--semantics", "delayed-1", "--json"]
    assert main([*asked, "--policies", "zero-offload", "harmony"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["zero-offload"]["fits"]
    assert told["harmony"]["why_not"] == "it updates by 'in-backward' alone, not by 'delayed-1'"


@pytest.mark.parametrize("policy", ["harmony", "roundpipe"])
@pytest.mark.parametrize("semantics", ["in-backward", "exact-clip", "delayed-1"])
def test_a_system_is_asked_for_semantics_by_every_command_alike(
    policy: str, semantics: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """`simulate` and `explain-run` refused, as wrong input, what `compare-policies` and `plan` answer."""
    asked = ["--model", "gpt2", "--machine", "laptop", "--devices", "2", "--accumulation", "2", "--json"]
    asked += ["--semantics", semantics]
    runs = main(["simulate", "--policy", policy, *asked]) == 0
    told = json.loads(capsys.readouterr().out)
    assert runs == ((semantics == "delayed-1") == (policy == "roundpipe"))
    main(["compare-policies", "--policies", policy, *asked])
    beside = json.loads(capsys.readouterr().out)[policy]
    assert (beside["step_s"], beside.get("why_not")) == (told["step_s"], told.get("why_not"))
    assert main(["explain-run", "--step-s", "1", "--policy", policy, "--time-limit", "0.1", *asked]) == (
        0 if runs else 3
    )
    explained = json.loads(capsys.readouterr().out)
    assert (explained["expected_s"], explained["why_not"]) == (told["step_s"], told.get("why_not"))


def test_clipping_by_updates_that_know_no_norm_is_refused_of_every_system(capsys: pytest.CaptureFixture[str]) -> None:
    """Harmony, which has no such setting, clipped by exact norms where updates in backward were asked for."""
    asked = ["compare-policies", "--policies", "in-memory", "harmony", "--model", "gpt2", "--machine", "laptop"]
    assert main([*asked, "--batch", "1", "--semantics", "in-backward", "--max-grad-norm", "1", "--json"]) == 3
    told = json.loads(capsys.readouterr().out)
    assert told["harmony"]["why_not"] == told["in-memory"]["why_not"]
    assert "updates in backward (semantics 'in-backward') come before the norm is known" in told["harmony"]["why_not"]


def test_a_batch_that_fits_nothing_is_answered_with_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SCENARIO, "--batch", "4096"]) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert "device memory is short by at least 54.9 GiB" in said  # with the micro-batch cut, tied gradients away
    fits = int(re.search(r"sequences per micro-batch that fit: (?:up to )?(\d+)", said)[1])  # type: ignore[index]
    point = Point(model="gpt-13b", machine="desktop-4090", policy="fuyou", batch=fits)
    assert predict_point(point).fits, "the largest batch that is named does fit"


def test_of_the_largest_batch_that_is_named_one_more_does_not_fit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model with a head of its own: a tied one's micro-batches may be cut so that their number does not matter."""
    monkeypatch.setattr("tierplan.planner.infeasible.TRY_S", 60.0)  # also on a busy computer
    model, small = "llama-2-13b", {"gpu.capacity": "7 GiB"}
    asked = ["plan", "--model", model, *SCENARIO[2:], "--set", "gpu.capacity=7 GiB", "--seq", "4096"]
    assert main([*asked, "--batch", "4096"]) == 3
    said = " ".join(capsys.readouterr().out.split())
    fits = int(re.search(r"sequences per micro-batch that fit: up to (\d+)\.$", said)[1])  # type: ignore[index]
    point = Point(model=model, machine="desktop-4090", overrides=small, seq=4096, batch=fits, planner_s=1.0)
    assert predict_point(point).fits
    assert not predict_point(replace(point, batch=fits + 1)).fits


def test_cuda_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    status, error = refused(["machine", "measure", "--device", "cuda"], capsys)
    assert status == 1
    assert "device is 'cuda', but PyTorch sees no GPU; check the driver, or use device cpu" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "content",
    [
        *(b"{", b"null", b"\xff\xfe", b"\0" * 4096, b"[" * 100_000, b'{"a":' * 100_000, b"a=" + b"[" * 50_000),
        *(b'{"a":' + b"9" * 5000, b"a=" + b"9" * 5000),
    ],
    ids=lambda content: str(content[:6]),
)
@pytest.mark.parametrize(
    "argv",
    [
        ["simulate", "--policy", "fuyou", "--model", "gpt-13b", "--machine", "broken.toml"],
        ["simulate", "--policy", "fuyou", "--model", "broken.toml", "--machine", "desktop-4090"],
        ["run", "broken.toml", *RUN[2:], "--steps", "1"],
        ["sweep", "broken.toml"],
        ["machine", "import", "--fio", "broken.toml", "-o", "m.toml"],
        ["workload", "deepspeed", "broken.toml", "--model", "gpt-13b"],
    ],
    ids=lambda argv: argv[0],
)
def test_a_broken_file_is_one_line_with_its_name(
    argv: list[str], content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("broken.toml").write_bytes(content)
    status, error = refused(argv, capsys)
    assert status == 1
    assert "broken.toml" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("fuyou", "fuyu", "there is no policy 'fuyu'"),
        ("gpt-13b", "gpt-13", "model 'gpt-13'"),
        ("desktop-4090", "desktop-4900", "no machine 'desktop-4900'"),
        ("[4]", "[-1]", "batch is -1; it must be 1 or more"),
        ("drives", "drvies", "no key 'nvme.drvies'"),
    ],
)
def test_a_study_with_a_typo_is_refused_whole(
    old: str, new: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = '[scenario]\nmodel = "gpt-13b"\nmachine = "desktop-4090"\npolicy = "fuyou"\nbatch = [4]\n'
    study = scenario + "[set]\nnvme.drives = 1\n"
    Path("study.toml").write_text(study.replace(old, new))
    status, error = refused(["sweep", "study.toml", "--workers", "1"], capsys)
    assert status == 1
    assert message in error
    assert error.count("\n") == 1
    assert not Path("study").exists()


def test_simulate_says_where_its_files_were_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SIMULATE, "-o", "made/s.json", "--timeline", "made/t.json"]) == 0
    assert "schedule: made/s.json\ntimeline: made/t.json\n" in capsys.readouterr().out
    assert Path("made/s.json").exists()
    assert Path("made/t.json").exists()
    assert main(["simulate", "--policy", "in-memory", *SCENARIO, "-o", "none.json", "--timeline", "t.html"]) == 3
    assert "none.json was not written\nt.html was not written\n" in capsys.readouterr().out
    assert not Path("none.json").exists()
    assert not Path("t.html").exists()


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    printed = capsys.readouterr()
    assert all(name in printed.err for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_argument_is_explained(name: str) -> None:
    import argparse
    import importlib

    parser = argparse.ArgumentParser()
    importlib.import_module(f"tierplan.commands.{COMMANDS[name]}").add_arguments(parser)
    parsers = [parser]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            parsers += action.choices.values()
    actions = [a for p in parsers for a in p._actions if not isinstance(a, argparse._SubParsersAction)]
    assert [a.option_strings or a.dest for a in actions if not a.help] == []
