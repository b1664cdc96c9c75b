"""Types for arguments: what they refuse is said before anything is read or computed, and the exit status is 2."""

from __future__ import annotations

import math
import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace, _ActionsContainer
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeVar

import shtab

from tierplan.sim.workloads.optimizers import optimizer_of

T = TypeVar("T")
PICTURES = (".png", ".svg", ".pdf")
READ = ("model", "machine", "calibration", "plan")
"""Arguments that may name a file to read, in commands that write one."""


def option(
    parser: _ActionsContainer,
    spec: str,
    help: str,
    type: Callable[[str], object] | None = None,
    default: object = None,
    **more: Any,
) -> None:
    """Adds an option.

    Parameters
    ----------
    spec
        As the help shows it: `--nvme --nvme-dir DIR`. Without a word for a value, and without choices: a switch.
    help
        What it means; a default is added.
    type
        What reads a value; for texts, what refuses an empty one.
    more
        As for `add_argument`; `repeat` for one that may be given several times.
    """
    names = [word for word in spec.split() if word.startswith("-")]
    if len(names) < len(spec.split()):
        more["metavar"] = spec.split()[-1]
    elif not {"choices", "metavar"} & more.keys():
        more["action"] = "store_true"
    if more.pop("repeat", False):
        more |= {"action": "append", "default": []}
    if default is not None:
        more["default"] = default
        shown = f"{default:g}" if isinstance(default, int | float) else default
        help += "" if "default" in help or default == () else f" (default {shown})"
    if more.get("action") != "store_true" and "choices" not in more:
        more["type"] = type or not_empty
    action = parser.add_argument(*names, help=help, **more)
    if completed := {"DIR": shtab.DIRECTORY, "FILE": shtab.FILE}.get(str(more.get("metavar")).partition(".")[0]):
        action.complete = completed  # type: ignore[attr-defined]


def add_json(parser: _ActionsContainer) -> None:
    """Adds `--json`, which every command has."""
    option(parser, "--json", "print what was found as JSON")


def actions(parser: ArgumentParser) -> Callable[[str, Callable[[Namespace], int], str], ArgumentParser]:
    """For a command with actions, such as `machine list`: adds one by name, what runs it and help."""
    commands = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    parser.set_defaults(has_actions=True)

    def action(name: str, run: Callable[[Namespace], int], help: str) -> ArgumentParser:
        added = commands.add_parser(name, help=help)
        added.set_defaults(run=run)
        add_json(added)
        return added

    return action


def add_set(parser: _ActionsContainer) -> None:
    """Adds `--set`, whose values `load_machine` takes as `overrides`."""
    what = "change the machine, e.g. nvme.drives=3; repeatable (keys: tierplan machine show X --keys)"
    option(parser, "--set KEY=VALUE", what, repeat=True, dest="overrides")


def add_device(parser: _ActionsContainer) -> None:
    """Adds `--device`: where PyTorch computes."""
    option(parser, "--device", "auto is cuda where PyTorch sees a GPU", choices=("auto", "cpu", "cuda"), default="auto")


def add_timeline(parser: _ActionsContainer) -> None:
    """Adds `--timeline`, for `studies.answer.write_timeline`."""
    what = "draw what each stream does in one step: HTML to zoom into, PNG, SVG, PDF, or JSON for ui.perfetto.dev"
    option(parser, "--timeline FILE", what, new_file(".html", *PICTURES, ".json"))


def not_empty(text: str) -> str:
    """A text that says something."""
    if not text.strip():
        raise ArgumentTypeError(f"{text!r} says nothing, as a variable of the shell that is not set; leave it out")
    return text


def _number(kind: Callable[[str], T], name: str, rule: str, is_right: Callable[[T], bool]) -> Callable[[str], T]:
    """What reads such a number, and says the rule where a text is none, or one that is not right."""

    def read(text: str) -> T:
        try:
            value = kind(text)
        except ValueError:
            raise ArgumentTypeError(f"{text!r} is no {name}; give {rule}") from None
        if not is_right(value):
            raise ArgumentTypeError(f"{text} is out of range; give {rule}")
        return value

    return read


def whole(least: int, most: float = math.inf) -> Callable[[str], int]:
    """A whole number of `least` or more, and of no more than `most`."""
    end = f"to {most:,.0f}" if most < math.inf else "or more"
    return _number(int, "whole number", f"a whole number of {least} {end}", lambda value: least <= value <= most)


seed = whole(0, 2**32 - 1)
"""Of random numbers: no larger than generators take, also where others are made of it."""


def optimizer(text: str) -> str:
    """An optimizer with its options, in the one form for each."""
    try:
        return optimizer_of(text).spec
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from None


def finite(*, least: float = -math.inf, above: float = -math.inf, below: float = math.inf) -> Callable[[str], float]:
    """A finite number of `least` or more, above `above` and below `below`."""
    rules = [f"{least:g} or more"] if least > -math.inf else []
    rules += [f"above {above:g}"] if above > -math.inf else []
    rules += [f"below {below:g}"] if below < math.inf else []
    rule = f"a number {' and '.join(rules)}" if rules else "a finite number"
    return _number(float, "number", rule, lambda x: math.isfinite(x) and least <= x and above < x < below)


def _scaled(text: str) -> float:
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}.get(text[-1:], 1.0)
    return float(text if scale == 1.0 else text[:-1]) * scale


amount = _number(_scaled, "amount", "a number above 0, such as 10M or 2.5B", lambda value: 0 < value < math.inf)
"""With k, M, B or T for thousands to trillions: `10M`."""


def existing_file(text: str) -> str:
    """The path of a file that is there."""
    path = Path(text)
    if path.is_dir():
        raise ArgumentTypeError(f"{text} is a folder; give a file")
    if not path.exists():
        raise ArgumentTypeError(f"there is no file {text!r}")
    return text


class NewFile(str):
    """The path of a file that is written."""

    __slots__ = ()


def check_apart(args: Namespace) -> None:
    """Refuses a file to write that another argument names: what is there, or what is written first, would be lost."""
    read = [path for name in READ if isinstance(path := vars(args).get(name), str) and Path(path).is_file()]
    taken = {os.path.realpath(path) for path in read}
    for path in (value for value in vars(args).values() if isinstance(value, NewFile)):
        if (place := os.path.realpath(path)) in taken and (Path(path).is_file() or not Path(path).exists()):
            args.parser.error(f"{path} is given twice, and one would replace the other; give another file")
        taken.add(place)


def new_file(*suffixes: str) -> Callable[[str], str]:
    """The path of a file that can be written, with one of `suffixes`, if any are given."""

    def read(text: str) -> str:
        path = Path(text)
        if path.is_dir():
            raise ArgumentTypeError(f"{text} is a folder; give the name of a file")
        if suffixes and path.suffix.lower() not in suffixes:
            raise ArgumentTypeError(f"{text!r} has no format that can be written; end it with {' or '.join(suffixes)}")
        if path.is_file() or not path.exists():  # what is no file, as /dev/stdout, is written to as it is
            check_writable(path.parent, text)
        return NewFile(text)

    return read


def new_folder(text: str) -> str:
    """The path of a folder that is there, or that can be made."""
    check_writable(Path(text), text)
    return text


class NotWritableError(ArgumentTypeError, OSError):
    """Of a place that an argument gives, or that is taken without one."""


def check_writable(folder: Path, text: str) -> None:
    """Refuses what lies below a file, or in a folder where nothing can be written: that is tried."""
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not there.is_dir():
        raise NotWritableError(f"cannot write {text}: {there} is a file, not a folder; give another place")
    try:
        TemporaryFile(dir=there).close()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise NotWritableError(f"cannot write {text}: {reason} in {there}; give another place") from None
