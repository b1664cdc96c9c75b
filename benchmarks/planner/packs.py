"""The planner against Harmony's own search on Harmony's own profiles, at the same memory and the same batch.

    python -m benchmarks.planner.packs                            # prints the table, about two minutes
    python -m benchmarks.planner.packs --page docs/planner.md     # writes it into the page

Profiles and machine are those of `validation/published/harmony.toml`. Harmony tries packs of about equal
compute (`harmony-pp`, `harmony-dp`); the planner searches forms, numbers of packs and their borders. "Alone" is one
step from an idle machine to the end of its last op, as Harmony's estimator counts; the others are steps in a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.records import arguments, replace_part
from tierplan.hwmodels.scaling import with_capacity
from tierplan.planner.lowering import lower
from tierplan.planner.plan import PackPlan, Plan
from tierplan.planner.planning import plan
from tierplan.planner.policies import decide
from tierplan.sim.output.text import markdown_table
from tierplan.sim.pricing import simulate_on
from tierplan.validation.published.reproduce import profiled, published

PART = "packs"
HARMONY = ("harmony-dp", "harmony-pp")
DEVICE_BYTES = 9_000_000_000
"""Of each GPU; what Harmony's published search may use."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What Harmony's search and the planner find for one profile."""

    model: str
    contention: str
    compute_s: float
    policies_s: Mapping[str, float]
    best_policy: str
    harmony_alone_s: float
    plan: Plan
    step_s: float
    alone_s: float


def answer(model: str, contention: str, *, time_limit_s: float, seed: int) -> Answer:
    """On a published profile, and Harmony's machine with the memory that its search may use."""
    table = published("harmony")
    settings = {**table["system"], "model": model, "devices": 4, "search": True, "contention": contention}
    workload, machine, _ = profiled(table, settings)
    machine = with_capacity(machine, {t.name: DEVICE_BYTES for t in machine.tiers if t.kind == "device"})
    result = plan(
        workload, machine, policies=HARMONY, batches="shared", time_limit_s=time_limit_s, seed=seed
    )  # policies that would train four times the batch are left out
    policies = {name: p.step_s for name, p in result.policies.items() if p.step_s is not None}
    best = min(policies, key=lambda name: policies[name])
    chosen = decide(best, workload, machine)
    return Answer(
        model=model,
        contention=contention,
        compute_s=result.lower_bound_s,
        policies_s=policies,
        best_policy=best,
        harmony_alone_s=simulate_on(lower(chosen, workload, machine), machine).duration_s,
        plan=result.plan,
        step_s=result.step_s,
        alone_s=simulate_on(result.schedule, machine).duration_s,
    )


def table(answers: list[Answer]) -> Iterator[str]:
    head = ("profile", "host link", "Harmony's best", "step, s", "alone, s", "planner: step, s", "alone, s",
            "shorter by")  # fmt: skip
    rows = []
    for a in answers:
        theirs = a.policies_s[a.best_policy]
        times = (f"{seconds:.2f}" for seconds in (theirs, a.harmony_alone_s, a.step_s, a.alone_s))
        rows.append((a.model, a.contention, a.best_policy, *times, f"{(1 - a.step_s / theirs) * 100:.1f} %"))
    yield from markdown_table(head, rows)
    for a in answers:
        if isinstance(a.plan, PackPlan):
            packs = a.plan.packs
            sizes = ["-".join(str(end - first) for first, end in runs) for runs in (packs.forward, packs.backward)]
            yield ""
            yield f"{a.model}, {a.contention}: {packs.form}; forward packs of {sizes[0]} units, backward {sizes[1]}."


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--page", type=Path, help="write the table into this page")
    parser.add_argument("--time-limit", type=float, default=20.0, metavar="S", help="of each search (default 20)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    answers = [
        answer(model, contention, time_limit_s=args.time_limit, seed=args.seed)
        for model in ("bert96", "gpt2-10b")
        for contention in ("fixed shares", "max-min")
    ]
    text = "\n".join(table(answers))
    if args.page:
        replace_part(args.page, PART, text)
    print(text)


if __name__ == "__main__":
    main()
