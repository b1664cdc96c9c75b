"""`--help` at the width of the terminal: prose is filled, an example goes on below where it is wider."""

from __future__ import annotations

import argparse
import re
import textwrap

EXAMPLE = re.compile(r"(?P<command>\s*(?:tierplan|torchrun) \S.*?)(?P<gap>\s{2,}|$)(?P<says>.*)")
"""A command, and behind a gap what it does."""
INDENT = " " * 4
"""Of every command."""


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Fills descriptions; what is indented in them stays as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(filled(paragraph, width) for paragraph in text.strip().split("\n\n"))


def filled(paragraph: str, width: int) -> str:
    """A paragraph of a description, in lines of at most so many columns where that can be."""
    lines = paragraph.splitlines()
    if lines and not any(line.startswith((" ", "tierplan ")) for line in lines):
        return textwrap.fill(paragraph, width, break_on_hyphens=False)
    return "\n".join(part for line in lines for part in _example(line, width))


def _example(line: str, width: int) -> list[str]:
    if EXAMPLE.fullmatch(line):
        line = INDENT + line.strip()
    found = EXAMPLE.fullmatch(line)
    if len(line) <= width or found is None:
        return [line]
    begin = len(found["command"] + found["gap"])
    if found["says"] and begin < width - 24:
        says = textwrap.wrap(found["says"], width - begin)
        return [line[:begin] + says[0], *(" " * begin + more for more in says[1:])]
    words = re.sub(r" (?!-)", "\0", found["command"].strip())
    parts = textwrap.wrap(words, width - 2, initial_indent=INDENT, subsequent_indent=" " * 8, break_on_hyphens=False)
    command = " \\\n".join(parts).replace("\0", " ")
    return [command, *textwrap.wrap(found["says"], width, initial_indent=" " * 8, subsequent_indent=" " * 8)]
