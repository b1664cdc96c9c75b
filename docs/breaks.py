"""Where code in a sentence may break: `--json` nowhere, a path behind each of its slashes. A hook of mkdocs."""

from __future__ import annotations

import re

CODE = re.compile(r"(<pre\b.*?</pre>)|(?<=<code>)([^<]+)(?=</code>)", re.DOTALL)
OPTION = re.compile(r"(?<!\S)--?\w[\w-]*")


def on_page_content(html: str, **_: object) -> str:
    """The page with such breaks; blocks of code stay as they are."""
    return CODE.sub(lambda found: found[1] or with_breaks(found[2]), html)


def with_breaks(code: str) -> str:
    """Code of one sentence: options in one piece, and a possible break after each slash in a path."""
    return OPTION.sub(r"<span>\g<0></span>", re.sub(r"(?<=\w)/(?=\w)", "/<wbr>", code))
