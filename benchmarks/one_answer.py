"""Whether `advise`, `plan` and `sweep` say the same, and more is never slower: random scenarios of catalog machines.

    python -m benchmarks.one_answer benchmarks/results/one-answer.jsonl --seconds 300    # runs what the file lacks
    python -m benchmarks.one_answer benchmarks/results/one-answer.jsonl --table docs/planner_grid.md

Each asks the commands themselves, with `--json`. Scenario n is the same in every run. Of each are checked: `advise`'s
headline is `plan`'s; no purchase is slower than today's; one purchase's figures, drawn at random, are what `plan` says
of that machine; a machine with more of one thing, drawn too, is not slower; `sweep`'s row is `plan`'s answer.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.planner.grid import SMALL
from benchmarks.records import Question, Record, arguments, ask_or_write, versions_of
from tierplan.cli import main as tierplan
from tierplan.planner.search import budget

SCENARIOS = 200
FIGURES = ("step_s", "tokens_per_s", "micro_batch", "accumulation", "limited_by")
SAME = 1e-9
MACHINES: Mapping[str, Sequence[str]] = {
    "laptop": ("gpt2", "small", "medium"),
    "desktop-4090": ("medium", "gpt-6.7b", "llama-3.1-8b"),
    "fuyou-4090": ("gpt-6.7b", "gpt-13b"),
    "cloud-h100": ("gpt-6.7b", "llama-3.1-8b"),
}
MEDIUM = SMALL | {"n_embd": 1024, "n_layer": 24}
CONFIGS: Mapping[str, Mapping[str, object]] = {
    "gpt2": SMALL | {"n_embd": 768, "n_layer": 12, "n_head": 12},
    "small": SMALL,
    "medium": MEDIUM,
}
MORE: Mapping[str, Mapping[str, Sequence[object]]] = {
    "laptop": {"host.capacity": ("32 GiB", "64 GiB"), "nvme.drives": (2,)},
    "desktop-4090": {"host.capacity": ("96 GiB", "192 GiB"), "nvme.drives": (2, 4), "gpu.part": ("rtx-5090",)},
    "fuyou-4090": {"host.capacity": ("1 TiB",), "nvme.drives": (24,)},
    "cloud-h100": {"host.capacity": ("2 TiB",)},
}
"""Of machines as they are in the catalog."""


def answer(*words: object) -> Any:
    """What a command prints with `--json`."""
    printed = io.StringIO()
    with redirect_stdout(printed):
        tierplan([*map(str, words), "--json"])
    return json.loads(printed.getvalue())


def asked(given: Mapping[str, Any], overrides: Mapping[str, object]) -> list[object]:
    """The scenario as arguments."""
    words = [w for name, value in given.items() for w in (f"--{name.replace('_', '-')}", value)]
    return [*words, *(w for key, value in overrides.items() for w in ("--set", f"{key}={value}"))]


def figures(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: found.get(name) for name in FIGURES} if found.get("fits") else {"fits": False}


def scenario(number: int) -> dict[str, Any]:
    """What is wrong with the answers to one question; nothing, where they agree."""
    rng = random.Random(number)
    machine = rng.choice(list(MACHINES))
    name = rng.choice(MACHINES[machine])
    key = rng.choice(list(MORE[machine]))
    more = {key: rng.choice(MORE[machine][key])}
    amount = {rng.choice(("sequences", "batch")): rng.choice((1, 2, 4, 8))}
    given: dict[str, Any] = {"machine": machine, "seq": rng.choice((512, 1024)), **amount}
    wrong, began_s = [], time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        model = name
        if name in CONFIGS:
            model = str(Path(folder) / "config.json")
            Path(model).write_text(json.dumps(CONFIGS[name]))
        given["model"] = model
        planned = answer("plan", *asked(given, {}))
        advice = answer("advise", *asked(given, {}), "--workers", 1)
        if figures(advice) != figures(planned):
            wrong.append(f"advise's headline is {figures(advice)}, plan's answer {figures(planned)}")
        today = planned.get("tokens_per_s") or 0.0
        wrong += [f"{c['what']} is slower than today's" for c in advice["changes"] if c["tokens_per_s"] < today]
        if advice["changes"]:
            bought = rng.choice(advice["changes"])
            at = {**given, "machine": bought["machine"] or machine}
            its = answer("plan", *asked(at, bought["overrides"]))
            if figures(its) != figures(bought):
                wrong.append(f"{bought['what']}: advise says {figures(bought)}, plan {figures(its)}")
        better = answer("plan", *asked(given, more))
        if (better.get("tokens_per_s") or 0.0) < today * (1 - SAME):
            wrong.append(f"{more}: {better.get('tokens_per_s')} tokens/s, without it {today}")
        wrong += swept(Path(folder), given, planned)
    question = f"{name} on {machine}, {amount}, {given['seq']} tokens; more: {more}"
    found = {"question": question, "purchases": len(advice["changes"]), "wrong": wrong}
    return found | {"computed_s": time.process_time() - began_s, "ops": budget.DEFAULT_OPS}


def swept(folder: Path, given: Mapping[str, Any], planned: Mapping[str, Any]) -> list[str]:
    """What is wrong with `sweep`'s row for the question."""
    study = folder / "study.toml"
    study.write_text("\n".join(["[scenario]", *(f"{key} = {json.dumps(value)}" for key, value in given.items())]))
    [row] = answer("sweep", study, "--out", folder / "out", "--workers", 1)
    if figures(row) != figures(planned):
        return [f"sweep says {figures(row)}, plan {figures(planned)}"]
    return []


def questions(args: argparse.Namespace) -> Iterator[Question]:
    budget.DEFAULT_OPS = args.ops or budget.DEFAULT_OPS
    for number in range(args.scenarios):
        yield {"number": number}, partial(scenario, number)


def table(records: list[Record]) -> str:
    """What the file holds, in a sentence."""
    purchases, wrong = sum(r["purchases"] for r in records), sum(len(r["wrong"]) for r in records)
    ops = ", ".join(f"{ops:,}" for ops in sorted({r["ops"] for r in records}))
    found = f"{len(records)} scenarios with {purchases} purchases listed: in {wrong} places something disagrees."
    return f"{found} Searches may spend {ops} ops here; version {versions_of(records)}."


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--scenarios", type=int, default=SCENARIOS, metavar="N", help="up to this number")
    parser.add_argument("--ops", type=int, help="that searches may spend, in place of a default that takes minutes")
    ask_or_write(
        parser,
        "one answer",
        questions,
        lambda r: f"{r['number']}: {r['question']}: {r['wrong'] or 'agree'}",
        table,
    )


if __name__ == "__main__":
    main()
