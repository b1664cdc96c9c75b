"""What commands print: plain text in a pipe; on a terminal in colour, with a sign of life while they work."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from shutil import get_terminal_size
from typing import TYPE_CHECKING

from tierplan.sim.output.text import wrapped
from tierplan.sim.trace import name_in_errors

if TYPE_CHECKING:
    from tierplan.planner.prediction import Prediction

STDOUT = "the standard output"
"""Its name in errors."""
COLOURS = (
    r"(?P<green>^(Yes|Normal)\b.?)",
    r"(?P<red>^(No|Not normal)[:.])",
    r"(?P<yellow>^(Note|Assumed):|\(assumed\))",
    r"(?P<cyan>(?<![\w./-])[+-]?\d(?:[\d,.]*\d)?"
    r"( ?(%|[KMGT]i?B(/s)?|[kMBT]|s|ms|µs|min|h|days|years|tokens/s))?(?![\w-]))",
)
"""Of what stands in a line, by the colour's name."""


def nameplate_lines(*predictions: Prediction) -> list[str]:
    """Which numbers of the machine nobody measured, of the parts that one of these plans uses."""
    running = [p for p in predictions if p.fits] or predictions
    names = dict.fromkeys(name for p in running for name in p.nameplate)
    return wrapped(f"from data sheets rather than measured: {', '.join(names)}") if names else []


def say(*lines: str) -> None:
    """Prints lines; on a terminal with colours (unless NO_COLOR is set)."""
    text = "\n".join(lines)
    if not sys.stdout.isatty():
        _print(text)
        return
    from rich.console import Console
    from rich.text import Text

    shown = Text(text)
    for pattern in COLOURS:
        shown.highlight_regex(f"(?m){pattern}")
    Console(soft_wrap=True, highlight=False).print(shown)


def tell(args: argparse.Namespace, record: object, lines: Iterable[str]) -> None:
    """Prints what was found: as JSON where `--json` is given, else as lines. A record that takes long is a function."""
    if args.json:
        _print(json.dumps(record() if callable(record) else record, indent=1, allow_nan=False))
    else:
        say(*lines)


def _print(text: str) -> None:
    with name_in_errors(STDOUT):
        print(text)


@contextmanager
def told_anyway(args: argparse.Namespace, record: object, lines: Iterable[str]) -> Iterator[None]:
    """For what writes files: where one cannot be written, what was found is told before the error is."""
    try:
        yield
    except OSError:
        tell(args, record, lines)
        raise


@contextmanager
def working(what: str) -> Iterator[None]:
    """Shows on a terminal that this is under way, and for how long; what it prints stays as it is."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as progress:
        progress.add_task(what, total=None)
        yield


@contextmanager
def progress_bar(*, names_phases: bool = False) -> Iterator[Callable[[str, float], None]]:
    """Shows on a terminal what is being done and how far it is; elsewhere, with `names_phases`, a line each."""
    from tqdm import tqdm

    is_hidden, phase = not sys.stderr.isatty(), ""
    room = min(64, max(8, get_terminal_size().columns - 32))  # beside the bar and the time, of hours too
    shown = f"{{desc:{room}.{room}}} |{{bar:20}}| {{elapsed}}"
    with tqdm(total=1.0, bar_format=shown, leave=False, disable=is_hidden) as bar:

        def progress(what: str, part: float) -> None:
            nonlocal phase
            before, phase = phase, what.partition(":")[0]
            if is_hidden and names_phases and phase != before:
                print(phase, file=sys.stderr, flush=True)
            bar.set_description_str(what, refresh=False)
            bar.n = min(max(part, 0.0), 1.0)
            bar.refresh()

        yield progress
