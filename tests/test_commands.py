"""What holds for every command: `--json` is there, and help and completion name all options."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierplan.cli import command_parser, for_reader, main, message_of
from tierplan.commands import COMMANDS
from tierplan.commands.options.scenario import read_point
from tierplan.commands.options.terminal import progress_bar, say, tell, working
from tierplan.hwmodels.values.extras import EXTRAS
from tierplan.studies.study import ALIKE, KEYS, Point

NO_JSON: dict[str, str] = {}
"""Commands that print nothing that a program could want, with the reason."""


def leaves(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers that have no commands below them."""
    below = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    if not below:
        yield parser
    for action in below:
        for sub in action.choices.values():
            yield from leaves(sub)


LEAVES = list(leaves(command_parser()))
SUBPARSERS = next(a for a in command_parser()._actions if isinstance(a, argparse._SubParsersAction))


@pytest.mark.parametrize("parser", LEAVES, ids=lambda p: p.prog)
def test_every_command_that_prints_prints_json_too(parser: argparse.ArgumentParser) -> None:
    assert "--json" in parser._option_string_actions or parser.prog in NO_JSON


@pytest.mark.parametrize("name", COMMANDS)
def test_help_fits_80_columns_and_its_examples_can_be_typed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    parser = next(sub for sub in SUBPARSERS.choices.values() if sub.prog == f"tierplan {name}")
    described = parser.format_help().partition("\n\n")[2].split("\npositional arguments:")[0].split("\noptions:")[0]
    assert max(map(len, described.splitlines())) <= 80
    assert not re.search("^(?! {4}(?! ))tierplan ", described, re.MULTILINE), "examples are indented alike"
    for typed in re.findall(r"^ *(tierplan (?:.*\\\n)*.*)$", described, re.MULTILINE):
        command = " ".join(typed.replace("\\\n", " ").split("  ")[0].split())
        assert command.split("...")[0].strip() in " ".join((parser.description or "").split())


@pytest.mark.parametrize("parser", LEAVES, ids=lambda p: p.prog)
def test_help_says_how_long_is_searched_and_on_what_is_built_where_nobody_says(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if (action.metavar == "S" and action.dest == "time_limit") or (action.metavar == "X" and action.dest == "base"):
            assert "(default" in (action.help or ""), action.option_strings


def test_all_commands_were_looked_at() -> None:
    names = {parser.prog for parser in LEAVES}
    assert {"tierplan plan", "tierplan machine measure", "tierplan workload deepspeed"} <= names
    assert NO_JSON.keys() <= names


@pytest.mark.parametrize(
    ("argv", "key"),
    [
        (["workload", "deepspeed", "ds.json", "--model", "gpt2"], "policy"),
        (["machine", "show", "desktop-4090", "--keys"], "gpu.capacity"),
        (["machine", "import", "--base", "desktop-4090", "--fio", "fio.json", "-o", "mine.toml"], "imported"),
        (["validate", "--list"], "gpt2-384"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else value,
)
def test_json_is_one_object(
    argv: list[str], key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    (tmp_path / "fio.json").write_bytes((Path(__file__).parent / "hwmodels/samples/fio.json").read_bytes())
    monkeypatch.chdir(tmp_path)
    assert main([*argv, "--json"]) == 0
    assert key in json.loads(capsys.readouterr().out)


def test_json_has_no_numbers_that_are_not_finite() -> None:
    """Python writes `NaN` and `Infinity`, which no other program reads."""
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="not JSON compliant"):
            tell(argparse.Namespace(json=True), {"step_s": value}, [])


SHOWN = (
    ["machine", "list"],
    ["machine", "show", "fuyou-4090"],
    ["machine", "show", "desktop-4090", "--keys"],
    ["workload", "show", "llama-3.3-70b", "--batch", "4"],
    ["workload", "show", "gpt2", "--unit", "L0"],
    ["simulate", "--policy", "fuyou", "--model", "gpt-6.7b", "--machine", "desktop-4090", "--batch", "4"],
    ["simulate", "--policy", "in-memory", "--max-model", "--machine", "desktop-4090"],
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("argv", SHOWN, ids=lambda argv: " ".join(argv[:3]))
def test_pipes_get_plain_text_of_80_columns_in_one_system_of_units(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Memory in GiB (MiB, TiB), rates in GB/s; a drive's endurance in TB, as on its box."""
    assert main(argv) == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert [line for line in text.splitlines() if len(line) > 80] == []
    lines = [line for line in text.splitlines() if "endurance" not in line]
    amounts = re.findall(r"^  \S+ +[\d.,]+ ([KMGTP]i?B\b(?:/s)?)", "\n".join(lines), flags=re.MULTILINE)
    assert all(unit.endswith("iB") or unit in ("GB/s", "MB/s") for unit in amounts), amounts


def test_what_does_not_fit_is_said_in_80_columns_and_three_digits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", "--policy", "in-memory", "--max-model", "--machine", "laptop", "--batch", "64"]) == 3
    (tmp_path / "ds.json").write_text('{"train_batch_size": 32, "zero_optimization": {"stage": 3}}')
    assert main(["workload", "deepspeed", str(tmp_path / "ds.json"), "--model", "gpt2"]) == 0
    text = capsys.readouterr().out
    commands = ("To simulate it: ", str(tmp_path))
    assert [line for line in text.splitlines() if len(line) > 80 and not line.startswith(commands)] == []
    assert "held by" not in text
    assert " bytes in tier" not in text


def test_on_a_terminal_figures_have_colours_and_work_shows_a_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    out, err = Terminal(), Terminal()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    with working("planning"):
        say("Yes: 159 tokens/s", "  gpu0  [not markup] :smile:")
    assert re.sub(r"\x1b\[[\d;]*m", "", out.getvalue()) == "Yes: 159 tokens/s\n  gpu0  [not markup] :smile:\n"
    assert "\x1b[36m159 tokens/s" in out.getvalue()
    assert "planning" in err.getvalue()


def test_sentences_and_what_stands_beside_names_are_broken_once_on_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On 64 columns no line is longer, and no sentence has short lines between its long ones."""
    out = Terminal()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setenv("COLUMNS", "64")
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["simulate", "--policy", "fuyou", "--model", "gpt-6.7b", "--machine", "desktop-4090"]) == 0
    lines = re.sub(r"\x1b\[[\d;]*m", "", out.getvalue()).splitlines()
    assert max(map(len, lines)) <= 64
    begin = next(k for k, line in enumerate(lines) if "catalog: data sheets" in line)
    end = next(k for k, line in enumerate(lines) if "beyond it" in line)
    assert all(len(line) > 40 for line in lines[begin:end])


@pytest.mark.parametrize("width", [60, 72])
@pytest.mark.parametrize(
    "argv",
    [["machine", "list"], ["machine", "show", "dgx-8xa100-80gb"], ["machine", "curves"], ["workload", "show", "gpt2"]],
    ids=" ".join,
)
def test_tables_fit_a_narrow_terminal_and_words_stay_whole(
    argv: list[str], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terminal breaks what is wider anywhere. All words are those of a wide one."""

    def shown(columns: int) -> str:
        monkeypatch.setattr("sys.stdout", out := Terminal())
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("NO_COLOR", "1")
        assert main(argv) == 0
        return re.sub(r"\x1b\[[\d;]*m", "", out.getvalue())

    narrow = shown(width)
    assert max(map(len, narrow.splitlines())) <= width
    assert {word for word in shown(300).split() if len(word) < 20} <= {*narrow.split()}


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_bar_is_whole_with_its_time_on_narrow_terminals_too(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    err = Terminal()
    monkeypatch.setattr("sys.stderr", err)
    monkeypatch.setenv("COLUMNS", str(width))
    with progress_bar() as progress:
        progress("measuring this machine: copies from the device to host memory, 4 MiB each", 1.0)
    last = err.getvalue().split("\r")[-3]
    assert len(last) < width
    assert re.fullmatch(r"measuring this machine: .*\|[#█]{20}\| \d\d:\d\d", last)


def test_errors_are_broken_between_words_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    error = "tierplan plan: " + ", ".join(f"zero-infinity-{k}" for k in range(20))
    assert for_reader(error) == error
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    lines = for_reader(error).splitlines()
    assert 40 < max(map(len, lines)) <= 80
    assert " ".join(line.strip() for line in lines) == error


def test_completion_is_a_script_with_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--print-completion", "bash"])
    script = capsys.readouterr().out
    assert all(name in script for name in COMMANDS)
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


SETTINGS: dict[str, object] = {
    "dtype": "bf16", "autocast": "fp16", "optimizer": "sgd:momentum=0.9", "lora": "r=4,targets=all-linear",
    "trained_dtype": "bf16", "freeze": "transformer.wte.*,transformer.h.0.*", "base": "nf4", "attention": "plain",
    "activation_format": "fp8", "loss": "fused", "loss_chunks": 4, "torch_compile": True, "max_grad_norm": 0.5,
    "master_weights": False, "padded": True, "backend": "cpu", "exact": True,
}  # fmt: skip


def test_every_setting_of_training_has_a_key_and_an_option_that_a_point_names() -> None:
    assert {*SETTINGS} == {*ALIKE, "exact"} == {*ALIKE, "exact"} & {*KEYS}
    for settings in (*({name: value} for name, value in SETTINGS.items()), SETTINGS):
        point = Point(model="gpt2", machine="laptop", batch=2, seq=64, **settings)  # type: ignore[arg-type]
        asked = ["simulate", "--policy", "fuyou", "--model", "gpt2", "--machine", "laptop", "--batch", "2"]
        assert read_point(command_parser().parse_args([*asked, *point.words])) == point


WITHOUT = """
import sys
from importlib.machinery import PathFinder
found, hidden = PathFinder.find_spec, sys.argv[1].split(",")
PathFinder.find_spec = lambda name, *more: None if name.partition(".")[0] in hidden else found(name, *more)
from tierplan.cli import main
for line in sys.stdin:
    print("status", main(line.split()), file=sys.stderr)
"""
"""Runs commands as in an installation in which these packages are missing."""


def told_without(packages: str, folder: Path, *commands: str) -> list[tuple[str, str]]:
    """What each command says there, and its status."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, packages], input="\n".join(commands), cwd=folder, capture_output=True,
        text=True, check=False, env={**os.environ, "XDG_DATA_HOME": str(folder), "XDG_CONFIG_HOME": str(folder)},
    )  # fmt: skip
    assert "Traceback" not in done.stderr
    return re.findall(r"([^\n]*)\nstatus (\d)\n", done.stderr)


def test_a_command_names_the_extra_whose_package_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "phi.json").write_text('{"model_type": "phi"}')
    asked = "--machine desktop-4090 --batch 1 --seq 64"
    (tmp_path / "study.toml").write_text('[scenario]\nmodel = "gpt2"\nmachine = "laptop"\n')
    commands = {
        "run plan.json --model m --data d --steps 1 --out r": "run: this",
        "run --verify --out r": "run: this",
        "machine measure": "machine: this",
        "calibrate --model gpt2 --batch 4": "calibrate: this",
        "validate": "validate: this",
        "demo": "demo: this",
        f"plan --exact --model phi.json {asked}": "plan: this",
        f"plan --model phi.json {asked}": "plan: model_type 'phi' .*; tracing",
    }
    told = told_without("torch", tmp_path, *commands)
    for (text, status), begin in zip(told, commands.values(), strict=True):
        assert re.fullmatch(f"tierplan {begin} needs torch, which is not installed; install tierplan\\[runtime]", text)
        assert status == "1"
    dask = "sweep study.toml --dask tcp://host:1"
    assert told_without("distributed", tmp_path, dask) == [
        ("tierplan sweep: --dask needs distributed, which is not installed; install tierplan[cluster]", "1")
    ]


def test_each_package_of_an_extra_is_one_that_it_brings() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    brings = {name: {re.split(r"\W", p)[0] for p in those} for name, those in project["optional-dependencies"].items()}
    assert all(package in brings[extra] for package, extra in EXTRAS.items())
    assert brings["runtime"] <= EXTRAS.keys()


def test_a_package_that_no_extra_brings_is_no_fault_of_the_user() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        message_of(ModuleNotFoundError("No module named 'no_such_package'", name="no_such_package"))


def test_commands_work_without_docstrings(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `python -OO`: only what help says of commands is missing."""
    for path in COMMANDS.values():
        monkeypatch.setattr(f"tierplan.commands.{path}.__doc__", None)
    assert main(["machine", "show", "desktop-4090", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["name"] == "desktop-4090"
    for argv in (["--help"], ["plan", "--help"]):
        with pytest.raises(SystemExit, match="0"):
            main(argv)


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_a_standard_output_on_a_full_disk_is_named(more: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "tierplan", "validate", "--list", *more], stdout=full, stderr=subprocess.PIPE,
            text=True, check=False, env={**os.environ, "PYTHONUNBUFFERED": ""},
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == (
        "tierplan validate: the standard output: no space left on device; give another file or folder, or make this "
        "one usable\n"
    )
