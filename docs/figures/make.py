"""Makes what README.md and the pages show of the program: `make figures`, in three minutes.

The answer of `tierplan advise` goes into README.md, behind its mark, and a picture of `tierplan page` into this folder.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.browser import browser

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
ADVISE = "tierplan advise --model llama-3.1-8b --machine desktop-4090 --tokens 10M"
PAGE = (
    "tierplan page -o build/what-if.html --model llama-3.1-8b --gpu rtx-4090 rtx-3090 rtx-5090 --drives 1 2 4 "
    "--method planner fuyou zero-infinity --sequences 16 --tokens 10M"
)
LEFT_OUT = "  ...\n"


def told(command: str) -> str:
    """What a command prints."""
    words = [sys.executable, "-m", *command.split()]
    return subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def excerpt(text: str) -> str:
    """The answer and what to buy."""
    _, answer, *_ = text.split("\n\n")
    bought = next(part for part in text.split("\n\n") if part.lstrip().startswith("what to buy"))
    return f"$ {ADVISE}\n{answer}\n{LEFT_OUT}{bought}\n{LEFT_OUT}"


def main() -> None:
    readme = ROOT / "README.md"
    block = f"<!-- advise: by make figures -->\n```text\n{excerpt(told(ADVISE))}```\n"
    text = readme.read_text(encoding="utf-8")
    text, number = re.subn(r"<!-- advise: .*?```text\n.*?```\n", lambda _: block, text, flags=re.DOTALL)
    assert number == 1, "README.md has one place for the answer"
    readme.write_text(text, encoding="utf-8")
    (ROOT / "build").mkdir(exist_ok=True)
    told(PAGE)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile, browser(Path(profile)) as tab:
        tab.open(ROOT / "build" / "what-if.html", 1280)
        tab.picture(HERE / "what-if.png", height=780)


if __name__ == "__main__":
    main()
