"""How things show themselves in a notebook: the line that a prompt shows, and the first rows of their table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from html import escape
from itertools import islice
from typing import Any

from tierplan.hwmodels.values.extras import words_of_missing

SHOWN_ROWS = 12


class Shown(ABC):
    """A thing whose insides are a table. Its `__repr__` is one line."""

    __slots__ = ()

    @abstractmethod
    def rows(self) -> Iterable[Mapping[str, object]]:
        """The rows of the table, all with the same columns."""

    def table(self) -> Any:
        """The whole table as a pandas DataFrame."""
        try:
            from pandas import DataFrame
        except ImportError as error:
            raise RuntimeError(words_of_missing(error, "a table")) from error
        return DataFrame(list(self.rows()))

    def _repr_html_(self) -> str:
        rows = list(islice(self.rows(), SHOWN_ROWS + 1))
        line = f"<div><code>{escape(repr(self))}</code></div>"
        if not rows:
            return line
        more = "<div>... <code>.table()</code> has all rows</div>" if len(rows) > SHOWN_ROWS else ""
        body = "".join(_row("td", row.values()) for row in rows[:SHOWN_ROWS])
        return f"{line}<table>{_row('th', rows[0].keys())}{body}</table>{more}"


def _row(tag: str, values: Iterable[object]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(_text(value))}</{tag}>' for value in values)}</tr>"


def _text(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,.0f}" if abs(value) >= 1000 or isinstance(value, int) else f"{value:.4g}"
    return "" if value is None else str(value)
