"""Writes the golden file, or prints what a scenario's hash is taken over, to be compared with that of another commit.

python -m tests.golden.regenerate
python -m tests.golden.regenerate --print "fuyou gpt2"
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from tests.golden import results, scenarios


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--print", metavar="NAME", choices=list(scenarios.SCENARIOS), help="the schedule of one scenario"
    )
    args = parser.parse_args()
    if name := args.print:
        with tempfile.TemporaryDirectory() as folder:
            outcome = scenarios.run(scenarios.SCENARIOS[name], Path(folder))
        sys.stdout.writelines(f"{line}\n" for line in results.canonical_lines(outcome.schedule))
        return 0
    computed = {}
    for name in results.names():
        with tempfile.TemporaryDirectory() as folder:
            computed[name] = results.compute(name, Path(folder))
    golden = {"environment": results.environment(), "results": computed}
    results.GOLDEN_FILE.write_text(json.dumps(golden, indent=1) + "\n", encoding="utf-8")
    print(f"{len(computed)} results written to {results.GOLDEN_FILE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
