"""13B on the Fuyou machine with 1 to 12 drives: the planner beside Fuyou, and why it differs.

    python -m benchmarks.planner.drives benchmarks/results/drives.jsonl                        # runs what it lacks
    python -m benchmarks.planner.drives benchmarks/results/drives.jsonl --table docs/planner_grid.md

Machine and batch are those of Fuyou's published runs (`validation/published/fuyou.toml`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from benchmarks.records import Question, Record, arguments, ask_or_write, versions_of
from tierplan.hwmodels import load_machine
from tierplan.planner.lowering import lower
from tierplan.planner.plan import UnitwisePlan
from tierplan.planner.planning import plan
from tierplan.planner.policies import decide
from tierplan.sim.output.text import format_frac, markdown_table
from tierplan.sim.schedule import Schedule
from tierplan.sim.workloads.models import load_workload
from tierplan.sim.workloads.workload import Training, Workload
from tierplan.validation.published.reproduce import published

PART = "drives"
DRIVES: Mapping[str, tuple[int, ...]] = {"768 GB": (1, 2, 3, 4, 6, 8, 10, 12), "128 GB": (1, 3, 6, 12)}
"""By host memory: that of the machine, which holds all states of this model, and one that does not."""
BATCH = 32
GB = 1e9
TIME_LIMIT_S = 10.0


def answer(drives: int, host: str, *, time_limit_s: float = TIME_LIMIT_S) -> dict[str, Any]:
    """What the planner and Fuyou reach with so many drives, and what each moves."""
    machine = load_machine("fuyou-4090", [f"nvme.drives={drives}", f"host.capacity={host}"])
    workload = load_workload("gpt-13b", Training(per_device_train_batch_size=BATCH, dtype="fp16"))
    result = plan(workload, machine, time_limit_s=time_limit_s)
    assert isinstance(result.plan, UnitwisePlan), "one device has plans of units"
    fuyou = lower(decide("fuyou", workload, machine), workload, machine)
    return {
        "drives": drives,
        "host": host,
        "step_s": result.step_s,
        "fuyou_s": result.policies["fuyou"].step_s,
        "bound_s": result.lower_bound_s,
        "bound_by": dict(result.bound_shares),
        "decided_by": result.plan.policy,
        "order": result.plan.order,
        "sub_batches": result.plan.sub_batches,
        "drive_gb": drive_gb(result.schedule),
        "fuyou_drive_gb": drive_gb(fuyou),
        "states_on_drives": share_of_states(result.plan, workload),
        "recompute": recomputed(result.schedule),
        "late": sum(unit.late_update for unit in result.plan.units) / len(workload.units),
    }


def drive_gb(schedule: Schedule) -> float:
    """GB that the drives read and write in a step."""
    return sum(op.work.get("bytes", 0.0) for op in schedule.ops if op.stream.startswith("nvme.")) / GB


def share_of_states(chosen: UnitwisePlan, workload: Workload) -> float:
    """Part of the optimizer states that lives on the drives."""
    on_drives = sum(u.num_parameters for u, c in zip(workload.units, chosen.units, strict=True) if c.states == "nvme")
    return on_drives / workload.num_parameters


def recomputed(schedule: Schedule) -> float:
    """Part of forward's FLOPs that is done again."""

    def flops(work: Mapping[str, float]) -> float:
        return sum(amount for kind, amount in work.items() if kind.endswith("flops"))

    again = sum(flops(op.work) for op in schedule.ops if op.kind == "recompute")
    return again / sum(flops(op.work) for op in schedule.ops if op.kind == "forward")


def measured_s(drives: int) -> float | None:
    """Fuyou's published step time for this number of drives, if there is one."""
    for result in published("fuyou")["result"]:
        if result.get("model") == "gpt-13b" and result["quantity"] == "step_s" and result["role"] != "variant":
            for row in result["rows"]:
                if row["drives"] == drives and row.get("batch") == BATCH:
                    return float(row["value"])
    return None


def table(records: list[Record]) -> str:
    records = sorted(records, key=lambda r: (list(DRIVES).index(r["host"]), r["drives"]))
    slower = [r for r in records if r["step_s"] > r["fuyou_s"] * (1 + 1e-9)]
    lines = [
        f"gpt-13b, {BATCH} sequences of 1,024 tokens, RTX 4090. Slower than Fuyou with {len(slower)} of "
        f"{len(records)} machines; version {versions_of(records)}. Drive GB: read and written in a step. "
        "States: part of the optimizer states that lives on drives (all of them in Fuyou). "
        "Again: part of forward that is recomputed. Late: part of the units whose update runs beside the next forward.",
        "",
    ]
    head = (
        "host", "drives", "Fuyou published, s", "Fuyou, s", "planner, s", "x", "bound", "bound by", "drive GB, Fuyou",
        "drive GB", "states", "again", "late",
    )  # fmt: skip
    rows = []
    for r in records:
        published_s = measured_s(r["drives"]) if r["host"] == "768 GB" else None
        times = (r["fuyou_s"], r["step_s"])
        rows.append(
            (
                r["host"], str(r["drives"]), "" if published_s is None else f"{published_s:.1f}",
                *(f"{step_s:.1f}" for step_s in times), f"{times[0] / times[1]:.2f}", f"{r['bound_s']:.1f}",
                next(iter(r["bound_by"]), ""), *(f"{r[name]:.0f}" for name in ("fuyou_drive_gb", "drive_gb")),
                *(format_frac(r[name]) for name in ("states_on_drives", "recompute", "late")),
            )
        )  # fmt: skip
    lines += markdown_table(head, rows, right=[i for i in range(1, len(head)) if head[i] != "bound by"])
    return "\n".join(lines)


def questions(_: object) -> Iterator[Question]:
    for host, numbers in DRIVES.items():
        for drives in numbers:
            yield {"drives": drives, "host": host}, partial(answer, drives, host)


if __name__ == "__main__":
    shown = "{host}, {drives} drives: {step_s:.2f} s, Fuyou {fuyou_s:.2f} s".format_map
    ask_or_write(arguments(__doc__), PART, questions, shown, table)
