"""The public names exist, and looking at them or at `--help` loads neither torch nor the solver."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import tierplan as tp
from tierplan.cli import main
from tierplan.commands import COMMANDS


def test_every_public_name_resolves() -> None:
    pytest.importorskip("torch")
    for name in tp.__all__:
        assert getattr(tp, name) is not None


def test_functions_of_four_arguments_or_more_say_what_they_are() -> None:
    pytest.importorskip("torch")
    functions = [f for f in (getattr(tp, name) for name in tp.__all__) if inspect.isfunction(f)]
    many = [f for f in functions if len(inspect.signature(f).parameters) >= 4]
    assert len(many) > 5
    for f in many:
        assert "Parameters\n----------\n" in (inspect.getdoc(f) or ""), f.__name__


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="load_machine"):
        tp.no_such_thing  # noqa: B018


def test_help_and_import_stay_light() -> None:
    code = (
        "import sys, tierplan, contextlib, io\n"
        "from tierplan.cli import main\n"
        "from tierplan.commands import COMMANDS\n"
        "for argv in [['--help'], *([name, '--help'] for name in COMMANDS)]:\n"
        "    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):\n"
        "        main(argv)\n"
        "print(sorted({'torch', 'highspy', 'matplotlib', 'transformers'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([name, "--help"])
    assert stopped.value.code == 0
    help_text = capsys.readouterr().out
    assert len(help_text.splitlines()) > 5
    assert "default ())" not in help_text


def test_wrong_usage_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["no-such-command"])
    assert stopped.value.code == 2
    assert "no-such-command" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["tierplan", "tierplan.cli"])
def test_the_module_is_the_command(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"tierplan {tp.__version__}"
