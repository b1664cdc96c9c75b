"""The first five commands of somebody new: each is one that the command line takes, and each finds what it names."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.newcomer import ROOT, commands
from tierplan.cli import command_parser


def test_the_commands_are_taken_in_this_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").write_text("{}")  # `plan` has made it
    parsed = [command_parser().parse_args(words[1:]) for words in commands()]
    assert [words[0] for words in commands()] == ["tierplan"] * 5
    assert [args.command for args in parsed] == ["machine", "calibrate", "plan", "run", "compare"]
    _, calibrate, plan, run, compare = parsed
    assert calibrate.quick
    assert {(a.model, a.batch, a.seq) for a in (calibrate, plan)} == {(str(run.model), 2, 256)}, "it suits the plan"
    assert (ROOT / run.model / "config.json").is_file()
    assert (ROOT / run.data).is_dir()
    assert str(compare.plan) == str(run.plan) == str(plan.output)
    assert str(compare.run_dir) == str(run.out)
