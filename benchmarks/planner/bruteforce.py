"""The planner's loop against brute force on 200 random instances: how far from the best of all plans it ends.

    python -m benchmarks.planner.bruteforce benchmarks/results/bruteforce.jsonl      # runs what the file lacks
    python -m benchmarks.planner.bruteforce FILE --table docs/planner_grid.md        # writes the page's table

Instances count where something fits and where not everything may stay on the device; numbers are drawn until there are
200 of these. `tests/planner/instances.py` says what an instance is.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from functools import partial

from benchmarks.records import Question, Record, arguments, ask_or_write, read, versions_of
from tests.planner.instances import brute_force_instance
from tests.planner.search.test_against_bruteforce import all_plans, best_of_all, is_trivial
from tierplan.planner.infeasible import InfeasiblePlan
from tierplan.planner.planning import plan
from tierplan.sim.output.text import markdown_table

WITHIN = 1.01
INSTANCES = 200
TIME_LIMIT_S = 10.0
PART = "brute force"


def answer(number: int) -> Record:
    """What all plans of one instance come to, and what the planner says."""
    kind, workload, machine = brute_force_instance(number)
    record: Record = {"kind": kind, "blocks": len(workload.units), "trivial": is_trivial(workload, machine)}
    if record["trivial"]:
        return record
    began_s = time.process_time()
    record |= {"plans": len(all_plans(workload, machine)), "best_s": best_of_all(workload, machine)}
    ended_s = time.process_time()
    record["brute_force_s"] = ended_s - began_s
    try:
        result = plan(workload, machine, time_limit_s=TIME_LIMIT_S)
    except InfeasiblePlan:
        return record | {"found_s": None}
    found = {"found_s": result.step_s, "bound_s": result.lower_bound_s, "status": result.status}
    return record | found | {"plan_s": time.process_time() - ended_s}


def counts(record: Record) -> bool:
    """Whether an instance has a best plan, and it is no matter of course."""
    return not record["trivial"] and (record["best_s"] is not None or record["found_s"] is not None)


def ratio(record: Record) -> float:
    """The loop's step over the best; infinite where only brute force found a plan, 0 where only the loop did."""
    if record["best_s"] is None:
        return 0.0
    return float("inf") if record["found_s"] is None else record["found_s"] / record["best_s"]


def questions(args: argparse.Namespace) -> Iterator[Question]:
    for number in itertools.count():
        if sum(map(counts, read(args.results))) >= args.number:
            return
        yield {"number": number}, partial(answer, number)


def shown(record: Record) -> str:
    found = f"{ratio(record):.4f} of the best" if counts(record) else "does not count"
    return f"instance {record['number']}, {record['kind']}: {found}"


def table(records: list[Record]) -> str:
    counted = [r for r in records if counts(r)][:INSTANCES]
    worse = [r for r in counted if ratio(r) > WITHIN]
    above = [ratio(r) for r in counted if 0 < ratio(r) < float("inf")]
    lines = [
        f"{len(counted)} instances in which something fits and something must leave the device or be made again; "
        f"{len(counted) - len(worse)} within 1 % of the best of all plans, largest excess "
        f"{(max(above) - 1) * 100:.1f} %; version {versions_of(counted)}.",
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


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--number", type=int, default=INSTANCES, help="instances that count (default 200)")
    ask_or_write(parser, PART, questions, shown, table)


if __name__ == "__main__":
    main()
