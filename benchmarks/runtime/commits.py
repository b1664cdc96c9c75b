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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.records import arguments
from benchmarks.runtime.checksums import keep, parsed, source_line
from benchmarks.runtime.speed import GIB, batches, config, machine, make
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.checkpoint.weights import hollow_model, random_weights
from tierplan.runtime.trainer import Trainer

CHOICES = {
    "all in memory": (UnitPlan(grads="host", states="host"), 64),
    "all in memory, longer steps": (UnitPlan(grads="host", states="host"), 640),
    "states on NVMe": (UnitPlan(grads="host", states="nvme"), 64),
}
"""By name, where everything is, and the tokens of a step."""
STEPS, ALONE = 8, 3
"""Steps in a cycle; the last of them, beside which no commit is expected any more."""
PART = "cost of commits"


def cost(choice: UnitPlan, length: int, folder: Path, *, cycles: int, width: int, num_blocks: int) -> dict[str, object]:
    """What each commit costs, in steps."""
    raw = config(width, num_blocks, length=length)
    schedule, training, num_parameters = make(raw, choice, machine(4 * GIB, 4 * GIB), length=length)
    model = hollow_model(raw, training)
    with Trainer(
        schedule,
        model,
        nvme_dir=folder / "tier",
        out_dir=folder / "run",
        weights=random_weights(model, seed=0),
        checkpoint_every=STEPS,
        read_back=False,
    ) as trainer:
        trainer.run(batches(length), (cycles + 1) * STEPS)
        ends_s = trainer.result().step_ends_s
        committed_bytes = sum(b.size_bytes for b in schedule.buffers if b.initial)
    costs = []
    for first in range(STEPS, len(ends_s), STEPS):
        steps_s = [b - a for a, b in zip(ends_s[first - 1 :], ends_s[first : first + STEPS], strict=False)]
        alone_s = statistics.median(steps_s[-ALONE:])
        costs.append(sum(steps_s) / alone_s - len(steps_s))
    low, middle, high = statistics.quantiles(costs, n=4)
    return {
        "num_parameters": num_parameters,
        "committed_bytes": committed_bytes,
        "step_s": statistics.median(b - a for a, b in itertools.pairwise(ends_s)),
        "cost_steps": middle,
        "quartiles": [low, high],
        "costs_steps": costs,
    }


def lines(record: Mapping[str, Any], source: Path) -> Iterator[str]:
    """The part of the page."""
    yield source_line(record, source)
    yield ""
    yield "| plan | committed | a step | what a commit adds, in steps: median (middle half) |"
    yield "|---|--:|--:|--:|"
    for name, one in record["plans"].items():
        low, high = one["quartiles"]
        yield (
            f"| {name} | {one['committed_bytes'] / 1e9:.2f} GB | {one['step_s']:.2f} s | {one['cost_steps']:.2f} "
            f"({low:.2f} to {high:.2f}) of {len(one['costs_steps'])} |"
        )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cycles", type=int, default=12)
    args = parsed(parser)
    plans: dict[str, Any] = {}
    for name, (choice, length) in CHOICES.items():
        folder = args.nvme_dir / "commits"
        shutil.rmtree(folder, ignore_errors=True)
        plans[name] = cost(choice, length, folder, cycles=args.cycles, width=args.width, num_blocks=args.blocks)
        shutil.rmtree(folder)
        print(name, {k: v for k, v in plans[name].items() if k != "costs_steps"}, flush=True)
    keep(args, plans, PART, lines)


if __name__ == "__main__":
    main()
