"""How well a sweep uses its workers: 2,000 simulations over processes.

    python benchmarks/sweep.py [--points 2000] [--workers 2] [--json FILE]

Each simulation reports how long it took in its worker and how much CPU time it used. Counted are, from the first result
to the last: the share of the workers' wall time that they spent simulating (the rest is waiting for work: overhead of
the sweep), and their CPU time over that of all workers' cores (on a machine that does other things too, the
lower of the two says more about the machine than about the sweep). The second run, of the finished study, shows what
resuming costs.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

from tierplan.validation.evaluate import evaluate_point
from tierplan.validation.study import Point
from tierplan.validation.sweep import sweep


def timed(point: Point) -> dict[str, object]:
    """One simulation, with when it began and ended and the CPU time it took."""
    began, cpu = time.time(), time.process_time()
    row = evaluate_point(point)
    return {"fits": row["fits"], "began": began, "ended": time.time(), "cpu_s": time.process_time() - cpu}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    points = [
        Point(model="gpt-6.7b", machine="desktop-4090", policy="fuyou", batch=1 + i % 32, seq=256,
              overrides={"nvme.drives": 1 + i // 32})
        for i in range(args.points)
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        rows = sweep(points, timed, out_dir=folder, num_workers=args.workers)
        wall_s = time.time() - began
        began = time.time()
        sweep(points, timed, out_dir=folder, num_workers=args.workers)
        again_s = time.time() - began
    first, last = min(r["began"] for r in rows), max(r["ended"] for r in rows)
    room_s = args.workers * (last - first)
    record = {
        "points": len(rows),
        "workers": args.workers,
        "wall_s": wall_s,
        "simulating_frac": sum(r["ended"] - r["began"] for r in rows) / room_s,
        "cpu_frac": sum(r["cpu_s"] for r in rows) / room_s,
        "start_s": wall_s - (last - first),
        "resumed_s": again_s,
    }
    print(json.dumps(record, indent=1))
    if args.json:
        args.json.write_text(json.dumps(record) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
