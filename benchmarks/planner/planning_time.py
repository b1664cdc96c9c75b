"""How long the planner takes for GPT-3 175B, and how that grows with its blocks.

    python -m benchmarks.planner.planning_time FILE [--repeats 5] [--blocks 24 48 96]      # runs what the file lacks
    python -m benchmarks.planner.planning_time FILE --table docs/planner.md                # writes the page's table

One batch of sequences of 1,024 tokens on the 4090 with 768 GB and 12
drives; host and drive memory grow with the blocks, so that every size is the same problem. Measured are, each in a
process of its own:

    milp       building and solving the program for the default margins, to whole actions (`solve_whole`)
    loop       the whole of `tierplan plan`, from the start of Python to its answer
    fixed      a plan of given decisions, lowered and simulated to its steady state: what one candidate costs

Seconds are medians, on the wall and of the process's CPU; the loop's search ends by its budget, so what grows with the
blocks is better seen in the other two. `gap` is how far the solution in whole actions is above the bound of the program
without integers; `step` and `bound` are the loop's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from benchmarks.records import Question, Record, about, arguments, ask_or_write
from tierplan.hwmodels import load_machine
from tierplan.hwmodels.machine import Machine
from tierplan.planner.milp.amounts import problem
from tierplan.planner.milp.integral import solve_whole
from tierplan.planner.milp.model import build
from tierplan.planner.plan import UnitPlan
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.candidates import PlanSimulator
from tierplan.planner.search.from_program import granules
from tierplan.planner.search.knobs import Knobs
from tierplan.sim.output.text import markdown_table
from tierplan.sim.workloads.models import read_config, workload_of
from tierplan.sim.workloads.workload import Training, Workload
from tierplan.validation.calibration.plans import uniform_plan

T = TypeVar("T")
MACHINE, FULL_BLOCKS = "fuyou-4090", 96
SEQUENCE = 1024
HOST_GB = 768
PART = "planning time"


def config(blocks: int, training: Training) -> dict[str, object]:
    """GPT-3 175B with this many blocks."""
    return {**read_config("gpt-175b", training)[1], "n_layer": blocks}


def overrides(blocks: int) -> list[str]:
    """Host memory in proportion to the blocks; NVMe has room for more."""
    return [f"host.capacity={round(HOST_GB * blocks / FULL_BLOCKS)} GB"]


def scenario(blocks: int, batch: int) -> tuple[Workload, Machine]:
    training = Training(per_device_train_batch_size=batch, sequence_length=SEQUENCE)
    return workload_of("gpt", config(blocks, training), training), load_machine(MACHINE, overrides(blocks))


def timed(work: Callable[[], T]) -> tuple[T, Record]:
    """What it gives, and its seconds on the wall and of CPU, its children's too."""
    began, cpu = time.perf_counter(), os.times()
    found = work()
    wall_s, after = time.perf_counter() - began, os.times()
    return found, {"wall_s": wall_s, "cpu_s": sum(after[:4]) - sum(cpu[:4])}


def milp(blocks: int, batch: int) -> Record:
    """One program, to whole actions, and its size."""
    p = problem(*scenario(blocks, batch), semantics="in-backward")
    margins = Knobs().margins(p, *granules(p))
    found, record = timed(lambda: solve_whole(build(p), margins))
    if found is None:
        raise SystemExit(f"nothing fits for {blocks} blocks and {batch} sequences; choose fewer sequences")
    return record | {"gap": found.gap, "branched": found.branched, "coefficients": found.solutions[0].size}


def fixed(blocks: int, batch: int) -> Record:
    """One candidate: states on NVMe, the rest in host memory, everything recomputed."""
    workload, machine = scenario(blocks, batch)
    block = UnitPlan(params="host", grads="host", states="nvme", input="host", acts="recompute")
    plan = uniform_plan("fixed", workload, block)
    simulate_plan = PlanSimulator(workload, machine, Budget(1e9))
    tried, record = timed(lambda: simulate_plan(plan))
    if not tried.fits:
        raise SystemExit(f"the plan of {blocks} blocks and {batch} sequences does not run: {tried.reason}")
    return record | {"ops": simulate_plan.lowering.columns(plan).num_ops}


def loop(blocks: int, batch: int) -> Record:
    """`tierplan plan` as a user runs it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config(blocks, Training(sequence_length=SEQUENCE))))
        settings = [x for override in overrides(blocks) for x in ("--set", override)]
        what = ["--model", str(path), "--machine", MACHINE, "--batch", str(batch), "--seq", str(SEQUENCE), *settings]
        command = [sys.executable, "-m", "tierplan", "plan", *what, "--json"]
        done, record = timed(lambda: subprocess.run(command, capture_output=True, text=True, check=False))
    if done.returncode:
        raise SystemExit(f"tierplan plan failed for {blocks} blocks: {done.stderr[-500:]}")
    answer = json.loads(done.stdout)
    return record | {key: answer[key] for key in ("step_s", "lower_bound_s", "gap", "solve_s", "status", "milp_gap")}


PARTS: dict[str, Callable[[int, int], Record]] = {"milp": milp, "fixed": fixed, "loop": loop}


def measured(part: str, blocks: int, batch: int, repeats: int) -> Record:
    """Medians of measurements in fresh processes."""
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        found = list(pool.map(partial(PARTS[part], blocks), [batch] * repeats))
    seconds = {name: statistics.median(r[name] for r in found) for name in ("wall_s", "cpu_s")}
    return found[0] | seconds | about()


def questions(args: argparse.Namespace) -> Iterator[Question]:
    for part, blocks in product(PARTS, args.blocks):
        asked = {"part": part, "blocks": blocks, "batch": args.batch, "repeats": args.repeats}
        yield asked, partial(measured, **asked)


def table(records: list[Record]) -> str:
    by = {(r["part"], r["blocks"]): r for r in records}
    head = ("blocks", "MILP, s", "its gap to the bound without integers", "candidate, s", "loop, s", "step, s",
            "gap to the lower bound")  # fmt: skip
    rows = []
    for blocks in sorted({r["blocks"] for r in records}):
        m, f, p = (by[part, blocks] for part in ("milp", "fixed", "loop"))
        times = (f"{m['cpu_s']:.2f}", f"{100 * m['gap']:.2f} %", f"{f['cpu_s']:.2f}", f"{p['cpu_s']:.1f}")
        rows.append((str(blocks), *times, f"{p['step_s']:.1f}", f"{100 * p['gap']:.1f} %"))
    return "\n".join(markdown_table(head, rows, right=range(7)))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--blocks", type=int, nargs="+", default=[24, 48, 96, 192])
    parser.add_argument("--batch", type=int, default=8)
    shown = "{part}, {blocks} blocks: {wall_s:.2f} s, CPU {cpu_s:.2f} s".format_map
    ask_or_write(parser, PART, questions, shown, table)


if __name__ == "__main__":
    main()
