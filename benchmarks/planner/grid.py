"""The planner against every published system on a grid of machines, models and batches.

    python -m benchmarks.planner.grid benchmarks/results/grid.jsonl          # runs what the file lacks, line by line
    python -m benchmarks.planner.grid benchmarks/results/grid.jsonl --table docs/planner_grid.md
    python -m benchmarks.planner.grid random.jsonl --random 40 --seed 1      # models, machines, lengths from all over

Every machine takes part with one of its devices. A scenario where nothing fits is a line too. Each line has the version
of tierplan that wrote it; the table says which.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from benchmarks.records import Question, Record, arguments, ask_or_write, versions_of
from tierplan.hwmodels import load_machine
from tierplan.hwmodels.machine import Machine
from tierplan.planner.plan_rules import PlanError
from tierplan.planner.planning import plan
from tierplan.sim.output.text import format_frac, markdown_table
from tierplan.sim.workloads.models import read_config
from tierplan.sim.workloads.workload import Training, Workload
from tierplan.studies.defaults import default_precision, workload_or_traced

MACHINES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "desktop 4090, 64 GB": ("desktop-4090", ()),
    "4090, 768 GB, 12 drives": ("fuyou-4090", ()),
    "4090, 768 GB, 3 drives": ("fuyou-4090", ("nvme.drives=3",)),
    "V100 32 GB, 1.5 TB": ("zero-offload-v100", ()),
    "H100 80 GB, 2 TB": ("server-8xh100", ()),
}
MODELS = ("gpt-1.3b", "gpt-6.7b", "gpt-13b", "gpt-30b", "gpt-65b", "gpt-175b")
BATCHES = (8, 32)
LAPTOP = (("gpt-1.3b", 2), ("gpt-1.3b", 8), ("gpt-6.7b", 2), ("gpt-6.7b", 8))
SMALL: dict[str, object] = {
    "model_type": "gpt2",
    "n_embd": 2048,
    "n_layer": 24,
    "n_head": 16,
    "vocab_size": 50257,
}
"""GPT-3 XL, table 2.1 of arXiv 2005.14165."""
MEDIUM = SMALL | {"n_embd": 1024}
"""GPT-2 medium."""
CONFIGS: Mapping[str, dict[str, object]] = {"gpt-1.3b": SMALL, "gpt-0.35b": MEDIUM}
"""The other sizes are named configurations."""
ONE_DEVICE = "gpu.count=1"
SEQUENCE = 1024
RANDOM_MACHINES = (
    "cloud-h100", "desktop-4090", "fsdp-qlora-a5000", "fuyou-4090", "laptop", "server-8xh100",
    "roundpipe-8x4090", "ssdtrain-a100", "zero-offload-v100", "dgx-8xa100-80gb",
)  # fmt: skip
RANDOM_MODELS = (
    *MODELS, "gpt-100b", "llama-3.1-8b", "llama-3.3-70b", "qwen3-4b", "qwen3-14b", "qwen3-32b",
    "qwen3-30b-a3b", "mixtral-8x7b",
)  # fmt: skip
RANDOM_HOST_GB = (32, 48, 64, 96, 128, 192, 256, 384, 512, 768)
CLEARLY = 1.10
PART = "grid"


Scenario = tuple[str, str, tuple[str, ...], str, int, int]
"""Label, machine, what is set there, model, batch, tokens in a sequence."""


def scenarios() -> Iterator[Scenario]:
    for label, (name, overrides) in MACHINES.items():
        for model in MODELS:
            for batch in BATCHES:
                yield label, name, overrides, model, batch, SEQUENCE
    for model, batch in LAPTOP:
        yield "laptop", "laptop", (), model, batch, SEQUENCE


def drawn(num: int, seed: int) -> Iterator[Scenario]:
    """Scenarios from all over; the first of them are the same for every number."""
    rng = random.Random(seed)
    for _ in range(num):
        name, model = rng.choice(RANDOM_MACHINES), rng.choice(RANDOM_MODELS)
        host_gb, drives = rng.choice(RANDOM_HOST_GB), rng.randint(1, 8)
        batch, length = rng.choice((1, 2, 4, 8, 16, 32, 64)), rng.choice((512, 1024, 2048, 4096, 8192))
        has_drives = any(tier.kind == "nvme" for tier in load_machine(name).tiers)
        overrides = (f"host.capacity={host_gb} GB", *([f"nvme.drives={drives}"] if has_drives else []))
        label = f"{name}, {host_gb} GB, {drives if has_drives else 0} drives, {length} tokens"
        yield label, name, overrides, model, batch, length


def question(
    name: str, overrides: tuple[str, ...], model: str, batch: int, length: int = SEQUENCE
) -> tuple[Workload, Machine]:
    """The workload and the machine of one scenario."""
    machine = load_machine(name, (*overrides, ONE_DEVICE))
    return workload_on(machine, model, batch, length), machine


def workload_on(machine: Machine, model: str, batch: int, length: int = SEQUENCE) -> Workload:
    """The model, trained in the machine's precision."""
    training = Training(per_device_train_batch_size=batch, sequence_length=length, dtype=default_precision(machine))
    config = {**CONFIGS[model], "n_positions": max(length, 2048)} if model in CONFIGS else None
    return workload_or_traced(*((model, config) if config else read_config(model, training)), training)


def answer(
    name: str,
    overrides: tuple[str, ...],
    model: str,
    batch: int,
    length: int = SEQUENCE,
    *,
    time_limit_s: float | None = None,
) -> dict[str, Any]:
    workload, machine = question(name, overrides, model, batch, length)
    started = time.process_time()
    try:
        result = plan(workload, machine, time_limit_s=time_limit_s)
    except PlanError as error:
        return {"fits": False, "reason": str(error), "time_limit_s": time_limit_s}
    best = result.best_policy
    in_memory = result.policies["in-memory"].step_s is not None
    figures = ("step_s", "lower_bound_s", "gap", "status", "solve_s", "total_s", "num_simulated")
    return {
        "fits": True,
        **{name: getattr(result, name) for name in figures},
        **{name: getattr(result.plan, name) for name in ("order", "sub_batches")},
        "bound_by": next(iter(result.bound_shares), ""),
        "best_policy": best,
        "best_policy_s": result.policies[best].step_s if best else None,
        "in_memory_fits": in_memory,
        "decided_by": result.plan.policy,
        "computed_s": time.process_time() - started,
        "time_limit_s": time_limit_s,
    }


def questions(args: argparse.Namespace) -> Iterator[Question]:
    for label, name, overrides, model, batch, length in drawn(args.random, args.seed) if args.random else scenarios():
        ask = partial(answer, name, overrides, model, batch, length, time_limit_s=args.time_limit)
        yield {"machine": label, "model": model, "batch": batch}, ask


def shown(record: Record) -> str:
    found = f"{record['step_s']:.3f} s, gap {record['gap']:.1%}" if record["fits"] else "nothing fits"
    return f"{record['machine']}, {record['model']}, batch {record['batch']}: {found}"


def key(record: Mapping[str, Any]) -> tuple[object, ...]:
    return record["machine"], record["model"], record["batch"]


def table(records: list[Record]) -> str:
    fitting = [r for r in records if r["fits"]]
    offloaded = [r for r in fitting if not r["in_memory_fits"]]
    compared = [r for r in fitting if r["best_policy_s"]]
    worse = [r for r in compared if r["step_s"] > r["best_policy_s"] * (1 + 1e-9)]
    clear = [r for r in offloaded if not r["best_policy_s"] or r["best_policy_s"] >= CLEARLY * r["step_s"]]
    gaps = sorted(r["gap"] for r in fitting)
    faster = f"At least 10 % faster than it, or the only one that fits: in {len(clear)} of the {len(offloaded)}"
    limits = sorted({f"{r['time_limit_s']:.0f} s" if r["time_limit_s"] else "the default budget" for r in records})
    computed_s = [r["computed_s"] for r in fitting]
    lines = [
        f"{len(records)} scenarios; something fits in {len(fitting)}, and in {len(offloaded)} of these something must "
        f"leave the device. For each search {' or '.join(limits)}; version {versions_of(records)}.",
        "",
        f"- Slower than the best published system: in {len(worse)}.",
        f"- {faster}.",
        f"- Gap to the bound: median {100 * statistics.median(gaps):.1f} %, largest {100 * max(gaps):.1f} %; "
        f"at most 10 % in {sum(gap <= 0.1 for gap in gaps)}.",
        f"- Seconds of computing per scenario, policies and bounds included: median "
        f"{statistics.median(computed_s):.1f}, largest {max(computed_s):.1f}.",
        "",
    ]
    head = ("machine", "model", "batch", "step, s", "bound, s", "gap", "bound by", "best system", "its step, s",
            "faster by")  # fmt: skip
    rows = []
    for r in records:
        cells = ["nothing fits", *[""] * 6]
        if r["fits"]:
            cells = [f"{r['step_s']:.2f}", f"{r['lower_bound_s']:.2f}", f"{100 * r['gap']:.1f} %", r["bound_by"]]
            best_s = r["best_policy_s"]
            by = [r["best_policy"], f"{best_s:.2f}", format_frac(best_s / r["step_s"] - 1)] if best_s else None
            cells += by or ["none fits", "", ""]
        rows.append((r["machine"], r["model"], str(r["batch"]), *cells))
    return "\n".join([*lines, *markdown_table(head, rows, right=(2, 3, 4, 5, 8, 9))])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument(
        "--time-limit", type=float, metavar="S", help="of each search (default: what plan takes where nobody says)"
    )
    parser.add_argument("--random", type=int, metavar="N", help="so many scenarios from all over instead of the grid")
    parser.add_argument("--seed", type=int, default=0, help="of these")
    ask_or_write(parser, PART, questions, shown, table)


if __name__ == "__main__":
    main()
