"""The command `tierplan`: finds the subcommand's module in `tierplan.commands` and turns errors into one clear line."""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import get_terminal_size
from typing import NoReturn

import shtab

from tierplan import __version__
from tierplan.commands import COMMANDS
from tierplan.commands.options.arguments import add_json, check_apart
from tierplan.commands.options.help import Formatter
from tierplan.commands.options.not_yet import nearest
from tierplan.commands.options.terminal import STDOUT
from tierplan.hwmodels.values.extras import words_of_missing
from tierplan.sim.output.text import wrapped
from tierplan.sim.trace import name_in_errors

USER_ERRORS = (ValueError, OSError, RuntimeError, ModuleNotFoundError)
"""What a user can cause: shown as one line, without a traceback (set TIERPLAN_DEBUG=1 to see it)."""

OF_OTHERS = ("torchao", "torch.utils._pytree")
"""Loggers that warn, as `transformers` imports torchao, of kernels that no command uses."""

OBJECTS = 100_000
"""That are made before Python looks for cycles among them: a search makes millions, and hardly any is in a cycle."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line: a dozen lines of usage would hide it."""

    def error(self, message: str) -> NoReturn:
        told = f"{self.prog}: {message}{nearest(message)}; `{self.prog} --help` says what there is"
        self.exit(2, f"{for_reader(told)}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the exit status: 0 done, 1 an error that was explained, 2 wrong usage, 130 interrupted.

    Some commands end with 3: what was asked about does not fit, which is an answer.
    """
    gc.set_threshold(OBJECTS)
    for name in OF_OTHERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    parser = command_parser()
    args, unknown = parser.parse_known_args(argv)
    args.given = list(sys.argv[1:] if argv is None else argv)
    if sys.stderr is None:  # closed, too: nobody wants to know
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        told = "the standard output is closed; send it to a file, or to /dev/null if nobody wants it"
        print(f"tierplan: {told}", file=sys.stderr)
        return 1
    if args.command is None:
        parser.print_help(sys.stderr)
        return 2
    if unknown:
        kind = "option" if unknown[0].startswith("-") else "argument"
        args.parser.error(f"no {kind} {unknown[0]}")
    check_apart(args)
    try:
        status = int(args.run(args))
        with name_in_errors(STDOUT):
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("tierplan: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _drop_output()
        return 1
    except USER_ERRORS as error:
        if os.environ.get("TIERPLAN_DEBUG"):
            raise
        if isinstance(error, OSError) and error.filename == STDOUT:
            _drop_output()
        message = message_of(error)
        print(for_reader(f"tierplan {args.command}: {message}{nearest(message)}"), file=sys.stderr)
        return 1


def _drop_output() -> None:
    """What is left of it: Python would write that at its end, and fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def command_parser() -> Parser:
    """The parser of all commands."""
    parser = Parser(
        prog="tierplan", description="Can I train this model on this machine, how fast, what limits it? Then run it."
    )
    parser.add_argument("--version", action="version", version=f"tierplan {__version__}")
    help_text = 'for a shell: eval "$(tierplan --print-completion bash)"'
    shtab.add_argument_to(parser, ["--print-completion"], help=help_text)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, path in COMMANDS.items():
        module = importlib.import_module(f"tierplan.commands.{path}")
        summary = (module.__doc__ or "").strip().partition("\n")[0]  # empty under `python -OO`
        sub = subparsers.add_parser(name, help=summary, description=module.__doc__, formatter_class=Formatter)
        module.add_arguments(sub)
        if not sub.get_default("has_actions"):
            add_json(sub)
            sub.set_defaults(run=module.run)
        sub.set_defaults(parser=sub)
    return parser


def for_reader(error: str) -> str:
    """An error as it is for a file or a pipe; on a terminal, broken between words."""
    if not sys.stderr.isatty():
        return error
    room = get_terminal_size().columns
    return "\n".join(line for part in error.splitlines() for line in wrapped(part, room, of=0))


def message_of(error: Exception) -> str:
    """The error's message. What the system alone says of a file is put in words, without its number.

    Raises what is no fault of the user: a missing package that no extra brings.
    """
    if isinstance(error, ModuleNotFoundError):
        return words_of_missing(error)
    if not isinstance(error, OSError) or error.errno is None or error.filename is None:
        return str(error)
    name = error.filename2 or error.filename
    reason = (error.strerror or str(error)).lower()
    return f"{name}: {reason}; give another file or folder, or make this one usable"


if __name__ == "__main__":
    sys.exit(main())
