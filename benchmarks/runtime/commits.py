"""What a commit costs the steps beside which it is made.

    python -m benchmarks.runtime.commits --nvme-dir DIR [--cycles 12] [--json FILE [--page docs/durability.md]]

One training commits every few steps, and goes on meanwhile. A cycle is a commit and the steps up to the next one. Its
last steps run alone; what the cycle took longer than as many of those is the commit's cost, in steps. The median over
cycles, and its quartiles; also of the process's time on its cores, which other processes disturb less.

In the two cycles behind each commit's a plain thread does the least that a commit of what lies in memory has to do, to
as many bytes that nobody changes: it writes them past the page cache, with their checksum and without it. What that
costs is measured in the same way.
"""

from __future__ import annotations

import itertools
import os
import shutil
import statistics
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from xxhash import xxh3_64

from benchmarks.models import gpt2
from benchmarks.records import Record, arguments, spread
from benchmarks.runtime.checksums import keep, parsed
from benchmarks.trainings import batches, num_parameters, trainer_of
from tierplan.hwmodels.names import NVME
from tierplan.planner.plan import UnitPlan
from tierplan.runtime.checkpoint.snapshot import PIECE_BYTES
from tierplan.runtime.memory import files
from tierplan.runtime.memory.arena import PAGE_BYTES, map_host

CHOICES = {
    "all in memory": (UnitPlan(grads="host", states="host"), 64),
    "all in memory, longer steps": (UnitPlan(grads="host", states="host"), 640),
    "states on NVMe": (UnitPlan(grads="host", states="nvme"), 64),
}
"""By name, where everything is, and the tokens of a step."""
STEPS, ALONE = 8, 3
"""Steps in a cycle; the last of them, beside which no commit is expected any more."""
KINDS = ("commit", "write with checksum", "write")
"""What is done beside the steps of a cycle, in turns."""
PART = "cost of commits"
HEAD = (
    "plan", "committed", "a step", "what a commit adds, in steps: median (middle half)",
    "a plain thread that writes what lies in memory", "without checksums",
)  # fmt: skip


def write_plainly(path: Path, memory: torch.Tensor, *, with_checksum: bool) -> None:
    """The least that a commit does to so many bytes."""
    checksum = xxh3_64()
    fd = files.create_file(path)
    files.write_at(fd, path, [memory[:PAGE_BYTES].numpy().data], 0)
    direct_fd = files.open_direct(path)
    for at in range(0, len(memory), PIECE_BYTES):
        piece = memory[at : at + PIECE_BYTES].numpy().data
        if with_checksum:
            checksum.update(piece)
        files.write_at(fd if direct_fd is None else direct_fd, path, [piece], at, direct=direct_fd is not None)
    files.sync_file(fd, path)
    for each in (fd, direct_fd):
        if each is not None:
            os.close(each)
    files.remove_file(path)


def costs(ends: list[tuple[float, float]]) -> dict[str, Record]:
    """By kind, what was done in each cycle of it cost, in steps: by the clock, and of the process's time on cores."""
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for cycle, first in enumerate(range(len(KINDS) * STEPS, len(ends) - STEPS + 1, STEPS)):
        both = []
        for times in zip(*ends[first - 1 : first + STEPS], strict=True):
            steps = [b - a for a, b in itertools.pairwise(times)]
            both.append(sum(steps) / statistics.median(steps[-ALONE:]) - len(steps))
        found[KINDS[cycle % len(KINDS)]].append((both[0], both[1]))
    return {
        kind: {"clock": spread([a for a, _ in each]), "cores": spread([b for _, b in each])}
        for kind, each in found.items()
    }


def cost(choice: UnitPlan, length: int, folder: Path, *, cycles: int, width: int, num_blocks: int) -> Record:
    """What each commit costs, in steps, and what a plain thread does."""
    period = len(KINDS) * STEPS
    commits: dict[str, Any] = {"out_dir": folder / "run", "checkpoint_every": period, "read_back": False}
    raw = gpt2(width, num_blocks, positions=length)
    with (
        ThreadPoolExecutor(1) as pool,
        trainer_of(raw, choice, folder / "tier", length=length, **commits) as trainer,
    ):
        initial = [b for b in trainer.schedule.buffers if b.initial]
        in_memory_bytes = sum(b.size_bytes for b in initial if b.tier != NVME)
        memory = map_host(in_memory_bytes).fill_(1)
        begun: list[Future[None]] = []
        ends: list[tuple[float, float]] = []

        def on_step(step: int, loss: float) -> None:
            ends.append((time.perf_counter(), time.process_time()))
            kind, is_last = KINDS[(step + 1) // STEPS % len(KINDS)], (step + 1) % STEPS == 0
            if is_last and kind != KINDS[0]:
                plain = {"with_checksum": kind == KINDS[1]}
                begun.append(pool.submit(write_plainly, folder / "plain", memory, **plain))

        trainer.on_step = on_step
        trainer.run(batches(length), (cycles + 1) * period)
        for each in begun:
            each.result()
        found: Record = {
            "num_parameters": num_parameters(trainer),
            "committed_bytes": sum(b.size_bytes for b in initial),
            "in_memory_bytes": in_memory_bytes,
            "step_s": statistics.median(b - a for (a, _), (b, _) in itertools.pairwise(ends)),
        }
    return found | costs(ends)


def cells(one: Record) -> tuple[str, ...]:
    def shown(kind: str) -> str:
        clock, cores = one[kind]["clock"], one[kind]["cores"]
        (low, high), n = clock["quartiles"], len(clock["ratios"])
        return f"{clock['ratio']:.2f} ({low:.2f} to {high:.2f}) of {n}; on cores {cores['ratio']:.2f}"

    return f"{one['committed_bytes'] / 1e9:.2f} GB", f"{one['step_s']:.2f} s", *map(shown, KINDS)


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
        print(name, cells(plans[name]), flush=True)
    keep(args, plans, PART, HEAD, cells)


if __name__ == "__main__":
    main()
