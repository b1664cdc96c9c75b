"""What a commit costs the steps beside which it is made.

    python -m benchmarks.runtime.commits --nvme-dir DIR [--cycles 12] [--json FILE [--page docs/durability.md]]

One training commits every few steps, and goes on meanwhile. A cycle is a commit and the steps up to the next one. Its
last steps run alone; what the cycle took longer than as many of those is the commit's cost, in steps. The median over
cycles, and its quartiles.
"""

from __future__ import annotations

import itertools
import shutil
import statistics
from pathlib import Path

from benchmarks.models import gpt2
from benchmarks.records import Record, arguments, spread
from benchmarks.runtime.checksums import keep, parsed
from benchmarks.trainings import batches, num_parameters, trainer_of
from tierplan.planner.plan import UnitPlan

CHOICES = {
    "all in memory": (UnitPlan(grads="host", states="host"), 64),
    "all in memory, longer steps": (UnitPlan(grads="host", states="host"), 640),
    "states on NVMe": (UnitPlan(grads="host", states="nvme"), 64),
}
"""By name, where everything is, and the tokens of a step."""
STEPS, ALONE = 8, 3
"""Steps in a cycle; the last of them, beside which no commit is expected any more."""
PART = "cost of commits"
HEAD = ("plan", "committed", "a step", "what a commit adds, in steps: median (middle half)")


def cost(choice: UnitPlan, length: int, folder: Path, *, cycles: int, width: int, num_blocks: int) -> Record:
    """What each commit costs, in steps."""
    commits = {"out_dir": folder / "run", "checkpoint_every": STEPS, "read_back": False}
    raw = gpt2(width, num_blocks, positions=length)
    with trainer_of(raw, choice, folder / "tier", length=length, **commits) as trainer:
        trainer.run(batches(length), (cycles + 1) * STEPS)
        ends_s = trainer.result().step_ends_s
        found: Record = {
            "num_parameters": num_parameters(trainer),
            "committed_bytes": sum(b.size_bytes for b in trainer.schedule.buffers if b.initial),
            "step_s": statistics.median(b - a for a, b in itertools.pairwise(ends_s)),
        }
    costs = []
    for first in range(STEPS, len(ends_s), STEPS):
        steps_s = [b - a for a, b in zip(ends_s[first - 1 :], ends_s[first : first + STEPS], strict=False)]
        alone_s = statistics.median(steps_s[-ALONE:])
        costs.append(sum(steps_s) / alone_s - len(steps_s))
    middle = spread(costs)
    return found | {"cost_steps": middle["ratio"], "quartiles": middle["quartiles"], "costs_steps": costs}


def cells(one: Record) -> tuple[str, ...]:
    low, high = one["quartiles"]
    cost = f"{one['cost_steps']:.2f} ({low:.2f} to {high:.2f}) of {len(one['costs_steps'])}"
    return f"{one['committed_bytes'] / 1e9:.2f} GB", f"{one['step_s']:.2f} s", cost


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cycles", type=int, default=12)
    args = parsed(parser)
    plans: Record = {}
    for name, (choice, length) in CHOICES.items():
        folder = args.nvme_dir / "commits"
        shutil.rmtree(folder, ignore_errors=True)
        plans[name] = cost(choice, length, folder, cycles=args.cycles, width=args.width, num_blocks=args.blocks)
        shutil.rmtree(folder)
        print(name, {k: v for k, v in plans[name].items() if k != "costs_steps"}, flush=True)
    keep(args, plans, PART, HEAD, cells)


if __name__ == "__main__":
    main()
