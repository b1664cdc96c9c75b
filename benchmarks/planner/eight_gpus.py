"""Models beyond the memory of eight RTX 4090: the planner beside the published systems.

    python -m benchmarks.planner.eight_gpus benchmarks/results/eight-gpus.jsonl                    # asks what it lacks
    python -m benchmarks.planner.eight_gpus benchmarks/results/eight-gpus.jsonl --table docs/planner.md

The machine is RoundPipe's first one, with more host memory where a model needs it. A step trains on so many sequences
of 1,024 tokens, which each system divides as suits it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from benchmarks.records import Question, Record, arguments, ask_or_write, versions_of
from tierplan.planner.plan import PackPlan, Plan
from tierplan.sim.output.text import format_frac, markdown_table
from tierplan.studies.evaluate import best_plan
from tierplan.studies.study import Point

PART = "eight GPUs"
MACHINE = "roundpipe-8x4090"
MORE = "1.5 TiB"
"""Host memory for models that have no room in the machine's 800 GB."""
QUESTIONS = [
    ("llama-3.1-8b", 64), ("gpt-13b", 16), ("gpt-13b", 64), ("gpt-13b", 128), ("gpt-30b", 16), ("gpt-30b", 64),
    ("gpt-30b", 128), ("qwen3-32b", 64), ("llama-3.3-70b", 64), ("llama-3.3-70b", 256),
]  # fmt: skip
"""Model, and sequences in a step of all GPUs."""
CLIPPED = [("gpt-30b", 64), ("llama-3.3-70b", 64)]
"""The same with gradients clipped by their norm, which no update may come before."""


def answer(model: str, sequences: int, max_grad_norm: float | None) -> Record:
    """What the planner and the quickest system of the same numbers reach."""
    overrides = {"host.capacity": MORE} if "70b" in model else {}
    point = Point(
        model=model,
        machine=MACHINE,
        overrides=overrides,
        sequences=sequences,
        max_grad_norm=max_grad_norm,
    )
    found = best_plan(point).result
    same = ((name, found.same_work_s(p)) for name, p in found.policies.items() if p.same_numbers)
    taken = {name: seconds for name, seconds in same if seconds is not None}
    best = min(taken, key=taken.__getitem__)
    return {
        "step_s": found.step_s,
        "bound_s": found.lower_bound_s,
        "by": way_of(found.plan),
        "states_in_host": states_in_host(found.plan),
        "updated_on_gpus": len(found.plan.packs.updates_here) if isinstance(found.plan, PackPlan) else None,
        "best_system": best,
        "best_system_s": taken[best],
    }


def way_of(plan: Plan) -> str:
    """How GPUs divide the work."""
    if not isinstance(plan, PackPlan):
        return "shards"
    return "stages" if plan.packs.stays else "packs"


def states_in_host(plan: Plan) -> int | None:
    """Units whose optimizer states are there."""
    if not isinstance(plan, PackPlan):
        return None
    return len(plan.packs.host_states) if plan.packs.stays else plan.packs.backward[-1][1]


def questions(_: object) -> Iterator[Question]:
    asked = [(*each, None) for each in QUESTIONS] + [(*each, 1.0) for each in CLIPPED]
    for model, sequences, norm in asked:
        facts = {"model": model, "sequences": sequences, "max_grad_norm": norm}
        yield facts, partial(answer, model, sequences, norm)


def shown(row: Record) -> str:
    theirs = f"{row['best_system']} {row['best_system_s']:.2f} s"
    return f"{row['model']}, {row['sequences']} sequences: {row['step_s']:.2f} s, {theirs}"


def table(rows: list[Record]) -> str:
    head = ("model", "sequences", "clipped", "step, s", "bound, s", "gap", "GPUs have", "units' states in host memory",
            "of these, updated on GPUs", "quickest system", "its step, s", "takes")  # fmt: skip
    lines = markdown_table(
        head,
        [
            (
                row["model"], str(row["sequences"]), "yes" if row["max_grad_norm"] else "", f"{row['step_s']:.2f}",
                f"{row['bound_s']:.2f}", format_frac(1 - row["bound_s"] / row["step_s"]), row["by"],
                str(row["states_in_host"] or ""), str(row["updated_on_gpus"] or ""), row["best_system"],
                f"{row['best_system_s']:.2f}", f"{row['best_system_s'] / row['step_s']:.2f} x",
            )
            for row in rows
        ],
    )  # fmt: skip
    return "\n".join([*lines, "", f"Version {versions_of(rows)}."])


if __name__ == "__main__":
    ask_or_write(arguments(__doc__), PART, questions, shown, table)
