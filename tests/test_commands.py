"""What holds for every command: `--json` is there, and help and completion name all options."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierplan.cli import command_parser, main

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


@pytest.mark.parametrize("parser", LEAVES, ids=lambda p: p.prog)
def test_every_command_that_prints_prints_json_too(parser: argparse.ArgumentParser) -> None:
    assert "--json" in parser._option_string_actions or parser.prog in NO_JSON


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
