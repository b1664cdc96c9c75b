"""How fast are workloads of the largest models, and how much memory do they take?

    python benchmarks/workload.py [--model gpt-175b] [--sequence-length 2048] [--json FILE]

Limits of the project: closed forms under 50 ms, tracing under 20 s and 3 GiB. Each is run in a process of its own, so
that peak memory is that of this alone; the closed forms are timed warm, best and median of several.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

CLOSED = """
import json, resource, statistics, time
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training
times = []
for _ in range(9):
    start = time.perf_counter()
    workload = load_workload({model!r}, Training(sequence_length={length}))
    times.append(time.perf_counter() - start)
print(json.dumps(dict(first_s=times[0], median_s=statistics.median(times), parameters=workload.num_parameters,
    peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)))
"""
TRACED = """
import json, resource, time
start = time.perf_counter()
from tierplan.runtime.tracing.trace import trace_workload
from tierplan.sim.workloads.workload import Training
imported = time.perf_counter()
workload = trace_workload({model!r}, Training(sequence_length={length}))
print(json.dumps(dict(import_s=imported - start, trace_s=time.perf_counter() - imported,
    parameters=workload.num_parameters, saved_bytes=sum(u.saved_bytes for u in workload.units),
    peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gpt-175b")
    parser.add_argument("--sequence-length", type=int, default=2048)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {}
    for name, code in (("closed", CLOSED), ("traced", TRACED)):
        script = code.format(model=args.model, length=args.sequence_length)
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=True
        )
        results[name] = json.loads(done.stdout.splitlines()[-1])
    closed, traced = results["closed"], results["traced"]
    print(f"{args.model}, sequences of {args.sequence_length} tokens")
    print(
        f"closed forms  {closed['median_s'] * 1e3:8.1f} ms (first {closed['first_s'] * 1e3:.1f} ms)"
        f"  {closed['peak_rss_bytes'] / 2**30:.2f} GiB"
    )
    print(
        f"traced        {traced['trace_s']:8.2f} s  (imports {traced['import_s']:.1f} s)"
        f"  {traced['peak_rss_bytes'] / 2**30:.2f} GiB"
    )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
