"""What the importers share: reading JSON that may be damaged, and numbers that must be present."""

from __future__ import annotations

import json
from collections.abc import Mapping

from tierplan.hwmodels.machine import MachineError


class ImportedFileError(MachineError):
    """A file that is not the tool's output, or only a part of it."""


def json_object(text: str, *, where: str, tool: str, how: str) -> Mapping[str, object]:
    """The JSON object in `text`, which may have other lines before it. `how` says how to make such a file."""
    begin = text.find("{")
    if begin < 0:
        raise ImportedFileError(f"{where} holds no JSON; write it with: {how}")
    try:
        value = json.loads(text[begin:])
    except (ValueError, RecursionError) as error:
        raise ImportedFileError(
            f"{where} is not the whole JSON output of {tool} ({error}); write it again with: {how}"
        ) from error
    if not isinstance(value, dict):
        raise ImportedFileError(f"{where} is not a JSON object; write it with: {how}")
    return value


def json_number(value: object, what: str) -> float:
    """A finite number, 0 or more."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ImportedFileError(f"{what} is {value!r}; it must be a number, 0 or more")
    return float(value)
