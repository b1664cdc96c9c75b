"""The planner's loop against brute force on 200 random instances: how far from the best of all plans it ends.

    python -m benchmarks.planner.bruteforce benchmarks/results/bruteforce.jsonl      # runs what the file lacks
    python -m benchmarks.planner.bruteforce FILE --again       # the loop anew where another version ran, the rest kept
    python -m benchmarks.planner.bruteforce FILE --table docs/planner_grid.md        # writes the page's table

Instances count where something fits and where not everything may stay on the device; numbers are drawn until there are
200 of these. `tests/planner/instances.py` says what an instance is.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.records import append, arguments, replace_part, version
from tests.planner.instances import brute_force_instance
from tests.planner.search.test_against_bruteforce import all_plans, best_of_all, is_trivial
from tierplan.planner.infeasible import InfeasiblePlan
from tierplan.planner.planning import plan
from tierplan.sim.output.text import markdown_table

WITHIN = 1.01
INSTANCES = 200
TIME_LIMIT_S = 10.0
PART = "brute force"


def brute_force(number: int) -> dict[str, Any]:
    """What all plans of one instance come to."""
    kind, workload, machine = brute_force_instance(number)
    record: dict[str, Any] = {"number": number, "kind": kind, "blocks": len(workload.units)}
    if is_trivial(workload, machine):
        return record | {"trivial": True}
    started = time.process_time()
    record |= {"trivial": False, "plans": len(all_plans(workload, machine)), "best_s": best_of_all(workload, machine)}
    return record | {"brute_force_s": time.process_time() - started}


def loop(number: int) -> dict[str, Any]:
    """What the planner says."""
    _, workload, machine = brute_force_instance(number)
    started = time.process_time()
    try:
        result = plan(workload, machine, time_limit_s=TIME_LIMIT_S)
    except InfeasiblePlan:
        return {"found_s": None, "version": version()}
    return {
        "found_s": result.step_s,
        "bound_s": result.lower_bound_s,
        "status": result.status,
        "plan_s": time.process_time() - started,
        "version": version(),
    }


def counts(record: Mapping[str, Any]) -> bool:
    """Whether an instance has a best plan, and it is no matter of course."""
    return not record["trivial"] and (record["best_s"] is not None or record.get("found_s") is not None)


def ratio(record: Mapping[str, Any]) -> float:
    """The loop's step over the best; infinite where only brute force found a plan, 0 where only the loop did."""
    if record["best_s"] is None:
        return 0.0
    return float("inf") if record["found_s"] is None else record["found_s"] / record["best_s"]


def run(path: Path, wanted: int, again: bool) -> None:
    """Adds the instances that the file lacks. A later line of a number takes the place of an earlier one."""
    known = {r["number"]: r for r in read(path)}
    num, number = 0, 0
    while num < wanted:
        record = known.get(number)
        is_old = again and record is not None and not record["trivial"] and record["version"] != version()
        if record is None or is_old:
            record = record or brute_force(number)
            if not record["trivial"]:
                record |= loop(number)
            append(path, record)
        if counts(record):
            num += 1
            if ratio(record) > WITHIN:
                shown = f"instance {number}, {record['kind']}: {ratio(record):.4f} of the best"
                print(shown, file=sys.stderr, flush=True)
        number += 1


def read(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines() if path.exists() else []
    latest = {record["number"]: record for record in map(json.loads, lines)}
    return [latest[number] for number in sorted(latest)]


def table(records: list[dict[str, Any]], wanted: int) -> str:
    counted = [r for r in records if counts(r)][:wanted]
    worse = [r for r in counted if ratio(r) > WITHIN]
    above = [ratio(r) for r in counted if 0 < ratio(r) < float("inf")]
    versions = sorted({r["version"] for r in counted})
    lines = [
        f"{len(counted)} instances in which something fits and something must leave the device or be made again; "
        f"{len(counted) - len(worse)} within 1 % of the best of all plans, largest excess "
        f"{(max(above) - 1) * 100:.1f} %; version {', '.join(versions)}.",
        "",
    ]
    head = ("instances", "number", "blocks", "plans of each", "within 1 %", "better than all plans")
    rows = []
    for kind in dict.fromkeys(r["kind"] for r in counted):
        some = [r for r in counted if r["kind"] == kind]
        blocks, plans = (sorted({r[name] for r in some}) for name in ("blocks", "plans"))
        within, better = sum(ratio(r) <= WITHIN for r in some), sum(ratio(r) < 1 / WITHIN for r in some)
        took = [statistics.median(r.get(name, 0.0) for r in some) for name in ("brute_force_s", "plan_s")]
        cells = (str(len(some)), _range(blocks), _range(plans), str(within), str(better))
        rows.append((kind, *cells, *(f"{seconds:.1f}" for seconds in took)))
    lines += markdown_table((*head, "seconds, all plans", "seconds, loop"), rows, right=range(1, 8))
    lines += ["", "Better: brute force leaves each unit's input on the device, the loop may move it."]
    return "\n".join(lines)


def _range(numbers: list[int]) -> str:
    return f"{numbers[0]:,}" if len(numbers) == 1 else f"{numbers[0]:,} to {numbers[-1]:,}"


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("results", type=Path)
    parser.add_argument("--number", type=int, default=INSTANCES, help="instances that count (default 200)")
    parser.add_argument("--again", action="store_true", help="run the loop anew where another version ran")
    parser.add_argument("--table", type=Path, help="write the table into this page instead of running")
    args = parser.parse_args()
    if args.table:
        replace_part(args.table, PART, table(read(args.results), args.number))
        return 0
    run(args.results, args.number, args.again)
    return int(any(ratio(r) > WITHIN for r in read(args.results) if counts(r)))


if __name__ == "__main__":
    sys.exit(main())
