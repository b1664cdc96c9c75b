"""Are predictions as true for whoever types the commands? Measure, calibrate, plan, run and compare, by commands alone.

    python -m benchmarks.commands_campaign --out DIR --hour quiet              what is missing; may be interrupted
    ... --hour quiet --calibrate-s 35 --measure-s 40 --runs 3                  each row three times, in some 35 minutes
    python -m benchmarks.commands_campaign --out DIR --hour loaded             the same beside another job
    python -m benchmarks.commands_campaign --out DIR --hour quiet --demos 5    the demo, until that hour has five
    python -m benchmarks.commands_campaign --page docs/commands_campaign.md    the page, from the results of all hours
    ... --devices 2 --hour quiet --calibrate-s 25 --measure-s 25     16 rows of two ranks, in some 9 minutes
    ... --devices 2 --page docs/two_ranks.md                         their page

Each hour has its own measurement of the machine, and each group of rows its own calibration. A row is one plan of one
model: `tierplan simulate` (or `plan`), then `run` and `compare --json`. With `--runs` that is done several times, all
rows once and then all once more: the same plan takes up to a fifth more or less from one process to the next. A run is
appended to the results when it has ended; runs that are there are not repeated. Times of a machine that others use
vary: look at `uptime` before a quiet hour.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from math import ceil
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.records import Record, append, arguments, read
from tierplan.sim.output.text import format_error, format_s, markdown_table
from tierplan.validation.calibration.transfer import Transfer, transfer_lines
from tierplan.validation.comparison.compare import ninth_decile

RESULTS = Path("benchmarks/results/commands-campaign.jsonl")
TRANSFERS = RESULTS.with_name("calibration-transfer.jsonl")
"""Rows of `tierplan validate --transfer --json`, each with its hour."""
POLICIES = ("in-memory", "full-recompute", "zero-offload", "zero-infinity", "fuyou", "planner")
PLANNER_FRAC = 0.45
"""Of the device memory of plain training: what the planner gets."""
STEPS, RUN_S = 24, 10.0
"""A run has so many steps on all its devices, and lasts so long by its prediction: steps take 12 % more or less from
one second to the next, whatever trains."""
DEVICES_RESULTS = RESULTS.with_name("cpu-two-ranks.jsonl")
DEVICES_COMBINATIONS = ("llama-bf16", "gpt2-fp32")
DEVICES_POLICIES: Mapping[str, tuple[str, ...]] = {
    "ddp": (), "zero-2": (), "zero-2 optimizer=host": ("optimizer=host",), "zero-3": (),
    "fsdp-offload": (), "megatron-pp": (), "harmony-dp": ("host_memory=own", "pack=2"),
    "harmony-pp": ("host_memory=own", "pack=2"),
}  # fmt: skip
"""With their options."""
SHARES_BATCHES = ("megatron-pp", "harmony-dp", "harmony-pp")
"""Their devices share the micro-batches of a step."""
KEPT = ("step_error_frac", "normalised_error_frac", "interval_s", "in_interval", "slowdown", "bytes_agree", "causes")
"""Of what `compare --json` says."""
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(10**6))"
"""The other job of a loaded hour, which is begun and ended with it: one core, all the time."""


class Combination(NamedTuple):
    """What is trained in one group of rows."""

    name: str
    config: dict[str, object]
    dtype: str
    batch: int
    seq: int
    more: tuple[str, ...] = ()
    """Options: adapters, formats, another optimizer."""


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
THREADS = ("--threads", "1")
"""With one core left for the other streams, and for what a loaded hour has beside it."""
LLAMA = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 704, "vocab_size": 2048,
         "max_position_embeddings": 512}  # fmt: skip
WIDE_LLAMA: dict[str, object] = {"model_type": "llama", "hidden_size": 512, "num_hidden_layers": 6, **LLAMA,
                                 "intermediate_size": 1408}  # fmt: skip
COMBINATIONS = (
    Combination("llama-bf16", {"model_type": "llama", "hidden_size": 256, "num_hidden_layers": 8, **LLAMA},
                "bf16", 2, 192),
    Combination("qwen2-bf16", {"model_type": "qwen2", "hidden_size": 256, "num_hidden_layers": 6, **LLAMA},
                "bf16", 6, 64),
    Combination("gpt2-fp32", {"model_type": "gpt2", "n_embd": 320, "n_layer": 8, "n_head": 5, "n_positions": 512,
                              "vocab_size": 2048, **NO_DROPOUT}, "fp32", 4, 128),
    Combination("opt-fp32", {"model_type": "opt", "hidden_size": 256, "num_hidden_layers": 10, "ffn_dim": 1024,
                             "num_attention_heads": 4, "dropout": 0.0, "max_position_embeddings": 512,
                             "vocab_size": 2048, "word_embed_proj_dim": 256}, "fp32", 8, 96),
    Combination("llama-lora", WIDE_LLAMA, "bf16", 2, 128, ("--lora", "r=8,targets=all-linear")),
    Combination("llama-qlora", WIDE_LLAMA, "bf16", 2, 128, ("--lora", "r=8,targets=all-linear", "--base", "nf4")),
    Combination("llama-8bit", WIDE_LLAMA, "bf16", 2, 128, ("--optimizer", "adamw:states=8bit")),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Hour:
    """Rows that are run one after the other, on one measurement of the machine."""

    home: Path
    name: str
    results: Path
    devices: int = 1
    calibrate_s: float = 180.0
    measure_s: float = 60.0

    def tierplan(self, *words: object) -> str:
        """What the command prints. Raises `RuntimeError` with its error where it fails."""
        command = [sys.executable, "-c", "from tierplan.cli import main; raise SystemExit(main())", *map(str, words)]
        own = {"XDG_CONFIG_HOME": str(self.home / "config"), "XDG_DATA_HOME": str(self.home / "data")}
        done = subprocess.run(command, env={**os.environ, **own}, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"tierplan {command[3]}: {done.stderr.strip()[-500:]}")
        return done.stdout

    def keep(self, row: Record) -> None:
        append(self.results, row)
        print(line(row), flush=True)


@contextmanager
def other_job(is_there: bool) -> Iterator[None]:
    """Another program on one core, if there is one."""
    busy = subprocess.Popen([sys.executable, "-c", BUSY]) if is_there else None
    try:
        yield
    finally:
        if busy:
            busy.kill()
            busy.wait()


def now() -> Record:
    return {"when": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "load": os.getloadavg()[0]}


def run_demos(hour: Hour, times: int) -> None:
    """The demo, until the results have so many rows of it in this hour."""
    name = f"{hour.name}, demo"
    for k in range(sum(row["hour"] == name for row in read(hour.results)) + 1, times + 1):
        row = {"hour": name, "group": "demo", "policy": f"planner, time {k}", **now()}
        said = json.loads(hour.tierplan("demo", "--out", hour.home / "demo", "--json"))
        kept = {name: said[name] for name in ("step_s", *KEPT) if name in said}
        hour.keep({**row, **kept, "s": said["seconds"]})


def measured_link(devices: int) -> list[str]:
    """What ranks on this machine send each other while they compute, as settings of a machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={devices}"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "-m", "benchmarks.link_of_ranks"], env=env, capture_output=True, text=True, check=True
    )
    rate, latency_s = json.loads(done.stdout.strip().splitlines()[-1])
    link = (f"gpu.count={devices}", f"link.collective={rate} B/s", f"link.collective_latency={latency_s} s")
    return [word for setting in link for word in ("--set", setting)]


def run_hour(hour: Hour, runs: int) -> None:
    """So many runs of each row of this hour, less those that are in the results."""
    home, nvme, link = hour.home, hour.home / "nvme", hour.home / "link.json"
    if not (home / "config" / "tierplan" / "machines" / "here.toml").exists():
        hour.tierplan("machine", "measure", "--budget-s", hour.measure_s, "--nvme", nvme)
    text = "".join(path.read_text() for path in sorted(Path(os.__file__).parent.glob("*.py"))[:60])
    (home / "text.txt").write_text(text)
    groups: Sequence[Combination] = COMBINATIONS
    policies: Sequence[str] = POLICIES
    settings = list[str]()
    if hour.devices > 1:
        groups = [group for group in COMBINATIONS if group.name in DEVICES_COMBINATIONS]
        policies = [*DEVICES_POLICIES]
        if not link.exists():
            link.write_text(json.dumps(measured_link(hour.devices)))
        settings = json.loads(link.read_text())
    times = Counter(key_of(row) for row in read(hour.results))
    for k, group in itertools.product(range(runs), groups):
        missing = [policy for policy in policies if times[hour.name, group.name, policy] <= k]
        if not missing:
            continue
        model, calibration = home / f"{group.name}.json", home / f"{group.name}.calibration.json"
        model.write_text(json.dumps(group.config))
        asked = ["--model", model, "--batch", group.batch, "--seq", group.seq, "--dtype", group.dtype]
        asked += [*group.more, *settings]
        if not calibration.exists():
            print(f"{hour.name}/{group.name}: calibrating", flush=True)
            how = [*THREADS, "--budget-s", hour.calibrate_s, "--nvme", nvme, "-o", calibration]
            hour.tierplan("calibrate", *asked, *how)
        for policy in missing:
            named = {"hour": hour.name, "group": group.name, "policy": policy}
            hour.keep({**named, **run_row(hour, model, policy, [*asked, "--calibration", calibration])})


def run_row(hour: Hour, model: Path, policy: str, asked: Sequence[object]) -> Record:
    """One run of a row: predicted, where it has not been, run and compared; or why not."""
    row = f"{model.stem}.{policy.replace(' ', '.')}"
    plan, told, out = hour.home / f"{row}.plan.json", hour.home / f"{row}.told.json", hour.home / "run"
    when = now()
    try:
        if not told.exists():
            told.write_text(predicted(hour, policy, asked, plan))
        shutil.rmtree(out, ignore_errors=True)
        num_steps = max(STEPS // hour.devices, ceil(RUN_S / json.loads(told.read_text())["step_s"]))
        data = ["--data", hour.home / "text.txt", "--steps", num_steps, "--out", out, "--no-export", *THREADS]
        several = ("--devices", hour.devices) if hour.devices > 1 else ()
        hour.tierplan("run", plan, "--model", model, *data, *several)
        compared = json.loads(hour.tierplan("compare", plan, out, "-o", hour.home / "report.html", "--json"))
    except RuntimeError as error:
        return {**when, "why_not": str(error)}
    peaks = (tier["peak_bytes"] for tier in compared["tiers"])
    error_frac = max(abs(p["predicted"] / p["measured"] - 1) for p in peaks if p["measured"])
    kept = {name: compared[name] for name in KEPT}
    return {**when, "step_s": compared["step_s"], "peak_error_frac": error_frac, **kept}


def predicted(hour: Hour, policy: str, asked: Sequence[object], plan: Path) -> str:
    """What is said of the plan that is written there."""
    if policy == "planner":
        plain = json.loads(hour.tierplan("simulate", "--policy", "in-memory", *asked, "--json"))
        capacity = int(plain["peak_bytes"]["gpu0"] * PLANNER_FRAC)
        return hour.tierplan("plan", *asked, "--set", f"gpu.capacity={capacity} B", "-o", plan, "--json")
    name, _, _ = policy.partition(" ")
    options = [word for option in DEVICES_POLICIES.get(policy, ()) for word in ("--option", option)]
    if name in SHARES_BATCHES:  # as many micro-batches as the others have on all devices, and twice as many
        options += ["--accumulation", str(2 * hour.devices)]
    return hour.tierplan("simulate", "--policy", name, *options, *asked, "-o", plan, "--json")


def key_of(row: Record) -> tuple[str, str, str]:
    """Runs with the same one are runs of one row."""
    return row["hour"], row["group"], row["policy"]


def line(row: Record) -> str:
    head = f"{row['hour']}/{row['group']}/{row['policy']}"
    if "why_not" in row:
        return f"{head}: no answer: {row['why_not']}"
    step = row["step_s"]
    return (
        f"{head}: predicted {format_s(step['predicted'])}, measured {format_s(step['measured'])}, raw "
        f"{format_error(row['step_error_frac'])}, normalised {format_error(row['normalised_error_frac'])}"
    )


def percent(frac: float) -> str:
    return f"{100 * frac:.1f} %"


RANKS_HEAD = (
    "# Two ranks on this machine",
    "",
    "This page is generated: `python -m benchmarks.commands_campaign --devices 2 --page FILE`. Every row was predicted",
    "before it was run, and compared, by commands: `machine measure`, `calibrate`, `simulate`, `run --devices 2` and",
    "`compare`, on 2 cores, each rank's kernels in one thread. What ranks send each other in a second was measured by",
    "an exchange beside computation, the rest by one process while another one trained, too. In the hour `quiet,",
    "calibrated alone` the calibrating process had the machine for itself: ranks that share its cores came out too",
    "quick. [By commands alone](commands_campaign.md) says what the columns are.",
    "",
    "The goal: a median of at most 8 %, over 12 rows or more.",
    "",
)
COMMANDS_HEAD = (
    "# By commands alone",
    "",
    "This page is generated: `python -m benchmarks.commands_campaign --page FILE`. Every row was predicted, run,",
    "and compared by commands: `machine measure`, `calibrate`, `simulate` or `plan`, `run` and `compare`, on 2",
    "cores with one NVMe drive, kernels in one thread. Each hour has its own measurement of the machine.",
    "",
    "- *raw*: the error, `predicted / measured - 1`. *normalised*: the same for a machine as slow as it was in the",
    "  run. The slowdown is told without a predicted step: by how long computation waited for a core (beyond the",
    "  contention that was predicted) and how long the reference work of `run` took, over those in the calibration.",
    "  *load*: that of the minute before.",
    "- A loaded hour has one other job, a loop in Python that takes a core all the time.",
    "- Where a row was run several times, minutes apart, all are listed, and its errors are the medians of theirs: the",
    "  same plan takes up to a fifth more or less from one process to the next.",
    "- `llama-lora`, `llama-qlora` and `llama-8bit` train adapters, or keep states in 8 bits. The demo measures,",
    "  calibrates, plans and trains anew each time.",
    "- Calibrations took 75 s in the quiet hour, 120 s in the loaded one; `calibrate` takes 180 s if nothing is said.",
    "- Older versions: with a `reference of products` the reference work had no small ops, did not see when launching",
    "  ops became quicker (`quiet, again` is half an hour later), and calibrations took 90 s; `quiet, before` did not",
    "  know how much reads and writes slow each other. Its errors and those of demos were normalised by all that",
    "  computation waited, the predicted contention too.",
    "",
    "The goals, for a quiet and a loaded hour: raw median at most 8 %, normalised 4 %; nine in ten within 15 and",
    "8 %; 90 % intervals hold 85 to 97 %.",
    "",
)


def median_of(runs: Sequence[Record], name: str) -> float | None:
    """Of the runs that have it."""
    return median(values) if (values := [run[name] for run in runs if run.get(name) is not None]) else None


def page(runs: Sequence[Record], devices: int = 1) -> str:
    """The page: figures by hour, and every row: what the median of its runs is. Each run has its own interval."""
    lines = list(COMMANDS_HEAD if devices == 1 else RANKS_HEAD)
    runs = sorted(runs, key=lambda run: [*dict.fromkeys(map(key_of, runs))].index(key_of(run)))
    rows = {key: list(of_row) for key, of_row in itertools.groupby(runs, key_of)}
    answered = {key: [run for run in of_row if "why_not" not in run] for key, of_row in rows.items()}
    figures = []
    for hour in dict.fromkeys(hour for hour, _, _ in rows):
        good = [of_row for key, of_row in answered.items() if key[0] == hour and of_row]
        num_rows, num_runs = sum(key[0] == hour for key in rows), sum(run["hour"] == hour for run in runs)
        cells = [hour, *map(str, (num_rows, num_runs, sum(map(len, good))))]
        for name in ("step_error_frac", "normalised_error_frac"):
            errors = sorted(abs(error) for of_row in good if (error := median_of(of_row, name)) is not None)
            cells += [percent(median(errors)), percent(ninth_decile(errors))] if errors else ["-", "-"]
        inside = [bool(run["in_interval"]) for of_row in good for run in of_row]
        figures.append((*cells, f"{sum(inside)} of {len(inside)}"))
    head = ("hour", "rows", "runs", "answered", *("raw, median", "9 in 10", "normalised, median", "9 in 10"),
            "runs in interval")  # fmt: skip
    lines += markdown_table(head, figures, right=range(1, 9))
    if checked := [row for row in runs if "peak_error_frac" in row]:
        most, agree = max(row["peak_error_frac"] for row in checked), sum(row["bytes_agree"] for row in checked)
        lines += [
            "",
            f"Peaks of tiers are off by {percent(most)} at most; bytes agree in {agree} of {len(checked)} runs.",
        ]
    head = ("model", "plan", "predicted", "90 % interval", "measured", "raw", "slowdown", "normalised", "load")
    tables: dict[str, list[tuple[str, ...]]] = {hour: [] for hour, _, _ in rows}
    for (hour, model, plan), of_row in rows.items():
        if not (good_runs := answered[hour, model, plan]):
            tables[hour].append((model, plan, of_row[0]["why_not"][:80], *[""] * 6))
            continue
        low_s, high_s = good_runs[0]["interval_s"]
        slowdown = median_of(good_runs, "slowdown")
        tables[hour].append(
            (
                model, plan, format_s(good_runs[0]["step_s"]["predicted"]), f"{format_s(low_s)} to {format_s(high_s)}",
                ", ".join(format_s(step_s) for step_s in sorted(run["step_s"]["measured"] for run in good_runs)),
                format_error(median_of(good_runs, "step_error_frac")), f"{slowdown:.2f}" if slowdown else "-",
                format_error(median_of(good_runs, "normalised_error_frac")), f"{median_of(good_runs, 'load'):.1f}",
            )
        )  # fmt: skip
    for hour, table in tables.items():
        lines += ["", f"## {hour[0].upper()}{hour[1:]}", "", *markdown_table(head, table, right=range(2, 9))]
    for hour, of_hour in itertools.groupby(read(TRANSFERS) if devices == 1 else [], lambda row: row.pop("hour")):
        lines += ["", f"## From the calibrations of others: {hour}", ""]
        lines += ["Six plans of each model, for the slowdown between the two calibrations (`validate --transfer`).", ""]
        lines += transfer_lines([Transfer(**row) for row in of_hour])
    return "\n".join([*lines, ""])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--out", type=Path, default=Path("commands-campaign"))
    parser.add_argument("--hour", default="quiet", help="a name for this run; `loaded` has another job beside it")
    parser.add_argument("--results", type=Path)
    parser.add_argument("--devices", type=int, default=1, help="rows of so many ranks")
    parser.add_argument("--calibrate-s", type=float, default=180.0)
    parser.add_argument("--measure-s", type=float, default=60.0)
    parser.add_argument("--runs", type=int, default=1, help="of each row, until this hour has so many")
    parser.add_argument("--demos", type=int, help="run the demo until this hour has so many, and nothing else")
    parser.add_argument("--page", type=Path, help="write the page of all results, and run nothing")
    args = parser.parse_args()
    args.results = args.results or (RESULTS if args.devices == 1 else DEVICES_RESULTS)
    if args.page:
        args.page.write_text(page(read(args.results), args.devices))
        return
    home = (args.out / args.hour).absolute()
    home.mkdir(parents=True, exist_ok=True)
    given = {name: getattr(args, name) for name in ("results", "devices", "calibrate_s", "measure_s")}
    hour = Hour(home=home, name=args.hour, **given)
    with other_job("loaded" in args.hour):
        if args.demos:
            run_demos(hour, args.demos)
        else:
            run_hour(hour, args.runs)


if __name__ == "__main__":
    main()
