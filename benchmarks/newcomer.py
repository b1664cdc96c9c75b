"""From nothing to a prediction that was checked, as somebody new would: the commands of docs/how-to.md, one by one.

    python -m benchmarks.newcomer --out DIR          prints what each command says, and how long it took

`--install` makes a virtual environment in DIR and installs this checkout into it first, as README says (downloads
PyTorch). Nothing of the user's own is read or replaced: machine and calibration go into DIR.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
import venv
from collections.abc import Sequence
from pathlib import Path

from benchmarks.records import arguments

ROOT = Path(__file__).parent.parent
HEADING = "## From nothing to a prediction that was checked"
MOST_S = 600.0


def commands() -> list[list[str]]:
    """The words of each command of the page, `tierplan` first."""
    section = (ROOT / "docs/how-to.md").read_text(encoding="utf-8").partition(HEADING)[2]
    fence = re.search(r"```console\n(.*?)```", section, re.DOTALL)
    assert fence is not None, f"docs/how-to.md has no commands below {HEADING!r}"
    return [shlex.split(line.removeprefix("$ ")) for line in fence[1].splitlines() if line.startswith("$ ")]


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--out", type=Path, default=Path("newcomer"))
    parser.add_argument("--install", action="store_true", help="into a virtual environment of its own first")
    args = parser.parse_args(argv)
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "XDG_CONFIG_HOME": str(out / "config"), "XDG_DATA_HOME": str(out / "data")}
    for name in ("validation", "docs"):  # what the commands name in a checkout
        if not (out / name).exists():
            (out / name).symlink_to(ROOT / name)
    tierplan = [sys.executable, "-c", "from tierplan.cli import main; raise SystemExit(main())"]
    todo = []
    if args.install:
        venv.create(out / "venv", with_pip=True)
        tierplan[0] = str(out / "venv/bin/python")
        install = [tierplan[0], "-m", "pip", "install", "-q", "-c", str(ROOT / "constraints.txt"), f"{ROOT}[runtime]"]
        todo.append(install)
    todo += [[*tierplan, *words[1:]] for words in commands()]
    total_s = 0.0
    for words in todo:
        print(f"$ {shlex.join(words[3:] if words[1] == '-c' else words)}", flush=True)
        began_s = time.monotonic()
        code = subprocess.run(words, cwd=out, env=env, check=False).returncode
        seconds = time.monotonic() - began_s
        total_s += seconds
        print(f"({seconds:.0f} s)", flush=True)
        if code:
            return code
    print(f"{total_s:.0f} s of at most {MOST_S:.0f}")
    return 0 if total_s <= MOST_S else 1


if __name__ == "__main__":
    sys.exit(main())
