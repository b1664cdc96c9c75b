"""The command `tierplan`: finds the subcommand's module in `tierplan.commands` and turns errors into one clear line."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from tierplan import __version__
from tierplan.commands import COMMANDS

__all__ = ["main"]

USER_ERRORS = (ValueError, OSError, RuntimeError)
"""What a user can cause: shown as one line, without a traceback (set TIERPLAN_DEBUG=1 to see it)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the exit status: 0 done, 1 an error that was explained, 2 wrong usage, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="tierplan",
        description="Can I train this model on this machine, how fast, what limits it? Then run it.",
    )
    parser.add_argument("--version", action="version", version=f"tierplan {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"tierplan.commands.{name.replace('-', '_')}")
        summary = (module.__doc__ or "").strip().splitlines()[0]
        sub = subparsers.add_parser(
            name, help=summary, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt:
        print("tierplan: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except USER_ERRORS as error:
        if os.environ.get("TIERPLAN_DEBUG"):
            raise
        print(f"tierplan {args.command}: {error}", file=sys.stderr)
        return 1
