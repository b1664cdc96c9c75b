"""Whether more of any resource ever gives a slower plan, and a wider search a worse one: random pairs of questions.

    python -m benchmarks.planner.monotone benchmarks/results/monotone.jsonl --seconds 250     # runs what the file lacks
    python -m benchmarks.planner.monotone benchmarks/results/monotone.jsonl --table docs/planner_grid.md

A pair is a machine of the catalog, or a small one, with a model and a batch, and the same with more of one resource:
memory of a tier, the rate of a stream, or all. A wider search has a longer limit, or both orders of micro-batches
instead of one. Pair n is the same in every run: its random numbers come from n. All else is by default, the budget too.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from benchmarks.planner.grid import ONE_DEVICE, workload_on
from benchmarks.records import Record, arguments, ask_or_write, versions_of
from tierplan.hwmodels import load_machine
from tierplan.hwmodels.machine import Machine
from tierplan.hwmodels.names import HOST_ADAM, NVME_READ, NVME_WRITE, compute, d2h, h2d
from tierplan.hwmodels.scaling import own_limits, with_capacity, with_faster
from tierplan.planner.infeasible import InfeasiblePlan
from tierplan.planner.planning import plan
from tierplan.planner.search.lesser import lesser_of_catalog
from tierplan.sim.output.text import markdown_table
from tierplan.sim.workloads.workload import Workload

MACHINES: Mapping[str, tuple[str, ...]] = {
    "desktop-4090": ("gpt-1.3b", "gpt-6.7b", "gpt-13b"),
    "fuyou-4090": ("gpt-6.7b", "gpt-13b", "gpt-30b"),
    "zero-offload-v100": ("gpt-6.7b", "gpt-13b"),
    "server-8xh100": ("gpt-6.7b", "gpt-30b"),
    "laptop": ("gpt-0.35b", "gpt-1.3b"),
}
STREAMS = {
    "drives": (NVME_READ, NVME_WRITE),
    "link": (h2d(0), d2h(0)),
    "compute": (compute(0),),
    "host Adam": (HOST_ADAM,),
}
FACTORS = (1.1, 1.25, 1.5, 2.0, 4.0)
PAIRS, OF_SEARCHES, OF = 700, 2, 7
"""How many pairs there are; of `OF`, so many are of searches and not of machines."""
TIME_LIMIT_S = 10.0
"""Of the longer search, where time is what there is more of."""
SAME = 1e-9
CLEARLY = 1.005
PART = "monotone"


def question(rng: random.Random) -> tuple[str, Workload, Machine]:
    """A model on a machine, often one where memory binds: its name, and both."""
    name = rng.choice(list(MACHINES))
    machine = load_machine(name, (ONE_DEVICE,))
    model, batch = rng.choice(MACHINES[name]), rng.choice((2, 4, 8, 16, 32))
    less = {t.name: rng.choice((0.5, 0.75, 1.0)) for t in machine.tiers if t.kind != "nvme"}
    machine = with_capacity(machine, {t.name: int(t.capacity_bytes * less.get(t.name, 1.0)) for t in machine.tiers})
    what = f"{model}, batch {batch}, {name} {sorted(less.values())}"
    return what, workload_on(machine, model, batch), machine


def more_of(machine: Machine, rng: random.Random) -> tuple[str, Machine]:
    """What there is more of, and the machine with it."""
    tiers = {t.kind: t for t in machine.tiers}
    changes: dict[str, Callable[[float], Machine]] = {
        f"{kind} memory": lambda by, t=tier: with_capacity(machine, {t.name: int(t.capacity_bytes * by)})  # type: ignore[misc]
        for kind, tier in tiers.items()
        if kind != "nvme"
    }
    for name, streams in STREAMS.items():
        if all(any(s.name == stream for s in machine.streams) for stream in streams):
            names = {*streams, *own_limits(machine, streams)}
            changes[name] = lambda by, names=names: with_faster(machine, names=names, factor=by)  # type: ignore[misc]
    what, by = rng.choice(list(changes)), rng.choice(FACTORS)
    return f"{what} x {by}", changes[what](by)


def pair(number: int) -> dict[str, Any]:
    """Both steps of one pair, None where nothing fits, and whether the clock ended a search before its budget did."""
    rng = random.Random(number)
    name, workload, machine = question(rng)
    asked: dict[str, Any] = {}
    more: dict[str, Any] = {}
    better = machine
    if number % OF < OF_SEARCHES:
        what = rng.choice(("time", "orders", "policies"))
        if what == "time":
            asked["time_limit_s"], more["time_limit_s"] = TIME_LIMIT_S * rng.choice((0.1, 0.3, 0.7)), TIME_LIMIT_S
        elif what == "orders":
            asked["orders"] = (rng.choice(("horizontal", "vertical")),)
        else:
            asked["policies"] = ()
        what = f"wider search: {what}"
    else:
        what, better = more_of(machine, rng)
    started = time.process_time()
    less, most = step(workload, machine, asked), step(workload, better, more)
    return {
        "number": number,
        "question": name,
        "more": what,
        "by_construction": better is not machine and lesser_of_catalog(better) == machine,
        "less_s": less[0],
        "more_s": most[0],
        "cut_by_clock": less[1] or most[1],
        "computed_s": time.process_time() - started,
    }


def step(workload: Workload, machine: Machine, asked: Mapping[str, Any]) -> tuple[float | None, bool]:
    """Seconds of the best plan's step, None where nothing fits, and whether the clock ended the search.

    A busy computer ends searches early, which says nothing about what there is more of.
    """
    try:
        found = plan(workload, machine, **asked)
    except InfeasiblePlan:
        return None, False
    return found.step_s, found.status == "time-limit"


def ratio(record: Mapping[str, Any]) -> float:
    """The step with more over the step with less: above 1, more was worse."""
    less_s, more_s = record["less_s"], record["more_s"]
    if less_s is None:
        return 0.0 if more_s is not None else 1.0
    return float("inf") if more_s is None else float(more_s / less_s)


def table(records: list[Record]) -> str:
    head = ("more of", "pairs", "of these never slower by construction", "slower", "by over 0.5 %", "at most by")
    rows = []
    kinds: dict[str, list[Record]] = {}
    for r in records:
        kinds.setdefault(r["more"].split(" x ")[0], []).append(r)
    kinds = dict(sorted(kinds.items())) | {"all": records}
    for kind, some in kinds.items():
        ratios, num_sure = [ratio(r) for r in some], sum(r["by_construction"] for r in some)
        worse = [x for x in ratios if x > 1 + SAME]
        most = f"{(max(worse) - 1) * 100:.1f} %" if worse else ""
        clearly = sum(x > CLEARLY for x in worse)
        rows.append((kind, *map(str, (len(ratios), num_sure, len(worse), clearly)), most))
    num_cut = sum(r.get("cut_by_clock", False) for r in records)
    cut = f" In {num_cut} of them the clock ended a search before its budget was spent." if num_cut else ""
    table = markdown_table(head, rows, right=range(1, 6))
    return "\n".join([*table, "", f"Version {versions_of(records)}.{cut}"])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS, metavar="N", help="up to this number")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="from this number on")
    ask_or_write(
        parser,
        PART,
        lambda args: (({"number": number}, partial(pair, number)) for number in range(args.first, args.pairs)),
        lambda r: f"{r['number']}: {r['question']}: {r['more']}: {ratio(r):.4f}",
        table,
    )


if __name__ == "__main__":
    main()
