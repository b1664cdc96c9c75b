"""The planner against Harmony's own search on Harmony's own profiles, at the same memory and the same batch.

    python -m benchmarks.planner.packs                            # prints the table, about two minutes
    python -m benchmarks.planner.packs --page docs/planner.md     # writes it into the page

Profiles and machine are those of `validation/published/harmony.toml`. Harmony tries packs of about equal
compute (`harmony-pp`, `harmony-dp`); the planner searches forms, numbers of packs and their borders. "Alone" is one
step from an idle machine to the end of its last op, as Harmony's estimator counts; the others are steps in a row.
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.records import arguments, replace_part
from tierplan.hwmodels.scaling import with_capacity
from tierplan.planner.lowering import lower
from tierplan.planner.plan import PackPlan
from tierplan.planner.planning import plan
from tierplan.planner.policies import decide
from tierplan.planner.results import PlanResult
from tierplan.sim.output.text import markdown_table
from tierplan.sim.pricing import simulate_on
from tierplan.validation.published.reproduce import profiled, published

PART = "packs"
HARMONY = ("harmony-dp", "harmony-pp")
DEVICE_BYTES = 9_000_000_000
"""Of each GPU; what Harmony's published search may use."""


def answer(model: str, contention: str, *, time_limit_s: float, seed: int) -> tuple[PlanResult, str, list[float]]:
    """What is found for a published profile on Harmony's machine, with the memory that its search may use: by the
    planner, the best of Harmony's policies, and seconds alone of that and of the plan."""
    table = published("harmony")
    settings = {**table["system"], "model": model, "devices": 4, "search": True, "contention": contention}
    workload, machine, _ = profiled(table, settings)
    machine = with_capacity(machine, {t.name: DEVICE_BYTES for t in machine.tiers if t.kind == "device"})
    result = plan(
        workload, machine, policies=HARMONY, batches="shared", time_limit_s=time_limit_s, seed=seed
    )  # policies that would train four times the batch are left out
    _, best = min((p.step_s, name) for name, p in result.policies.items() if p.step_s is not None)
    schedules = (lower(decide(best, workload, machine), workload, machine), result.schedule)
    return result, best, [simulate_on(schedule, machine).duration_s for schedule in schedules]


def shown(profile: tuple[str, str], result: PlanResult, best: str, alone_s: list[float]) -> tuple[tuple[str, ...], str]:
    """An answer as a row, and the planner's packs in words."""
    theirs_s = result.policies[best].step_s
    assert theirs_s is not None
    times = (f"{seconds:.2f}" for seconds in (theirs_s, alone_s[0], result.step_s, alone_s[1]))
    row = (*profile, best, *times, f"{(1 - result.step_s / theirs_s) * 100:.1f} %")
    if not isinstance(result.plan, PackPlan):
        return row, ""
    packs = result.plan.packs
    sizes = ["-".join(str(end - first) for first, end in runs) for runs in (packs.forward, packs.backward)]
    return row, f"{', '.join(profile)}: {packs.form}; forward packs of {sizes[0]} units, backward {sizes[1]}."


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--page", type=Path, help="write the table into this page")
    parser.add_argument("--time-limit", type=float, default=20.0, metavar="S", help="of each search (default 20)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    answers = [
        shown((model, contention), *answer(model, contention, time_limit_s=args.time_limit, seed=args.seed))
        for model in ("bert96", "gpt2-10b")
        for contention in ("fixed shares", "max-min")
    ]
    head = ("profile", "host link", "Harmony's best", "step, s", "alone, s", "planner: step, s", "alone, s",
            "shorter by")  # fmt: skip
    lines = markdown_table(head, [row for row, _ in answers])
    text = "\n".join([*lines, *(line for _, packs in answers if packs for line in ("", packs))])
    if args.page:
        replace_part(args.page, PART, text)
    print(text)


if __name__ == "__main__":
    main()
