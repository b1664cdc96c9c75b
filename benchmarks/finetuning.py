"""One model on one desktop, fine-tuned in four ways: memory, time, what limits.

    python -m benchmarks.finetuning --page docs/finetuning.md     between its markers, and a picture beside it

The published rows of the page are those of `tierplan reproduce finetuning --write docs/finetuning.md`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.records import arguments, replace_part
from tierplan.hwmodels.names import DEVICE, HOST, NVME
from tierplan.planner.plan_rules import PlanError
from tierplan.planner.results import PlanResult
from tierplan.sim.output.text import format_s, markdown_table
from tierplan.studies.evaluate import best_plan
from tierplan.studies.study import Point

MACHINE = "desktop-4090"
MODELS = ("llama-3.1-8b", "llama-3.3-70b")
LORA = {"lora": "r=16,targets=all-linear"}
WAYS: Mapping[str, dict[str, Any]] = {
    "full": {},
    "8-bit states": {"optimizer": "adamw:states=8bit"},
    "LoRA": LORA,
    "QLoRA": {**LORA, "base": "nf4-double"},
}
TOKENS = 10e6
SEQUENCES, LENGTH = 16, 1024
PART = "four ways"
HEAD = ("model", "way", "sequences", "GPU, GiB", "host, GiB", "drive, GiB", "step", "tokens/s", "hours", "limited by")
TIERS = {DEVICE: "tab:green", HOST: "tab:blue", NVME: "tab:grey"}


def found() -> Iterator[tuple[str, str, PlanResult | None]]:
    """What `tierplan plan` and `advise` say of each way; None where nothing fits."""
    for model in MODELS:
        for way, settings in WAYS.items():
            try:
                plan = best_plan(Point(model=model, machine=MACHINE, sequences=SEQUENCES, **settings)).result
            except PlanError:
                plan = None
            print(model, way, plan, flush=True)
            yield model, way, plan


def row(model: str, way: str, plan: PlanResult | None) -> tuple[str, ...]:
    if plan is None:
        return (model, way, str(SEQUENCES), "does not fit", *[""] * 6)
    peaks = (f"{gib:.1f}" for gib in held_gib(plan))
    speed = (f"{SEQUENCES * LENGTH / plan.step_s:,.0f}", f"{hours_of(plan):,.1f}")
    return (model, way, str(SEQUENCES), *peaks, format_s(plan.step_s), *speed, plan.limited_by)


def held_gib(plan: PlanResult) -> list[float]:
    return [plan.steady.peak_bytes.get(tier, 0) / 2**30 for tier in TIERS]


def hours_of(plan: PlanResult) -> float:
    return plan.step_s * TOKENS / (LENGTH * SEQUENCES) / 3600


def picture(rows: list[tuple[str, str, PlanResult | None]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots(2, len(MODELS), sharex="col")
    for (above, below), model in zip(axes.T, MODELS, strict=True):
        fits = {way: plan for of, way, plan in rows if of == model and plan}
        base = [0.0] * len(fits)
        for k, (tier, colour) in enumerate(TIERS.items()):
            sizes = [held_gib(plan)[k] for plan in fits.values()]
            above.bar(list(fits), sizes, bottom=base, color=colour, label=tier)
            base = [a + b for a, b in zip(base, sizes, strict=True)]
        bars = below.bar(list(fits), [hours_of(plan) for plan in fits.values()], color="tab:orange")
        below.bar_label(bars, fmt="%.1f", fontsize=8)
        below.tick_params(axis="x", labelrotation=15)
        below.margins(y=0.2)
        above.set_title(model)
    axes[0][0].set_ylabel("most held, GiB")
    axes[1][0].set_ylabel(f"hours for {TOKENS / 1e6:.0f} M tokens")
    axes[0][-1].legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--page", type=Path, required=True)
    page = parser.parse_args().page
    rows = list(found())
    table = "\n".join(markdown_table(HEAD, [row(*one) for one in rows], right=range(2, 9)))
    replace_part(page, PART, f"\n{table}\n")
    picture(rows, page.parent / "figures" / "finetuning-ways.png")


if __name__ == "__main__":
    main()
