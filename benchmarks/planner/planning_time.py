"""How long the planner takes for GPT-3 175B, and how that grows with its blocks.

    python -m benchmarks.planner.planning_time [--repeats 5] [--blocks 24 48 96 192] [--json FILE] [--table PAGE]

One batch of sequences of 1,024 tokens on the 4090 with 768 GB and 12 drives; host and drive memory grow with the
blocks, so that every size is the same problem. Measured are, each in a process of its own:

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
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.records import arguments, save
from tierplan.hwmodels import load_machine
from tierplan.hwmodels.machine import Machine
from tierplan.planner.milp.amounts import problem
from tierplan.planner.milp.integral import solve_whole
from tierplan.planner.milp.model import build
from tierplan.planner.plan import UnitPlan, UnitwisePlan
from tierplan.planner.search.budget import Budget
from tierplan.planner.search.candidates import PlanSimulator
from tierplan.planner.search.from_program import granules
from tierplan.planner.search.knobs import Knobs
from tierplan.sim.output.text import markdown_table
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training, Workload

MACHINE, FULL_BLOCKS = "fuyou-4090", 96
SEQUENCE = 1024
HOST_GB = 768
TARGET_MILP_S, TARGET_LOOP_S, TARGET_GAP = 2.0, 10.0, 0.01
COMMAND = "from tierplan.cli import main; raise SystemExit(main())"
Record = dict[str, Any]


def config(blocks: int) -> Record:
    """GPT-3 175B (table 2.1 of arXiv 2005.14165) with this many blocks, as the named configuration: no dropout."""
    return {
        "model_type": "gpt2",
        "n_embd": 12288,
        "n_layer": blocks,
        "n_head": 96,
        "n_positions": 2048,
        "vocab_size": 50257,
        "activation_function": "gelu_pytorch_tanh",
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def overrides(blocks: int) -> list[str]:
    """Host memory in proportion to the blocks; NVMe has room for more."""
    return [f"host.capacity={round(HOST_GB * blocks / FULL_BLOCKS)} GB"]


def scenario(blocks: int, batch: int) -> tuple[Workload, Machine]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config(blocks)))
        training = Training(per_device_train_batch_size=batch, sequence_length=SEQUENCE)
        return load_workload(path, training), load_machine(MACHINE, overrides(blocks))


def milp(blocks: int, batch: int) -> Record:
    """One program, to whole actions, and its size."""
    p = problem(*scenario(blocks, batch), semantics="in-backward")
    margins = Knobs().margins(p, *granules(p))
    began, cpu = time.perf_counter(), time.process_time()
    found = solve_whole(build(p), margins)
    record = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
    if found is None:
        raise SystemExit(f"nothing fits for {blocks} blocks and {batch} sequences; choose fewer sequences")
    return record | {"gap": found.gap, "branched": found.branched, "coefficients": found.solutions[0].size}


def fixed(blocks: int, batch: int) -> Record:
    """One candidate: states on NVMe, the rest in host memory, everything recomputed."""
    workload, machine = scenario(blocks, batch)
    choices = {
        kind: UnitPlan(
            params="host", grads="host", states="nvme", input="host" if kind == "block" else "keep", acts=acts
        )
        for kind, acts in (("embed", "keep"), ("block", "recompute"), ("head", "keep"))
    }
    plan = UnitwisePlan(policy="fixed", units=tuple(choices[u.kind] for u in workload.units))  # type: ignore[index]
    simulate_plan = PlanSimulator(workload, machine, Budget(1e9))
    began, cpu = time.perf_counter(), time.process_time()
    tried = simulate_plan(plan)
    record = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
    if not tried.fits:
        raise SystemExit(f"the plan of {blocks} blocks and {batch} sequences does not run: {tried.reason}")
    return record | {"ops": simulate_plan.lowering.columns(plan).num_ops}


def loop(blocks: int, batch: int) -> Record:
    """`tierplan plan` as a user runs it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(config(blocks)))
        settings = [x for override in overrides(blocks) for x in ("--set", override)]
        what = ["--model", str(path), "--machine", MACHINE, "--batch", str(batch), "--seq", str(SEQUENCE), *settings]
        command = [sys.executable, "-c", COMMAND, "plan", *what, "--json"]
        began, cpu = time.perf_counter(), os.times()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wall_s, after = time.perf_counter() - began, os.times()
    if done.returncode:
        raise SystemExit(f"tierplan plan failed for {blocks} blocks: {done.stderr[-500:]}")
    answer = json.loads(done.stdout)
    cpu_s = after.children_user + after.children_system - cpu.children_user - cpu.children_system
    return {"wall_s": wall_s, "cpu_s": cpu_s} | {
        key: answer[key] for key in ("step_s", "lower_bound_s", "gap", "solve_s", "status", "milp_gap")
    }


PARTS: dict[str, Callable[[int, int], Record]] = {"milp": milp, "fixed": fixed, "loop": loop}


def measured(part: str, blocks: int, batch: int) -> Record:
    """One measurement in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.planner.planning_time", "--one", part, str(blocks), str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{part} for {blocks} blocks failed: {done.stderr[-500:]}")
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def run(all_blocks: Sequence[int], batch: int, repeats: int) -> Record:
    rows = []
    for blocks in all_blocks:
        for part in PARTS:
            found = [measured(part, blocks, batch) for _ in range(repeats)]
            row = found[0] | {
                "part": part,
                "blocks": blocks,
                "wall_s": statistics.median(r["wall_s"] for r in found),
                "cpu_s": statistics.median(r["cpu_s"] for r in found),
            }
            rows.append(row)
            print(f"{part:6s}{blocks:5d} blocks: {row['wall_s']:.2f} s, CPU {row['cpu_s']:.2f} s", file=sys.stderr)
    return {
        "machine": MACHINE,
        "batch": batch,
        "sequence": SEQUENCE,
        "repeats": repeats,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "load": os.getloadavg()[0],
        "rows": rows,
    }


def table(record: Record) -> str:
    """The result as a page of docs/."""
    by = {(r["part"], r["blocks"]): r for r in record["rows"]}
    blocks = sorted({r["blocks"] for r in record["rows"]})
    lines = [
        "# How long the planner takes",
        "",
        "Written by `python -m benchmarks.planner.planning_time`, which says what is measured: GPT-3 175B's blocks, "
        f"{record['batch']} sequences of {record['sequence']} tokens, on `{record['machine']}`. Medians of "
        f"{record['repeats']}, {record['cores']} cores, {record['date']}, load {record['load']:.1f} at the end.",
        "",
    ]
    head = ("blocks", "MILP, s", "its CPU, s", "gap to LP", "branched", "candidate, s", "its CPU, s", "loop, s",
            "its CPU, s", "in solvers, s", "step, s", "gap to bound", "status")  # fmt: skip
    rows = []
    for n in blocks:
        m, f, p = (by[part, n] for part in ("milp", "fixed", "loop"))
        two = [f"{seconds:.2f}" for seconds in (m["wall_s"], m["cpu_s"], f["wall_s"], f["cpu_s"])]
        one = [f"{p[name]:.1f}" for name in ("wall_s", "cpu_s", "solve_s")]
        branched = "yes" if m["branched"] else "no"
        ends = (f"{p['step_s']:.2f}", f"{p['gap']:.1%}", p["status"])
        rows.append((str(n), *two[:2], f"{m['gap']:.2%}", branched, *two[2:], *one, *ends))
    lines += markdown_table(head, rows)
    lines.append("")
    for part, what in (("milp", "MILP"), ("fixed", "candidate"), ("loop", "loop")):
        ratios = [f"{by[part, b]['cpu_s'] / by[part, a]['cpu_s']:.1f} from {a} to {b}" for a, b in pairwise(blocks)]
        lines.append(f"- CPU of the {what} grows by {', '.join(ratios)} blocks.")
    if FULL_BLOCKS in blocks:
        m, p = by["milp", FULL_BLOCKS], by["loop", FULL_BLOCKS]
        lines.append(
            f"- At {FULL_BLOCKS} blocks: MILP {m['wall_s']:.2f} s (wanted: below {TARGET_MILP_S:.0f}) at a gap of "
            f"{m['gap']:.2%} (wanted: {TARGET_GAP:.0%}); loop {p['wall_s']:.1f} s (wanted: below {TARGET_LOOP_S:.0f})."
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--blocks", type=int, nargs="+", default=[24, 48, 96, 192])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here, or read it for --table")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the page from the result")
    parser.add_argument("--one", nargs=3, metavar=("PART", "BLOCKS", "BATCH"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        part, blocks, batch = args.one
        print(json.dumps(PARTS[part](int(blocks), int(batch))))
        return
    if args.table and args.json and args.json.exists():
        record = json.loads(args.json.read_text())
    else:
        record = run(args.blocks, args.batch, args.repeats)
        save(args.json, record)
    if args.table:
        args.table.write_text(table(record))
    else:
        print(table(record))


if __name__ == "__main__":
    main()
