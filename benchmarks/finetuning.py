"""One model on one desktop, fine-tuned in four ways: memory, time, what limits.

    python -m benchmarks.finetuning --page docs/finetuning.md     between its markers, and a picture beside it

The published rows of the page are those of `tierplan reproduce finetuning --write docs/finetuning.md`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.records import arguments, replace_part
from tierplan.hwmodels.names import DEVICE, HOST, NVME
from tierplan.planner.plan_rules import PlanError
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
SEQUENCES = (16,)
PART = "four ways"


HEAD = ("model", "way", "sequences", "GPU, GiB", "host, GiB", "drive, GiB", "step", "tokens/s", "hours", "limited by")


class Found(NamedTuple):
    """A way and its plan; None where nothing fits."""

    model: str
    way: str
    sequences: int
    plan: Any


def found() -> Iterator[Found]:
    """What `tierplan plan` and `advise` say of each way."""
    for model in MODELS:
        for way, settings in WAYS.items():
            for num in SEQUENCES:
                try:
                    plan = best_plan(Point(model=model, machine=MACHINE, sequences=num, **settings)).result
                except PlanError:
                    plan = None
                print(model, way, num, plan, flush=True)
                yield Found(model, way, num, plan)


def row(one: Found) -> tuple[str, ...]:
    head = (one.model, one.way, str(one.sequences))
    if one.plan is None:
        return (*head, "does not fit", *[""] * 5)
    peaks = (f"{one.plan.steady.peak_bytes.get(tier, 0) / 2**30:.1f}" for tier in (DEVICE, HOST, NVME))
    hours = hours_of(one)
    return (*head, *peaks, format_s(one.plan.step_s), f"{1e-3 * TOKENS / hours / 3.6:,.0f}", f"{hours:,.1f}",
            one.plan.limited_by)  # fmt: skip


def hours_of(one: Found) -> float:
    return float(one.plan.step_s * TOKENS / (1024 * one.sequences) / 3600)


def picture(rows: list[Found], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    axes = figure.subplots(2, len(MODELS), sharex="col")
    for column, model in enumerate(MODELS):
        best = {way: [f for f in rows if f.model == model and f.way == way and f.plan] for way in WAYS}
        fits = {way: min(own, key=hours_of) for way, own in best.items() if own}
        above, below = axes[0][column], axes[1][column]
        base = dict.fromkeys(fits, 0.0)
        for tier, colour in ((DEVICE, "tab:green"), (HOST, "tab:blue"), (NVME, "tab:grey")):
            sizes = {way: f.plan.steady.peak_bytes.get(tier, 0) / 2**30 for way, f in fits.items()}
            above.bar(list(sizes), list(sizes.values()), bottom=list(base.values()), color=colour, label=tier)
            base = {way: base[way] + size for way, size in sizes.items()}
        below.bar(list(fits), [hours_of(f) for f in fits.values()], color="tab:orange")
        below.tick_params(axis="x", labelrotation=15)
        for way, f in fits.items():
            below.annotate(f"{hours_of(f):.1f}", (way, hours_of(f)), ha="center", va="bottom", fontsize=8)
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
    table = "\n".join(markdown_table(HEAD, map(row, rows), right=range(2, 9)))
    replace_part(page, PART, f"\n{table}\n")
    picture(rows, page.parent / "figures" / "finetuning-ways.png")


if __name__ == "__main__":
    main()
