"""How well a sweep uses its workers: 2,000 simulations over processes, and what an interruption costs.

    python benchmarks/sweep.py [--points 2000] [--workers 2] [--json FILE]

`used_frac` is the CPU time of all processes, the parent's and every start-up included, over that of the workers'
cores from beginning to end. `simulating_frac` is the share of the workers' wall time, from the first result to the
last, that they spent simulating (the rest is waiting for work: overhead of the sweep). On a machine that does other
things too, the first says more about the machine than about the sweep.

Then a sweep of fewer points is killed without warning when a part of them is done, and continued: `repeated` counts the
finished points that were simulated again.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierplan.studies.evaluate import evaluate_point
from tierplan.studies.study import Point
from tierplan.studies.sweep import sweep

INTERRUPTED_POINTS = 120


def timed(point: Point) -> dict[str, object]:
    """One simulation, with when it began and ended and the CPU time it took."""
    began, cpu = time.time(), time.process_time()
    row = evaluate_point(point)
    return {"fits": row["fits"], "began": began, "ended": time.time(), "cpu_s": time.process_time() - cpu}


def grid(count: int) -> list[Point]:
    return [
        Point(model="gpt-6.7b", machine="desktop-4090", policy="fuyou", batch=1 + i % 32, seq=256,
              overrides={"nvme.drives": 1 + i // 32})
        for i in range(count)
    ]  # fmt: skip


def cpu_s() -> float:
    """CPU seconds of this process and of all its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def whole(count: int, num_workers: int, folder: Path) -> dict[str, object]:
    """A sweep from beginning to end, and the same again when all is done."""
    began, cpu_before = time.time(), cpu_s()
    rows = sweep(grid(count), timed, out_dir=folder, num_workers=num_workers)
    wall_s, used_s = time.time() - began, cpu_s() - cpu_before
    began = time.time()
    sweep(grid(count), timed, out_dir=folder, num_workers=num_workers)
    again_s = time.time() - began
    first, last = min(r["began"] for r in rows), max(r["ended"] for r in rows)
    room_s = num_workers * (last - first)
    return {
        "points": len(rows),
        "workers": num_workers,
        "wall_s": wall_s,
        "used_frac": used_s / (num_workers * wall_s),
        "simulating_frac": sum(r["ended"] - r["began"] for r in rows) / room_s,
        "cpu_frac": sum(r["cpu_s"] for r in rows) / room_s,
        "start_s": wall_s - (last - first),
        "resumed_s": again_s,
    }


def interrupted(count: int, num_workers: int, folder: Path) -> dict[str, object]:
    """A sweep that is killed when a third is done, and continued."""
    command = [sys.executable, __file__, "--into", str(folder), "--points", str(count), "--workers", str(num_workers)]
    child = subprocess.Popen(command, start_new_session=True)
    try:
        while len(kept(folder)) < count // 3 and child.poll() is None:
            time.sleep(0.05)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    before = kept(folder)
    sweep(grid(count), timed, out_dir=folder, num_workers=num_workers)
    after = kept(folder)
    return {
        "interrupted_points": count,
        "done_when_killed": len(before),
        "done_in_the_end": len(after),
        "repeated": sum(after[key] != row for key, row in before.items()),
    }


def kept(folder: Path) -> Mapping[str, Any]:
    """The rows in a folder's file of results, by point; the last line may be half written."""
    path = folder / "results.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith(b"\n")]
    return {record["key"]: record["row"] for record in records}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.into:
        sweep(grid(args.points), timed, out_dir=args.into, num_workers=args.workers)
        return
    with tempfile.TemporaryDirectory() as folder:
        record = whole(args.points, args.workers, Path(folder) / "whole")
        record |= interrupted(min(args.points, INTERRUPTED_POINTS), args.workers, Path(folder) / "interrupted")
    print(json.dumps(record, indent=1))
    if args.json:
        args.json.write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
