"""A hook of mkdocs: where code in a sentence may break. An option nowhere, a path or long name behind `/`, `.`, `_`."""

from __future__ import annotations

import re

CODE = re.compile(r"(<pre\b.*?</pre>)|(?<=<code>)([^<]+)(?=</code>)", re.DOTALL)
OPTION = re.compile(r"(?<!\S)--?\w[\w-]*")
SLASH = re.compile(r"(?<=\w)/(?=\w)")
LONG = re.compile(r"[\w.]{20,}")


def on_page_content(html: str, **_: object) -> str:
    """The page with such breaks; blocks of code stay as they are."""
    return CODE.sub(lambda found: found[1] or with_breaks(found[2]), html)


def with_breaks(code: str) -> str:
    """Code of one sentence."""
    code = LONG.sub(lambda name: re.sub(r"(?<=[^\W_])([._])(?=\w)", r"\1<wbr>", name[0]), code)
    return OPTION.sub(r"<span>\g<0></span>", SLASH.sub("/<wbr>", code))
